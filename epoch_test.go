package penstock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// gate makes the first step of a kind after arm wait until open is closed.
type gate struct {
	mu      sync.Mutex
	armed   string
	reached chan struct{}
	open    chan struct{}
}

func (g *gate) arm(step string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed, g.reached, g.open = step, make(chan struct{}), make(chan struct{})
}

func (g *gate) pass(step string) {
	g.mu.Lock()
	if g.armed != step {
		g.mu.Unlock()
		return
	}
	g.armed = ""
	reached, open := g.reached, g.open
	g.mu.Unlock()
	close(reached)
	<-open
}

// release lets the waiting step continue.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.open != nil {
		close(g.open)
		g.open = nil
	}
}

// gatedChunks are chunks whose appends and syncs pass a gate.
type gatedChunks struct {
	chunkIO
	g *gate
}

type gatedWriter struct {
	chunkWriter
	g *gate
}

func (c gatedChunks) NewWriter(g meta.ChunkGrant) chunkWriter {
	c.g.pass("chunk")
	return gatedWriter{c.chunkIO.NewWriter(g), c.g}
}

func (w gatedWriter) Append(ctx context.Context, p []byte) (uint64, error) {
	w.g.pass("append")
	return w.chunkWriter.Append(ctx, p)
}

func (w gatedWriter) Sync(ctx context.Context) error {
	err := w.chunkWriter.Sync(ctx)
	w.g.pass("sync")
	return err
}

// TestLostStaysLost: the session ends while a flush is under way, at each step of the
// flush. The flush's bytes are reported as lost; then they must not come back, neither
// below this client's writes in the new session nor above another client's writes.
func TestLostStaysLost(t *testing.T) {
	fill := func(c byte, n int) []byte { return bytes.Repeat([]byte{c}, n) }
	const small, tail, large = 3 * meta.InlineMax, 5000, 3 << 20
	for _, kind := range []string{"inline", "blocks", "tail", "large", "gap"} {
		for _, step := range []string{"chunk", "append", "sync", "commit"} {
			if kind == "inline" && step != "commit" {
				continue // goes to no chunk
			}
			if step == "chunk" && kind != "large" && kind != "gap" {
				continue // appends to an existing chunk
			}
			for _, elsewhere := range []bool{false, true} {
				t.Run(fmt.Sprint(kind, " ", step, " ", elsewhere), func(t *testing.T) {
					w := newWorld(t, meta.Policy{Replicas: 1})
					g := &gate{}
					w.before = func(op meta.Op) {
						if op.Code() == meta.OpWrite {
							g.pass("commit")
						}
					}
					c, v := open(t, w, Config{FlushEvery: time.Hour})
					c.chunks = gatedChunks{c.chunks, g}
					_, other := open(t, w, Config{FlushEvery: time.Hour})
					ino := create(t, v, "f")
					sync := func(v *Volume) {
						t.Helper()
						if err := v.Fsync(t.Context(), ino, false); err != nil {
							t.Fatal(err)
						}
					}
					want := fill('s', 100)
					if kind != "inline" {
						want = fill('s', small)
					}
					write(t, v, ino, want, 0)
					sync(v)
					lost := byte('l')
					at := int64(50)
					n := 20
					switch kind {
					case "blocks":
						n = small - 100
					case "tail": // the journal has an open end, except at the commit, which makes it
						for i := 0; i < 2 || i < 6 && step != "commit"; i++ {
							write(t, v, ino, fill('t', tail), int64(len(want)))
							want = append(want, fill('t', tail)...)
							sync(v)
						}
						at, n = int64(len(want)), tail
					case "large", "gap":
						at, n = int64(len(want)), large
					}
					defer g.release()
					g.arm(step)
					write(t, v, ino, fill(lost, n), at)
					flushed := make(chan error, 1)
					go func() { flushed <- v.Fsync(t.Context(), ino, false) }()
					select {
					case <-g.reached:
					case err := <-flushed:
						t.Fatalf("the flush ended, with %v, before its %s", err, step)
					case <-time.After(30 * time.Second):
						t.Fatalf("the flush never came to its %s", step)
					}
					c.sess.(*fakeSession).expire()
					if kind == "tail" && step == "sync" {
						// The owner finds these bytes when sealing the chunk: the bytes exist
						// from then on.
						want = append(want, fill(lost, n)...)
					}
					writer := v
					if elsewhere {
						writer = other
					} else if _, err := v.Write(t.Context(), &Call{}, ino, []byte("x"), 0, false, false); !errors.Is(err, meta.IO) {
						t.Errorf("write tells %v before the flush ended", err)
					}
					if got := contents(t, writer, ino); !bytes.Equal(got, want) {
						t.Fatalf("DATA: %d bytes after the session expired, want %d: %q", len(got), len(want), brief(got))
					}
					// Beside the lost bytes, after them, and over a part of them.
					offs := []int64{0, at + int64(n), at + int64(n)/2}
					if kind == "gap" { // only behind the lost bytes, in appends to a separate chunk
						offs = []int64{at + int64(n), at + int64(n) + tail, at + int64(n) + 2*tail, at + int64(n) + 3*tail}
						g.release()
						<-flushed
						flushed <- meta.E("fsync", meta.IO, "", nil)
						_ = v.Fsync(t.Context(), ino, false) // gets the error of the loss, unless an earlier call got the error
					}
					for _, off := range offs {
						p := fill('n', 10)
						if kind != "inline" && kind != "blocks" {
							p = fill('n', tail)
						}
						write(t, writer, ino, p, off)
						if end := int(off) + len(p); end > len(want) {
							want = append(want, make([]byte, end-len(want))...)
						}
						copy(want[off:], p)
						if elsewhere || kind == "gap" {
							sync(writer)
						}
					}
					g.release()
					if err := <-flushed; !errors.Is(err, meta.SessionExpired) && !errors.Is(err, meta.IO) {
						t.Errorf("the fsync whose bytes are lost tells %v", err)
					}
					if !elsewhere {
						_ = v.Fsync(t.Context(), ino, false) // gets the error of the loss, unless an earlier call got the error
					}
					sync(writer)
					for _, reader := range []*Volume{v, other} {
						if got := contents(t, reader, ino); !bytes.Equal(got, want) {
							t.Errorf("DATA: %d bytes, want %d: %q, want %q", len(got), len(want), brief(got), brief(want))
						}
					}
					w.mu.Lock()
					w.before = nil
					w.mu.Unlock()
					_, late := open(t, w, Config{})
					if got := contents(t, late, ino); !bytes.Equal(got, want) {
						t.Errorf("DATA: the owner has %d bytes, want %d: %q, want %q", len(got), len(want), brief(got), brief(want))
					}
					w.check()
				})
			}
		}
	}
}

