package fuse

import (
	"bytes"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// The most frequent requests are decoded and answered in place here, since go-fuse's protocol
// server allocates a kilobyte and a channel for each. All other requests go through the
// protocol server.

// direct answers a frequent request of n bytes. m is the length of the answer in s.out; zero:
// no answer is due. ok false: direct has not begun the request.
func (c *conn) direct(s *slot, op uint32, n int) (m int, ok bool) {
	h, in := (*fuse.InHeader)(unsafe.Pointer(&s.in[0])), s.in[inHeaderSize:n]
	if h.TotalExtlen != 0 || uintptr(n) < directSize[op] {
		return 0, false
	}
	body := s.out[outHeaderSize:]
	var st fuse.Status
	var size uintptr
	switch op {
	case opForget:
		c.fs.Forget(h.NodeId, order.Uint64(in))
		return 0, true
	case opBatchForget:
		count := int(order.Uint32(in))
		for in = in[8:]; count > 0 && len(in) >= forgetOne; in, count = in[forgetOne:], count-1 {
			c.fs.Forget(order.Uint64(in), order.Uint64(in[8:]))
		}
		return 0, true
	case opLookup:
		out := at[fuse.EntryOut](body)
		st, size = c.fs.Lookup(s.cancel, h, cString(in), out), unsafe.Sizeof(*out)
	case opGetattr:
		out := at[fuse.AttrOut](body)
		st, size = c.fs.GetAttr(s.cancel, (*fuse.GetAttrIn)(unsafe.Pointer(h)), out), unsafe.Sizeof(*out)
	case opOpen:
		out := at[fuse.OpenOut](body)
		st, size = c.fs.Open(s.cancel, (*fuse.OpenIn)(unsafe.Pointer(h)), out), unsafe.Sizeof(*out)
	case opCreate:
		out := at[fuse.CreateOut](body)
		st = c.fs.Create(s.cancel, (*fuse.CreateIn)(unsafe.Pointer(h)), cString(s.in[directSize[op]:n]), out)
		size = unsafe.Sizeof(*out)
	case opUnlink:
		st = c.fs.Unlink(s.cancel, h, cString(in))
	case opFlush:
		st = c.fs.Flush(s.cancel, (*fuse.FlushIn)(unsafe.Pointer(h)))
	case opRelease:
		c.fs.Release(s.cancel, (*fuse.ReleaseIn)(unsafe.Pointer(h)))
	case opRead:
		r := (*fuse.ReadIn)(unsafe.Pointer(h))
		if int(r.Size) > len(body) {
			return 0, false
		}
		got, rst := c.fs.read(s.cancel, r, body[:r.Size])
		st, size = rst, uintptr(got)
	case opWrite:
		w := (*fuse.WriteIn)(unsafe.Pointer(h))
		data := s.in[directSize[op]:n]
		if int(w.Size) != len(data) {
			return 0, false
		}
		out := at[fuse.WriteOut](body)
		out.Size, st = c.fs.write(s.cancel, w, data)
		size = unsafe.Sizeof(*out)
	default:
		return 0, false
	}
	return answer(s.out, h, st, size), true
}

// answer puts the header before a body of size bytes, which an error has not.
func answer(out []byte, h *fuse.InHeader, st fuse.Status, size uintptr) int {
	if st != fuse.OK {
		size = 0
	}
	m := outHeaderSize + int(size)
	order.PutUint32(out, uint32(m))
	order.PutUint32(out[4:], uint32(-st))
	order.PutUint64(out[8:], h.Unique)
	return m
}

const forgetOne = 16 // node 8, lookups 8

// directSize is the size of the fixed part of each request answered by direct; zero: direct
// does not answer the request.
var directSize = [...]uintptr{
	opForget:      unsafe.Sizeof(fuse.ForgetIn{}),
	opBatchForget: inHeaderSize + 8,
	opLookup:      inHeaderSize,
	opGetattr:     unsafe.Sizeof(fuse.GetAttrIn{}),
	opOpen:        unsafe.Sizeof(fuse.OpenIn{}),
	opCreate:      unsafe.Sizeof(fuse.CreateIn{}),
	opUnlink:      inHeaderSize,
	opFlush:       unsafe.Sizeof(fuse.FlushIn{}),
	opRelease:     unsafe.Sizeof(fuse.ReleaseIn{}),
	opRead:        unsafe.Sizeof(fuse.ReadIn{}),
	opWrite:       unsafe.Sizeof(fuse.WriteIn{}),
	maxOpcode:     0,
}

// at is a cleared T at the beginning of an answer's body, which is aligned to
// 8 bytes as every answer is.
func at[T any](body []byte) *T {
	t := (*T)(unsafe.Pointer(&body[0]))
	var zero T
	*t = zero
	return t
}

// cString returns the name at the beginning of p, up to the NUL.
func cString(p []byte) string {
	name, _, _ := bytes.Cut(p, []byte{0})
	return string(name)
}
