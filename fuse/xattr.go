package fuse

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Attribute names answered by the mount itself, read-only and not listed.
const (
	ownPrefix = "penstock."
	// XattrVolume holds the volume's name, of a snapshot VOLUME@SNAPSHOT.
	XattrVolume = ownPrefix + "volume"
	// XattrInode holds the numbers of volume and inode, VOLUME:INODE.
	XattrInode = ownPrefix + "inode"
	// XattrSnapshot holds the generation of the inode's snapshot.
	XattrSnapshot = ownPrefix + "snapshot"
	// XattrLocations holds where a file's committed bytes lie: a line for each
	// extent, see showLocations.
	XattrLocations = ownPrefix + "locations"
	// XattrCluster holds the id of the file's cluster.
	XattrCluster = ownPrefix + "cluster"
	// XattrMount holds the mount's options: see showOptions. Remount reads XattrMount after
	// mount(2), so that the mount's process reads the new options.
	XattrMount = ownPrefix + "mount"
	// XattrIndex holds the state of a snapshot's index: see showIndex.
	XattrIndex = ownPrefix + "index"
)

// maxXattr is the longest value accepted by the kernel, in bytes.
const maxXattr = 64 << 10

// locator is a volume that can locate the bytes of its files.
type locator interface {
	Locate(ctx context.Context, ino meta.Ino, off uint64) (penstock.Location, error)
}

// showLocations writes a line for each extent,
//
//	OFFSET LENGTH CHUNK CHUNKOFFSET SERVER,SERVER
//
// For preallocated space the line is OFFSET LENGTH and "zeros". A file with its bytes in its
// record has the only line "inline". A last line "..." means that more extents exist than fit
// into maxXattr.
func showLocations(ctx context.Context, l locator, ino meta.Ino) ([]byte, error) {
	const more = "...\n"
	var b []byte
	for off := uint64(0); ; {
		at, err := l.Locate(ctx, ino, off)
		if err != nil {
			return nil, err
		}
		if at.Inline {
			return []byte("inline\n"), nil
		}
		for _, e := range at.Extents {
			line := fmt.Sprintf("%d %d zeros\n", e.Off, e.Len)
			if !e.Chunk.IsZero() {
				var servers []string
				for _, s := range e.Servers {
					servers = append(servers, fmt.Sprint(s))
				}
				line = fmt.Sprintf("%d %d %s %d %s\n", e.Off, e.Len, e.Chunk, e.ChunkOff, strings.Join(servers, ","))
			}
			if len(b)+len(line)+len(more) > maxXattr {
				return append(b, more...), nil
			}
			b, off = append(b, line...), e.End()
		}
		if at.EOF || len(at.Extents) == 0 {
			return b, nil
		}
	}
}

// clustered is a tree that knows the id of its cluster.
type clustered interface{ Cluster() string }

// indexed is a volume whose reads may be answered from an index.
type indexed interface {
	Index() penstock.IndexStatus
}

// showIndex writes the state of an index (penstock.IndexStatus), then "inodes N bytes N" if
// the index's contents are known, and the reason for not using the index, quoted.
func showIndex(s penstock.IndexStatus) []byte {
	b := []byte(s.State)
	if s.Inodes > 0 {
		b = fmt.Appendf(b, " inodes %d bytes %d", s.Inodes, s.Bytes)
	}
	if s.Detail != "" {
		b = fmt.Appendf(b, " %q", s.Detail)
	}
	return b
}

// trustedPrefix begins the names visible only to root.
const trustedPrefix = "trusted."

// known checks whether a name may exist: OK, EINVAL for a prefix alone, ENOTSUP. The kernel
// has checked the caller's rights to the name.
func known(name string) fuse.Status {
	for _, prefix := range []string{"user.", "security.", trustedPrefix} {
		if rest, ok := strings.CutPrefix(name, prefix); ok {
			if rest == "" {
				return fuse.EINVAL
			}
			return fuse.OK
		}
	}
	if name == "system.posix_acl_access" || name == "system.posix_acl_default" {
		return fuse.OK
	}
	return fuse.ENOTSUP
}

// attributeRequests answers the requests about extended attributes.
type attributeRequests struct{ *fileSystem }

