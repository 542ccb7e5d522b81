package replica

import (
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// history is a chunk as its writer, its disks and chance made the chunk, with the true contents.
type history struct {
	l        []*disk
	acked    uint64 // all replicas said so
	promised uint64 // a sync returned
}

// play makes a history from numbers: appends that reach some replicas, syncs, losses of power.
// The writer stops at the first failure, as a writer must.
func play(r *rand.Rand) history {
	h := history{l: disks(nil, 3)}
	text := "The quick brown fox jumps over the lazy dog, again and again and again."
	w := NewWriter(3, uint64(len(text)))
	for range r.IntN(30) {
		n := 1 + r.Uint64N(5)
		switch op := r.IntN(10); {
		case op < 6:
			off, err := w.Append(n)
			if err != nil {
				continue
			}
			for i, d := range h.l {
				if r.IntN(12) == 0 {
					w.Fail(i, meta.Unavailable)
				} else if err := d.append(w1, int(off), text[off:off+n]); err != nil {
					w.Fail(i, err)
				} else if w.Err() == nil {
					w.AckedTo(i, off+n)
				}
			}
		case op < 8:
			upTo := w.Length()
			for i, d := range h.l {
				if !w.Ask(i, upTo) || upTo == 0 {
					continue
				}
				mark, err := d.sync(int(upTo))
				if err != nil {
					w.Fail(i, err)
				} else {
					w.SyncedTo(i, upTo, mark)
				}
			}
		case op == 8:
			d := h.l[r.IntN(3)]
			keep := d.mark + r.Uint64N(d.Length-d.mark+1)
			back := keep + r.Uint64N(d.Length-keep+1)
			d.power(int(keep), int(back))
		}
		h.acked, h.promised = max(h.acked, w.Acked()), max(h.promised, w.Synced())
	}
	return h
}

// FuzzSeal: whatever the history, whichever replicas answer, however often an owner tries before
// success, a seal keeps the promised bytes, keeps acknowledged bytes as far as an answer has the
// bytes, names only replicas with exactly the seal's content, and another owner that seals after
// a crash comes to the same content.
func FuzzSeal(f *testing.F) {
	for seed := range uint64(400) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 5))
		h := play(r)
		c := Case{Servers: ids(h.l...), Committed: r.Uint64N(h.promised + 1), OpenEnded: r.IntN(2) == 0}
		if r.IntN(3) == 0 {
			c.Asked, c.Need = true, h.acked
		}
		for try := 1; try < 6; try++ {
			asked := slices.Clone(h.l)
			best, answered := uint64(0), 0
			for i, d := range asked {
				if r.IntN(3) == 0 && try < 5 {
					asked[i] = nil
				} else {
					best, answered = max(best, d.Length), answered+1
				}
			}
			d := seal(c, fence(1, try), asked...)
			switch d.Verdict {
			case Wait:
				if answered == 3 {
					t.Fatalf("all answered, and it waits: %+v", d)
				}
				continue
			case Take:
			default:
				t.Fatalf("%v: %+v", d.Verdict, d)
			}
			if d.Length < h.promised || d.Length < min(best, h.acked) || d.Length < c.Committed {
				t.Fatalf("sealed at %d, %d were promised, %d acknowledged, the longest answer has %d", d.Length, h.promised, h.acked, best)
			}
			if r.IntN(4) == 0 {
				// The owner ends before journaling the seal; power goes meanwhile.
				x := h.l[r.IntN(3)]
				x.power(int(x.mark), int(x.mark))
				continue
			}
			for _, x := range h.l {
				if slices.Contains(d.Servers, x.id) {
					x.power(int(x.mark), int(x.mark))
					if err := x.end(fence(1, try), d.Length); err != nil {
						t.Fatalf("server %d can't be sealed at %d: %v", x.id, d.Length, err)
					}
					if x.CRC != d.CRC {
						t.Fatalf("server %d has checksum %08x, not %08x", x.id, x.CRC, d.CRC)
					}
				}
			}
			if len(d.Servers)+len(d.Discard)+len(d.Away) != 3 {
				t.Fatalf("not every replica is accounted for: %+v", d)
			}
			return
		}
	})
}

// FuzzReplica drives a replica with orders from numbers: the invariants hold after each order, a
// sealed replica never changes its content, a fence never goes back.
func FuzzReplica(f *testing.F) {
	for seed := range uint64(100) {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, seed uint64) {
		r := rand.New(rand.NewPCG(seed, 6))
		d, other := disks(nil, 2)[0], disks(nil, 2)[1]
		_ = other.append(w1, 0, "another")
		_ = other.end(s1, 7)
		for range 60 {
			was, data := d.Replica, string(d.data)
			g := fence(1+r.IntN(2), r.IntN(4))
			deleted := false
			switch r.IntN(8) {
			case 0, 1, 2:
				_ = d.append(g, r.IntN(len(d.data)+2), "some bytes"[:1+r.IntN(9)])
			case 3:
				n, err := d.sync(r.IntN(len(d.data) + 2))
				if err == nil && n > d.Synced {
					t.Fatalf("answers %d, synced %d", n, d.Synced)
				}
			case 4:
				if a := d.freeze(g, r.IntN(9)); a.Reach == Answered && d.State == Open && d.Synced != d.Length && !d.Damaged {
					t.Fatalf("told %d, durable %d", a.Length, d.Synced)
				}
			case 5:
				_ = d.end(g, r.Uint64N(uint64(len(d.data))+2))
			case 6:
				deleted = d.delete(g) == nil
			case 7:
				deleted = d.pull(g, other) == nil && was.Fence.Less(g) // or replaced, by a caller that knows better
			}
			if err := d.Check(); err != nil {
				t.Fatal(err)
			}
			if d.Fence.Less(was.Fence) {
				t.Fatalf("fence %v after %v", d.Fence, was.Fence)
			}
			if was.State == Sealed && !deleted && string(d.data) != data {
				t.Fatalf("sealed %q, now %q", data, d.data)
			}
			if uint64(len(d.data)) != d.Length || was.State == Sealed && !deleted && d.Length < was.Length && d.State != Sealed {
				t.Fatalf("%d bytes, length %d, was %d", len(d.data), d.Length, was.Length)
			}
		}
	})
}
