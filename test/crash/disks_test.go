package crash

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/server"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/test/disk"
	"penstock.io/penstock/test/load"
)

// diskFarm is a chunk server in this process, with disks that really break.
type diskFarm struct {
	*testing.T
	disks []*disk.Disk
	s     *server.Server
	data  map[meta.ChunkID][]byte
	next  uint64
}

var farmFence = meta.Fence{Term: 1}

func newDiskFarm(t *testing.T, n int) *diskFarm {
	f := &diskFarm{T: t, data: map[meta.ChunkID][]byte{}}
	dir := t.TempDir()
	var specs []server.DiskSpec
	for i := range n {
		d, err := disk.New(filepath.Join(dir, fmt.Sprintf("disk%d.img", i)), filepath.Join(dir, fmt.Sprintf("disk%d", i)), 64<<20)
		if d != nil {
			t.Cleanup(func() {
				if err := d.Remove(); err != nil {
					t.Error(err)
				}
			})
		}
		if err != nil {
			t.Fatal(err)
		}
		f.disks = append(f.disks, d)
		specs = append(specs, server.DiskSpec{Path: d.At, Class: "ssd"})
	}
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	ds, err := server.OpenDisks(server.DisksConfig{Dir: t.TempDir(), Disks: specs, Server: 1, Logger: quiet, Options: store.Options{Reserve: 8 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	f.s = server.NewWithDisks(server.Config{ID: 1, Logger: quiet}, ds)
	t.Cleanup(func() { _ = f.s.Close() }) // disks that failed can't be closed without an error
	return f
}

// add writes, syncs and seals a chunk on the disk that the server chooses.
func (f *diskFarm) add(size int) (meta.ChunkID, error) {
	ctx := context.Background()
	f.next++
	id := meta.ChunkID{Volume: 1, Term: 1, Counter: f.next}
	p := make([]byte, size)
	rand.NewChaCha8([32]byte{byte(f.next)}).Read(p)
	if err := f.s.Append(ctx, id, farmFence, 0, p, chunkserver.CRC(p)); err != nil {
		return id, err
	}
	if r := f.s.Order(ctx, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: farmFence, Final: true, Length: uint64(size)}); r.Err != 0 {
		return id, meta.E("seal", r.Err, r.Detail, nil)
	}
	f.data[id] = p
	return id, nil
}

func (f *diskFarm) mustAdd(n, size int) {
	f.Helper()
	for range n {
		if _, err := f.add(size); err != nil {
			f.Fatal(err)
		}
	}
}

// listed tells which disk each chunk is listed on.
func (f *diskFarm) listed() (map[meta.ChunkID]string, meta.OrderResult) {
	r := f.s.Order(context.Background(), meta.Order{Kind: meta.OrderList, Volume: 1})
	on := map[meta.ChunkID]string{}
	for _, c := range r.Chunks {
		on[c.ID] = c.Disk
	}
	return on, r
}

func (f *diskFarm) state(i int) meta.DiskInfo { return f.s.Info().Disks[i] }

func (f *diskFarm) until(what string, ok func() bool) {
	f.Helper()
	for end := time.Now().Add(90 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			f.Fatalf("%s: %+v", what, f.s.Info().Disks)
		}
	}
}

// reads tells how many chunks of a disk are served, and fails on wrong bytes.
func (f *diskFarm) reads(on map[meta.ChunkID]string, id string) (good, all int) {
	f.Helper()
	for c, d := range on {
		if d != id {
			continue
		}
		all++
		got := make([]byte, len(f.data[c]))
		if err := f.s.Read(context.Background(), c, got, 0); err == nil {
			if !bytes.Equal(got, f.data[c]) {
				f.Fatalf("DATA: %v reads wrong", c)
			}
			good++
		}
	}
	return good, all
}

func (f *diskFarm) toldOf(id string) func() bool {
	return func() bool {
		return slices.ContainsFunc(f.s.Events(0, 1000), func(e meta.ReplicaEvent) bool { return e.Kind == meta.EventDiskFailed && e.Disk == id })
	}
}

// TestDiskFull: a full disk takes no new chunks, the other disk does, and the first disk
// is used again once it has room.
func TestDiskFull(t *testing.T) {
	f := newDiskFarm(t, 2)
	f.mustAdd(12, 100_000)
	release, err := f.disks[0].Fill(0)
	if err != nil {
		t.Fatal(err)
	}
	f.until("the full disk is not noticed", func() bool { return f.state(0).State == meta.DiskFull })
	before, _ := f.listed()
	f.mustAdd(12, 100_000)
	after, r := f.listed()
	if r.Err != 0 || len(after) != 24 {
		t.Fatalf("%d listed: %+v", len(after), r.Err)
	}
	for id, d := range after {
		if _, old := before[id]; !old && d == f.state(0).ID {
			t.Errorf("%v went to the full disk", id)
		}
	}
	if good, all := f.reads(after, f.state(0).ID); good != all || all == 0 {
		t.Errorf("%d of %d chunks of a full disk are served", good, all)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	f.until("the room is not noticed", func() bool { return f.state(0).State == meta.DiskOK })
}

// TestDiskReadOnly: the server notices that the kernel made a disk read-only even if
// nobody writes. The disk takes no new chunks, and serves its chunks until other disks
// have copies.
func TestDiskReadOnly(t *testing.T) {
	f := newDiskFarm(t, 2)
	f.mustAdd(12, 100_000)
	generation := f.s.Generation()
	// The kernel does the same after an error: files that are open for writing stay open.
	if out, err := exec.Command("mount", "-o", "remount,abort,errors=remount-ro", f.disks[0].At).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	bad := f.state(0).ID
	f.until("the read-only disk is not noticed", func() bool { return f.state(0).State == meta.DiskFailing })
	f.until("the read-only disk is not reported", f.toldOf(bad))
	if f.s.Generation() == generation {
		t.Error("who listed before need not list again")
	}
	before, r := f.listed()
	if r.Err != 0 || len(before) != 12 {
		t.Fatalf("%d listed: %+v", len(before), r)
	}
	if good, all := f.reads(before, bad); good != all || all == 0 {
		t.Errorf("%d of %d chunks of a read-only disk are served", good, all)
	}
	f.mustAdd(12, 100_000)
	after, _ := f.listed()
	if len(after) != 24 {
		t.Errorf("%d chunks are listed", len(after))
	}
}

// TestDiskDies: every access to a disk is an I/O error. The disk's chunks count as lost,
// the chunks of other disks are served, and a new disk takes the place without a restart.
func TestDiskDies(t *testing.T) {
	f := newDiskFarm(t, 3)
	f.mustAdd(18, 100_000)
	before, _ := f.listed()
	bad := f.state(1).ID
	// Failed reads prove the loss only of a disk with at least three chunks.
	for _, n := f.reads(before, bad); n < 3; _, n = f.reads(before, bad) {
		f.mustAdd(1, 100_000)
		before, _ = f.listed()
	}
	if err := f.disks[1].Cut(); err != nil { // ext4 answers EIO from then on
		t.Fatal(err)
	}
	if err := load.SyncAll(f.disks[1].At); err == nil {
		t.Fatal("a disk that is cut off took everything")
	}
	f.until("the dead disk is not noticed", func() bool { return f.state(1).State != meta.DiskOK })
	f.until("the dead disk is not reported", f.toldOf(bad))
	// Until the server has declared the disk lost, a listing fails rather than leaving
	// out the disk's chunks.
	f.until("the dead disk goes on to be listed", func() bool {
		on, r := f.listed()
		if r.Err != 0 || f.state(1).State != meta.DiskFailed {
			return false
		}
		for id, d := range before {
			if _, there := on[id]; there == (d == bad) {
				t.Fatalf("%v on disk %s: listed %v", id, d, there)
			}
		}
		return true
	})
	for i := range 3 {
		good, all := f.reads(before, f.state(i).ID)
		if i != 1 && (good != all || all == 0) || i == 1 && good > 0 {
			t.Errorf("disk %d: %d of %d chunks are served", i, good, all)
		}
	}
	f.mustAdd(6, 100_000)
	ctx := context.Background()
	replace := func() meta.OrderResult {
		return f.s.Order(ctx, meta.Order{Kind: meta.OrderDisk, Disk: bad, Adopt: true})
	}
	// At the first call, the server closes the disk's files, so that the disk can be
	// unmounted.
	if r := replace(); r.Err == 0 {
		t.Fatalf("a dead disk was taken for a new one: %+v", r)
	}
	if err := f.disks[1].Unmount(); err != nil {
		t.Fatalf("the server holds on to it: %v", err)
	}
	fresh, err := disk.New(filepath.Join(t.TempDir(), "new.img"), f.disks[1].At, 64<<20)
	if fresh != nil {
		t.Cleanup(func() {
			_ = f.s.Close()
			if err := fresh.Remove(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	if r := replace(); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	if d := f.state(1); d.State != meta.DiskOK || d.ID == bad {
		t.Fatalf("%+v", d)
	}
	f.until("the new disk takes nothing", func() bool {
		f.mustAdd(1, 1000)
		on, _ := f.listed()
		_, all := f.reads(on, f.state(1).ID)
		return all > 0
	})
}
