package stream

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"path"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// A consumer group may read several streams and has one coordinator, which is the leader of a
// file. A hash of the group's name chooses one of the files dutyDir/0 to dutyDir/15, so that a
// gateway leads few files for many groups.
const (
	dutyDir = "/.streams"
	dutyNum = 16
)

// duties are the files of dutyDir that this process leads.
type duties struct {
	mu     sync.Mutex // held while a leadership begins or ends
	held   [dutyNum]*duty
	closed bool
}

type duty struct {
	lead *penstock.Leadership
	used time.Time
}

// dutyOf returns the number of the file whose leader coordinates a group.
func dutyOf(group string) int {
	h := fnv.New32a()
	h.Write([]byte(group)) // never fails
	return int(h.Sum32() % dutyNum)
}

// Coordinate makes this process the coordinator of a group, unless another process is, and
// returns the epoch of the coordination, which grows for ever. What the process knows of the group
// from another epoch is out of date. Errors: NotOwner (another process coordinates the group),
// Unavailable (the owner of the volume does not answer).
func (h *Host) Coordinate(ctx context.Context, group string) (epoch uint64, err error) {
	n := dutyOf(group)
	d := &h.duties
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0, errStreamClosed(dutyDir)
	}
	if x := d.held[n]; x != nil {
		select {
		case <-x.lead.Done():
			d.held[n] = nil
		default:
			if x.used = time.Now(); !x.lead.Valid() {
				return 0, meta.E("coordinate", meta.Unavailable, group, errors.New("the owner of the volume does not answer: another gateway may coordinate the group"))
			}
			return x.lead.Epoch(), nil
		}
	}
	dir, err := h.dutyDir(ctx)
	if err != nil {
		return 0, err
	}
	l, err := dir.lead(ctx, fmt.Sprint(n), h.Address)
	if err != nil {
		return 0, err
	}
	d.held[n] = &duty{l, time.Now()}
	return l.Epoch(), nil
}

// dutyDir returns the directory of the led files, and makes a missing one.
func (h *Host) dutyDir(ctx context.Context) (volumeDir, error) {
	e, err := h.tree.Stat(ctx, dutyDir)
	if errors.Is(err, meta.NotFound) {
		if err = h.tree.MkdirAll(ctx, dutyDir, dirMode); err == nil {
			e, err = h.tree.Stat(ctx, dutyDir)
		}
	}
	if err != nil {
		return volumeDir{}, err
	}
	v, err := h.client.VolumeByID(ctx, e.Volume)
	return volumeDir{v, e.Attr.Ino}, err
}

// Coordinator returns the address of the process that coordinates a group. Errors: NotFound.
func (h *Host) Coordinator(ctx context.Context, group string) (string, error) {
	e, err := h.tree.Stat(ctx, path.Join(dutyDir, fmt.Sprint(dutyOf(group))))
	if err != nil {
		return "", err
	}
	v, err := h.client.VolumeByID(ctx, e.Volume)
	if err != nil {
		return "", err
	}
	address, _, err := v.Leaderships().Leader(ctx, e.Attr.Ino)
	return address, err
}

// releaseIdle ends what was not used for a time.
func (d *duties) releaseIdle(idle time.Duration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	var errs []error
	for n, x := range d.held {
		if x != nil && (idle == 0 || time.Since(x.used) > idle) {
			d.held[n] = nil
			errs = append(errs, endLead(context.Background(), x.lead))
		}
	}
	if idle == 0 {
		d.closed = true
	}
	return errors.Join(errs...)
}

// close ends the use of duties, unless one is held or about to be.
func (d *duties) close() bool {
	if !d.mu.TryLock() {
		return false
	}
	defer d.mu.Unlock()
	for _, x := range d.held {
		if x != nil {
			return false
		}
	}
	d.closed = true
	return true
}
