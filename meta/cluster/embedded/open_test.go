package embedded

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// A folder that does not open is an error that names it, and no wait for ever: neither for
// files that another process has open, nor once the caller waits no more.
func TestFolderThatDoesNotOpen(t *testing.T) {
	t.Parallel()
	made := func(t *testing.T) string {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "etcd")
		s, err := Start(Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	locked := func(t *testing.T, dir string) {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(dir, "member", "snap", "db"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() }) // what was given up opens, and is closed
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, dir string)
		stop  bool // the caller waits no more
		want  meta.Kind
	}{
		{"another process has the database open", locked, false, meta.Unavailable},
		{"the process is ended meanwhile", locked, true, meta.Interrupted},
		{"the database is a folder", func(t *testing.T, dir string) {
			db := filepath.Join(dir, "member", "snap", "db")
			if err := errors.Join(os.Remove(db), os.Mkdir(db, 0o700)); err != nil {
				t.Fatal(err)
			}
		}, false, meta.IO},
		{"the journal is damaged", func(t *testing.T, dir string) {
			all, err := filepath.Glob(filepath.Join(dir, "member", "wal", "*.wal"))
			if err != nil || len(all) == 0 {
				t.Fatal(all, err)
			}
			f, err := os.OpenFile(all[0], os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt([]byte(strings.Repeat("x", 200)), 8); err != nil {
				t.Fatal(err)
			}
		}, false, meta.IO},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			c.spoil(t, dir)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cfg := Config{Dir: dir, Logger: slog.New(slog.DiscardHandler), OpenTimeout: 30 * time.Second}
			switch {
			case c.stop:
				time.AfterFunc(time.Second, cancel)
			case c.want == meta.Unavailable:
				cfg.OpenTimeout = time.Second
			}
			done := make(chan error, 1)
			go func() {
				s, err := StartContext(ctx, cfg)
				if err == nil {
					s.Close()
				}
				done <- err
			}()
			select {
			case err := <-done:
				if meta.KindOf(err) != c.want || !strings.Contains(err.Error(), dir) {
					t.Errorf("%v of kind %v, want %v, and the folder's name", err, meta.KindOf(err), c.want)
				}
			case <-time.After(90 * time.Second):
				t.Fatal("it is waited for for ever")
			}
		})
	}
}
