package node

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// maxLayers bounds how many mounts takeAway removes from one path.
const maxLayers = 64

// unmount removes all of Penstock's mounts at a whole path. The last mount of a volume is
// removed only after written data is durable, unless the mount does not answer. A mount of a
// volume mounted elsewhere too is removed without an answer if no process uses the mount. A
// mount that does not answer is removed although processes use it (see remove).
func (s *Server) unmount(ctx context.Context, path string) error {
	return s.takeAway(ctx, path, false)
}

// takeAway is unmount. With dead the mount is known not to answer, and takeAway does not ask.
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
			flags |= s.remove(others)
		} else if err := s.probes.ask(ctx, path); err != nil {
			if ctx.Err() != nil {
				return err // the caller left no time for an answer
			}
			s.Logger.Warn("a mount does not answer: the driver unmounts it", "path", path, "err", err)
			flags |= s.remove(others)
		}
		if err := unix.Unmount(path, flags); err != nil && !errors.Is(err, unix.EINVAL) {
			if errors.Is(err, unix.EBUSY) {
				return meta.E("unmount", meta.Busy, path, errors.New("a process uses it"))
			}
			return meta.E("unmount", meta.IO, path, err)
		}
	}
	return meta.E("unmount", meta.Busy, path, fmt.Errorf("more than %d mounts lie there", maxLayers))
}

// remove returns the flags of umount(2) that remove a mount in use; others are the other mounts
// of its volume. MNT_DETACH leaves processes that wait in the mount waiting until the volume
// answers. MNT_FORCE ends their calls, because it ends the volume's FUSE connection, so that
// the volume's other mounts on this node fail for ever: remove returns MNT_FORCE only if all
// others are staging paths, and no pod has the volume.
func (s *Server) remove(others []string) int {
	staged, _ := s.folders()
	for _, path := range others {
		if _, is := staged[path]; !is {
			return unix.MNT_DETACH
		}
	}
	return unix.MNT_FORCE | unix.MNT_DETACH
}
