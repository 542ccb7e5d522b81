package server

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

func states(s *Server) (all []meta.DiskState) {
	for _, d := range s.Info().Disks {
		all = append(all, d.State)
	}
	return all
}

// tree lists everything below a directory, to see that nothing was changed.
func tree(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if i, err := e.Info(); err == nil && !e.IsDir() {
			path += i.ModTime().String()
		}
		all = append(all, path)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestDiskExchanged: if another disk, or no disk, is in a disk's place, the server refuses the
// disk, leaves the disk alone and goes on with its other disks; only an explicit order makes the
// server take a new disk.
func TestDiskExchanged(t *testing.T) {
	f := &fabric{}
	dir := t.TempDir()
	specs := mkdirs(t, 2)
	start := func(specs ...DiskSpec) *Server { t.Helper(); return diskServer(t, f, 1, dir, specs...) }
	stop := func(s *Server) {
		t.Helper()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	s := start(specs...)
	want := map[meta.ChunkID][]byte{}
	for i := range 40 {
		id := meta.ChunkID{Volume: 1, Term: 1, Counter: uint64(i)}
		want[id] = random(1000+i, uint64(i))
		if err := s.Append(ctx, id, fence, 0, want[id], chunkserver.CRC(want[id])); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Sync(ctx, id, uint64(1000+i)); err != nil {
			t.Fatal(err)
		}
	}
	ids := []string{s.Info().Disks[0].ID, s.Info().Disks[1].ID}
	onFirst := 0
	for _, c := range s.Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1}).Chunks {
		if c.Disk == ids[0] {
			onFirst++
		}
	}
	if onFirst == 0 || onFirst == len(want) {
		t.Fatalf("%d of %d chunks on the first disk", onFirst, len(want))
	}
	served := func(s *Server) (n int) {
		for id, p := range want {
			if err := s.Read(ctx, id, make([]byte, len(p)), 0); err == nil {
				n++
			}
		}
		return n
	}
	stop(s)
	away := specs[1].Path + ".away"
	empty := func() {
		t.Helper()
		if err := os.Rename(specs[1].Path, away); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(specs[1].Path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	back := func() {
		t.Helper()
		if err := os.RemoveAll(specs[1].Path); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(away, specs[1].Path); err != nil {
			t.Fatal(err)
		}
	}
	failed := func(s *Server, says string) {
		t.Helper()
		d := s.Info().Disks
		if len(d) != 2 || d[0].State != meta.DiskOK || d[1].State != meta.DiskFailed || d[1].ID != ids[1] || !strings.Contains(d[1].Detail, says) {
			t.Fatalf("%+v", d)
		}
		if n := served(s); n != onFirst {
			t.Fatalf("%d chunks are served, %d ought to be", n, onFirst)
		}
		if r := s.Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1}); r.Err != 0 || len(r.Chunks) != onFirst {
			t.Fatalf("%d chunks are listed, %d ought to be", len(r.Chunks), onFirst)
		}
		eventually(t, "the failed disk is not reported", func() bool {
			return slices.ContainsFunc(s.Events(0, 10), func(e meta.ReplicaEvent) bool { return e.Kind == meta.EventDiskFailed && e.Disk == ids[1] })
		})
	}

	// Not mounted: the empty mount point stays empty, whatever bytes are appended.
	empty()
	s = start(specs...)
	failed(s, "is it mounted?")
	p := random(10, 1)
	if err := s.Append(ctx, meta.ChunkID{Volume: 2, Term: 2, Counter: 1}, fence, 0, p, chunkserver.CRC(p)); err != nil {
		t.Fatal(err)
	}
	stop(s)
	if got := tree(t, specs[1].Path); len(got) != 1 {
		t.Fatalf("the empty directory holds %v", got)
	}
	back()

	// Another server's disk, and another cluster's.
	other := mkdirs(t, 1)[0]
	stop(diskServer(t, f, 2, t.TempDir(), other))
	if err := os.Rename(specs[1].Path, away); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other.Path, specs[1].Path); err != nil {
		t.Fatal(err)
	}
	before := tree(t, specs[1].Path)
	s = start(specs...)
	failed(s, "belongs to chunk server 2")
	stop(s)
	if !slices.Equal(before, tree(t, specs[1].Path)) {
		t.Error("another server's disk was changed")
	}
	back()
	// A directory with other files.
	empty()
	if err := os.WriteFile(filepath.Join(specs[1].Path, "thesis.txt"), []byte("no copy"), 0o600); err != nil {
		t.Fatal(err)
	}
	before = tree(t, specs[1].Path)
	s = start(specs...)
	failed(s, "no format file")
	stop(s)
	if !slices.Equal(before, tree(t, specs[1].Path)) {
		t.Error("somebody's files were changed")
	}
	back()

	// Not among --disk any more; then again, at another path.
	s = start(specs[0])
	failed(s, "was started without it")
	stop(s)
	moved := DiskSpec{Path: away, Class: "ssd"}
	if err := os.Rename(specs[1].Path, away); err != nil {
		t.Fatal(err)
	}
	s = start(specs[0], moved)
	if st := states(s); len(st) != 2 || st[1] != meta.DiskOK || served(s) != len(want) {
		t.Fatalf("%v", s.Info().Disks)
	}
	stop(s)
	back0 := func() {
		if err := os.Rename(away, specs[1].Path); err != nil {
			t.Fatal(err)
		}
	}
	back0()

	// Exchanged for an empty disk: only by order. The server does not close a serving
	// disk.
	s = start(specs...)
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderDisk, Disk: ids[1], Adopt: true}); r.Err != meta.Busy {
		t.Fatalf("%+v", r)
	}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderDisk, Disk: ids[1]}); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	if st := states(s); st[1] != meta.DiskFailing || served(s) != len(want) {
		t.Fatalf("a disk that was given up: %v, %d served", st, served(s))
	}
	for i, want := range []meta.Kind{meta.NotEmpty, meta.Exists} { // the second time nothing is let go of
		if r := s.Order(ctx, meta.Order{Kind: meta.OrderDisk, Disk: ids[1], Adopt: true}); r.Err != want || !strings.Contains(r.Detail, "let go of") {
			t.Fatalf("%d: %+v", i, r)
		}
	}
	empty()
	generation := s.Generation()
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderDisk, Disk: ids[1], Adopt: true}); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	eventually(t, "the new disk is not reported", func() bool { return s.Generation() != generation })
	d := s.Info().Disks
	if len(d) != 2 || d[1].State != meta.DiskOK || d[1].ID == ids[1] {
		t.Fatalf("%+v", d)
	}
	stop(s)
	s = start(specs...)
	if st := states(s); len(st) != 2 || st[0] != meta.DiskOK || st[1] != meta.DiskOK || s.Info().Disks[1].ID != d[1].ID {
		t.Fatalf("%+v", s.Info().Disks)
	}
}

