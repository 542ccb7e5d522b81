package embedded

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

const database = "member/snap/db"

// overwrite damages a part of a file.
func overwrite(t *testing.T, path string, at, n int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(bytes.Repeat([]byte("x"), n), int64(at))
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

func nothing(string) error       { return nil }
func folderOf(path string) error { return os.Mkdir(path, 0o700) }
func fileOf(path string) error   { return os.WriteFile(path, []byte("x"), 0o600) }

// replace puts something else in the place of a folder.
func replace(t *testing.T, path string, by func(path string) error) {
	t.Helper()
	if err := errors.Join(os.RemoveAll(path), by(path)); err != nil {
		t.Fatal(err)
	}
}

// A folder that does not open is an error that names the folder, and no wait for ever: neither
// for files that another process has open, nor once the caller waits no more.
func TestFolderThatDoesNotOpen(t *testing.T) {
	t.Parallel()
	made := func(t *testing.T) string {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "etcd")
		s, err := Start(Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Client().Put(t.Context(), "k", "acknowledged"); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	locked := func(t *testing.T, dir string) {
		t.Helper()
		f, err := os.OpenFile(filepath.Join(dir, database), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() }) // the abandoned folder opens, and is closed
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
			db := filepath.Join(dir, database)
			if err := errors.Join(os.Remove(db), os.Mkdir(db, 0o700)); err != nil {
				t.Fatal(err)
			}
		}, false, meta.Corrupt},
		{"the database is cut", func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, database), 2*4096); err != nil {
				t.Fatal(err)
			}
		}, false, meta.Corrupt},
		{"the database's head is damaged", func(t *testing.T, dir string) { overwrite(t, filepath.Join(dir, database), 0, 2*4096) }, false, meta.Corrupt},
		{"pages of the database are damaged", func(t *testing.T, dir string) { overwrite(t, filepath.Join(dir, database), 2*4096, 14*4096) }, false, meta.Corrupt},
		{"the database is empty, and the journal does not go back to the beginning", func(t *testing.T, dir string) {
			overwrite(t, filepath.Join(dir, "member", "wal", "0000000000000000-0000000000000000.wal"), 8, 200)
			if err := os.Truncate(filepath.Join(dir, database), 0); err != nil {
				t.Fatal(err)
			}
		}, false, meta.IO},
		{"the journal is damaged", func(t *testing.T, dir string) {
			overwrite(t, filepath.Join(dir, "member", "wal", "0000000000000000-0000000000000000.wal"), 8, 200)
		}, false, meta.IO},
		{"the journal is gone", func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "member", "wal"), nothing) }, false, meta.Corrupt},
		{"the journal is an empty folder", func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "member", "wal"), folderOf) }, false, meta.Corrupt},
		{"the journal is a file", func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "member", "wal"), fileOf) }, false, meta.Corrupt},
		{"the database's folder is a file", func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "member", "snap"), fileOf) }, false, meta.Corrupt},
		{"all is a file", func(t *testing.T, dir string) { replace(t, filepath.Join(dir, "member"), fileOf) }, false, meta.Corrupt},
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

// The remains of an interrupted first start are no cluster: the next start makes a cluster. A
// missing or empty database is made again from a journal that goes back to the beginning.
func TestFolderThatHeals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		spoil func(t *testing.T, dir string)
		want  string // the result of reading
	}{
		{"no database", func(t *testing.T, dir string) {
			if err := os.Remove(filepath.Join(dir, database)); err != nil {
				t.Fatal(err)
			}
		}, "acknowledged"},
		{"an empty database", func(t *testing.T, dir string) {
			if err := os.Truncate(filepath.Join(dir, database), 0); err != nil {
				t.Fatal(err)
			}
		}, "acknowledged"},
		{"a database without anything in it, no journal", func(t *testing.T, dir string) {
			replace(t, filepath.Join(dir, "member", "wal"), nothing)
			replace(t, filepath.Join(dir, database), nothing)
			db, err := bolt.Open(filepath.Join(dir, database), 0o600, nil)
			if err == nil {
				err = errors.Join(db.Update(func(tx *bolt.Tx) error { _, err := tx.CreateBucket([]byte("meta")); return err }), db.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "etcd")
			s, err := Start(Config{Dir: dir})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.Client().Put(t.Context(), "k", "acknowledged"); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			c.spoil(t, dir)
			if s, err = Start(Config{Dir: dir}); err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			got := ""
			r, err := s.Client().Get(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			for _, kv := range r.Kvs {
				got = string(kv.Value)
			}
			if got != c.want {
				t.Errorf("DATA: it holds %q, want %q", got, c.want)
			}
		})
	}
}
