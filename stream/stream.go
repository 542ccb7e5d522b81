package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/offsets"
	"penstock.io/penstock/stream/partition"
)

// Stream is an open stream.
type Stream struct {
	Spec Spec

	dir     volumeDir
	name    string // the path at the time of opening, for people
	address string // of the leader of the partitions
	log     *slog.Logger

	slots     []slot
	publisher publisher

	mu     sync.Mutex // of groups and closed
	groups map[string]*committed
	closed bool
}

// slot has the log of a partition while this process leads the partition. mu is held while the
// log is opened.
type slot struct {
	mu   sync.Mutex
	log  *partition.Log // nil: not led
	dir  *ledDir        // of log
	used time.Time
}

// committed are the offsets of a group, while this process leads their file.
type committed struct {
	*offsets.Offsets
	dir  *ledDir
	used time.Time
}

func errStreamClosed(name string) error {
	return meta.E("open partition", meta.Unavailable, name, errors.New("the stream was closed"))
}

// Partition returns the log of a partition, opened by the partition's leader. Errors: NotFound
// (no such partition), NotOwner (another process leads the partition), Unavailable (the owner
// of the volume does not answer), and errors of partition.Open.
func (s *Stream) Partition(ctx context.Context, n int32) (*partition.Log, error) {
	if n < 0 || int(n) >= len(s.slots) {
		return nil, meta.E("open partition", meta.NotFound, s.name, fmt.Errorf("it has %d partitions, and no partition %d", len(s.slots), n))
	}
	slot := &s.slots[n]
	slot.mu.Lock()
	defer slot.mu.Unlock()
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil, errStreamClosed(s.name)
	}
	slot.used = time.Now()
	if slot.log != nil && slot.log.Err() == nil {
		if !slot.dir.Valid() {
			return nil, meta.E("open partition", meta.Unavailable, s.name, errors.New("the owner of the volume does not answer: another gateway may lead the partition"))
		}
		return slot.log, nil
	}
	if slot.log != nil {
		// The end of the log is not known after a failure: a recovery finds it.
		if err := slot.close(ctx); err != nil {
			s.log.Warn("closing a failed partition failed; the gateway opens the partition again", "stream", s.name, "partition", n, "error", err)
		}
	}
	dir, err := s.dir.makeSub(ctx, logDir)
	if err != nil {
		return nil, err
	}
	if dir, err = dir.makeSub(ctx, strconv.Itoa(int(n))); err != nil {
		return nil, err
	}
	right, err := dir.lead(ctx, leaderFile, s.address)
	if err != nil {
		return nil, err
	}
	slot.dir = &ledDir{volumeDir: dir, address: s.address, right: right}
	slot.log, err = partition.Open(ctx, slot.dir, partition.Config{
		Name: fmt.Sprintf("%s, partition %d", s.name, n), Volume: uint64(dir.v.ID()), Logger: s.log, Retention: s.Spec.Retention, RetentionBytes: s.Spec.RetentionBytes,
		SegmentBytes: s.Spec.SegmentBytes, SegmentAge: s.Spec.SegmentAge,
	}, right)
	if err != nil {
		slot.log = nil
		return nil, errors.Join(err, slot.dir.leave(ctx))
	}
	return slot.log, nil
}

// Leader returns the address of the process that leads a partition. Errors: NotFound.
func (s *Stream) Leader(ctx context.Context, n int32) (string, error) {
	dir, err := s.dir.sub(ctx, logDir)
	if err == nil {
		dir, err = dir.sub(ctx, strconv.Itoa(int(n)))
	}
	if err != nil {
		return "", err
	}
	e, err := dir.lookup(ctx, leaderFile)
	if err != nil {
		return "", err
	}
	address, _, err := dir.v.Leaderships().Leader(ctx, e.Attr.Ino)
	return address, err
}

// close closes the log, and ends the leadership. The caller holds mu.
func (s *slot) close(ctx context.Context) error {
	err := s.log.Close()
	s.log = nil
	return errors.Join(err, s.dir.leave(ctx))
}

