package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// Defaults of LeaseConfig.
const (
	DefaultTTL    = 5 * time.Second
	DefaultMargin = 500 * time.Millisecond
)

// LeaseConfig configures a process's lease.
type LeaseConfig struct {
	TTL    time.Duration // of the lease, whole seconds, at least 1 s; zero means DefaultTTL
	Margin time.Duration // the time from Lost to the earliest end of the lease; zero means DefaultMargin
	Logger *slog.Logger
	// KeepAlive replaces the renewal for tests; nil renews at etcd.
	KeepAlive func(ctx context.Context, id clientv3.LeaseID) (ttl time.Duration, err error)
}

// Lease is the single lease of a process: all ownerships of volumes, pins and registrations of
// the process depend on the lease. A goroutine renews the lease until Close, or until Lost.
//
// The lifetime of the lease is counted from the sending of a renewal, never from the answer, on
// a clock that continues while the machine is suspended (CLOCK_BOOTTIME).
type Lease struct {
	cli *clientv3.Client
	cfg LeaseConfig
	id  clientv3.LeaseID

	lost   chan struct{}
	cancel context.CancelFunc
	joined sync.WaitGroup

	mu       sync.Mutex
	deadline time.Duration // on the boot clock, margin taken off
	gone     bool          // lost is closed
	why      error
}

// NewLease takes a lease. Errors: Unavailable, NoSpace.
func NewLease(ctx context.Context, cli *clientv3.Client, cfg LeaseConfig) (*Lease, error) {
	if cfg.TTL == 0 {
		cfg.TTL = DefaultTTL
	}
	if cfg.Margin == 0 {
		cfg.Margin = DefaultMargin
	}
	if cfg.TTL < time.Second || cfg.Margin >= cfg.TTL {
		return nil, meta.E("take lease", meta.Invalid, "", fmt.Errorf("TTL %v, margin %v", cfg.TTL, cfg.Margin))
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	sent := process.Uptime()
	r, err := cli.Grant(ctx, int64((cfg.TTL+time.Second-1)/time.Second))
	if err != nil {
		return nil, wrap("take lease", "", err)
	}
	l := &Lease{cli: cli, cfg: cfg, id: r.ID, lost: make(chan struct{})}
	if l.cfg.KeepAlive == nil {
		l.cfg.KeepAlive = l.renew
	}
	l.deadline = sent + time.Duration(r.TTL)*time.Second - cfg.Margin
	run, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.joined.Go(func() { l.keep(run) })
	l.joined.Go(func() { l.watch(run) })
	return l, nil
}

// ID is the lease's id at etcd.
func (l *Lease) ID() clientv3.LeaseID { return l.id }

// Lost is closed when the process must no longer rely on the lease: no renewal succeeded in
// time, etcd forgot the lease, or Close was called.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Left returns how long the lease surely lasts, minus the margin; zero when lost. An owner
// calls Left before each answer.
func (l *Lease) Left() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return 0
	}
	return max(0, l.deadline-process.Uptime())
}

// Err returns why the lease was lost; nil while it is valid.
func (l *Lease) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.why
}

// Close revokes the lease: etcd deletes all keys of the lease at once.
func (l *Lease) Close(ctx context.Context) error {
	l.end(meta.E("keep lease", meta.Canceled, "", errors.New("closed")))
	l.cancel()
	l.joined.Wait()
	return wrap("give lease back", "", l.revoke(ctx))
}

func (l *Lease) revoke(ctx context.Context) error {
	// After its lifetime the lease needs no revocation.
	ctx, cancel := context.WithTimeout(ctx, l.cfg.TTL)
	defer cancel()
	_, err := l.cli.Revoke(ctx, l.id)
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return err
}

func (l *Lease) renew(ctx context.Context, id clientv3.LeaseID) (time.Duration, error) {
	r, err := l.cli.KeepAliveOnce(ctx, id)
	if err != nil {
		return 0, err
	}
	return time.Duration(r.TTL) * time.Second, nil
}

// keep renews the lease at a third of the time to live. An attempt without an answer is short,
// and another follows at once: the first may have gone to a hanging member of etcd.
func (l *Lease) keep(ctx context.Context) {
	pause := l.cfg.TTL / 3
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		if l.Err() != nil {
			// The lease was given up: a renewal would keep the lease's keys from other
			// processes.
			l.revoke(ctx)
			return
		}
		sent := process.Uptime()
		try, cancel := context.WithTimeout(ctx, l.cfg.TTL/8)
		ttl, err := l.cfg.KeepAlive(try, l.id)
		cancel()
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, rpctypes.ErrLeaseNotFound):
			l.end(meta.E("keep lease", meta.Fenced, "", errors.New("etcd ended it")))
			return
		case err != nil:
			l.cfg.Logger.Warn("the server's lease at etcd was not renewed; the server tries again", "left", l.Left(), "err", err)
			pause = l.cfg.TTL / 50
		default:
			l.mu.Lock()
			l.deadline = sent + ttl - l.cfg.Margin
			l.mu.Unlock()
			pause = l.cfg.TTL / 3
		}
	}
}

// watch ends the lease when the lifetime is over. watch checks often, not once at the deadline,
// because Go's timers stand still while the machine is suspended.
func (l *Lease) watch(ctx context.Context) {
	every := time.NewTicker(min(l.cfg.Margin/2, 100*time.Millisecond))
	defer every.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-every.C:
			if l.Left() == 0 {
				l.end(meta.E("keep lease", meta.Fenced, "", errors.New("it could not be renewed in time")))
				return
			}
		}
	}
}

func (l *Lease) end(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return
	}
	l.gone, l.why = true, why
	close(l.lost)
}
