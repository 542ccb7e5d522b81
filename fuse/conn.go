package fuse

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// order is the byte order of the FUSE protocol: the machine's.
var order = binary.NativeEndian

// Sizes of the headers of requests and answers.
const (
	inHeaderSize  = 40 // length 4, opcode 4, unique 8, node 8, uid 4, gid 4, pid 4, extension 2, padding 2
	outHeaderSize = 16 // length 4, error 4, unique 8
)

// Opcodes that this file looks at.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opSymlink     = 6
	opMknod       = 8
	opMkdir       = 9
	opUnlink      = 10
	opLink        = 13
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opRelease     = 18
	opGetxattr    = 22
	opListxattr   = 23
	opFlush       = 25
	opInit        = 26
	opReaddir     = 28
	opSetlkw      = 33
	opCreate      = 35
	opInterrupt   = 36
	opDestroy     = 38
	opIoctl       = 39
	opPoll        = 40
	opBatchForget = 42
	opReaddirplus = 44
	opSyncfs      = 50
	opTmpfile     = 51
	opStatx       = 52
	maxOpcode     = 63 // beyond all that exist
)

const (
	maxWrite   = 1 << 20 // bytes of one READ or WRITE
	inSize     = maxWrite + 4096
	smallOut   = 8 << 10 // bytes that any answer but a READ's or a listing's fits
	maxReaders = 2       // goroutines that wait for a request, at most; more gained nothing
	maxFree    = 16      // slots, and buffers, kept for later
	smallIn    = 4 << 10 // bytes that almost any request but a WRITE fits
	// manyBuffers are in use when requests of any size are copied out of theirs.
	manyBuffers = 64
)

// conn is the connection to the kernel: it reads requests, has go-fuse's
// protocol server decode them and call the file system, and writes the answers.
//
// The loop is not go-fuse's own Server for four reasons: SYNCFS, which that
// knows only by name; answers that a recall has overtaken; INTERRUPT, which is
// sent for any signal, not only where someone gives up; and a later daemon that
// takes over, whose INIT was answered by its predecessor. It costs the same CPU
// for each create (docs/parts/fuse.md).
type conn struct {
	file *os.File
	fd   int
	ps   *fuse.ProtocolServer
	fs   *fileSystem
	log  *slog.Logger

	minor  uint32 // of the kernel's protocol 7.minor
	syncfs bool   // the kernel passes syncfs(2) on
	// initial is the INIT that a successor needs; resends: the kernel can send
	// again what is not answered.
	initial []byte
	resends bool

	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	idle   atomic.Int32  // goroutines that wait for a request
	marks  atomic.Int32  // of the last requests, see mark
	last   atomic.Uint32 // who asked the last one of them
	loops  sync.WaitGroup
	done   chan struct{} // closed after the last request

	// generation counts invalidations; see Notifier. Answers with timeouts are
	// written under the read lock, and it grows under the write lock.
	genMu      sync.RWMutex
	generation atomic.Uint64

	mu      sync.Mutex
	free    []*slot
	busy    map[*slot]bool
	buffers [][]byte // not in use
	inUse   int      // buffers that are

	closeMu sync.RWMutex
	closed  bool

	requests [maxOpcode]atomic.Uint64 // by opcode
	reads    readClock
}

// slot is the memory of one request.
type slot struct {
	in, out []byte
	small   []byte // in, if the request fits
	buffer  []byte // in, if it doesn't: of inSize, given back with the slot
	ins     [1][]byte
	outs    [1][]byte
	unique  atomic.Uint64 // the request that is being worked on, or zero
	op      atomic.Uint32 // set before unique
	pid     atomic.Uint32

	cancelMu sync.Mutex
	cancel   chan struct{} // closed when the request is to end, if direct works on it
	canceled bool
}

