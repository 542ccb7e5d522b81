package penstock

import (
	"context"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// LeadOptions says how a client leads a file.
type LeadOptions struct {
	// Address is told to everybody who asks for the leader; at most meta.MaxLeaderAddress bytes.
	Address string
	// Wait: while another client leads the file, wait for the end of its leadership, instead of
	// failing with Busy.
	Wait bool
}

// Leadership is the right of this client to be the only writer of a file.
type Leadership struct {
	v     *Volume
	ino   meta.Ino
	epoch uint64
	since uint64 // Volume.epoch when the leadership began
	done  chan struct{}
}

// leadPoll is how often a waiting client asks whether it may lead.
const leadPoll = 50 * time.Millisecond

// leaderships are the files that this client leads, or is about to lead (nil).
type leaderships struct {
	mu sync.Mutex
	m  map[meta.Ino]*Leadership
}

// Leaderships begins leaderships of files of a volume, and asks for leaders.
type Leaderships struct{ v *Volume }

// Leaderships gives the calls about leaders of files of the volume.
func (v *Volume) Leaderships() Leaderships { return Leaderships{v} }

// Lead makes this client the leader of a regular file. When Lead returns, the writer before
// can append nothing more to the file, alive or not, and the file's size is final until the
// leader appends. While the leadership lasts, other clients can't write the file. Errors: Busy
// (another client leads the file, or this one does), Interrupted (ctx ended), SessionExpired.
func (ls Leaderships) Lead(ctx context.Context, ino meta.Ino, how LeadOptions) (*Leadership, error) {
	v := ls.v
	if v.frozen() {
		return nil, meta.E("lead", meta.ReadOnly, v.subject(ino), nil)
	}
	own := &v.leaderships
	own.mu.Lock()
	if _, have := own.m[ino]; have {
		own.mu.Unlock()
		return nil, meta.E("lead", meta.Busy, v.subject(ino), errors.New("this client leads the file, or is about to"))
	}
	if own.m == nil {
		own.m = map[meta.Ino]*Leadership{}
	}
	own.m[ino] = nil
	own.mu.Unlock()
	l, err := ls.try(ctx, ino, how)
	own.mu.Lock()
	defer own.mu.Unlock()
	if errors.Is(err, meta.Interrupted) {
		v.c.spawn(func() { ls.endStray(ino) })
		return nil, err // no other call of this client leads the file before endStray
	}
	delete(own.m, ino)
	if err != nil {
		return nil, err
	}
	if l.since != v.owner.epoch.Load() { // the session expired, and nobody could tell this leadership
		return nil, meta.E("lead", meta.SessionExpired, v.subject(ino), nil)
	}
	own.m[ino] = l
	return l, nil
}

func (ls Leaderships) try(ctx context.Context, ino meta.Ino, how LeadOptions) (*Leadership, error) {
	v := ls.v
	for {
		since := v.owner.epoch.Load()
		res, _, err := v.owner.do(ctx, nil, &meta.Lead{Ino: ino, Address: how.Address}, meta.LeaseNone)
		switch {
		case err == nil:
			return &Leadership{v: v, ino: ino, epoch: res.Off, since: since, done: make(chan struct{})}, nil
		case !how.Wait || !errors.Is(err, meta.Busy) && !errors.Is(err, meta.SessionExpired):
			return nil, err
		}
		select {
		case <-time.After(leadPoll):
		case <-ctx.Done():
			return nil, meta.E("lead", meta.Interrupted, v.subject(ino), context.Cause(ctx))
		}
	}
}

// endStray ends the leadership that the owner may have granted to a request that was given up.
func (ls Leaderships) endStray(ino meta.Ino) {
	v := ls.v
	if err := ls.end(v.c.ctx, ino, 0); err != nil {
		v.c.log.Warn("an unwanted leadership could not be ended: it ends with the session", "volume", v.name, "inode", ino, "err", err)
	}
	own := &v.leaderships
	own.mu.Lock()
	defer own.mu.Unlock()
	delete(own.m, ino)
}

func (ls Leaderships) end(ctx context.Context, ino meta.Ino, epoch uint64) error {
	_, _, err := ls.v.owner.do(ctx, nil, &meta.EndLead{Ino: ino, Epoch: epoch}, meta.LeaseNone)
	return err
}

// Leader returns the address that the leader of a file gave, and the epoch. Errors: NotFound
// (no client leads the file).
func (ls Leaderships) Leader(ctx context.Context, ino meta.Ino) (address string, epoch uint64, err error) {
	res, _, err := ls.v.owner.do(ctx, nil, &meta.Leader{Ino: ino}, meta.LeaseNone)
	if err != nil {
		return "", 0, err
	}
	return string(res.Data), res.Off, nil
}

// Epoch is greater than the epoch of every earlier leadership of the file, also of those that a
// rollback of the volume undid.
func (l *Leadership) Epoch() uint64 { return l.epoch }

// Done returns a channel that is closed when the leadership has ended: it was released, or the
// client learned that its session ended. A client that is cut off learns that later: see Valid.
func (l *Leadership) Done() <-chan struct{} { return l.done }

// Valid reports whether the leadership surely lasts: no other client leads the file. It is
// false as soon as the client's lease may have ended, and may be true again after a renewal.
func (l *Leadership) Valid() bool {
	select {
	case <-l.done:
		return false
	default:
	}
	return l.since == l.v.owner.epoch.Load() && l.v.c.sess.LeaseLeft(l.v.id) > 0
}

// Write writes all of p at an offset of the file, as Volume.Write does, in the session of the
// leadership only: a leader that slept while others led the file writes nothing. Errors:
// SessionExpired, and errors of Volume.Write.
func (l *Leadership) Write(ctx context.Context, p []byte, off int64) (int, error) {
	in := l.v.node(l.ino)
	defer in.put()
	if len(p) == 0 {
		return 0, nil
	}
	return l.v.buffers.write(ctx, nil, in, p, writing{off: off, epoch: l.since})
}

// CreateOpen makes and opens a file as Volume.CreateOpen does. As long as the leadership lasts,
// the owner makes the file; a request that comes to the owner later changes nothing. The same holds
// for Unlink, Rename and Truncate. Errors: Fenced (the leadership has ended), and errors of
// Volume.CreateOpen.
func (l *Leadership) CreateOpen(ctx context.Context, req meta.Create, flags uint32) (OpenInfo, error) {
	req.Led = l.condition()
	return l.v.CreateOpen(ctx, nil, req, flags)
}

// Unlink removes the name of a file while the leadership lasts: see CreateOpen. Errors: Fenced,
// and errors of Volume.Unlink.
func (l *Leadership) Unlink(ctx context.Context, parent meta.Ino, name string) error {
	return l.v.Unlink(ctx, l.call(), parent, name, false)
}

// Rename gives a file of a directory another name there while the leadership lasts: see CreateOpen.
// The flags are those of renameat2(2). Errors: Fenced, and errors of Volume.Rename.
func (l *Leadership) Rename(ctx context.Context, dir meta.Ino, name, newName string, flags uint32) error {
	return l.v.Rename(ctx, l.call(), dir, name, dir, newName, flags)
}

// Truncate changes the size of the led file while the leadership lasts: see CreateOpen. Errors:
// Fenced, and errors of Volume.SetAttr.
func (l *Leadership) Truncate(ctx context.Context, size int64) error {
	_, err := l.v.SetAttr(ctx, nil, meta.SetAttr{Ino: l.ino, Mask: meta.SetSize, Size: uint64(size), Led: l.condition()})
	return err
}

func (l *Leadership) condition() meta.Led { return meta.Led{Ino: l.ino, Epoch: l.epoch} }

// call is the call of a change of names.
func (l *Leadership) call() *Call { return &Call{led: l.condition()} }

// within is the condition of the changes of names of a call.
func (c *Call) within() meta.Led {
	if c == nil {
		return meta.Led{}
	}
	return c.led
}

// Release ends the leadership. What the client wrote before is kept. Release of a leadership
// that has ended does nothing. After an error the leadership has ended for this client; other
// clients may get Busy until this client leads the file again or its session ends.
func (l *Leadership) Release(ctx context.Context) error {
	own := &l.v.leaderships
	if !own.end(l) {
		return nil
	}
	return Leaderships{l.v}.end(ctx, l.ino, l.epoch)
}

// end closes Done of a leadership, and returns false if the leadership ended before.
func (ls *leaderships) end(l *Leadership) bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.m[l.ino] != l {
		return false
	}
	delete(ls.m, l.ino)
	close(l.done)
	return true
}

// endAll ends all leaderships, because the session ended.
func (ls *leaderships) endAll() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for ino, l := range ls.m {
		if l != nil {
			delete(ls.m, ino)
			close(l.done)
		}
	}
}
