package namespace

import (
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

var tallySeeds = flag.Uint64("tally", 3, "how many random volumes TestTallyIsExact counts")

// tallyPlace is the place of a byte; a byte of a record has its value as place.
type tallyPlace struct {
	chunk meta.ChunkID
	at    uint64
	n     uint64 // bytes from the place on
}

// naiveTally maps every unit of each snapshot and of the live tree, and compares
// neighbours.
func naiveTally(t testing.TB, r Reader) (sum uint64) {
	t.Helper()
	live := tx{view: view{r: r}}
	if err := live.begin(); err != nil {
		t.Fatal(err)
	}
	all, err := live.snaps().snapshots()
	if err != nil {
		t.Fatal(err)
	}
	type where struct {
		ino    meta.Ino
		off    uint64
		inline bool
	}
	see := func(gen uint32) map[where]tallyPlace {
		m := map[where]tallyPlace{}
		v := view{r: r, gen: gen, base: live.vol.base}
		if err := v.scan([]byte{prefixExtent}, []byte{prefixExtent + 1}, func(base, val []byte, _ uint32) (bool, error) {
			e, err := decodeExtent(val, binary.BigEndian.Uint64(base[9:]))
			for x := uint64(0); x < e.Len; x += unit {
				p := tallyPlace{chunk: e.Chunk, n: unit}
				if !e.Chunk.IsZero() {
					p.at = e.ChunkOff + x
				}
				m[where{meta.Ino(binary.BigEndian.Uint64(base[1:])), e.Off + x, false}] = p
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
					m[where{in.Ino, uint64(x), true}] = tallyPlace{at: uint64(b), n: 1}
				}
			}
			return true, err
		}); err != nil {
			t.Fatal(err)
		}
		return m
	}
	var before map[where]tallyPlace
	for _, gen := range append(slices.DeleteFunc(gensOf(all), func(g uint32) bool { return g == 0 }), live.vol.gen) {
		now := see(gen)
		for x, p := range before {
			if now[x] != p {
				sum += p.n
			}
		}
		before = now
	}
	return sum
}

func gensOf(all []snapshot) (l []uint32) {
	for _, s := range all {
		if s.state == snapshotLive || s.state == snapshotGone {
			l = append(l, s.gen)
		}
	}
	return l
}

// sameTally requires that the count equals the true count, and Recounted as well.
func sameTally(t testing.TB, r Reader) Tally {
	t.Helper()
	got, err := Tallied(r)
	if err != nil {
		t.Fatal(err)
	}
	var small tx // a clone's extents are being moved
	small.r = r
	if err := small.begin(); err != nil {
		t.Fatal(err)
	}
	want := naiveTally(t, r)
	h := &holding{t: tx{view: view{r: r}}}
	if err := h.t.begin(); err != nil {
		t.Fatal(err)
	}
	if n, err := h.runs(); err != nil || n != want {
		t.Fatalf("counted at rest: %d, %v; looking at every byte %d", n, err, want)
	}
	switch {
	case got.InForce && !got.Stale && got.Alone != want:
		t.Fatalf("%d bytes are counted, snapshots alone hold %d", got.Alone, want)
	case got.InForce && got.Stale && got.Alone < want && small.vol.tally.mode != tallyMoved:
		t.Fatalf("%d bytes are counted as too many, snapshots alone hold %d", got.Alone, want)
	}
	return got
}

// recount recounts in steps, calls meanwhile in between, and compares the result.
func (s *sim) recount(meanwhile func()) {
	s.t.Helper()
	op, err := Recounted(s.s)
	if err != nil {
		s.t.Fatal(err)
	}
	meanwhile()
	if op == nil {
		return
	}
	res, l, err := Execute(s.s, s.ctx(), op)
	if meta.KindOf(err) == meta.Again {
		return
	}
	if err != nil {
		s.t.Fatal(err)
	}
	_ = res
	s.commit(l)
	if got := sameTally(s.t, s.s); got.Stale || !got.InForce {
		s.t.Fatalf("counted anew, and %+v", got)
	}
}