// retain removes old records of the open partitions.
func (s *Stream) retain(ctx context.Context) {
	for i := range s.slots {
		slot := &s.slots[i]
		slot.mu.Lock()
		l := slot.log
		slot.mu.Unlock()
		if l == nil {
			continue
		}
		if _, err := l.Retain(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("old records could not be removed; the gateway tries again", "stream", s.name, "partition", i, "error", err)
		}
	}
}

// leads reports that the process leads something in the stream, or is about to.
func (s *Stream) leads() bool {
	for i := range s.slots {
		if !s.slots[i].mu.TryLock() {
			return true
		}
		led := s.slots[i].log != nil
		s.slots[i].mu.Unlock()
		if led {
			return true
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.groups) > 0
}

// releaseIdle gives up what nobody has used for a time.
func (s *Stream) releaseIdle(idle time.Duration) {
	warn := func(err error) {
		if err != nil {
			s.log.Warn("giving an unused partition up failed; the leadership ends with the session", "stream", s.name, "error", err)
		}
	}
	for i := range s.slots {
		slot := &s.slots[i]
		if !slot.mu.TryLock() {
			continue // in use
		}
		if slot.log != nil && time.Since(slot.used) > idle && !slot.log.Watched() {
			warn(slot.close(context.Background()))
		}
		slot.mu.Unlock()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, c := range s.groups {
		if time.Since(c.used) > idle {
			delete(s.groups, name)
			warn(c.close())
		}
	}
}

func (c *committed) close() error {
	return errors.Join(c.Offsets.Close(), c.dir.leave(context.Background()))
}

func (s *Stream) close() error {
	s.mu.Lock()
	s.closed = true
	groups := s.groups
	s.groups = nil
	s.mu.Unlock()
	s.publisher.end()
	var errs []error
	for i := range s.slots {
		slot := &s.slots[i]
		slot.mu.Lock()
		if slot.log != nil {
			errs = append(errs, slot.close(context.Background()))
		}
		slot.mu.Unlock()
	}
	for _, c := range groups {
		errs = append(errs, c.close())
	}
	return errors.Join(errs...)
}

// groupSuffix ends the name of the file with a group's offsets.
const groupSuffix = ".offsets"

// Offsets returns the offsets of a consumer group in the stream, whose file this process leads
// then. Errors: Invalid (the group has no name, or too long a name), NotFound (make is false,
// and the group has no offsets), NotOwner (another process leads the file).
func (s *Stream) Offsets(ctx context.Context, group string, make bool) (*offsets.Offsets, error) {
	name := Escape(group) + groupSuffix
	if group == "" || len(name) > meta.MaxName-len(replaceSuffix) {
		return nil, meta.E("open offsets", meta.Invalid, s.name, fmt.Errorf("a group's name has 1 to about 80 bytes"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errStreamClosed(s.name)
	}
	if c := s.groups[name]; c != nil {
		if c.used = time.Now(); c.dir.Valid() {
			return c.Offsets, nil
		}
		delete(s.groups, name) // another process may have committed meanwhile
		if err := c.close(); err != nil {
			s.log.Warn("closing the offsets of a group failed; the gateway opens them again", "stream", s.name, "group", group, "error", err)
		}
	}
	dir, err := s.dir.sub(ctx, groupsDir)
	if errors.Is(err, meta.NotFound) && make {
		dir, err = s.dir.makeSub(ctx, groupsDir)
	}
	if err != nil {
		return nil, err
	}
	if !make {
		if _, err := dir.lookup(ctx, name); err != nil {
			return nil, err
		}
	}
	c := &committed{dir: &ledDir{volumeDir: dir, address: s.address}, used: time.Now()}
	if c.Offsets, err = offsets.Open(ctx, c.dir, name); err != nil {
		return nil, errors.Join(err, c.dir.leave(ctx))
	}
	s.groups[name] = c
	return c.Offsets, nil
}
