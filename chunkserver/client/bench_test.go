package client

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/server"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// TestMain runs the test binary as a chunk server when a benchmark starts it as a
// separate process.
func TestMain(m *testing.M) {
	if dir := os.Getenv("PENSTOCK_TEST_SERVER"); dir != "" {
		f := &fixture{t: panics{}, key: testKey, servers: map[meta.ServerID]*server.Server{},
			infos: map[meta.ServerID]meta.ServerInfo{}, dirs: map[meta.ServerID]string{1: dir}}
		f.start(1, "unix")
		_, _ = io.Copy(io.Discard, os.Stdin) // until the parent ends
		_ = f.servers[1].Close()
		return
	}
	os.Exit(m.Run())
}

// panics has the methods of testing.TB that fixture.start needs.
type panics struct{ testing.TB }

func (panics) Helper()           {}
func (panics) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

// newRemote returns a fixture with server 1 as a separate process.
func newRemote(b *testing.B, cfg Config) *fixture {
	f := newFixture(b, "unix", 0, cfg)
	dir := b.TempDir()
	if err := store.Init(store.DirDisk(dir), store.Options{}); err != nil {
		b.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "PENSTOCK_TEST_SERVER="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { in.Close(); _ = cmd.Wait() })
	f.infos[1] = meta.ServerInfo{ID: 1, Addr: "unix:" + filepath.Join(dir, "sock"), Host: host}
	for range 500 {
		if _, err := os.Stat(filepath.Join(dir, "sock")); err == nil {
			return f
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.Fatal("the server doesn't start")
	return nil
}

// cpu reports the processor seconds of the whole process for a GB (10^9 bytes) of a
// benchmark with n bytes an iteration.
func cpu(b *testing.B, n int) func() {
	var a syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &a)
	return func() {
		var z syscall.Rusage
		_ = syscall.Getrusage(syscall.RUSAGE_SELF, &z)
		ns := (z.Utime.Nano() - a.Utime.Nano()) + (z.Stime.Nano() - a.Stime.Nano())
		b.ReportMetric(float64(ns)/float64(b.N)/float64(n), "cpu-s/GB")
		b.ReportMetric(float64(ns)/float64(b.N)/1000, "cpu-us/op")
	}
}

func bareFile(b *testing.B, size int) *os.File {
	f, err := os.Create(filepath.Join(b.TempDir(), "f"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { f.Close() })
	if size > 0 {
		if _, err := f.Write(make([]byte, size)); err != nil {
			b.Fatal(err)
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
	}
	return f
}

// BenchmarkSyncMedian measures appends of 4 KiB with sync: bare, on a store, and through a
// client, in turn, so that other work of the machine slows all alike. The results are medians.
func BenchmarkSyncMedian(b *testing.B) {
	const size = 64 << 20
	bare := bareFile(b, size)
	dir := b.TempDir()
	if err := store.Init(store.DirDisk(dir), store.Options{}); err != nil {
		b.Fatal(err)
	}
	st, err := store.Open(store.DirDisk(dir), store.Options{Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	defer st.Close()
	f := newRemote(b, Config{})
	g := f.grant()
	g.Servers = []meta.ServerID{1}
	w := f.NewWriter(g)
	defer w.Close()
	p := random(4096, 1)
	crc := chunkserver.CRC(p)
	fd := newFixture(b, "unix", 1, Config{Direct: nobody})
	wd := fd.NewWriter(fd.grant())
	defer wd.Close()
	times := map[string][]time.Duration{}
	run := func(name string, fn func() error) {
		start := time.Now()
		if err := fn(); err != nil {
			b.Fatal(err)
		}
		times[name] = append(times[name], time.Since(start))
	}
	for i := uint64(0); b.Loop(); i++ {
		run("bare", func() error {
			if _, err := bare.WriteAt(p, int64(i*4096%size)); err != nil {
				return err
			}
			return unix.Fdatasync(int(bare.Fd()))
		})
		run("store", func() error {
			if err := st.Append(b.Context(), g.ID, g.Fence, i*4096, p, crc); err != nil {
				return err
			}
			_, err := st.Sync(b.Context(), g.ID, i*4096+4096)
			return err
		})
		run("direct", func() error {
			if _, err := wd.Append(b.Context(), p); err != nil {
				return err
			}
			return wd.Sync(b.Context())
		})
		run("client", func() error {
			if _, err := w.Append(b.Context(), p); err != nil {
				return err
			}
			return w.Sync(b.Context())
		})
	}
	for name, t := range times {
		slices.Sort(t)
		b.ReportMetric(float64(t[len(t)/2].Nanoseconds())/1000, name+"-us")
	}
}

// BenchmarkSyncBare is the bare loop with which appends with sync are compared.
func BenchmarkSyncBare(b *testing.B) {
	const size = 64 << 20
	f := bareFile(b, size)
	p := random(4096, 1)
	b.SetBytes(4096)
	defer cpu(b, 4096)()
	for i := 0; b.Loop(); i++ {
		if _, err := f.WriteAt(p, int64(i*4096%size)); err != nil {
			b.Fatal(err)
		}
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSyncStore(b *testing.B) {
	dir := b.TempDir()
	if err := store.Init(store.DirDisk(dir), store.Options{}); err != nil {
		b.Fatal(err)
	}
	st, err := store.Open(store.DirDisk(dir), store.Options{Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	defer st.Close()
	p := random(4096, 1)
	crc := chunkserver.CRC(p)
	id := meta.ChunkID{Volume: 1, Term: 1, Counter: 1}
	b.SetBytes(4096)
	defer cpu(b, 4096)()
	for i := uint64(0); b.Loop(); i++ {
		if err := st.Append(b.Context(), id, meta.Fence{Term: 1}, i*4096, p, crc); err != nil {
			b.Fatal(err)
		}
		if _, err := st.Sync(b.Context(), id, i*4096+4096); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkSyncClient(b *testing.B) {
	f := newFixture(b, "unix", 1, Config{})
	g := f.grant()
	g.MaxLen = 0
	w := f.NewWriter(g)
	defer w.Close()
	p := random(4096, 1)
	b.SetBytes(4096)
	defer cpu(b, 4096)()
	for b.Loop() {
		if _, err := w.Append(b.Context(), p); err != nil {
			b.Fatal(err)
		}
		if err := w.Sync(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

const seqTotal = 512 << 20

// BenchmarkSequentialBare writes half a gigabyte in megabytes, then syncs; an iteration is the
// whole.
func BenchmarkSequentialBare(b *testing.B) {
	p := random(1<<20, 1)
	b.SetBytes(seqTotal)
	defer cpu(b, seqTotal)()
	for b.Loop() {
		f := bareFile(b, 0)
		for i := range seqTotal >> 20 {
			if _, err := f.WriteAt(p, int64(i)<<20); err != nil {
				b.Fatal(err)
			}
		}
		if err := f.Sync(); err != nil {
			b.Fatal(err)
		}
		f.Close()
		os.Remove(f.Name())
	}
}

func BenchmarkSequentialClient(b *testing.B) {
	for _, form := range forms {
		if form.replicas > 1 {
			continue
		}
		b.Run(form.name, func(b *testing.B) {
			f := newFixture(b, form.network, form.replicas, form.cfg)
			p := random(1<<20, 1)
			b.SetBytes(seqTotal)
			defer cpu(b, seqTotal)()
			for b.Loop() {
				g := f.grant()
				w := f.NewWriter(g)
				for range seqTotal >> 20 {
					if _, err := w.Append(b.Context(), p); err != nil {
						b.Fatal(err)
					}
				}
				if err := w.Sync(b.Context()); err != nil {
					b.Fatal(err)
				}
				w.Close()
				f.servers[1].Order(b.Context(), meta.Order{Kind: meta.OrderDelete, Chunk: g.ID, Fence: g.Fence})
			}
		})
	}
}

// BenchmarkAppendClient appends into the page cache only: the cost of the path itself.
func BenchmarkAppendClient(b *testing.B) {
	for _, form := range forms {
		if form.replicas > 1 {
			continue
		}
		b.Run(form.name, func(b *testing.B) {
			f := newFixture(b, form.network, form.replicas, form.cfg)
			p := random(1<<20, 1)
			b.SetBytes(1 << 20)
			var g meta.ChunkGrant
			var w *Writer
			stop := cpu(b, 1<<20)
			for i := 0; b.Loop(); i++ {
				if i%64 == 0 {
					if w != nil {
						w.Wait(b.Context())
						w.Close()
						f.servers[1].Order(b.Context(), meta.Order{Kind: meta.OrderDelete, Chunk: g.ID, Fence: g.Fence})
					}
					g = f.grant()
					w = f.NewWriter(g)
				}
				if _, err := w.Append(b.Context(), p); err != nil {
					b.Fatal(err)
				}
			}
			stop()
		})
	}
}

func BenchmarkRead(b *testing.B) {
	const size = 64 << 20
	data := random(size, 3)
	bare := bareFile(b, 0)
	if _, err := bare.Write(data); err != nil {
		b.Fatal(err)
	}
	for _, n := range []int{4 << 10, 128 << 10, 1 << 20} {
		p := make([]byte, n)
		name := map[int]string{4 << 10: "4K", 128 << 10: "128K", 1 << 20: "1M"}[n]
		b.Run("bare/"+name, func(b *testing.B) {
			b.SetBytes(int64(n))
			defer cpu(b, n)()
			for i := 0; b.Loop(); i++ {
				if _, err := unix.Pread(int(bare.Fd()), p, int64(i*n%size)); err != nil {
					b.Fatal(err)
				}
			}
		})
		for _, network := range []string{"unix", "tcp"} {
			b.Run(network+"/"+name, func(b *testing.B) {
				f := newFixture(b, network, 1, Config{Congestion: "cubic"})
				g := f.grant()
				w := f.NewWriter(g)
				if _, err := w.Append(b.Context(), data); err != nil {
					b.Fatal(err)
				}
				if err := w.Wait(b.Context()); err != nil {
					b.Fatal(err)
				}
				w.Close()
				pl := f.seal(g, size)
				b.SetBytes(int64(n))
				defer cpu(b, n)()
				for i := 0; b.Loop(); i++ {
					if err := f.ReadAt(b.Context(), pl, p, uint64(i*n%size)); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
