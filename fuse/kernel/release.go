package kernel

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// HoldsMounts reports whether this machine's kernel allows mounts to be left to a holder
// (Linux 6.9 and later), judged by the returned release. The ability of a single mount is
// known only after mounting: fuse.Mount.Held.
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
