package server

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

// placed is a Blob whose references name chunk servers: three live servers, or as many as live.
type placed struct {
	meta.Blob
	place func() []meta.ServerID

	mu   sync.Mutex
	kept map[string]meta.BlobRef
}

func (p *placed) bare(ref meta.BlobRef) meta.BlobRef {
	ref.Parts = nil
	return ref
}

func (p *placed) Put(ctx context.Context, of meta.BlobOwner, name string, r io.Reader) (meta.BlobRef, error) {
	ref, err := p.Blob.Put(ctx, of, name, r)
	if err != nil {
		return ref, err
	}
	ref.Parts = []meta.BlobPart{{Length: ref.Length, Servers: p.place()}}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept[ref.Name] = ref
	return ref, nil
}

func (p *placed) Get(ctx context.Context, ref meta.BlobRef) (io.ReadCloser, error) {
	return p.Blob.Get(ctx, p.bare(ref))
}

func (p *placed) Delete(ctx context.Context, ref meta.BlobRef) error {
	p.mu.Lock()
	delete(p.kept, ref.Name)
	p.mu.Unlock()
	return p.Blob.Delete(ctx, p.bare(ref))
}

func (p *placed) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.kept)
}

func newPlacedSite(t *testing.T, adjust func(*Config)) (*site, *placed) {
	s := newSite(t)
	s.crash()
	p := &placed{Blob: s.cluster.Blob, kept: map[string]meta.BlobRef{}, place: func() []meta.ServerID {
		g, err := s.srv.SystemGrant(meta.ChunkID{}, 1)
		if err != nil {
			return nil // no chunk servers are known
		}
		return g.Servers
	}}
	s.cluster.Blob = p
	s.adjust = func(c *Config) {
		c.BlobGrace = 100 * time.Millisecond
		if adjust != nil {
			adjust(c)
		}
	}
	s.start()
	return s, p
}

