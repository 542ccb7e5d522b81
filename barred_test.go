package penstock

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// barrier takes exclusive leases back, as an owner does for a snapshot.
func (w *world) barrier(t *testing.T, v *Volume, inos []meta.Ino) {
	t.Helper()
	s := v.c.sess.(*fakeSession)
	for _, ino := range inos {
		done := make(chan bool, 1)
		v.c.RecallWithin(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseShared, Within: time.Second}, func(held bool) { done <- held })
		if <-done {
			t.Fatal("it holds on to its lease")
		}
		w.mu.Lock()
		w.leases[ino][s] = min(w.leases[ino][s], meta.LeaseShared)
		w.mu.Unlock()
	}
	synctest.Wait() // clients that have answered have also noted the answer
}

// TestWritersGoOnTogether: after a barrier, writers of many files get their leases back
// with one request. A reader of one of the files is not disturbed before somebody writes
// to the file, and files without a write since are not requested again.
func TestWritersGoOnTogether(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		var asked []*meta.Open // for exclusive leases or none
		w.before = func(op meta.Op) {
			if o, ok := op.(*meta.Open); ok {
				w.mu.Lock()
				asked = append(asked, o)
				w.mu.Unlock()
			}
		}
		var inos []meta.Ino
		for i := range 40 {
			inos = append(inos, create(t, v, fmt.Sprint("f", i)))
		}
		const written = 30
		round := func(inos []meta.Ino, with byte) {
			t.Helper()
			for _, ino := range inos {
				write(t, v, ino, bytes.Repeat([]byte{with}, 6000), 0)
			}
		}
		sorted := func(l []meta.Ino) []meta.Ino { return slices.Sorted(slices.Values(l)) }
		round(inos[:written], 'a')
		w.barrier(t, v, inos)
		if asked != nil {
			t.Fatalf("asked for %+v before anybody wrote", asked)
		}
		round(inos[:written], 'b')
		if len(asked) != 1 || !slices.Equal(sorted(append(asked[0].Also, asked[0].Ino)), inos[:written]) {
			t.Fatalf("%d requests for the leases of %d files: %+v", len(asked), written, asked)
		}

		// Only some files are written before the next barrier, and another client reads
		// one of them.
		asked = nil
		w.barrier(t, v, inos)
		round(inos[:1], 'c') // gets the leases of all files
		w.barrier(t, v, inos)
		round(inos[:5], 'd') // the first file's lease comes alone, the others are requested singly
		if len(asked) != 6 || len(asked[1].Also) != 0 {
			t.Fatalf("%d requests: %+v", len(asked), asked)
		}
		asked = nil
		w.barrier(t, v, inos)
		other := w.client(Config{})
		u, err := other.Volume(t.Context(), "root")
		if err != nil {
			t.Fatal(err)
		}
		if got := contents(t, u, inos[3]); !bytes.Equal(got, bytes.Repeat([]byte{'d'}, 6000)) {
			t.Fatalf("DATA: %d bytes are read by another", len(got))
		}
		asked = nil
		round(inos[:3], 'e')
		if len(asked) != 1 || len(asked[0].Also) != 4 || other.Stats().Recalls != 0 {
			t.Fatalf("%d requests, and %d recalls of who reads: %+v", len(asked), other.Stats().Recalls, asked)
		}
		round(inos[3:5], 'e')
		if len(asked) != 2 || asked[1].Ino != inos[3] || other.Stats().Recalls != 1 {
			t.Fatalf("%d requests, and %d recalls of who reads: %+v", len(asked), other.Stats().Recalls, asked)
		}
		for i, ino := range inos[:written] {
			want := byte('b')
			if i < 5 {
				want = 'e'
			}
			if got := contents(t, u, ino); !bytes.Equal(got, bytes.Repeat([]byte{want}, 6000)) {
				t.Errorf("DATA: file %d has %d bytes that begin with %q", i, len(got), got[:min(len(got), 4)])
			}
		}
		if err := other.Close(t.Context()); err != nil {
			t.Error(err)
		}
		s := other.sess.(*fakeSession)
		close(s.events)
		<-s.done
	})
}
