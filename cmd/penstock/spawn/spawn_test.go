package spawn

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fake is a penstock that mounts a tmpfs: args are up --dir D --mount M.
const fake = `#!/bin/sh
echo "serving $5"
[ "$MOOD" = broken ] && { echo "the disk is on fire" >&2; exit 3; }
trap '[ "$MOOD" = messy ] || umount "$5"; exit 0' TERM
mount -t tmpfs fake "$5" || exit 1
while :; do sleep 0.05; done
`

func config(t *testing.T, mood string) Config {
	t.Helper()
	dir := t.TempDir()
	c := Config{Binary: filepath.Join(dir, "penstock"), Dir: filepath.Join(dir, "data dir"), Mount: filepath.Join(dir, "mount point"),
		Env: []string{"MOOD=" + mood}, Ready: time.Minute}
	if err := os.WriteFile(c.Binary, []byte(fake), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{c.Dir, c.Mount} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := Unmount(c.Mount); err != nil {
			t.Error(err)
		}
	})
	return c
}

func TestStop(t *testing.T) {
	c := config(t, "")
	p, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if !Mounted(c.Mount) || p.StartedIn <= 0 || !strings.Contains(p.Output(), "serving "+c.Mount) {
		t.Errorf("mounted %v, after %v, output %q", Mounted(c.Mount), p.StartedIn, p.Output())
	}
	if err := p.Stop(time.Minute); err != nil {
		t.Error(err)
	}
	if Mounted(c.Mount) {
		t.Error("still mounted")
	}
}

func TestKillLeavesTheMountAndEndDoesNot(t *testing.T) {
	c := config(t, "")
	p, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	p.Kill()
	if !Mounted(c.Mount) {
		t.Error("SIGKILL unmounted")
	}
	if err := p.End(); err != nil || Mounted(c.Mount) {
		t.Errorf("mounted after the end: %v, %v", Mounted(c.Mount), err)
	}
}

func TestWhatWentWrongIsTold(t *testing.T) {
	if _, err := Start(t.Context(), config(t, "broken")); err == nil || !strings.Contains(err.Error(), "on fire") || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("a process that ends: %v", err)
	}
	c := config(t, "messy")
	p, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(time.Minute); err == nil || !strings.Contains(err.Error(), "left its mount") {
		t.Errorf("a mount left behind: %v", err)
	}
	if Mounted(c.Mount) {
		t.Error("still mounted")
	}
}
