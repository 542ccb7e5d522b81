// Package bulk measures the data path against plain sockets, in the same run and turn by turn:
// reading a chunk over one TCP connection against sendfile of the same file, and writing three
// replicas, fanned out or chained, against three plain streams that are written to disk. Servers
// are processes of their own; processor time is that of all processes.
package bulk

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver/server"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/child"
)

var testKey = meta.CapKey{ID: 1, Secret: bytes.Repeat([]byte{3}, 32)}

// role describes the work of a child process.
type role struct {
	Kind  string // chunks, sendfile, sink, chain
	ID    meta.ServerID
	Dir   string
	Creds string   // chunks: the directory of the certificate; empty: none, and no TLS
	File  string   // sendfile: the file to send
	Next  []string // chain: where to pass on to
}

// Run serves until the parent is gone.
func (c role) Run() error {
	quiet := slog.New(slog.DiscardHandler)
	creds := peer.Insecure()
	if c.Creds != "" {
		var err error
		if creds, err = peer.Load(c.Creds, quiet); err != nil {
			return err
		}
	}
	ln, err := peer.ListenTicketed("127.0.0.1:0", creds)
	if err != nil {
		return err
	}
	addr := ln.Addr().String()
	switch c.Kind {
	case "chunks", "chain":
		d := store.DirDisk(c.Dir)
		if err := store.Init(d, store.Options{}); err != nil {
			return err
		}
		st, err := store.Open(d, store.Options{Logger: quiet})
		if err != nil {
			return err
		}
		if c.Kind == "chain" {
			go c.chain(ln, st)
		} else {
			s := server.New(server.Config{ID: c.ID, Addr: addr, Keys: []meta.CapKey{testKey}, Logger: quiet}, st)
			go s.Serve(context.Background(), ln)
		}
	case "sendfile", "sink":
		ln.Close()
		if ln, err = net.Listen("tcp", addr); err != nil {
			return err
		}
		go func() {
			for n := 0; ; n++ {
				nc, err := ln.Accept()
				if err != nil {
					return
				}
				go c.plain(nc.(*net.TCPConn), n)
			}
		}()
	}
	child.Ready(addr)
	child.Orphaned()
	return nil
}

// plain sends the file, or writes incoming bytes to a file and syncs the file.
func (c role) plain(nc *net.TCPConn, n int) {
	defer nc.Close()
	cubic(nc)
	if c.Kind == "sendfile" {
		f, err := os.Open(c.File)
		if err != nil {
			return
		}
		defer f.Close()
		_, _ = io.Copy(nc, f) // sendfile(2)
		return
	}
	f, err := os.Create(filepath.Join(c.Dir, fmt.Sprint("sink", n)))
	if err != nil {
		return
	}
	defer os.Remove(f.Name())
	defer f.Close()
	buf := make([]byte, 512<<10)
	for {
		k, err := io.ReadFull(nc, buf)
		if _, werr := f.Write(buf[:k]); werr != nil {
			return
		}
		if err != nil {
			break
		}
	}
	if unix.Fdatasync(int(f.Fd())) == nil {
		_, _ = nc.Write([]byte{1})
	}
}

func cubic(nc *net.TCPConn) {
	raw, err := nc.SyscallConn()
	if err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
		})
	}
}

// figure is the throughput and cost of one way.
type figure struct {
	name string
	mbs  []float64 // MB/s of each round
	cpu  []float64 // s/GB of each round
}

// measure times a transfer of n bytes, with the processor time of this process and others.
func (f *figure) measure(n int, others []*child.Process, fn func() error) error {
	used := func() (time.Duration, error) {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			return 0, err
		}
		d := time.Duration(u.Utime.Nano() + u.Stime.Nano())
		for _, p := range others {
			more, err := p.CPU()
			if err != nil {
				return 0, err
			}
			d += more
		}
		return d, nil
	}
	before, err := used()
	if err != nil {
		return err
	}
	begun := time.Now()
	if err := fn(); err != nil {
		return err
	}
	took := time.Since(begun)
	after, err := used()
	f.mbs = append(f.mbs, float64(n)/1e6/took.Seconds())
	f.cpu = append(f.cpu, (after-before).Seconds()*1e9/float64(n))
	return err
}

func median(l []float64) float64 {
	l = slices.Sorted(slices.Values(l))
	return l[len(l)/2]
}

// ratios are the medians of the quotients round by round: both sides had the
// same machine.
func ratios(a, b []float64) float64 {
	q := make([]float64, len(a))
	for i := range a {
		q[i] = a[i] / b[i]
	}
	return median(q)
}

// floor is the share of plain sockets' throughput below which something is
// broken, however busy the machine: the goals, 0.8 and 0.6, are for a quiet one.
const floor = 0.2

func report(t testing.TB, base *figure, others ...*figure) {
	t.Helper()
	t.Logf("%-28s %7.0f MB/s %6.2f CPU-s/GB", base.name, median(base.mbs), median(base.cpu))
	for _, f := range others {
		if q := ratios(f.mbs, base.mbs); q < floor {
			t.Errorf("%s: %.2f of %s", f.name, q, base.name)
		}
		t.Logf("%-28s %7.0f MB/s %6.2f CPU-s/GB   throughput %.2f, CPU %.2f of that", f.name, median(f.mbs), median(f.cpu), ratios(f.mbs, base.mbs), ratios(f.cpu, base.cpu))
	}
}
