// Package disk owns file systems on loop devices for destructive tests: ext4 of a given
// size, whose power can be cut, and which can be filled.
package disk

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Disk is an ext4 file system on a loop device whose power can be cut.
type Disk struct {
	At    string // mount point; may change between Unmount and Mount
	image string
	loop  string
}

// New makes an image, formats it and mounts the file system. If New returns a disk, the
// caller must remove the disk, even after an error.
func New(image, at string, size int64) (*Disk, error) {
	d := &Disk{image: image, At: at}
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
	return d, d.Mount()
}

// Temp makes a disk for a test, and removes the disk at the test's end.
func Temp(t testing.TB, size int64) *Disk {
	t.Helper()
	dir := t.TempDir()
	d, err := New(filepath.Join(dir, "disk.img"), filepath.Join(dir, "disk"), size)
	if d != nil {
		t.Cleanup(func() {
			if err := d.Remove(); err != nil {
				t.Error(err)
			}
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// Mount mounts the disk, as after a reboot. While another mount namespace also has the
// file system mounted (ip netns exec makes such a namespace for its command), the file
// system with the cut power outlives Unmount, and a second mount would only show it
// again.
func (d *Disk) Mount() error {
	for range 500 {
		if err := unix.Mount(d.loop, d.At, "ext4", 0, ""); err != nil {
			return fmt.Errorf("mounting %s at %s: %w", d.loop, d.At, err)
		}
		if d.powered() {
			return nil
		}
		if err := d.Unmount(); err != nil {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("mounting %s at %s: somebody else keeps the file system mounted", d.loop, d.At)
}

// powered: the power is not cut.
func (d *Disk) powered() bool {
	f, err := os.Open(d.At)
	if err != nil {
		return false
	}
	defer f.Close()
	return f.Sync() == nil
}

// Unmount waits for a killed process' last references to go.
func (d *Disk) Unmount() error {
	var err error
	for range 200 {
		if err = unix.Unmount(d.At, 0); err == nil || errors.Is(err, unix.EINVAL) {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("unmounting %s: %w", d.At, err)
}

// EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32), stops all I/O of a file system at once. With
// NOLOGFLUSH data that is only in memory is not written, not even the journal: the same
// state as after a power cut.
const (
	ext4Shutdown   = 0x8004587d
	ext4NoLogFlush = 2
)

// Cut takes the power away: data that is not on the disk by now is lost.
func (d *Disk) Cut() error {
	f, err := os.Open(d.At)
	if err != nil {
		return err
	}
	defer f.Close()
	flags := uint32(ext4NoLogFlush)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ext4Shutdown, uintptr(unsafe.Pointer(&flags))); errno != 0 {
		return fmt.Errorf("power cut of %s: %w", d.At, errno)
	}
	return nil
}

// Remove leaves nothing of the disk.
func (d *Disk) Remove() error {
	err := unix.Unmount(d.At, unix.MNT_DETACH)
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

// Fill takes all free space except left bytes with a file; release removes the file.
func (d *Disk) Fill(left int64) (release func() error, err error) {
	f, err := os.CreateTemp(d.At, "ballast-")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	// ext4 counts the room that it reserves for its own metadata as free.
	own, err := os.ReadFile(filepath.Join("/sys/fs/ext4", filepath.Base(d.loop), "reserved_clusters"))
	if err != nil {
		return nil, err
	}
	kept, err := strconv.ParseInt(strings.TrimSpace(string(own)), 10, 64)
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	for {
		if err := unix.Statfs(d.At, &st); err != nil {
			return nil, err
		}
		off, err := f.Seek(0, 2)
		if err != nil {
			return nil, err
		}
		free := (int64(st.Bfree)-kept)*st.Bsize - left
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
	return func() error { return os.Remove(f.Name()) }, f.Sync()
}

// Discard removes the remains of a killed test in a directory: mounts at or below it, the
// deepest first, and loop devices with images below it.
func Discard(dir string) error {
	var errs []error
	table, err := os.ReadFile("/proc/self/mounts")
	errs = append(errs, err)
	var at []string
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 1 && below(f[1], dir) {
			at = append(at, f[1])
		}
	}
	for _, path := range slices.Backward(at) {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("unmounting %s: %w", path, err))
		}
	}
	loops, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	errs = append(errs, err)
	for _, file := range loops {
		// A device that is being removed has no image any more.
		image, err := os.ReadFile(file)
		if err != nil || !below(strings.TrimSuffix(strings.TrimSpace(string(image)), " (deleted)"), dir) {
			continue
		}
		device := "/dev/" + strings.Split(file, "/")[3]
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			errs = append(errs, fmt.Errorf("losetup --detach %s: %w\n%s", device, err, out))
		}
	}
	return errors.Join(errs...)
}

func below(path, dir string) bool { return path == dir || strings.HasPrefix(path, dir+"/") }
