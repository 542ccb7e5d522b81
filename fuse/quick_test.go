package fuse

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// quickMem is a memVolume that has everything in memory, unless slow.
type quickMem struct {
	*memVolume
	slow atomic.Bool
}

type quickTree struct{ v *quickMem }

func (t quickTree) VolumeByID(ctx context.Context, id meta.VolumeID) (Volume, error) {
	if id == t.v.id {
		return t.v, nil
	}
	return t.v.tree.VolumeByID(ctx, id)
}

func (v *quickMem) LookupCached(parent meta.Ino, name string) (penstock.Entry, bool) {
	if v.slow.Load() {
		return penstock.Entry{}, false
	}
	e, err := v.Lookup(context.Background(), parent, name)
	return e, err == nil && e.Volume == v.id
}

func (v *quickMem) GetAttrCached(ino meta.Ino) (penstock.Entry, bool) {
	if v.slow.Load() {
		return penstock.Entry{}, false
	}
	e, err := v.GetAttr(context.Background(), ino)
	return e, err == nil
}

func (v *quickMem) OpenCached(ino meta.Ino, flags uint32) (penstock.OpenInfo, bool) {
	if v.slow.Load() || writable(flags) {
		return penstock.OpenInfo{}, false
	}
	info, err := v.Open(context.Background(), &penstock.Call{}, ino, flags)
	return info, err == nil
}

func (v *quickMem) ReadCached(ino meta.Ino, p []byte, off int64, _ bool) (int, bool) {
	if v.slow.Load() {
		return 0, false
	}
	n, err := v.Read(context.Background(), ino, p, off)
	return n, err == nil
}

func (v *quickMem) ReleaseCached(ino meta.Ino, flags uint32) bool {
	if v.slow.Load() || writable(flags) {
		return false
	}
	v.Release(context.Background(), ino, flags)
	return true
}

// TestQuickAnswersAlike: an answer from memory equals, byte for byte, the ordinary answer, and
// requests unfit for memory take the ordinary way.
func TestQuickAnswersAlike(t *testing.T) {
	c, s, tree := newDirect()
	v := &quickMem{memVolume: tree.volumes[1]}
	c.fs.volumes[1], c.fs.tree = v, quickTree{v}
	c.fs.noEpoch = false
	file := v.add(meta.RootIno, "f", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: []byte("bytes")})
	node := c.fs.nodeID(1, file)
	quick := func(op uint32, n int) ([]byte, bool) {
		h := (*fuse.InHeader)(unsafe.Pointer(&s.in[0]))
		st, size, ok := c.fs.quickly.quick(op, h, s, n)
		if !ok {
			return nil, false
		}
		return bytes.Clone(s.out[:answer(s.out, h, st, size)]), true
	}
	direct := func(op uint32, n int) []byte {
		t.Helper()
		m, ok := c.direct(s, op, n)
		if !ok {
			t.Fatalf("opcode %d is not answered directly", op)
		}
		return bytes.Clone(s.out[:m])
	}
	read := fixed(opRead)
	order.PutUint32(read[16:], 100)
	order.PutUint64(read[0:], uint64(modeCached))
	flags := func(op uint32, f uint32) []byte { // of OPEN
		b := fixed(op)
		order.PutUint32(b, f)
		return b
	}
	const handleAt = outHeaderSize
	for _, r := range []struct {
		what  string
		op    uint32
		node  uint64
		parts [][]byte
		quick bool
	}{
		{"a name", opLookup, 1, [][]byte{[]byte("f\x00")}, true},
		{"no name", opLookup, 1, [][]byte{[]byte("none\x00")}, true},
		{"the snapshots", opLookup, 1, [][]byte{[]byte(".snapshot\x00")}, false},
		{"the virtual files", opLookup, 1, [][]byte{[]byte(".penstock\x00")}, false},
		{"a junction", opLookup, 1, [][]byte{[]byte("junction\x00")}, false},
		{"attributes", opGetattr, node, [][]byte{fixed(opGetattr)}, true},
		{"attributes of a directory", opGetattr, 1, [][]byte{fixed(opGetattr)}, true},
		{"open to read", opOpen, node, [][]byte{flags(opOpen, 0)}, true},
		{"open to write", opOpen, node, [][]byte{flags(opOpen, 1)}, false},
		{"read", opRead, node, [][]byte{read}, true},
	} {
		t.Run(r.what, func(t *testing.T) {
			n := ask(s, r.op, r.node, r.parts...)
			want := direct(r.op, n)
			got, ok := quick(r.op, n)
			if ok != r.quick {
				t.Fatalf("answered from memory: %v", ok)
			}
			if !ok {
				return
			}
			if r.op == opOpen { // each has a handle of its own
				clear(want[handleAt : handleAt+8])
				clear(got[handleAt : handleAt+8])
			}
			if !bytes.Equal(got, want) {
				t.Errorf("DATA: %x\nnot\n%x", got, want)
			}
			v.slow.Store(true)
			defer v.slow.Store(false)
			if _, ok := quick(r.op, n); ok {
				t.Error("answered though the volume can't")
			}
		})
	}
}

