package server

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// covered tells how far the recorded checkpoint of a volume is behind its journal, as read by a
// program that has only the checkpoint and the journal.
func covered(f *fakeCluster, v meta.VolumeID) error {
	ctx := context.Background()
	j, err := f.Follow(ctx, v)
	if err != nil {
		return err
	}
	cp, have, err := j.Checkpoint(ctx)
	if err != nil || !have {
		return fmt.Errorf("volume %d has no checkpoint: %w", v, err)
	}
	if _, err := j.Entry(ctx, cp.Seq+1); !errors.Is(err, meta.NotFound) {
		return fmt.Errorf("the checkpoint of volume %d is at entry %d, and the journal goes on: %v", v, cp.Seq, err)
	}
	return nil
}

// Every owner of the volume is killed before a checkpoint would become old. Still, a checkpoint
// covers the entries that the first owner journaled.
func TestCheckpointAgeOutlivesOwners(t *testing.T) {
	t.Parallel()
	s, _ := newPlacedSite(t, func(c *Config) { c.CheckpointEvery = 8 * time.Second })
	if _, err := s.srv.hosted.open(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	s.checkpointNow() // from here the age counts
	p := s.dial("a")
	p.files(t, "x", 10)
	if err := s.srv.hosted.opened(1).flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.Close(t.Context())
	for n := 0; ; n++ {
		if err := covered(s.cluster, 1); err == nil {
			return
		} else if n == 30 {
			t.Fatalf("after %d owners: %v", n, err)
		}
		s.crash()
		s.start()
		if _, err := s.srv.hosted.open(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
	}
}

// An unused volume is closed with all of its entries in a checkpoint, although the checkpoint is
// not old yet; the root volume is not closed.
func TestClosedVolumeIsInItsCheckpoint(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) {
		c.Cluster = viewed{c.Cluster.(*fakeCluster)}
		c.IdleClose, c.HomeAfter, c.Followers, c.CheckpointEvery = 100*time.Millisecond, 100*time.Millisecond, -1, time.Hour
	}, racks[:3]...)
	for _, v := range idleVolumes(g, 3) {
		if err := covered(g.s.cluster, v); err != nil {
			t.Errorf("DATA: it is closed: %v", err)
		}
	}
	if _, err := g.s.srv.hosted.open(t.Context(), meta.RootVolume); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * visitLook)
	if g.s.srv.hosted.opened(meta.RootVolume) == nil {
		t.Error("the root volume was closed, so nobody keeps the cluster's records on the chunk servers")
	}
}

// The servers stop in order, with entries of a volume in no checkpoint. After the servers' return
// no client asks for the volume, and yet the volume gets a checkpoint and is closed.
func TestStoppedVolumeGetsItsCheckpoint(t *testing.T) {
	t.Parallel()
	every := time.Hour
	g := newGrid(t, func(c *Config) {
		c.Cluster = viewed{c.Cluster.(*fakeCluster)}
		c.IdleClose, c.HomeAfter, c.Followers, c.CheckpointEvery = 100*time.Millisecond, 100*time.Millisecond, -1, every
	}, racks[:3]...)
	v := idleVolumes(g, 1)[0]
	p := g.s.dial("late")
	if _, err := p.Do(t.Context(), v, meta.OpID{}, newFile("late"), meta.LeaseNone); err != nil {
		t.Fatal(err)
	}
	if err := g.s.srv.hosted.opened(v).flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.Close(t.Context())
	if err := g.s.srv.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-g.s.done
	if covered(g.s.cluster, v) == nil {
		t.Fatal("the checkpoint has everything already: this test proves nothing")
	}
	every = 100 * time.Millisecond
	g.s.start()
	eventually(t, "the volume's checkpoint has all of its entries", func() error { return covered(g.s.cluster, v) })
	closed(g, []meta.VolumeID{v})
}

// Grants and members change while no file does: the root volume's checkpoint soon has the changes
// and keeps nothing of the earlier state.
func TestRecordsReachTheChunkServers(t *testing.T) {
	t.Parallel()
	s, p := newPlacedSite(t, func(c *Config) { c.CheckpointEvery = time.Second })
	a := s.dial("a")
	a.files(t, "x", 3)
	before := s.checkpointNow()
	blobs := p.count()
	for i := range 3 {
		want := cluster.Record{Key: "grants/0000000000000001", Value: fmt.Appendf(nil, `{"v":1,"who":"client/%d"}`, i)}
		s.cluster.mu.Lock()
		s.cluster.records = []cluster.Record{want}
		s.cluster.mu.Unlock()
		eventually(t, "the recorded checkpoint has the grant", func() error {
			cp, _, err := s.srv.hosted.opened(1).j.Checkpoint(t.Context())
			if err != nil {
				return err
			}
			m, err := loadManifest(t.Context(), s.cluster.Blob, cp)
			if err != nil {
				return err
			}
			if len(m.Records) != 1 || string(m.Records[0].Key) != want.Key || string(m.Records[0].Value) != string(want.Value) {
				return fmt.Errorf("it has %v", m.Records)
			}
			return nil
		})
	}
	if after := s.recorded(); after.Position != before.Position {
		t.Errorf("the checkpoint is at %v, before at %v, and no file changed", after.Position, before.Position)
	}
	// The manifests of before are deleted.
	eventually(t, "old manifests go", func() error {
		if n := p.count(); n > blobs {
			return fmt.Errorf("%d blobs, before %d", n, blobs)
		}
		return nil
	})
}
