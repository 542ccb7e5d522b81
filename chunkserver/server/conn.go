package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

const (
	helloWait = 10 * time.Second
	// maxBusy bounds the concurrent requests of one connection. Appends are not counted: the
	// connection's reader does them in order.
	maxBusy = 128
	// maxShare bounds the ring of a client, in bytes.
	maxShare = 64 << 20
)

// conn is one client's connection.
type conn struct {
	*wire.Conn
	s        *Server
	who      peer.Identity
	from     net.Conn // as it was accepted
	counted  bool     // in Server.accepted; guarded by the server's mu
	trusted  bool     // same user or root: may be passed descriptors
	plain    bool     // ticketed: others may have seen the bytes on it
	data     []byte
	ring     []byte
	busy     chan struct{}
	ctx      context.Context // ends with the connection
	end      context.CancelFunc
	answers  *semaphore.Weighted
	peers    *share       // with others of the same identity; guarded by Server.mu
	since    atomic.Int64 // unix nanoseconds: start of the append under way; 0: none
	beating  atomic.Bool  // a sign of life is being sent
	wg       sync.WaitGroup
	raws     raws         // reads sent from the file itself
	frame    []byte       // scratch of the reader
	queued   int          // unflushed answers to appends
	last     meta.ChunkID // chunk of the last append
	unsynced int          // bytes appended since the last sync
	streak   int          // consecutive appends to last, up to aloneFrom
	alone    bool         // has a thread of its own, counted in Server.threads
}

func newConn(s *Server, nc net.Conn, who peer.Identity) (*conn, error) {
	w, err := wire.NewConn(nc, s.cfg.Congestion)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: w, s: s, who: who, trusted: who.Local, busy: make(chan struct{}, maxBusy), answers: semaphore.NewWeighted(answersConn)}
	c.ctx, c.end = context.WithCancel(s.ctx)
	return c, nil
}

// serve reads frames until the connection ends.
func (c *conn) serve() {
	err := c.loop()
	c.Close()
	c.end()
	c.wg.Wait()
	c.DropDescriptors()
	if c.alone {
		c.s.threads.Add(-1)
	}
	c.s.mu.Lock()
	delete(c.s.conns, c)
	if c.counted {
		c.s.accepted--
	}
	c.unshare()
	c.s.mu.Unlock()
	if c.ring != nil {
		unix.Munmap(c.ring)
	}
	switch meta.KindOf(err) {
	case meta.Protocol, meta.Version, meta.AccessDenied:
		c.s.refusals.Warn(c.s.slog, "chunk connection ended", "peer", c.NetConn().RemoteAddr().String(), "err", err)
	}
}

