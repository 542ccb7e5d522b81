package main

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/fuse"
)

func TestMountOptions(t *testing.T) {
	m := mountFlags{options: []string{"_netdev", "nosuid", "ro", "x-systemd.automount", "dir=/d", "noblock", "rw"}}
	o, err := m.parse()
	if err != nil || !reflect.DeepEqual(o, fuse.Options{NoBlock: true}) || m.dir != "/d" {
		t.Errorf("%+v %q %v", o, m.dir, err)
	}
	m = mountFlags{options: []string{"user"}, readOnly: true}
	if o, err := m.parse(); err != nil || o.SUID || o.Dev || !o.NoExec || !o.ReadOnly {
		t.Errorf("%+v %v", o, err)
	}
	m = mountFlags{options: []string{"sizee=3"}}
	if _, err := m.parse(); err == nil || !strings.Contains(err.Error(), "sizee=3") {
		t.Errorf("unknown option: %v", err)
	}
}

// TestOptionsOfMount: each option that mount(8) and fstab(5) know for all file systems is
// honoured, is in force anyway, or is refused with a reason.
func TestOptionsOfMount(t *testing.T) {
	none := fuse.Options{}
	for option, want := range map[string]any{
		"async": none, "atime": none, "noatime": fuse.Options{NoAtime: true}, "auto": none, "noauto": none, "context=x": "SELinux", "fscontext=x": "SELinux", "defcontext=x": "SELinux",
		"rootcontext=@target": "SELinux", "defaults": none, "dev": fuse.Options{Dev: true}, "nodev": none, "diratime": none, "nodiratime": fuse.Options{NoDirAtime: true}, "dirsync": "fsync",
		"exec": none, "noexec": fuse.Options{NoExec: true}, "group": none, "iversion": "no version", "noiversion": none, "mand": "not kept", "nomand": none,
		"_netdev": none, "nofail": none, "relatime": none, "norelatime": none, "strictatime": "page cache", "nostrictatime": none, "lazytime": none, "nolazytime": none, "suid": fuse.Options{SUID: true},
		"nosuid": none, "silent": none, "loud": none, "owner": none, "remount": "mount.penstock", "ro": fuse.Options{ReadOnly: true}, "rw": none,
		"sync": "fsync", "user": fuse.Options{NoExec: true}, "user=joe": fuse.Options{NoExec: true}, "nouser": none,
		"users": fuse.Options{NoExec: true}, "nosymfollow": fuse.Options{NoSymFollow: true}, "symfollow": none, "x-systemd.automount": none, "comment=x": none,
		"X-mount.mkdir": "unknown", "bind": "--bind", "rbind": "--rbind", "move": "--move", "loop": "unknown", "quota": "unknown",
		// The last of several options counts.
		"user,exec": none, "suid,dev": fuse.Options{SUID: true, Dev: true}, "suid,dev,user": fuse.Options{NoExec: true}, "noatime,relatime": none, "nodiratime,diratime": none, "nosymfollow,symfollow": none, "noatime,atime": none, "owner,suid": fuse.Options{SUID: true},
	} {
		m := mountFlags{options: strings.Split(option, ",")}
		o, err := m.parse()
		switch want := want.(type) {
		case fuse.Options:
			if err != nil || o != want {
				t.Errorf("%s: %+v, %v; want %+v", option, o, err, want)
			}
		case string:
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v; want an error about %s", option, err, want)
			}
		}
	}
	for name, reason := range mountRefused {
		if mountSwitches[name] != nil || mountValues[name] != nil || slices.Contains(mountAlready, name) || reason == "" {
			t.Errorf("%s is refused and accepted", name)
		}
	}
}

// TestMountInBackgroundKeepsFlags: the process in the background gets its parent's flags.
func TestMountInBackgroundKeepsFlags(t *testing.T) {
	cmd := newMount()
	if err := cmd.ParseFlags([]string{"--background", "-o", "ro,dir=/d", "--grace", "3s", "--cluster", "a:1,b:2"}); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(sameCommand(cmd, []string{"v:/p", "/mnt"}), " ")
	want := "mount --cluster=a:1,b:2 --grace=3s --options=ro,dir=/d --background=false -- v:/p /mnt"
	if got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

func TestMountHelperCalls(t *testing.T) {
	var out, errs bytes.Buffer
	for _, c := range []struct {
		args string
		want int
	}{
		{"/sbin/mount.penstock", 1},
		{"mount.penstock one", 1},
		{"mount.penstock / /mnt -f", 0},
		{"mount.penstock / /mnt -n -o rw,nonsense", 1},
		{"mount.penstock / /mnt -f -o rw,nonsense", 1},
		{"mount.penstock / /mnt -sf -o rw,nonsense", 0},
		{"mount.penstock / /mnt -sf -o rw,sync", 1},
		{"mount.penstock / /mnt -f -o remount,ro,user_id=0", 0},
		{"mount.penstock / /mnt -f -o ro,user_id=0", 1},
		{"mount.fuse.penstock / /mnt -f", 0},
		{"/sbin/mount.fuseblk.penstock / /mnt -f -t fuseblk.penstock", 0},
		{"mount.penstock / /proc -o remount,ro", 32},
	} {
		args := strings.Fields(c.args)
		if !isMountHelper(args) {
			t.Errorf("%s is not taken for the helper", c.args)
		}
		if got := mountHelper(t.Context(), args, &out, &errs); got != c.want {
			t.Errorf("%s: status %d, want %d: %s", c.args, got, c.want, errs.String())
		}
		errs.Reset()
	}
}

// TestUnitOf: a process belongs to a unit of systemd if systemd started the process
// itself, not if a child of the unit did.
func TestUnitOf(t *testing.T) {
	for _, c := range []struct {
		env  string
		want bool
	}{
		{"PATH=/bin", false},
		{"PATH=/bin INVOCATION_ID=12", true}, // before systemd 248
		{"INVOCATION_ID=12 SYSTEMD_EXEC_PID=4194300", true},
		{"INVOCATION_ID=12 SYSTEMD_EXEC_PID=1", false},
		{"SYSTEMD_EXEC_PID=4194300", false},
	} {
		if name, got := unitOf(strings.Fields(c.env), 4194300); got != c.want || got && name == "" {
			t.Errorf("%s: %v %q", c.env, got, name)
		}
	}
}
