package takeover

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// TestUnmountedWhileNobodyServes: a mount that is unmounted by force while no process serves the
// mount has ended. The bytes written to the mount become durable, and the next process mounts
// anew.
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
		t.Errorf("DATA: %d bytes that are not those written: %v", len(got), err)
	}
	// The mount's session is over: its locks are free.
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

// TestNobodyServesForLong: no process serves a mount for longer than the lease of the mount's
// session, as when a supervisor starts the next process after a long pause. As long as no other
// client wants the session's leases, users of the mount see a pause and lose nothing. The test
// waits for that lease, 6 s.
//
// An owner that fails meanwhile can't wait as long. So if the machine is so busy that the
// owner's own lease ends, the round counts for nothing.
func TestNobodyServesForLong(t *testing.T) {
	t.Parallel() // the test mostly waits
	for {
		r := newRig(t, "--patience", "90s")
		err := r.nobodyFor(8 * time.Second)
		if err == nil {
			r.clean(r.server())
			return
		}
		if r.term() == "1" {
			t.Fatal(err)
		}
		t.Log("the volume had another owner: again")
	}
}

// nobodyFor leaves a used mount without a server for the given time, and returns the error of the
// user or of the next process.
func (r *rig) nobodyFor(d time.Duration) error {
	r.T.Helper()
	r.mount()
	u := r.load(allKinds...)
	time.Sleep(500 * time.Millisecond)
	r.kill()
	time.Sleep(d)
	p := r.serve("/")
	var ended error
	r.Until("somebody serves", func() error {
		select {
		case <-p.Done():
			ended = fmt.Errorf("it ended: %s", p.Output())
			return nil
		default:
		}
		if r.server() != p.PID() {
			return errors.New("not yet")
		}
		return nil
	})
	if ended != nil {
		_ = u.cmd.Process.Kill()
		return ended
	}
	time.Sleep(500 * time.Millisecond)
	return u.saw()
}

var terms = regexp.MustCompile(`"term": (\d+)`)

// term counts the owners of the root volume.
func (r *rig) term() (term string) {
	r.T.Helper()
	r.Until("the volume's owner is known", func() error {
		out, err := r.Ctl("status", "--output", "json")
		m := terms.FindSubmatch(out)
		if err == nil && m == nil {
			err = fmt.Errorf("nobody serves it: %s", out)
		}
		if err == nil {
			term = string(m[1])
		}
		return err
	})
	return term
}
