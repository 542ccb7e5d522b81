package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// HoldsMounts tells whether mounts can be left to a holder on this machine (Linux 6.9
// and later), judged by the release of its kernel, which it gives. What one mount can is
// known when it is there: fuse.Mount.Held.
func HoldsMounts() (release string, holds bool) {
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return "unknown", false
	}
	release = unix.ByteSliceToString(uts.Release[:])
	return release, releaseHolds(release)
}

func releaseHolds(release string) bool {
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n < 2 {
		return false
	}
	return major > 6 || major == 6 && minor >= 9
}
