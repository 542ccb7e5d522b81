package controller

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/meta"
)

// index maps a snapshot's name to its volume: in this interface a snapshot's name is unique
// among all volumes, in the cluster only within its volume. index lists the snapshots of each
// volume once. The plain way, to list all volumes' snapshots before taking the first snapshot,
// failed: one volume that could not be opened made every snapshot of the other volumes fail,
// and one call opened thousands of unused volumes. An orchestrator does not reuse names, so
// look may stop early. Before a caller relies on an entry, the caller lists the volume's
// snapshots again.
type index struct {
	looking chan struct{} // has room for the one call that runs look

	mu sync.Mutex
	of map[string]meta.VolumeID
	// The volumes whose snapshots were listed, and, for each volume that did not answer, the
	// time of the next try; both nil once all volumes have answered.
	asked  map[meta.VolumeID]bool
	silent map[meta.VolumeID]time.Time
}

func newIndex() index {
	return index{looking: make(chan struct{}, 1), of: map[string]meta.VolumeID{}, asked: map[meta.VolumeID]bool{}, silent: map[meta.VolumeID]time.Time{}}
}

const (
	// lookFor bounds how long one call lists snapshots of other volumes, and askFor how long
	// the call waits for one volume. A volume without an answer is not asked for askAgain.
	lookFor  = 2 * time.Second
	askFor   = 500 * time.Millisecond
	askAgain = time.Minute
	// askAtOnce is how many volumes are asked at a time.
	askAtOnce = 8
)

// full reports whether all volumes have been asked.
func (x *index) full() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.asked == nil
}

// due returns the volumes to ask now, and removes volumes that no longer exist from the index.
func (x *index) due(all []cluster.Volume, now time.Time) (due []cluster.Volume) {
	x.mu.Lock()
	defer x.mu.Unlock()
	there := map[meta.VolumeID]bool{}
	left := 0
	for _, v := range all {
		if !made(v) || v.Deleting {
			continue
		}
		there[v.ID] = true
		if x.asked[v.ID] {
			continue
		}
		left++
		if !now.Before(x.silent[v.ID]) {
			due = append(due, v)
		}
	}
	gone := func(v meta.VolumeID) bool { return !there[v] }
	maps.DeleteFunc(x.of, func(_ string, v meta.VolumeID) bool { return gone(v) })
	maps.DeleteFunc(x.asked, func(v meta.VolumeID, _ bool) bool { return gone(v) })
	maps.DeleteFunc(x.silent, func(v meta.VolumeID, _ time.Time) bool { return gone(v) })
	if left == 0 {
		x.asked, x.silent = nil, nil
	}
	return due
}

// learn records the snapshots of a volume, or the error of listing the snapshots.
func (x *index) learn(v meta.VolumeID, all []cluster.Snapshot, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if err != nil && meta.KindOf(err) != meta.NoSuchVolume {
		x.silent[v] = time.Now().Add(askAgain)
		return
	}
	x.asked[v] = true
	delete(x.silent, v)
	for _, y := range all {
		if ours(y) {
			x.of[y.Name] = v
		}
	}
}

func (x *index) find(name string) (v meta.VolumeID, known bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	v, known = x.of[name]
	return v, known
}

func (x *index) note(name string, v meta.VolumeID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.of[name] = v
}

func (x *index) forget(name string, v meta.VolumeID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.of[name] == v {
		delete(x.of, name)
	}
}

// drop forgets a volume.
func (x *index) drop(v meta.VolumeID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	maps.DeleteFunc(x.of, func(_ string, of meta.VolumeID) bool { return of == v })
}

// look lists the snapshots of volumes not asked yet, for lookFor at most; a later call
// continues. Errors: only of listing the volumes.
func (s *Server) look(ctx context.Context) error {
	soon, cancel := context.WithTimeout(ctx, lookFor)
	defer cancel()
	select {
	case s.index.looking <- struct{}{}:
		defer func() { <-s.index.looking }()
	case <-soon.Done(): // another call runs look
		return nil
	}
	if s.index.full() {
		return nil
	}
	all, err := s.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	_ = s.ask(soon, askFor, s.index.due(all, time.Now()), func(v cluster.Volume, l []cluster.Snapshot, err error) (more bool) {
		if err != nil && soon.Err() != nil {
			return true // lookFor is over: no fault of the volume
		}
		if s.index.learn(v.ID, l, err); err != nil && meta.KindOf(err) != meta.NoSuchVolume {
			s.Logger.Info("the snapshots of a volume can't be listed: a snapshot of another volume may get the name of one of them", "volume", v.Name, "err", err)
		}
		return true
	}) // a later call asks the rest
	return nil
}

// ask lists the snapshots of volumes, some at a time, each within a time (0: the
// call's), and calls fn with the answers in order until fn has enough. Errors: the
// call's time was over before all were asked.
func (s *Server) ask(ctx context.Context, within time.Duration, volumes []cluster.Volume, fn func(cluster.Volume, []cluster.Snapshot, error) (more bool)) error {
	type answer struct {
		all []cluster.Snapshot
		err error
	}
	for some := range slices.Chunk(volumes, askAtOnce) {
		if ctx.Err() != nil {
			return meta.E("list snapshots", meta.Unavailable, some[0].Name, context.Cause(ctx))
		}
		answers := make([]answer, len(some))
		var asked sync.WaitGroup
		for i, v := range some {
			asked.Go(func() {
				ctx := ctx
				if within > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, within)
					defer cancel()
				}
				answers[i].all, answers[i].err = s.Cluster.Snapshots(ctx, v.ID)
			})
		}
		asked.Wait()
		for i, v := range some {
			if !fn(v, answers[i].all, answers[i].err) {
				return nil
			}
		}
	}
	return nil
}

// elsewhere reports whether another volume than v has a snapshot called name, as far as the
// volumes have answered. If not, elsewhere records name as v's.
func (s *Server) elsewhere(ctx context.Context, name string, v meta.VolumeID) (bool, error) {
	if err := s.look(ctx); err != nil {
		return false, err
	}
	if other, known := s.index.find(name); known && other != v {
		_, err := s.snapshotNamed(ctx, other, name)
		if k := meta.KindOf(err); k != meta.NoSuchSnapshot && k != meta.NoSuchVolume {
			return err == nil, err
		}
	}
	s.index.note(name, v)
	return false, nil
}
