package policy

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"penstock.io/penstock/meta"
)

// mountOptions are the mount options accepted in a claim. No option names a cluster or a
// credential, and no option enables devices.
var mountOptions = []string{"ro", "rw", "exec", "noexec", "suid", "nosuid", "nodev", "atime", "noatime", "relatime", "noopen", "passthrough"}

// PinOption begins the mount option by which a mount pins its snapshot for a holder. A claim
// can't set the option.
const PinOption = "pin="

// MountOptions checks the mount options of a volume and returns the complete sorted list:
// nodev always, nosuid unless flags contain suid. Errors: Invalid.
func MountOptions(flags []string, readOnly bool) ([]string, error) {
	out := []string{"nodev"}
	if !slices.Contains(flags, "suid") { // the mount's default, made explicit
		out = append(out, "nosuid")
	}
	for _, f := range flags {
		if !slices.Contains(mountOptions, f) {
			name, _, _ := strings.Cut(f, "=") // the value could be a password
			return nil, meta.E("read mount options", meta.Invalid, strconv.Quote(name[:min(len(name), 64)]), errors.New("claims may not have this mount option"))
		}
		if !slices.Contains(out, f) && f != "relatime" {
			out = append(out, f)
		}
	}
	if readOnly && !slices.Contains(out, "ro") {
		out = append(out, "ro")
	}
	slices.Sort(out)
	return out, nil
}
