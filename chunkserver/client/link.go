package client

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// The pools. plain is added for connections without TLS, where the volume allows them.
const (
	forOthers = iota
	forAppends
	plain
)

// link is one connection.
type link struct {
	*wire.Conn
	p       *peer
	appends bool  // for appends only; else for everything else
	ring    *ring // of a local connection for appends, else nil
	users   atomic.Int32
	heard   atomic.Int64 // unix nanoseconds of the last frame, of bytes noticed by watch, or of the first request after silence
	coming  atomic.Bool  // an answer has begun and is incomplete
	seen    uint64       // bytes received when watch last looked; used by watch only

	mu      sync.Mutex
	next    uint64
	pending map[uint64]*call
	asked   time.Time // time of the oldest request since the last answer
	err     error
	// held is the frame that the reader's goroutine leaves in the socket while the goroutine
	// waits in hold; nil: none. INVARIANT: while taken is set, only the goroutine that set
	// taken reads from the connection.
	held    *frame
	heldAt  time.Time
	taken   bool
	takeErr error         // the error that ended a take
	hurry   chan struct{} // tells the reader's goroutine to look again
}

// frame is an answer with a complete head and incomplete data.
type frame struct {
	h       wire.Header
	k       *call  // nil: the call has ended
	to      []byte // where the data go; nil: not chosen yet
	got     int    // bytes read so far
	checked int    // of these, bytes taken and verified in parts; a multiple of block, or all
}

// call is a request without an answer yet.
type call struct {
	t      wire.Type
	dst    []byte               // where a read's data go, unless place is set
	place  func() []byte        // called when the data arrive; returns their destination
	hold   bool                 // the data may wait in the socket before that
	turn   chan struct{}        // with hold: signals the waiting reader to take the data
	at     atomic.Pointer[link] // the connection of the call
	wanted atomic.Bool          // with hold: a reader waits, or the data are no longer wanted
	takers atomic.Int32         // with hold: number of readers that wait to take the data
	data   []byte               // a local reply's data
	answer wire.Answer
	flags  uint16
	bad    bool // the data of a read with FlagRaw don't match their checksums
	fd     int  // with FlagDescriptor
	err    error
	done   chan struct{}             // closed at the end, unless notify is set
	notify func(*wire.Answer, error) // called by the reader's goroutine
}

func (l *link) release() { l.users.Add(-1) }

// Patience is how long the client waits for an unreachable chunk server, which may be
// restarting, or may be unknown to a restarted metadata server.
const Patience = 10 * time.Second

// missedLong is how long the last contact with a server says something about it.
const missedLong = time.Minute

// greet exchanges hellos, before the reader runs, and shares a ring where possible.
func (l *link) greet(info meta.ServerInfo, pool int) error {
	a, err := l.hello(info, pool)
	if err == nil {
		err = a.Err("hello", info.Addr)
	}
	if err != nil {
		return err
	}
	if a.Speaks < 1 || a.Speaks > wire.Version {
		return meta.E("hello", meta.Version, info.Addr, fmt.Errorf("it wants to speak version %d of the chunk protocol, this program knows %d", a.Speaks, wire.Version))
	}
	if a.Server != l.p.id {
		return meta.E("hello", meta.Unavailable, info.Addr, fmt.Errorf("server %d answers, not %d", a.Server, l.p.id))
	}
	if pool%plain != forAppends || !l.Local() || l.p.c.cfg.NoShare {
		return nil
	}
	r, err := newRing(ringSize)
	if err != nil {
		return nil // the socket carries the bytes, then
	}
	q := wire.Request{Off: ringSize}
	a, err = l.exchange(wire.Share, q.AppendFrame(nil, wire.Share, 0, 2, 0, 0), r.fd)
	if err != nil {
		r.close()
		return err
	}
	if a.Kind != meta.KindOK {
		r.close()
		return nil
	}
	l.ring = r
	return nil
}

func (l *link) exchange(t wire.Type, frame []byte, fd int) (wire.Answer, error) {
	var err error
	if fd >= 0 {
		err = l.SendDescriptor(frame, nil, fd)
	} else {
		err = l.Send(frame, nil)
	}
	if err != nil {
		return wire.Answer{}, err
	}
	h, body, err := l.Next()
	if err != nil {
		return wire.Answer{}, err
	}
	a, err := wire.DecodeAnswer(h.Type&^wire.Reply, h.Flags, body)
	if err == nil && h.Type != t|wire.Reply {
		if err = a.Err("hello", ""); err == nil {
			err = meta.E("hello", meta.Protocol, "", fmt.Errorf("answer of type %d", h.Type))
		}
	}
	return a, err
}

