package namespace

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

var heldSeeds = flag.Uint64("held", 4, "how many random volumes TestHeldIsExact counts")

// heldUnit is a unit of a file, stored in one place, or a byte of a record.
type heldUnit struct {
	ino   meta.Ino
	off   uint64
	chunk meta.ChunkID
	at    uint64
	b     byte
}

// naiveHeld maps every unit of every snapshot and of the live tree. It knows nothing of
// versions, only the contents that each generation shows.
func naiveHeld(t testing.TB, r Reader, drop []meta.Generation) Held {
	t.Helper()
	all, err := Snapshots(r)
	if err != nil {
		t.Fatal(err)
	}
	live := tx{view: view{r: r}}
	if err := live.begin(); err != nil {
		t.Fatal(err)
	}
	h := Held{Live: live.vol.bytes}
	size := map[heldUnit]uint64{}
	by := map[heldUnit][]int{} // of Each; -1: live
	see := func(v view, who int) {
		if err := v.scan([]byte{prefixExtent}, []byte{prefixExtent + 1}, func(base, val []byte, _ uint32) (bool, error) {
			e, err := decodeExtent(val, binary.BigEndian.Uint64(base[9:]))
			for x := uint64(0); x < e.Len; x += unit {
				u := heldUnit{ino: meta.Ino(binary.BigEndian.Uint64(base[1:])), off: e.Off + x, chunk: e.Chunk}
				if !e.Chunk.IsZero() {
					u.at = e.ChunkOff + x
				}
				by[u], size[u] = append(by[u], who), unit
			}
			return true, err
		}); err != nil {
			t.Fatal(err)
		}
		if err := v.scan([]byte{prefixInode}, []byte{prefixInode + 1}, func(base, val []byte, _ uint32) (bool, error) {
			in := &inode{}
			err := decodeInode(val, meta.Ino(binary.BigEndian.Uint64(base[1:])), in)
			if err == nil && in.IsRegular() && in.Flags&meta.FlagInline != 0 {
				for x, b := range in.data {
					u := heldUnit{ino: in.Ino, off: uint64(x), b: b, at: 1 << 63}
					by[u], size[u] = append(by[u], who), 1
				}
			}
			return true, err
		}); err != nil {
			t.Fatal(err)
		}
	}
	see(view{r: r, gen: live.vol.gen, base: live.vol.base}, -1)
	var gens []meta.Generation
	for _, s := range all {
		if s.Deleting {
			continue
		}
		see(view{r: r, gen: uint32(s.At), base: live.vol.base}, len(gens))
		gens = append(gens, s.At)
		h.Each = append(h.Each, HeldBy{Snapshot: s})
	}
	mapped, chunks := uint64(0), uint64(0)
	for u, who := range by {
		if slices.Contains(who, -1) {
			mapped += size[u]
			continue
		}
		if !u.chunk.IsZero() {
			chunks += size[u]
		}
		h.Alone += size[u]
		if len(who) == 1 {
			h.Each[who[0]].Alone += size[u]
		}
		if !slices.ContainsFunc(who, func(i int) bool { return !slices.Contains(drop, gens[i]) }) {
			h.Freed += size[u]
		}
	}
	if mapped != h.Live {
		t.Fatalf("the live tree maps %d bytes, its record says %d", mapped, h.Live)
	}
	// For a clone only its own writes count: the rest belongs to its origin.
	if n, err := Buried(r); err != nil || live.vol.base == nil && n < chunks {
		t.Fatalf("DATA: %d bytes of superseded extents are counted, %v; snapshots alone hold %d in chunks", n, err, chunks)
	}
	return h
}

// sameHeld compares with the naive count, asking about some of the snapshots.
func sameHeld(t testing.TB, r Reader, rng *rand.Rand) Held {
	t.Helper()
	all, err := Snapshots(r)
	if err != nil {
		t.Fatal(err)
	}
	var drop []meta.Generation
	going := false
	for _, s := range all {
		if going = going || s.Deleting; !s.Deleting && rng.IntN(2) == 0 {
			drop = append(drop, s.At)
		}
	}
	got, err := ReadHeld(r, drop)
	if err != nil {
		t.Fatal(err)
	}
	if got.Going > 0 && !going {
		t.Fatalf("%d bytes are being freed, and no snapshot is being deleted", got.Going)
	}
	want := naiveHeld(t, r, drop)
	is := *got
	is.Alone, is.Going = is.Alone-is.Going, 0
	if fmt.Sprint(is) != fmt.Sprint(want) {
		t.Fatalf("asked about %v: counted\n%+v\nevery byte looked at\n%+v", drop, is, want)
	}
	return *got
}

