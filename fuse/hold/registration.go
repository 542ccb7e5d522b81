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

// Registration is this process's role as the server of one mount. A Registration outlives the
// holder: it puts the mount again to the next holder.
type Registration struct {
	cfg RegistrationConfig

	mu     sync.Mutex
	client *Client // to the present holder
	name   string  // of the mount; "": none was put
	fds    [2]*os.File
	closed bool
	number uint64        // the kernel's, of the mount's connection
	yields chan struct{} // closed when this process must go
	lost   chan struct{} // closed when another process serves already
}

// RegistrationConfig says how a process serves.
type RegistrationConfig struct {
	Command Command // starts the successor
	// Redial reconnects to a replaced holder; nil: no reconnection.
	Redial func(context.Context) (*Client, error)
	Logger *slog.Logger
}

// NewRegistration makes a Registration without a mount. The Registration owns c.
func NewRegistration(c *Client, cfg RegistrationConfig) *Registration {
	return &Registration{cfg: cfg, client: c, yields: make(chan struct{}), lost: make(chan struct{})}
}

// Client is the connection to the present holder.
func (r *Registration) Client() *Client {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.client
}

// Taking returns a context that ends when the holder no longer waits for this process to serve
// the taken mount. Then another process may have the mount. The caller must call stop once
// this process serves.
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

// Put hands a mount to the present holder, and to each later holder. The caller keeps its own
// descriptors. Errors: see Client.Put.
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

// redialEvery is the pause between two attempts to reach the next holder.
const redialEvery = 100 * time.Millisecond

// watch waits until this process must yield, and puts the mount again after the end of a
// holder.
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
		r.cfg.Logger.Info("a holder has the mount again", "dir", r.name)
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
			// The holder gave this process up. Going on would mean two servers of one mount.
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

// Yields is closed when this process must go, since another process will take over the mount.
func (r *Registration) Yields() <-chan struct{} { return r.yields }

// Lost is closed when this process must end at once, since another process serves the mount.
func (r *Registration) Lost() <-chan struct{} { return r.lost }

// Leave returns true once a holder keeps the mount without this process, or another process
// takes over. Without a holder Leave waits for the next holder, since the mount would end with
// this process. Leave returns false if ctx or ended ends the wait.
func (r *Registration) Leave(ctx context.Context, ended <-chan struct{}) bool {
	for said := false; ; said = true {
		err := r.Client().Leave(r.name)
		if err == nil {
			return true
		}
		if !said {
			r.cfg.Logger.Warn("this process shall leave its mount, and no holder has the mount: the process serves until a holder has it", "dir", r.name, "err", err)
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

// Drop notifies the holder that the mount has ended.
func (r *Registration) Drop() error {
	r.mu.Lock()
	c := r.client
	r.closed = true // no redial: the holder may end with its last mount
	r.mu.Unlock()
	return c.Drop(r.name)
}

// Close ends the connection and closes the mount's descriptors. The holder then takes this
// process for gone.
func (r *Registration) Close() {
	r.mu.Lock()
	r.closed = true
	c := r.client
	r.mu.Unlock()
	c.Close()
	closeAll(r.fds[:])
}