// start registers a call and returns the id of its request.
func (l *link) start(k *call) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return 0, l.err
	}
	if len(l.pending) == 0 && !l.coming.Load() {
		now := time.Now()
		l.heard.Store(now.UnixNano())
		l.asked = now
	}
	l.next++
	l.pending[l.next] = k
	k.at.Store(l)
	if l.held != nil && !l.taken && k.urgent() {
		l.hurryLocked()
	}
	return l.next, nil
}

// do sends a request and waits for the answer. The error of the answer is in call.err, too.
func (l *link) do(ctx context.Context, q *wire.Request, k *call, flags uint16) error {
	k.done, k.fd = make(chan struct{}), -1
	id, err := l.start(k)
	if err != nil {
		return err
	}
	if err := l.Send(q.AppendFrame(nil, k.t, flags, id, 0, 0), nil); err != nil {
		l.Close() // the connection's reader ends all calls
	}
	select {
	case <-k.done:
	case <-ctx.Done():
		l.mu.Lock()
		_, waiting := l.pending[id]
		delete(l.pending, id)
		l.mu.Unlock()
		if waiting {
			return meta.E("chunk request", meta.Canceled, q.Chunk.String(), ctx.Err())
		}
		l.stop(k.done)
	}
	return k.err
}

// stop waits for the end of a call whose answer is being read: until then the reader's
// goroutine writes to the call's memory. If no more bytes arrive, stop closes the connection.
func (l *link) stop(done <-chan struct{}) {
	select {
	case <-done:
	case <-time.After(cancelWait):
		l.fail(errors.New("the bytes of an answer stopped coming"))
		<-done
	}
}

// cancelWait is how long a canceled call waits for an answer that has begun to arrive.
const cancelWait = 300 * time.Millisecond

// fail ends the connection and all calls.
func (l *link) fail(err error) {
	l.mu.Lock()
	l.err = l.brokenLocked(err)
	err = l.err
	calls := l.pending
	l.pending = nil
	l.hurryLocked()
	l.mu.Unlock()
	l.Close()
	l.p.drop(l)
	for _, k := range calls {
		k.finish(nil, err)
	}
}

// brokenLocked returns the error for the calls of a connection that ends with err.
func (l *link) brokenLocked(err error) error {
	if l.err != nil {
		return l.err
	}
	return meta.E("chunk request", meta.Unavailable, fmt.Sprintf("server %d", uint64(l.p.id)), err)
}

// broken ends a call with incomplete data.
func (l *link) broken(k *call, err error) error {
	l.mu.Lock()
	told := l.brokenLocked(err)
	l.mu.Unlock()
	k.finish(nil, told)
	return err
}

func (k *call) finish(a *wire.Answer, err error) {
	if k.notify != nil {
		k.notify(a, err)
		return
	}
	k.err = err
	close(k.done)
}

// read passes answers to their calls until the connection ends.
func (l *link) read() {
	err := l.loop()
	l.fail(err)
	l.DropDescriptors()
	if l.ring != nil {
		l.ring.close()
	}
}

func (l *link) loop() error {
	for {
		f, err := l.head()
		if err == nil {
			f, err = l.hold(f)
		}
		if err == nil && f != nil {
			err = l.finish(f)
		}
		if err != nil {
			return err
		}
	}
}

// head reads the head of an answer and finds its call.
func (l *link) head() (*frame, error) {
	h, body, err := l.Next()
	if err != nil {
		return nil, err
	}
	l.heard.Store(time.Now().UnixNano())
	if h.Type&wire.Reply == 0 {
		return nil, meta.E("chunk answer", meta.Protocol, "", fmt.Errorf("type %d", h.Type))
	}
	t := h.Type &^ wire.Reply
	a, err := wire.DecodeAnswer(t, h.Flags, body)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	k := l.pending[h.ID]
	delete(l.pending, h.ID)
	l.coming.Store(h.Data > 0)
	if k != nil && t != wire.Ping {
		l.asked = time.Now()
	}
	l.mu.Unlock()
	if h.Flags&wire.FlagDescriptor != 0 {
		fd, err := l.Descriptor()
		if err != nil {
			return nil, err
		}
		if k == nil || k.t != wire.Local {
			closeFD(fd)
		} else {
			k.fd = fd
		}
	}
	if k != nil && k.t != t {
		err := meta.E("chunk answer", meta.Protocol, "", fmt.Errorf("type %d answers type %d", t, k.t))
		k.finish(nil, err)
		return nil, err
	}
	if k != nil {
		k.answer, k.flags = a, h.Flags
	}
	return &frame{h: h, k: k}, nil
}

