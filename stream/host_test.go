package stream

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestForgetIdle: a host forgets the streams for which nobody has looked for a time, unless the
// process leads something in the stream, or is about to. A forgotten stream opens nothing.
func TestForgetIdle(t *testing.T) {
	made := func(used time.Duration) *Stream {
		s := &Stream{used: time.Now().Add(-used)}
		s.shape.Store(&shape{spec: Spec{Partitions: 1}, slots: []*slot{{}}})
		return s
	}
	idle, looked, opening, group := made(time.Hour), made(0), made(time.Hour), made(time.Hour)
	opening.slots()[0].mu.Lock() // as during the opening of a partition
	group.groups = map[string]*committed{"g": {}}
	h := &Host{open: map[streamID]*Stream{{1, 1}: idle, {1, 2}: looked, {1, 3}: opening, {1, 4}: group}}
	h.forgetIdle(time.Minute)
	if len(h.open) != 3 || h.open[streamID{1, 1}] != nil {
		t.Errorf("the host has %d streams, and the idle one: %v", len(h.open), h.open[streamID{1, 1}] != nil)
	}
	if _, err := idle.Partition(t.Context(), 0); !errors.Is(err, meta.Unavailable) {
		t.Errorf("a forgotten stream opens a partition: %v", err)
	}
	if s, err := h.known(streamID{1, 2}, "/v/t"); s != looked || err != nil {
		t.Errorf("a stream in use is %v, %v", s, err)
	}
	opening.slots()[0].mu.Unlock()
	h.forgetIdle(time.Minute)
	if h.open[streamID{1, 3}] != nil {
		t.Error("the host does not forget a stream when its opening has ended")
	}
	looked.used = time.Now().Add(-time.Hour)
	if _, err := h.known(streamID{1, 2}, "/v/t"); err != nil {
		t.Fatal(err)
	}
	if h.forgetIdle(time.Minute); h.open[streamID{1, 2}] == nil {
		t.Error("the host forgets a stream just after a look-up")
	}
}
