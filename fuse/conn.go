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

// Opcodes that package fuse inspects.
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
	opFsync       = 20
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
	maxOpcode     = 63 // above every known opcode
)

const (
	maxWrite   = 1 << 20 // bytes of one READ or WRITE
	inSize     = maxWrite + 4096
	smallOut   = 8 << 10 // bytes; enough for any answer except of READ and listings
	maxReaders = 2       // most goroutines waiting for a request; more gained nothing
	maxFree    = 16      // slots, and buffers, kept for later
	smallIn    = 4 << 10 // bytes; enough for most requests except WRITE
	// manyBuffers are in use when requests of any size are copied out of theirs.
	manyBuffers = 64
)

// conn is the connection to the kernel. It reads requests, has go-fuse's protocol server
// decode the requests and call the file system, and writes the answers.
//
// conn has its own loop instead of go-fuse's Server for four reasons. The Server knows SYNCFS
// only by name. A recall may overtake an answer. The kernel sends INTERRUPT for any signal,
// not only when the caller gives up. After a take-over the predecessor has already answered
// INIT. Both loops cost the same CPU for each create (docs/parts/fuse.md).
type conn struct {
	file *os.File
	fd   int
	ps   *fuse.ProtocolServer
	fs   *fileSystem
	log  *slog.Logger

	minor  uint32 // of the kernel's protocol 7.minor
	syncfs bool   // the kernel passes syncfs(2) on
	// initial is the INIT request for a successor. resends: the kernel can send unanswered
	// requests again.
	initial []byte
	resends bool

	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	idle   atomic.Int32  // goroutines waiting for a request
	marks  atomic.Int32  // of the last requests, see mark
	last   atomic.Uint32 // process id of the last quick request
	loops  sync.WaitGroup
	done   chan struct{} // closed after the last request

	// generation counts invalidations; see Notifier. reply writes an answer with timeouts
	// under the read lock; newGeneration increments generation under the write lock.
	genMu      sync.RWMutex
	generation atomic.Uint64

	mu      sync.Mutex
	free    []*slot
	busy    map[*slot]bool
	buffers [][]byte // not in use
	inUse   int      // buffers in use

	closeMu sync.RWMutex
	closed  bool

	requests [maxOpcode]atomic.Uint64 // by opcode
	reads    readClock
}

// slot is the memory of one request.
type slot struct {
	in, out []byte
	small   []byte // in, if the request fits
	buffer  []byte // in, for a larger request: inSize bytes, returned by put
	ins     [1][]byte
	outs    [1][]byte
	unique  atomic.Uint64 // number of the request in progress, or zero
	pid     atomic.Uint32
	waits   atomic.Bool // the request may wait for ever; set before unique

	cancelMu sync.Mutex
	cancel   chan struct{} // closed to end a request of direct
	canceled bool
}

// newConn takes over fd, a /dev/fuse descriptor. left nil: fd was just mounted, and newConn
// answers INIT. Otherwise left is the INIT request already answered by a predecessor.
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

