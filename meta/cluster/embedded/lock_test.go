package embedded

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// A full quota of a file system's users counts like a full file system.
func TestFileKinds(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]meta.Kind{unix.ENOSPC: meta.NoSpace, unix.EDQUOT: meta.NoSpace, unix.EACCES: meta.AccessDenied, unix.EIO: meta.IO} {
		if got := fileKind(fmt.Errorf("make it: %w", &os.PathError{Op: "open", Path: "f", Err: err})); got != want {
			t.Errorf("%v is of kind %v, want %v", err, got, want)
		}
	}
}
