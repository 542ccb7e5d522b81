package fuse

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// awayTree has volumes of which something is not durable as long as servers are away.
type awayTree struct {
	*memTree
	away away
}

type away struct {
	mu        sync.Mutex
	over      bool
	abandoned bool
	changes   bool // no bytes are lost, but answered changes are
	asked     int  // syncs while servers were away
}

func (t *awayTree) VolumeByID(ctx context.Context, id meta.VolumeID) (Volume, error) {
	v, err := t.memTree.VolumeByID(ctx, id)
	if err != nil {
		return nil, err
	}
	return &awayVolume{v.(*memVolume), id, &t.away}, nil
}

type awayVolume struct {
	*memVolume
	id   meta.VolumeID
	away *away
}

func (v *awayVolume) left() bool { return v.id == 1 && !v.away.over && !v.away.abandoned }

func (v *awayVolume) SyncAll(ctx context.Context) error {
	v.away.mu.Lock()
	defer v.away.mu.Unlock()
	if v.left() {
		v.away.asked++
		return meta.E("write back", meta.Unavailable, v.Name(), errors.New("2 of 3 servers are away"))
	}
	return v.memVolume.SyncAll(ctx)
}

func (v *awayVolume) Unsynced() penstock.Unsynced {
	v.away.mu.Lock()
	defer v.away.mu.Unlock()
	u := penstock.Unsynced{Volume: v.id, Name: v.Name()}
	if v.left() {
		u.Changes, u.Why = true, "servers are away"
		if !v.away.changes {
			u.Files, u.Bytes = 2, 8192
		}
	}
	return u
}

func (v *awayVolume) UnsyncedFiles(int) []penstock.UnsyncedFile { return nil }

func (v *awayVolume) Abandon() penstock.Unsynced {
	u := v.Unsynced()
	v.away.mu.Lock()
	defer v.away.mu.Unlock()
	v.away.abandoned = true
	return u
}

// tried waits until something was tried so often while servers were away.
func (a *away) tried(t *testing.T, m *mounted, times int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		a.mu.Lock()
		n := a.asked
		a.mu.Unlock()
		if n >= times {
			return
		}
		select {
		case <-m.Done():
			t.Fatalf("DATA: the mount has ended after %d tries, and what was written is not durable", n)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a minute what is not durable was tried %d times, want %d", n, times)
		}
	}
}

func (a *away) back() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = true
}

// TestUmountWaits: whichever way a mount is ended, its process goes on trying to make written
// bytes durable while servers are away, and ends when the bytes are durable, or an operator gives
// the bytes up.
func TestUmountWaits(t *testing.T) {
	t.Parallel()
	force := make(chan struct{})
	close(force)
	for name, end := range map[string]func(m *mounted) error{
		"umount":        func(m *mounted) error { return exec.Command("umount", m.Dir()).Run() },
		"by force":      func(m *mounted) error { return exec.Command("umount", "-f", "-l", m.Dir()).Run() },
		"signal":        func(m *mounted) error { return m.Stop(context.Background(), time.Minute, nil) },
		"second signal": func(m *mounted) error { _ = m.Stop(context.Background(), time.Minute, force); return nil },
		"short grace":   func(m *mounted) error { _ = m.Stop(context.Background(), time.Millisecond, nil); return nil },
	} {
		for _, how := range []string{"durable", "changes", "abandoned"} {
			if how != "durable" && name != "umount" {
				continue // it is the same wait
			}
			t.Run(name+"/"+how, func(t *testing.T) {
				t.Parallel()
				tree := &awayTree{memTree: newMemTree()}
				tree.away.changes = how == "changes"
				cfg := Config{Tree: tree}
				cfg.Options.UnsafeNoDrain = os.Getenv("PENSTOCK_CONTROL") == "mount-nodrain"
				m := mountTree(t, tree.memTree, cfg)
				ended := make(chan error, 1)
				go func() { ended <- end(m) }()
				tree.away.tried(t, m, 3)
				select {
				case <-m.Done():
					t.Fatal("DATA: the mount has ended, and what was written is not durable")
				default:
				}
				if how == "abandoned" {
					if l := m.Abandon(); len(l) != 1 || l[0].Files != 2 || l[0].Bytes != 8192 {
						t.Errorf("given up: %+v", l)
					}
				} else {
					tree.away.back()
				}
				<-m.Done()
				if err := <-ended; err != nil && how != "abandoned" {
					t.Error(err)
				}
			})
		}
	}
}

// The unmounting process may be killed: the mount's process goes on.
func TestUmountIsKilled(t *testing.T) {
	t.Parallel()
	tree := &awayTree{memTree: newMemTree()}
	m := mountTree(t, tree.memTree, Config{Tree: tree})
	cmd := exec.Command("umount", m.Dir())
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	tree.away.tried(t, m, 2)
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	select {
	case <-m.Done():
		t.Fatal("DATA: the mount has ended, and what was written is not durable")
	default:
	}
	tree.away.back()
	<-m.Done()
}

// A mount of which everything is durable ends without the cluster's word.
func TestUmountWithoutTheCluster(t *testing.T) {
	tree := &awayTree{memTree: newMemTree()}
	m := mountTree(t, tree.memTree, Config{Tree: tree})
	tree.away.abandoned = true // nothing is left
	v := tree.volumes[1]
	v.mu.Lock()
	v.fail["syncall"] = meta.E("sync", meta.Unavailable, "", nil)
	v.mu.Unlock()
	if err := exec.CommandContext(t.Context(), "umount", m.Dir()).Run(); err != nil {
		t.Error(err)
	}
	<-m.Done()
}
