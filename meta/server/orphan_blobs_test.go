package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
)

// leakSite is a grid whose chunk servers have a chunk for each blob of a checkpoint, as real
// chunk servers do; a test starts the search for leaks.
type leakSite struct {
	*grid
	found leaks

	inner meta.Blob
	mu    sync.Mutex
	last  uint64
	old   bool                // ids are made as the first release made ids
	thin  bool                // on two servers only
	fail  bool                // nothing can be read
	put   func(name string)   // called when a blob's chunk exists, before the blob's reference does
	is    map[string]blobCopy // by name
}

type blobCopy struct{ ref, kept meta.BlobRef }

func newLeakSite(t *testing.T) *leakSite {
	l := &leakSite{found: leaks{}, is: map[string]blobCopy{}}
	l.grid = newGrid(t, func(c *Config) {
		if l.inner == nil {
			l.inner = c.Blob
		}
		c.Blob = l
		c.RepairInterval, c.ListInterval, c.BlobGrace, c.CheckpointEvery = time.Hour, time.Hour, time.Hour, time.Hour
		c.RepairGrace, c.LeakGrace = time.Nanosecond, time.Nanosecond
	}, racks[0], racks[2], racks[4])
	l.s.cluster.Blob = l
	p := l.s.dial("a")
	for i := range 20 {
		p.create(t, fmt.Sprint("f", i))
	}
	return l
}

func (l *leakSite) Put(ctx context.Context, of meta.BlobOwner, name string, r io.Reader) (meta.BlobRef, error) {
	kept, err := l.inner.Put(ctx, of, name, r)
	if err != nil {
		return kept, err
	}
	l.mu.Lock()
	l.last++
	id := meta.ChunkID{Term: uint32(of.Term), Counter: uint64(of.Volume)<<32 | l.last}
	if l.old {
		id = meta.ChunkID{Term: blobTerm + 7, Counter: l.last}
	}
	part := meta.BlobPart{Chunk: id, Length: kept.Length, Servers: []meta.ServerID{1, 2, 3}}
	if l.thin {
		part.Servers = part.Servers[:2]
	}
	ref := kept
	ref.Name, ref.Parts = fmt.Sprintf("%s %v", name, id), []meta.BlobPart{part}
	l.is[ref.Name] = blobCopy{ref, kept}
	put := l.put
	l.mu.Unlock()
	l.lay(id, part.Servers...)
	if put != nil {
		put(name)
	}
	return ref, nil
}

func (l *leakSite) Get(ctx context.Context, ref meta.BlobRef) (io.ReadCloser, error) {
	l.mu.Lock()
	c, ok := l.is[ref.Name]
	fail := l.fail
	l.mu.Unlock()
	if fail {
		return nil, meta.E("read blob", meta.Unavailable, ref.Name, nil)
	}
	if !ok || !l.there(ref.Parts[0].Chunk, ref.Parts[0].Servers...) {
		return nil, meta.E("read blob", meta.NotFound, ref.Name, nil)
	}
	return l.inner.Get(ctx, c.kept)
}

func (l *leakSite) Delete(_ context.Context, ref meta.BlobRef) error {
	for _, p := range ref.Parts {
		for _, id := range p.Servers {
			n := l.nodes[id]
			n.mu.Lock()
			delete(n.chunks, p.Chunk)
			n.mu.Unlock()
		}
	}
	return nil
}

// lay puts a chunk on servers.
func (l *leakSite) lay(id meta.ChunkID, on ...meta.ServerID) meta.ChunkID {
	for _, s := range on {
		n := l.nodes[s]
		n.mu.Lock()
		n.chunks[id] = &gridChunk{state: meta.ChunkSealed, data: []byte("blob")}
		n.mu.Unlock()
	}
	return id
}

// there: all those servers have the chunk.
func (l *leakSite) there(id meta.ChunkID, on ...meta.ServerID) bool {
	return !slices.ContainsFunc(on, func(s meta.ServerID) bool {
		n := l.nodes[s]
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.chunks[id] == nil
	})
}

// leak is a leftover chunk of a checkpoint, as after a crash.
func (l *leakSite) leak() meta.ChunkID {
	l.mu.Lock()
	l.last++
	id := meta.ChunkID{Term: uint32(l.owner().own.Term()), Counter: uint64(meta.RootVolume)<<32 | l.last}
	l.mu.Unlock()
	return l.lay(id, 1, 2, 3)
}

func (l *leakSite) owner() *owner { return l.s.srv.hosted.opened(meta.RootVolume) }

// look looks for leaks, as often as a test says.
func (l *leakSite) look(times int) {
	for range times {
		l.s.srv.orphans.collectLeaks(l.found)
		time.Sleep(time.Millisecond) // more than the grace
	}
}

