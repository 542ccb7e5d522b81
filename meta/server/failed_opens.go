package server

import (
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// A home may be unable to open a volume: the home's disk is full or broken, or the data on it.
// Then the next server in the order of homes that can open the volume does. The volume returns
// to its home when the home has a following copy again. Without followers, the home tries
// again at intervals.

const (
	unableMin = time.Second // wait before the next try to open a volume
	unableMax = 10 * time.Second
)

// unable holds the volumes that could not be opened here, for a local reason.
type unable struct {
	mu sync.Mutex
	m  map[meta.VolumeID]failure
	// nobody holds the volumes that no other server took either, for health.
	nobody map[meta.VolumeID]failed
}

type failed struct {
	err error
	at  time.Time
}

// unservedTold is how long health reports a failed opening. An opening of a volume that should
// be served is tried, and reported, again within that time.
const unservedTold = time.Minute

type failure struct {
	err   error
	until time.Time // not tried again before
	wait  time.Duration
}

// now returns why a volume is not to be tried yet, or nil.
func (u *unable) now(v meta.VolumeID) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if f, ok := u.m[v]; ok && time.Now().Before(f.until) {
		return f.err
	}
	return nil
}

// note records the result of an opening, and reports whether the opening failed for a local
// reason, which other servers may not have.
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

// tell records the final result of an opening, after other servers were asked.
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

// unserved returns the volumes that no server could open lately, and why.
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

// liesHere reports whether an opening failed for a local reason: not because of etcd, of
// another owner, or of the volume itself. A copy ahead of the journal (Ahead) is no local
// reason: no server may continue from an older copy without an operator's request.
func liesHere(err error) bool {
	switch meta.KindOf(err) {
	case meta.KindOK, meta.Unavailable, meta.Canceled, meta.Interrupted, meta.Fenced, meta.NotOwner, meta.NoSuchVolume, meta.Ahead, meta.Again, meta.Stale:
		return false
	}
	return true
}