// newConn takes over fd, a /dev/fuse that was just mounted, and answers INIT;
// with left, one of which a predecessor answered this INIT.
func newConn(fd int, fs *fileSystem, log *slog.Logger, left []byte) (*conn, error) {
	c := &conn{
		file: os.NewFile(uintptr(fd), "/dev/fuse"), fd: fd, fs: fs, log: log,
		ps: fuse.NewProtocolServer(fs, initOptions(fs, log)), done: make(chan struct{}), busy: make(map[*slot]bool),
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	begin := c.init
	if left != nil {
		begin = func() error { return c.adopt(left) }
	}
	if err := begin(); err != nil {
		c.file.Close()
		return nil, err
	}
	return c, nil
}

// initOptions is all that is negotiated with the kernel, in one place: a daemon
// that takes over must come to the same.
func initOptions(fs *fileSystem, log *slog.Logger) *fuse.MountOptions {
	o := &fuse.MountOptions{
		Name:          "penstock",
		MaxWrite:      maxWrite,
		MaxBackground: 128,
		// Without opens nobody would tell us to give up locks; then they hold within
		// the mount, which can't change anyway.
		EnableLocks: !fs.noOpen,
		EnableAcl:   true,
		// Targets of links never change; inode numbers are never used twice.
		EnableSymlinkCaching: true,
		// Pages are dropped when a recall says so, not when mtime moved.
		ExplicitDataCacheControl: true,
		// Pods with a user namespace mount with mapped ids: caller.go.
		IDMappedMount: true,
		DisableSplice: true,
		ExtraCapabilities: fuse.CAP_DIRECT_IO_ALLOW_MMAP | // mappings of files open for writing
			fuse.CAP_HANDLE_KILLPRIV_V2 | // else each write asks for security.capability first
			fuse.CAP_DONT_MASK | // default ACLs come before the umask
			fuse.CAP_READDIRPLUS_AUTO |
			fuse.CAP_ATOMIC_O_TRUNC |
			fuse.CAP_SETXATTR_EXT | // tells when an ACL must drop set-group-id
			fuse.CAP_ASYNC_DIO |
			fuse.CAP_EXPORT_SUPPORT | // handles of files outlive what the kernel remembers: handles.go
			fuse.CAP_HAS_RESEND, // a successor may ask for unanswered requests
		Logger: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		// A bug stops the program: who knows what it left locked.
		PanicHandler: func(bug any) fuse.Status { panic(bug) },
	}
	if fs.noOpen {
		o.ExtraCapabilities |= fuse.CAP_NO_OPENDIR_SUPPORT
	} else {
		o.DisabledCapabilities |= fuse.CAP_NO_OPEN_SUPPORT
	}
	if fs.noPassthrough {
		o.DisabledCapabilities |= fuse.CAP_PASSTHROUGH
	}
	return o
}

// Protocol minors that brought what we use.
const (
	minorKillPriv = 33 // Linux 5.11: HANDLE_KILLPRIV_V2 and SETXATTR_EXT
	minorEpoch    = 44 // Linux 6.16: FUSE_NOTIFY_INC_EPOCH
	minorPrune    = 45 // Linux 6.18: FUSE_NOTIFY_PRUNE
)

// init answers the first request.
func (c *conn) init() error {
	s, n, err := c.next()
	defer c.put(s)
	if err != nil {
		return meta.E("mount", meta.IO, "/dev/fuse", fmt.Errorf("read of the first request: %w", err))
	}
	if op := order.Uint32(s.in[4:]); op != opInit || n < inHeaderSize+16 {
		return meta.E("mount", meta.Protocol, "/dev/fuse", fmt.Errorf("the first request has opcode %d and %d bytes, not INIT", op, n))
	}
	c.minor = order.Uint32(s.in[inHeaderSize+4:])
	if c.minor < minorKillPriv {
		return meta.E("mount", meta.Version, "/dev/fuse", fmt.Errorf("the kernel speaks FUSE 7.%d; 7.%d (Linux 5.11) or later is needed", c.minor, minorKillPriv))
	}
	c.fs.noEpoch = c.minor < minorEpoch
	c.handle(s, n)
	c.remember(s.in[:n], s.out)
	return nil
}

// serve starts answering requests; done is closed when the mount has gone and
// the last request was answered.
func (c *conn) serve() {
	c.idle.Store(1)
	c.loops.Add(1)
	go c.loop()
	go func() {
		c.loops.Wait()
		c.closeMu.Lock()
		c.closed = true
		c.closeMu.Unlock()
		c.file.Close()
		close(c.done)
	}()
}

// loop reads requests and answers each before it reads the next. Whoever takes
// a request that could wait and leaves nobody waiting starts a successor first, so
// that a request that waits never keeps others waiting. See quick.go.
func (c *conn) loop() {
	defer c.loops.Done()
	for {
		s, n, err := c.next()
		waiting := c.idle.Add(-1)
		if err != nil {
			c.put(s)
			c.end(err)
			return
		}
		pid := order.Uint32(s.in[32:])
		quick := c.quick(s, n)
		if !quick {
			if waiting == 0 {
				c.idle.Add(1)
				c.loops.Add(1)
				go c.loop()
			}
			c.handle(s, n)
		}
		c.put(s)
		if c.idle.Load() >= c.mark(pid, quick) {
			return
		}
		c.idle.Add(1)
	}
}

// read reads one request.
func (c *conn) read(p []byte) (int, error) {
	for {
		n, err := syscall.Read(c.fd, p)
		switch err {
		case nil:
			if n < inHeaderSize {
				return 0, fmt.Errorf("a request of %d bytes", n)
			}
			return n, nil
		case syscall.EINTR, syscall.EAGAIN, syscall.ENOENT: // ENOENT: it was interrupted before it was read
		default:
			return 0, err
		}
	}
}

// end is reached by each loop when the mount has gone.
func (c *conn) end(err error) {
	if err != syscall.ENODEV && err != syscall.ECONNABORTED && c.ctx.Err() == nil {
		c.log.Error("reading requests failed", "err", err)
	}
	c.cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	for s := range c.busy {
		if u := s.unique.Load(); u != 0 {
			go c.interrupt(s, u)
		}
	}
}

func (c *conn) write(p []byte) error {
	c.closeMu.RLock()
	defer c.closeMu.RUnlock()
	if c.closed {
		return syscall.EBADF
	}
	for {
		_, err := syscall.Write(c.fd, p)
		if err != syscall.EINTR {
			return err
		}
	}
}

// next reads a request into a slot. Who waits for a lock, or for metadata, may do
// so for long and be one of thousands: a small request gives its buffer back
// before it is begun, and any does where many are in use.
func (c *conn) next() (*slot, int, error) {
	s, b := c.slot()
	n, err := c.read(b)
	switch {
	case err != nil || n <= smallIn:
		s.in = s.small
	case c.many():
		s.in = make([]byte, n)
	default:
		s.in, s.buffer = b, b
		return s, n, nil
	}
	if err == nil {
		copy(s.in, b[:n])
	}
	c.giveBack(b)
	return s, n, err
}

// slot takes memory for a request, and a buffer into which any can be read.
func (c *conn) slot() (s *slot, b []byte) {
	c.mu.Lock()
	if n := len(c.free); n > 0 {
		s, c.free = c.free[n-1], c.free[:n-1]
	} else {
		s = &slot{small: make([]byte, smallIn), out: make([]byte, smallOut), cancel: make(chan struct{})}
	}
	c.busy[s] = true
	c.inUse++
	if n := len(c.buffers); n > 0 {
		b, c.buffers = c.buffers[n-1], c.buffers[:n-1]
	}
	c.mu.Unlock()
	if b == nil {
		b = c.buffer()
	}
	return s, b
}

func (c *conn) many() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inUse > manyBuffers
}