func (c *conn) loop() error {
	_ = c.NetConn().SetReadDeadline(time.Now().Add(helloWait))
	greeted := false
	for {
		h, body, err := c.Next()
		if err != nil {
			if k := meta.KindOf(err); k == meta.Version || k == meta.Protocol {
				c.send(wire.Hello, 0, 0, &wire.Answer{Kind: k, Detail: err.Error()})
			}
			return err
		}
		c.s.frames.Add(1)
		q, err := wire.DecodeRequest(h.Type, h.Flags, body)
		if err != nil {
			c.send(h.Type&^wire.Reply, 0, h.ID, &wire.Answer{Kind: meta.Protocol, Detail: err.Error()})
			return err
		}
		if !greeted {
			if h.Type != wire.Hello || h.Data != 0 {
				return meta.E("chunk connection", meta.Protocol, "", errors.New("no hello"))
			}
			greeted = true
			if c.who.Role == "" && !c.who.Anyone() {
				if err := c.ticketed(h, &q); err != nil {
					return err
				}
				if err := c.s.known(c); err != nil {
					return err
				}
				_ = c.NetConn().SetReadDeadline(time.Time{})
				continue
			}
			if err := c.s.known(c); err != nil {
				return err
			}
			_ = c.NetConn().SetReadDeadline(time.Time{})
			if err := c.send(wire.Hello, 0, h.ID, &wire.Answer{Speaks: min(q.Speaks, wire.Version), Server: c.s.cfg.ID, Host: c.s.cfg.Host}); err != nil {
				return err
			}
			continue
		}
		if h.Data != 0 && h.Type != wire.Append {
			return meta.E("chunk connection", meta.Protocol, "", fmt.Errorf("data with type %d", h.Type))
		}
		switch h.Type {
		case wire.Append:
			c.settle(q.Chunk)
			err = c.append(h, &q)
		case wire.Ping:
			if err = c.authorize(h, &q, 0); err == nil {
				err = c.send(wire.Ping, 0, h.ID, &wire.Answer{})
			}
		case wire.Share:
			if err = c.authorize(h, &q, 0); err == nil {
				err = c.share(q.Off)
			}
			err = c.send(wire.Share, 0, h.ID, answer(err))
		case wire.Ticket:
			var a wire.Answer
			if err = c.authorize(h, &q, 0); err == nil {
				a, err = c.s.ticket(c.who, time.Now())
			}
			if err != nil {
				a = *answer(err)
			}
			err = c.send(wire.Ticket, 0, h.ID, &a)
		case wire.Hello:
			err = meta.E("chunk connection", meta.Protocol, "", errors.New("a second hello"))
		default:
			// The body is overwritten by the next frame.
			q.Cap = append([]byte(nil), q.Cap...)
			// The answer to a sync also acknowledges a single append of the same chunk that
			// waits before it.
			if h.Type != wire.Sync || c.queued > 1 || c.last != q.Chunk {
				err = c.flush()
			}
			c.queued = 0
			if h.Type == wire.Sync {
				// A long sync must not keep us from answering pings.
				small := c.unsynced <= smallSync
				c.unsynced = 0
				if small && c.streak >= aloneFrom && c.Buffered() == 0 {
					c.since.Store(time.Now().UnixNano())
					c.request(h, q)
					c.since.Store(0)
					break
				}
			}
			c.busy <- struct{}{}
			if h.Type == wire.Read && h.Flags&wire.FlagRaw != 0 {
				c.queueRaw(raw{h, q})
				break
			}
			c.wg.Go(func() {
				c.request(h, q)
				<-c.busy
			})
		}
		if err != nil {
			return err
		}
	}
}

// settle notes the chunk of the connection's last append. One thread without hand-overs serves
// a connection that has carried the appends of a single writer for a while: the thread blocks
// in reads, and syncs itself.
func (c *conn) settle(id meta.ChunkID) {
	switch {
	case id != c.last:
		c.streak = 0
	case c.streak < aloneFrom:
		if c.streak++; c.streak == aloneFrom {
			c.takeThread()
		}
	}
	c.last = id
}

// takeThread gives a local connection a thread of its own, unless maxThreads connections have
// one. The end of the connection gives the thread back.
func (c *conn) takeThread() {
	if c.alone || !c.Local() {
		return
	}
	if c.s.threads.Add(1) > maxThreads {
		c.s.threads.Add(-1)
		return
	}
	c.alone = true
	c.Block()
}

const (
	aloneFrom  = 8
	maxThreads = 64
	smallSync  = 1 << 20
)

// answer returns a reply with an error, or with success.
func answer(err error) *wire.Answer {
	a := &wire.Answer{}
	if err != nil {
		a.Kind = meta.KindOf(err)
		// The client adds the operation and the subject again.
		var e *meta.Error
		switch {
		case !errors.As(err, &e):
			a.Detail = err.Error()
		case e.Err != nil:
			a.Detail = e.Err.Error()
		}
	}
	return a
}

func (c *conn) send(t wire.Type, flags uint16, id uint64, a *wire.Answer) error {
	return c.Send(a.AppendFrame(nil, t, flags, id, 0, 0), nil)
}

