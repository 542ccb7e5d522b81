package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// NodeStageVolume mounts a volume at its staging path, once for all pods of the node with the
// volume.
func (s *Server) NodeStageVolume(ctx context.Context, q *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	if err := required(q.GetVolumeId(), q.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	want, group, err := s.wanted(q.GetVolumeId(), q.GetVolumeCapability())
	if err != nil {
		return nil, err
	}
	end, err := s.pending.Begin(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer end()
	from, err := s.source(ctx, q.GetVolumeId())
	if err != nil {
		return nil, reply.Error(err)
	}
	if want.Staging, err = whole(q.GetStagingTargetPath()); err != nil {
		return nil, reply.Error(err)
	}
	s.serve(&want, from)
	if err := s.stage(ctx, want); err != nil {
		return nil, reply.Error(err)
	}
	if err := s.giveGroup(ctx, want.Staging, group); err != nil {
		return nil, reply.Error(err)
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// serve sets the source of r. The mount of a snapshot pins the snapshot: nobody can delete the
// snapshot while the mount lives.
func (s *Server) serve(r *record, from source) {
	r.Source = from.path
	if from.of == 0 {
		return
	}
	r.Pin = &pinned{Volume: from.of, Snapshot: from.snapshot, Holder: handle.Holder(s.Name, r.Volume, r.Staging)}
	r.Options = append(r.Options, policy.PinOption+r.Pin.Holder)
	slices.Sort(r.Options)
}

// unpinWait bounds how long unpin waits for the cluster.
const unpinWait = 3 * time.Second

// unpin releases the pin of a mount on its snapshot. After a failure, unpin only logs a
// warning: the pin expires by itself.
func (s *Server) unpin(ctx context.Context, p *pinned) {
	if p == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, unpinWait)
	defer cancel()
	if err := s.Cluster.Unpin(ctx, p.Volume, p.Snapshot, p.Holder); err != nil && meta.KindOf(err) != meta.NoSuchVolume {
		s.Logger.Warn("an unmounted snapshot could not be unpinned: the pin ends by itself in some minutes", "volume", p.Volume, "snapshot", p.Snapshot, "holder", p.Holder, "err", err)
	}
}

// unpinGone unpins the snapshot of a mount that Recover found gone, unless the volume is
// staged again.
func (s *Server) unpinGone(ctx context.Context, r record) {
	end, err := s.pending.Begin(r.Volume)
	if err != nil {
		return
	}
	defer end()
	if _, err := os.Stat(string(s.folderOf(r.Volume, r.Staging))); errors.Is(err, os.ErrNotExist) {
		s.unpin(ctx, r.Pin)
	}
}

// noGroup: the pod requests no group.
const noGroup = -1

// wanted translates a capability into a record without paths, and the group for which the
// volume's root becomes writable.
func (s *Server) wanted(volume string, c *csi.VolumeCapability) (r record, group int, err error) {
	if err := reply.Capability(c); err != nil {
		return r, 0, err
	}
	group = noGroup
	if g := c.GetMount().GetVolumeMountGroup(); g != "" {
		n, err := strconv.ParseUint(g, 10, 31)
		if err != nil {
			return r, 0, status.Errorf(codes.InvalidArgument, "volume_mount_group is no number of a group")
		}
		group = int(n)
	}
	options, err := policy.MountOptions(c.GetMount().GetMountFlags(), false)
	if err != nil {
		return r, 0, reply.Error(err)
	}
	return record{Volume: volume, Options: options}, group, nil
}

// stage mounts a volume as want says, unless the volume is already mounted in this way:
//
//	record written -> directory -> process started -> mounted
//
// The process inherits the lock. If the driver is killed in between, the next driver sees by
// the lock that the process is still mounting, and leaves the process alone.
func (s *Server) stage(ctx context.Context, want record) error {
	f := s.folderOf(want.Volume, want.Staging)
	lock, err := f.lock()
	if meta.KindOf(err) == meta.Busy {
		return s.alreadyStaged(ctx, f, want)
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	m, err := mountAt(want.Staging)
	if err != nil {
		return err
	}
	have, unread := f.read()
	if m != nil && unread == nil && s.orphaned(want.Staging) {
		if err := have.admits(want); err != nil {
			return err // pods may use the mount
		}
		return s.takeUpLocked(ctx, f, lock)
	}
	if m != nil {
		switch err := s.probes.ask(ctx, want.Staging); {
		case err == nil && unread == nil:
			// The mount answers, but its process does not have this lock: the lock file was
			// lost.
			return have.admits(want)
		case err == nil && m.Source != strings.TrimSuffix(want.Source, "/"):
			return meta.E("stage", meta.Exists, want.Staging, fmt.Errorf("%s is mounted there", m.Source))
		case err == nil:
			s.Logger.Warn("a mount was found that the driver's state does not name: the driver adopts the mount", "volume", want.Volume, "path", want.Staging)
			return f.write(want)
		case ctx.Err() != nil:
			return err // the probe has not ended yet
		}
	}
	// Remove the dead mount, and the holder's copy of the mount.
	if err := s.unmount(ctx, want.Staging); err != nil {
		return err
	}
	if err := s.forget(want.Staging); err != nil {
		return err
	}
	s.Step("stage.record")
	if err := f.write(want); err != nil {
		return err
	}
	s.Step("stage.directory")
	dir, err := openDir(want.Staging)
	if err != nil {
		return errors.Join(err, f.remove())
	}
	unix.Close(dir)
	s.Step("stage.start")
	if err := s.start(ctx, f, want, lock, false); err != nil {
		return err
	}
	s.Step("stage.mounted")
	return nil
}

// alreadyStaged is stage if a living process holds the lock of the volume's folder.
func (s *Server) alreadyStaged(ctx context.Context, f folder, want record) error {
	have, err := f.read()
	if err != nil {
		return err
	}
	if err := have.admits(want); err != nil {
		return err
	}
	m, err := mountAt(want.Staging)
	if err != nil {
		return err
	}
	if m == nil {
		return status.Error(codes.Aborted, "the volume's process is mounting it, or ending")
	}
	err = s.probes.ask(ctx, want.Staging)
	if meta.KindOf(err) == meta.IO {
		return status.Errorf(codes.Aborted, "the volume's process is ending: %v", err)
	}
	return err
}

// admits fails with Exists unless a volume staged as in r satisfies want. The sources may
// differ, because the volume may have been renamed. The pins may differ, because the driver
// and not the caller chooses the pin.
func (r record) admits(want record) error {
	if r.Volume != want.Volume || r.Staging != want.Staging || !slices.Equal(r.asked(), want.asked()) {
		return meta.E("stage", meta.Exists, want.Staging, fmt.Errorf("the volume is staged there with other options: %v", r.Options))
	}
	return nil
}

// asked returns the mount options requested by the orchestrator.
func (r record) asked() []string {
	return slices.DeleteFunc(slices.Clone(r.Options), func(x string) bool { return strings.HasPrefix(x, policy.PinOption) })
}

// startWait bounds how long start waits for a process to mount, however long the caller waits.
const startWait = 60 * time.Second

// start runs the mounting process and waits until the process has mounted, or has taken up the
// holder's mount. If ctx ends or startWait passes before, a mounting process continues and
// keeps the lock; start kills a process taking up a mount.
func (s *Server) start(ctx context.Context, f folder, want record, lock *os.File, takeUp bool) error {
	const op = "stage"
	if !takeUp { // a take-up keeps the log of the ended process
		if err := os.Truncate(f.file(logName), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	if err := os.MkdirAll(filepath.Dir(f.socket()), 0o700); err != nil {
		return meta.E(op, meta.IO, f.socket(), err)
	}
	cmd := s.Command(want.Source, want.Staging, f.file(logName), f.socket(), want.Options, takeUp)
	cmd.ExtraFiles = []*os.File{w, lock}
	// A session of its own: a signal to the driver's process group does not reach the process.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	w.Close()
	if err != nil {
		return meta.E(op, meta.IO, cmd.Path, err)
	}
	if takeUp {
		s.Step("takeup.started")
	} else {
		s.Step("stage.started")
	}
	ended := make(chan error, 1)
	go func() { // ends with the process; only the driver can reap the process
		err := cmd.Wait()
		s.children.end()
		ended <- err
	}()
	said := make(chan string, 1)
	go func() { // ends when the process closes the pipe, or dies
		b, _ := io.ReadAll(io.LimitReader(r, 64<<10))
		said <- string(b)
	}()
	give, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	select {
	case text := <-said:
		if text == mounted {
			return nil
		}
		if text == "" {
			text = fmt.Sprintf("the mount ended without a word: %v", <-ended)
		}
		return meta.E(op, meta.Unavailable, want.Source, errors.New(text))
	case <-give.Done():
		if takeUp {
			// The process may wait for the cluster without limit. The holder has all of the
			// mount's state: the next process begins anew.
			_ = cmd.Process.Kill()
		}
		return meta.E(op, meta.Unavailable, want.Source, fmt.Errorf("not mounted yet: %w", context.Cause(give)))
	}
}

// mounted is the message of a process after mounting.
const mounted = "ok"

// giveGroup gives a volume's root to a group, makes the root writable for the group, and sets
// the set-group-id bit, so that new files belong to the group. giveGroup does not change
// existing files below the root. Errors: Unavailable (the mount does not answer), IO.
func (s *Server) giveGroup(ctx context.Context, path string, group int) error {
	if group == noGroup {
		return nil
	}
	const op = "set group"
	// Probe first: while the cluster is unreachable, repeated calls must not each leave a
	// thread blocked in the mount.
	if err := s.probes.ask(ctx, path); err != nil {
		return err
	}
	err := within(ctx, func() error {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		const want = unix.S_ISGID | 0o070
		if int(st.Gid) == group && st.Mode&want == want {
			return nil
		}
		if err := unix.Lchown(path, -1, group); err != nil {
			return err
		}
		return unix.Chmod(path, st.Mode&0o7777|want)
	})
	switch {
	case err == nil, errors.Is(err, unix.EROFS): // a read-only mount needs no group
		return nil
	case meta.KindOf(err) == meta.Unavailable:
		return meta.E(op, meta.Unavailable, path, err)
	}
	return meta.E(op, meta.IO, path, err)
}

// NodeUnstageVolume unmounts a volume. After success all written data is durable and no
// process of the mount is left. Errors: FailedPrecondition (a pod still has the volume),
// Unavailable (data is not durable yet).
func (s *Server) NodeUnstageVolume(ctx context.Context, q *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	if err := required(q.GetVolumeId(), q.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	end, err := s.pending.Begin(q.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer end()
	path, err := whole(q.GetStagingTargetPath())
	if meta.KindOf(err) == meta.NotFound {
		return &csi.NodeUnstageVolumeResponse{}, nil
	}
	if err == nil {
		err = s.unstage(ctx, q.GetVolumeId(), path)
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

// unstage waits until all data of a staged volume is durable, unmounts the volume, waits for
// its process to end, and removes the volume's state.
func (s *Server) unstage(ctx context.Context, volume, path string) error {
	f := s.folderOf(volume, path)
	if _, err := os.Stat(string(f)); errors.Is(err, os.ErrNotExist) {
		// The volume was never staged at path, or was unstaged already. A mount at path would
		// be another volume's.
		return nil
	}
	m, err := mountAt(path)
	if err != nil {
		return err
	}
	if m != nil {
		published, err := publishedElsewhere(m, path)
		if err != nil {
			return err
		}
		if len(published) > 0 {
			return meta.E("unstage", meta.Busy, path, fmt.Errorf("the volume is still published at %s", published[0]))
		}
	}
	dead := false
	if m != nil && s.orphaned(path) {
		// The holder has the written data, which becomes durable once a process serves the
		// mount. If no process can be started, and no data is left to be made durable, unstage
		// removes the mount as it is.
		wait, cancel := context.WithTimeout(ctx, patience(ctx, probeWait))
		err := s.takeUp(wait, f, time.Now())
		cancel()
		if err != nil && meta.KindOf(err) != meta.Busy {
			if left := s.left(path); left != nil {
				return fmt.Errorf("%w; the last one failed: %v", left, err)
			}
			dead = true
			s.Logger.Warn("no successor could be started for a mount without a process: the driver unmounts it as it is", "volume", volume, "path", path, "err", err)
		}
	}
	switch {
	case mayBeInline(volume):
		s.giveUp(ctx, f) // an inline volume's data ends with its pod
	case m != nil && !dead:
		if err := s.durable(ctx, f, path); err != nil {
			return err
		}
	}
	s.Step("unstage.unmount")
	if err := s.takeAway(ctx, path, dead); err != nil {
		return err
	}
	s.Step("unstage.unmounted")
	s.children.giveUp(f)
	lock, err := s.ended(ctx, f, path)
	if err != nil {
		return err
	}
	defer lock.Close()
	r, err := f.read()
	if err == nil && !dead && s.orphaned(path) {
		wait, done := s.children.take(ctx, f)
		wait, cancel := context.WithTimeout(wait, patience(ctx, probeWait))
		serr := s.settle(wait, f, r, lock)
		cancel()
		done()
		if left := s.left(path); serr != nil && left != nil {
			return fmt.Errorf("%w; the last one failed: %v", left, serr)
		}
	}
	if err := s.forget(path); err != nil {
		return err
	}
	s.Step("unstage.forget")
	if err == nil {
		s.unpin(ctx, r.Pin)
	}
	return f.remove()
}

// forget makes the holder, the process that keeps mounts for successors, drop its copy of a
// removed mount.
func (s *Server) forget(path string) error {
	if s.Holder == nil {
		return nil
	}
	return s.Holder.Forget(path)
}

const (
	// endPoll is the pause between two looks at the lock of a process that is to end.
	endPoll = 10 * time.Millisecond
	// endWait bounds how long a call waits for the end of a process.
	endWait = 30 * time.Second
	// After every endLooks looks at the lock, ended unmounts path again.
	endLooks = 10
)

// ended waits until the process of a removed mount has ended, and returns the lock of the
// process. A process started by an earlier driver may mount only now: ended removes such a
// mount, too. Errors: Unavailable.
func (s *Server) ended(ctx context.Context, f folder, path string) (*os.File, error) {
	late := time.After(patience(ctx, endWait))
	for n := 1; ; n++ {
		l, err := f.lock()
		if meta.KindOf(err) != meta.Busy {
			return l, err
		}
		if n%endLooks == 0 {
			if err := s.takeAway(ctx, path, false); err != nil {
				return nil, err
			}
		}
		select {
		case <-late:
			ask, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
			left, err := s.unsynced(ask, f)
			cancel()
			if err == nil && len(left) > 0 {
				return nil, waitsFor(path, left)
			}
			return nil, meta.E("unstage", meta.Unavailable, string(f), errors.New("the volume's process has not ended"))
		case <-ctx.Done():
			return nil, meta.E("unstage", meta.Unavailable, string(f), fmt.Errorf("the volume's process has not ended: %w", context.Cause(ctx)))
		case <-time.After(endPoll):
		}
	}
}

// mayBeInline reports whether an id can be an inline volume's: a valid handle can't.
func mayBeInline(volume string) bool {
	_, err := handle.ParseVolume(volume)
	return err != nil
}
