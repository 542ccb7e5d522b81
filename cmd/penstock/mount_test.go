package main

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"penstock.io/penstock/fuse"
)

func TestMountOptions(t *testing.T) {
	m := mountFlags{options: []string{"_netdev", "nosuid", "ro", "x-systemd.automount", "dir=/d", "noblock", "rw"}}
	o, err := m.parse()
	if err != nil || !reflect.DeepEqual(o, fuse.Options{NoSUID: true, NoBlock: true}) || m.dir != "/d" {
		t.Errorf("%+v %q %v", o, m.dir, err)
	}
	m = mountFlags{options: []string{"user"}, readOnly: true}
	if o, err := m.parse(); err != nil || !o.NoSUID || !o.NoDev || !o.NoExec || !o.ReadOnly {
		t.Errorf("%+v %v", o, err)
	}
	m = mountFlags{options: []string{"sizee=3"}}
	if _, err := m.parse(); err == nil || !strings.Contains(err.Error(), "sizee=3") {
		t.Errorf("unknown option: %v", err)
	}
}

// The process in the background gets the flags that its parent got.
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
		{"mount.penstock / /mnt -sn -o rw,nonsense", 1},
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

// Whose process is a unit's of systemd: the one that systemd started, and not
// what that starts.
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
