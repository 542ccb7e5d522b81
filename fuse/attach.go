package fuse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
)

// The kernel's file system types; kernel.Subtype follows after a dot.
const (
	typePlain = "fuse"
	typeBlock = "fuseblk"
)

// attached is the result of mounting; fd is the descriptor for reading requests.
type attached struct {
	fd     int
	block  bool   // as fuseblk: syncfs(2) reaches us, umount(2) waits for us
	helper string // fusermount3, if fusermount3 mounted
}

// attach mounts at dir and returns the descriptor of the connection. attach calls mount(2)
// where allowed, else fusermount3.
//
// The kernel passes syncfs(2) and sync(1) on only for fuseblk and virtiofs (FUSE_SYNCFS, since
// 6.18 to every fuseblk server), and sends DESTROY, awaited by umount(8), only for these
// types. So a process with the right mounts as fuseblk on a loop device over an empty memfd.
// The device only has to exist. The kernel frees the device with the mount, also after
// SIGKILL. Passthrough works as on plain fuse.
func attach(dir string, cfg *Config) (*attached, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENXIO) {
		return nil, meta.E("mount", meta.NotSupported, "/dev/fuse", fmt.Errorf("%w: load the module (modprobe fuse), or give the device to the container (--device /dev/fuse)", err))
	}
	if err == nil {
		a := &attached{fd: fd}
		if !cfg.Options.NoBlock {
			if berr := mountBlock(fd, dir, cfg); berr == nil {
				a.block = true
				return a, nil
			} else if os.Geteuid() == 0 {
				cfg.Logger.Warn("no block mount: syncfs(2) will not reach penstock; fsync(2) does", "err", berr)
			}
		}
		if err = unix.Mount(cfg.Source, dir, typePlain+"."+kernel.Subtype, cfg.Options.flags(), cfg.data(fd)); err == nil {
			return a, nil
		}
		unix.Close(fd)
	}
	if !errors.Is(err, syscall.EPERM) && !errors.Is(err, syscall.EACCES) {
		return nil, meta.E("mount", meta.IO, dir, err)
	}
	if cfg.Options.NoHelper {
		return nil, meta.E("mount", meta.NotPermitted, dir, errors.New("mounting needs root"))
	}
	return attachByHelper(dir, cfg)
}

// flags returns the flags for mount(2).
func (o *Options) flags() (flags uintptr) {
	for _, o := range []struct {
		on   bool
		flag uintptr
	}{
		{o.ReadOnly, unix.MS_RDONLY}, {!o.SUID, unix.MS_NOSUID}, {!o.Dev, unix.MS_NODEV},
		{o.NoExec, unix.MS_NOEXEC}, {o.NoAtime, unix.MS_NOATIME}, {o.NoDirAtime, unix.MS_NODIRATIME}, {o.NoSymFollow, unix.MS_NOSYMFOLLOW},
	} {
		if o.on {
			flags |= o.flag
		}
	}
	return flags
}

// data returns the FUSE options for mount(2). With default_permissions the kernel checks
// permissions itself.
func (cfg *Config) data(fd int) string {
	s := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d,default_permissions,max_read=%d", fd, os.Geteuid(), os.Getegid(), maxWrite)
	if !cfg.Options.Private {
		s += ",allow_other"
	}
	return s
}

// mountBlock mounts as fuseblk. The source of a fuseblk mount must be the path of a block
// device, but users look for the volume's name in df and mount. So a dedicated thread calls
// mount(2), in a working directory with a symbolic link of that name.
func mountBlock(fd int, dir string, cfg *Config) error {
	dev, loop, err := loopDevice()
	if err != nil {
		return err
	}
	defer loop.Close() // from now on only the mount holds the device
	tmp, err := os.MkdirTemp("", "penstock-mount-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	source := filepath.Clean(strings.TrimLeft(cfg.Source, "/"))
	if err := os.MkdirAll(filepath.Join(tmp, filepath.Dir(source)), 0o700); err != nil {
		return err
	}
	if err := os.Symlink(dev, filepath.Join(tmp, source)); err != nil {
		return err
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		result <- func() error {
			if err := unix.Unshare(unix.CLONE_FS); err != nil {
				return err
			}
			if err := unix.Chdir(tmp); err != nil {
				return err
			}
			return unix.Mount(source, dir, typeBlock+"."+kernel.Subtype, cfg.Options.flags(), cfg.data(fd)+fmt.Sprintf(",blksize=%d", meta.BlockSize))
		}()
	}()
	return <-result
}

const (
	loopBytes    = 1 << 20 // bytes; the device is never written
	loopAttempts = 16      // another process may take a free device first
)

// loopDevice makes a loop device, which the kernel frees with the device's last user.
func loopDevice() (path string, dev *os.File, err error) {
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", nil, err
	}
	defer ctl.Close()
	mem, err := unix.MemfdCreate("penstock", unix.MFD_CLOEXEC)
	if err != nil {
		return "", nil, os.NewSyscallError("memfd_create", err)
	}
	defer unix.Close(mem)
	if err := unix.Ftruncate(mem, loopBytes); err != nil {
		return "", nil, os.NewSyscallError("ftruncate", err)
	}
	config := unix.LoopConfig{Fd: uint32(mem)}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
	copy(config.Info.File_name[:], kernel.Subtype)
	for range loopAttempts {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", nil, os.NewSyscallError("LOOP_CTL_GET_FREE", err)
		}
		path = fmt.Sprintf("/dev/loop%d", n)
		dev, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return "", nil, err
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
		if err == nil {
			return path, dev, nil
		}
		dev.Close()
		if !errors.Is(err, syscall.EBUSY) {
			return "", nil, os.NewSyscallError("LOOP_CONFIGURE", err)
		}
	}
	return "", nil, fmt.Errorf("no loop device was free %d times", loopAttempts)
}

