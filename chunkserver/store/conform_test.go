package store

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// twin is the pure machine of a chunk beside the store, with the bytes that the store must have.
type twin struct {
	replica.Replica
	data  []byte
	whole bool // begun by this process
	// unsure: since a restart the store may report durable bytes as promised; the store may
	// forget no promised byte.
	unsure bool
	fence  meta.Fence // durable
}

// told takes over the store's mark.
func (w *twin) told(mark uint64) error {
	if mark < w.Promised || mark > w.Synced || mark != w.Promised && !w.unsure {
		return fmt.Errorf("the store tells the mark %d, the machine %d of %d, unsure %v", mark, w.Promised, w.Synced, w.unsure)
	}
	w.Promised = mark
	return nil
}

// pair drives a store and the machines with the same orders.
type pair struct {
	r    *rand.Rand
	d    *memDisk
	s    *Store
	twin map[uint64]*twin
	n    int // orders carried out by both
}

// same compares the answers of both; kinds are the protocol, texts are for people.
func same(op string, store, machine error) error {
	if a, b := meta.KindOf(store), meta.KindOf(machine); a != b {
		return fmt.Errorf("%s: the store says %v (%v), the machine %v (%v)", op, a, store, b, machine)
	}
	return nil
}

func (p *pair) step() error {
	r := p.r
	n := uint64(1 + r.IntN(6))
	id, w := testID(n), p.twin[n]
	if w == nil {
		w = &twin{}
		p.twin[n] = w
	}
	f := meta.Fence{Term: meta.Term(1 + r.IntN(2)), Seals: uint32(r.IntN(3))}
	if r.IntN(3) > 0 {
		f = w.Fence // else nearly everything is refused
	}
	p.n++
	switch op := r.IntN(20); {
	case op < 9:
		off, size := w.Length, 1+r.IntN([]int{10, 3000, 70_000}[r.IntN(3)])
		if r.IntN(5) == 0 {
			off = r.Uint64N(w.Length + 10) // repeated, overlapping or with a gap
		}
		b := pattern(size, byte(r.IntN(256)))
		if end := off + uint64(size); end <= uint64(len(w.data)) && r.IntN(2) == 0 {
			copy(b, w.data[off:end])
		}
		do, err := w.Append(f, off, uint64(size))
		switch {
		case err != nil:
		case do == replica.Compare:
			if !bytes.Equal(b, w.data[off:off+uint64(size)]) {
				err = w.Differs(off)
			}
		default:
			w.Appended(f, uint64(size))
			w.data = append(w.data, b...)
			w.whole = w.whole || off == 0
		}
		return same("append", p.s.Append(ctx, id, f, off, b, chunkserver.CRC(b)), err)
	case op < 12:
		upTo := r.Uint64N(w.Length + 2)
		do, err := w.Sync(upTo)
		if err == nil && do == replica.Write {
			w.SyncedTo(w.Length)
			w.fence = w.Fence
		}
		got, serr := p.s.Sync(ctx, id, upTo)
		if e := same("sync", serr, err); e != nil || err != nil {
			return e
		}
		w.Promise(upTo)
		return w.told(got)
	case op < 14:
		at := r.Uint64N(w.Length + 2)
		do, err := w.Freeze(f)
		if err == nil && do == replica.Write {
			w.Frozen(f)
			w.fence = f
		}
		if err == nil && w.State == replica.Open {
			w.SyncedTo(w.Tells())
		}
		i, serr := p.s.Seal(ctx, id, f, false, at)
		if e := same("freeze", serr, err); e != nil || err != nil {
			return e
		}
		if at == 0 || at > w.Length || w.State == replica.Sealed {
			at = w.Length
		}
		if i.Length != w.Length || i.Fence != w.Fence || i.CRC != crcAt(w.data[:at]) || w.State == replica.Open && i.Whole != w.whole {
			return fmt.Errorf("freeze, asked at %d: the store tells %+v, the machine %+v, whole %v", at, i, w.Replica, w.whole)
		}
		return w.told(i.Synced)
	case op < 16:
		length := w.Length - min(w.Length, uint64(r.IntN(3)*r.IntN(40_000)))
		if r.IntN(8) == 0 {
			length++
		}
		do, err := w.Freeze(f)
		if err == nil && do == replica.Write {
			w.Frozen(f)
			w.fence = f
		}
		if err == nil {
			if do, err = w.End(f, length); err == nil && do == replica.Write {
				w.data = w.data[:length:length]
				w.Ended(length, crcAt(w.data))
			}
		}
		i, serr := p.s.Seal(ctx, id, f, true, length)
		if e := same("seal", serr, err); e != nil || err != nil {
			return e
		}
		if i.Length != w.Length || i.CRC != w.CRC || i.State != meta.ChunkSealed {
			return fmt.Errorf("seal: the store tells %+v, the machine %+v", i, w.Replica)
		}
	case op < 17:
		do, err := w.Delete(f)
		if err == nil && do == replica.Write {
			w.Gone(f)
			w.data, w.whole = nil, false
		}
		return same("delete", p.s.Delete(ctx, id, f), err)
	case op < 18:
		return p.s.Checkpoint()
	default:
		off, size := r.Uint64N(w.Length+1), 1+r.Uint64N(5000)
		if w.Length > 0 && r.IntN(4) > 0 {
			off = r.Uint64N(w.Length)
			size = 1 + r.Uint64N(w.Length-off)
		}
		b := make([]byte, size)
		err := w.Read(meta.Fence{}, off, size)
		serr := p.s.Read(ctx, id, b, off)
		if e := same("read", serr, err); e != nil || err != nil {
			return e
		}
		if !bytes.Equal(b, w.data[off:off+size]) {
			return fmt.Errorf("DATA: read of %d bytes at %d gives others", size, off)
		}
	}
	return nil
}

