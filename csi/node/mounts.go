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

// checkPath refuses paths that no orchestrator gives: relative ones, the root,
// and those with . or .. in them.
func checkPath(path string) error {
	if path == "" {
		return status.Error(codes.InvalidArgument, "no path")
	}
	if !filepath.IsAbs(path) || strings.ContainsRune(path, 0) || filepath.Clean(path) != strings.TrimSuffix(path, "/") {
		return status.Errorf(codes.InvalidArgument, "%q is no absolute path in its shortest form", path)
	}
	return nil
}

// whole resolves the symbolic links of a path's directory; the directory of the
// orchestrator may be behind one. The last name is not resolved: it is where
// something is mounted, and never a link. Errors: NotFound (of the directory).
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

// mountsAt lists what is mounted at a whole path, the lowest first.
func mountsAt(path string) ([]*mountinfo.Info, error) {
	return mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
}

// mountAt is what one sees at a whole path, or nil. Errors: Busy if it is not
// ours.
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

// publishedElsewhere lists where else than at these whole paths the volume is
// mounted that m is a mount of.
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

// openDir opens the last directory of a whole path without following a link, and
// makes it if it is missing. Errors: Invalid if it is something else.
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

// bind mounts what is at from at the whole path to as well. The mount is made
// with all its flags before it is put in place, so that nobody ever sees a
// read-only one writable, and the place is held by a descriptor, so that nobody
// can swap it for a link. (mount(8) and libraries over it can do neither.)
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

// maxLayers bounds how many mounts are taken from one path.
const maxLayers = 64

// unmount takes away every mount of ours at a whole path. It waits for what was
// written to be durable where a mount is the last one of its volume; a mount
// that does not answer is taken away without. Where it is not the last one, and
// nobody uses it, nobody needs to answer.
func (s *Server) unmount(ctx context.Context, path string) error {
	return s.takeAway(ctx, path, false)
}

// takeAway is unmount, of what is known not to answer if dead is set.
func (s *Server) takeAway(ctx context.Context, path string, dead bool) error {
	for range maxLayers {
		m, err := mountAt(path)
		if err != nil || m == nil {
			return err
		}
		flags := unix.UMOUNT_NOFOLLOW
		others, err := publishedElsewhere(m, path)
		if err != nil {
			return err
		}
		if len(others) > 0 && unix.Unmount(path, flags) == nil {
			continue
		}
		if dead {
			flags |= unix.MNT_FORCE | unix.MNT_DETACH
		} else if err := s.probes.ask(ctx, path); err != nil {
			if ctx.Err() != nil {
				return err // it had no time to
			}
			s.Logger.Warn("a mount that does not answer is taken away", "path", path, "err", err)
			flags |= unix.MNT_FORCE | unix.MNT_DETACH
		}
		if err := unix.Unmount(path, flags); err != nil && !errors.Is(err, unix.EINVAL) {
			if errors.Is(err, unix.EBUSY) {
				return meta.E("unmount", meta.Busy, path, errors.New("somebody uses it"))
			}
			return meta.E("unmount", meta.IO, path, err)
		}
	}
	return meta.E("unmount", meta.Busy, path, fmt.Errorf("more than %d mounts lie there", maxLayers))
}

// removeDir removes the directory at the end of a whole path if it is empty.
// What lies in it is never removed: it could be a volume.
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

// probeWait is how long a mount may take to answer.
const probeWait = 10 * time.Second

// probes asks mounts whether they answer. A mount that does not keeps whoever
// asks, so there is one question at a time for a path.
type probes struct {
	mu sync.Mutex
	on map[string]chan error
}

// ask tells what is wrong with the mount at a path: Unavailable if it does not
// answer in time, or ctx ends, IO if it has ended. It asks who serves: what the
// kernel has cached of a snapshot's root it may have cached for an hour.
func (p *probes) ask(ctx context.Context, path string) error {
	p.mu.Lock()
	if p.on == nil {
		p.on = map[string]chan error{}
	}
	answer := p.on[path]
	if answer == nil {
		answer = make(chan error, 1)
		p.on[path] = answer
		go func() { // ends when the mount answers, or its connection does
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
		answer <- err // for others who ask the same
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
