package fuse

import (
	"bytes"
	"os"
	"syscall"
	"testing"
	"time"
)

// A request keeps its buffer only if the request is large and few requests keep buffers.
func TestBuffersAreGivenBack(t *testing.T) {
	c, _, _ := newDirect()
	c.busy = make(map[*slot]bool)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	c.fd = int(r.Fd())
	read := func(size int) *slot {
		t.Helper()
		want := bytes.Repeat([]byte{byte(size), byte(size >> 8), 7}, size)[:size]
		if _, err := syscall.Write(int(w.Fd()), want); err != nil {
			t.Fatal(err)
		}
		s, n, err := c.next()
		if err != nil || n != size || !bytes.Equal(s.in[:n], want) {
			t.Fatalf("%d of %d bytes, %v", n, size, err)
		}
		return s
	}
	var taken []*slot
	for _, step := range []struct{ size, inUse int }{{smallIn, 0}, {smallIn + 1, 1}, {50 << 10, 2}, {100, 2}} {
		taken = append(taken, read(step.size))
		if c.inUse != step.inUse {
			t.Errorf("after a request of %d bytes %d buffers are in use, not %d", step.size, c.inUse, step.inUse)
		}
	}
	for range 2 * manyBuffers {
		taken = append(taken, read(8<<10))
	}
	if c.inUse != manyBuffers {
		t.Errorf("%d requests keep %d buffers, not %d", len(taken), c.inUse, manyBuffers)
	}
	for _, s := range taken {
		c.put(s)
	}
	if c.inUse != 0 || len(c.busy) != 0 || len(c.buffers) > maxFree || len(c.free) > maxFree {
		t.Errorf("%d buffers and %d slots are in use, %d and %d are kept", c.inUse, len(c.busy), len(c.buffers), len(c.free))
	}
}

// A signal to an invisible caller, for example in another pod, does not end the caller's request
// at once, and not never.
func TestGivesUp(t *testing.T) {
	for _, c := range []struct {
		pid    uint32
		since  time.Duration
		killed bool
		want   bool
	}{
		{7, watchEvery, false, false},
		{7, time.Hour, false, false},
		{7, watchEvery, true, true},
		{0, watchEvery, true, false}, // process 0 does not exist
		{0, unknownWaits - watchEvery, true, false},
		{0, unknownWaits, false, true},
	} {
		if got := givesUp(c.pid, c.since, func(uint32) bool { return c.killed }); got != c.want {
			t.Errorf("process %d, %v after the signal, killed %v: %v", c.pid, c.since, c.killed, got)
		}
	}
	if !killed(0) {
		t.Error("process 0 can be looked at: then nothing of this is needed")
	}
}
