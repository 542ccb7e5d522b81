package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

var silent = slog.New(slog.NewTextHandler(io.Discard, nil))

// options are the tests' options, with the positive control that the environment asks for: then
// the control's test must fail.
func options() Options {
	o := testOptions
	o.Logger = silent
	switch os.Getenv("PENSTOCK_CONTROL") {
	case "chunk-nosync":
		o.UnsafeNoSync = true
	case "chunk-noverify":
		o.UnsafeNoVerify = true
	case "chunk-nofence":
		o.UnsafeNoFence = true
	}
	return o
}

// seeds is the number of seeds of a test: n, or the number for a soak.
func seeds(n uint64) uint64 {
	if n, err := strconv.ParseUint(os.Getenv("PENSTOCK_SEEDS"), 10, 32); err == nil {
		return n
	}
	return n
}

// modelChunk has the store's promises of a chunk.
type modelChunk struct {
	data   []byte // acknowledged
	maybe  []byte // an append whose outcome is unknown
	synced int
	sealed bool
	fence  meta.Fence
	// Outcomes unknown because the power failed in the middle.
	maybeSeal   int // length, -1 none
	maybeDelete bool
	deleted     bool
	maybeFence  meta.Fence
}

// life drives a store and a model of the store with the same random operations.
type life struct {
	r      *rand.Rand
	d      *memDisk
	s      *Store
	chunks map[uint64]*modelChunk
	next   uint64
	bytes  byte
	lost   bool // power was lost since the model was last compared
}

var ctx = context.Background()

// step does one operation; an error is the disk's.
func (l *life) step() error {
	r := l.r
	if len(l.chunks) == 0 || r.IntN(12) == 0 && len(l.chunks) < 8 {
		l.next++
		l.chunks[l.next] = &modelChunk{maybeSeal: -1, fence: meta.Fence{Term: 1}}
	}
	var n uint64
	for k := range l.chunks { // the map's order is chance, so choose by the seed
		n = max(n, k)
	}
	n -= uint64(r.IntN(int(min(n, 8))))
	c := l.chunks[n]
	if c == nil || c.deleted {
		return nil
	}
	id := testID(n)
	switch op := r.IntN(100); {
	case op < 45:
		if c.sealed {
			return nil
		}
		size := 1 + r.IntN([]int{10, 5000, 70_000, 200_000}[r.IntN(4)])
		p := make([]byte, size)
		l.bytes++
		for i := range p {
			p[i] = byte(i*7) ^ byte(i>>8) ^ l.bytes
		}
		c.maybe = p
		err := l.s.Append(ctx, id, c.fence, uint64(len(c.data)), p, chunkserver.CRC(p))
		if err == nil {
			c.data, c.maybe = append(c.data, p...), nil
		}
		return err
	case op < 75:
		if len(c.data) == 0 {
			return nil
		}
		upTo := len(c.data)
		if r.IntN(3) == 0 {
			upTo = r.IntN(upTo + 1)
		}
		n, err := l.s.Sync(ctx, id, uint64(upTo))
		if err == nil {
			if int(n) < upTo {
				return fmt.Errorf("DATA: synced %d of %d", n, upTo)
			}
			c.synced = max(c.synced, int(n))
		}
		return err
	case op < 80:
		f := meta.Fence{Term: c.fence.Term, Seals: c.fence.Seals + 1}
		c.maybeFence = f
		i, err := l.s.Seal(ctx, id, f, false, 0)
		if err == nil {
			if !c.sealed {
				c.fence = f
			}
			if int(i.Length) != len(c.data) {
				return fmt.Errorf("DATA: frozen at %d, not %d", i.Length, len(c.data))
			}
		}
		return err
	case op < 85:
		if c.sealed {
			return nil
		}
		at := len(c.data) - r.IntN(len(c.data)-c.synced+1)
		c.maybeSeal = at
		c.maybeFence = c.fence
		i, err := l.s.Seal(ctx, id, c.fence, true, uint64(at))
		if err == nil {
			if int(i.Length) != at || i.State != meta.ChunkSealed {
				return fmt.Errorf("DATA: sealed %+v", i)
			}
			c.data, c.synced, c.sealed, c.maybeSeal = c.data[:at], at, true, -1
		}
		return err
	case op < 88:
		c.maybeDelete = true
		err := l.s.Delete(ctx, id, c.fence)
		if err == nil {
			c.deleted, c.maybeDelete = true, false
		}
		return err
	case op < 91:
		return l.s.Checkpoint()
	case op < 93:
		l.s.Mark()
		return nil
	case op < 96:
		if !c.sealed {
			return nil
		}
		if r.IntN(4) > 0 {
			_, err := l.s.Pack(ctx, id, meta.Compression(1+r.IntN(2)))
			return err
		}
		// The chunk is deleted when the compressed file is about to be made; if the power goes
		// after that, perhaps no record names the file any more.
		var deleted error
		l.d.before = func(op, name string) error {
			if op != "open" || name != packName(id) {
				return nil
			}
			l.d.before = nil
			c.maybeDelete = true
			if deleted = l.s.Delete(ctx, id, c.fence); deleted == nil {
				c.deleted, c.maybeDelete = true, false
				deleted = l.s.Checkpoint()
			}
			return nil
		}
		_, err := l.s.Pack(ctx, id, meta.Compression(1+r.IntN(2)))
		l.d.before = nil
		if meta.KindOf(err) == meta.Canceled {
			err = nil
		}
		return errors.Join(deleted, err)
	case op < 97:
		_, err := l.s.DirAll(ctx, byte(n)) // and the files removed by DirAll
		return err
	default:
		return l.read(c, id, len(c.data))
	}
}