// whole fails unless a checkpoint can be read to the last byte.
func (l *leakSite) whole(cp journal.Checkpoint) {
	l.t.Helper()
	for _, r := range blobsOf(cp) {
		rd, err := l.Get(l.t.Context(), r)
		if err != nil {
			l.t.Fatalf("%s is gone: %v", r.Name, err)
		}
		if _, err := io.Copy(io.Discard, rd); err != nil {
			l.t.Fatal(err)
		}
		rd.Close()
	}
}

func (l *leakSite) more(name string) {
	l.t.Helper()
	p := l.s.dial(name)
	p.create(l.t, name)
}

// Leaked chunks go at the second look, and no others.
func TestLeakedChunksGo(t *testing.T) {
	t.Parallel()
	l := newLeakSite(t)
	cp := l.s.checkpointNow()
	x := l.leak()
	later := l.lay(meta.ChunkID{Term: uint32(l.owner().own.Term()) + 1, Counter: uint64(meta.RootVolume)<<32 | 1<<20}, 1, 2, 3)
	foreign := l.lay(meta.ChunkID{Term: 1, Counter: 77<<32 | 1}, 1)
	l.look(1)
	if !l.there(x, 1, 2, 3) {
		t.Fatal("one look is no proof")
	}
	l.look(1)
	for _, s := range []meta.ServerID{1, 2, 3} {
		if l.there(x, s) {
			t.Errorf("server %d still has the leaked chunk", s)
		}
	}
	l.look(2)
	if !l.there(later, 1, 2, 3) {
		t.Error("a chunk of a later term was deleted: its owner is another one")
	}
	if !l.there(foreign, 1) {
		t.Error("a chunk of a volume that is not served here was deleted")
	}
	l.whole(cp)
}

