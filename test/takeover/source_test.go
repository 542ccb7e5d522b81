package takeover

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// kill ends the serving process, and waits until the holder knows.
func (r *rig) kill() {
	r.T.Helper()
	pid := r.server()
	if pid == 0 {
		r.T.Fatal("nobody serves")
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		r.T.Fatal(err)
	}
	r.Until("nobody serves", func() error {
		if pid := r.server(); pid != 0 {
			return fmt.Errorf("process %d serves", pid)
		}
		return nil
	})
}

// refused is a process that must not serve, and must print the reason.
func (r *rig) refused(p *spawn.Process, why ...string) {
	r.T.Helper()
	select {
	case <-p.Done():
	case <-time.After(60 * time.Second):
		r.T.Fatal("it goes on")
	}
	out := p.Output()
	for _, w := range why {
		if !strings.Contains(out, w) {
			r.T.Errorf("it says nothing of %s: %s", w, out)
		}
	}
	if pid := r.server(); pid != 0 {
		r.T.Errorf("process %d serves", pid)
	}
}

func (r *rig) reads(name, want string) {
	r.T.Helper()
	b, err := os.ReadFile(filepath.Join(r.at, name))
	if err != nil || string(b) != want {
		r.T.Errorf("DATA: %s is %q, not %q: %v", name, b, want, err)
	}
}

func (r *rig) write(name, text string) {
	r.T.Helper()
	if err := os.WriteFile(filepath.Join(r.at, name), []byte(text), 0o644); err != nil {
		r.T.Fatal(err)
	}
}

// TestSuccessorOfAnotherSource: a mount goes on with its own source. A successor with another
// source refuses to serve, and the successor's flags for digest and pin are about the mounted
// snapshot.
func TestSuccessorOfAnotherSource(t *testing.T) {
	r := newRig(t, "--patience", "90s")
	r.Until("metadata server", func() error { _, err := r.Ctl("volume", "list"); return err })
	r.Must("volume", "create", "d", "--attach", "/d")
	live := r.mount()
	r.write("d/f", "three")
	r.Must("snapshot", "create", "d", "v3")
	r.write("d/f", "four")
	r.Must("snapshot", "create", "d", "v4")
	r.Until("unmounted", func() error { return syscall.Unmount(r.at, 0) })
	<-live.Done()

	pinned := func(snapshot string) (until time.Time) {
		t.Helper()
		var pins []struct {
			Snapshot string    `json:"snapshot"`
			Holder   string    `json:"holder"`
			Until    time.Time `json:"until"`
		}
		out := r.Must("pin", "list", "d", "-o", "json")
		if err := json.Unmarshal(out, &pins); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, p := range pins {
			if p.Snapshot == snapshot {
				until = p.Until
			}
		}
		return until
	}
	pin := []string{"--pin", "run", "--pin-ttl", "60s"}
	r.mountOf("d@v3:/", pin...)
	r.reads("f", "three")
	held, err := os.Open(filepath.Join(r.at, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	first := pinned("v3")
	r.kill()
	r.refused(r.serve("d@v4:/", pin...), "d@v3:/", "d@v4:/")
	r.refused(r.serve("d:/"), "d@v3:/", "d:/")
	if until := pinned("v4"); !until.IsZero() {
		t.Errorf("a process that was refused pinned v4 until %v", until)
	}
	time.Sleep(1100 * time.Millisecond) // pins are told in seconds
	r.succeed("d@v3:/", pin...)
	r.reads("f", "three")
	if until := pinned("v3"); !until.After(first) {
		t.Errorf("the pin of what is mounted stands until %v, as before: %v", until, first)
	}
	r.kill()
	// --digest asks for the mounted snapshot's digest: neither mount has a digest.
	r.refused(r.serve("d@v3:/", "--digest", strings.Repeat("0", 64)), "digest")
	pid := r.succeed("d@v3:/")
	b := make([]byte, 5)
	if _, err := held.ReadAt(b, 0); err != nil || string(b) != "three" {
		t.Errorf("DATA: what was open all the while reads %q: %v", b, err)
	}
	held.Close()
	r.clean(pid)
}

// TestSuccessorOfARenamedVolume: a renamed volume stays mounted, also after the process.
func TestSuccessorOfARenamedVolume(t *testing.T) {
	r := newRig(t, "--patience", "90s")
	r.Until("metadata server", func() error { _, err := r.Ctl("volume", "list"); return err })
	r.Must("volume", "create", "old", "--attach", "/v")
	r.mountOf("old:/")
	r.write("f", "mine")
	r.Must("volume", "rename", "old", "new")
	serves := func(source string) {
		t.Helper()
		r.kill()
		r.succeed(source)
		r.reads("f", "mine")
	}
	serves("old:/") // its command line is unchanged
	serves("new:/") // somebody did
	// Another volume by the name of then is another volume.
	r.Must("volume", "create", "old")
	r.kill()
	r.refused(r.serve("old:/"), "old:/", "new:/")
	r.succeed("new:/")
	r.Must("volume", "rename", "new", "newer")
	r.Must("volume", "create", "new")
	serves("new:/") // as its predecessor was started
	r.clean(r.server())
}
