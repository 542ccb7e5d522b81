package fuse

import (
	"context"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// nodes maps the kernel's nodes to volumes and inodes.
type nodes struct {
	tree       Tree
	rootVolume meta.VolumeID
	rootIno    meta.Ino

	mu      sync.RWMutex
	volumes map[meta.VolumeID]Volume // that the mount has used
}

// nodeID is the kernel's name of an inode. Programs see another number: inumber.
func (ns *nodes) nodeID(v meta.VolumeID, ino meta.Ino) uint64 {
	if v == ns.rootVolume && ino == ns.rootIno {
		return fuse.FUSE_ROOT_ID
	}
	return nodeOf(v, ino)
}

// nodeOf is nodeID of an inode other than the mount's root.
func nodeOf(v meta.VolumeID, ino meta.Ino) uint64 { return uint64(v)<<meta.InoBits | uint64(ino) }

// split is the inverse of nodeID.
func (ns *nodes) split(node uint64) (meta.VolumeID, meta.Ino) {
	if node == fuse.FUSE_ROOT_ID {
		return ns.rootVolume, ns.rootIno
	}
	return meta.VolumeID(node >> meta.InoBits), meta.Ino(node) & meta.MaxIno
}

// inode returns the volume and inode of a node. Errors: NoSuchVolume; ReadOnly for a directory
// of snapshots, NotPermitted for an unlisted file of a stream.
func (ns *nodes) inode(ctx context.Context, node uint64) (Volume, meta.Ino, error) {
	id, ino := ns.split(node)
	if ino == 0 && !isText(node) {
		// Requests that read a directory of snapshots call isSnapshots before.
		return nil, 0, meta.E("snapshots", meta.ReadOnly, penstock.SnapshotDir, nil)
	}
	if isStream(node) {
		return nil, 0, meta.E("stream", meta.NotPermitted, tailName, nil)
	}
	v, err := ns.volume(ctx, id)
	return v, ino, err
}

func (ns *nodes) volume(ctx context.Context, id meta.VolumeID) (Volume, error) {
	ns.mu.RLock()
	old := ns.volumes[id]
	ns.mu.RUnlock()
	if old != nil && !old.Ended() {
		return old, nil
	}
	v, err := ns.tree.VolumeByID(ctx, id)
	switch {
	case err != nil && old != nil:
		return old, nil // open files of the volume still need a close
	case err != nil:
		return nil, err
	}
	ns.mu.Lock()
	defer ns.mu.Unlock()
	ns.volumes[id] = v
	return v, nil
}

// opened lists the volumes opened by the mount.
func (ns *nodes) opened() []Volume {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	list := make([]Volume, 0, len(ns.volumes))
	for _, v := range ns.volumes {
		list = append(list, v)
	}
	return list
}

// allVolumes returns the volumes opened by the mount, and the volumes to which the client put
// back a predecessor's bytes.
func (ns *nodes) allVolumes() []Volume {
	if t, ok := ns.tree.(interface{ OpenVolumes() []Volume }); ok {
		return t.OpenVolumes()
	}
	return ns.opened()
}
