package main

import (
	"slices"
	"strings"

	"penstock.io/penstock/fuse"
)

// What each option of mount(8) is here: one that it knows for all file systems is
// honoured, so already, or refused with a reason, never passed over.

// mountSwitches are the options of mount(8) without a value.
var mountSwitches = map[string]func(*fuse.Options){
	"ro":          func(o *fuse.Options) { o.ReadOnly = true },
	"rw":          func(o *fuse.Options) { o.ReadOnly = false },
	"suid":        func(o *fuse.Options) { o.SUID = true },
	"nosuid":      func(o *fuse.Options) { o.SUID = false },
	"dev":         func(o *fuse.Options) { o.Dev = true },
	"nodev":       func(o *fuse.Options) { o.Dev = false },
	"exec":        func(o *fuse.Options) { o.NoExec = false },
	"noexec":      func(o *fuse.Options) { o.NoExec = true },
	"atime":       func(o *fuse.Options) { o.NoAtime = false },
	"relatime":    func(o *fuse.Options) { o.NoAtime = false },
	"noatime":     func(o *fuse.Options) { o.NoAtime = true },
	"diratime":    func(o *fuse.Options) { o.NoDirAtime = false },
	"nodiratime":  func(o *fuse.Options) { o.NoDirAtime = true },
	"symfollow":   func(o *fuse.Options) { o.NoSymFollow = false },
	"nosymfollow": func(o *fuse.Options) { o.NoSymFollow = true },
	"nonempty":    func(o *fuse.Options) { o.NonEmpty = true },
	"private":     func(o *fuse.Options) { o.Private = true },
	"allow_other": func(o *fuse.Options) { o.Private, o.AllowOther = false, true },
	"noblock":     func(o *fuse.Options) { o.NoBlock = true },
	"noopen":      func(o *fuse.Options) { o.NoOpen, o.Passthrough = true, false },
	"passthrough": func(o *fuse.Options) { o.NoOpen, o.Passthrough = false, true },
	"user":        func(o *fuse.Options) { o.SUID, o.Dev, o.NoExec = false, false, true },
	"users":       func(o *fuse.Options) { o.SUID, o.Dev, o.NoExec = false, false, true },
	"owner":       func(o *fuse.Options) { o.SUID, o.Dev = false, false },
	"group":       func(o *fuse.Options) { o.SUID, o.Dev = false, false },
}

// mountAlready are options that say how it is anyway, and those that mount(8),
// fstab(5) and systemd keep for themselves. Access times follow relatime unless they are
// left alone; that they are kept in memory for a while is what lazytime allows, and
// nobody can forbid it here.
var mountAlready = []string{"defaults", "auto", "noauto", "_netdev", "nofail", "nouser", "nogroup", "noowner", "async", "nostrictatime", "norelatime", "lazytime", "nolazytime",
	"nomand", "noiversion", "silent", "loud", "default_permissions"}

// mountRefused are options of mount(8) that can't be kept, and why.
var mountRefused = map[string]string{
	"sync":        "what is written is durable after fsync(2), of a volume with --sync-on-close after close(2), or of files opened with O_SYNC",
	"dirsync":     "names are durable after fsync(2) of their directory",
	"strictatime": "what the kernel reads from its page cache is told to nobody: access times follow relatime",
	"mand":        "mandatory locks are not kept by the kernel any more",
	"iversion":    "the kernel has no version of an inode of FUSE",
	"context":     "labels of SELinux are not set here", "fscontext": "labels of SELinux are not set here",
	"defcontext": "labels of SELinux are not set here", "rootcontext": "labels of SELinux are not set here",
	"bind": "bind what is mounted with 'mount --bind'", "rbind": "bind what is mounted with 'mount --rbind'",
	"move":    "move what is mounted with 'mount --move'",
	"remount": "it is the word of 'mount -o remount', through mount.penstock: options of what is mounted are changed by that",
}

// mountOfKernel are options that the kernel shows of a mount: mount(8) gives them back
// when it remounts one that is not in fstab.
var mountOfKernel = []string{"user_id", "group_id", "max_read", "blksize", "fd", "rootmode"}

// mountValues are options with a value, and where it goes.
var mountValues = map[string]func(m *mountFlags, value string){
	"dir":         func(m *mountFlags, v string) { m.dir = v },
	"cluster":     func(m *mountFlags, v string) { m.cluster = append(m.cluster, v) },
	"credentials": func(m *mountFlags, v string) { m.credentials.credentials = v },
	"hold": func(m *mountFlags, v string) {
		if m.hold = v; v == "" {
			m.hold = ownHolder
		}
	},
	"insecure": func(m *mountFlags, _ string) { m.insecure = true },
	"log":      func(m *mountFlags, v string) { m.logFile = v },
	"digest":   func(m *mountFlags, v string) { m.digest = v },
	"pin":      func(m *mountFlags, v string) { m.pin = v },
	"noindex":  func(m *mountFlags, _ string) { m.noIndex = true },
	"indexdir": func(m *mountFlags, v string) { m.indexDir = v },
}

// parse turns -o into options and flags. remount accepts what the kernel shows, too.
func (m *mountFlags) parse() (o fuse.Options, err error) { return m.read(m.options, false) }

func (m *mountFlags) read(options []string, remount bool) (o fuse.Options, err error) {
	if remount && slices.ContainsFunc(options, ofKernel) {
		// The kernel names nosuid and nodev, and not their opposites.
		o.SUID, o.Dev = true, true
	}
	for _, option := range options {
		name, value, _ := strings.Cut(option, "=")
		reason, refused := mountRefused[name]
		switch {
		case remount && (name == "remount" || ofKernel(option)):
		case refused:
			return o, usagef("mount option %q can't be had: %s", name, reason)
		case mountSwitches[name] != nil:
			mountSwitches[name](&o)
		case mountValues[name] != nil:
			mountValues[name](m, value)
		case keptByOthers(name):
		default:
			return o, usagef("unknown mount option %q; see 'penstock mount --help'", option)
		}
	}
	if m.readOnly {
		o.ReadOnly = true
	}
	return o, nil
}

func ofKernel(option string) bool {
	name, _, _ := strings.Cut(option, "=")
	return slices.Contains(mountOfKernel, name)
}

// keptByOthers tells options that nothing need be done about.
func keptByOthers(name string) bool {
	return name == "" || slices.Contains(mountAlready, name) || strings.HasPrefix(name, "x-") || strings.HasPrefix(name, "comment")
}

// knownOption tells whether an option is one that this program has a word for.
func knownOption(option string) bool {
	name, _, _ := strings.Cut(option, "=")
	return mountSwitches[name] != nil || mountValues[name] != nil || mountRefused[name] != "" || keptByOthers(name)
}
