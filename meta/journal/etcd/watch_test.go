package etcd

import (
	"context"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// endless is a watcher whose watches end one after the other, as etcd ends a watch at a revision
// that was compacted away.
type endless struct {
	clientv3.Watcher
	begun chan chan clientv3.WatchResponse
}

func (w endless) Watch(context.Context, string, ...clientv3.OpOption) clientv3.WatchChan {
	ch := make(chan clientv3.WatchResponse, 1)
	w.begun <- ch
	return ch
}

// TestHintsBeginAnew: after a watch that ended with a compaction, another watch begins, with a
// hint, since an event may have been missed; the hints of the next watch come, too.
func TestHintsBeginAnew(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	w := endless{begun: make(chan chan clientv3.WatchResponse, 1)}
	hint := watchHint(ctx, &clientv3.Client{Watcher: w}, "a", "b")
	receive := func(what string) {
		t.Helper()
		select {
		case _, ok := <-hint:
			if !ok {
				t.Fatalf("%s: no more hints", what)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%s: no hint", what)
		}
	}
	for range 2 {
		ch := <-w.begun
		ch <- clientv3.WatchResponse{}
		receive("a change")
		ch <- clientv3.WatchResponse{Canceled: true, CompactRevision: 7}
		receive("the watch ends")
		close(ch)
		receive("another began")
	}
	cancel()
	for range hint { // the watch is closed
	}
}
