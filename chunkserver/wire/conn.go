package wire

import (
	"cmp"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// Conn reads and writes frames on one connection. One goroutine may read; any number may
// write.
type Conn struct {
	nc   net.Conn
	unix *net.UnixConn   // nil over TCP
	raw  syscall.RawConn // of the socket, below TLS
	tls  bool
	macs *macs // of a ticketed connection
	// blocking is set by Block, for good.
	blocking atomic.Bool

	buf  []byte // buf[r:w] are bytes read ahead
	r, w int
	few  bool // data of a large frame came last: read little ahead
	oob  []byte
	fds  []int // received, not yet taken
	came atomic.Uint64

	mu   sync.Mutex // of writing
	out  []byte     // frames gathered by Queue and SendSoon
	soon *time.Timer
	due  bool // soon is set
	vecs net.Buffers
	werr error
}

// readAhead bounds the bytes that one read from the socket reads beyond the present frame.
// After large frames come other large ones, whose data would be copied twice.
const (
	readAhead = 64 << 10
	readLess  = 512
)

// NewConn wraps a TCP, TLS or Unix stream connection. congestion names a TCP congestion
// control ("" for cubic or else the machine's default; one unknown to the kernel is an error).
func NewConn(nc net.Conn, congestion string) (*Conn, error) {
	c := &Conn{nc: nc, buf: make([]byte, readAhead)}
	socket := nc
	if t, ok := nc.(*tls.Conn); ok {
		c.tls, socket = true, t.NetConn()
	}
	sc, ok := socket.(syscall.Conn)
	if !ok {
		return nil, meta.E("open connection", meta.NotSupported, "", errors.New("not a socket"))
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil, meta.E("open connection", meta.IO, "", err)
	}
	c.raw = raw
	if u, ok := nc.(*net.UnixConn); ok {
		c.unix = u
		c.oob = make([]byte, unix.CmsgSpace(4))
		// Large appends then take fewer turns between the two processes.
		_ = u.SetWriteBuffer(1 << 20)
		_ = u.SetReadBuffer(1 << 20)
	} else {
		// bbr, the default of some machines, paces connections over short distances, so that a
		// gigabyte costs up to three times as much.
		want := cmp.Or(congestion, "cubic")
		var serr error
		err := raw.Control(func(fd uintptr) {
			serr = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, want)
		})
		if err = errors.Join(err, serr); err != nil && congestion != "" {
			return nil, meta.E("set congestion control", meta.Invalid, congestion, err)
		}
		_ = raw.Control(func(fd uintptr) { grow(int(fd)) })
	}
	return c, nil
}

// grow makes a socket buffer that many bytes before they are read, as far as the machine
// allows. The kernel would reach that size by itself, but slowly, and until then a reader of
// much data would wait and be woken for few bytes. Asking for wake-ups at so many bytes
// enlarges the buffer permanently; SO_RCVBUF would be bounded by rmem_max and end the kernel's
// own tuning.
func grow(fd int) {
	const room = 8 << 20
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, room) == nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVLOWAT, 1)
	}
}

// TLS reports whether the connection is encrypted.
func (c *Conn) TLS() bool { return c.tls }

// Local reports whether descriptors can be passed.
func (c *Conn) Local() bool { return c.unix != nil }

// Block makes reads and writes of a Unix connection block their thread instead of parking the
// goroutine: the kernel then wakes the waiting thread directly, which halves the time of a
// round trip, at the price of a thread. Deadlines have no effect any more.
func (c *Conn) Block() {
	if c.unix == nil || c.blocking.Load() {
		return
	}
	_ = c.raw.Control(func(fd uintptr) { c.blocking.Store(unix.SetNonblock(int(fd), false) == nil) })
}

