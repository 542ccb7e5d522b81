package stream

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/publish"
)

// DefaultLag is how late a table is at the most if nothing else is said: Spec.Lag of streams
// that the command line makes.
const DefaultLag = 10 * time.Second

// MaxLag bounds Spec.Lag. It is shorter than the time for which an unused partition is led, so
// that the partition is published by then.
const MaxLag = 30 * time.Second

// Streams that a Host publishes at a time, and how often it looks for streams that are due.
const (
	publishers   = 4
	publishEvery = time.Second
)

// publisher publishes the table of a stream from time to time.
type publisher struct {
	mu    sync.Mutex // held while the table is published
	table *publish.Table
	ended bool
	next  time.Time // the next round
	// behind is the number of records that were not published when the last round began.
	behind atomic.Int64
}

// end ends the publications, and waits for the one under way.
func (p *publisher) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
}

// publish publishes the streams of the host that are due, until ctx ends.
func (h *Host) publish(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	room := make(chan struct{}, publishers)
	for {
		select {
		case <-time.After(publishEvery):
		case <-ctx.Done():
			return
		}
		for _, s := range h.streams() {
			if s.Spec().Lag <= 0 {
				continue
			}
			select {
			case room <- struct{}{}:
			case <-ctx.Done():
				return
			}
			wg.Go(func() {
				s.publish(ctx)
				<-room
			})
		}
	}
}

// publish publishes the partitions that the process leads, if the stream is due.
func (s *Stream) publish(ctx context.Context) {
	p := &s.publisher
	if !p.mu.TryLock() {
		return // under way
	}
	defer p.mu.Unlock()
	if p.ended || time.Now().Before(p.next) {
		return
	}
	p.next = time.Now().Add(s.Spec().Lag / 2) // and a publication takes time, too
	more, err := s.publishRound(ctx)
	if more {
		p.next = time.Now()
	}
	switch k := meta.KindOf(err); {
	case err == nil, ctx.Err() != nil:
	case k == meta.NotFound || k == meta.Stale:
		if _, gone := s.dir.lookup(ctx, SpecFile); gone == nil {
			s.warnTable(err)
		} // else the stream has ended
	default:
		s.warnTable(err)
	}
}

func (s *Stream) warnTable(err error) {
	s.log.Warn("the table of a stream could not be published; the gateway tries again", "stream", s.name, "error", err)
	s.publisher.table = nil // the next round reads the table again
}

// publishRound publishes at most a file a partition. more is true if records are left.
func (s *Stream) publishRound(ctx context.Context) (more bool, err error) {
	logs := map[int]publish.Log{}
	for i, slot := range s.slots() {
		if !slot.mu.TryLock() {
			continue // opened just now
		}
		if slot.log != nil && slot.log.Err() == nil && slot.dir != nil && slot.dir.Valid() {
			logs[i] = slot.log
		}
		slot.mu.Unlock()
	}
	p := &s.publisher
	p.behind.Store(0)
	if len(logs) == 0 {
		return false, nil
	}
	if p.table != nil {
		for n, l := range logs {
			_, high := l.Bounds()
			p.behind.Add(max(high-p.table.Published(n), 0))
		}
	}
	if p.table != nil && !p.table.Due(logs) {
		return false, nil // without a question to the volume's owner
	}
	if _, err := s.dir.lookup(ctx, SpecFile); err != nil {
		return false, err
	}
	if p.table == nil {
		spec := s.Spec()
		fields, err := spec.fields()
		if err != nil {
			return false, err
		}
		if p.table, err = publish.Open(ctx, volumeFiles{s.dir}, publish.Config{Name: s.name, Format: spec.Format, Fields: fields, Logger: s.log}); err != nil {
			return false, err
		}
	}
	return p.table.Publish(ctx, logs)
}

// volumeFiles is a stream's directory as publish.Files.
type volumeFiles struct{ dir volumeDir }

var _ publish.Files = volumeFiles{}

// walk finds the directory of a file, and makes missing ones if make is set.
func (v volumeFiles) walk(ctx context.Context, name string, make bool) (d volumeDir, base string, err error) {
	above, base := path.Split(name)
	if above == "" {
		return v.dir, base, nil
	}
	d, last, err := v.walk(ctx, path.Clean(above), make)
	switch {
	case err != nil:
	case make:
		d, err = d.makeSub(ctx, last)
	default:
		d, err = d.sub(ctx, last)
	}
	return d, base, err
}

func (v volumeFiles) List(ctx context.Context, dir string) (all []publish.Info, err error) {
	d, _, err := v.walk(ctx, path.Join(dir, "file"), false)
	if errors.Is(err, meta.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list, err := d.List(ctx)
	for _, f := range list {
		all = append(all, publish.Info{Name: f.Name, Created: f.Created})
	}
	return all, err
}

func (v volumeFiles) ReadFile(ctx context.Context, name string) ([]byte, error) {
	d, base, err := v.walk(ctx, name, false)
	if err != nil {
		return nil, err
	}
	return d.ReadFile(ctx, base)
}

func (v volumeFiles) Create(ctx context.Context, name string, data []byte) error {
	return v.put(ctx, name, data, meta.RenameNoReplace)
}

func (v volumeFiles) Replace(ctx context.Context, name string, data []byte) error {
	return v.put(ctx, name, data, 0)
}

// put writes a file under a name that no other writer has, and renames it.
func (v volumeFiles) put(ctx context.Context, name string, data []byte, flags uint32) error {
	d, base, err := v.walk(ctx, name, true)
	if err != nil {
		return err
	}
	draft := fmt.Sprintf("%s.%016x%s", base, rand.Uint64(), publish.Unfinished)
	err = d.put(ctx, base, draft, data, flags)
	if errors.Is(err, meta.Exists) {
		err = errors.Join(err, d.Remove(ctx, draft))
	}
	return err
}

func (v volumeFiles) Remove(ctx context.Context, name string) error {
	d, base, err := v.walk(ctx, name, false)
	if err != nil {
		return err
	}
	return d.Remove(ctx, base)
}