func (c *conn) put(s *slot) {
	if s.buffer != nil {
		c.giveBack(s.buffer)
	}
	s.in, s.buffer = nil, nil
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.busy, s)
	if len(c.free) < maxFree {
		c.free = append(c.free, s)
	}
}

// buffer makes one. It takes a while: nobody waits for it.
func (c *conn) buffer() []byte {
	// Mapped, not from the heap: the collector would clear a megabyte for a request
	// that is often a hundred bytes.
	flags := unix.MAP_PRIVATE | unix.MAP_ANON
	if c.fs.kept.keep != nil {
		// Pages must be there before the kernel copies a request into them: if we
		// are killed while it waits for one, it answers the request with EIO.
		flags |= unix.MAP_POPULATE
	}
	b, err := unix.Mmap(-1, 0, inSize, unix.PROT_READ|unix.PROT_WRITE, flags)
	if err != nil {
		panic(fmt.Sprintf("fuse: no memory for a request of %d bytes: %v", inSize, err))
	}
	return b
}

func (c *conn) giveBack(b []byte) {
	c.mu.Lock()
	c.inUse--
	if len(c.buffers) < maxFree {
		c.buffers = append(c.buffers, b)
		b = nil
	}
	c.mu.Unlock()
	if b != nil {
		unix.Munmap(b)
	}
}

