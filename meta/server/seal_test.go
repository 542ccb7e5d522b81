package server

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// Rule 5 with three replicas, of which some are away, short or wiped.
func TestSealOfThree(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 60*time.Second)
	var f [3]*fakeChunks
	for i := range f {
		f[i] = s.chunkServer(meta.ServerID(i + 1))
	}
	a := s.dial("a")
	a.setReplicas(t, 3)
	ino := a.create(t, "x").Attr.Ino
	has := func(g meta.ChunkGrant, lengths ...uint64) {
		for i, n := range lengths {
			if id := g.Servers[i]; n > 0 {
				f[id-1].has(g.ID, n, min(n, 800))
			}
		}
	}
	need := func(n uint64) *uint64 { return &n }
	for _, tc := range []struct {
		name    string
		lengths []uint64 // on each server; 0: nothing on the server
		away    int      // so many of the last are away
		used    uint64   // bytes by the journal
		need    *uint64
		kind    meta.Kind
		length  uint64
		have    int
	}{
		{"all alike", []uint64{1000, 1000, 1000}, 0, 800, nil, meta.KindOK, 1000, 3},
		{"after a kill, the writer says what it needs: two stay in service", []uint64{1300, 1000, 1100}, 1, 800, need(900), meta.KindOK, 900, 2},
		{"a writer that asks for less than was synced", []uint64{1300, 1000, 1100}, 0, 800, need(5), meta.KindOK, 800, 3},
		{"a wiped disk is left out", []uint64{1000, 0, 1000}, 0, 800, nil, meta.KindOK, 1000, 2},
		{"only the wiped one answers, and the journal has bytes: wait", []uint64{0, 1000, 1000}, 2, 800, nil, meta.Unavailable, 0, 0},
		{"the journal has bytes that nobody has", []uint64{500, 500, 500}, 0, 800, nil, meta.Corrupt, 0, 0},
		{"all wiped", []uint64{0, 0, 0}, 0, 800, nil, meta.Corrupt, 0, 0},
		{"never written, one away", []uint64{0, 0, 0}, 1, 0, need(0), meta.KindOK, 0, 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := a.alloc(t, false)
			has(g, tc.lengths...)
			if tc.used > 0 {
				a.commit(t, ino, g, 0, tc.used, true)
			}
			for _, id := range g.Servers[3-tc.away:] {
				f[id-1].hang()
				defer f[id-1].wake()
			}
			var rec meta.ChunkRecord
			var err error
			if tc.need != nil {
				rec, err = a.EndChunk(t.Context(), 1, g.ID, *tc.need)
			} else {
				rec, err = a.SealChunk(t.Context(), 1, g.ID)
			}
			if meta.KindOf(err) != tc.kind || err == nil && (rec.Length != tc.length || len(rec.Servers) != tc.have) {
				t.Fatalf("%+v %v, want %+v", rec, err, tc)
			}
		})
	}
}

// No writer has written to a chunk when its servers are asked for its end, so that nothing keeps
// the writer from beginning there before the journal has the answer. Bytes that the writer has
// synced and committed by then stay.
func TestSealOfAChunkThatIsBegunMeanwhile(t *testing.T) {
	t.Parallel()
	for _, open := range []bool{false, true} {
		t.Run(fmt.Sprint("open end: ", open), func(t *testing.T) {
			s := newSiteTTL(t, 60*time.Second)
			f := s.chunkServer(1)
			a := s.dial("a")
			ino := a.create(t, "x").Attr.Ino
			g := a.alloc(t, open)
			begin := sync.OnceFunc(func() {
				f.has(g.ID, 1000, 1000)
				e := meta.Extent{Len: 800, Chunk: g.ID, OpenEnded: open}
				if _, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.Write{Ino: ino, Extents: []meta.Extent{e}, Size: 800, Synced: true}, meta.LeaseNone); err != nil {
					t.Errorf("commit: %v", err)
				}
			})
			f.mu.Lock()
			f.sealing = func(meta.Order) { begin() }
			f.mu.Unlock()
			rec, err := s.srv.hosted.opened(1).sealing.seal(t.Context(), g.ID, nil) // as of a server that is to be emptied
			if err != nil || rec.State != meta.ChunkSealed || rec.Length < 800 {
				t.Errorf("DATA: a chunk of which 800 bytes were committed ends at %d: %+v %v", rec.Length, rec, err)
			}
			if n := a.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone).Attr.Size; n < 800 {
				t.Errorf("DATA: the file has %d bytes of 800", n)
			}
		})
	}
}