// finish reads the data of an answer and passes the answer to its call.
func (l *link) finish(f *frame) error {
	if f.k == nil {
		err := l.Skip(int(f.h.Data))
		l.coming.Store(false)
		return err
	}
	if f.h.Data > 0 {
		err := f.choose()
		if err == nil && f.got > 0 {
			err = l.Rest(f.to[f.got:])
		} else if err == nil {
			err = l.Data(f.to)
		}
		if err != nil {
			return l.broken(f.k, err)
		}
	}
	return l.end(f)
}

// end verifies the complete data of an answer and passes the answer to its call.
func (l *link) end(f *frame) error {
	k := f.k
	l.coming.Store(false)
	if err := f.check(); err != nil {
		k.finish(nil, err)
		return err
	}
	k.finish(&k.answer, k.answer.Err("chunk "+names[k.t], ""))
	return nil
}

var names = map[wire.Type]string{wire.Append: "append", wire.Sync: "sync", wire.Read: "read", wire.Local: "open",
	wire.Stat: "stat", wire.Seal: "seal", wire.Delete: "delete"}

// ---- data waiting in the socket

// urgent reports that no data may wait in front of this call's answer.
func (k *call) urgent() bool { return !k.hold || k.wanted.Load() }

// await makes a held call urgent.
func (k *call) await() {
	k.wanted.Store(true)
	if l := k.at.Load(); l != nil {
		l.mu.Lock()
		if l.held != nil && !l.taken {
			l.hurryLocked()
		}
		l.mu.Unlock()
	}
}

func (l *link) hurryLocked() {
	select {
	case l.hurry <- struct{}{}:
	default:
	}
}

// mayHoldLocked reports whether a frame's data may stay in the socket: they belong to a read
// ahead, and no call waits for the data behind them.
func (l *link) mayHoldLocked(f *frame) bool {
	if l.err != nil || f.k == nil || !f.k.hold || f.h.Data == 0 || f.got > f.checked || f.to != nil {
		return false
	}
	for _, other := range l.pending {
		if other.urgent() {
			return false
		}
	}
	return true
}

// hold leaves the data of an answer in the socket until the destination is known. It returns
// the next frame to read: f, a later frame if readers took f, or nil if readers left nothing.
func (l *link) hold(f *frame) (*frame, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mayHoldLocked(f) || f.k.urgent() {
		return f, nil
	}
	select {
	case <-l.hurry: // of the last time
	default:
	}
	l.held, l.heldAt = f, time.Now()
	most := l.p.c.held
	t := time.NewTimer(most)
	defer t.Stop()
	for {
		l.mu.Unlock()
		late := false
		select {
		case <-l.hurry:
		case <-t.C:
			late = true
		}
		l.mu.Lock()
		f, err := l.held, l.takeErr
		age := time.Since(l.heldAt)
		switch {
		case l.taken:
			age = 0 // the taking goroutine signals its end
		case f == nil || err != nil:
			return nil, err
		case !l.mayHoldLocked(f) || f.k.urgent() && !late || age >= most:
			l.held = nil
			return f, nil
		}
		if late {
			t.Reset(most - age)
		}
	}
}

// take reads the data of a held answer in the goroutine of the waiting reader, as far as they
// have arrived, and the head of the next answer, which is then held. So nobody is woken for
// the answers of a stream: the connection's reader sleeps in hold. take leaves data that have
// not arrived to it.
func (l *link) take(k *call) { l.turn(k, l.now) }

// now is take for a goroutine whose turn has come.
func (l *link) now(f *frame) (*frame, error) {
	if f.h.Data == 0 {
		return l.behind(f, nil) // behind reports an error
	}
	err := f.choose()
	if err == nil {
		var n int
		n, err = l.DataNow(f.to[f.got:], true)
		f.got += n
	}
	if err == nil && f.got < len(f.to) {
		return f, nil
	}
	return l.behind(f, err)
}

// takePart reads the bytes of a held answer from at on into p, if the bytes before were taken
// and all of p has arrived and verifies. at, and the end of p unless it is the end of the
// answer, are multiples of a block.
func (l *link) takePart(k *call, p []byte, at int) (ok bool) {
	l.turn(k, func(f *frame) (*frame, error) {
		if f.to != nil || f.got != at || f.checked != at || f.h.Flags&wire.FlagRaw == 0 || at+len(p) > int(f.h.Data) {
			return f, nil
		}
		last := at+len(p) == int(f.h.Data)
		n, err := l.DataNow(p, last)
		f.got += n
		switch {
		case err != nil:
		case n == len(p) && f.matches(p):
			ok = true
			f.checked = f.got
			if !last {
				return f, nil
			}
		default:
			// The remaining data go to the memory of the waiting readers.
			if err = f.choose(); err == nil {
				copy(f.to[at:], p[:n])
				return f, nil
			}
		}
		return l.behind(f, err)
	})
	return ok
}

