package posix

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
)

// TestGoFUSE runs the conformance tests that go-fuse has for its own file
// systems.
func TestGoFUSE(t *testing.T) {
	dir := subject(t)
	for _, name := range slices.Sorted(maps.Keys(posixtest.All)) {
		t.Run(name, func(t *testing.T) {
			own := filepath.Join(dir, name)
			if err := os.Mkdir(own, 0o755); err != nil {
				t.Fatal(err)
			}
			posixtest.All[name](t, own)
		})
	}
}
