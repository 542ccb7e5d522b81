package client

import (
	"sync"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// ringSize is the size of the memory shared by a connection and a server on the same machine.
// The size exceeds a Writer's window; otherwise appends would wait for space twice.
const ringSize = 16 << 20

// ringHot is the part of a ring used as long as the part suffices: a recently used page costs
// a fraction of another page, and a small fraction of a fresh page.
const ringHot = 4 << 20

func closeFD(fd int) { unix.Close(fd) }

// ring is memory shared with the server. Appends under way lie in the ring, so that the bytes
// don't pass through the socket (two copies less). Space is allocated and freed in order,
// because appends are acknowledged in order.
type ring struct {
	// mu is held while bytes are copied in and the frame is sent: the order of frames is the
	// order of the space.
	mu   sync.Mutex
	fd   int
	mem  []byte
	head uint64 // next position to give out, counted without wrapping
	tail uint64 // everything before is free
}

func newRing(size int) (*ring, error) {
	const op = "share memory"
	fd, err := unix.MemfdCreate("penstock-append", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, meta.E(op, meta.NotSupported, "", err)
	}
	if err = unix.Ftruncate(fd, int64(size)); err == nil {
		// The server refuses memory that could shrink while it reads.
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	}
	var mem []byte
	if err == nil {
		mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		unix.Close(fd)
		return nil, meta.E(op, meta.NotSupported, "", err)
	}
	return &ring{fd: fd, mem: mem}, nil
}

// take allocates n contiguous bytes; nil if there is no room. end is the argument for give,
// which frees the bytes. The caller holds mu.
func (r *ring) take(n int) (p []byte, pos, end uint64) {
	size := uint64(len(r.mem))
	if size == 0 {
		return nil, 0, 0 // closed
	}
	if r.head == r.tail {
		// Nothing is under way: reuse the same pages, which are in the caches.
		r.head = (r.head + size - 1) / size * size
		r.tail = r.head
	}
	at := r.head % size
	head := r.head
	front := head + size - at // the front's next turn
	if at+uint64(n) > size || at >= ringHot && front+uint64(n)-r.tail <= size {
		// The rest is too short, or the front, which is in the caches, is free
		// already: nobody needs all of the ring unless so much is under way.
		head, at = front, 0
	}
	if head+uint64(n)-r.tail > size {
		return nil, 0, 0
	}
	r.head = head + uint64(n)
	return r.mem[at : at+uint64(n)], at, r.head
}

func (r *ring) give(end uint64) {
	r.mu.Lock()
	r.tail = max(r.tail, end)
	r.mu.Unlock()
}

func (r *ring) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	unix.Munmap(r.mem)
	unix.Close(r.fd)
	r.mem = nil
}
