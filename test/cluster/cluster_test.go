package cluster

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/test/load"
	"penstock.io/penstock/test/program"
)

var seed = flag.Uint64("seed", 606, "of the random choices; 0 takes the clock")

// etcd is the release in go.mod, built from etcd's own main package.
var etcd string

func TestMain(m *testing.M) {
	if env := os.Getenv(intruderEnv); env != "" {
		os.Exit(intrude(env))
	}
	os.Exit(program.InOwnMounts(func() int { return run(m) }))
}

// intrude is the work of this program as an intruder.
func intrude(env string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	i, err := IntruderFrom(env)
	if err == nil {
		err = i.Run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func run(m *testing.M) int {
	flag.Parse()
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	dir, err := os.MkdirTemp("", "penstock-cluster-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	etcd = filepath.Join(dir, "etcd")
	if err := program.Build(etcd, "go.etcd.io/etcd/server/v3"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return program.Main(m)
}

// start brings a cluster up; the test's end takes the cluster away. The logs of a failed test
// stay.
func start(t *testing.T, cfg Config) *Cluster {
	t.Helper()
	if err := sweep(scratch); err != nil {
		t.Error(err)
	}
	dir, held, err := claim()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Binaries, cfg.Dir = Binaries{Penstock: program.Path, Etcd: etcd}, dir
	began := time.Now()
	c, err := New(t.Context(), cfg)
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			if kept, err := os.MkdirTemp("", "penstock-cluster-log-"); err == nil {
				out, err := exec.Command("cp", "-r", filepath.Join(dir, "log"), kept).CombinedOutput()
				t.Logf("seed %d; logs of the processes: %s (%v %s)", *seed, kept, err, out)
			}
		}
		if err := errors.Join(os.RemoveAll(dir), held.Close()); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("up after %v", time.Since(began).Round(time.Millisecond))
	return c
}

// TestReadOnAfterServerDies: bytes that one node wrote with three copies are read on another
// node, also while a chunk server is dead, and after the server came back.
func TestReadOnAfterServerDies(t *testing.T) {
	c := start(t, Config{Racks: 2, Metas: 1, ChunkServers: 4, Mounts: 2})
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := c.Penstock(t.Context(), "volume", "create", "data", "--force", "--attach", "/data", "--replicas", "3")
	check(err)
	const files, size = 4, 3 << 20
	name := func(m *Mount, i int) string { return filepath.Join(m.Path, "data", fmt.Sprint("file", i)) }
	writer, reader := c.Mounts[0], c.Mounts[1]
	write := func(i int) {
		t.Helper()
		b := make([]byte, size)
		load.Pattern(b, uint64(i), 0)
		f, err := os.Create(name(writer, i))
		check(err)
		_, err = f.Write(b)
		check(err)
		check(f.Sync())
		check(f.Close())
	}
	verify := func(i int) {
		t.Helper()
		b, err := os.ReadFile(name(reader, i))
		check(err)
		if len(b) != size {
			t.Fatalf("DATA: file %d has %d bytes", i, len(b))
		}
		check(load.CheckPattern(b, uint64(i), 0))
	}
	for i := range files {
		write(i)
	}
	for i := range files {
		verify(i)
	}
	out, err := c.Penstock(t.Context(), "locate", name(reader, 0), "--output", "json")
	check(err)
	t.Logf("%s", bytes.TrimSpace(out))
	c.Chunks[0].Kill()
	check(exec.Command("sh", "-c", "echo 1 > /proc/sys/vm/drop_caches").Run())
	for i := range files {
		verify(i)
	}
	began := time.Now()
	write(files)
	t.Logf("writing and syncing %d bytes with a dead chunk server took %v", size, time.Since(began).Round(time.Millisecond))
	verify(files)
	check(c.Chunks[0].Start())
	check(c.Ready(t.Context(), c.Chunks[0]))
	for i := range files + 1 {
		verify(i)
	}
	check(c.Fsck(t.Context(), time.Minute))
	check(c.Stop())
}
