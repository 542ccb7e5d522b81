package stream

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"path"
	"sync"
	"sync/atomic"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/placement"
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
	mu     sync.Mutex // held while a leadership begins, and while unused ones end
	now    [dutyNum]atomic.Pointer[duty]
	closed bool
	// ended closes the offsets of groups whose coordination ends.
	ended func(of func(Coordination) bool)
}

type duty struct {
	lead *penstock.Leadership
	used atomic.Int64 // nanoseconds since 1970
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
	if x := d.now[n].Load(); x != nil {
		select {
		case <-x.lead.Done():
			h.endDuty(n, x)
		default:
			if x.used.Store(time.Now().UnixNano()); !x.lead.Valid() {
				return 0, meta.E("coordinate", meta.Unavailable, group, errors.New("the owner of the volume does not answer: another gateway may coordinate the group"))
			}
			return x.lead.Epoch(), nil
		}
	}
	if g, other := gateways(h.Gateways).elsewhere(dutyKey(n)); other {
		return 0, errElsewhere("coordinate", "group "+group, g)
	}
	dir, err := h.dutyDir(ctx)
	if err != nil {
		return 0, err
	}
	l, err := dir.lead(ctx, fmt.Sprint(n), h.Address)
	if err != nil {
		return 0, err
	}
	x := &duty{lead: l}
	x.used.Store(time.Now().UnixNano())
	d.now[n].Store(x)
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

// Coordinator returns the gateway that coordinates a group, or is to coordinate a group without a
// coordinator. Errors: NotFound (no other gateway does, and this process is to).
func (h *Host) Coordinator(ctx context.Context, group string) (placement.Gateway, error) {
	address, err := h.coordinatedAt(ctx, group)
	if errors.Is(err, meta.NotFound) {
		if g, other := gateways(h.Gateways).elsewhere(dutyKey(dutyOf(group))); other && g.Number != 0 {
			return g, nil
		}
	}
	if err != nil {
		return placement.Gateway{}, err
	}
	return gateways(h.Gateways).at(address)
}

func (h *Host) coordinatedAt(ctx context.Context, group string) (string, error) {
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

// dutyKey identifies the coordination with a number for placement.
func dutyKey(n int) placement.Key { return placement.Key{Number: int32(n)} }

// coordinates returns the epoch in which the process coordinates a group; 0: the process does not.
func (h *Host) coordinates(group string) (epoch uint64) {
	x := h.duties.now[dutyOf(group)].Load()
	if x == nil || !x.lead.Valid() {
		return 0
	}
	return x.lead.Epoch()
}

// settleDuties ends the coordinations that were lost, or that another gateway is to have.
func (h *Host) settleDuties() {
	for n := range dutyNum {
		x := h.duties.now[n].Load()
		if x == nil {
			continue
		}
		g, other := gateways(h.Gateways).elsewhere(dutyKey(n))
		select {
		case <-x.lead.Done():
		default:
			if !other {
				continue
			}
		}
		h.endDuty(n, x)
		if other {
			h.log.Info("the coordination of groups moves to another gateway", "coordination", n, "gateway", g.Number)
		}
	}
}

// endDuty ends a coordination, unless another call did: the process opens no more offsets of the
// groups, waiting members hear of the end, the offsets are closed, and then another process may
// coordinate. The next coordinator needs the files of the offsets at once.
func (h *Host) endDuty(n int, x *duty) {
	if !h.duties.now[n].CompareAndSwap(x, nil) {
		return
	}
	h.duties.ended(func(c Coordination) bool { return dutyOf(c.Group) == n && c.Epoch <= x.lead.Epoch() })
	if err := endLead(context.Background(), x.lead); err != nil {
		h.log.Warn("giving up the coordination of groups failed; the coordination ends with the session", "coordination", n, "error", err)
	}
}

// releaseDuties ends the coordinations that were not used for a time; 0: all coordinations, for ever.
func (h *Host) releaseDuties(idle time.Duration) {
	d := &h.duties
	d.mu.Lock()
	defer d.mu.Unlock()
	if idle == 0 {
		d.closed = true
	}
	for n := range d.now {
		if x := d.now[n].Load(); x != nil && (idle == 0 || time.Since(time.Unix(0, x.used.Load())) > idle) {
			h.endDuty(n, x)
		}
	}
}

// any reports that the process has a coordination, or is about to.
func (d *duties) any() bool {
	if !d.mu.TryLock() {
		return true
	}
	defer d.mu.Unlock()
	for n := range d.now {
		if d.now[n].Load() != nil {
			return true
		}
	}
	return false
}

// close ends the use of duties, unless one is held or about to be.
func (d *duties) close() bool {
	if !d.mu.TryLock() {
		return false
	}
	defer d.mu.Unlock()
	for n := range d.now {
		if d.now[n].Load() != nil {
			return false
		}
	}
	d.closed = true
	return true
}