// handle answers the request of n bytes in s.in.
func (c *conn) handle(s *slot, n int) {
	op, unique := order.Uint32(s.in[4:]), order.Uint64(s.in[8:])
	if op < maxOpcode {
		c.requests[op].Add(1)
	}
	switch op {
	case opRead:
		began := time.Now()
		c.reads.begin(began)
		defer func() { c.reads.end(began, time.Now()) }()
	case opSyncfs, opDestroy:
		// umount(8) of a block mount waits for the latter, as long as it takes.
		s.op.Store(op)
		s.pid.Store(order.Uint32(s.in[32:]))
		s.unique.Store(unique)
		var status fuse.Status
		if op == opDestroy {
			status = c.fs.status("umount", 0, c.fs.drainFor(c.ctx, s.cancel))
		} else {
			status = c.fs.status("syncfs", order.Uint64(s.in[16:]), c.syncAll(s.cancel))
		}
		s.unique.Store(0)
		s.renew()
		c.fail(s, unique, status)
		return
	case opIoctl:
		c.fail(s, unique, fuse.Status(syscall.ENOTTY))
		return
	case opPoll:
		c.fail(s, unique, fuse.ENOSYS)
		return
	case opInterrupt:
		c.interrupted(s)
		return
	}
	if c.fs.count != nil && op != opSetlkw { // who waits for a lock may wait for days
		turn := c.fs.count.Begin()
		defer c.fs.count.End(turn)
	}
	s.op.Store(op)
	s.pid.Store(order.Uint32(s.in[32:]))
	s.unique.Store(unique)
	generation := c.generation.Load()
	if want := outSize(op, s.in[:n]); want > len(s.out) {
		s.out = make([]byte, want)
	}
	m, ok := 0, false
	if op < maxOpcode && directSize[op] > 0 {
		m, ok = c.direct(s, op, n)
	}
	if !ok {
		s.ins[0], s.outs[0] = s.in[:n], s.out
		m, _ = c.ps.HandleRequest(s.ins[:], s.outs[:])
	}
	s.unique.Store(0)
	s.renew()
	if m > 0 {
		c.reply(op, s.out[:m], generation)
	}
}

// syncTimeout bounds how long sync(1) waits for durability: with it waits whoever syncs
// any file system. Nothing is lost if it is over: see drain.
const syncTimeout = 60 * time.Second

// syncAll makes everything durable, or fails in time, and when the caller is killed.
func (c *conn) syncAll(killed <-chan struct{}) error {
	ctx, cancel := context.WithTimeout(c.ctx, syncTimeout)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- c.fs.syncAll(ctx) }() // ends when the library gives up, at the latest
	select {
	case err := <-done:
		return err
	case <-killed:
		return meta.E("sync", meta.Interrupted, "", nil)
	case <-ctx.Done():
		return meta.E("sync", meta.Unavailable, "", fmt.Errorf("not durable after %v", syncTimeout))
	}
}

// reply writes an answer; one with timeouts that was begun before the last
// invalidation loses them.
func (c *conn) reply(op uint32, out []byte, generation uint64) {
	var err error
	if hasTimeouts(op) {
		c.genMu.RLock()
		if c.generation.Load() != generation {
			dropTimeouts(op, out)
		}
		err = c.write(out)
		c.genMu.RUnlock()
	} else {
		err = c.write(out)
	}
	c.wrote(op, order.Uint64(out[8:]), err)
}

// newGeneration makes answers that are on their way lose their timeouts.
func (c *conn) newGeneration() {
	c.genMu.Lock()
	defer c.genMu.Unlock()
	c.generation.Add(1)
}