// findHelper finds fusermount3.
func findHelper() (string, error) {
	for _, name := range []string{"fusermount3", "/usr/bin/fusermount3", "/bin/fusermount3"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", errors.New("fusermount3 not found; install the package fuse3, or mount as root")
}

// helperTimeout bounds fusermount3.
const helperTimeout = 20 * time.Second

// attachByHelper mounts through fusermount3, which is set-user-id root, for an unprivileged
// user. fusermount3 sends the descriptor of the connection over the socket numbered in
// _FUSE_COMMFD. Such a mount has no set-id programs, devices, passthrough, syncfs or larger
// read-ahead. Other users get access only if /etc/fuse.conf says user_allow_other.
func attachByHelper(dir string, cfg *Config) (*attached, error) {
	helper, err := findHelper()
	if err != nil {
		return nil, meta.E("mount", meta.NotPermitted, dir, err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, meta.E("mount", meta.IO, "socketpair", err)
	}
	ourEnd, itsEnd := os.NewFile(uintptr(pair[0]), "fusermount"), os.NewFile(uintptr(pair[1]), "fusermount")
	defer ourEnd.Close()
	defer itsEnd.Close()
	opts := []string{"default_permissions", fmt.Sprintf("max_read=%d", maxWrite), "subtype=" + kernel.Subtype, "fsname=" + strings.NewReplacer(`\`, `\\`, ",", `\,`).Replace(cfg.Source)}
	if cfg.Options.NoSymFollow {
		return nil, meta.E("mount", meta.NotSupported, dir, errors.New("nosymfollow needs root: fusermount3 doesn't know it"))
	}
	for _, o := range []struct {
		on   bool
		name string
	}{{cfg.Options.ReadOnly, "ro"}, {cfg.Options.NoExec, "noexec"}, {cfg.Options.NoAtime, "noatime"}} {
		if o.on {
			opts = append(opts, o.name)
		}
	}
	if cfg.Options.AllowOther {
		opts = append(opts, "allow_other")
	}
	ctx, cancel := context.WithTimeout(context.Background(), helperTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, helper, "-o", strings.Join(opts, ","), "--", dir)
	cmd.Env = append(os.Environ(), "_FUSE_COMMFD=3")
	cmd.ExtraFiles = []*os.File{itsEnd}
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil {
		return nil, meta.E("mount", meta.NotPermitted, dir, fmt.Errorf("%s: %w: %s", helper, err, strings.TrimSpace(said.String())))
	}
	fd, err := receiveDescriptor(int(ourEnd.Fd()))
	if err != nil {
		return nil, meta.E("mount", meta.IO, helper, err)
	}
	cfg.Logger.Info("mounted through fusermount3: no set-id programs, no devices, no passthrough, no syncfs(2), less read-ahead; others see the tree only with allow_other", "dir", dir)
	return &attached{fd: fd, helper: helper}, nil
}

func receiveDescriptor(sock int) (int, error) {
	var data [4]byte
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(sock, data[:], oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0, os.NewSyscallError("recvmsg", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return 0, fmt.Errorf("no descriptor came: %v", err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return 0, fmt.Errorf("no descriptor came: %v", err)
	}
	return fds[0], nil
}

// helperUnmount unmounts by fusermount3; busy is EBUSY.
func helperUnmount(helper, dir string, lazy bool) error {
	args := []string{"-u"}
	if lazy {
		args = append(args, "-z")
	}
	ctx, cancel := context.WithTimeout(context.Background(), helperTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, helper, append(args, "--", dir)...).CombinedOutput()
	if err == nil {
		return nil
	}
	if bytes.Contains(out, []byte("busy")) {
		return syscall.EBUSY
	}
	if bytes.Contains(out, []byte("not found in")) || bytes.Contains(out, []byte("not mounted")) {
		return syscall.EINVAL
	}
	return fmt.Errorf("%s: %w: %s", helper, err, bytes.TrimSpace(out))
}
