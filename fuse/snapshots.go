package fuse

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// The directory .snapshot in the root of every live volume: found by name and never listed
// there. It holds the roots of the volume's snapshots. Each snapshot is a view with its own
// volume number, and so with its own inode numbers. The directory's node is inode 0 of the
// volume, a number of no file.
//
// A position in the listing, after the two dots, is a snapshot's generation; generations only
// grow.

// snapshotsValid is how long the kernel may cache the set of snapshots, since no recall
// announces a new or deleted snapshot.
const snapshotsValid = time.Second

// isSnapshots reports whether a node is a directory of snapshots.
func isSnapshots(node uint64) bool { return node&uint64(meta.MaxIno) == 0 && !isText(node) }

// showsSnapshots reports whether a directory has a .snapshot: a live volume's root has.
func showsSnapshots(v meta.VolumeID, ino meta.Ino) bool {
	return ino == meta.RootIno && v <= meta.MaxVolume
}

// snapshotDirectory is .snapshot of any volume.
type snapshotDirectory struct{ f *fileSystem }

// enter answers the lookup of .snapshot. The caller has found that the volume has no such
// name, which the kernel may cache for valid.
func (d snapshotDirectory) enter(ctx request, v Volume, id meta.VolumeID, valid time.Duration, out *fuse.EntryOut) fuse.Status {
	f := d.f
	out.NodeId = nodeOf(id, 0)
	out.Generation = 1
	a, err := snapshotsAttr(ctx, v)
	if err != nil {
		return f.status("lookup", out.NodeId, err)
	}
	f.fillAttr(id, &a, &out.Attr)
	out.SetEntryTimeout(valid)
	out.SetAttrTimeout(snapshotsValid)
	return fuse.OK
}

// snapshotsAttr makes the directory's attributes. The times are the creation time of the
// newest snapshot, so that a kernel caching listings sees a change. A link count of 1 says
// that the link count doesn't count directories.
func snapshotsAttr(ctx request, v Volume) (meta.Attr, error) {
	a := meta.Attr{Mode: meta.TypeDir | 0o555, Nlink: 1}
	list, err := v.ReadSnapshots(ctx)
	if n := len(list); n > 0 {
		t := list[n-1].Created
		a.Atime, a.Mtime, a.Ctime, a.Btime = t, t, t, list[0].Created
	}
	return a, err
}

func (d snapshotDirectory) getAttr(ctx request, node uint64, out *fuse.AttrOut) fuse.Status {
	f := d.f
	id, _ := f.split(node)
	a := meta.Attr{}
	v, err := f.volume(ctx, id)
	if err == nil {
		a, err = snapshotsAttr(ctx, v)
	}
	f.fillAttr(id, &a, &out.Attr)
	out.SetTimeout(snapshotsValid)
	return f.status("getattr", node, err)
}

func (d snapshotDirectory) statx(ctx request, node uint64, out *fuse.StatxOut) fuse.Status {
	f := d.f
	id, _ := f.split(node)
	a := meta.Attr{}
	v, err := f.volume(ctx, id)
	if err == nil {
		a, err = snapshotsAttr(ctx, v)
	}
	f.fillStatx(id, &a, out)
	out.SetTimeout(snapshotsValid)
	return f.status("statx", node, err)
}

// lookup finds a snapshot by name. The entry expires soon, since the name may later belong to
// another snapshot.
func (d snapshotDirectory) lookup(ctx request, node uint64, name string, out *fuse.EntryOut) fuse.Status {
	f := d.f
	id, _ := f.split(node)
	v, err := f.volume(ctx, id)
	if err != nil {
		return f.status("lookup", node, err)
	}
	e, err := v.LookupSnapshot(ctx, name)
	if meta.KindOf(err) == meta.NoSuchSnapshot {
		return fuse.ENOENT
	}
	if err != nil {
		return f.status("lookup", node, err)
	}
	f.fillEntry(&e, out)
	out.SetEntryTimeout(snapshotsValid)
	return fuse.OK
}

func (d snapshotDirectory) readDir(ctx request, in *fuse.ReadIn, add addEntry) fuse.Status {
	f := d.f
	node, from := in.NodeId, in.Offset
	id, _ := f.split(node)
	v, err := f.volume(ctx, id)
	if err != nil {
		return f.status("readdir", node, err)
	}
	list, err := v.ReadSnapshots(ctx)
	if err != nil {
		return f.status("readdir", node, err)
	}
	end := f.listings.end(in.Fh, from)
	if end == 0 {
		end = afterDotDot + 1
		if n := len(list); n > 0 {
			end += uint64(list[n-1].At)
		}
		f.listings.endsAt(in.Fh, end)
	}
	if from < afterDot && !add(fuse.DirEntry{Name: ".", Ino: f.inumbers.of(id, 0), Mode: meta.TypeDir, Off: afterDot}, nil) {
		return fuse.OK
	}
	if from < afterDotDot && !add(fuse.DirEntry{Name: "..", Ino: f.inumbers.of(id, meta.RootIno), Mode: meta.TypeDir, Off: afterDotDot}, nil) {
		return fuse.OK
	}
	for _, s := range list {
		at := uint64(s.At) + afterDotDot
		if at <= from {
			continue
		}
		if at >= end {
			break
		}
		if !add(fuse.DirEntry{Name: s.Name, Ino: f.inumbers.of(v.ViewID(s.At), meta.RootIno), Mode: meta.TypeDir, Off: at}, nil) {
			break
		}
	}
	return fuse.OK
}
