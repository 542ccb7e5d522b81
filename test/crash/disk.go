package crash

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// disk is an ext4 file system on a loop device whose power can be cut.
type disk struct {
	image string
	loop  string
	at    string // mount point
}

// newDisk makes an image, formats and mounts it.
func newDisk(image, at string, size int64) (*disk, error) {
	d := &disk{image: image, at: at}
	if err := os.MkdirAll(at, 0o755); err != nil {
		return nil, err
	}
	f, err := os.Create(d.image)
	if err != nil {
		return nil, err
	}
	err = errors.Join(f.Truncate(size), f.Close())
	if err != nil {
		return d, err
	}
	// No lazy initialisation: the disk must be quiet unless the test writes.
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.image).CombinedOutput(); err != nil {
		return d, fmt.Errorf("mkfs.ext4: %w\n%s", err, out)
	}
	out, err := exec.Command("losetup", "--find", "--show", d.image).Output()
	if err != nil {
		return d, fmt.Errorf("losetup: %w", err)
	}
	d.loop = strings.TrimSpace(string(out))
	return d, d.mount()
}

func (d *disk) mount() error {
	if err := unix.Mount(d.loop, d.at, "ext4", 0, ""); err != nil {
		return fmt.Errorf("mounting %s at %s: %w", d.loop, d.at, err)
	}
	return nil
}

// unmount waits for a killed process' last references to go.
func (d *disk) unmount() error {
	var err error
	for range 200 {
		if err = unix.Unmount(d.at, 0); err == nil || errors.Is(err, unix.EINVAL) {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("unmounting %s: %w", d.at, err)
}

// EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32), stops all I/O of a file system at
// once; with NOLOGFLUSH what is only in memory is not written, not even the
// journal: what a power cut leaves.
const (
	ext4Shutdown   = 0x8004587d
	ext4NoLogFlush = 2
)

func (d *disk) cut() error {
	f, err := os.Open(d.at)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := uint32(ext4NoLogFlush)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ext4Shutdown, uintptr(unsafe.Pointer(&flags))); errno != 0 {
		return fmt.Errorf("power cut of %s: %w", d.at, errno)
	}
	return nil
}

// remove leaves nothing of the disk.
func (d *disk) remove() error {
	err := unix.Unmount(d.at, unix.MNT_DETACH)
	if errors.Is(err, unix.EINVAL) {
		err = nil // not mounted
	}
	if d.loop != "" {
		if out, lerr := exec.Command("losetup", "--detach", d.loop).CombinedOutput(); lerr != nil {
			err = errors.Join(err, fmt.Errorf("losetup --detach %s: %w\n%s", d.loop, lerr, out))
		}
	}
	return errors.Join(err, os.Remove(d.image))
}

// fill takes all free space with one file; release gives it back.
func (d *disk) fill() (release func() error, err error) {
	name := filepath.Join(d.at, "ballast")
	f, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Statfs_t
	for {
		if err := unix.Statfs(d.at, &st); err != nil {
			return nil, err
		}
		off, err := f.Seek(0, 2)
		if err != nil {
			return nil, err
		}
		free := int64(st.Bfree) * st.Bsize
		if free < 64<<10 {
			break
		}
		// In falling steps: the last blocks go to the file's own extent tree.
		step := max(free/2, 4096)
		if err := unix.Fallocate(int(f.Fd()), 0, off, step); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil {
			return nil, err
		}
		if err := f.Truncate(off + step); err != nil {
			return nil, err
		}
	}
	return func() error { return os.Remove(name) }, f.Sync()
}
