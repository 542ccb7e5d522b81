package failover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
)

// creator makes files in a volume's root, one after the other, and keeps a ledger of its answers.
type creator struct {
	*client.Session
	name    string
	log     *slog.Logger
	vol     meta.VolumeID
	expired atomic.Int32

	mu     sync.Mutex
	made   map[string]meta.Ino
	since  time.Time     // when the call under way began; zero: none is
	slow   time.Duration // the longest call since reset
	calls  []time.Duration
	failed error
}

func (c *creator) Granted(meta.VolumeID, meta.Grant)    {}
func (c *creator) Recall(_ meta.Recall, done func())    { go done() }
func (c *creator) Expired(v []meta.VolumeID, err error) { c.expired.Add(1) }

func (c *creator) run(ctx context.Context) {
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("%s-%d", c.name, i)
		began := time.Now()
		c.mu.Lock()
		c.since = began
		c.mu.Unlock()
		// The call itself is never canceled: the test must know the outcome.
		r, err := c.Do(context.Background(), c.vol, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}, meta.LeaseNone)
		took := time.Since(began)
		if took > 50*time.Millisecond {
			c.log.Info("a create took long", "client", c.name, "name", name, "volume", c.vol, "began", began.Format("15:04:05.000"), "took", took.Round(time.Millisecond))
		}
		c.mu.Lock()
		c.since = time.Time{}
		if err != nil {
			c.failed = fmt.Errorf("%s: %w", name, err)
			c.mu.Unlock()
			return
		}
		c.made[name] = r.Attr.Ino
		c.slow = max(c.slow, took)
		c.calls = append(c.calls, took)
		c.mu.Unlock()
	}
}

// stalled tells for how long the call under way has had no answer.
func (c *creator) stalled() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.since.IsZero() {
		return 0
	}
	return time.Since(c.since)
}

// began tells when the call under way began; now if none is.
func (c *creator) began() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.since.IsZero() {
		return time.Now()
	}
	return c.since
}

func (c *creator) err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.failed
}

// reset gives the longest call since the last time.
func (c *creator) reset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	d := c.slow
	c.slow = 0
	return d
}

// check compares the ledger with the volume: nothing is lost, doubled or changed, and no file
// exists without an answer.
func (c *creator) check(ctx context.Context, by *client.Session) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failed != nil {
		return c.failed
	}
	listed, err := list(ctx, by, c.vol)
	if err != nil {
		return err
	}
	seen := map[meta.Ino]string{}
	for name, ino := range c.made {
		if other, ok := seen[ino]; ok {
			return fmt.Errorf("DATA: %s and %s were both answered inode %d", name, other, ino)
		}
		seen[ino] = name
		switch got, ok := listed[name]; {
		case !ok:
			return fmt.Errorf("DATA: %s, made as inode %d, is lost", name, ino)
		case got != ino:
			return fmt.Errorf("DATA: %s is inode %d, was made as %d", name, got, ino)
		}
	}
	for name, ino := range listed {
		if _, ok := c.made[name]; !ok && name != counterFile {
			return fmt.Errorf("DATA: %s is listed as inode %d, but was never answered", name, ino)
		}
	}
	return nil
}

// list reads a volume's root directory. A repeated name is an error.
func list(ctx context.Context, by *client.Session, v meta.VolumeID) (map[string]meta.Ino, error) {
	all := map[string]meta.Ino{}
	for cookie := uint64(0); ; {
		r, err := by.Do(ctx, v, meta.OpID{}, &meta.ReadDir{Ino: meta.RootIno, Cookie: cookie, Max: 4096}, meta.LeaseNone)
		if err != nil {
			return nil, fmt.Errorf("list volume %d: %w", v, err)
		}
		for _, e := range r.Entries {
			if other, ok := all[e.Name]; ok {
				return nil, fmt.Errorf("DATA: %s is listed twice, as inode %d and %d", e.Name, other, e.Ino)
			}
			all[e.Name], cookie = e.Ino, e.Cookie
		}
		if r.EOF || len(r.Entries) == 0 {
			return all, nil
		}
	}
}

