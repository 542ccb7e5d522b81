package bulk

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/program"
)

// A file is read through a mount over TCP, the page cache of the mount cold: what
// each process takes of the processor for a gigabyte, and the reader.
func TestMountRead(t *testing.T) {
	n, rounds := size()
	r := program.NewRig(t)
	r.Run("meta", "--dir", filepath.Join(r.Dir, "m"))
	r.Until("the metadata server answers", func() error { _, err := r.Ctl("volume", "show", "root"); return err })
	chunks := r.Run("chunkserver", "--data", filepath.Join(r.Dir, "c"), "--cluster", r.Addr, "--insecure",
		"--listen", "127.0.0.1:0", "--local-clients=false", "--topology", "/dc/rack/there")
	at := filepath.Join(r.Dir, "at")
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	serve := func() *spawn.Process {
		p := r.Run("mount", "--cluster", r.Addr, "--insecure", "--topology", "/dc/rack/here", "/", at)
		t.Cleanup(func() { p.Kill(); spawn.Unmount(at) })
		r.Until("mounted", func() error {
			if !spawn.Mounted(at) {
				return errors.New("not yet")
			}
			return nil
		})
		return p
	}
	name := filepath.Join(at, "f")
	mount := serve()
	r.Until("written", func() error { return os.WriteFile(name, bytes.Repeat(block, n/len(block)), 0o644) })
	// Only a sealed chunk is read ahead: the writer seals the chunk at the latest when the writer
	// ends.
	if err := spawn.Unmount(at); err != nil {
		t.Fatal(err)
	}
	<-mount.Done()
	mount = serve()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var servers, daemon, all []float64
	var speed []float64
	buf := make([]byte, 1<<20)
	for range rounds {
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		before := [...]time.Duration{cpu(t, chunks.PID()), cpu(t, mount.PID()), cpu(t, os.Getpid())}
		begun := time.Now()
		for off := 0; off < n; off += len(buf) {
			if _, err := io.ReadFull(f, buf); err != nil {
				t.Fatal(err)
			}
			if off == 0 && !bytes.Equal(buf, block) {
				t.Fatal("DATA: other bytes than were written")
			}
		}
		speed = append(speed, float64(n)/1e6/time.Since(begun).Seconds())
		gb := float64(n) / 1e9
		a, b, c := (cpu(t, chunks.PID())-before[0]).Seconds()/gb, (cpu(t, mount.PID())-before[1]).Seconds()/gb, (cpu(t, os.Getpid())-before[2]).Seconds()/gb
		servers, daemon, all = append(servers, a), append(daemon, b), append(all, a+b+c)
	}
	t.Logf("through a mount: %.0f MB/s; CPU-s/GB: chunk server %.2f, mount %.2f, all with the reader %.2f", median(speed), median(servers), median(daemon), median(all))
	if median(daemon) < 0.01 || median(servers) < 0.01 {
		t.Error("the bytes did not come over the network, or not through the mount")
	}
}

func cpu(t *testing.T, pid int) time.Duration {
	t.Helper()
	d, err := child.CPU(pid)
	if err != nil {
		t.Fatal(err)
	}
	return d
}
