package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// role is a command with a flag of each kind, which prints the values.
func role(got *string) *cobra.Command {
	var dir, level string
	var list []string
	var on bool
	cmd := &cobra.Command{Use: "role", Example: "  role", RunE: func(*cobra.Command, []string) error {
		*got = strings.Join([]string{dir, level, strings.Join(list, "+"), map[bool]string{true: "on", false: "off"}[on]}, " ")
		return nil
	}}
	cmd.Flags().StringVar(&dir, "dir", "none", "")
	cmd.Flags().StringVar(&level, "log-level", "info", "")
	cmd.Flags().StringSliceVar(&list, "list", nil, "")
	cmd.Flags().BoolVar(&on, "switch", false, "")
	return configurable(cmd)
}

func TestConfiguration(t *testing.T) {
	for _, c := range []struct {
		name string
		file string // contents; "" for none
		env  map[string]string
		args []string
		want string
		err  string
	}{
		{name: "defaults", want: "none info  off"},
		{name: "file", file: "dir: /a\nlist: [x, y]\nswitch: true\n", want: "/a info x+y on"},
		{name: "environment wins over file", file: "dir: /a\nlog-level: warn\n", env: map[string]string{"PENSTOCK_LOG_LEVEL": "debug"}, want: "/a debug  off"},
		{name: "flag wins over both", file: "dir: /a\n", env: map[string]string{"PENSTOCK_DIR": "/b"}, args: []string{"--dir", "/c"}, want: "/c info  off"},
		{name: "empty file", file: "# nothing\n", want: "none info  off"},
		{name: "unknown key", file: "dir: /a\ndirr: /b\n", err: `role.yaml:2: unknown key "dirr"; 'penstock role' knows: dir, list, log-level, switch`},
		{name: "config is no key", file: "config: other.yaml\n", err: `unknown key "config"`},
		{name: "wrong kind", file: "\nswitch: sometimes\n", err: "role.yaml:2: switch: "},
		{name: "nested", file: "dir:\n  a: b\n", err: "role.yaml:2: dir: expected a value or a list"},
		{name: "twice", file: "dir: /a\ndir: /b\n", err: `"dir"`},
		{name: "no map", file: "- a\n", err: "expected 'key: value' lines"},
		{name: "no yaml", file: "dir: [\n", err: "role.yaml: yaml"},
		{name: "wrong environment", env: map[string]string{"PENSTOCK_SWITCH": "maybe"}, err: "environment variable PENSTOCK_SWITCH"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			args := c.args
			if c.file != "" {
				file := filepath.Join(t.TempDir(), "role.yaml")
				if err := os.WriteFile(file, []byte(c.file), 0o600); err != nil {
					t.Fatal(err)
				}
				args = append(args, "--config", file)
			}
			var got string
			cmd := role(&got)
			cmd.SilenceErrors, cmd.SilenceUsage = true, true
			cmd.SetArgs(args)
			err := cmd.Execute()
			var stderr bytes.Buffer
			status := exitStatus(cmd, err, &stderr)
			if c.err == "" {
				if err != nil || got != c.want {
					t.Errorf("got %q, %v; want %q", got, err, c.want)
				}
				return
			}
			if status != exitUsage || !strings.Contains(stderr.String(), c.err) {
				t.Errorf("status %d, %q; want status 2 with %q", status, stderr.String(), c.err)
			}
		})
	}
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]uint64{"0": 0, "10": 10, "10K": 10 << 10, "1.5M": 3 << 19, "2GiB": 2 << 30, "2 GB": 2 << 30, "7B": 7} {
		var s sizeFlag
		if err := s.Set(text); err != nil || uint64(s) != want {
			t.Errorf("%q: %d, %v; want %d", text, s, err, want)
		}
	}
	for _, text := range []string{"", "G", "-1", "1e9", "12Q", "1.2.3", "9999999999E", "5 apples"} {
		var s sizeFlag
		if err := s.Set(text); err == nil {
			t.Errorf("%q was taken for %d", text, s)
		}
	}
	for n, want := range map[uint64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 3 << 29: "1.5 GiB"} {
		if got := bytesText(n); got != want {
			t.Errorf("bytesText(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestRunningNotes(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	remove, err := leaveNote("/data", "/mnt")
	if err != nil {
		t.Fatal(err)
	}
	// A dead process's note does not count.
	dead := filepath.Join(noteDir(), "999999999.json")
	if err := os.WriteFile(dead, []byte(`{"pid":999999999,"start":5,"dir":"/dead"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	found := func() (dirs []string) {
		t.Helper()
		list, err := runningHere()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range list {
			if r.PID == os.Getpid() || r.Dir == "/dead" {
				dirs = append(dirs, r.Dir)
			}
		}
		return dirs
	}
	if got := found(); len(got) != 1 || got[0] != "/data" {
		t.Errorf("found %v, want /data", got)
	}
	if _, err := os.Stat(dead); err == nil {
		t.Error("the dead process' note is still there")
	}
	remove()
	if got := found(); len(got) != 0 {
		t.Errorf("found %v after removing", got)
	}
}
