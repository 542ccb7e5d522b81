package server

import (
	"context"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/wire"
)

// A home may be unable to open a volume: its disk is full or broken, or what it
// keeps there. Then the next server in the order of homes that can takes it; the
// volume comes home once its home has a copy that follows again. Without
// followers it is tried now and then.

const (
	unableMin = time.Second // before a volume that could not be opened is tried again
	unableMax = 10 * time.Second
)

// unable are volumes that could not be opened here, for a reason that lies here.
type unable struct {
	mu sync.Mutex
	m  map[meta.VolumeID]failure
	// nobody are those of which no other server took them either, for health.
	nobody map[meta.VolumeID]failed
}

type failed struct {
	err error
	at  time.Time
}

// unservedTold is how long it is told that a volume could not be opened, unless it is
// tried again, as one is that is to be served.
const unservedTold = time.Minute

type failure struct {
	err   error
	until time.Time // not tried again before
	wait  time.Duration
}

// now gives why a volume is not to be tried yet, nil if it may be.
func (u *unable) now(v meta.VolumeID) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if f, ok := u.m[v]; ok && time.Now().Before(f.until) {
		return f.err
	}
	return nil
}

// note takes the result of an opening, and tells whether it failed for a reason
// that other servers may not have.
func (u *unable) note(v meta.VolumeID, err error) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !liesHere(err) {
		if err == nil {
			delete(u.m, v)
		}
		return false
	}
	if u.m == nil {
		u.m = map[meta.VolumeID]failure{}
	}
	wait := min(max(2*u.m[v].wait, unableMin), unableMax)
	u.m[v] = failure{err, time.Now().Add(wait), wait}
	return true
}

// tell notes what came of an opening at last.
func (u *unable) tell(v meta.VolumeID, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !liesHere(err) && !errors.Is(err, meta.Ahead) {
		delete(u.nobody, v)
		return
	}
	if u.nobody == nil {
		u.nobody = map[meta.VolumeID]failed{}
	}
	u.nobody[v] = failed{err, time.Now()}
}

// unserved gives the volumes that nobody could open lately, and why.
func (u *unable) unserved(now time.Time) map[meta.VolumeID]error {
	u.mu.Lock()
	defer u.mu.Unlock()
	all := map[meta.VolumeID]error{}
	for v, f := range u.nobody {
		if now.Sub(f.at) < unservedTold {
			all[v] = f.err
		}
	}
	return all
}

// liesHere: an opening failed, and not because of etcd, of another owner, or of
// the volume itself. A copy that is ahead of the journal (Ahead) is no such
// reason: nobody may go on from an older one unasked.
func liesHere(err error) bool {
	switch meta.KindOf(err) {
	case meta.KindOK, meta.Unavailable, meta.Canceled, meta.Interrupted, meta.Fenced, meta.NotOwner, meta.NoSuchVolume, meta.Ahead, meta.Again, meta.Stale:
		return false
	}
	return true
}

// handOn finds another server for a volume that could not be opened here, and
// gives the error for who asked here: NotOwner with its address, or why if nobody
// can.
func (s *Server) handOn(v meta.VolumeID, why error) error {
	view := s.cfg.Cluster.View()
	if view == nil || s.ctx.Err() != nil {
		return why
	}
	for _, m := range cluster.Rank(v, view.MetaServers) {
		if m.Name == s.cfg.Name || s.leavers.has(m.Name) {
			continue
		}
		ask, cancel := context.WithTimeoutCause(s.ctx, handOverWait+time.Second, errors.New("the server did not take the volume in time"))
		re, err := s.askPeer(ask, m.Addr, &wire.Admin{Op: wire.AdminTake, Volume: v})
		cancel()
		if err == nil {
			err = re.Status.Error()
		}
		if err == nil {
			s.log.Warn("a volume can't be opened here, and is served elsewhere", "volume", v, "server", m.Name, "error", why)
			return meta.E("open volume", meta.NotOwner, m.Addr, why)
		}
		s.log.Info("a server did not take a volume that can't be opened here", "volume", v, "server", m.Name, "error", err)
	}
	s.log.Error("a volume can't be opened here, and no other server takes it: it is not served", "volume", v, "error", why)
	return why
}