// setPolicy switches the count.
func (s *sim) counts(on bool) {
	s.do(&meta.SetPolicy{Policy: meta.Policy{Replicas: 1, QuotaSnapshots: on}})
}

// TestTallyIsExact: the running count of bytes that only snapshots have is exact,
// whatever is written, cut, punched, copied, moved or rolled back, whichever snapshots
// are taken and deleted meanwhile, and however often the count is switched off and on and
// made anew.
func TestTallyIsExact(t *testing.T) {
	for seed := range *tallySeeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			s := &sim{fixture: f, rng: rand.New(rand.NewPCG(seed, 78))}
			s.m = newModel(f.now-2, testSession)
			defer func() {
				if t.Failed() {
					t.Logf("seed %d, the last of %d operations:\n%s", seed, len(s.log), strings.Join(s.log[max(0, len(s.log)-12):], "\n"))
				}
			}()
			if seed%2 == 0 {
				s.counts(true)
			}
			most, exact := uint64(0), 0
			for i := range 160 {
				for range s.rng.IntN(6) {
					s.step()
					if s.rng.IntN(3) > 0 {
						continue
					}
					got := sameTally(t, s.s)
					if most = max(most, got.Alone); got.InForce && !got.Stale {
						exact++
					}
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
					s.dropStep(s.rng.IntN(len(s.going)))
					sameTally(t, s.s)
				}
				switch s.rng.IntN(12) {
				case 0, 1, 2:
					s.recount(func() {
						for range s.rng.IntN(4) {
							s.step()
						}
						if s.rng.IntN(3) == 0 {
							s.frozen = append(s.frozen, s.freeze(1000+i))
						}
					})
				case 3:
					if s.rng.IntN(6) == 0 {
						s.counts(false)
					}
					s.counts(true)
				}
			}
			if most == 0 || exact < 20 {
				t.Errorf("snapshots held %d bytes at most, %d times it was exact", most, exact)
			}
			s.tallyRollback()
			for _, sn := range s.frozen {
				s.going = append(s.going, sn.gen)
			}
			for len(s.going) > 0 {
				s.dropStep(s.rng.IntN(len(s.going)))
				sameTally(t, s.s)
				s.recount(func() {})
			}
			s.counts(true)
			if got := sameTally(t, s.s); got.Alone != 0 || !got.InForce || got.Stale {
				t.Errorf("no snapshot is left: %+v", got)
			}
		})
	}
}

// tallyRollback rolls a copy of the store back, step by step.
func (s *sim) tallyRollback() {
	s.t.Helper()
	for _, sn := range s.frozen {
		on := s.s.copied()
		op := &meta.Rollback{To: sn.gen, Max: 3}
		for {
			res, l, err := Execute(on, s.ctx(), op)
			if meta.KindOf(err) == meta.Busy {
				return // something is open
			}
			if err != nil {
				s.t.Fatal(err)
			}
			on.apply(l)
			sameTally(s.t, on)
			if op.From = res.Data; res.EOF {
				break
			}
		}
	}
}

