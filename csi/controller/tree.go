package controller

import (
	"context"
	"errors"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/meta"
)

// Where volumes hang in the tree.

// attachTries is how often a volume is hung up again whose directory somebody
// removed meanwhile: the last volume in it was deleted.
const attachTries = 5

// attach hangs a volume into the tree: at the path of its class or, if
// something else is there (a claim of the same name whose volume was kept), beside
// it at PATH.NUMBER.
func (s *Server) attach(ctx context.Context, v cluster.Volume, at string) (string, error) {
	suffix := "." + strconv.Itoa(int(v.ID))
	base := path.Base(at)
	beside := path.Join(path.Dir(at), base[:min(len(base), meta.MaxName-len(suffix))]+suffix)
	for try := 0; ; try++ {
		err := s.Cluster.Attach(ctx, v.ID, at)
		switch {
		case err == nil:
			s.Step("create.attached")
			return at, nil
		case errors.Is(err, meta.Exists) && at != beside:
			s.Logger.Info("another thing hangs where a claim's volume should", "path", at, "volume", v.Name, "instead", beside)
			at = beside
		case (errors.Is(err, meta.NotFound) || errors.Is(err, meta.Stale)) && try < attachTries:
		default:
			s.empty.add(path.Dir(at), v.ID) // it was made for this volume, perhaps
			return "", err
		}
	}
}

// detach takes a volume out of the tree, and the directory that it hung in, if
// nothing else does. One that hangs nowhere may have been taken out by a call that
// was cut off before the directory went. Errors: those of the cluster, for this
// volume and its directory; then the call is to be made again.
func (s *Server) detach(ctx context.Context, v cluster.Volume) error {
	brief, cancel := context.WithTimeout(ctx, othersWait)
	defer cancel()
	if v.Path == "" {
		s.sweep(brief)
	} else {
		if dir := path.Dir(v.Path); strings.HasPrefix(dir, "/") {
			s.empty.add(dir, v.ID) // the answer may be lost, and who asks again is told no path
		}
		if err := s.Cluster.Detach(ctx, v.ID); err != nil && !errors.Is(err, meta.NotAttached) && !errors.Is(err, meta.NoSuchVolume) {
			return err
		}
		s.Step("detached")
	}
	for _, dir := range s.empty.of(v.ID) {
		if err := s.tidy(ctx, dir); err != nil {
			return err
		}
	}
	s.tidyOthers(brief)
	return nil
}

// othersWait bounds how long the deletion of a volume looks after directories of
// others, which may lie in volumes that nobody serves now.
const othersWait = 3 * time.Second

// empties are directories that volumes hung in, until they are gone or known to be
// needed.
type empties struct {
	mu    sync.Mutex
	dirs  map[string]meta.VolumeID // and the last volume that hung there; 0: nobody knows
	swept bool                     // those that calls to another process left were looked for
}

func (e *empties) add(dir string, v meta.VolumeID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dirs == nil {
		e.dirs = map[string]meta.VolumeID{}
	}
	if v != 0 || e.dirs[dir] == 0 {
		e.dirs[dir] = v
	}
}

func (e *empties) remove(dir string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.dirs, dir)
}

// of are the directories that a volume was the last to hang in.
func (e *empties) of(v meta.VolumeID) (all []string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for dir, of := range e.dirs {
		if of == v {
			all = append(all, dir)
		}
	}
	return all
}

// all are in any order, so that one that takes all the time there is does not keep
// the same others waiting again and again.
func (e *empties) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.dirs))
}

// tidy removes a directory if it is empty. One that may not be removed stays;
// nobody can wait for that to change. Errors: those after which it is looked at
// again.
func (s *Server) tidy(ctx context.Context, dir string) error {
	if err := s.Cluster.Tidy(ctx, dir); stays(err) {
		s.Logger.Warn("a directory of claims was not removed", "path", dir, "err", err)
	} else if err != nil {
		return err
	}
	s.empty.remove(dir)
	return nil
}

// tidyOthers removes what calls about other volumes left. No volume waits for that:
// the next call looks at them again.
func (s *Server) tidyOthers(ctx context.Context) {
	for _, dir := range s.empty.all() {
		if err := s.tidy(ctx, dir); err != nil {
			s.Logger.Warn("a directory of other claims can't be looked at now", "path", dir, "err", err)
		}
		if ctx.Err() != nil {
			return
		}
	}
}

// stays tells answers about a directory that will not be others later.
func stays(err error) bool {
	switch meta.KindOf(err) {
	case meta.NotPermitted, meta.AccessDenied, meta.ReadOnly, meta.Invalid, meta.NotSupported:
		return true
	}
	return false
}

// claims is the directory below which nobody but this driver makes directories:
// where volumes hang if their class says nothing else.
var claims = path.Dir(path.Dir(policy.DefaultAttach))

// sweep finds, once in a process, the directories that calls to another one left: no
// volume says any more that it hung there. It looks below claims only: elsewhere
// empty directories may be people's. Those that are needed are not empty.
func (s *Server) sweep(ctx context.Context) {
	s.empty.mu.Lock()
	swept := s.empty.swept
	s.empty.mu.Unlock()
	if swept {
		return
	}
	names, err := s.Cluster.Dirs(ctx, claims)
	if k := meta.KindOf(err); err != nil && k != meta.NotFound && k != meta.NotDir {
		s.Logger.Warn("directories that other claims left can't be looked for now", "path", claims, "err", err)
		if !stays(err) {
			return // the next call looks
		}
	}
	for _, name := range names {
		s.empty.add(path.Join(claims, name), 0)
	}
	s.empty.mu.Lock()
	s.empty.swept = true
	s.empty.mu.Unlock()
}