// initOptions holds everything negotiated with the kernel, in one place, since a successor
// must negotiate the same result.
func initOptions(fs *fileSystem, log *slog.Logger) *fuse.MountOptions {
	o := &fuse.MountOptions{
		Name:          "penstock",
		MaxWrite:      maxWrite,
		MaxBackground: 128,
		// Without OPEN the kernel sends no request for giving up locks. So the kernel keeps
		// locks within the mount, which is enough since its files can't change.
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
			fuse.CAP_EXPORT_SUPPORT | // file handles outlive the kernel's inodes: handles.go
			fuse.CAP_HAS_RESEND, // a successor may ask for unanswered requests
		Logger: slog.NewLogLogger(log.Handler(), slog.LevelWarn),
		// A bug stops the program, since locks may be left held.
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

// FUSE minors that introduced a feature in use.
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

// loop reads requests and answers each before reading the next. A goroutine holding a request
// that could wait first starts another loop if no goroutine is reading, so that a waiting
// request never delays other requests. See quick.go.
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

// read reads one request into p and retries after an interruption.
func (c *conn) read(p []byte) (int, error) {
	for {
		n, err := syscall.Read(c.fd, p)
		switch err {
		case nil:
			if n < inHeaderSize {
				return 0, fmt.Errorf("a request of %d bytes", n)
			}
			return n, nil
		case syscall.EINTR, syscall.EAGAIN, syscall.ENOENT: // ENOENT: the request was interrupted before the read
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

// next reads a request into a slot. Thousands of requests may wait long for locks or for
// metadata. Therefore next copies a small request out of its buffer and frees the buffer at
// once, and does the same for a request of any size when many buffers are in use.
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

// buffer maps a new buffer of inSize bytes. The mapping takes a while, so the caller must not
// hold mu.
func (c *conn) buffer() []byte {
	// Mapped, not from the heap: the collector would clear a megabyte for a request of often a
	// hundred bytes.
	flags := unix.MAP_PRIVATE | unix.MAP_ANON
	if c.fs.kept.keep != nil {
		// Pages must be present before the kernel copies a request into the buffer. If this
		// process is killed while the kernel waits for a page, the kernel answers the request
		// with EIO.
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
		if isStream(order.Uint64(s.in[16:])) {
			break // not the time of a read of data
		}
		began := time.Now()
		c.reads.begin(began)
		defer func() { c.reads.end(began, time.Now()) }()
	case opSyncfs, opDestroy:
		// umount(8) of a block mount waits for the answer to DESTROY, however long drainFor
		// takes.
		s.waits.Store(false)
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
	endless := waits(op, order.Uint64(s.in[16:]))
	if c.fs.count != nil && !endless { // a wait for a lock may last days
		turn := c.fs.count.Begin()
		defer c.fs.count.End(turn)
	}
	s.waits.Store(endless)
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

// syncTimeout bounds how long sync(1) waits for durability, since a sync of any other file
// system on the machine may wait behind sync(1). An expired timeout loses nothing: see drain.
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

// reply writes an answer. An answer with timeouts loses the timeouts if an invalidation came
// after generation was read.
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

// newGeneration makes every answer in preparation lose its timeouts.
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

// wrote handles the kernel's result err of writing an answer. The kernel refuses an answer
//
//   - with ENOENT, if no caller waits: the request was answered, or will be sent again; the
//     kernel also refuses an answer with ENOENT just after the connection has ended;
//   - with EINVAL before finding the request, if the header's length or error (0 to -511) is
//     invalid, and with EFAULT or ENOMEM if the kernel can't read the header: then the caller
//     still waits;
//   - with the same errors after finding the request, if the body has the wrong size or can't
//     be read: then the kernel has answered EIO to the caller.
//
// The last two cases look the same here. wrote answers EIO in both; in the last case the extra
// answer is refused with ENOENT.
func (c *conn) wrote(op uint32, unique uint64, err error) {
	switch err {
	case nil, syscall.ENOENT, syscall.ENODEV, syscall.ECONNABORTED, syscall.EBADF:
		return
	}
	c.log.Error("the kernel refused an answer: the calling program gets EIO", "opcode", op, "err", err)
	var out [outHeaderSize]byte
	eio := int32(-int(syscall.EIO))
	order.PutUint32(out[:], outHeaderSize)
	order.PutUint32(out[4:], uint32(eio))
	order.PutUint64(out[8:], unique)
	if err := c.write(out[:]); err != nil && err != syscall.ENOENT {
		c.log.Error("nor does the kernel take an error", "opcode", op, "err", err)
	}
}

// outSize returns the bytes that go-fuse needs for the answer to a request.
func outSize(op uint32, in []byte) int {
	switch {
	case (op == opRead || op == opReaddir || op == opReaddirplus) && len(in) >= inHeaderSize+20:
		return smallOut + int(min(order.Uint32(in[inHeaderSize+16:]), 2*maxWrite))
	case (op == opGetxattr || op == opListxattr) && len(in) >= inHeaderSize+4:
		return smallOut + int(min(order.Uint32(in[inHeaderSize:]), 2*maxWrite))
	}
	return smallOut
}

// An entry is node 8, generation 8, entry and attribute timeout 8 each, entry and attribute
// nanoseconds 4 each, attributes 88. An answer with attributes alone begins with timeout 8,
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

// interrupted handles INTERRUPT. The kernel sends INTERRUPT for every signal to a waiting
// caller, and an EINTR would reach programs that never expect EINTR from a file (the runtime
// of each Go program sends SIGURG to its own threads). So a signal ends only the wait for a
// lock or for a record of a stream; any other request goes on unless the caller is being killed.
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
	case found.waits.Load():
		go c.interrupt(found, target)
	default:
		go c.watch(found, target)
	}
}

// watch interrupts a request once the caller is being killed. watch returns when the request
// ends.
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
	// unknownWaits is how long a request goes on after a signal to a caller invisible to this
	// process.
	unknownWaits = 10 * time.Second
)

// givesUp decides whether to interrupt a request whose caller pid got a signal; since is the
// time elapsed after the signal. The kernel names process 0 for a caller in a process namespace
// invisible to this process, such as another pod's. Then the signal may be a harmless signal,
// which should not interrupt the caller, or SIGKILL, which must not wait for ever; so givesUp
// waits for unknownWaits.
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

// interrupt closes both cancel channels of a request: the slot's and, if go-fuse's protocol
// server has the request, the server's.
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

// killed reports whether SIGKILL is pending for thread pid or the thread is gone.
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

// openBacking registers fd as a backing file, which the kernel reads without requests, and
// returns the kernel's id of the file. Errors: Canceled, NotSupported.
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

// closeBacking unregisters a backing file; files already opened with id stay readable.
func (c *conn) closeBacking(id int32) {
	c.closeMu.RLock()
	defer c.closeMu.RUnlock()
	if c.closed {
		return
	}
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(c.fd), ioctlBackingClose, uintptr(unsafe.Pointer(&id))); errno != 0 {
		c.log.Warn("the kernel keeps a backing file that the mount no longer needs", "id", id, "err", errno)
	}
}
