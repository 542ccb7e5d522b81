package fuse

import (
	"sync/atomic"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// A write, truncation or change of owner drops set-group-id without group execution only if
// the caller is not in the file's group and has no CAP_FSETID. The library can't know the
// caller's groups, since a request carries one group. So the library drops the bits that every
// caller loses (meta.SetKillPriv), and the functions below drop the rest.

// dropSetGID adds the dropping of set-group-id to a change of attributes that drops rights.
func dropSetGID(req *meta.SetAttr, a *meta.Attr, h *fuse.InHeader) {
	if !dropsSetGID(a, h) {
		return
	}
	mode := a.Mode & meta.ModePerm
	if req.Mask&meta.SetMode != 0 {
		mode = req.Mode
	}
	req.Mask |= meta.SetMode
	req.Mode = mode &^ (meta.ModeSetGID | meta.ModeSetUID)
}

// rights drops the set-id bits and capabilities of files before changes.
type rights struct {
	*fileSystem
	dropping atomic.Int32 // requests now dropping set-id bits or file capabilities
}

// dropRights drops a file's set-id bits and capabilities before a change of the file's bytes,
// and has the kernel forget the mode, since exec(2) uses the kernel's mode. Without kill the
// set-id bits stay; file capabilities never stay.
func (rt *rights) dropRights(ctx request, v Volume, node uint64, ino meta.Ino, h *fuse.InHeader, kill bool) error {
	e, err := knownAttr(ctx, v, ino)
	if err != nil {
		return err
	}
	return rt.dropRightsOf(ctx, v, node, &e.Attr, h, kill)
}

// dropRightsUnlessRoot is dropRights for a request without information about CAP_FSETID: only
// a caller with user id 0 keeps the set-id bits.
func (rt *rights) dropRightsUnlessRoot(ctx request, v Volume, node uint64, ino meta.Ino, h *fuse.InHeader) error {
	e, err := knownAttr(ctx, v, ino)
	if err != nil {
		return err
	}
	setID := e.Attr.Mode&(meta.ModeSetUID|meta.ModeSetGID) != 0
	return rt.dropRightsOf(ctx, v, node, &e.Attr, h, setID && callerOf(h).uid != 0)
}

// knownAttr returns an inode's attributes, from memory if cached.
func knownAttr(ctx request, v Volume, ino meta.Ino) (penstock.Entry, error) {
	if q, ok := v.(quickVolume); ok {
		if e, ok := q.GetAttrCached(ino); ok {
			return e, nil
		}
	}
	return v.GetAttr(ctx, ino)
}

// dropRightsOf is dropRights with the file's attributes a.
func (rt *rights) dropRightsOf(ctx request, v Volume, node uint64, a *meta.Attr, h *fuse.InHeader, kill bool) error {
	caps := a.Flags&meta.FlagHasCaps != 0
	if !a.IsRegular() || !caps && (!kill || a.Mode&(meta.ModeSetUID|meta.ModeSetGID) == 0) {
		if rt.dropping.Load() > 0 {
			rt.forgetMode(node) // another request may have dropped rights, before the kernel learned of the change
		}
		return nil
	}
	rt.dropping.Add(1)
	defer rt.dropping.Add(-1)
	defer rt.forgetMode(node)
	call := rt.call(h)
	call.Op.Step = secondStep
	if !kill {
		err := v.RemoveXattr(ctx, call, a.Ino, capabilities)
		if meta.KindOf(err) == meta.NoAttribute {
			return nil
		}
		return err
	}
	req := meta.SetAttr{Ino: a.Ino, Mask: meta.SetKillPriv}
	dropSetGID(&req, a, h)
	_, err := v.SetAttr(ctx, call, req)
	return err
}

// forgetMode makes the kernel ask for a node's attributes before the next use of the
// attributes.
func (rt *rights) forgetMode(node uint64) {
	rt.conn.newGeneration()
	rt.conn.invalidateAttr(node)
}

// capabilities is the extended attribute with a file's capabilities.
const capabilities = "security.capability"

func dropsSetGID(a *meta.Attr, h *fuse.InHeader) bool {
	const groupExecute = 0o010
	if !a.IsRegular() || a.Mode&meta.ModeSetGID == 0 || a.Mode&groupExecute != 0 {
		return false
	}
	c := callerOf(h)
	return c.uid != 0 && !c.inGroup(a.GID)
}