// TestDiskLogDamaged: a disk with a damaged log does not keep the other disks from
// serving.
func TestDiskLogDamaged(t *testing.T) {
	f := &fabric{}
	dir, specs := t.TempDir(), mkdirs(t, 2)
	s := diskServer(t, f, 1, dir, specs...)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{0, 4096} {
		file, err := os.OpenFile(filepath.Join(specs[0].Path, "log", "checkpoint"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.WriteAt([]byte{9, 9}, off+20); err != nil {
			t.Fatal(err)
		}
		file.Close()
	}
	s = diskServer(t, f, 1, dir, specs...)
	if st := states(s); st[0] != meta.DiskFailed || st[1] != meta.DiskOK {
		t.Fatalf("%+v", s.Info().Disks)
	}
	p := random(100, 1)
	if err := s.Append(ctx, id, fence, 0, p, chunkserver.CRC(p)); err != nil {
		t.Fatal(err)
	}
}

// TestPullBetweenDisks: a chunk on a disk that was given up, or of the wrong class, moves
// to another disk of the same server.
func TestPullBetweenDisks(t *testing.T) {
	f := &fabric{}
	specs := mkdirs(t, 3)
	specs[2].Class = "hdd"
	s := diskServer(t, f, 1, t.TempDir(), specs...)
	data := random(300_000, 1)
	o := fill(t, id, data, s)
	on := func() string {
		t.Helper()
		r := s.Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1})
		if r.Err != 0 || len(r.Chunks) != 1 {
			t.Fatalf("%+v", r)
		}
		return r.Chunks[0].Disk
	}
	o.Class = "hdd"
	if r := s.Order(ctx, o); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	if hdd := s.Info().Disks[2].ID; on() != hdd {
		t.Fatal("it did not move to the class")
	}
	o.Class, o.Fence.Seals = "ssd", o.Fence.Seals+1
	if r := s.Order(ctx, o); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	was := on()
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderDisk, Disk: was}); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	o.Fence.Seals++
	if r := s.Order(ctx, o); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	if now := on(); now == was || now == s.Info().Disks[2].ID {
		t.Fatal("it did not leave the disk that was given up")
	}
	holds(t, s, id, data)
}

// TestClass: a new chunk goes to a disk of its capability's class, and is refused if the
// server has no such disk with room.
func TestClass(t *testing.T) {
	f := &fabric{}
	specs := mkdirs(t, 3)
	specs[2].Class = "hdd"
	s := diskServer(t, f, 1, t.TempDir(), specs...)
	hdd := s.Info().Disks[2].ID
	p := random(100, 1)
	for i := range 20 {
		class := []string{"hdd", "ssd"}[i%2]
		id := meta.ChunkID{Volume: 1, Term: 1, Counter: uint64(i)}
		if err := s.appendOn(ctx, class, id, fence, 0, p, chunkserver.CRC(p)); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range s.Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1}).Chunks {
		if onHDD := c.Disk == hdd; onHDD != (c.ID.Counter%2 == 0) {
			t.Errorf("chunk %d on the hard disk: %v", c.ID.Counter, onHDD)
		}
	}
	if err := s.appendOn(ctx, "nvme", meta.ChunkID{Volume: 1, Term: 1, Counter: 99}, fence, 0, p, chunkserver.CRC(p)); meta.KindOf(err) != meta.NoSpace {
		t.Errorf("a class that isn't here: %v", err)
	}
}
