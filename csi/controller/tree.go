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

// The places of volumes in the tree.

// attachTries bounds the tries to attach a volume whose directory another call removed
// meanwhile, after deleting the last volume in the directory.
const attachTries = 5

// attach attaches a volume to the tree at path at, the class's path. If the path is taken (by
// the kept volume of an earlier claim with the same name), attach uses PATH.NUMBER. attach
// returns the path used.
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
			s.Logger.Info("the path of a claim's volume is taken by something else", "path", at, "volume", v.Name, "instead", beside)
			at = beside
		case (errors.Is(err, meta.NotFound) || errors.Is(err, meta.Stale)) && try < attachTries:
		default:
			s.empty.add(path.Dir(at), v.ID) // perhaps made for this volume
			return "", err
		}
	}
}

// detach detaches a volume from the tree, and removes its directory if the directory is empty.
// An unattached volume may have been detached by a call that was cut off before the call
// removed the directory. Errors: the cluster's, for this volume and its directory; the
// orchestrator must then call again.
func (s *Server) detach(ctx context.Context, v cluster.Volume) error {
	brief, cancel := context.WithTimeout(ctx, othersWait)
	defer cancel()
	if v.Path == "" {
		s.sweep(brief)
	} else {
		if dir := path.Dir(v.Path); strings.HasPrefix(dir, "/") {
			s.empty.add(dir, v.ID) // after a lost answer the next call finds no path
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

// othersWait bounds how long the deletion of a volume tries to remove the directories of other
// volumes: the directories may lie in volumes without an owner.
const othersWait = 3 * time.Second

// empties has directories in which volumes were attached, until a call removed each directory
// or found it in use.
type empties struct {
	mu    sync.Mutex
	dirs  map[string]meta.VolumeID // directory to the last volume attached in it; 0: unknown
	swept bool                     // sweep has listed the directories left by other processes
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

// of returns the directories in which v was the last attached volume.
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

// all returns the directories in any order, so that a slow directory does not delay the same
// other directories in each call.
func (e *empties) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.dirs))
}

// tidy removes a directory if it is empty. tidy skips a directory that the service may not
// remove: waiting would not change the answer. Errors: only errors after which a later call
// tries again.
func (s *Server) tidy(ctx context.Context, dir string) error {
	if err := s.Cluster.Tidy(ctx, dir); stays(err) {
		s.Logger.Warn("a directory of claims was not removed", "path", dir, "err", err)
	} else if err != nil {
		return err
	}
	s.empty.remove(dir)
	return nil
}

// tidyOthers removes the directories left by calls about other volumes, until ctx ends. After
// an error the caller's volume is deleted nevertheless: the next call tries again.
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

// stays reports whether an error about a directory is permanent.
func stays(err error) bool {
	switch meta.KindOf(err) {
	case meta.NotPermitted, meta.AccessDenied, meta.ReadOnly, meta.Invalid, meta.NotSupported:
		return true
	}
	return false
}

// claims is the directory below which only this driver makes directories: the place of volumes
// whose class has no attachPath.
var claims = path.Dir(path.Dir(policy.DefaultAttach))

// sweep finds, once in a process, the directories left by another process's calls: no volume
// records such a directory. sweep lists only the directories in claims: elsewhere an empty
// directory may be a user's. tidy does not remove a directory in use, which is not empty.
func (s *Server) sweep(ctx context.Context) {
	s.empty.mu.Lock()
	swept := s.empty.swept
	s.empty.mu.Unlock()
	if swept {
		return
	}
	names, err := s.Cluster.Dirs(ctx, claims)
	if k := meta.KindOf(err); err != nil && k != meta.NotFound && k != meta.NotDir {
		s.Logger.Warn("the directories of deleted claims can't be looked for now", "path", claims, "err", err)
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
