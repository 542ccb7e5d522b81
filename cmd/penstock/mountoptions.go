package main

import (
	"slices"
	"strings"

	"penstock.io/penstock/fuse"
)

// Options of mount(8). Each option that mount(8) knows for all file systems is honoured,
// describes the only behaviour anyway, or is refused with a reason. No option is ignored
// silently.

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

// mountAlready are options for behaviour that is the only behaviour here, and options that
// only mount(8), fstab(5) and systemd use. Without noatime, access times follow relatime. The
// mount keeps access times in memory for a while, as lazytime allows; no option can forbid the
// delay.
var mountAlready = []string{"defaults", "auto", "noauto", "_netdev", "nofail", "nouser", "nogroup", "noowner", "async", "nostrictatime", "norelatime", "lazytime", "nolazytime",
	"nomand", "noiversion", "silent", "loud", "default_permissions"}

// mountRefused are options of mount(8) that can't be honoured, with the reasons.
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

// mountOfKernel are options that the kernel shows for a mount. mount(8) passes the options on
// when it remounts a mount without a line in fstab.
var mountOfKernel = []string{"user_id", "group_id", "max_read", "blksize", "fd", "rootmode"}

// mountValues maps options beside mountSwitches, most with a value, to setters of flags.
var mountValues = map[string]func(m *mountFlags, value string){
	"dir":         func(m *mountFlags, v string) { m.dir = v },
	"cluster":     func(m *mountFlags, v string) { m.cluster = append(m.cluster, v) },
	"credentials": func(m *mountFlags, v string) { m.credentials.credentials = v },
	"hold": func(m *mountFlags, v string) {
		if m.hold = v; v == "" {
			m.hold = ownHolder
		}
	},
	"insecure":     func(m *mountFlags, _ string) { m.insecure = true },
	"log":          func(m *mountFlags, v string) { m.logFile = v },
	"digest":       func(m *mountFlags, v string) { m.digest = v },
	"pin":          func(m *mountFlags, v string) { m.pin = v },
	"noindex":      func(m *mountFlags, _ string) { m.noIndex = true },
	"indexdir":     func(m *mountFlags, v string) { m.indexDir = v },
	"gateway":      func(m *mountFlags, v string) { m.gateways.Addresses = append(m.gateways.Addresses, v) },
	"gatewayca":    func(m *mountFlags, v string) { m.gateways.CA = v },
	"gatewaycert":  func(m *mountFlags, v string) { m.gateways.Cert = v },
	"gatewaykey":   func(m *mountFlags, v string) { m.gateways.Key = v },
	"gatewaylogin": func(m *mountFlags, v string) { m.gateways.Login = v },
}

// parse turns the options of -o into options of the mount and flags.
func (m *mountFlags) parse() (o fuse.Options, err error) { return m.read(m.options, false) }

func (m *mountFlags) read(options []string, remount bool) (o fuse.Options, err error) {
	if remount && slices.ContainsFunc(options, ofKernel) {
		// The kernel shows nosuid and nodev, but neither suid nor dev.
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

// keptByOthers reports whether an option needs no action here.
func keptByOthers(name string) bool {
	return name == "" || slices.Contains(mountAlready, name) || strings.HasPrefix(name, "x-") || strings.HasPrefix(name, "comment")
}

// knownOption reports whether this program knows an option.
func knownOption(option string) bool {
	name, _, _ := strings.Cut(option, "=")
	return mountSwitches[name] != nil || mountValues[name] != nil || mountRefused[name] != "" || keptByOthers(name)
}
