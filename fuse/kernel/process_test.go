package kernel

import "testing"

func TestDying(t *testing.T) {
	for status, want := range map[string]bool{
		"Name:\tx\nState:\tS (sleeping)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000100\n": false,
		"Name:\tx\nState:\tD (disk sleep)\nSigPnd:\t0000000000000100\n":                          true,
		"Name:\tx\nState:\tZ (zombie)\n":                                                         true,
		"Name:\tx\nState:\tT (stopped)\nSigPnd:\t0000000000040000\n":                             false,
		"": false,
	} {
		if got := DyingStatus([]byte(status)); got != want {
			t.Errorf("%q: %v", status, got)
		}
	}
}
