package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strconv"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/offsets"
	"penstock.io/penstock/stream/partition"
)

// Host has the streams of a process. It opens a partition at the first use, as the only
// leader.
type Host struct {
	client *penstock.Client
	tree   *penstock.Tree
	log    *slog.Logger

	mu     sync.Mutex
	open   map[streamID]*Stream
	closed bool
}

// streamID names a stream for ever: the directory may be renamed.
type streamID struct {
	volume meta.VolumeID
	dir    meta.Ino
}

// NewHost makes a Host of the streams below the root of a volume.
func NewHost(c *penstock.Client, root *penstock.Volume, logger *slog.Logger) *Host {
	return &Host{client: c, tree: root.Tree(), log: logger, open: map[streamID]*Stream{}}
}

// Tree returns the tree in which the streams lie.
func (h *Host) Tree() *penstock.Tree { return h.tree }

// Stream finds a stream by path. Errors: NotFound, Unavailable (the host was closed), and
// errors of DecodeSpec.
func (h *Host) Stream(ctx context.Context, p string) (*Stream, error) {
	e, err := h.tree.Stat(ctx, p)
	if k := meta.KindOf(err); k == meta.NotFound || k == meta.NotDir || err == nil && !e.Attr.IsDir() {
		return nil, meta.E("open stream", meta.NotFound, p, errors.New("no stream is there"))
	}
	if err != nil {
		return nil, err
	}
	// Also of an open stream: the removal of the file ends the stream.
	if _, err := h.tree.Stat(ctx, path.Join(p, SpecFile)); err != nil {
		return nil, meta.E("open stream", meta.KindOf(err), p, err)
	}
	id := streamID{e.Volume, e.Attr.Ino}
	h.mu.Lock()
	s, closed := h.open[id], h.closed
	h.mu.Unlock()
	if closed {
		return nil, meta.E("open stream", meta.Unavailable, p, errors.New("the gateway stops"))
	}
	if s != nil {
		return s, nil
	}
	return h.add(ctx, id, p)
}

func (h *Host) add(ctx context.Context, id streamID, p string) (*Stream, error) {
	spec, err := Load(ctx, h.tree, p)
	if err != nil {
		return nil, err
	}
	v, err := h.client.VolumeByID(ctx, id.volume)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.open[id]; s != nil {
		return s, nil
	}
	s := &Stream{Spec: spec, dir: volumeDir{v, id.dir}, name: p, log: h.log, slots: make([]slot, spec.Partitions), groups: map[string]*offsets.Offsets{}}
	h.open[id] = s
	return s, nil
}

// Delete ends a stream and removes its files; see Delete.
func (h *Host) Delete(ctx context.Context, p string) error {
	s, err := h.Stream(ctx, p)
	if err != nil {
		return err
	}
	err = Delete(ctx, h.tree, p)
	h.mu.Lock()
	delete(h.open, streamID{s.dir.v.ID(), s.dir.ino})
	h.mu.Unlock()
	s.close() // the files are gone: an error says nothing
	return err
}

// retainEvery is how often partitions are examined for old records.
const retainEvery = time.Minute

// Run removes old records, and closes streams whose directory is gone, until ctx ends.
func (h *Host) Run(ctx context.Context) {
	for {
		select {
		case <-time.After(retainEvery):
		case <-ctx.Done():
			return
		}
		h.mu.Lock()
		var all []*Stream
		for _, s := range h.open {
			all = append(all, s)
		}
		h.mu.Unlock()
		for _, s := range all {
			if _, err := s.dir.lookup(ctx, SpecFile); errors.Is(err, meta.NotFound) || errors.Is(err, meta.Stale) {
				h.mu.Lock()
				delete(h.open, streamID{s.dir.v.ID(), s.dir.ino})
				h.mu.Unlock()
				s.close() // the files are gone: an error says nothing
				continue
			}
			s.retain(ctx)
		}
	}
}

// Close closes all streams. Appends under way end first.
func (h *Host) Close() error {
	h.mu.Lock()
	h.closed = true
	open := h.open
	h.open = map[streamID]*Stream{}
	h.mu.Unlock()
	var errs []error
	for _, s := range open {
		errs = append(errs, s.close())
	}
	return errors.Join(errs...)
}

// Stream is an open stream.
type Stream struct {
	Spec Spec

	dir  volumeDir
	name string // the path at the time of opening, for people
	log  *slog.Logger

	slots []slot

	mu     sync.Mutex // of groups and closed
	groups map[string]*offsets.Offsets
	closed bool
}

// slot has the log of a partition once the log was opened.
type slot struct {
	mu  sync.Mutex // held while the log is opened
	log *partition.Log
}

func errStreamClosed(name string) error {
	return meta.E("open partition", meta.Unavailable, name, errors.New("the stream was closed"))
}

// Partition returns the log of a partition, opened. Errors: NotFound (no such partition), and
// errors of partition.Open.
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
	if slot.log != nil && slot.log.Err() == nil {
		return slot.log, nil
	}
	if slot.log != nil {
		// The end of the log is not known after a failure: a recovery finds it.
		if err := slot.log.Close(); err != nil {
			s.log.Warn("closing a failed partition failed; the gateway opens the partition again", "stream", s.name, "partition", n, "error", err)
		}
		slot.log = nil
	}
	dir, err := s.dir.makeSub(ctx, logDir)
	if err != nil {
		return nil, err
	}
	if dir, err = dir.makeSub(ctx, strconv.Itoa(int(n))); err != nil {
		return nil, err
	}
	lead, err := partition.Alone(ctx, dir)
	if err != nil {
		return nil, err
	}
	slot.log, err = partition.Open(ctx, dir, partition.Config{
		Name: fmt.Sprintf("%s, partition %d", s.name, n), Logger: s.log, Retention: s.Spec.Retention, RetentionBytes: s.Spec.RetentionBytes,
		SegmentBytes: s.Spec.SegmentBytes, SegmentAge: s.Spec.SegmentAge,
	}, lead)
	return slot.log, err
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

func (s *Stream) close() error {
	s.mu.Lock()
	s.closed = true
	groups := s.groups
	s.groups = nil
	s.mu.Unlock()
	var errs []error
	for i := range s.slots {
		slot := &s.slots[i]
		slot.mu.Lock()
		if slot.log != nil {
			errs = append(errs, slot.log.Close())
			slot.log = nil
		}
		slot.mu.Unlock()
	}
	for _, o := range groups {
		errs = append(errs, o.Close())
	}
	return errors.Join(errs...)
}

// groupSuffix ends the name of the file with a group's offsets.
const groupSuffix = ".offsets"

// Offsets returns the offsets of a consumer group in the stream. Errors: Invalid (the group
// has no name, or too long a name), NotFound (make is false, and the group has no offsets).
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
	if o := s.groups[name]; o != nil {
		return o, nil
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
	o, err := offsets.Open(ctx, dir, name)
	if err != nil {
		return nil, err
	}
	s.groups[name] = o
	return o, nil
}