// Close closes the connection; readers and writers fail.
func (c *Conn) Close() error {
	if c.blocking.Load() {
		// Nothing else would wake a thread in read(2) or write(2).
		_ = c.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
	return c.nc.Close()
}

// NetConn is the connection below, for deadlines and addresses.
func (c *Conn) NetConn() net.Conn { return c.nc }

// Buffered returns the number of bytes read ahead.
func (c *Conn) Buffered() int { return c.w - c.r }

// fill reads until at least n bytes are buffered; n is at most readAhead.
func (c *Conn) fill(n int) error {
	if c.w-c.r >= n {
		return nil
	}
	if c.r > 0 {
		copy(c.buf, c.buf[c.r:c.w])
		c.w -= c.r
		c.r = 0
	}
	for c.w < n {
		to := len(c.buf)
		if c.few {
			to = max(n, c.w+readLess)
		}
		k, err := c.read(c.buf[c.w:min(to, len(c.buf))])
		if err != nil {
			if errors.Is(err, io.EOF) && c.w > 0 {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		c.w += k
	}
	return nil
}

// Received returns the number of bytes read so far, including those of an incomplete frame.
func (c *Conn) Received() uint64 { return c.came.Load() }

func (c *Conn) read(p []byte) (int, error) {
	if c.unix == nil {
		return (*body)(c).Read(p)
	}
	n, oobn, _, _, err := c.unix.ReadMsgUnix(p, c.oob)
	c.came.Add(uint64(max(n, 0)))
	if oobn > 0 {
		if err := c.descriptors(c.oob[:oobn]); err != nil {
			return 0, err
		}
	}
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// body reads bytes that can't have descriptors: these come with a frame's first byte.
type body Conn

func (b *body) Read(p []byte) (int, error) {
	n, err := b.nc.Read(p)
	b.came.Add(uint64(n))
	return n, err
}

func (c *Conn) descriptors(oob []byte) error {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return err
	}
	for _, m := range msgs {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue
		}
		c.fds = append(c.fds, fds...)
	}
	if len(c.fds) > 4 {
		for _, fd := range c.fds {
			unix.Close(fd)
		}
		c.fds = nil
		return meta.E("read frame", meta.Protocol, "", errors.New("descriptors that no frame announced"))
	}
	return nil
}

// Next reads the next frame's header and body. The body is valid until the
// next call of Next, Data or Skip; then the frame's data must be taken with Data or Skip.
func (c *Conn) Next() (h Header, body []byte, err error) {
	if err := c.fill(HeaderSize); err != nil {
		return h, nil, err
	}
	if h, err = ParseHeader(c.buf[c.r : c.r+HeaderSize]); err != nil {
		return h, nil, err
	}
	n := HeaderSize + int(h.Body)
	if err := c.fill(n); err != nil {
		return h, nil, err
	}
	header, body := c.buf[c.r:c.r+HeaderSize], c.buf[c.r+HeaderSize:c.r+n]
	c.r += n
	if err := h.CheckBody(body); err != nil || c.macs == nil {
		return h, body, err
	}
	body, err = c.macs.open(header, body)
	return h, body, err
}

// Data reads len(p) bytes of the frame's data straight into p.
func (c *Conn) Data(p []byte) error {
	c.few = len(p) > readAhead
	return c.Rest(p)
}

// Rest is Data for the bytes that DataNow did not read.
func (c *Conn) Rest(p []byte) error {
	n := copy(p, c.buf[c.r:c.w])
	c.r += n
	if n == len(p) {
		return nil
	}
	_, err := io.ReadFull((*body)(c), p[n:])
	return err
}

// Plain reports whether DataNow and Ready may be used: the bytes of the socket are those of
// the frames.
func (c *Conn) Plain() bool { return c.unix == nil && !c.tls }

// DataNow reads, without waiting, the available part of the next len(p) bytes of the frame's
// data, and with last, in the same call, the head of the next frame. The connection must be
// Plain. n < len(p): more bytes have not arrived; Rest reads them.
func (c *Conn) DataNow(p []byte, last bool) (n int, err error) {
	n = copy(p, c.buf[c.r:c.w])
	c.r += n
	c.few = true
	if n == len(p) {
		return n, nil
	}
	c.r, c.w = 0, 0
	less := 0
	if last {
		less = readLess
	}
	rerr := c.raw.Read(func(fd uintptr) bool {
		for n < len(p) {
			k, e := unix.Readv(int(fd), [][]byte{p[n:], c.buf[:less]})
			switch {
			case e == unix.EINTR:
				continue
			case e == unix.EAGAIN:
				return true
			case e != nil:
				err = os.NewSyscallError("readv", e)
				return true
			case k <= 0:
				err = io.ErrUnexpectedEOF
				return true
			}
			c.came.Add(uint64(k))
			c.w = max(0, k-(len(p)-n))
			n += k - c.w
		}
		return true
	})
	if err == nil {
		err = rerr
	}
	return n, err
}

// Ready reports that Next will not wait.
func (c *Conn) Ready() bool {
	have := c.w - c.r
	return have >= HeaderSize && have-HeaderSize >= int(binary.BigEndian.Uint32(c.buf[c.r+16:]))
}

// Skip reads and drops n bytes of the frame's data.
func (c *Conn) Skip(n int) error {
	k := min(n, c.w-c.r)
	c.r += k
	_, err := io.CopyN(io.Discard, (*body)(c), int64(n-k))
	return err
}

// Descriptor takes a received descriptor; the caller closes it.
func (c *Conn) Descriptor() (int, error) {
	if len(c.fds) == 0 {
		return -1, meta.E("read frame", meta.Protocol, "", errors.New("a descriptor was announced, none came"))
	}
	fd := c.fds[0]
	c.fds = c.fds[1:]
	return fd, nil
}

// DropDescriptors closes descriptors nobody took, when the reader ends.
func (c *Conn) DropDescriptors() {
	for _, fd := range c.fds {
		unix.Close(fd)
	}
	c.fds = nil
}

// Queue adds a frame without data to the bytes that the next Flush or Send writes.
func (c *Conn) Queue(frame []byte) {
	c.mu.Lock()
	c.gather(frame)
	c.mu.Unlock()
}

// SendSoon is Send for small frames that others will follow: it may collect them for up to a
// millisecond, or until Flush or Send. It copies the bytes.
func (c *Conn) SendSoon(frame, data []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.out)+len(frame)+len(data) > readAhead {
		return c.write(frame, data)
	}
	c.gather(frame)
	c.out = append(c.out, data...)
	if !c.due {
		c.due = true
		if c.soon == nil {
			c.soon = time.AfterFunc(gather, func() { _ = c.Flush() }) // the next write tells of an error
		} else {
			c.soon.Reset(gather)
		}
	}
	return c.werr
}

// gather is how long SendSoon may hold frames back.
const gather = time.Millisecond

// Flush writes the frames of Queue and SendSoon.
func (c *Conn) Flush() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.due = false
	if len(c.out) == 0 {
		return c.werr
	}
	return c.write(nil, nil)
}