// TestHeldIsExact: the bytes that only snapshots have are counted exactly, whatever was
// written, cut, punched, copied back, moved by compaction, rolled back or is being
// deleted. The forecast of a deletion equals the bytes that the deletion frees, in any
// order.
func TestHeldIsExact(t *testing.T) {
	for seed := range *heldSeeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			s := &sim{fixture: f, rng: rand.New(rand.NewPCG(seed, 77))}
			s.m = newModel(f.now-2, testSession)
			defer func() {
				if t.Failed() {
					t.Logf("seed %d, the last of %d operations:\n%s", seed, len(s.log), strings.Join(s.log[max(0, len(s.log)-12):], "\n"))
				}
			}()
			most := uint64(0)
			for i := range 160 {
				for range s.rng.IntN(6) {
					s.grows(s.step)
				}
				if s.rng.IntN(12) == 0 {
					s.frozen = append(s.frozen, s.freeze(i))
				}
				if len(s.frozen) > 0 && s.rng.IntN(20) == 0 {
					n := s.rng.IntN(len(s.frozen))
					s.going = append(s.going, s.frozen[n].gen)
					s.frozen = slices.Delete(s.frozen, n, n+1)
				}
				if len(s.going) > 0 && s.rng.IntN(3) > 0 {
					s.grows(func() { s.dropStep(s.rng.IntN(len(s.going))) })
				}
				if i%4 == 0 {
					most = max(most, sameHeld(t, s.s, s.rng).Alone)
				}
			}
			if most == 0 {
				t.Error("snapshots held nothing all the time")
			}
			for len(s.going) > 0 {
				s.dropStep(s.rng.IntN(len(s.going)))
			}
			s.dropsAsTold()
			s.rollbackAsCounted()
			for _, sn := range s.frozen {
				s.going = append(s.going, sn.gen)
			}
			for len(s.going) > 0 {
				s.dropStep(s.rng.IntN(len(s.going)))
				sameHeld(t, s.s, s.rng)
			}
			if h := sameHeld(t, s.s, s.rng); h.Alone != 0 {
				t.Errorf("no snapshot is left, and they hold %d bytes", h.Alone)
			}
		})
	}
}

// mayGrow matches the operations after which live tree and snapshots together may have
// more bytes: operations that store, learn of, share or move bytes.
var mayGrow = regexp.MustCompile(`\*meta\.(Write|Fallocate|CopyRange|SealChunk|ReplaceExtents) `)

// grows requires that no other operation increases these bytes.
func (s *sim) grows(step func()) {
	s.t.Helper()
	sum := func() uint64 {
		h, err := ReadHeld(s.s, nil)
		if err != nil {
			s.t.Fatal(err)
		}
		return h.Live + h.Alone
	}
	was, logged := sum(), len(s.log)
	step()
	if is := sum(); is > was && !slices.ContainsFunc(s.log[logged:], mayGrow.MatchString) {
		s.t.Fatalf("%d bytes were held, %d are after %s", was, is, s.log[logged:])
	}
}

// dropsAsTold deletes some on a copy of the store.
func (s *sim) dropsAsTold() {
	s.t.Helper()
	var drop []meta.Generation
	for _, sn := range s.frozen {
		if s.rng.IntN(2) == 0 {
			drop = append(drop, sn.gen)
		}
	}
	was, err := ReadHeld(s.s, drop)
	if err != nil {
		s.t.Fatal(err)
	}
	on := s.s.copied()
	for going := slices.Clone(drop); len(going) > 0; {
		n := s.rng.IntN(len(going))
		res, l, err := Execute(on, s.ctx(), &meta.DropSnapshot{At: going[n], Max: uint32(1 + s.rng.IntN(20))})
		if err != nil {
			s.t.Fatal(err)
		}
		on.apply(l)
		if res.EOF {
			going = slices.Delete(going, n, n+1)
		}
	}
	is, err := ReadHeld(on, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	if is.Alone != was.Alone-was.Freed || is.Live != was.Live || is.Going != 0 {
		s.t.Fatalf("%+v\nwith %v deleted\n%+v", was, drop, is)
	}
}

// rollbackAsCounted rolls a copy of the store back, step by step.
func (s *sim) rollbackAsCounted() {
	s.t.Helper()
	if len(s.frozen) == 0 {
		return
	}
	on := s.s.copied()
	op := &meta.Rollback{To: s.frozen[s.rng.IntN(len(s.frozen))].gen, Max: 3}
	for {
		res, l, err := Execute(on, s.ctx(), op)
		if meta.KindOf(err) == meta.Busy {
			return // something is open
		}
		if err != nil {
			s.t.Fatal(err)
		}
		on.apply(l)
		sameHeld(s.t, on, s.rng)
		if op.From = res.Data; res.EOF {
			return
		}
	}
}
