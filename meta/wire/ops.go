package wire

import (
	"fmt"

	"penstock.io/penstock/meta"
)

// newOp returns an empty operation for a code; nil for an unknown code, and for the codes of
// operations that only an owner makes.
func newOp(code meta.OpCode) meta.Op {
	switch code {
	case meta.OpLookup:
		return new(meta.Lookup)
	case meta.OpGetAttr:
		return new(meta.GetAttr)
	case meta.OpReadDir:
		return new(meta.ReadDir)
	case meta.OpReadLink:
		return new(meta.ReadLink)
	case meta.OpGetXattr:
		return new(meta.GetXattr)
	case meta.OpListXattr:
		return new(meta.ListXattr)
	case meta.OpOpen:
		return new(meta.Open)
	case meta.OpStatFS:
		return new(meta.StatFSOp)
	case meta.OpSeek:
		return new(meta.Seek)
	case meta.OpCreate:
		return new(meta.Create)
	case meta.OpTmpfile:
		return new(meta.Tmpfile)
	case meta.OpLink:
		return new(meta.Link)
	case meta.OpUnlink:
		return new(meta.Unlink)
	case meta.OpRename:
		return new(meta.Rename)
	case meta.OpSetAttr:
		return new(meta.SetAttr)
	case meta.OpWrite:
		return new(meta.Write)
	case meta.OpFallocate:
		return new(meta.Fallocate)
	case meta.OpCopyRange:
		return new(meta.CopyRange)
	case meta.OpSetXattr:
		return new(meta.SetXattr)
	case meta.OpRemoveXattr:
		return new(meta.RemoveXattr)
	case meta.OpReleaseOrphans:
		return new(meta.ReleaseOrphans)
	case meta.OpReplaceExtents:
		return new(meta.ReplaceExtents)
	case meta.OpClosed:
		return new(meta.Closed)
	case meta.OpLead:
		return new(meta.Lead)
	case meta.OpEndLead:
		return new(meta.EndLead)
	case meta.OpLeader:
		return new(meta.Leader)
	}
	return nil
}

// op codes an operation: the code, then the fields.
func (c *coder) op(p *meta.Op) {
	var code uint8
	if !c.dec {
		code = uint8((*p).Code())
	}
	c.u8(&code)
	if c.dec {
		if *p = newOp(meta.OpCode(code)); *p == nil {
			c.fail(fmt.Errorf("operation code %d", code))
			return
		}
	}
	switch o := (*p).(type) {
	case *meta.Lookup:
		ino(c, &o.Parent)
		c.str(&o.Name)
	case *meta.GetAttr:
		ino(c, &o.Ino)
	case *meta.ReadDir:
		ino(c, &o.Ino)
		c.u64(&o.Cookie)
		c.u32(&o.Max)
		c.bool(&o.Plus)
	case *meta.ReadLink:
		ino(c, &o.Ino)
	case *meta.GetXattr:
		ino(c, &o.Ino)
		c.str(&o.Name)
	case *meta.ListXattr:
		ino(c, &o.Ino)
	case *meta.Open:
		ino(c, &o.Ino)
		c.u64(&o.Off)
		c.u64(&o.Len)
		list(c, &o.Also, ino)
		c.bool(&o.Cached)
	case *meta.StatFSOp:
	case *meta.Seek:
		ino(c, &o.Ino)
		c.u64(&o.Off)
		c.bool(&o.Hole)
	case *meta.Create:
		ino(c, &o.Parent)
		c.str(&o.Name)
		c.u32(&o.Mode)
		c.u32(&o.Umask)
		c.u32(&o.UID)
		c.u32(&o.GID)
		c.u32(&o.Rdev)
		c.str(&o.Target)
		c.bool(&o.Excl)
		ino(c, &o.Ino)
		c.time(&o.Time)
		c.led(&o.Led)
	case *meta.Tmpfile:
		ino(c, &o.Parent)
		c.u32(&o.Mode)
		c.u32(&o.Umask)
		c.u32(&o.UID)
		c.u32(&o.GID)
		ino(c, &o.Ino)
		c.time(&o.Time)
	case *meta.Link:
		ino(c, &o.Ino)
		ino(c, &o.Parent)
		c.str(&o.Name)
	case *meta.Unlink:
		ino(c, &o.Parent)
		c.str(&o.Name)
		c.bool(&o.Dir)
		c.led(&o.Led)
	case *meta.Rename:
		ino(c, &o.Parent)
		c.str(&o.Name)
		ino(c, &o.NewParent)
		c.str(&o.NewName)
		c.u32(&o.Flags)
		c.led(&o.Led)
	case *meta.SetAttr:
		ino(c, &o.Ino)
		c.u32((*uint32)(&o.Mask))
		c.u32(&o.Mode)
		c.u32(&o.UID)
		c.u32(&o.GID)
		c.u64(&o.Size)
		c.time(&o.Atime)
		c.time(&o.Mtime)
		c.time(&o.Ctime)
		c.led(&o.Led)
	case *meta.Write:
		ino(c, &o.Ino)
		list(c, &o.Extents, extent)
		c.bool(&o.Inline)
		c.bytes(&o.Data)
		c.u64(&o.Size)
		c.time(&o.Mtime)
		c.bool(&o.Synced)
		c.bool(&o.Kill)
		c.bool(&o.CloseEnded)
		c.bool(&o.Seal)
		c.bool(&o.MarkSynced)
	case *meta.Fallocate:
		ino(c, &o.Ino)
		c.u32(&o.Mode)
		c.u64(&o.Off)
		c.u64(&o.Len)
	case *meta.CopyRange:
		ino(c, &o.Src)
		c.u64(&o.SrcOff)
		ino(c, &o.Dst)
		c.u64(&o.DstOff)
		c.u64(&o.Len)
		c.u32((*uint32)(&o.At))
	case *meta.SetXattr:
		ino(c, &o.Ino)
		c.str(&o.Name)
		c.bytes(&o.Value)
		c.u32(&o.Flags)
		c.bool(&o.KillSGID)
	case *meta.RemoveXattr:
		ino(c, &o.Ino)
		c.str(&o.Name)
	case *meta.ReleaseOrphans:
		list(c, &o.Inos, ino)
	case *meta.ReplaceExtents:
		ino(c, &o.Ino)
		list(c, &o.Old, extent)
		list(c, &o.New, extent)
	case *meta.Closed:
		list(c, &o.Inos, ino)
	case *meta.Lead:
		ino(c, &o.Ino)
		c.str(&o.Address)
	case *meta.EndLead:
		ino(c, &o.Ino)
		c.u64(&o.Epoch)
	case *meta.Leader:
		ino(c, &o.Ino)
	default:
		// A client can't send operations reserved to the owner: the attempt is a fault of the
		// program.
		panic(fmt.Sprintf("wire: operation %T does not travel", o))
	}
}