// append does one append in the reader's goroutine, so that appends keep their order. Replies
// are collected while more frames wait.
func (c *conn) append(h wire.Header, q *wire.Request) error {
	shared := h.Flags&wire.FlagShared != 0
	n := int(h.Data)
	if shared {
		n = int(q.N)
	}
	// Nothing is allocated for the bytes before the capability is checked.
	err := c.authorize(h, q, n)
	var p []byte
	crc := h.DataCRC
	switch {
	case shared && h.Data != 0:
		return meta.E("chunk connection", meta.Protocol, "", errors.New("data beside a shared append"))
	case shared:
		if end := q.Pos + uint64(n); end > uint64(len(c.ring)) || end < q.Pos {
			return meta.E("chunk connection", meta.Protocol, "", fmt.Errorf("shared append at %d of a ring of %d", q.Pos, len(c.ring)))
		}
		p, crc = c.ring[q.Pos:q.Pos+uint64(n)], q.CRC
		c.s.shared.Add(1)
	case err != nil:
		if err := c.Skip(n); err != nil {
			return err
		}
	default:
		if cap(c.data) < n {
			c.data = make([]byte, max(n, 64<<10))
		}
		p = c.data[:n]
		if err := c.Data(p); err != nil {
			return err
		}
	}
	if err == nil {
		c.since.Store(time.Now().UnixNano())
		class := ""
		if q.Off == 0 {
			if claims, cerr := c.s.claims(q.Cap); cerr == nil {
				class = claims.Class
			}
		}
		err = c.s.appendOn(c.s.ctx, class, q.Chunk, q.Fence, q.Off, p, crc)
		c.since.Store(0)
	}
	c.frame = answer(err).AppendFrame(c.frame[:0], wire.Append, 0, h.ID, 0, 0)
	c.Queue(c.frame)
	c.queued++
	c.unsynced += n
	if c.Buffered() < wire.HeaderSize {
		return c.flush()
	}
	return nil
}

func (c *conn) flush() error {
	c.queued = 0
	return c.Flush()
}

// share maps the client's ring. The client may change the ring's bytes at any time, and can
// thereby only make its own chunk corrupt.
func (c *conn) share(size uint64) error {
	const op = "share memory"
	if !c.Local() || !c.trusted {
		return meta.E(op, meta.NotSupported, "", nil)
	}
	fd, err := c.Descriptor()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if size == 0 || size > maxShare || c.ring != nil {
		return meta.E(op, meta.Invalid, "", fmt.Errorf("%d bytes", size))
	}
	// Without a seal against shrinking, reading the memory could kill this process (SIGBUS).
	seals, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	var st unix.Stat_t
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	if err != nil || seals&unix.F_SEAL_SHRINK == 0 || uint64(st.Size) < size {
		return meta.E(op, meta.Invalid, "", errors.New("not a memory file sealed against shrinking"))
	}
	ring, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return meta.E(op, meta.IO, "", err)
	}
	c.ring = ring
	return nil
}

// raws are the waiting reads with FlagRaw, in the order of the requests. One goroutine sends
// the answers: answers take turns on the connection anyway, and a client that reads ahead
// wants the pieces in order, as does the disk. If the goroutine does not find a file in time,
// another goroutine replaces it, so that a hanging disk does not delay other reads.
type raws struct {
	mu      sync.Mutex
	queue   []raw // bounded by conn.busy
	sending bool
}

type raw struct {
	h wire.Header
	q wire.Request
}

func (c *conn) queueRaw(r raw) {
	c.raws.mu.Lock()
	defer c.raws.mu.Unlock()
	c.raws.queue = append(c.raws.queue, r)
	if !c.raws.sending {
		c.raws.sending = true
		c.wg.Go(c.sendRaws)
	}
}

