package fuse

import (
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// reusedOwner is a file that is locked through two handles, one after the other, by lock owners
// with the same number: Linux reuses the address of an open file description.
type reusedOwner struct {
	*testing.T
	fs     *fileSystem
	volume *memVolume
	keep   *keep.Memory
	node   uint64
	flock  bool
}

func newReusedOwner(t *testing.T, flock bool) *reusedOwner {
	c, _, tree := newDirect()
	m, err := keep.New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	m.Whole()
	c.fs.kept.init(m)
	v := tree.volumes[1]
	c.fs.volumes[1] = v
	ino := v.add(meta.RootIno, "f", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
	return &reusedOwner{t, c.fs, v, m, c.fs.nodeID(1, ino), flock}
}

func (r *reusedOwner) open() (fh uint64) {
	fh = r.fs.opens.handle(modeWrite)
	r.fs.opens.with(r.node, true, func(n *openNode) { n.count(modeWrite, 1) })
	r.fs.kept.opened(r.node, fh, syscall.O_RDWR, 0, fh)
	return fh
}

func (r *reusedOwner) lock(fh, owner uint64) fuse.Status {
	in := &fuse.LkIn{Fh: fh, Owner: owner, Lk: fuse.FileLock{End: lockEnd, Typ: syscall.F_WRLCK}}
	in.NodeId = r.node
	if r.flock {
		in.LkFlags = fuse.LK_FLOCK
	}
	return r.fs.SetLk(make(chan struct{}), in)
}

func (r *reusedOwner) release(fh, owner uint64) {
	in := &fuse.ReleaseIn{Fh: fh, Flags: syscall.O_RDWR}
	in.NodeId = r.node
	if r.flock {
		in.ReleaseFlags, in.LockOwner = fuse.FUSE_RELEASE_FLOCK_UNLOCK, owner
	}
	r.fs.Release(make(chan struct{}), in)
}

// lockers are the locking handles that a successor learns of.
func (r *reusedOwner) lockers() (through []uint64) {
	r.Helper()
	left, err := keep.Left(r.keep.FD())
	if err != nil {
		r.Fatal(err)
	}
	defer left.Close()
	records, err := left.Records()
	if err != nil {
		r.Fatal(err)
	}
	for _, rec := range records {
		if rec.Kind == keep.Locker {
			through = append(through, rec.N[2])
		}
	}
	return through
}

// holds checks that the owner holds its lock through fh, in this process and for a successor, and
// that the release of fh ends the lock.
func (r *reusedOwner) holds(fh, owner uint64) {
	r.Helper()
	other := r.open()
	defer r.release(other, owner+1)
	if st := r.lock(other, owner+1); st != fuse.Status(syscall.EAGAIN) {
		r.Errorf("DATA: another owner's lock: %v; the RELEASE of the handle before gave up the lock", st)
	}
	if through := r.lockers(); !r.flock && (len(through) < 1 || through[0] != fh) {
		r.Errorf("a successor is told of locks through %d, not through %d: it gives up no lock at the RELEASE", through, fh)
	}
	r.release(fh, owner)
	if st := r.lock(other, owner+1); st != fuse.OK {
		r.Errorf("another owner's lock after the last close: %v", st)
	}
}

// A lock outlives the RELEASE of an earlier handle whose owner had the same number, whenever the
// RELEASE is served.
func TestReusedLockOwner(t *testing.T) {
	const owner = 7
	for what, flock := range map[string]bool{"ofd": false, "flock": true} {
		t.Run(what+"/locked while RELEASE is served", func(t *testing.T) {
			for _, at := range []string{"setlock", "release"} {
				r := newReusedOwner(t, flock)
				first, second := r.open(), r.open()
				if st := r.lock(first, owner); st != fuse.OK {
					t.Fatal(st)
				}
				stopped, resume := make(chan struct{}), make(chan struct{})
				r.volume.hook(at, func() {
					r.volume.hook(at, nil)
					close(stopped)
					<-resume
				})
				released, locked := make(chan struct{}), make(chan fuse.Status, 1)
				go func() {
					r.release(first, owner)
					close(released)
				}()
				<-stopped
				go func() { locked <- r.lock(second, owner) }()
				select { // either order is right
				case st := <-locked:
					locked <- st
				case <-time.After(20 * time.Millisecond):
				}
				close(resume)
				<-released
				if st := <-locked; st != fuse.OK {
					t.Error(st)
				}
				r.holds(second, owner)
				if left := r.lockers(); len(left) != 0 {
					t.Errorf("records of locks through %d are left", left)
				}
			}
		})
		t.Run(what+"/locked before RELEASE is served", func(t *testing.T) {
			r := newReusedOwner(t, flock)
			first, second := r.open(), r.open()
			for _, fh := range []uint64{first, second} {
				if st := r.lock(fh, owner); st != fuse.OK {
					t.Fatal(st)
				}
			}
			r.release(first, owner)
			r.holds(second, owner)
			if left := r.lockers(); len(left) != 0 {
				t.Errorf("records of locks through %d are left", left)
			}
		})
	}
}

// A signal ends the wait for the RELEASE of an earlier handle.
func TestReusedLockOwnerInterrupted(t *testing.T) {
	r := newReusedOwner(t, false)
	fh := r.open()
	r.fs.opens.with(r.node, false, func(n *openNode) { n.ending = lockEnds{7: make(chan struct{})} })
	in := &fuse.LkIn{Fh: fh, Owner: 7, Lk: fuse.FileLock{End: lockEnd, Typ: syscall.F_WRLCK}}
	in.NodeId = r.node
	cancel := make(chan struct{})
	close(cancel)
	if st := r.fs.SetLkw(cancel, in); st != fuse.EINTR {
		t.Errorf("an interrupted lock: %v", st)
	}
}
