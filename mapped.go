package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// Pages of shared mappings.
//
// A program that stores into a shared mapping makes a page of the kernel dirty. The client
// learns of the page only when the kernel writes the page back: seconds later, or when an
// invalidation demands the write. Until then the page may hold bytes invisible to other
// clients. So before the client gives a lease back, the kernel writes back its dirty pages
// (Launder), and the client puts the pages into the file under the lease; other clients change
// the file later. A page received after the end of its session is refused with an error: the
// page would overwrite later writes of other clients.
//
// A page never extends a file. The kernel writes pages up to the file size known to the
// kernel, and another client may have truncated the file since.

// Launderer is a Notifier for kernels with shared mappings.
type Launderer interface {
	// MayBeDirty reports whether a kernel may have dirty pages of the inode. It does not wait,
	// and may report true for an inode without dirty pages.
	MayBeDirty(v meta.VolumeID, ino meta.Ino) bool
	// Launder has the kernels write back and drop the inode's pages, and returns when
	// WritePage was called for each, and has returned.
	Launder(v meta.VolumeID, ino meta.Ino)
	// Settle waits until WritePage has returned for every page that was written back before
	// the call.
	Settle(v meta.VolumeID, ino meta.Ino)
}

// mayBeDirty gives the Launderer of an inode of which a kernel may have dirty pages,
// else nil.
func (c *Client) mayBeDirty(v meta.VolumeID, ino meta.Ino) Launderer {
	if l, ok := c.cfg.Notify.(Launderer); ok && !c.cfg.UnsafeNoLaunder && l.MayBeDirty(v, ino) {
		return l
	}
	return nil
}

// Epoch numbers the client's sessions with the volume. A page written back in one session must
// not be put into the file in another.
func (v *Volume) Epoch() uint64 { return v.owner.epoch.Load() }

// WritePage writes a page of a shared mapping that the kernel has written back, up to the end
// of the file. epoch is the Epoch at the time of the write-back. Errors: as Write;
// SessionExpired.
func (v *Volume) WritePage(ctx context.Context, call *Call, ino meta.Ino, p []byte, off int64, epoch uint64) error {
	if err := v.readOnly("write"); err != nil {
		return err
	}
	if len(p) == 0 || off < 0 {
		return nil
	}
	in := v.node(ino)
	defer in.put()
	_, err := v.buffers.write(ctx, call, in, p, writing{off: off, page: true, epoch: epoch})
	return err
}