// GetXAttr reads an attribute or, with an empty dest, returns the attribute's length.
func (xr *attributeRequests) GetXAttr(cancel <-chan struct{}, in *fuse.InHeader, name string, dest []byte) (uint32, fuse.Status) {
	if isText(in.NodeId) || isSnapshots(in.NodeId) {
		return 0, fuse.ENODATA
	}
	ctx := request(cancel)
	if isStream(in.NodeId) {
		value, err := xr.streams.getXattr(ctx, in.NodeId, name)
		if err != nil {
			return 0, xr.status("getxattr", in.NodeId, err)
		}
		return fit(value, dest)
	}
	v, ino, err := xr.inode(ctx, in.NodeId)
	if err != nil {
		return 0, xr.status("getxattr", in.NodeId, err)
	}
	var value []byte
	switch {
	case name == XattrCluster:
		c, ok := xr.tree.(clustered)
		if !ok {
			return 0, fuse.ENODATA
		}
		value = []byte(c.Cluster())
	case name == XattrMount:
		if value, err = xr.showOptions(); err != nil {
			return 0, xr.status("getxattr", in.NodeId, err)
		}
	case name == XattrVolume:
		value = []byte(v.Name())
	case name == XattrInode:
		id, _ := xr.split(in.NodeId)
		if of, _, frozen := v.View(); frozen {
			id = of
		}
		value = fmt.Appendf(nil, "%d:%d", id, ino)
	case name == XattrSnapshot:
		_, s, frozen := v.View()
		if !frozen {
			return 0, fuse.ENODATA
		}
		value = fmt.Append(nil, s.At)
	case name == XattrIndex:
		x, ok := v.(indexed)
		if _, _, frozen := v.View(); !ok || !frozen {
			return 0, fuse.ENODATA
		}
		value = showIndex(x.Index())
	case name == XattrLocations:
		l, ok := v.(locator)
		if !ok {
			return 0, fuse.ENODATA
		}
		if value, err = showLocations(ctx, l, ino); meta.KindOf(err) == meta.Invalid {
			return 0, fuse.ENODATA // no regular file
		}
		if err != nil {
			return 0, xr.status("getxattr", in.NodeId, err)
		}
	case known(name) != fuse.OK:
		return 0, known(name)
	default:
		if value, err = v.GetXattr(ctx, ino, name); meta.KindOf(err) == meta.NoAttribute {
			return 0, fuse.ENODATA
		}
		if err != nil {
			return 0, xr.status("getxattr", in.NodeId, err)
		}
	}
	return fit(value, dest)
}

// fit copies value into dest and returns the length of value; ERANGE if value is too long.
// With an empty dest fit only returns the length.
func fit(value, dest []byte) (uint32, fuse.Status) {
	if len(dest) == 0 {
		return uint32(len(value)), fuse.OK
	}
	if len(value) > len(dest) {
		return uint32(len(value)), fuse.ERANGE
	}
	return uint32(copy(dest, value)), fuse.OK
}

// ListXAttr lists names, each ended by a NUL.
func (xr *attributeRequests) ListXAttr(cancel <-chan struct{}, in *fuse.InHeader, dest []byte) (uint32, fuse.Status) {
	if isOwn(in.NodeId) || isSnapshots(in.NodeId) {
		return 0, fuse.OK
	}
	ctx := request(cancel)
	v, ino, err := xr.inode(ctx, in.NodeId)
	if err != nil {
		return 0, xr.status("listxattr", in.NodeId, err)
	}
	names, err := v.ListXattr(ctx, ino)
	if err != nil {
		return 0, xr.status("listxattr", in.NodeId, err)
	}
	trusted := func(name string) bool { return strings.HasPrefix(name, trustedPrefix) }
	if slices.ContainsFunc(names, trusted) && callerOf(in).uid != 0 {
		names = slices.DeleteFunc(slices.Clone(names), trusted)
	}
	var list []byte
	for _, name := range names {
		list = append(append(list, name...), 0)
	}
	return fit(list, dest)
}

// SetXAttr sets an attribute or an ACL.
func (xr *attributeRequests) SetXAttr(cancel <-chan struct{}, in *fuse.SetXAttrIn, name string, value []byte) fuse.Status {
	if isOwn(in.NodeId) || strings.HasPrefix(name, ownPrefix) {
		return fuse.EPERM
	}
	if st := known(name); st != fuse.OK {
		return st
	}
	if len(value) > meta.MaxXattrVal {
		return fuse.Status(syscall.E2BIG)
	}
	ctx := request(cancel)
	v, ino, err := xr.inode(ctx, in.NodeId)
	if err == nil {
		err = v.SetXattr(ctx, xr.call(&in.InHeader), meta.SetXattr{
			// The request's memory is used again; the library may keep the value.
			Ino: ino, Name: name, Value: append([]byte(nil), value...), Flags: in.Flags,
			KillSGID: in.SetXAttrFlags&fuse.SETXATTR_ACL_KILL_SGID != 0,
		})
	}
	return xr.status("setxattr", in.NodeId, err)
}

// RemoveXAttr removes an attribute or an ACL.
func (xr *attributeRequests) RemoveXAttr(cancel <-chan struct{}, in *fuse.InHeader, name string) fuse.Status {
	if isOwn(in.NodeId) || strings.HasPrefix(name, ownPrefix) {
		return fuse.EPERM
	}
	if st := known(name); st != fuse.OK {
		return st
	}
	ctx := request(cancel)
	v, ino, err := xr.inode(ctx, in.NodeId)
	if err == nil {
		err = v.RemoveXattr(ctx, xr.call(in), ino, name)
	}
	return xr.status("removexattr", in.NodeId, err)
}
