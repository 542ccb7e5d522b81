package policy

import (
	"errors"
	"slices"
	"strconv"
	"strings"

	"penstock.io/penstock/meta"
)

// mountOptions are what a claim may ask of its mounts. Nothing that says where
// the cluster or a credential is, and no devices.
var mountOptions = []string{"ro", "rw", "exec", "noexec", "suid", "nosuid", "nodev", "atime", "noatime", "relatime", "noopen", "passthrough"}

// PinOption begins the option of a mount that pins its snapshot for a holder. No
// claim may have it.
const PinOption = "pin="

// MountOptions checks what a volume is to be mounted with, and completes it:
// devices are never honoured, set-id programs only if asked for. Errors: Invalid.
func MountOptions(flags []string, readOnly bool) ([]string, error) {
	out := []string{"nodev"}
	if !slices.Contains(flags, "suid") { // as a mount has it anyway: said, so that nothing else decides
		out = append(out, "nosuid")
	}
	for _, f := range flags {
		if !slices.Contains(mountOptions, f) {
			name, _, _ := strings.Cut(f, "=") // the value could be a password
			return nil, meta.E("read mount options", meta.Invalid, strconv.Quote(name[:min(len(name), 64)]), errors.New("it is not one that a claim may have"))
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
