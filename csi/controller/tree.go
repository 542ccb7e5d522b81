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
			s.empty.add(path.Dir(at)) // it was made for this volume, perhaps
			return "", err
		}
	}
}

// detach takes a volume out of the tree, and the directory that it hung in, if
// nothing else does. One that hangs nowhere may have been taken out by a call that
// was cut off before the directory went. Errors: those of the cluster; then the
// call is to be made again.
func (s *Server) detach(ctx context.Context, v cluster.Volume) error {
	if v.Path == "" {
		if err := s.sweep(ctx); err != nil {
			return err
		}
		return s.tidy(ctx)
	}
	if err := s.Cluster.Detach(ctx, v.ID); err != nil && !errors.Is(err, meta.NotAttached) && !errors.Is(err, meta.NoSuchVolume) {
		return err
	}
	s.Step("detached")
	if dir := path.Dir(v.Path); strings.HasPrefix(dir, "/") {
		s.empty.add(dir)
	}
	return s.tidy(ctx)
}

// empties are directories that volumes hung in, until they are gone or known to be
// needed.
type empties struct {
	mu    sync.Mutex
	dirs  map[string]bool
	swept bool // those that calls to another process left were looked for
}

func (e *empties) add(dir string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dirs == nil {
		e.dirs = map[string]bool{}
	}
	e.dirs[dir] = true
}

func (e *empties) remove(dir string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.dirs, dir)
}

func (e *empties) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(maps.Keys(e.dirs))
}

// tidy removes the directories that are empty. One that may not be removed stays;
// nobody can wait for that to change.
func (s *Server) tidy(ctx context.Context) error {
	for _, dir := range s.empty.all() {
		err := s.Cluster.Tidy(ctx, dir)
		switch meta.KindOf(err) {
		case meta.KindOK:
		case meta.NotPermitted, meta.AccessDenied, meta.ReadOnly, meta.Invalid, meta.NotSupported:
			s.Logger.Warn("a directory of claims was not removed", "path", dir, "err", err)
		default:
			return err
		}
		s.empty.remove(dir)
	}
	return nil
}

// sweep finds, once in a process, the directories that calls to another one left: no
// volume says any more that it hung there. They are beside those in which volumes
// of this driver hang, or where such hang if nobody says otherwise.
func (s *Server) sweep(ctx context.Context) error {
	s.empty.mu.Lock()
	swept := s.empty.swept
	s.empty.mu.Unlock()
	if swept {
		return nil
	}
	all, err := s.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	needed, above := map[string]bool{}, map[string]bool{path.Dir(path.Dir(policy.DefaultAttach)): true}
	for _, v := range all {
		if dir := path.Dir(v.Path); made(v) && strings.HasPrefix(dir, "/") {
			needed[dir], above[path.Dir(dir)] = true, true
		}
	}
	delete(above, "/") // what lies in the root stays
	for _, up := range slices.Sorted(maps.Keys(above)) {
		names, err := s.Cluster.Dirs(ctx, up)
		if k := meta.KindOf(err); k == meta.NotFound || k == meta.NotDir {
			continue
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if dir := path.Join(up, name); !needed[dir] {
				s.empty.add(dir)
			}
		}
	}
	s.empty.mu.Lock()
	s.empty.swept = true
	s.empty.mu.Unlock()
	return nil
}