// A server that stands still delays a seal for a second, not for ever; the others get their final
// orders, and the server gets its own order when the server is back.
func TestSealGoesOnWithoutAStoppedServer(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	var f [3]*fakeChunks
	for i := range f {
		f[i] = s.chunkServer(meta.ServerID(i + 1))
	}
	a := s.dial("a")
	a.setReplicas(t, 3)
	ino := a.create(t, "x").Attr.Ino
	g := a.alloc(t, false)
	for i := range f {
		f[i].has(g.ID, 1000, 800)
	}
	a.commit(t, ino, g, 0, 800, true)
	f[2].hang()
	begun := time.Now()
	rec, err := a.SealChunk(t.Context(), 1, g.ID)
	took := time.Since(begun)
	slices.Sort(rec.Servers)
	if err != nil || rec.Length != 1000 || rec.State != meta.ChunkSealed || !slices.Equal(rec.Servers, []meta.ServerID{1, 2}) {
		t.Fatalf("%+v %v", rec, err)
	}
	if took > orderPatience-sealWait {
		t.Errorf("the seal took %v", took)
	}
	f[2].wake()
	o := s.srv.hosted.opened(1)
	if errs := o.sealing.sealReplicas(t.Context(), &rec, []meta.ServerID{3}); errs[0] != nil {
		t.Fatal(errs)
	}
	f[2].has(g.ID, 700, 700) // the server lost its tail
	f[2].refuse(meta.WrongOffset)
	if errs := o.sealing.sealReplicas(t.Context(), &rec, []meta.ServerID{3}); !errors.Is(errs[0], meta.WrongOffset) {
		t.Fatal(errs)
	}
}

func (p *peer) setReplicas(t *testing.T, n uint32) {
	t.Helper()
	if _, err := p.SetVolume(t.Context(), 1, meta.Policy{Replicas: n}, meta.VolumeWords{}); err != nil {
		t.Fatal(err)
	}
}

// A writer that can't reach a server gets chunks elsewhere; other writers still get the server.
func TestSuspectedServersGetNoChunks(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	for id := meta.ServerID(1); id <= 4; id++ {
		s.chunkServer(id)
	}
	a, b := s.dial("a"), s.dial("b")
	a.setReplicas(t, 2)
	a.Trouble(1, []meta.ServerID{2, 3}, nil)
	for range 20 {
		if g := a.alloc(t, false); slices.Contains(g.Servers, 2) || slices.Contains(g.Servers, 3) {
			t.Fatalf("a chunk on %v", g.Servers)
		}
	}
	got := map[meta.ServerID]bool{}
	for range 50 {
		for _, id := range b.alloc(t, false).Servers {
			got[id] = true
		}
	}
	if len(got) != 4 {
		t.Errorf("b's chunks lie on %v only", got)
	}
	// Of the servers that failed, the earliest failures are tried again first.
	a.Trouble(1, []meta.ServerID{1}, nil)
	time.Sleep(5 * time.Millisecond)
	a.Trouble(1, []meta.ServerID{4}, nil)
	for range 20 {
		if g := a.alloc(t, false); slices.Contains(g.Servers, 4) || slices.Contains(g.Servers, 1) {
			t.Fatalf("a chunk on %v", g.Servers)
		}
	}
	a.Trouble(1, []meta.ServerID{1, 2, 3, 4}, nil)
	a.alloc(t, false) // a writer that suspects all servers gets the servers that exist
}
