package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Set-group-id without group execution is dropped by a write, truncation or
// change of owner only if the caller is not in the file's group and has no
// CAP_FSETID. The library can't tell: a request carries one group. So it drops
// what goes in any case (meta.SetKillPriv), and this file the rest.

// dropSetGID adds to a change of attributes, which drops rights, that it drops
// set-group-id.
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

// dropRights drops before a change of a file's bytes what the change takes away, and has
// the kernel forget the mode that it knows: exec(2) goes by that. Without kill the caller
// may leave the set-id bits, but never file capabilities.
func (f *fileSystem) dropRights(ctx request, v Volume, node uint64, ino meta.Ino, h *fuse.InHeader, kill bool) error {
	e, err := knownAttr(ctx, v, ino)
	if err != nil {
		return err
	}
	return f.dropRightsOf(ctx, v, node, &e.Attr, h, kill)
}

// dropRightsUnlessRoot is dropRights for a request that does not tell whether the caller
// may leave the set-id bits (CAP_FSETID).
func (f *fileSystem) dropRightsUnlessRoot(ctx request, v Volume, node uint64, ino meta.Ino, h *fuse.InHeader) error {
	e, err := knownAttr(ctx, v, ino)
	if err != nil {
		return err
	}
	setID := e.Attr.Mode&(meta.ModeSetUID|meta.ModeSetGID) != 0
	return f.dropRightsOf(ctx, v, node, &e.Attr, h, setID && callerOf(h).uid != 0)
}

// knownAttr gives an inode's attributes, from memory if they are there.
func knownAttr(ctx request, v Volume, ino meta.Ino) (penstock.Entry, error) {
	if q, ok := v.(quickVolume); ok {
		if e, ok := q.GetAttrCached(ino); ok {
			return e, nil
		}
	}
	return v.GetAttr(ctx, ino)
}

// dropRightsOf is dropRights of a file whose attributes are known.
func (f *fileSystem) dropRightsOf(ctx request, v Volume, node uint64, a *meta.Attr, h *fuse.InHeader, kill bool) error {
	caps := a.Flags&meta.FlagHasCaps != 0
	if !a.IsRegular() || !caps && (!kill || a.Mode&(meta.ModeSetUID|meta.ModeSetGID) == 0) {
		if f.dropping.Load() > 0 {
			f.forgetMode(node) // another request may have dropped them, and not told the kernel yet
		}
		return nil
	}
	f.dropping.Add(1)
	defer f.dropping.Add(-1)
	defer f.forgetMode(node)
	call := f.call(h)
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

// forgetMode has the kernel ask for the attributes of a node before it acts by them.
func (f *fileSystem) forgetMode(node uint64) {
	f.conn.newGeneration()
	f.conn.invalidateAttr(node)
}

// capabilities is the attribute that holds a file's capabilities.
const capabilities = "security.capability"

func dropsSetGID(a *meta.Attr, h *fuse.InHeader) bool {
	const groupExecute = 0o010
	if !a.IsRegular() || a.Mode&meta.ModeSetGID == 0 || a.Mode&groupExecute != 0 {
		return false
	}
	c := callerOf(h)
	return c.uid != 0 && !c.inGroup(a.GID)
}
