package server

import "time"

// never is a channel that is never closed: the wait ends by other means.
var never = make(chan struct{})

// soon returns a channel closed after leasePoll.
func soon() <-chan struct{} {
	ch := make(chan struct{})
	time.AfterFunc(leasePoll, func() { close(ch) })
	return ch
}
