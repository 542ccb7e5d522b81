package fuse

import (
	"log/slog"
	"testing"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// newDirect is a connection without a kernel.
func newDirect() (*conn, *slot, *memTree) {
	tree := newMemTree()
	log := slog.New(slog.DiscardHandler)
	f := &fileSystem{nodes: nodes{tree: tree, rootVolume: 1, rootIno: 1, volumes: make(map[meta.VolumeID]Volume)}, log: log}
	f.compose()
	f.back = newWriteback(func(uint64, error) {})
	c := &conn{fs: f, log: log, closed: true}
	f.conn = c
	return c, &slot{in: make([]byte, inSize), out: make([]byte, smallOut+maxWrite), cancel: make(chan struct{})}, tree
}

// ask puts a request together: header, fixed part, and the rest.
func ask(s *slot, op uint32, node uint64, parts ...[]byte) (n int) {
	n = inHeaderSize
	for _, p := range parts {
		n += copy(s.in[n:], p)
	}
	clear(s.in[:inHeaderSize])
	order.PutUint32(s.in[0:], uint32(n))
	order.PutUint32(s.in[4:], op)
	order.PutUint64(s.in[8:], 77)
	order.PutUint64(s.in[16:], node)
	return n
}

func fixed(op uint32) []byte { return make([]byte, directSize[op]-inHeaderSize) }

func TestDirectAnswers(t *testing.T) {
	c, s, tree := newDirect()
	v := tree.volumes[1]
	status := func(what string, op uint32, n int, want fuse.Status, wantLen int) []byte {
		t.Helper()
		m, ok := c.direct(s, op, n)
		if !ok {
			t.Fatalf("%s is not answered directly", what)
		}
		if st := fuse.Status(-int32(order.Uint32(s.out[4:]))); st != want || m != wantLen || int(order.Uint32(s.out)) != m || order.Uint64(s.out[8:]) != 77 {
			t.Fatalf("%s: status %v, %d bytes; want %v, %d", what, st, m, want, wantLen)
		}
		return s.out[outHeaderSize:m]
	}
	create := fixed(opCreate)
	order.PutUint32(create[4:], meta.TypeRegular|0o644)
	out := status("create", opCreate, ask(s, opCreate, 1, create, []byte("name\x00")), fuse.OK, outHeaderSize+int(unsafe.Sizeof(fuse.CreateOut{})))
	node, fh := order.Uint64(out), order.Uint64(out[entrySize:])
	status("lookup", opLookup, ask(s, opLookup, 1, []byte("name\x00")), fuse.OK, outHeaderSize+entrySize)
	status("getattr", opGetattr, ask(s, opGetattr, node, fixed(opGetattr)), fuse.OK, outHeaderSize+int(unsafe.Sizeof(fuse.AttrOut{})))
	write := fixed(opWrite)
	order.PutUint64(write[0:], fh)
	order.PutUint64(write[8:], 3)
	order.PutUint32(write[16:], 5)
	status("write", opWrite, ask(s, opWrite, node, write, []byte("hello")), fuse.OK, outHeaderSize+8)
	read := fixed(opRead)
	order.PutUint32(read[16:], 100)
	if got := status("read", opRead, ask(s, opRead, node, read), fuse.OK, outHeaderSize+8); string(got) != "\x00\x00\x00hello" {
		t.Errorf("DATA: read %q", got)
	}
	status("flush", opFlush, ask(s, opFlush, node, fixed(opFlush)), fuse.OK, outHeaderSize)
	status("release", opRelease, ask(s, opRelease, node, fixed(opRelease)), fuse.OK, outHeaderSize)
	status("unlink", opUnlink, ask(s, opUnlink, 1, []byte("name\x00")), fuse.OK, outHeaderSize)
	status("unlink again", opUnlink, ask(s, opUnlink, 1, []byte("name\x00")), fuse.ENOENT, outHeaderSize)
	forgets := make([]byte, 8+2*forgetOne)
	order.PutUint32(forgets, 2)
	order.PutUint64(forgets[8:], node)
	order.PutUint64(forgets[8+forgetOne:], node)
	if m, ok := c.direct(s, opBatchForget, ask(s, opBatchForget, 0, forgets)); m != 0 || !ok || v.count("forget") != 2 {
		t.Errorf("forgets: %d %v, %d", m, ok, v.count("forget"))
	}
}

// Any bytes get an answer, or none, and never more than the bytes request.
func FuzzDirect(f *testing.F) {
	f.Add(uint8(opLookup), uint64(1), []byte("junction\x00"))
	f.Add(uint8(opWrite), uint64(1<<44|2), append(fixed(opWrite), "data"...))
	f.Add(uint8(opBatchForget), uint64(0), []byte("\xff\xff\xff\xff\x00\x00\x00\x00sixteen bytes..."))
	f.Add(uint8(opRead), uint64(textsDir+1), []byte("handle..before\x00\xff\xff\xffsize....flags...lock owner"))
	f.Fuzz(func(t *testing.T, op uint8, node uint64, body []byte) {
		c, s, tree := newDirect()
		tree.volumes[1].add(meta.RootIno, "f", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
		if uint32(op) >= maxOpcode || directSize[op] == 0 || len(body) > 1<<16 {
			return
		}
		if op == opWrite && len(body) >= 16 {
			clear(body[10:16]) // offsets that memory can hold
		}
		c.fs.volumes[1] = &quickMem{memVolume: tree.volumes[1]}
		n := ask(s, uint32(op), node, body)
		if int(op) != opForget || uintptr(n) >= directSize[op] { // as the kernel sends the request
			c.quick(s, n)
		}
		m, ok := c.direct(s, uint32(op), n)
		if ok && m != 0 && (m < outHeaderSize || m > len(s.out) || int(order.Uint32(s.out)) != m) {
			t.Errorf("opcode %d: an answer of %d bytes", op, m)
		}
		c.fs.back.drainAll()
	})
}