// TestLostNewVersion: a file is written and closed, the session ends, and then the file
// is renamed over a durable file: the rename fails, once, and the old version stays.
func TestLostNewVersion(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: time.Hour})
	old := create(t, v, "current")
	write(t, v, old, []byte("old"), 0)
	if err := v.Fsync(t.Context(), old, false); err != nil {
		t.Fatal(err)
	}
	tmp := create(t, v, "tmp")
	write(t, v, tmp, []byte("new"), 0)
	if err := v.Flush(t.Context(), &Call{}, tmp, 0); err != nil {
		t.Fatal(err)
	}
	v.Release(t.Context(), tmp, rdwr)
	c.sess.(*fakeSession).expire()
	rename := func() error {
		return v.Rename(t.Context(), &Call{}, meta.RootIno, "tmp", meta.RootIno, "current", 0)
	}
	if err := rename(); !errors.Is(err, meta.IO) {
		t.Errorf("rename tells %v", err)
	}
	if got := contents(t, v, old); string(got) != "old" {
		t.Errorf("DATA: the old version: %q", got)
	}
	if err := rename(); err != nil {
		t.Error(err)
	}
	w.check()
}

// brief is a run-length encoding for people.
func brief(p []byte) string {
	var s []byte
	for len(p) > 0 {
		n := 1
		for n < len(p) && p[n] == p[0] {
			n++
		}
		s = fmt.Appendf(s, "%d*%c ", n, max(p[0], '-'))
		p = p[n:]
	}
	return string(s)
}

// slowKernel needs time to forget a file.
type slowKernel struct {
	*kernel
	asked, done chan struct{}
}

func (k slowKernel) InvalData(v meta.VolumeID, ino meta.Ino, off, n int64) {
	close(k.asked)
	<-k.done
	k.kernel.InvalData(v, ino, off, n)
}

// TestExpiryForgetsPages: between the end of a session and the moment when the kernel has
// forgotten a file's pages, an open makes the kernel forget the pages, and nothing more
// may be cached.
func TestExpiryForgetsPages(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	k := slowKernel{newKernel(), make(chan struct{}), make(chan struct{})}
	c, v := open(t, w, Config{Notify: k})
	ino := create(t, v, "f")
	write(t, v, ino, []byte("bytes"), 0)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	look := func() OpenInfo {
		t.Helper()
		info, err := v.Open(t.Context(), &Call{}, ino, 0)
		if err != nil {
			t.Fatal(err)
		}
		v.Release(t.Context(), ino, 0)
		return info
	}
	if info := look(); !info.KeepCache {
		t.Fatal("under a lease nothing is cached")
	}
	c.sess.(*fakeSession).expire()
	<-k.asked
	if info := look(); info.KeepCache || info.Entry.Valid != 0 {
		t.Errorf("an open that comes before the kernel forgot: %+v", info)
	}
	close(k.done)
	for end := time.Now().Add(30 * time.Second); !look().KeepCache; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("nothing is cached any more")
		}
	}
	w.check()
}
