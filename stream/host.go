package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/partition"
	"penstock.io/penstock/stream/placement"
)

// Host holds the open streams of a process. Host opens a partition at the first use, as the
// partition's leader, and gives the leadership up when nobody uses the partition any more.
type Host struct {
	// Address is the address of this process for clients that ask for the leader of a
	// partition. Idle is how long the host leads an unused partition. The caller sets Address
	// and Idle before the first use of the host.
	Address string
	Idle    time.Duration
	Unsafe  Unsafe // set like Address
	// Gateways returns this gateway and the registered gateways, without this gateway if the host is to
	// lead nothing. nil: the host leads whatever clients ask for. Set like Address.
	Gateways func() (self placement.Gateway, live []placement.Gateway)
	// CoordinationEnded hears of the groups that the process no longer coordinates; may be nil. Set like
	// Address.
	CoordinationEnded func(of func(Coordination) bool)
	// Counters count what the streams' partitions do; set like Address. nil: nothing counts.
	Counters *partition.Counters

	client *penstock.Client
	tree   *penstock.Tree
	log    *slog.Logger

	mu     sync.Mutex
	open   map[streamID]*Stream
	paths  map[streamID]knownPath
	used   time.Time // time of the last look-up of a stream
	closed bool

	duties duties
}

// DefaultIdle is the default of Host.Idle.
const DefaultIdle = time.Minute

// streamID identifies a stream for ever, also after a rename of the stream's directory.
type streamID struct {
	volume meta.VolumeID
	dir    meta.Ino
}

// NewHost makes a Host of the streams below the root of a volume.
func NewHost(c *penstock.Client, root *penstock.Volume, logger *slog.Logger) *Host {
	h := &Host{Idle: DefaultIdle, client: c, tree: root.Tree(), log: logger, open: map[streamID]*Stream{}, paths: map[streamID]knownPath{}, used: time.Now()}
	h.duties.ended = h.endGroups
	return h
}

// Tree returns the tree in which the streams lie.
func (h *Host) Tree() *penstock.Tree { return h.tree }

// Stream finds a stream by path, for a client that needs a permission on the stream's directory.
// Errors: NotFound, AccessDenied, Unavailable (the host was closed), and errors of DecodeSpec.
func (h *Host) Stream(ctx context.Context, as *Login, p string, want Permission) (*Stream, error) {
	e, err := as.stat(ctx, h.tree, p, want)
	if k := meta.KindOf(err); k == meta.NotFound || k == meta.NotDir || err == nil && !e.Attr.IsDir() {
		return nil, meta.E("open stream", meta.NotFound, p, errors.New("no stream is there"))
	}
	if err != nil {
		return nil, err
	}
	// Stream looks for the file of an open stream, too: the removal of the file ends the
	// stream, and a changed file is another one, see Change.
	file, err := h.tree.Stat(ctx, path.Join(p, SpecFile))
	if err != nil {
		return nil, meta.E("open stream", meta.KindOf(err), p, err)
	}
	id := streamID{e.Volume, e.Attr.Ino}
	return h.find(ctx, id, p, versionOf(&file))
}

// StreamAt finds a stream by its directory, for a client that needs a permission on the directory,
// and must be permitted to search the directories above in the volume. Errors: as of Stream.
func (h *Host) StreamAt(ctx context.Context, as *Login, volume meta.VolumeID, ino meta.Ino, want Permission) (*Stream, error) {
	id, p := streamID{volume, ino}, fmt.Sprintf("volume %d, inode %d", volume, ino)
	v, err := h.client.VolumeByID(ctx, volume)
	if err == nil {
		err = as.reach(ctx, v, ino, want)
	}
	var file penstock.Entry
	if err == nil {
		// As in Stream: the removal of the file ends the stream, and a changed file is another one.
		file, err = volumeDir{v, ino}.lookup(ctx, SpecFile)
	}
	switch meta.KindOf(err) {
	case meta.NotFound, meta.NotDir, meta.Stale, meta.NoSuchVolume:
		return nil, meta.E("open stream", meta.NotFound, p, errors.New("no stream is there"))
	}
	if err != nil {
		return nil, err
	}
	return h.find(ctx, id, p, versionOf(&file))
}