// Send writes a frame and its data, after the queued frames.
func (c *Conn) Send(frame, data []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.write(frame, data)
}

// gather adds a frame to the bytes to be written.
func (c *Conn) gather(frame []byte) {
	if c.macs != nil && len(frame) > 0 {
		c.out = c.macs.seal(c.out, frame)
		return
	}
	c.out = append(c.out, frame...)
}

// write sends out, frame and data. The connection is useless after an error.
func (c *Conn) write(frame, data []byte) error {
	if c.werr != nil {
		return c.werr
	}
	c.gather(frame)
	if len(data) == 0 {
		_, c.werr = c.nc.Write(c.out)
	} else {
		c.vecs = append(c.vecs[:0], c.out, data)
		v := c.vecs
		_, c.werr = v.WriteTo(c.nc)
		clear(c.vecs)
	}
	c.out = c.out[:0]
	return c.werr
}

// SendDescriptor writes a frame with a descriptor, then its data.
func (c *Conn) SendDescriptor(frame, data []byte, fd int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.out) > 0 {
		if err := c.write(nil, nil); err != nil {
			return err
		}
	}
	if c.werr != nil {
		return c.werr
	}
	n, _, err := c.unix.WriteMsgUnix(frame, unix.UnixRights(fd), nil)
	if err != nil {
		c.werr = err
		return err
	}
	if n < len(frame) || len(data) > 0 {
		return c.write(frame[n:], data)
	}
	return nil
}

// SendFile writes a frame and n bytes of a file from off on, without copying them through this
// process unless they are encrypted. A file that turns out shorter breaks the connection.
func (c *Conn) SendFile(frame []byte, fd int, off int64, n int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tls {
		if err := c.write(frame, nil); err != nil {
			return err
		}
		if c.werr = c.copyFile(fd, off, n); c.werr != nil {
			c.nc.Close()
		}
		return c.werr
	}
	if c.werr != nil {
		return c.werr
	}
	c.gather(frame)
	head := c.out
	var serr error
	err := c.raw.Write(func(sock uintptr) bool {
		// The head goes with the first data: alone, it would wake the receiver for nothing.
		for len(head) > 0 {
			k, err := unix.SendmsgN(int(sock), head, nil, nil, unix.MSG_MORE|unix.MSG_NOSIGNAL)
			switch {
			case err == unix.EINTR:
			case err == unix.EAGAIN:
				return false
			case err != nil:
				serr = os.NewSyscallError("sendmsg", err)
				return true
			}
			head = head[max(k, 0):]
		}
		for n > 0 {
			k, err := unix.Sendfile(int(sock), fd, &off, n)
			switch {
			case err == unix.EINTR:
			case err == unix.EAGAIN:
				return false
			case err != nil:
				serr = os.NewSyscallError("sendfile", err)
				return true
			case k == 0:
				serr = io.ErrUnexpectedEOF
				return true
			}
			n -= max(k, 0)
		}
		return true
	})
	c.out = c.out[:0]
	if c.werr = errors.Join(err, serr); c.werr != nil {
		c.nc.Close()
	}
	return c.werr
}

var copies = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// copyFile does through TLS what sendfile does without.
func (c *Conn) copyFile(fd int, off int64, n int) error {
	buf := copies.Get().(*[]byte)
	defer copies.Put(buf)
	for n > 0 {
		p := (*buf)[:min(n, len(*buf))]
		k, err := unix.Pread(fd, p, off)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return os.NewSyscallError("pread", err)
		case k == 0:
			return io.ErrUnexpectedEOF
		}
		if _, err := c.nc.Write(p[:k]); err != nil {
			return err
		}
		off, n = off+int64(k), n-k
	}
	return nil
}
