package main

import (
	"context"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"penstock.io/penstock/fuse"
)

// helperNames are the names by which mount(8) calls the helper of this file system: by the
// type in fstab, and by the types that the kernel shows for mounts.
var helperNames = []string{"mount.penstock", "mount.fuse.penstock", "mount.fuseblk.penstock"}

// isMountHelper reports whether the binary was called by one of the helper's names.
func isMountHelper(args []string) bool {
	return len(args) > 0 && slices.Contains(helperNames, filepath.Base(args[0]))
}

// Exit statuses of the helper, as defined by mount(8).
const (
	helperOK     = 0
	helperWrong  = 1  // called wrongly
	helperFailed = 32 // not mounted, or not remounted
)

// mountHelper is mount.penstock, as mount(8) calls it:
//
//	mount.penstock SOURCE DIR [-sfnv] [-N namespace] [-o options] [-t type]
//
// With the option remount, mountHelper changes the options of the mount at DIR.
func mountHelper(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var plain, options []string
	fake, sloppy := false, false
	for i := 1; i < len(args); i++ {
		switch a := args[i]; {
		case a == "-o" && i+1 < len(args):
			i++
			options = append(options, strings.Split(args[i], ",")...)
		case (a == "-t" || a == "-N") && i+1 < len(args):
			i++
		case strings.HasPrefix(a, "-") && strings.Trim(a[1:], "sfnv") == "" && len(a) > 1:
			fake, sloppy = fake || strings.Contains(a, "f"), sloppy || strings.Contains(a, "s")
		default:
			plain = append(plain, a)
		}
	}
	if len(plain) != 2 || strings.HasPrefix(plain[0], "-") || strings.HasPrefix(plain[1], "-") {
		fmt.Fprintf(stderr, "usage: %s [VOLUME[@SNAPSHOT]:]PATH DIR [-sfnv] [-o options]\n", filepath.Base(args[0]))
		return helperWrong
	}
	if sloppy {
		options = slices.DeleteFunc(options, func(o string) bool { return !knownOption(o) && o != "remount" })
	}
	remount := slices.Contains(options, "remount")
	// Check the options before any change, and for a dry run, too.
	o, err := new(mountFlags).read(options, remount)
	if err != nil {
		fmt.Fprintln(stderr, "penstock: "+explain(err))
		return helperWrong
	}
	if fake {
		return helperOK
	}
	if remount {
		if err := fuse.Remount(plain[1], o); err != nil {
			fmt.Fprintln(stderr, "penstock: "+explain(err))
			return helperFailed
		}
		return helperOK
	}
	full := append([]string{"mount", "--background"}, plain...)
	if len(options) > 0 {
		full = append(full, "--options", strings.Join(options, ","))
	}
	root := newRoot()
	root.SetArgs(full)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	switch exitStatus(cmd, err, stderr) {
	case exitOK:
		return helperOK
	case exitUsage:
		return helperWrong
	}
	return helperFailed
}
