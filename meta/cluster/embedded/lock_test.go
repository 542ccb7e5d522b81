package embedded

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// A file system that has a quota for its users is full as one without is.
func TestFileKinds(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]meta.Kind{unix.ENOSPC: meta.NoSpace, unix.EDQUOT: meta.NoSpace, unix.EACCES: meta.AccessDenied, unix.EIO: meta.IO} {
		if got := fileKind(fmt.Errorf("make it: %w", &os.PathError{Op: "open", Path: "f", Err: err})); got != want {
			t.Errorf("%v is of kind %v, want %v", err, got, want)
		}
	}
}
