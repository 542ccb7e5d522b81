package server

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/wire"
)

// A server whose metadata disk fills up gives its volumes to servers with room, before it has
// to refuse changes: no client may write to a volume served from a full disk. The server takes
// no volume back, and follows none, until the disk has had room for a while: otherwise volumes
// would move back and forth with every rotation of a log file. If no other server takes a
// volume, the server keeps the volume, and refuses changes as needed (disk_full.go).

const (
	// roomlessLook is how often a server without room looks for volumes to give away.
	roomlessLook = 500 * time.Millisecond
	// roomlessAgain is the wait between two offers of a volume that no server took.
	roomlessAgain = 5 * time.Second
	// roomlessRest is how long the disk must have had room before volumes come back.
	roomlessRest = time.Minute
)

// roomless records whether this server has too little room to serve volumes.
type roomless struct {
	low  atomic.Bool
	last atomic.Int64 // the last time that low was true, nanoseconds since 1970; 0: never
	free atomic.Uint64
	want atomic.Uint64
}

// look records the free bytes of the disk. refuse is the free space below which changes are
// refused; the disk has too little room below twice refuse.
func (r *roomless) look(free, refuse uint64) {
	want := 2 * refuse
	r.free.Store(free)
	r.want.Store(want)
	if r.low.Load() {
		want += want / 8
	}
	low := free < want
	r.low.Store(low)
	if low {
		r.last.Store(time.Now().UnixNano())
	}
}

// rests reports whether the disk has no room, or has had room for less than rest.
func (r *roomless) rests(rest time.Duration) bool {
	last := r.last.Load()
	return r.low.Load() || last != 0 && time.Since(time.Unix(0, last)) < rest
}

// roomlessLoop gives volumes away while the disk has no room.
func (dr *diskRoom) roomlessLoop() {
	t := time.NewTicker(roomlessLook)
	defer t.Stop()
	kept := map[meta.VolumeID]time.Time{} // the last offer that no server took
	resting := false
	for {
		select {
		case <-dr.ctx.Done():
			return
		case <-t.C:
		}
		if !dr.roomless.low.Load() {
			if rests := dr.roomless.rests(roomlessRest); resting && !rests {
				dr.hosted.goHome() // volumes whose home is here may come back
			} else {
				resting = rests
			}
			clear(kept)
			continue
		}
		resting = true
		for _, o := range dr.hosted.owners() {
			if time.Since(kept[o.vol]) < roomlessAgain {
				continue
			}
			if err := dr.giveAway(o); err != nil && dr.ctx.Err() == nil {
				if kept[o.vol].IsZero() {
					o.log.Error("the metadata disk fills up, and no other server takes the volume: free space on it, or on another server's", "free", dr.roomless.free.Load(), "wanted", dr.roomless.want.Load(), "error", err)
				}
				kept[o.vol] = time.Now()
			}
		}
	}
}

// giveAway asks other servers, in the order of homes, to take a volume.
func (dr *diskRoom) giveAway(o *owner) error {
	view := dr.cfg.Cluster.View()
	if view == nil {
		return nil
	}
	var errs []error
	for _, m := range cluster.Rank(o.vol, view.MetaServers) {
		if m.Name == dr.cfg.Name || dr.hosted.leavers.has(m.Name) {
			continue
		}
		ask, cancel := context.WithTimeoutCause(dr.ctx, handOverWait+time.Second, errors.New("the server did not take the volume in time"))
		re, err := dr.peers.askPeer(ask, m.Addr, &wire.Admin{Op: wire.AdminTake, Volume: o.vol, Entry: dr.cfg.Addr})
		cancel()
		if err == nil {
			err = re.Status.Error()
		}
		if err == nil || o.ctx.Err() != nil {
			o.log.Warn("the metadata disk fills up: the volume was given to another server", "server", m.Name, "free", dr.roomless.free.Load(), "wanted", dr.roomless.want.Load())
			return nil
		}
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return meta.E("give volume away", meta.Unavailable, o.subject(), errors.New("there is no other server"))
	}
	return errors.Join(errs...)
}

// mayTake refuses a volume offered by a server without room, if this server has no room
// either.
func (dr *diskRoom) mayTake(m *wire.Admin) error {
	if m.Name != "" || m.Entry == "" || !dr.roomless.low.Load() && dr.tight.Load() == nil {
		return nil // offered by a server that is stopping or can't open the volume: a server must take it
	}
	return meta.E("take volume", meta.NoSpace, dr.cfg.Name, errors.New("its metadata disk has too little room, too"))
}

// roomHealth adds the metadata disk to the health report if the disk has no room.
func (dr *diskRoom) roomHealth(h *meta.ServerHealth) {
	if dr.roomless.low.Load() {
		h.MetaDisk = &meta.MetaDiskHealth{
			Path: dr.cfg.RoomPath, Free: dr.roomless.free.Load(), Wanted: dr.roomless.want.Load(),
			Refusing: dr.tight.Load() != nil && len(dr.hosted.owners()) > 0,
		}
	}
}