// find returns a stream as a version of stream.json says, and opens a stream that is not open.
func (h *Host) find(ctx context.Context, id streamID, p string, file fileVersion) (*Stream, error) {
	s, err := h.known(id, p)
	switch {
	case err != nil:
		return nil, err
	case s == nil:
		return h.add(ctx, id, p)
	case s.shape.Load().file != file:
		return s, s.reload(ctx, file)
	}
	return s, nil
}

// known returns an open stream; nil: the stream is not open. Errors: Unavailable.
func (h *Host) known(id streamID, p string) (*Stream, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = time.Now()
	if h.closed {
		return nil, meta.E("open stream", meta.Unavailable, p, errors.New("the gateway stops"))
	}
	s := h.open[id]
	if s != nil {
		s.used = h.used
	}
	return s, nil
}

func (h *Host) add(ctx context.Context, id streamID, p string) (*Stream, error) {
	v, err := h.client.VolumeByID(ctx, id.volume)
	if err != nil {
		return nil, err
	}
	dir := volumeDir{v, id.dir}
	spec, file, err := dir.spec(ctx)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.open[id]; s != nil {
		s.used = time.Now()
		return s, nil
	}
	if h.closed {
		return nil, errStreamClosed(p)
	}
	s := &Stream{used: time.Now(), list: h.Gateways, coordinates: h.coordinates, dir: dir, name: p, address: h.Address, unsafe: h.Unsafe, counters: h.Counters, log: h.log, groups: map[string]*committed{}}
	first := &shape{spec: spec, file: file}
	for range spec.Partitions {
		first.slots = append(first.slots, &slot{})
	}
	s.shape.Store(first)
	h.open[id] = s
	return s, nil
}

// Again returns a stream that the caller has found before: the host forgets a stream that nobody
// uses, and a forgotten stream opens no partitions. Errors: as of Stream.
func (h *Host) Again(ctx context.Context, s *Stream) (*Stream, error) {
	return h.StreamAt(ctx, nil, s.dir.v.ID(), s.dir.ino, 0)
}

// Is reports that two streams have the same directory.
func (s *Stream) Is(other *Stream) bool {
	return s.dir.v.ID() == other.dir.v.ID() && s.dir.ino == other.dir.ino
}

// forgetIdle forgets the streams in which the process leads nothing, and for which nobody has looked
// for a time. A request that has found the stream before gets an error that clients try again.
func (h *Host) forgetIdle(idle time.Duration) {
	var gone []*Stream
	h.mu.Lock()
	for id, s := range h.open {
		if time.Since(s.used) > idle && !s.leads() {
			delete(h.open, id)
			s.end()
			gone = append(gone, s)
		}
	}
	h.mu.Unlock()
	for _, s := range gone {
		s.close() // a request may have opened a partition meanwhile; its leadership ends with the session
	}
}

// Create makes a stream with the function Create. The directories belong to the client's user.
func (h *Host) Create(ctx context.Context, as *Login, p string, spec Spec) error {
	t, err := as.creator(ctx, h.tree, p)
	if err != nil {
		return err
	}
	return Create(ctx, t, p, spec)
}

// Change changes a stream with the function Change, for a client that may remove the files of the
// stream: the client needs write and search on the stream's directory.
func (h *Host) Change(ctx context.Context, as *Login, p string, how ChangeOptions) (Spec, error) {
	if _, err := as.stat(ctx, h.tree, p, MayWrite|MaySearch); err != nil {
		return Spec{}, err
	}
	return Change(ctx, h.tree, p, how)
}

// List lists the streams with the function List, beside those that the client may neither read
// nor write.
func (h *Host) List(ctx context.Context, as *Login) (paths []string, whole bool, err error) {
	paths, whole, err = List(ctx, h.tree)
	if as == nil || err != nil {
		return paths, whole, err
	}
	seen := paths[:0]
	for _, p := range paths {
		if _, err := h.see(ctx, as, p); err == nil {
			seen = append(seen, p)
		}
	}
	return seen, whole, nil
}

