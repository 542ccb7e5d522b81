package main

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"penstock.io/penstock/meta"
)

// TestTellSystemd: under systemd a holder reports that it listens: units after it start
// then.
func TestTellSystemd(t *testing.T) {
	dir, err := os.MkdirTemp("", "ns")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "s")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	if err := tellSystemd("READY=1"); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := c.Read(b); err != nil || string(b[:n]) != "READY=1" {
		t.Errorf("systemd is told %q, %v", b[:n], err)
	}
	t.Setenv("NOTIFY_SOCKET", "")
	if err := tellSystemd("READY=1"); err != nil {
		t.Errorf("without systemd: %v", err)
	}
}

// TestListenHold: a holder refuses a place where another user can replace its socket.
func TestListenHold(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("giving a folder away needs root")
	}
	base, err := os.MkdirTemp("", "lh")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(base)
	for _, c := range []struct {
		name string
		make func(dir string) error
		want meta.Kind
	}{
		{"new", func(string) error { return nil }, meta.KindOK},
		{"ours", func(d string) error { return os.Mkdir(d, 0o755) }, meta.KindOK},
		{"sticky", func(d string) error { return errors.Join(os.Mkdir(d, 0o777), os.Chmod(d, 0o777|os.ModeSticky)) }, meta.KindOK},
		{"open", func(d string) error { return errors.Join(os.Mkdir(d, 0o777), os.Chmod(d, 0o777)) }, meta.NotPermitted},
		{"theirs", func(d string) error { return errors.Join(os.Mkdir(d, 0o755), os.Chown(d, 12345, 12345)) }, meta.NotPermitted},
		{"theirs-by-link", func(d string) error { return os.Symlink(filepath.Join(base, "theirs"), d) }, meta.NotPermitted},
	} {
		dir := filepath.Join(base, c.name)
		if err := c.make(dir); err != nil {
			t.Fatal(err)
		}
		l, err := listenHold(filepath.Join(dir, "s"))
		if meta.KindOf(err) != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if err != nil {
			continue
		}
		if c.name == "new" {
			if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o700 {
				t.Errorf("%v %v", st.Mode(), err)
			}
		}
		if _, err := listenHold(filepath.Join(dir, "s")); !errors.Is(err, meta.Busy) {
			t.Errorf("two holders at one place: %v", err)
		}
		l.Close()
	}
}
