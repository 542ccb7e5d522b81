package kernel

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A connection that can't be aborted, since the control file system is out of sight and the
// process may not mount one, is not taken for gone.
func TestAbortWithoutRights(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("giving up capabilities needs root")
	}
	ended := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with this goroutine
		ended <- func() error {
			err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
			if err != nil {
				return err
			}
			for unix.Unmount("/sys/fs/fuse/connections", unix.MNT_DETACH) == nil {
			}
			var none [2]unix.CapUserData
			if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &none[0]); err != nil {
				return err
			}
			f, err := OpenAbort(1)
			if err == nil {
				f.Close()
			}
			if err == nil || errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("it is said to be gone: %w", err)
			}
			return nil
		}()
	}()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
