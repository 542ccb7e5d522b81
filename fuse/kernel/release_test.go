package kernel

import "testing"

// TestKernelHolds: a kernel older than Linux 6.9 is recognised, however the release is written.
func TestKernelHolds(t *testing.T) {
	for release, want := range map[string]bool{
		"6.9.0": true, "6.18.3-cloud-amd64": true, "7.0-rc1": true, "10.2": true,
		"6.8.0-49-generic": false, "5.15.167.4-microsoft-standard-WSL2": false, "6": false, "": false, "strange": false,
	} {
		if got := releaseHolds(release); got != want {
			t.Errorf("%q: %t", release, got)
		}
	}
}