func (c *coder) led(l *meta.Led) {
	ino(c, &l.Ino)
	c.u64(&l.Epoch)
}

// Bits of the mask before a result: the mask tells which fields follow.
const (
	hasAttr uint64 = 1 << iota
	hasAttr2
	hasParent
	hasNewParent
	hasVolume
	hasExisted
	hasEntries
	hasEOF
	hasData
	hasExtents
	hasPlaces
	hasChunks
	hasOff
	hasStatFS
	resultMask = 1<<iota - 1
)

func (c *coder) result(r *meta.Result) {
	var m uint64
	if !c.dec {
		set := func(bit uint64, on bool) {
			if on {
				m |= bit
			}
		}
		set(hasAttr, r.Attr.Ino != 0)
		set(hasAttr2, r.Attr2.Ino != 0)
		set(hasParent, r.ParentAttr.Ino != 0)
		set(hasNewParent, r.NewParentAttr.Ino != 0)
		set(hasVolume, r.Volume != 0)
		set(hasExisted, r.Existed)
		set(hasEntries, len(r.Entries) > 0)
		set(hasEOF, r.EOF)
		set(hasData, len(r.Data) > 0)
		set(hasExtents, len(r.Extents) > 0)
		set(hasPlaces, len(r.Places) > 0)
		set(hasChunks, len(r.Chunks) > 0)
		set(hasOff, r.Off != 0)
		set(hasStatFS, r.StatFS != meta.StatFS{})
	}
	c.u64(&m)
	if m&^resultMask != 0 {
		c.fail(fmt.Errorf("result mask %#x", m))
		return
	}
	if m&hasAttr != 0 {
		c.attr(&r.Attr)
	}
	if m&hasAttr2 != 0 {
		c.attr(&r.Attr2)
	}
	if m&hasParent != 0 {
		c.attr(&r.ParentAttr)
	}
	if m&hasNewParent != 0 {
		c.attr(&r.NewParentAttr)
	}
	if m&hasVolume != 0 {
		c.volume(&r.Volume)
	}
	if c.dec {
		r.Existed, r.EOF = m&hasExisted != 0, m&hasEOF != 0
	}
	if m&hasEntries != 0 {
		list(c, &r.Entries, dirent)
	}
	if m&hasData != 0 {
		c.bytes(&r.Data)
	}
	if m&hasExtents != 0 {
		list(c, &r.Extents, extent)
	}
	if m&hasPlaces != 0 {
		list(c, &r.Places, chunkPlace)
	}
	if m&hasChunks != 0 {
		list(c, &r.Chunks, chunkRecord)
	}
	if m&hasOff != 0 {
		c.u64(&r.Off)
	}
	if m&hasStatFS != 0 {
		s := &r.StatFS
		for _, v := range []*uint64{&s.UsedBytes, &s.UsedInodes, &s.QuotaBytes, &s.QuotaInode, &s.DiskTotal, &s.DiskFree} {
			c.u64(v)
		}
	}
}