// fail answers with a status and no body.
func (c *conn) fail(s *slot, unique uint64, st fuse.Status) {
	out := s.out[:outHeaderSize]
	order.PutUint32(out, outHeaderSize)
	order.PutUint32(out[4:], uint32(-st))
	order.PutUint64(out[8:], unique)
	c.wrote(order.Uint32(s.in[4:]), unique, c.write(out))
}

// wrote looks at what the kernel said to an answer. It refuses one
//
//   - with ENOENT, if nobody waits for it: it was answered, or comes again; and so it
//     refuses one of a connection that has just ended;
//   - with EINVAL and without a look at the request, if the length in the header or the
//     error (0 to -511) is none, and with EFAULT or ENOMEM if it can't read the header:
//     then its caller waits;
//   - with the same, once it has the request, if what follows is not what it asked for
//     or can't be read: then it has told EIO to the caller.
//
// The last two can't be told apart; EIO is said for both, which is one answer too many
// for the last.
func (c *conn) wrote(op uint32, unique uint64, err error) {
	switch err {
	case nil, syscall.ENOENT, syscall.ENODEV, syscall.ECONNABORTED, syscall.EBADF:
		return
	}
	c.log.Error("answer refused by the kernel; its caller gets EIO", "opcode", op, "err", err)
	var out [outHeaderSize]byte
	eio := int32(-int(syscall.EIO))
	order.PutUint32(out[:], outHeaderSize)
	order.PutUint32(out[4:], uint32(eio))
	order.PutUint64(out[8:], unique)
	if err := c.write(out[:]); err != nil && err != syscall.ENOENT {
		c.log.Error("nor does the kernel take an error", "opcode", op, "err", err)
	}
}

// outSize is the room that go-fuse wants for the answer to a request.
func outSize(op uint32, in []byte) int {
	switch {
	case (op == opRead || op == opReaddir || op == opReaddirplus) && len(in) >= inHeaderSize+20:
		return smallOut + int(min(order.Uint32(in[inHeaderSize+16:]), 2*maxWrite))
	case (op == opGetxattr || op == opListxattr) && len(in) >= inHeaderSize+4:
		return smallOut + int(min(order.Uint32(in[inHeaderSize:]), 2*maxWrite))
	}
	return smallOut
}

// An entry is node 8, generation 8, entry and attribute timeout 8 each, their
// nanoseconds 4 each, attributes 88. Attributes alone begin with timeout 8,
// nanoseconds 4.
const (
	entryTimeoutAt = 16
	entryTimeouts  = 24
	entrySize      = 128
	attrTimeouts   = 12
	direntHead     = 24 // inode 8, position 8, length of the name 4, type 4
)

func hasTimeouts(op uint32) bool {
	switch op {
	case opLookup, opGetattr, opSetattr, opSymlink, opMknod, opMkdir, opLink, opCreate, opReaddirplus, opTmpfile, opStatx:
		return true
	}
	return false
}

// dropTimeouts clears the timeouts of an answer.
func dropTimeouts(op uint32, out []byte) {
	body := out[outHeaderSize:]
	switch op {
	case opGetattr, opSetattr, opStatx:
		clear(body[:min(attrTimeouts, len(body))])
	case opReaddirplus:
		for len(body) >= entrySize+direntHead {
			clear(body[entryTimeoutAt : entryTimeoutAt+entryTimeouts])
			name := int(order.Uint32(body[entrySize+16:]))
			body = body[min(len(body), entrySize+(direntHead+name+7)&^7):]
		}
	default:
		if len(body) >= entryTimeoutAt+entryTimeouts {
			clear(body[entryTimeoutAt : entryTimeoutAt+entryTimeouts])
		}
	}
}

// interrupted handles INTERRUPT. The kernel sends it for every signal that the
// caller gets while it waits, and would return EINTR to a program that never
// expects one from a file (each Go program is sent SIGURG by its own runtime).
// So only waiting for a lock ends; anything else goes on unless the caller is
// being killed.
func (c *conn) interrupted(s *slot) {
	target := order.Uint64(s.in[inHeaderSize:])
	c.mu.Lock()
	var found *slot
	for b := range c.busy {
		if b.unique.Load() == target {
			found = b
		}
	}
	c.mu.Unlock()
	switch {
	case found == nil:
		// Read but not yet begun, or answered: the kernel knows, and asks again.
		c.fail(s, order.Uint64(s.in[8:]), fuse.EAGAIN)
	case found.op.Load() == opSetlkw:
		go c.interrupt(found, target)
	default:
		go c.watch(found, target)
	}
}