// TestQuickRelease: only an open for reading through which nothing is locked ends so.
func TestQuickRelease(t *testing.T) {
	c, s, tree := newDirect()
	v := &quickMem{memVolume: tree.volumes[1]}
	c.fs.volumes[1], c.fs.tree = v, quickTree{v}
	node := c.fs.nodeID(1, v.add(meta.RootIno, "f", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}}))
	fh := c.fs.opens.handle(modeCached | modeNoFlush)
	release := func(fh uint64, releaseFlags uint32) bool {
		b := fixed(opRelease)
		order.PutUint64(b, fh)
		order.PutUint32(b[12:], releaseFlags)
		h := (*fuse.InHeader)(unsafe.Pointer(&s.in[0]))
		_, _, ok := c.fs.quickly.quick(opRelease, h, s, ask(s, opRelease, node, b))
		return ok
	}
	c.fs.opens.with(node, true, func(n *openNode) { n.count(modeCached, 1) })
	c.fs.opens.noteLocker(&c.fs.kept, node, fh, 7)
	if release(fh, 0) {
		t.Error("a handle through which somebody locks was released")
	}
	c.fs.opens.flushed(&c.fs.kept, node, 7)
	if release(fh, fuse.FUSE_RELEASE_FLOCK_UNLOCK) {
		t.Error("a handle that was locked by flock was released")
	}
	for _, mode := range []handleMode{modeWrite, modePassthrough, modeVirtual, modeCached | modePassthrough} {
		if release(c.fs.opens.handle(mode), 0) {
			t.Errorf("a handle of mode %#x was released", mode)
		}
	}
	if !release(fh, 0) {
		t.Error("not released")
	}
	if s := &c.fs.opens.shards[node%openShards]; len(s.nodes) != 0 {
		t.Errorf("%d nodes are open", len(s.nodes))
	}
}

// TestReaders: one goroutine waits for requests while answers come from memory, a second
// goroutine where answers do not; and waiting requests keep neither from answering.
func TestReaders(t *testing.T) {
	tree := newMemTree()
	v := &quickMem{memVolume: tree.volumes[1]}
	v.valid = 0 // the kernel asks each time
	v.add(meta.RootIno, "f", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: []byte("bytes")})
	m := mountTree(t, tree, Config{Tree: quickTree{v}})
	// until runs a loop of opens, by one caller, until the given number of readers wait.
	until := func(slow bool, readers int32) {
		t.Helper()
		v.slow.Store(slow)
		defer v.slow.Store(false)
		for end := time.Now().Add(60 * time.Second); ; {
			run(t, "opens", m.Dir())
			time.Sleep(time.Millisecond)
			if n := m.fs.conn.idle.Load(); n == readers {
				return
			} else if time.Now().After(end) {
				t.Fatalf("%d goroutines wait for requests, not %d", n, readers)
			}
		}
	}
	until(false, 1)
	until(true, maxReaders)
	until(false, 1)

	release := make(chan struct{})
	v.hook("createopen", func() { <-release })
	const calls = 12
	var wg sync.WaitGroup
	for i := range calls {
		wg.Go(func() {
			dir := fmt.Sprintf("%s/d%d", m.Dir(), i)
			if out, err := exec.Command("sh", "-c", "mkdir "+dir+" && touch "+dir+"/f").CombinedOutput(); err != nil {
				t.Errorf("%v %s", err, out)
			}
		})
	}
	for end := time.Now().Add(60 * time.Second); v.count("createopen") < calls; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Errorf("%d of %d requests that wait were begun", v.count("createopen"), calls)
			break
		}
	}
	run(t, "opens", m.Dir()) // while the readers wait
	close(release)
	wg.Wait()
}

func partOpens(dir string) error {
	runtime.LockOSThread() // one caller
	for range 50 {
		b, err := os.ReadFile(dir + "/f")
		if err != nil {
			return err
		}
		if !strings.HasPrefix(string(b), "bytes") {
			return fmt.Errorf("read %q", b)
		}
	}
	return nil
}