func (l *life) read(c *modelChunk, id meta.ChunkID, length int) error {
	if length == 0 {
		return nil
	}
	off := l.r.IntN(length)
	p := make([]byte, 1+l.r.IntN(length-off))
	if err := l.s.Read(ctx, id, p, uint64(off)); err != nil {
		return err
	}
	if !bytes.Equal(p, c.data[off:off+len(p)]) {
		return fmt.Errorf("DATA: %d bytes at %d read something else", len(p), off)
	}
	return nil
}

// check compares the restarted store with the promises, and takes its contents as the state to go
// on from. whole: only the process died.
func (l *life) check(whole bool) error {
	for n, c := range l.chunks {
		id := testID(n)
		i, err := l.s.Stat(ctx, id)
		if meta.KindOf(err) == meta.NoSuchChunk {
			gone := c.deleted || c.maybeDelete
			if !gone && (c.synced > 0 || c.sealed || whole && len(c.data) > 0) {
				return fmt.Errorf("chunk %d is gone: %d bytes were appended, %d synced", n, len(c.data), c.synced)
			}
			delete(l.chunks, n)
			continue
		}
		if err != nil {
			return fmt.Errorf("chunk %d: %w", n, err)
		}
		if c.deleted {
			return fmt.Errorf("chunk %d was deleted and is back: %+v", n, i)
		}
		have := int(i.Length)
		switch {
		case i.State == meta.ChunkSealed && !c.sealed && have != c.maybeSeal:
			return fmt.Errorf("chunk %d was never sealed at %d", n, have)
		case c.sealed && (i.State != meta.ChunkSealed || have != len(c.data)):
			return fmt.Errorf("chunk %d was sealed at %d: %+v", n, len(c.data), i)
		case i.State == meta.ChunkOpen && have < c.synced:
			return fmt.Errorf("chunk %d was synced up to %d and has %d", n, c.synced, have)
		case i.State == meta.ChunkOpen && whole && have < len(c.data):
			return fmt.Errorf("chunk %d has %d of %d bytes, though only the process died", n, have, len(c.data))
		}
		all := append(bytes.Clone(c.data), c.maybe...)
		if have > len(all) {
			return fmt.Errorf("chunk %d has %d bytes, only %d were ever appended", n, have, len(all))
		}
		got := make([]byte, have)
		if err := l.s.Read(ctx, id, got, 0); err != nil && have > 0 {
			return fmt.Errorf("chunk %d: %w", n, err)
		}
		if !bytes.Equal(got, all[:have]) {
			return fmt.Errorf("DATA: chunk %d reads something else", n)
		}
		if i.Fence.Less(c.fence) && (c.fence.Seals > 0 || c.synced > 0) {
			return fmt.Errorf("chunk %d forgot fence %v: %v", n, c.fence, i.Fence)
		}
		if c.fence.Less(i.Fence) && i.Fence != c.maybeFence {
			return fmt.Errorf("chunk %d made up fence %v", n, i.Fence)
		}
		*c = modelChunk{data: got, synced: have, sealed: i.State == meta.ChunkSealed, fence: i.Fence, maybeSeal: -1}
		if old := (meta.Fence{Term: i.Fence.Term, Seals: i.Fence.Seals - 1}); i.Fence.Seals > 0 && !c.sealed {
			if err := l.s.Append(ctx, id, old, i.Length, []byte("x"), chunkserver.CRC([]byte("x"))); meta.KindOf(err) != meta.Fenced {
				return fmt.Errorf("chunk %d takes appends of an old fence: %v", n, err)
			}
		}
	}
	if err := l.tidy(); err != nil {
		return err
	}
	rep, err := l.s.Scrub(ctx, 0)
	if err != nil {
		return err
	}
	if n := l.s.Stats().Corrupt; n > 0 {
		return fmt.Errorf("%d chunks count as damaged after a mere loss of power", n)
	}
	if len(rep.Bad) > 0 {
		return fmt.Errorf("scrub: %+v", rep.Bad)
	}
	return nil
}

