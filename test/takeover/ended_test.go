package takeover

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// A mount that is unmounted by force while nobody serves it has ended: what was
// written to it is made durable, and who is started next mounts anew.
func TestUnmountedWhileNobodyServes(t *testing.T) {
	r := newRig(t, "--patience", "90s")
	r.mount()
	want := pattern(1, 2, 1<<20)
	f, err := os.OpenFile(filepath.Join(r.at, "f"), os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1}); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Write(want); err != nil {
		t.Fatal(err)
	}
	r.kill()
	if err := unix.Unmount(r.at, unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	p := r.serve("/")
	r.Until("mounted anew", func() error {
		select {
		case <-p.Done():
			t.Fatalf("it ended: %s", p.Output())
		default:
		}
		if !spawn.Mounted(r.at) || r.server() != p.PID() {
			return errors.New("not yet")
		}
		return nil
	})
	got, err := os.ReadFile(filepath.Join(r.at, "f"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes that are not those written: %v", len(got), err)
	}
	// Its session is over: what was locked is not.
	g, err := os.OpenFile(filepath.Join(r.at, "f"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.FcntlFlock(g.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Len: 1}); err != nil {
		t.Errorf("the lock of a mount that has ended: %v", err)
	}
	g.Close()
	r.clean(p.PID())
}
