package hold

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"sync"
	"time"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
)

// Registration is this process's place as the server of one mount. It outlives the holder:
// what was put is given to the next holder as well.
type Registration struct {
	cfg RegistrationConfig

	mu     sync.Mutex
	client *Client // to the present holder
	name   string  // of the mount; "": none was put
	fds    [2]*os.File
	closed bool
	number uint64        // the kernel's, of the mount's connection
	yields chan struct{} // closed when this process is to go
	lost   chan struct{} // closed when another process serves already
}

// RegistrationConfig says how a process serves.
type RegistrationConfig struct {
	Command Command // starts its successor
	// Redial reaches the holder again when it was replaced; nil: that is not tried.
	Redial func(context.Context) (*Client, error)
	Logger *slog.Logger
}

// NewRegistration begins with a connection, which it takes over, and no mount.
func NewRegistration(c *Client, cfg RegistrationConfig) *Registration {
	return &Registration{cfg: cfg, client: c, yields: make(chan struct{}), lost: make(chan struct{})}
}

// Client is the connection to the present holder.
func (r *Registration) Client() *Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.client
}

// Taking gives a context that ends when the holder does not wait any longer for this process
// to serve the mount that it took: then another process may have it. stop is to be called
// once this process serves.
func (r *Registration) Taking(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	c := r.Client()
	go func() { // ends with stop at the latest
		select {
		case <-c.gone:
			cancel(meta.E("take over mount", meta.Unavailable, "", errors.New("the holder is gone, or did not wait any longer")))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// Put hands a mount to the holder, and from then on to each holder that follows. The caller
// keeps its descriptors. Errors: as of Client.Put.
func (r *Registration) Put(name string, number uint64, device, memory int) (err error) {
	r.name, r.number = name, number
	for i, fd := range []int{device, memory} {
		if r.fds[i], err = kernel.DupFile(fd); err != nil {
			return err
		}
	}
	c := r.Client()
	if err := c.Put(name, r.cfg.Command, number, r.fds[0], r.fds[1]); err != nil {
		return err
	}
	go r.watch(c) // ends with Close, or the process
	return nil
}

// redialEvery is how often a holder is looked for when the last one is gone.
const redialEvery = 100 * time.Millisecond

// watch waits until this process is to yield, and puts the mount again when the holder is gone.
func (r *Registration) watch(c *Client) {
	for {
		select {
		case <-c.yield:
			close(r.yields)
			return
		case <-c.gone:
		}
		if c = r.putAgain(); c == nil {
			return
		}
		r.cfg.Logger.Info("held again", "dir", r.name)
	}
}

// putAgain tries until the next holder has the mount; nil: the registration is over.
func (r *Registration) putAgain() *Client {
	log, said := r.cfg.Logger, ""
	say := func(what string, err error) { // once
		if what != said {
			said = what
			log.Warn(what, "dir", r.name, "err", err)
		}
	}
	for ; ; time.Sleep(redialEvery) {
		if r.isClosed() || r.cfg.Redial == nil {
			return nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), answerIn)
		next, err := r.cfg.Redial(ctx)
		cancel()
		if err != nil {
			say("the holder of this mount is gone; looking for its successor", err)
			continue
		}
		err = next.Put(r.name, r.cfg.Command, r.number, r.fds[0], r.fds[1])
		if errors.Is(err, meta.Busy) {
			// The holder had given this process up. To go on would be to serve beside another.
			log.Error("a new holder has given this mount to another process", "dir", r.name, "err", err)
			next.Close()
			close(r.lost)
			return nil
		}
		if err != nil {
			say("a new holder does not hold this mount", err)
			next.Close()
			continue
		}
		r.mu.Lock()
		r.client = next
		closed := r.closed
		r.mu.Unlock()
		if closed {
			next.Close()
			return nil
		}
		return next
	}
}

func (r *Registration) isClosed() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.closed
}

// Yields is closed when another process is to take the mount over: this one is to go.
func (r *Registration) Yields() <-chan struct{} { return r.yields }

// Lost is closed when another process serves the mount: this one is to end at once.
func (r *Registration) Lost() <-chan struct{} { return r.lost }

// Leave returns true when a holder keeps the mount without this process. Without a holder it
// waits for the next one: with this process the mount would end. ctx and ended end the waiting.
func (r *Registration) Leave(ctx context.Context, ended <-chan struct{}) bool {
	for said := false; ; said = true {
		err := r.Client().Leave(r.name)
		if err == nil {
			return true
		}
		if !said {
			r.cfg.Logger.Warn("this process is to leave its mount, and no holder has it: it goes on until one does", "dir", r.name, "err", err)
		}
		select {
		case <-time.After(redialEvery):
		case <-r.yields:
			return true
		case <-r.lost:
			return true
		case <-ended:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// Drop tells the holder that the mount has ended.
func (r *Registration) Drop() error {
	r.mu.Lock()
	c := r.client
	r.closed = true // a holder may end with its last mount
	r.mu.Unlock()
	return c.Drop(r.name)
}

// Close ends the connection and lets go of the mount: the holder takes this process for gone.
func (r *Registration) Close() {
	r.mu.Lock()
	r.closed = true
	c := r.client
	r.mu.Unlock()
	c.Close()
	closeAll(r.fds[:])
}