func (c *conn) nextRaw() (r raw, ok bool) {
	c.raws.mu.Lock()
	defer c.raws.mu.Unlock()
	if len(c.raws.queue) == 0 {
		c.raws.sending, c.raws.queue = false, nil
		return r, false
	}
	r, c.raws.queue = c.raws.queue[0], c.raws.queue[1:]
	return r, true
}

func (c *conn) sendRaws() {
	for {
		r, ok := c.nextRaw()
		if !ok {
			return
		}
		c.wg.Add(1)
		successor := time.AfterFunc(c.s.rawWait, func() {
			defer c.wg.Done()
			c.sendRaws()
		})
		fd, crcs, done, err := c.openRaw(&r)
		replaced := !successor.Stop()
		if !replaced {
			c.wg.Done()
		}
		switch {
		case err != nil:
			_ = c.send(wire.Read, 0, r.h.ID, answer(err)) // a broken connection is the reader's to notice
			<-c.busy
		case fd < 0:
			// The chunk has no file of plain bytes: read them, concurrently with others.
			done()
			c.wg.Go(func() {
				c.request(r.h, r.q)
				<-c.busy
			})
		default:
			a, n := wire.Answer{CRCs: crcs}, int(r.q.N)
			_ = c.SendFile(a.AppendFrame(nil, wire.Read, wire.FlagRaw, r.h.ID, n, 0), fd, int64(r.q.Off), n)
			done()
			<-c.busy
		}
		if replaced {
			return
		}
	}
}

// rawWait is how long the file of one read may delay other reads. Opening a file takes
// microseconds, or some milliseconds if the disk is needed.
const rawWait = 50 * time.Millisecond

// openRaw finds the file with the bytes, and the checksums of the bytes; fd < 0: no file.
// Without an error, the caller calls done after sending.
func (c *conn) openRaw(r *raw) (fd int, crcs []uint32, done func(), err error) {
	if err := c.authorize(r.h, &r.q, 0); err != nil {
		return -1, nil, nil, err
	}
	n := uint64(r.q.N)
	if n == 0 || n > wire.MaxData {
		return -1, nil, nil, meta.E("read chunk", meta.Invalid, r.q.Chunk.String(), fmt.Errorf("%d bytes", n))
	}
	st, err := c.s.find(c.s.ctx, r.q.Chunk, false, "")
	if err != nil {
		return -1, nil, nil, err
	}
	return st.Raw(r.q.Chunk, r.q.Off, n)
}

// request does anything but appends and raw reads, beside others.
func (c *conn) request(h wire.Header, q wire.Request) {
	ctx := c.s.ctx
	var a wire.Answer
	err := c.authorize(h, &q, 0)
	if err == nil {
		switch h.Type {
		case wire.Sync:
			a.Synced, err = c.s.Sync(ctx, q.Chunk, q.Off)
		case wire.Stat:
			a.Info, err = c.s.Stat(ctx, q.Chunk)
		case wire.Seal:
			a.Info, err = c.s.Seal(ctx, q.Chunk, q.Fence, q.Final, q.Off)
		case wire.Delete:
			err = c.s.Delete(ctx, q.Chunk, q.Fence)
		case wire.Read:
			if err = c.read(h, q); err == nil {
				return
			}
		case wire.Local:
			if err = c.local(h, q); err == nil {
				return
			}
		}
	}
	if err != nil {
		e := answer(err)
		a.Kind, a.Detail = e.Kind, e.Detail
	}
	_ = c.send(h.Type, 0, h.ID, &a) // a broken connection is the reader's to notice
}

var readPool = sync.Pool{New: func() any { b := make([]byte, 0, 1<<20); return &b }}