// Each of these obstacles keeps everything, or its own part, for as long as the obstacle lasts.
func TestLeaksAreProven(t *testing.T) {
	t.Parallel()
	stay := func(t *testing.T, l *leakSite, x meta.ChunkID, lift func()) {
		t.Helper()
		l.look(4)
		if !l.there(x, 1, 2, 3) {
			t.Fatal("deleted without proof")
		}
		lift()
		l.look(2)
		if l.there(x, 1) || l.there(x, 2) || l.there(x, 3) {
			t.Fatal("with proof it is not deleted")
		}
	}
	t.Run("the manifest can't be read", func(t *testing.T) {
		l := newLeakSite(t)
		cp := l.s.checkpointNow()
		l.mu.Lock()
		l.fail = true
		l.mu.Unlock()
		stay(t, l, l.leak(), func() { l.mu.Lock(); l.fail = false; l.mu.Unlock() })
		l.whole(cp)
	})
	t.Run("nothing is recorded and somebody reads", func(t *testing.T) {
		l := newLeakSite(t)
		id, err := l.s.cluster.log.Reader().Pin(t.Context(), 1)
		if err != nil {
			t.Fatal(err)
		}
		stay(t, l, l.leak(), func() {
			if err := id(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("the volume is in quarantine", func(t *testing.T) {
		l := newLeakSite(t)
		l.s.checkpointNow()
		o := l.owner()
		until := func(at time.Time) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.restored = &cluster.Restoration{Settled: true, Quarantine: meta.Time(at.UnixNano())}
		}
		until(time.Now().Add(time.Hour))
		stay(t, l, l.leak(), func() { until(time.Now().Add(-time.Hour)) })
	})
	t.Run("a server can't be listed to the end", func(t *testing.T) {
		l := newLeakSite(t)
		cp := l.s.checkpointNow()
		for range 8 {
			l.leak()
		}
		x := l.leak()
		fail := func(on bool) {
			for _, n := range l.nodes {
				n.mu.Lock()
				n.failPage = on
				n.mu.Unlock()
			}
		}
		// Seen, then not seen because the list broke off, then seen again: the look counts once.
		l.look(1)
		fail(true)
		l.look(1)
		fail(false)
		l.look(1)
		if !l.there(x, 1, 2, 3) {
			t.Fatal("what a broken list did not show counted as seen")
		}
		l.look(1)
		if l.there(x, 1) {
			t.Fatal("with proof it is not deleted")
		}
		l.whole(cp)
	})
	t.Run("a checkpoint is being made", func(t *testing.T) {
		l := newLeakSite(t)
		reached, goOn := make(chan struct{}), make(chan struct{})
		l.put = func(name string) {
			if name == "manifest" {
				close(reached)
				<-goOn
			}
		}
		if err := l.owner().flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- l.owner().checkpoints.checkpoint(context.Background()) }()
		<-reached
		l.put = nil
		x := l.leak()
		stay(t, l, x, func() {
			close(goOn)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
		})
		l.whole(l.s.recorded())
	})
	t.Run("it is not certain who owns the volume", func(t *testing.T) {
		l := newLeakSite(t)
		l.s.checkpointNow()
		o := l.owner()
		own := o.own
		as := func(x Ownership) { o.mu.Lock(); o.own = x; o.mu.Unlock() }
		as(expiredOwn{own})
		stay(t, l, l.leak(), func() { as(own) })
	})
	t.Run("one server does not obey", func(t *testing.T) {
		l := newLeakSite(t)
		l.s.checkpointNow()
		x, y := l.leak(), l.leak()
		n := l.nodes[1]
		n.mu.Lock()
		n.failDelete = meta.IO
		n.mu.Unlock()
		l.look(2)
		if !l.there(x, 1) || l.there(x, 2) || l.there(x, 3) || l.there(y, 2) || l.there(y, 3) {
			t.Error("the others were to be rid of it")
		}
		n.mu.Lock()
		n.failDelete = meta.KindOK
		n.mu.Unlock()
		l.look(2)
		if l.there(x, 1) || l.there(y, 1) {
			t.Error("not tried again")
		}
	})
}

// A reader has a checkpoint pinned. The owner made a second checkpoint, and was stopped before
// deleting the chunks of the first checkpoint alone. Those chunks look leaked, and stay until the
// reader is done: also when the second checkpoint is at the same entry, as when replicas were
// lost and the files are stored again.
func TestLeaksAndPins(t *testing.T) {
	t.Parallel()
	for _, same := range []bool{false, true} {
		t.Run(fmt.Sprint("same entry: ", same), func(t *testing.T) {
			l := newLeakSite(t)
			l.thin = same // with too few replicas: the next checkpoint stores all files again
			old := l.s.checkpointNow()
			reader := journal.New(1, l.s.cluster.log.Reader(), nil)
			_, release, err := reader.Pin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			l.mu.Lock()
			l.thin = false
			l.mu.Unlock()
			if !same {
				l.more("b")
			}
			o := l.owner()
			cp := l.s.checkpointNow()
			if same != (cp.Position == old.Position) || cp.Manifest.Name == old.Manifest.Name {
				t.Fatalf("the checkpoints are at %v and %v", old.Position, cp.Position)
			}
			l.whole(old)
			o.mu.Lock()
			o.checkpoints.old = nil // as a crash leaves the state
			o.mu.Unlock()
			l.look(4)
			l.whole(old)
			l.whole(cp)
			if err := release(t.Context()); err != nil {
				t.Fatal(err)
			}
			l.look(2)
			l.whole(cp)
			if l.there(old.Manifest.Parts[0].Chunk, 1) {
				t.Error("what nobody needs any more is not deleted")
			}
		})
	}
}

// Ids of the first release name no checkpoint: the checkpoints of all volumes are asked,
// including volumes being deleted, which may have to be loaded first; and an unreadable
// checkpoint keeps everything.
func TestLeaksWithOldIDs(t *testing.T) {
	t.Parallel()
	l := newLeakSite(t)
	l.old = true
	v, err := l.s.cluster.CreateVolume(t.Context(), "other", meta.Policy{Replicas: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	o, err := l.s.srv.hosted.open(t.Context(), v.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := o.await(t.Context(), o.recovered); err != nil {
		t.Fatal(err)
	}
	if err := o.checkpoints.checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	cp, have, err := o.j.Checkpoint(t.Context())
	if err != nil || !have {
		t.Fatal(have, err)
	}
	if cp, err = LoadManifest(t.Context(), l, cp); err != nil {
		t.Fatal(err)
	}
	root := l.s.checkpointNow()
	x := l.lay(meta.ChunkID{Term: blobTerm + 7, Counter: 1 << 20}, 1, 2, 3)
	l.mu.Lock()
	manifest := l.is[cp.Manifest.Name]
	delete(l.is, cp.Manifest.Name)
	l.mu.Unlock()
	l.look(4)
	if !l.there(x, 1, 2, 3) {
		t.Error("deleted though a volume's manifest could not be read")
	}
	l.mu.Lock()
	l.is[cp.Manifest.Name] = manifest
	l.mu.Unlock()
	if _, err := l.s.cluster.UpdateVolume(t.Context(), v.ID, func(v *cluster.Volume) error { v.State = cluster.VolumeDeleting; return nil }); err != nil {
		t.Fatal(err)
	}
	l.look(4)
	l.whole(root)
	l.whole(cp)
	if l.there(x, 1) {
		t.Error("what no checkpoint names is not deleted")
	}
}

// With the journal out of reach nothing is known.
func TestLeaksWithoutJournal(t *testing.T) {
	t.Parallel()
	l := newLeakSite(t)
	cp := l.s.checkpointNow()
	o := l.owner()
	named := map[meta.ChunkID]bool{}
	if err := o.namedBlobs(t.Context(), deafLog{o.j}, named); !errors.Is(err, meta.Unavailable) {
		t.Errorf("%v", err)
	}
	if err := o.namedBlobs(t.Context(), o.j, named); err != nil || len(named) != len(blobsOf(cp)) {
		t.Errorf("%d chunks are named, %v", len(named), err)
	}
}

// deafLog is a journal whose pins can't be read.
type deafLog struct{ Journal }

func (deafLog) OldestPin(context.Context) (meta.Seq, bool, error) {
	return 0, false, meta.E("read pins", meta.Unavailable, "", nil)
}
