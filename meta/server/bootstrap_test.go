package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/journal/etcd"
)

func processorTime(t testing.TB) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// figures makes n files and measures the bytes in etcd for each file, the cost of a follower's
// catching up, and the time that a server with nothing needs to load the volume from the
// checkpoint and from the journal.
func figures(t *testing.T, n int) {
	dir := shortDir(t)
	s := startEtcd(t, dir)
	t.Cleanup(func() { s.Close() })
	c := newCrew(t, 2, s.Client())
	first, second := c.hands[0], c.hands[1]
	o := first.own(1)
	second.at(1, 1)
	second.stop()
	p := first.dial("a")
	began, cpu := time.Now(), processorTime(t)
	const lot = 50
	done := make(chan error, lot)
	for i := range lot {
		go func() {
			var err error
			for k := i; k < n && err == nil; k += lot {
				_, err = p.Do(t.Context(), 1, meta.OpID{}, newFile(fmt.Sprint("file-", k)), meta.LeaseNone)
			}
			done <- err
		}()
	}
	for range lot {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d files in %v, %v of processor each, client, owner and etcd together", n, time.Since(began).Round(time.Millisecond), ((processorTime(t) - cpu) / time.Duration(n)).Round(100*time.Nanosecond))
	var entries int
	var bytes int64
	if err := etcd.ReadLog(c.cli, "/penstock/default", 1, nil).Read(t.Context(), journal.Position{}, func(e journal.Entry) error {
		entries++
		bytes += int64(len(e.Payload) + journal.HeaderSize)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d entries of %d bytes: %d bytes in etcd a file", entries, bytes/int64(entries), bytes/int64(n))

	began, cpu = time.Now(), processorTime(t)
	second.start()
	second.at(1, o.durableNow())
	t.Logf("a follower that was away caught up in %v, %v of processor a file, etcd's reading included", time.Since(began).Round(time.Millisecond), ((processorTime(t) - cpu) / time.Duration(n)).Round(10*time.Nanosecond))

	began = time.Now()
	if err := o.checkpoints.checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("checkpoint in %v", time.Since(began).Round(time.Millisecond))
	second.stop()
	if err := os.RemoveAll(filepath.Join(second.dir, "volume-00000001")); err != nil {
		t.Fatal(err)
	}
	began, cpu = time.Now(), processorTime(t)
	second.start()
	second.at(1, o.durableNow())
	t.Logf("a server with nothing follows after %v, %v of processor", time.Since(began).Round(time.Millisecond), (processorTime(t) - cpu).Round(time.Millisecond))
}

// The figures of docs/parts/journal.md; PENSTOCK_FIGURES says how many files.
func TestFollowFigures(t *testing.T) {
	t.Parallel()
	n := 5000
	if v := os.Getenv("PENSTOCK_FIGURES"); v != "" {
		if _, err := fmt.Sscan(v, &n); err != nil {
			t.Fatal(err)
		}
	}
	figures(t, n)
}

// A server that begins with nothing is stopped at each step of loading: every time, the server
// reaches the same state.
func TestBootstrapInterrupted(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	s := startEtcd(t, dir)
	t.Cleanup(func() { s.Close() })
	c := newCrew(t, 1, s.Client())
	o := c.hands[0].own(1)
	p := c.hands[0].dial("a")
	p.files(t, "a", 500)
	if err := o.checkpoints.checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.files(t, "b", 50)
	shared := c.blob
	for step := 0; ; step++ {
		cut := &cutBlob{Blob: shared, left: step * 3}
		c.blob = cut
		h := &hand{c: c, name: "m1", dir: filepath.Join(c.dir, "m1")}
		h.start()
		over := time.Now().Add(time.Minute)
		for {
			at, warm := h.srv.standbys.position(1)
			if cut.cut() || warm && at.Seq >= o.durableNow() || time.Now().After(over) {
				break
			}
			time.Sleep(time.Millisecond)
		}
		was := cut.cut()
		if was {
			h.crash()
			continue
		}
		c.blob = shared
		c.hands = append(c.hands, h)
		h.at(1, o.durableNow())
		t.Logf("interrupted %d times", step)
		if step < 3 {
			t.Fatal("it was hardly interrupted")
		}
		break
	}
	leave, cancel := closingContext()
	defer cancel()
	p.Session.Close(leave)
	c.same(1)
}

// cutBlob serves some reads, and then no more, as if the process were killed.
type cutBlob struct {
	meta.Blob
	mu   sync.Mutex
	left int
	over bool
}

func (c *cutBlob) cut() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

func (c *cutBlob) step() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left == 0 {
		c.over = true
		return meta.E("read blob", meta.Unavailable, "", errors.New("cut"))
	}
	c.left--
	return nil
}

func (c *cutBlob) Get(ctx context.Context, ref meta.BlobRef) (io.ReadCloser, error) {
	r, err := c.Blob.Get(ctx, ref)
	if err != nil {
		return nil, err
	}
	return &cutReader{r, c}, nil
}

type cutReader struct {
	io.ReadCloser
	c *cutBlob
}

func (r *cutReader) Read(p []byte) (int, error) {
	if err := r.c.step(); err != nil {
		return 0, err
	}
	return r.ReadCloser.Read(p[:min(len(p), 8<<10)])
}

func closingContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), time.Second)
}
