package fuse

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

func init() { parts["inumbers"] = partInumbers }

// TestInumbers: no two inodes have the same number, all numbers are exact as floating-point
// numbers, and numbers of the first form follow from volume and inode alone.
func TestInumbers(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 1))
	t.Logf("seed %d", seed)
	type id struct {
		v   meta.VolumeID
		ino meta.Ino
	}
	const last = meta.MaxVolume + meta.Views
	var n inumbers
	known := make(map[uint64]id)
	check := func(v meta.VolumeID, ino meta.Ino) {
		t.Helper()
		got := n.of(v, ino)
		if old, ok := known[got]; ok && old != (id{v, ino}) {
			t.Fatalf("DATA: %d:%d and %d:%d have the inode number %#x", old.v, old.ino, v, ino, got)
		}
		known[got] = id{v, ino}
		if got >= 1<<53 || uint64(float64(got)) != got {
			t.Fatalf("DATA: the inode number of %d:%d is %#x, which a floating-point number can't hold", v, ino, got)
		}
		if again := n.of(v, ino); again != got {
			t.Fatalf("DATA: the inode number of %d:%d was %#x and is %#x", v, ino, got, again)
		}
		if want := uint64(v)<<32 | uint64(ino); ino < 1<<32 && got != want {
			t.Fatalf("DATA: the inode number of %d:%d is %#x, not %#x: it is another after each mount", v, ino, got, want)
		}
	}
	edges := []meta.Ino{0, 1, 2, 1<<32 - 1, 1 << 32, 1<<32 + 1, 1 << 33, meta.MaxIno - 1, meta.MaxIno}
	for _, v := range []meta.VolumeID{0, 1, 2, 511, 512, 10_000, meta.MaxVolume, meta.MaxVolume + 1, last} {
		for _, ino := range edges {
			check(v, ino)
		}
		check(v, stub(v))
	}
	for range 100_000 {
		v := meta.VolumeID(rng.Uint32N(uint32(last) + 1))
		check(v, meta.Ino(rng.Uint64N(1<<(1+rng.UintN(meta.InoBits)))))
		check(v, stub(meta.VolumeID(rng.Uint32N(uint32(meta.MaxVolume)))))
	}
	if len(n.slots) < 50_000 {
		t.Errorf("only %d slots were used: nothing of them was tested", len(n.slots))
	}
	// Where no two inodes share a slot, another mount gives the same numbers, in whatever order.
	var one, two inumbers
	for i := range meta.VolumeID(100) {
		one.of(i*7, 1<<32)
		two.of((99-i)*7, 1<<32)
	}
	for i := range meta.VolumeID(100) {
		if a, b := one.of(i*7, 1<<32), two.of(i*7, 1<<32); a != b {
			t.Errorf("DATA: two mounts say %#x and %#x of one inode", a, b)
		}
	}
}

// stub is the inode of a junction in a snapshot.
func stub(of meta.VolumeID) meta.Ino { return meta.MaxIno - meta.Ino(of&(1<<18-1)) }

// TestInumbersOfAMount looks at volumes and snapshots through the kernel.
func TestInumbersOfAMount(t *testing.T) {
	m := mount(t, Options{}, func(tree *memTree) {
		for _, id := range []meta.VolumeID{512, 10_000, meta.MaxVolume} {
			tree.volumes[id] = newMemVolume(tree, id)
			tree.volumes[1].add(meta.RootIno, fmt.Sprint("volume", id), &memInode{junction: id})
		}
		for _, v := range tree.volumes {
			for _, before := range []meta.Ino{100, 1<<32 - 2, 1<<32 + 10, 1<<33 + 5} {
				v.next = before
				for i := range 4 {
					ino := v.add(meta.RootIno, fmt.Sprintf("f%d-%d", before, i), &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644, Nlink: 2}})
					dir := v.inodes[meta.RootIno]
					dir.cookie++
					dir.names = append(dir.names, memName{fmt.Sprintf("g%d-%d", before, i), ino, dir.cookie})
				}
			}
		}
		tree.volumes[1].snapshot("one")
		tree.volumes[1].snapshot("two")
		tree.volumes[2].snapshot("three")
	})
	run(t, "inumbers", m.Dir())
}

func partInumbers(dir string) error {
	numbers := make(map[float64]string) // of a file: its volume and inode
	paths := 0
	for _, d := range []string{"", "junction", "volume512", "volume10000", fmt.Sprint("volume", meta.MaxVolume), ".snapshot", "junction/.snapshot",
		".snapshot/one", ".snapshot/two", "junction/.snapshot/three"} {
		listed, err := listNumbers(filepath.Join(dir, d))
		if err != nil {
			return err
		}
		for name, ino := range listed {
			path := filepath.Join(dir, d, name)
			if name == ".." {
				continue // a volume's root has the root's number
			}
			paths++
			var st unix.Stat_t
			if err := unix.Lstat(path, &st); err != nil {
				return err
			}
			if st.Ino != ino {
				return fmt.Errorf("DATA: %s is listed as inode %#x and is %#x", path, ino, st.Ino)
			}
			b := make([]byte, 100)
			n, err := unix.Getxattr(path, XattrInode, b)
			if err == unix.ENODATA { // the directory of snapshots
				continue
			}
			if err != nil {
				return fmt.Errorf("%s: %w", path, err)
			}
			is := string(b[:n])
			if n, err := unix.Getxattr(path, XattrSnapshot, b); err == nil {
				is += "@" + string(b[:n])
			}
			if old, ok := numbers[float64(st.Ino)]; ok && old != is {
				return fmt.Errorf("DATA: %s (%s) has the inode number of %s: %#x", path, is, old, st.Ino)
			}
			numbers[float64(st.Ino)] = is
		}
	}
	if paths < 8*32 || len(numbers) < 8*16 {
		return fmt.Errorf("%d paths, %d numbers", paths, len(numbers))
	}
	return nil
}

// listNumbers is d_ino of each name in a directory.
func listNumbers(dir string) (map[string]uint64, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	list := make(map[string]uint64)
	for b := make([]byte, 4096); ; {
		n, err := unix.Getdents(fd, b)
		if err != nil || n == 0 {
			return list, err
		}
		for p := b[:n]; len(p) > 0; p = p[binary.NativeEndian.Uint16(p[16:]):] {
			list[unix.ByteSliceToString(p[19:binary.NativeEndian.Uint16(p[16:])])] = binary.NativeEndian.Uint64(p)
		}
	}
}

// BenchmarkInumbers measures the cost of a number, and the memory of 100,000 slots.
func BenchmarkInumbers(b *testing.B) {
	for name, ino := range map[string]meta.Ino{"low": 7, "high": 1 << 32} {
		b.Run(name, func(b *testing.B) {
			var before, after runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&before)
			var n inumbers
			for v := range meta.VolumeID(100_000) {
				n.of(v, ino)
			}
			runtime.GC()
			runtime.ReadMemStats(&after)
			for b.Loop() {
				n.of(512, ino)
			}
			b.ReportMetric(float64(after.HeapAlloc-min(before.HeapAlloc, after.HeapAlloc)), "heap-bytes")
		})
	}
}
