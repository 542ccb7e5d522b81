package embedded

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"penstock.io/penstock/meta"
)

// etcd opens and closes files without a bound on time: etcd waits for ever for a lock on the
// database, and for a disk that does not answer. The waits in this file have an end, and the
// log says what each wait is for.

const (
	// openWord is the interval of log messages about files that are not open yet.
	openWord = 10 * time.Second
	// closeWait bounds the closing. The writes that etcd acknowledged are on the disk earlier.
	closeWait = 30 * time.Second
)

// openEtcd makes etcd open its files, and waits until the files are open or ctx ends.
func openEtcd(ctx context.Context, c *embed.Config, cfg *Config, ending *endings) (*embed.Etcd, error) {
	const op = "start embedded etcd"
	type opened struct {
		e   *embed.Etcd
		err error
	}
	done := make(chan opened, 1)
	ending.opening.Store(true)
	go func() {
		defer ending.opening.Store(false)
		var o opened
		if o.err = inspect(c.Dir); o.err == nil {
			o.err = catch(func() (err error) { o.e, err = embed.StartEtcd(c); return err })
		}
		done <- o
	}()
	began := time.Now()
	timeout := time.NewTimer(cfg.OpenTimeout)
	defer timeout.Stop()
	word := time.NewTicker(openWord)
	defer word.Stop()
	giveUp := func(kind meta.Kind, cause error) error {
		go func() { // until the files are open, or the process ends
			if o := <-done; o.e != nil {
				o.e.Close()
			}
		}()
		return meta.E(op, kind, c.Dir, cause)
	}
	for {
		select {
		case o := <-done:
			if o.err != nil {
				return nil, cannotOpen(c.Dir, o.err)
			}
			return o.e, nil
		case cause := <-ending.cause:
			return nil, cannotOpen(c.Dir, errors.New(cause))
		case <-word.C:
			cfg.Logger.Warn("etcd is still opening its files: its disk is slow or does not answer, or another process has them open", "dir", c.Dir, "since", time.Since(began).Round(time.Second))
		case <-timeout.C:
			return nil, giveUp(meta.Unavailable, fmt.Errorf("its files were not open after %v: see whether the disk answers, and whether another process has them open", cfg.OpenTimeout))
		case <-ctx.Done():
			return nil, giveUp(meta.Interrupted, fmt.Errorf("its files were not open after %v: %w", time.Since(began).Round(time.Millisecond), context.Cause(ctx)))
		}
	}
}

// cannotOpen makes the error for files that etcd can't open.
func cannotOpen(dir string, cause error) error {
	const op = "start embedded etcd"
	if meta.KindOf(cause) == meta.Corrupt {
		return meta.E(op, meta.Corrupt, dir, fmt.Errorf("%w: its files are damaged; what to do is in docs/operations.md, \"etcd's files in a data directory\"", cause))
	}
	return meta.E(op, meta.IO, dir, fmt.Errorf("its files can't be opened: %w: see whether the disk is mounted, takes writes and has no errors, and that nothing else uses the folder; if its files are damaged: docs/operations.md, \"etcd's files in a data directory\"", cause))
}

// closeEtcd closes etcd and waits, but not for ever if the disk does not answer.
func closeEtcd(e *embed.Etcd, dir string) error {
	done := make(chan struct{})
	go func() {
		e.Close()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-time.After(closeWait):
		return meta.E("stop embedded etcd", meta.Unavailable, dir, fmt.Errorf("it did not end within %v: its disk does not answer. What it acknowledged is on the disk", closeWait))
	}
}