func (s *site) checkpointNow() journal.Checkpoint {
	s.t.Helper()
	o := s.srv.hosted.opened(1)
	if err := o.flush(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	// A checkpoint holds the state of the store, a moment after the journal.
	if err := o.checkpoints.awaitApplied(s.t.Context(), o.durableNow()); err != nil {
		s.t.Fatal(err)
	}
	if err := o.checkpoints.checkpoint(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	return s.recorded()
}

func (s *site) recorded() journal.Checkpoint {
	s.t.Helper()
	cp, ok, err := s.srv.hosted.opened(1).j.Checkpoint(s.t.Context())
	if err != nil || !ok {
		s.t.Fatal(ok, err)
	}
	if cp, err = LoadManifest(s.t.Context(), s.cluster.Blob, cp); err != nil {
		s.t.Fatal(err)
	}
	return cp
}

// A reader loads a checkpoint, holding the checkpoint's pin; the owner makes further checkpoints
// meanwhile. The files that the reader needs stay until the reader is done, no longer.
func TestPinnedBlobsStay(t *testing.T) {
	t.Parallel()
	s, p := newPlacedSite(t, nil)
	a := s.dial("a")
	a.files(t, "x", 10)
	old := s.checkpointNow()
	reader := journal.New(1, s.cluster.log.Reader(), nil)
	pinned, release, err := reader.Pin(t.Context())
	if err != nil || pinned.Position != old.Position {
		t.Fatal(pinned, err)
	}
	for i := range 3 {
		a.files(t, string(rune('a'+i)), 10)
		s.checkpointNow()
	}
	for _, r := range blobsOf(old) {
		rd, err := s.cluster.Blob.Get(t.Context(), r)
		if err != nil {
			t.Fatalf("%s is gone under its reader: %v", r.Name, err)
		}
		if _, err := io.Copy(io.Discard, rd); err != nil {
			t.Fatal(err)
		}
		rd.Close()
	}
	if err := release(t.Context()); err != nil {
		t.Fatal(err)
	}
	now := len(blobsOf(s.recorded()))
	eventually(t, "old blobs are deleted", func() error {
		if n := p.count(); n != now {
			return meta.E("count", meta.Busy, "", io.ErrShortBuffer)
		}
		return nil
	})
}

// A chunk server goes for good: the owner stores the checkpoint again on live servers. A server
// that comes back soon changes nothing.
func TestCheckpointRegainsReplicas(t *testing.T) {
	t.Parallel()
	s, _ := newPlacedSite(t, nil)
	var chunks [4]*fakeChunks
	for i := range chunks {
		chunks[i] = s.chunkServer(meta.ServerID(i + 1))
	}
	a := s.dial("a")
	a.files(t, "x", 10)
	cp := s.checkpointNow()
	for _, r := range blobsOf(cp) {
		if len(r.Parts[0].Servers) != blobReplicas {
			t.Fatalf("%s has replicas on %v", r.Name, r.Parts[0].Servers)
		}
	}
	if n := s.srv.serverMap.blobsShort(blobsOf(cp)); n != 0 {
		t.Fatalf("%d blobs are short of replicas", n)
	}
	gone := chunks[cp.Manifest.Parts[0].Servers[0]-1]
	gone.stop()
	eventually(t, "the checkpoint has three live replicas again", func() error {
		cp := s.recorded()
		for _, r := range blobsOf(cp) {
			if slices.Contains(r.Parts[0].Servers, gone.id) || len(r.Parts[0].Servers) != blobReplicas {
				return meta.E("replicas", meta.Busy, r.Name, nil)
			}
		}
		return nil
	})
	// A server that starts from nothing reads the new copy.
	s.crash()
	for _, dir := range must(filepath.Glob(filepath.Join(s.dir, "stores", "volume-*"))) {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	s.start()
	a = s.dial("b")
	a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: "x9"}, meta.LeaseNone)
}

// Two of three chunk servers stand on the same host: a checkpoint gets two replicas, and the
// owner does not store the checkpoint again and again for a third replica that no host has room
// for. A third host gives the checkpoint its third replica.
func TestCheckpointHasAsManyReplicasAsHosts(t *testing.T) {
	t.Parallel()
	s, _ := newPlacedSite(t, nil)
	s.chunkServerAt(1, "/dc/rack/a")
	s.chunkServerAt(2, "/dc/rack/a")
	s.chunkServerAt(3, "/dc/rack/b")
	a := s.dial("a")
	a.files(t, "x", 10)
	cp := s.checkpointNow()
	for _, r := range blobsOf(cp) {
		if len(r.Parts[0].Servers) != 2 {
			t.Fatalf("%s has replicas on %v", r.Name, r.Parts[0].Servers)
		}
	}
	if n := s.srv.serverMap.blobsShort(blobsOf(cp)); n != 0 {
		t.Fatalf("%d blobs are short of replicas that no host has room for", n)
	}
	s.chunkServerAt(4, "/dc/rack/c")
	eventually(t, "the checkpoint is on three hosts", func() error {
		for _, r := range blobsOf(s.recorded()) {
			if len(r.Parts[0].Servers) != blobReplicas {
				return meta.E("replicas", meta.Busy, r.Name, nil)
			}
		}
		return nil
	})
}

// The interval bounds how much a lost etcd takes along.
func TestCheckpointByTime(t *testing.T) {
	t.Parallel()
	s, _ := newPlacedSite(t, func(c *Config) { c.CheckpointEvery = time.Second })
	a := s.dial("a")
	for range 2 {
		a.files(t, time.Now().String(), 1)
		durable := s.srv.hosted.opened(1).durableNow()
		eventually(t, "a checkpoint by time", func() error {
			if cp, _, err := s.srv.hosted.opened(1).j.Checkpoint(t.Context()); err != nil || cp.Seq < durable {
				return meta.E("checkpoint", meta.Busy, "", err)
			}
			return nil
		})
	}
	// Nothing changes: nothing is stored. (The session's own records may still
	// come.)
	n := s.srv.stats.checkpoints.Load()
	time.Sleep(2500 * time.Millisecond)
	if now := s.srv.stats.checkpoints.Load(); now > n+1 {
		t.Fatalf("%d checkpoints of an idle volume", now-n)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
