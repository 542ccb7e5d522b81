package embedded

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// folder gives a short path: a socket's takes at most 107 bytes.
func folder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestStartStopStart(t *testing.T) {
	dir := folder(t)
	for i := range 3 {
		began := time.Now()
		var log strings.Builder // slog's handler locks each write
		s, err := Start(Config{Dir: dir, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		up := time.Since(began)
		if i == 0 {
			if _, err := s.Client().Put(t.Context(), "k", "v"); err != nil {
				t.Fatal(err)
			}
		}
		r, err := s.Client().Get(t.Context(), "k")
		if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != "v" {
			t.Fatalf("run %d: %v %v", i, r, err)
		}
		answered := time.Since(began)
		other, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}})
		if err != nil {
			t.Fatal(err)
		}
		if r, err := other.Get(t.Context(), "k"); err != nil || len(r.Kvs) != 1 {
			t.Fatalf("by the socket: %v %v", r, err)
		}
		other.Close()
		for _, name := range []string{"c", "p"} {
			fi, err := os.Stat(filepath.Join(dir, name))
			if err != nil || fi.Mode().Perm() != 0o600 {
				t.Errorf("socket %s: %v %v", name, fi, err)
			}
		}
		stop := time.Now()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if log.Len() > 0 {
			t.Errorf("run %d: a server that starts and stops in order logs:\n%s", i, log.String())
		}
		t.Logf("run %d: ready after %v, answered after %v, stopped in %v", i, up, answered, time.Since(stop))
	}
}

func TestPathTooLong(t *testing.T) {
	_, err := Start(Config{Dir: filepath.Join(folder(t), strings.Repeat("x", 100))})
	if !errors.Is(err, meta.Invalid) {
		t.Fatal(err)
	}
}

func TestLockDir(t *testing.T) {
	dir := filepath.Join(folder(t), "data")
	l, err := LockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	_, err = LockDir(dir)
	if !errors.Is(err, meta.DirectoryInUse) || !strings.Contains(err.Error(), "process ") {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l, err = LockDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
