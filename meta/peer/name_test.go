package peer

import (
	"strings"
	"testing"
)

// TestFitName: names that fit stay; a longer name becomes a name that fits, always the same, and
// a different name for another node, though both begin alike.
func TestFitName(t *testing.T) {
	for _, n := range []string{"worker-1", strings.Repeat("a", 63)} {
		if got := FitName(n); got != n {
			t.Errorf("%s becomes %s", n, got)
		}
	}
	seen := map[string]string{}
	for _, end := range []string{"a.example.com", "b.example.com", strings.Repeat("x", 180)} {
		n := "ip-10-0-0-1." + strings.Repeat("region.", 9) + end
		got := FitName(n)
		if CheckName(got) != nil || len(got) != 63 || !strings.HasPrefix(got, "ip-10-0-0-1.region.") || FitName(n) != got || FitName(got) != got {
			t.Errorf("%s becomes %s", n, got)
		}
		if other, twice := seen[got]; twice {
			t.Errorf("%s and %s are both %s", n, other, got)
		}
		seen[got] = n
	}
	if CheckName(FitName(strings.Repeat("/", 80))) == nil {
		t.Error("a digest makes a good name of a bad one")
	}
}
