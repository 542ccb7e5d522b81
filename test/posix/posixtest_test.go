package posix

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
	"golang.org/x/sys/unix"
)

// againstPOSIX names tests of go-fuse that demand behaviour forbidden by POSIX; native
// ext4 fails these tests, too.
var againstPOSIX = map[string]string{
	"FcntlFlockLocksFile": "it wants two POSIX record locks of one process to conflict; by fcntl(2) they never do",
}

// TestGoFUSE runs go-fuse's own conformance tests.
func TestGoFUSE(t *testing.T) {
	dir := subject(t)
	var ours, passwd unix.Stat_t
	if err := unix.Stat(dir, &ours); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat("/etc/passwd", &passwd); err != nil {
		t.Fatal(err)
	}
	for _, name := range slices.Sorted(maps.Keys(posixtest.All)) {
		if reason := againstPOSIX[name]; reason != "" {
			t.Logf("%s doesn't count: %s", name, reason)
			continue
		}
		if name == "OpenSymlinkRace" && ours.Dev == passwd.Dev {
			continue // the test needs a device number of each file system
		}
		t.Run(name, func(t *testing.T) {
			own := filepath.Join(dir, name)
			if err := os.Mkdir(own, 0o755); err != nil {
				t.Fatal(err)
			}
			posixtest.All[name](t, own)
		})
	}
}
