package formats

import (
	"fmt"
	"os"
	"strings"
	"testing"

	chunkwire "penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// TestPageTellsVersions compares the versions in docs/formats.md with the versions that
// the program writes.
func TestPageTellsVersions(t *testing.T) {
	b, err := os.ReadFile("../../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	for row, version := range map[string]string{
		"frames of the metadata protocol": fmt.Sprintf("%d ", wire.Version),
		"frames of the data path":         fmt.Sprintf("%d ", chunkwire.Version),
		"record of a mirror in etcd":      fmt.Sprintf("%d each ", meta.MirrorVersion),
		"record of a group of snapshots":  fmt.Sprintf("%d ", meta.GroupVersion),
	} {
		seen := 0
		for line := range strings.Lines(string(b)) {
			if rest, ok := strings.CutPrefix(line, "| "+row); ok {
				seen++
				if _, cells, _ := strings.Cut(rest, " | "); !strings.HasPrefix(cells, version) {
					t.Errorf("%s: version %.30q, it is %q", row, cells, version)
				}
			}
		}
		if seen != 1 {
			t.Errorf("%d rows begin with %q", seen, row)
		}
	}
}
