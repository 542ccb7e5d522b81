package state

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// failingDir names the directory for the child whose disk fails.
const failingDir = "PENSTOCK_STATE_FAILING_DIR"

// syncFails is the child: the manifest of an open store can't be synced any more.
func syncFails(dir string) error {
	sh := NewShared(1<<20, 100, slog.New(slog.NewTextHandler(os.Stderr, nil)))
	var broken atomic.Bool
	sh.fs = errorfs.Wrap(vfs.Default, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if broken.Load() && op.Kind == errorfs.OpFileSync && strings.HasPrefix(filepath.Base(op.Path), "MANIFEST") {
			return &os.PathError{Op: "sync", Path: op.Path, Err: syscall.EIO}
		}
		return nil
	}))
	s, err := Create(filepath.Join(dir, "v"), vol, sh)
	if err != nil {
		return err
	}
	if err := applyModel(s, 1); err != nil {
		return err
	}
	broken.Store(true)
	if err := s.Flush(); err != nil {
		return err
	}
	return errors.New("the store goes on")
}

// The disk fails under the manifest. The process ends, with a line that names the directory, the
// failure and the remedy, and no stack; the store opens afterwards.
func TestManifestThatCantBeSynced(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), failingDir+"="+dir)
	out, err := cmd.CombinedOutput()
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || exit.ExitCode() != 1 {
		t.Errorf("the process ended with %v, want status 1", err)
	}
	if bytes.Contains(out, []byte("goroutine ")) || bytes.Count(out, []byte("\n")) != 1 {
		t.Error("it leaves a stack, or says more than one line")
	}
	for _, word := range []string{"level=ERROR", "dir=" + filepath.Join(dir, "v"), "MANIFEST sync failed", "input/output error", "start the process again"} {
		if !bytes.Contains(out, []byte(word)) {
			t.Errorf("it does not say %q", word)
		}
	}
	if t.Failed() {
		t.Logf("%s", out)
	}
	s, err := Open(filepath.Join(dir, "v"), vol, shared(t))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	checkModel(t, s)
}
