package wire

import (
	"net"
	"testing"
	"time"
)

// FlushSoon does not wait, and everything enqueued earlier is sent, however the sending
// goroutines meet.
func TestFlushSoon(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	far.SetDeadline(time.Now().Add(time.Minute))
	s := NewSender(near, Version, nil)
	rd := NewReader(far)
	next := uint64(1)
	for round := range 300 {
		n := round%7 + 1
		for i := range n {
			if err := s.Enqueue(next+uint64(i), &KeepAlive{}); err != nil {
				t.Fatal(err)
			}
			s.FlushSoon() // nobody reads yet
		}
		for range n {
			_, id, _, err := rd.Next()
			if err != nil || id != next {
				t.Fatalf("frame %d, %v, not %d", id, err, next)
			}
			next++
		}
	}
}
