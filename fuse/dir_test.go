package fuse

import (
	"fmt"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// list reads a directory as the kernel does, a few entries at a time, and calls each for
// every name. It gives up after most.
func list(t *testing.T, f *fileSystem, node, handle, from uint64, most int, each func(name string)) (told int) {
	t.Helper()
	for {
		none := true
		in := &fuse.ReadIn{InHeader: fuse.InHeader{NodeId: node}, Fh: handle, Offset: from, Size: 400}
		var names []string
		room := 3
		st := f.readDir(nil, in, nil, false, func(e fuse.DirEntry, _ *penstock.Entry) bool {
			if room--; room < 0 {
				return false
			}
			none, from = false, e.Off
			if e.Name != "." && e.Name != ".." {
				names = append(names, e.Name)
			}
			return true
		})
		if st != fuse.OK {
			t.Fatal(st)
		}
		for _, name := range names {
			if told++; told > most {
				return told
			}
			each(name)
		}
		if none {
			return told
		}
	}
}

// TestListingsOfHandles: entries added during a listing are in the listings that begin later, or
// rewind, and in no other; also by a successor, which knows nothing of the handle, and in the
// directory of snapshots.
func TestListingsOfHandles(t *testing.T) {
	const files = 50
	c, _, tree := newDirect()
	f, v := c.fs, tree.volumes[1]
	dir := v.add(meta.RootIno, "d", &memInode{attr: meta.Attr{Mode: meta.TypeDir | 0o755}})
	made := 0
	add := func(string) {
		made++
		v.add(dir, fmt.Sprint("f", made), &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
	}
	for range files {
		add("")
	}
	open := func(node uint64) uint64 {
		var out fuse.OpenOut
		if st := f.OpenDir(nil, &fuse.OpenIn{InHeader: fuse.InHeader{NodeId: node}}, &out); st != fuse.OK {
			t.Fatal(st)
		}
		return out.Fh
	}
	node := f.nodeID(1, dir)
	want := func(what string, told, most int) {
		t.Helper()
		if told != most {
			t.Errorf("DATA: %s told %d names, not %d", what, told, most)
		}
	}
	a, b := open(node), open(node)
	if a == b {
		t.Fatalf("two opens have the handle %d", a)
	}
	want("a listing", list(t, f, node, a, 0, 1000, add), files)
	want("another, begun later,", list(t, f, node, b, 0, 1000, func(string) {}), made)
	now := made
	want("after a rewind", list(t, f, node, a, 0, 1000, add), now)
	// The position after the tenth name, in the same listing: nothing of later.
	want("after a seek", list(t, f, node, a, 12, 1000, add), now-10)

	f.ReleaseDir(&fuse.ReleaseIn{Fh: a})
	f.ReleaseDir(&fuse.ReleaseIn{Fh: b})
	if n := len(f.listings.ends); n != 0 {
		t.Errorf("%d listings are remembered that were closed", n)
	}
	now = made
	want("a listing that a successor goes on with", list(t, f, node, a, 12, 1000, add), now-10)

	v.snapshot("s1")
	v.snapshot("s2")
	snapshots := nodeOf(1, 0)
	take := func(string) { v.snapshot(fmt.Sprint("s", len(v.snaps)+1)) }
	h := open(snapshots)
	want("the directory of snapshots", list(t, f, snapshots, h, 0, 20, take), 2)
	want("the directory of snapshots, rewound,", list(t, f, snapshots, h, 0, 20, take), 4)
}