// read answers a read. After an error, nothing was sent yet.
func (c *conn) read(h wire.Header, q wire.Request) error {
	n := uint64(q.N)
	if n == 0 || n > wire.MaxData {
		return meta.E("read chunk", meta.Invalid, q.Chunk.String(), fmt.Errorf("%d bytes", n))
	}
	st, err := c.s.find(c.s.ctx, q.Chunk, false, "")
	if err != nil {
		return err
	}
	var a wire.Answer
	giveBack, err := c.room(c.ctx, int64(n))
	if err != nil {
		return err
	}
	defer giveBack()
	buf := readPool.Get().(*[]byte)
	defer readPool.Put(buf)
	if uint64(cap(*buf)) < n {
		*buf = make([]byte, 0, n)
	}
	p := (*buf)[:n]
	if err := st.Read(c.s.ctx, q.Chunk, p, q.Off); err != nil {
		return err
	}
	_ = c.Send(a.AppendFrame(nil, wire.Read, 0, h.ID, int(n), chunkserver.CRC(p)), p)
	return nil
}

// local answers with the means to read a chunk directly. After an error, nothing was sent yet.
func (c *conn) local(h wire.Header, q wire.Request) error {
	if !c.Local() || !c.trusted {
		return meta.E("open chunk", meta.NotSupported, q.Chunk.String(), errors.New("descriptors go to the server's own user on its own machine"))
	}
	st, err := c.s.find(c.s.ctx, q.Chunk, false, "")
	if err != nil {
		return err
	}
	if h.Flags&wire.FlagVerify != 0 {
		if err := st.Verify(c.s.ctx, q.Chunk); err != nil {
			return err
		}
	}
	open := h.Flags&wire.FlagDescriptor != 0
	l, err := st.Local(q.Chunk, q.Off, int(min(q.N, wire.MaxLocal)), open)
	if err != nil {
		return err
	}
	data := make([]byte, 0, 4*len(l.CRCs)+len(l.Verified))
	for _, crc := range l.CRCs {
		data = binary.BigEndian.AppendUint32(data, crc)
	}
	data = append(data, l.Verified...)
	a := wire.Answer{Info: l.Info, First: l.First, Time: l.Changed}
	if !open {
		_ = c.Send(a.AppendFrame(nil, wire.Local, 0, h.ID, len(data), chunkserver.CRC(data)), data)
		return nil
	}
	defer l.File.Close()
	fd, ok := l.File.(interface{ Fd() int })
	if !ok {
		return meta.E("open chunk", meta.NotSupported, q.Chunk.String(), nil)
	}
	c.s.descriptors.Add(1)
	_ = c.SendDescriptor(a.AppendFrame(nil, wire.Local, wire.FlagDescriptor, h.ID, len(data), chunkserver.CRC(data)), data, fd.Fd())
	return nil
}

// ticketed answers the hello of a plain connection, which must bring a ticket.
func (c *conn) ticketed(h wire.Header, q *wire.Request) error {
	if h.Flags&wire.FlagTicket == 0 || len(q.Cap) < wire.NonceSize {
		return meta.E("chunk connection", meta.AccessDenied, "", errors.New("a plain connection without a ticket"))
	}
	ticket, theirs := q.Cap[:len(q.Cap)-wire.NonceSize], q.Cap[len(q.Cap)-wire.NonceSize:]
	secret, who, err := c.s.admit(ticket, time.Now())
	if err != nil {
		_ = c.send(wire.Hello, 0, h.ID, answer(err))
		return err
	}
	ours := make([]byte, wire.NonceSize)
	rand.Read(ours)
	c.s.mu.Lock() // evict looks at connections
	c.who, c.plain = who, true
	evicted := c.s.evicted.Has(who)
	c.s.mu.Unlock()
	if evicted {
		c.s.refused.Add(1)
		return meta.E("chunk connection", meta.AccessDenied, who.String(), errors.New("it was evicted from the cluster"))
	}
	a := &wire.Answer{Speaks: min(q.Speaks, wire.Version), Server: c.s.cfg.ID, Host: c.s.cfg.Host, Ticket: ours}
	if err := c.Send(a.AppendFrame(nil, wire.Hello, wire.FlagTicket, h.ID, 0, 0), nil); err != nil {
		return err
	}
	c.Protect(secret, theirs, ours)
	return nil
}