// see finds the directory of a stream that the client may read or write. Errors: AccessDenied, and
// those of Tree.Stat.
func (h *Host) see(ctx context.Context, as *Login, p string) (penstock.Entry, error) {
	e, err := as.stat(ctx, h.tree, p, MayRead)
	if errors.Is(err, meta.AccessDenied) {
		e, err = as.stat(ctx, h.tree, p, MayWrite)
	}
	return e, err
}

// maxPaths bounds the paths that a Host remembers.
const maxPaths = 10000

// PathOf finds the path of a stream by the stream's directory, for a client that may read or write
// the stream. PathOf remembers paths; for a path that it does not know, or that is out of date, it
// walks over the tree as List does. Errors: NotFound, AccessDenied, and those of List.
func (h *Host) PathOf(ctx context.Context, as *Login, volume meta.VolumeID, ino meta.Ino) (string, error) {
	id := streamID{volume, ino}
	p, err := h.pathOf(ctx, id)
	if err != nil || as == nil {
		return p, err
	}
	e, err := h.see(ctx, as, p)
	if err == nil && !id.is(&e) {
		err = meta.E("find stream", meta.NotFound, p, errors.New("the stream was renamed meanwhile"))
	}
	return p, err
}

// is reports that an entry is the directory of the stream.
func (id streamID) is(e *penstock.Entry) bool { return e.Volume == id.volume && e.Attr.Ino == id.dir }

// knownPath is where PathOf has found a stream; "": nowhere.
type knownPath struct {
	path string
	at   time.Time
}

// nowhereFor is how long PathOf does not walk again for a stream that a walk has not found, such as a
// stream in a volume that is not attached.
const nowhereFor = time.Second

func (h *Host) pathOf(ctx context.Context, id streamID) (string, error) {
	nowhere := meta.E("find stream", meta.NotFound, fmt.Sprintf("volume %d, inode %d", id.volume, id.dir), errors.New("no stream of the tree has this directory"))
	h.mu.Lock()
	known, ok := h.paths[id]
	if s := h.open[id]; !ok && s != nil {
		known.path = s.name
	}
	h.mu.Unlock()
	if known.path != "" {
		if e, err := h.tree.Stat(ctx, known.path); err == nil && id.is(&e) {
			return known.path, nil
		}
	} else if ok && time.Since(known.at) < nowhereFor {
		return "", nowhere
	}
	// A client may ask for a deleted stream again and again: that must not cost a walk.
	if _, err := h.StreamAt(ctx, nil, id.volume, id.dir, 0); err != nil {
		return "", err
	}
	paths, _, err := List(ctx, h.tree)
	if err != nil {
		return "", err
	}
	known = knownPath{at: time.Now()}
	for _, p := range paths {
		if e, err := h.tree.Stat(ctx, p); err == nil && id.is(&e) {
			known.path = p
			break
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.paths) >= maxPaths {
		clear(h.paths)
	}
	if h.paths[id] = known; known.path == "" {
		return "", nowhere
	}
	return known.path, nil
}

// Delete ends a stream of the host and removes the stream's files with the function Delete.
func (h *Host) Delete(ctx context.Context, as *Login, p string) error {
	if err := as.mayDelete(ctx, h.tree, p); err != nil {
		return err
	}
	s, err := h.Stream(ctx, as, p, 0)
	if err != nil {
		return err
	}
	s.publisher.end()
	err = Delete(ctx, h.tree, p)
	h.mu.Lock()
	delete(h.open, streamID{s.dir.v.ID(), s.dir.ino})
	h.mu.Unlock()
	s.close() // the files are gone: an error of close does not matter
	return err
}

// retainEvery is the time after which Run examines the partitions for old records again.
const retainEvery = time.Minute

// Run publishes tables, gives up partitions that nobody uses, removes old records, and closes
// streams whose directory is gone, until ctx ends.
func (h *Host) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { h.publish(ctx) })
	wg.Go(func() { h.balance(ctx) })
	defer wg.Wait()
	retained := time.Now()
	for {
		select {
		case <-time.After(min(h.Idle/4, retainEvery)):
		case <-ctx.Done():
			return
		}
		for _, s := range h.streams() {
			s.releaseIdle(h.Idle)
		}
		h.forgetIdle(h.Idle)
		h.releaseDuties(h.Idle)
		if time.Since(retained) < retainEvery {
			continue
		}
		retained = time.Now()
		for _, s := range h.streams() {
			if !s.leads() {
				continue // asking the owner would count as a use of the volume
			}
			file, err := s.dir.lookup(ctx, SpecFile)
			if err == nil {
				err = s.reload(ctx, versionOf(&file))
			}
			if errors.Is(err, meta.NotFound) || errors.Is(err, meta.Stale) {
				h.mu.Lock()
				delete(h.open, streamID{s.dir.v.ID(), s.dir.ino})
				h.mu.Unlock()
				s.close() // the files are gone: an error of close does not matter
				continue
			}
			if err != nil {
				h.log.Warn("the configuration of a stream can't be read; the gateway goes on with the one before", "stream", s.name, "error", err)
			}
			s.retain(ctx)
		}
	}
}