func crcAt(p []byte) uint32 {
	var crcs []uint32
	for len(p) > 0 {
		n := min(len(p), block)
		crcs = append(crcs, chunkserver.CRC(p[:n]))
		p = p[n:]
	}
	return chunkserver.SealCRC(crcs)
}

// restart compares the remains after a loss of power, or after the death of the process: the
// machine gives the required bytes, and the store's answer is within the machine's.
func (p *pair) restart(o Options) error {
	p.s.Abandon()
	power := p.r.IntN(2) == 0
	if power {
		p.d = p.d.crash(p.r)
	} else {
		p.d.locked = false
	}
	s, err := Open(p.d, o)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	p.s = s
	for n, w := range p.twin { // in any order: each is independent
		i, err := s.Stat(ctx, testID(n))
		gone := errors.Is(err, meta.NoSuchChunk)
		if err != nil && !gone {
			return err
		}
		switch {
		case w.State == replica.Deleted || w.State == replica.Absent:
			if !gone {
				return fmt.Errorf("chunk %d is %v and comes back as %+v", n, w.State, i)
			}
			*w = twin{}
			if s.buried(testID(n)) { // the log remembers, for a while
				w.State = replica.Deleted
			}
			continue
		case gone && (w.State == replica.Sealed || w.Synced > 0 || !power):
			return fmt.Errorf("chunk %d, %+v, is gone", n, w.Replica)
		case gone:
			*w = twin{}
			continue
		}
		found := replica.Found{Fence: i.Fence, Appended: w.Length, Synced: w.Synced, Verified: i.Length,
			Sealed: w.State == replica.Sealed, SealedAt: w.Length}
		if !power {
			found.Verified = w.Length
		}
		back := replica.Recovered(found, nil)
		if back.Damaged || back.Length != i.Length || (back.State == replica.Sealed) != (i.State == meta.ChunkSealed) {
			return fmt.Errorf("chunk %d was %+v and comes back as %+v; by the machine as %+v", n, w.Replica, i, back)
		}
		if i.Fence != w.Fence && (!power || i.Fence.Less(w.fence) || w.Fence.Less(i.Fence)) {
			return fmt.Errorf("chunk %d had fence %v, durable %v, now %v", n, w.Fence, w.fence, i.Fence)
		}
		back.CRC, back.Promised = w.CRC, w.Promised
		*w = twin{Replica: back, data: w.data[:i.Length], unsure: back.State == replica.Open, fence: i.Fence}
	}
	return nil
}

// TestStoreIsTheMachine: the store answers every order as the machine does, and keeps over
// restarts the bytes that the machine requires.
func TestStoreIsTheMachine(t *testing.T) {
	orders := 0
	for seed := range seeds(80) {
		o := options()
		o.batch = 1 + int(seed%5)
		p := &pair{r: rand.New(rand.NewPCG(seed, 78)), d: newMemDisk(), twin: map[uint64]*twin{}}
		if err := Init(p.d, o); err != nil {
			t.Fatal(err)
		}
		var err error
		if p.s, err = Open(p.d, o); err != nil {
			t.Fatal(err)
		}
		for range 4 {
			for range 120 {
				if err := p.step(); err != nil {
					t.Fatalf("seed %d, order %d: %v", seed, p.n, err)
				}
			}
			if err := p.restart(o); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		p.s.Abandon()
		orders += p.n
	}
	t.Logf("%d orders", orders)
}