// turn lets a goroutine other than the connection's reader read from the connection, if the
// data of k are held. read gets the held frame and returns the frame at hand afterwards.
func (l *link) turn(k *call, read func(*frame) (*frame, error)) {
	if !l.Plain() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.held
	if l.taken || f == nil || f.k != k || l.err != nil {
		return
	}
	l.taken = true
	l.p.c.taken.Add(1)
	l.mu.Unlock()
	f, err := read(f)
	l.mu.Lock()
	l.taken, l.held, l.heldAt, l.takeErr = false, f, time.Now(), err
	switch {
	case err != nil || f == nil:
		l.hurryLocked()
	case l.err == nil && f.k != nil && f.k != k && f.k.takers.Load() > 0:
		// The next frame's own reader should continue. If it does not come, await helps.
		select {
		case f.k.turn <- struct{}{}:
		default:
		}
	case !l.mayHoldLocked(f) || f.k.urgent():
		l.hurryLocked()
	}
}

// behind ends a frame whose data were read completely, or failed to be read, and returns the
// next frame, or nil if it has not arrived.
func (l *link) behind(f *frame, err error) (*frame, error) {
	if err != nil {
		return nil, l.broken(f.k, err)
	}
	if err := l.end(f); err != nil || !l.Ready() {
		return nil, err
	}
	return l.head()
}

// choose finds out where a frame's data go.
func (f *frame) choose() error {
	if f.to != nil {
		return nil
	}
	k, n := f.k, int(f.h.Data)
	p := k.dst
	if k.place != nil {
		p = k.place()
	}
	switch {
	case k.t == wire.Read && n == len(p):
	case k.t == wire.Local && n <= 4*wire.MaxLocal+wire.MaxLocal/8:
		k.data = make([]byte, n)
		p = k.data
	default:
		return meta.E("chunk answer", meta.Protocol, "", fmt.Errorf("%d bytes of data for %d", n, len(p)))
	}
	f.to = p
	return nil
}

// matches verifies whole blocks behind the checked bytes.
func (f *frame) matches(p []byte) bool {
	crcs := f.k.answer.CRCs
	if !matches(p, crcs[min(f.checked/block, len(crcs)):]) {
		f.k.bad = true
		return false
	}
	return true
}

// check verifies the data in this goroutine, because the data are in the cache of its core.
func (f *frame) check() error {
	switch {
	case f.h.Data == 0:
	case f.h.Flags&wire.FlagRaw != 0:
		if f.checked < int(f.h.Data) {
			f.matches(f.to[f.checked:])
		}
	case chunkserver.CRC(f.to) != f.h.DataCRC:
		return meta.E("chunk answer", meta.Corrupt, "", errors.New("the bytes changed on the way"))
	}
	return nil
}

// stuckAfter is the number of Timeouts for which a server may show signs of life without
// answering anything: then its disk hangs.
const stuckAfter = 8

// hello is the first exchange on a connection. On a plain connection it shows the ticket, and
// from then on both sides authenticate every frame.
func (l *link) hello(info meta.ServerInfo, pool int) (wire.Answer, error) {
	q := wire.Request{Speaks: wire.Version, Name: l.p.c.cfg.Name}
	if !ticketed(info, pool) {
		return l.exchange(wire.Hello, q.AppendFrame(nil, wire.Hello, 0, 1, 0, 0), -1)
	}
	l.p.mu.Lock()
	t := l.p.ticket
	l.p.mu.Unlock()
	ours := make([]byte, wire.NonceSize)
	rand.Read(ours)
	q.Cap = append(append([]byte(nil), t.bytes...), ours...)
	a, err := l.exchange(wire.Hello, q.AppendFrame(nil, wire.Hello, wire.FlagTicket, 1, 0, 0), -1)
	switch {
	case err != nil:
		return a, err
	case a.Kind != meta.KindOK:
		if a.Kind == meta.BadCapability {
			l.p.mu.Lock()
			l.p.ticket = ticket{} // the server was started again: the next try gets another
			l.p.mu.Unlock()
		}
		return a, nil
	case len(a.Ticket) != wire.NonceSize:
		return a, meta.E("hello", meta.Protocol, info.Addr, errors.New("the server took no notice of the ticket"))
	}
	l.Protect(t.secret, ours, a.Ticket)
	return a, nil
}