// tidy lists all chunks, as owners do, who then delete unknown chunks; only files of chunks stay.
func (l *life) tidy() error {
	for n := range l.next {
		n++
		ids, err := l.s.DirAll(ctx, byte(n))
		if err != nil {
			return err
		}
		for _, id := range ids {
			if l.s.Leftover(id) {
				if err := l.s.Delete(ctx, id, meta.Fence{Term: 1}); err != nil {
					return err
				}
			}
		}
		id := testID(n)
		form, exists := meta.CompressNone, false
		if i, err := l.s.Stat(ctx, id); err == nil {
			form, exists = i.Form, true
		}
		if plain := l.d.has(dataName(id)); plain && (!exists || form != meta.CompressNone) {
			return fmt.Errorf("chunk %d: there %v, form %v, and a plain file stays", n, exists, form)
		}
		if pack := l.d.has(packName(id)); pack != (exists && form != meta.CompressNone) {
			return fmt.Errorf("chunk %d: there %v, form %v, a compressed file %v", n, exists, form, pack)
		}
	}
	return nil
}

// runLife lives several lives of one disk, each ended by a power loss or by the
// death of the process at some change.
func runLife(seed uint64, o Options) error {
	r := rand.New(rand.NewPCG(seed, 77))
	l := &life{r: r, d: newMemDisk(), chunks: map[uint64]*modelChunk{}}
	if err := Init(l.d, o); err != nil {
		return err
	}
	for round := range 6 {
		// Recovery may be hit, too, more than once.
		power := r.IntN(3) > 0
		for tries := 0; ; tries++ {
			l.d.ops, l.d.powerAt = 0, 0
			if tries < 4 && r.IntN(2) == 0 {
				l.d.powerAt = 1 + r.IntN(40)
			}
			s, err := Open(l.d, o)
			if err == nil {
				l.s = s
				break
			}
			if !l.d.dead {
				return fmt.Errorf("round %d: open: %w", round, err)
			}
			if r.IntN(3) == 0 {
				l.d.dead = false
				continue
			}
			l.d, l.lost = l.d.crash(r), true
		}
		l.d.ops, l.d.powerAt = 0, 0
		if round > 0 {
			if err := l.check(!l.lost); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		if power {
			l.d.powerAt = l.d.ops + 1 + r.IntN(150)
		}
		for range 30 + r.IntN(200) {
			if err := l.step(); err != nil {
				if !l.d.dead {
					return fmt.Errorf("round %d: %w", round, err)
				}
				break
			}
		}
		l.s.Abandon()
		if l.d.dead && r.IntN(3) == 0 {
			// The process died in the middle: its writes are in the cache, and may be lost yet.
			l.d.dead, l.lost = false, false
			continue
		}
		if l.lost = l.d.dead || r.IntN(4) == 0; l.lost {
			l.d = l.d.crash(r)
		}
	}
	return nil
}

// Every acknowledged sync, seal, fence and deletion holds after any loss of power, and every
// acknowledged operation after the death of the process. The store never has bytes that were not
// written.
func TestCrash(t *testing.T) {
	for seed := range seeds(150) {
		o := options()
		o.batch = 1 + int(seed%5) // both ways to checkpoint
		if err := runLife(seed, o); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

// An Init that a power cut ends anywhere is begun again, or was complete; a directory with
// anything else is never taken for an unfinished Init.
func TestInitIsCutShort(t *testing.T) {
	whole := false
	for n := 1; !whole; n++ {
		d := newMemDisk()
		d.powerAt = n
		whole = Init(d, options()) == nil
		for seed := range uint64(8) {
			after := d.crash(rand.New(rand.NewPCG(uint64(n), seed)))
			fresh, err := Fresh(after)
			if err != nil {
				t.Fatal(err)
			}
			if whole && fresh {
				t.Fatalf("power cut at change %d: done, and yet to be made", n)
			}
			if fresh {
				if err := Init(after, options()); err != nil {
					t.Fatalf("power cut at change %d: %v", n, err)
				}
			}
			s, err := Open(after, options())
			if err != nil {
				t.Fatalf("power cut at change %d, fresh %v: %v", n, fresh, err)
			}
			s.Abandon()
			if fresh, _ := Fresh(after); fresh {
				t.Fatalf("power cut at change %d: a store in use is taken for none", n)
			}
		}
	}
	d := newMemDisk()
	if f, err := d.Open("picture", true); err != nil || f.Close() != nil {
		t.Fatal(err)
	}
	if err := Init(d, options()); meta.KindOf(err) != meta.Exists {
		t.Fatalf("a directory with a file in it is made a store: %v", err)
	}
}
