package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// checkPath refuses paths that no orchestrator sends: relative paths, the root, and paths with
// . or .. components.
func checkPath(path string) error {
	if path == "" {
		return status.Error(codes.InvalidArgument, "no path")
	}
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) || filepath.Clean(path) != strings.TrimSuffix(path, "/") {
		return status.Errorf(codes.InvalidArgument, "%q is no absolute path in its shortest form", path)
	}
	return nil
}

// whole resolves the symbolic links of a path's directory, because the orchestrator's
// directory may be a link. whole does not resolve the last component: the component is a mount
// point and never a link. Errors: NotFound (of the directory), IO.
func whole(path string) (string, error) {
	path = filepath.Clean(path)
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, os.ErrNotExist) {
		return "", meta.E("resolve path", meta.NotFound, path, err)
	}
	if err != nil {
		return "", meta.E("resolve path", meta.IO, path, err)
	}
	return filepath.Join(dir, filepath.Base(path)), nil
}

// kind is the last part of our mounts' type.
const kind = "." + reply.FileSystem

func isOurs(m *mountinfo.Info) bool { return strings.HasSuffix(m.FSType, kind) }

// mountsAt lists the mounts at a whole path, the lowest first.
func mountsAt(path string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
}

// mountAt returns the uppermost mount at a whole path, or nil. Errors: Busy (the mount is not
// Penstock's).
func mountAt(path string) (*mountinfo.Info, error) {
	all, err := mountsAt(path)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	m := all[len(all)-1]
	if !isOurs(m) {
		return nil, meta.E("look at mount", meta.Busy, path, fmt.Errorf("%s of type %s is mounted there", m.Source, m.FSType))
	}
	return m, nil
}

// publishedElsewhere lists the paths of all mounts of m's volume, without the whole paths in
// except.
func publishedElsewhere(m *mountinfo.Info, except ...string) (paths []string, err error) {
	all, err := mountinfo.GetMounts(func(x *mountinfo.Info) (skip, stop bool) {
		return x.Major != m.Major || x.Minor != m.Minor || slices.Contains(except, x.Mountpoint), false
	})
	for _, x := range all {
		paths = append(paths, x.Mountpoint)
	}
	return paths, err
}

func isReadOnly(m *mountinfo.Info) bool {
	for o := range strings.SplitSeq(m.Options, ",") {
		if o == "ro" {
			return true
		}
	}
	return false
}

// openDir opens the last directory of a whole path without following a link, and creates the
// directory if missing. Errors: Invalid (the last component is no directory), IO.
func openDir(path string) (fd int, err error) {
	const op = "open directory"
	parent, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, meta.E(op, meta.IO, filepath.Dir(path), err)
	}
	defer unix.Close(parent)
	if err := unix.Mkdirat(parent, filepath.Base(path), 0o750); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, meta.E(op, meta.IO, path, err)
	}
	fd, err = unix.Openat(parent, filepath.Base(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		return -1, meta.E(op, meta.Invalid, path, errors.New("it is no directory"))
	}
	if err != nil {
		return -1, meta.E(op, meta.IO, path, err)
	}
	return fd, nil
}

// bind binds the mount at from to the whole path to. bind sets all flags before the new mount
// becomes visible, so that no process sees a read-only mount writable, and holds the target by
// a descriptor, so that no process can replace the target by a link. (mount(8) and libraries
// around mount(8) can do neither.)
func bind(from, to string, readOnly bool) error {
	const op = "bind"
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return meta.E(op, meta.IO, from, err)
	}
	defer unix.Close(tree)
	if readOnly {
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return meta.E(op, meta.IO, from, err)
		}
	}
	at, err := openDir(to)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	if err := unix.MoveMount(tree, "", at, "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH); err != nil {
		return meta.E(op, meta.IO, to, err)
	}
	return nil
}

// removeDir removes the directory at the end of a whole path if the directory is empty.
// removeDir never removes contents: the contents could be a volume. Errors: Invalid, IO.
func removeDir(path string) error {
	err := unix.Rmdir(path)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if errors.Is(err, unix.ENOTDIR) {
		return meta.E("remove directory", meta.Invalid, path, errors.New("it is no directory"))
	}
	return meta.E("remove directory", meta.IO, path, err)
}

// probeWait bounds how long a probe waits for a mount's answer.
const probeWait = 10 * time.Second

// probes checks whether mounts answer. A hung mount blocks the probing thread, so a path has
// one running probe at a time.
type probes struct {
	mu sync.Mutex
	on map[string]chan error
}

// ask probes the mount at a path. Errors: Unavailable (no answer within probeWait, or before
// ctx ended), IO (the mount has ended). The probe forces a request to the serving process,
// because the kernel may cache the attributes of a snapshot's root for an hour.
func (p *probes) ask(ctx context.Context, path string) error {
	p.mu.Lock()
	if p.on == nil {
		p.on = map[string]chan error{}
	}
	answer := p.on[path]
	if answer == nil {
		answer = make(chan error, 1)
		p.on[path] = answer
		go func() { // ends when the mount answers, or its connection ends
			var st unix.Statx_t
			err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_FORCE_SYNC, unix.STATX_BASIC_STATS, &st)
			p.mu.Lock()
			delete(p.on, path)
			p.mu.Unlock()
			answer <- err
		}()
	}
	p.mu.Unlock()
	select {
	case err := <-answer:
		answer <- err // for other callers waiting for this probe
		if err != nil {
			return meta.E("look at mount", meta.IO, path, err)
		}
		return nil
	case <-ctx.Done():
		return meta.E("look at mount", meta.Unavailable, path, context.Cause(ctx))
	case <-time.After(probeWait):
		return meta.E("look at mount", meta.Unavailable, path, fmt.Errorf("no answer within %v", probeWait))
	}
}
