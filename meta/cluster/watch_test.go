package cluster

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// compacted is a watcher whose first watches end as etcd ends a watch at a compacted
// revision.
type compacted struct {
	clientv3.Watcher
	first atomic.Int64 // so many
	later atomic.Int64 // watches begun later
}

func (w *compacted) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	if w.first.Add(-1) < 0 {
		w.later.Add(1)
		return w.Watcher.Watch(ctx, key, opts...)
	}
	ch := make(chan clientv3.WatchResponse, 1)
	ch <- clientv3.WatchResponse{Canceled: true, CompactRevision: 7}
	close(ch)
	return ch
}

// TestWatchesBeginAnew: after a compaction ended a watch, another watch begins, so that
// views follow changes at once.
func TestWatchesBeginAnew(t *testing.T) {
	t.Parallel()
	cli := *client(t)
	w := &compacted{Watcher: cli.Watcher}
	w.first.Store(int64(2 * len(viewParts)))
	cli.Watcher = w
	c := join(t, &cli)
	for end := time.Now().Add(time.Minute); w.later.Load() < int64(len(viewParts)); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d watches began anew", w.later.Load(), len(viewParts))
		}
	}
	changed := c.Changed()
	if _, err := c.CreateVolume(t.Context(), "v", meta.Policy{}, 0); err != nil {
		t.Fatal(err)
	}
	select {
	case <-changed:
	case <-time.After(time.Minute):
		t.Fatal("no view")
	}
}