// counter is a number in an extended attribute that one session counts up. A reader may never get
// less than the number acknowledged before the read.
type counter struct {
	vol   meta.VolumeID
	ino   meta.Ino
	acked atomic.Int64
	reads atomic.Int64
	hits  atomic.Int64 // reads from a cache under a lease

	mu    sync.Mutex
	wrong error
}

const (
	counterName = "user.n"
	counterFile = "counter"
)

func (k *counter) fail(format string, a ...any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.wrong == nil {
		k.wrong = fmt.Errorf(format, a...)
	}
}

func (k *counter) err() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.wrong
}

// write counts up.
func (k *counter) write(ctx context.Context, s *client.Session) {
	for n := k.acked.Load() + 1; ctx.Err() == nil; n++ {
		_, err := s.Do(context.Background(), k.vol, meta.OpID{}, &meta.SetXattr{Ino: k.ino, Name: counterName, Value: []byte(strconv.FormatInt(n, 10))}, meta.LeaseNone)
		if err != nil {
			k.fail("count to %d: %v", n, err)
			return
		}
		k.acked.Store(n)
		time.Sleep(5 * time.Millisecond)
	}
}

// read asks the owner each time.
func (k *counter) read(ctx context.Context, s *client.Session) {
	for ctx.Err() == nil {
		least := k.acked.Load()
		n, err := k.get(ctx, s, meta.LeaseNone)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, meta.SessionExpired) {
			continue
		}
		if err != nil {
			k.fail("read: %v", err)
			return
		}
		if n < least {
			k.fail("DATA: read %d although %d was acknowledged before", n, least)
			return
		}
		k.reads.Add(1)
		time.Sleep(2 * time.Millisecond)
	}
}

func (k *counter) get(ctx context.Context, s *client.Session, want meta.LeaseMode) (int64, error) {
	// A lease comes with attributes; the counter is read after the lease.
	if want != meta.LeaseNone {
		if _, err := s.Do(ctx, k.vol, meta.OpID{}, &meta.GetAttr{Ino: k.ino}, want); err != nil {
			return 0, err
		}
	}
	r, err := s.Do(ctx, k.vol, meta.OpID{}, &meta.GetXattr{Ino: k.ino, Name: counterName}, meta.LeaseNone)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(string(r.Data), 10, 64)
}

// cacher reads the counter from its own memory as long as a lease allows.
type cacher struct {
	*client.Session
	k *counter

	mu     sync.Mutex
	leased bool
	gen    int
}

func (c *cacher) Granted(v meta.VolumeID, g meta.Grant) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v == c.k.vol && g.Ino == c.k.ino && g.Mode > meta.LeaseNone {
		c.leased = true
	}
}

func (c *cacher) Recall(_ meta.Recall, done func()) {
	c.mu.Lock()
	c.leased = false
	c.gen++
	c.mu.Unlock()
	go done()
}

func (c *cacher) Expired([]meta.VolumeID, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.leased = false
	c.gen++
}

func (c *cacher) Claims(v meta.VolumeID) ([]meta.Grant, []meta.Lock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if v != c.k.vol || !c.leased {
		return nil, nil
	}
	return []meta.Grant{{Ino: c.k.ino, Mode: meta.LeaseShared}}, nil
}

// run reads, mostly from memory.
func (c *cacher) run(ctx context.Context) {
	for ctx.Err() == nil {
		c.mu.Lock()
		gen := c.gen
		c.mu.Unlock()
		n, err := c.k.get(ctx, c.Session, meta.LeaseShared)
		if ctx.Err() != nil {
			return
		}
		if errors.Is(err, meta.SessionExpired) {
			continue
		}
		if err != nil {
			c.k.fail("cached read: %v", err)
			return
		}
		for ctx.Err() == nil {
			least := c.k.acked.Load()
			c.mu.Lock()
			ok := c.leased && c.gen == gen && c.LeaseLeft(c.k.vol) > 0
			c.mu.Unlock()
			if !ok {
				break
			}
			if n < least {
				c.k.fail("DATA: read %d from a cache that a lease allowed, although %d was acknowledged before", n, least)
				return
			}
			c.k.hits.Add(1)
			time.Sleep(time.Millisecond)
		}
		time.Sleep(3 * time.Millisecond)
	}
}
