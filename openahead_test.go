package penstock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// listed returns a client that has listed a directory of small files made by another
// client.
func listed(t *testing.T, files int, cfg Config) (w *world, c *Client, v *Volume, inos []meta.Ino) {
	t.Helper()
	w = newWorld(t, meta.Policy{Replicas: 1, NoAtime: true})
	a, va := open(t, w, Config{FlushEvery: time.Hour})
	e, err := va.Create(t.Context(), &Call{}, meta.Create{Parent: meta.RootIno, Name: "d", Mode: meta.TypeDir | 0o755})
	if err != nil {
		t.Fatal(err)
	}
	for i := range files {
		info, err := va.CreateOpen(t.Context(), &Call{}, meta.Create{Parent: e.Attr.Ino, Name: fmt.Sprint("f", i), Mode: 0o644}, rdwr)
		if err != nil {
			t.Fatal(err)
		}
		ino := info.Entry.Attr.Ino
		write(t, va, ino, []byte("sample"), 0)
		va.Release(t.Context(), ino, rdwr)
		inos = append(inos, ino)
	}
	if err := a.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	c, v = open(t, w, cfg)
	for at := (DirCursor{}); ; {
		_, eof, err := v.ReadDir(t.Context(), e.Attr.Ino, &at, 0, true)
		if err != nil {
			t.Fatal(err)
		}
		if eof {
			return w, c, v, inos
		}
	}
}

// TestOpenAhead: each file of a listed directory is opened and read once, in random
// order, as in an epoch of training. The epoch costs a request for some dozens of files,
// and so does the next epoch in another order.
func TestOpenAhead(t *testing.T) {
	const files = 4096
	w, c, v, inos := listed(t, files, Config{})
	for epoch := range uint64(2) {
		rand.New(rand.NewPCG(1, epoch)).Shuffle(files, func(i, j int) { inos[i], inos[j] = inos[j], inos[i] })
		before := c.Stats().RPCs
		for _, ino := range inos {
			if _, err := v.Open(t.Context(), &Call{}, ino, 0); err != nil {
				t.Fatal(err)
			}
			if got := string(contents(t, v, ino)); got != "sample" {
				t.Fatalf("%q", got)
			}
			v.Release(t.Context(), ino, 0)
		}
		n := c.Stats().RPCs - before
		t.Logf("epoch %d: %d opens took %d requests", epoch, files, n)
		if n > files/8 {
			t.Errorf("epoch %d: %d opens took %d requests", epoch, files, n)
		}
	}
	w.check()
}

// TestOpenAheadInVain: opening ahead stops while its results are not used, and is tried
// again after a while.
func TestOpenAheadInVain(t *testing.T) {
	o := &openAhead{misses: aheadAfter}
	may := func() bool { return o.mayAhead(aheadMost) }
	o.asked.Add(2 * aheadTrial)
	if !may() {
		t.Error("what waits is taken for unused")
	}
	o.used.Add(aheadTrial / 8)
	o.unused.Add(aheadTrial)
	if may() {
		t.Error("it goes on though nothing is used")
	}
	o.misses = aheadAgain
	if !may() {
		t.Error("it is never tried again")
	}
	o.asked.Add(aheadMost)
	if may() {
		t.Error("what waits has no bound")
	}
}
