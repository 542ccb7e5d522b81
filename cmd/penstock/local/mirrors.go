package local

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/peer"
)

// DialSource connects to the cluster of a mirror's source. DialSource renews the certificate
// in at.Credentials after half of its life, because no other process on the machine may renew
// the certificate.
func DialSource(ctx context.Context, at meta.MirrorSource, log *slog.Logger) (*penstock.Client, error) {
	return dialSource(ctx, at, log, time.Now())
}

func dialSource(ctx context.Context, at meta.MirrorSource, log *slog.Logger, now time.Time) (*penstock.Client, error) {
	var creds *peer.Credentials
	if at.Credentials != "" {
		var err error
		if creds, err = peer.Load(at.Credentials, log); err != nil {
			return nil, err
		}
		if now.After(creds.RenewAt()) {
			// If the renewal fails, the certificate is still valid, or Dial returns the error.
			if err := admin.Renew(ctx, at.Meta, creds); err != nil {
				log.Warn("the certificate for a mirror's source could not be renewed; the server tries again", "credentials", at.Credentials, "error", err)
			}
		}
	}
	return penstock.Dial(ctx, penstock.Config{Meta: at.Meta, Creds: creds, Name: mirrorName(), Logger: log})
}

func mirrorName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	return fmt.Sprintf("%s: mirrors (pid %d)", host, os.Getpid())
}

// RunMirrors runs the mirrors of a cluster until ctx ends.
func RunMirrors(ctx context.Context, cfg penstock.Config, log *slog.Logger) error {
	unsafe, err := Controls(os.Getenv(ControlVariable), log)
	if err != nil {
		return err
	}
	cfg.Name, cfg.WriteBuffer, cfg.MetaCache = mirrorName(), 64<<20, 100_000
	cfg.Streams = true // streams are copied with their files
	dial, cancel := context.WithTimeout(ctx, 30*time.Second)
	c, err := penstock.Dial(dial, cfg)
	cancel()
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if err := c.Close(end); err != nil {
			log.Warn("the mirrors' session did not end well", "error", err)
		}
	}()
	return penstock.RunMirrors(ctx, penstock.MirrorConfig{Client: c, Logger: log, Unsafe: unsafe.Mirrors,
		Dial: func(ctx context.Context, at meta.MirrorSource) (*penstock.Client, error) {
			ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
			defer cancel()
			return DialSource(ctx, at, log)
		}})
}

// mirrorPoll is the interval at which runMirrors looks for the first mirror.
const mirrorPoll = 2 * time.Second

// runMirrors runs the cluster's mirrors in the background as soon as the cluster has a mirror.
// stop ends the mirrors and waits for the goroutine.
func (m *Meta) runMirrors(log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			if l, err := m.cluster.Mirrors(ctx); err == nil && len(l) > 0 {
				if err := RunMirrors(ctx, penstock.Config{Meta: []string{m.Addr}, Logger: log}, log); err != nil && ctx.Err() == nil {
					log.Warn("the mirrors can't be run yet; the server tries again", "error", err)
				}
			}
			select {
			case <-time.After(mirrorPoll):
			case <-ctx.Done():
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}