// RetainIdle looks at the streams of the tree whose records are kept for a time, and removes the
// old records of partitions that nobody leads; the leader of a partition removes old records
// itself. Errors: those of List. What can't be done in a stream is logged.
func (h *Host) RetainIdle(ctx context.Context) error {
	paths, whole, err := List(ctx, h.tree)
	if err != nil {
		return err
	}
	if !whole {
		h.log.Warn("not all streams were found: old records of the others are removed when the streams are used", "found", len(paths))
	}
	for _, p := range paths {
		spec, err := Load(ctx, h.tree, p)
		if err == nil && spec.Retention <= 0 {
			continue
		}
		var s *Stream
		if err == nil {
			s, err = h.Stream(ctx, nil, p, 0)
		}
		if err == nil {
			err = s.retainIdle(ctx)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil && !errors.Is(err, meta.NotFound) {
			h.log.Warn("old records of an unused stream could not be removed; a gateway tries again", "stream", p, "error", err)
		}
	}
	return nil
}

// moveEvery is the time after which a host looks again for what another gateway is to lead.
const moveEvery = 500 * time.Millisecond

// balance gives up what another gateway is to lead, until ctx ends.
func (h *Host) balance(ctx context.Context) {
	for {
		select {
		case <-time.After(moveEvery):
		case <-ctx.Done():
			return
		}
		h.settleDuties()
		if h.Gateways == nil {
			continue
		}
		for _, s := range h.streams() {
			s.moveAway(ctx)
		}
	}
}

// endGroups closes the offsets of groups that another process is about to coordinate.
func (h *Host) endGroups(of func(Coordination) bool) {
	if h.CoordinationEnded != nil {
		h.CoordinationEnded(of)
	}
	for _, s := range h.streams() {
		s.dropOffsets(of)
	}
}

// Leads reports that the host leads a partition, coordinates a group, or is about to.
func (h *Host) Leads() bool {
	for _, s := range h.streams() {
		if s.leads() {
			return true
		}
	}
	return h.duties.any()
}

func (h *Host) streams() (all []*Stream) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.open {
		all = append(all, s)
	}
	return all
}

// Status is what a host has at a moment. What is being opened at that moment does not count.
type Status struct {
	Led         int   // partitions that the process leads
	Unpublished int64 // records of these partitions that are not in the published tables yet
	Lags        []Lag // of the groups that commit here
}

// Lag is how many records of a stream's partitions, as far as this process leads the partitions, a
// group has not committed.
type Lag struct {
	Stream, Group string
	Records       int64
}

// Status returns the status of the host.
func (h *Host) Status() (now Status) {
	for _, s := range h.streams() {
		s.status(&now)
	}
	return now
}

// CloseIdle closes the host if the host leads nothing, and nobody has looked for a stream
// within Idle. CloseIdle reports whether the host is closed. The caller of a closed host can
// end the client's session: a session keeps volumes from being rolled back.
func (h *Host) CloseIdle() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || time.Since(h.used) < h.Idle {
		return h.closed
	}
	for _, s := range h.open {
		if s.leads() {
			return false
		}
	}
	h.closed = h.duties.close()
	return h.closed
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
	h.releaseDuties(0)
	return errors.Join(errs...)
}
