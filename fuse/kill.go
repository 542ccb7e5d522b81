package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

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

// dropSetGIDFirst does it before a write.
func (f *fileSystem) dropSetGIDFirst(ctx request, v Volume, ino meta.Ino, h *fuse.InHeader) error {
	e, err := v.GetAttr(ctx, ino)
	if err != nil || !dropsSetGID(&e.Attr, h) {
		return err
	}
	call := f.call(h)
	call.Op.Step = secondStep
	req := meta.SetAttr{Ino: ino, Mask: meta.SetKillPriv}
	dropSetGID(&req, &e.Attr, h)
	_, err = v.SetAttr(ctx, call, req)
	return err
}

func dropsSetGID(a *meta.Attr, h *fuse.InHeader) bool {
	const groupExecute = 0o010
	if !a.IsRegular() || a.Mode&meta.ModeSetGID == 0 || a.Mode&groupExecute != 0 {
		return false
	}
	c := callerOf(h)
	return c.uid != 0 && !c.inGroup(a.GID)
}
