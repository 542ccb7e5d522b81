package penstock

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// Volume is one volume of the tree, live or as of a snapshot. Its methods may be called from
// many goroutines. Errors are of type *meta.Error. Besides the kinds in its comment, a method
// may fail with Stale (the inode is gone), SessionExpired, Unavailable or IO.
type Volume struct {
	c    *Client
	id   meta.VolumeID
	name string
	view *view // nil: the volume is live

	// The guests of the volume: types with the state and the methods of one task each.

	owner    requests
	settings settings

	// What may be believed.
	dirs      directories
	opens     openAhead
	reads     fileReads
	atimes    atimeList
	locks     heldLocks
	holds     holds
	snapshots snapshotNames
	index     viewIndex

	// Bytes, and their way to durability.
	buffers fileBuffers
	chunks  openChunks
	back    writeBack
	changes inodeChanges
	space   space
	meter   meter

	leaderships leaderships
	barred      barred

	orphans orphanList
	lost    lostNames
	closed  closedList
	// distrust: the kernel may have cached stale data under a predecessor's leases, of unknown
	// inodes.
	distrust atomic.Bool
}

// lodge tells the volume's guests whose guests they are. names are the locks of the volume's
// names.
func (v *Volume) lodge(names *nameLocks) {
	v.owner.v, v.settings.v = v, v
	if v.view != nil {
		v.view.v = v
	}
	v.dirs = directories{v: v, locks: names}
	v.opens.v, v.reads.v, v.atimes.v, v.locks.v, v.holds.v, v.snapshots.v = v, v, v, v, v, v
	v.index.v, v.buffers.v, v.chunks.v, v.changes.v, v.meter.v, v.closed.v = v, v, v, v, v, v
	v.back = writeBack{v: v, dirty: make(map[*inode]struct{}), kicked: make(chan struct{}, 1)}
}

// ID is the volume's number, which never changes; of a view, see ViewID.
func (v *Volume) ID() meta.VolumeID { return v.id }

// Name returns the volume's name at the time of opening; of a view, VOLUME@SNAPSHOT.
func (v *Volume) Name() string { return v.name }

func (v *Volume) subject(ino meta.Ino) string { return fmt.Sprintf("%s:%d", v.name, ino) }

// valid is how long a cache above the client may keep leased facts.
func (v *Volume) valid() time.Duration {
	if v.view == nil {
		return max(v.c.sess.LeaseLeft(v.id)-leaseMargin, 0)
	}
	if v.view.gone.Load() {
		return 0
	}
	return viewValid
}

// Volume opens a volume by name. Errors: NoSuchVolume.
func (c *Client) Volume(ctx context.Context, name string) (*Volume, error) {
	return c.openVolume(ctx, 0, name)
}

// VolumeByID opens a volume by number, for example the target of a junction. Only the first
// call for a volume asks a server. The number of a view (Entry.Volume) is valid until the view
// ends. Errors: NoSuchVolume; Stale (a view that has ended).
func (c *Client) VolumeByID(ctx context.Context, id meta.VolumeID) (*Volume, error) {
	if v := c.lookVolume(id); v != nil {
		return v, nil
	}
	if id > meta.MaxVolume {
		return nil, meta.E("open snapshot", meta.Stale, fmt.Sprintf("view %d", id), nil)
	}
	return c.openVolume(ctx, id, "")
}

func (c *Client) openVolume(ctx context.Context, id meta.VolumeID, name string) (*Volume, error) {
	c.mu.Lock()
	news := c.policies
	c.mu.Unlock()
	i, err := c.sess.Volume(ctx, id, name)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	v := c.volumes[i.ID]
	fresh := v == nil
	if fresh {
		v = &Volume{
			c: c, id: i.ID, name: i.Name,
		}
		v.lodge(newNames())
		v.chunks.places = make(map[meta.ChunkID]*chunkRef)
		v.locks.keep, v.locks.volume = c.cfg.Keep, i.ID
		c.cfg.Keep.Note(keep.Record{Kind: keep.Volume, N: [6]uint64{uint64(i.ID), c.expired[i.ID]}})
		v.owner.epoch.Store(1 + c.expired[i.ID])
		v.meter.epoch = 1 + c.expired[i.ID]
		c.volumes[i.ID] = v
	}
	if fresh || news == c.policies {
		v.settings.set(i.Policy)
	}
	if news != c.policies {
		v.settings.at.Store(0) // the answer may be older than what an owner said
	}
	if fresh {
		v.meter.on.Store(i.Policy.QuotaBytes > 0) // until the owner sends the quota
		v.meter.overwrites.Store(i.Policy.QuotaSnapshots)
	}
	return v, nil
}

// View tells which snapshot of which volume is shown here; ok is false for a
// live volume.
func (v *Volume) View() (of meta.VolumeID, s meta.Snapshot, ok bool) {
	if v.view == nil {
		return 0, meta.Snapshot{}, false
	}
	return v.view.of.id, v.view.snap, true
}

// frozen reports that the volume shows a snapshot.
func (v *Volume) frozen() bool { return v.view != nil }

// readOnly refuses a change of a snapshot.
func (v *Volume) readOnly(op string) error {
	if v.view == nil {
		return nil
	}
	return meta.E(op, meta.ReadOnly, v.name, nil)
}

// home returns the volume that knows the places of chunks: for a view, the live volume.
func (v *Volume) home() *Volume {
	if v.view != nil {
		return v.view.of
	}
	return v
}