// watch interrupts a request when its caller is being killed; it ends with the
// request.
func (c *conn) watch(s *slot, unique uint64) {
	pid := s.pid.Load()
	for began := time.Now(); s.unique.Load() == unique; {
		time.Sleep(watchEvery)
		if givesUp(pid, time.Since(began), killed) {
			c.interrupt(s, unique)
			return
		}
	}
}

const (
	watchEvery = 100 * time.Millisecond
	// unknownWaits is how long a request goes on after a signal to a caller that can't
	// be looked at.
	unknownWaits = 10 * time.Second
)

// givesUp decides whether a request is interrupted for whose caller a signal came. The
// kernel tells process 0 for one in a name space of processes that this one can't see
// into, as those of other pods: then the signal may be any, which a program rather
// doesn't hear of, or SIGKILL, which must not wait for ever.
func givesUp(pid uint32, since time.Duration, killed func(uint32) bool) bool {
	if pid == 0 {
		return since >= unknownWaits
	}
	return killed(pid)
}

// stop closes the slot's own cancel channel.
func (s *slot) stop(unique uint64) {
	s.cancelMu.Lock()
	defer s.cancelMu.Unlock()
	if s.unique.Load() == unique && !s.canceled {
		s.canceled = true
		close(s.cancel)
	}
}

// renew makes a new channel after stop.
func (s *slot) renew() {
	s.cancelMu.Lock()
	defer s.cancelMu.Unlock()
	if s.canceled {
		s.canceled, s.cancel = false, make(chan struct{})
	}
}

// interrupt closes the cancel channel of a request: the slot's, and that of
// go-fuse's protocol server if it has the request.
func (c *conn) interrupt(s *slot, unique uint64) {
	s.stop(unique)
	var in [inHeaderSize + 8]byte
	var out [smallOut]byte
	order.PutUint32(in[0:], uint32(len(in)))
	order.PutUint32(in[4:], opInterrupt)
	order.PutUint64(in[inHeaderSize:], unique)
	for s.unique.Load() == unique {
		if n, _ := c.ps.HandleRequest([][]byte{in[:]}, [][]byte{out[:]}); n == 0 {
			return
		}
		time.Sleep(time.Millisecond) // not begun yet, or done already
	}
}

// killed reports whether SIGKILL is pending for a thread, or it is gone.
func killed(pid uint32) bool {
	const sigkill = 1 << (uint(syscall.SIGKILL) - 1)
	b, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/status")
	if err != nil {
		return os.IsNotExist(err)
	}
	for line := range strings.Lines(string(b)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		if mask, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64); err == nil && mask&sigkill != 0 {
			return true
		}
	}
	return false
}

// Requests to the device for passthrough, as in linux/fuse.h.
const (
	ioctlBackingOpen  = 0x4010e501
	ioctlBackingClose = 0x4004e502
)

// openBacking gives the kernel a file to read by itself and gets its id.
func (c *conn) openBacking(fd int) (int32, error) {
	m := fuse.BackingMap{Fd: int32(fd)}
	c.closeMu.RLock()
	defer c.closeMu.RUnlock()
	if c.closed {
		return 0, meta.E("open in passthrough", meta.Canceled, "", nil)
	}
	id, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(c.fd), ioctlBackingOpen, uintptr(unsafe.Pointer(&m)))
	if errno != 0 {
		return 0, meta.E("open in passthrough", meta.NotSupported, "", errno)
	}
	return int32(id), nil
}

// closeBacking takes an id back; files opened with it go on.
func (c *conn) closeBacking(id int32) {
	c.closeMu.RLock()
	defer c.closeMu.RUnlock()
	if c.closed {
		return
	}
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(c.fd), ioctlBackingClose, uintptr(unsafe.Pointer(&id))); errno != 0 {
		c.log.Warn("passthrough id not taken back", "id", id, "err", errno)
	}
}