// TestTallyOfMovedExtents: while a clone's extents are moved one by one, the count may be
// negative for a moment: a snapshot's version is moved first, the live extent in the same
// place later, and bytes overwritten in between come back.
func TestTallyOfMovedExtents(t *testing.T) {
	o := newFixture(t)
	ino, src := o.file("f"), o.chunks(1, false)[0]
	o.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 8192, Chunk: src}}, Size: 8192, Synced: true})
	o.seal(src, 8192)
	at := meta.Generation(o.do(&meta.TakeSnapshot{Name: "origin"}).Off)
	o.do(&meta.PinClone{At: at, Clone: 9})
	f := &fixture{t: t, s: o.s.copied(), replica: o.s.copied(), now: o.now, session: testSession}
	effects, err := CloneEffects(f.s, at, 9, meta.Policy{Replicas: 1, QuotaSnapshots: true}, f.now)
	if err != nil {
		t.Fatal(err)
	}
	f.commit(effects)
	f.do(&meta.SessionStart{Session: testSession, Name: "test", Host: "boot", PID: 1, Start: 2})
	mine, to := f.chunks(1, false)[0], f.chunks(1, false)[0]
	one := meta.Generation(f.do(&meta.TakeSnapshot{Name: "one"}).Off)
	back := func() {
		t.Helper()
		f.do(&meta.CopyRange{Src: ino, Dst: ino, Len: 4096, At: one})
	}
	overwrite := func(off uint64) {
		t.Helper()
		f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 4096, Chunk: mine, ChunkOff: off}}, Synced: true})
	}
	adopt := func(old bool) {
		t.Helper()
		var l []meta.Adopted
		if err := ForeignExtents(f.s, func(e ForeignExtent) bool {
			if old == (e.At <= one) {
				l = append(l, meta.Adopted{Ino: e.Ino, At: e.At, Old: e.Extent, Copy: to, Off: e.ChunkOff})
			}
			return true
		}); err != nil || len(l) != 1 {
			t.Fatal(l, err)
		}
		f.do(&meta.AdoptExtents{Extents: l})
	}
	overwrite(0)
	back()
	if got := sameTally(t, f.s); got.Stale || got.Alone != 0 {
		t.Fatalf("before anything is moved: %+v", got)
	}
	adopt(true)
	overwrite(4096)
	adopt(false)
	back()
	got := sameTally(t, f.s)
	if !got.Stale || got.Alone != 0 {
		t.Errorf("%+v", got)
	}
	f.check()
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 512, Chunk: mine, ChunkOff: 8192}}, Synced: true})
	op, err := Recounted(f.s)
	if err != nil {
		t.Fatal(err)
	}
	f.do(op)
	if got := sameTally(t, f.s); got.Stale || got.Alone != 512 {
		t.Errorf("DATA: counted at rest: %+v", got)
	}
	f.check()
}

// TestCheckSeesTally: Check counts anew, and notices a difference of one byte.
func TestCheckSeesTally(t *testing.T) {
	f := newFixture(t)
	f.do(&meta.SetPolicy{Policy: meta.Policy{Replicas: 1, QuotaSnapshots: true}})
	c := f.chunks(1, false)[0]
	ino, small := f.file("f"), f.file("small")
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 4096, Chunk: c}}, Size: 4096, Synced: true})
	f.do(&meta.Write{Ino: small, Inline: true, Data: []byte("data"), Size: 4})
	f.do(&meta.TakeSnapshot{Name: "s"})
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 96, Len: 1000, Chunk: c, ChunkOff: 4096}}, Size: 4096, Synced: true})
	f.do(&meta.Write{Ino: small, Inline: true, Data: []byte("dark night"), Size: 10})
	for _, c := range []struct {
		alone int64
		mode  byte
		ok    bool
	}{
		{1002, tallyExact, true}, {1001, tallyExact, false}, {1003, tallyExact, false},
		{1003, tallyStale, true}, {1001, tallyStale, false}, {1, tallyMoved, true}, {-1, tallyBegun, true},
	} {
		b, _, _ := f.s.Get(volumeKey)
		var v volume
		if err := decodeVolume(b, &v); err != nil {
			t.Fatal(err)
		}
		if v.tally.mode == tallyExact && v.tally.alone != 1002 {
			t.Fatalf("%+v", v.tally)
		}
		v.tally.mode, v.tally.alone = c.mode, c.alone
		on := f.s.copied()
		on.apply([]Effect{{Put, volumeKey, appendVolume(nil, &v)}})
		rep, err := Check(on)
		if err != nil || rep.OK() != c.ok {
			t.Errorf("%+v: %v, %v", c, rep.Problems, err)
		}
	}
}
