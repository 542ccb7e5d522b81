package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/offsets"
	"penstock.io/penstock/stream/partition"
	"penstock.io/penstock/stream/placement"
)

// Stream is an open stream.
type Stream struct {
	// shape is what stream.json said when the file was last read. shaping is held while a newer
	// shape takes its place.
	shape   atomic.Pointer[shape]
	shaping sync.Mutex

	dir     volumeDir
	name    string // the path at the time of opening, for people
	address string // of the leader of the partitions
	log     *slog.Logger
	unsafe  Unsafe
	list    gateways
	// coordinates returns the epoch in which the process coordinates a group; 0: the process does not.
	coordinates func(group string) (epoch uint64)
	used        time.Time // time of the last look-up, guarded by the Host's mu

	counters  *partition.Counters
	publisher publisher

	mu     sync.Mutex // of groups and closed
	groups map[string]*committed
	closed bool
}

// shape is a stream as stream.json says.
//
// INVARIANT: spec.Partitions is at most len(slots). There are more slots only after a rollback to
// a moment before the stream grew.
type shape struct {
	spec  Spec
	file  fileVersion
	slots []*slot // by partition; a later shape of the stream has the same slots, and more
}

// Spec returns what stream.json says of the stream, as of the last time that the host looked for
// the stream (Host.Stream).
func (s *Stream) Spec() Spec { return s.shape.Load().spec }

// Directory returns the directory of the stream, which stays the same when the stream is renamed.
func (s *Stream) Directory() (volume meta.VolumeID, ino meta.Ino) { return s.dir.v.ID(), s.dir.ino }

// slots returns the partitions of the stream.
func (s *Stream) slots() []*slot { return s.shape.Load().slots }

// reload reads stream.json again, unless the shape is of a version of the file already. New
// partitions can be used when reload returns, and the policies of open logs are the new ones.
// Errors: NotFound, and errors of DecodeSpec.
func (s *Stream) reload(ctx context.Context, want fileVersion) error {
	s.shaping.Lock()
	defer s.shaping.Unlock()
	now := s.shape.Load()
	if now.file == want {
		return nil
	}
	spec, file, err := s.dir.spec(ctx)
	if err != nil {
		return err
	}
	next := &shape{spec: spec, file: file, slots: slices.Clone(now.slots)}
	for len(next.slots) < spec.Partitions {
		next.slots = append(next.slots, &slot{})
	}
	s.shape.Store(next)
	return nil
}

// slot has the log of a partition while this process leads the partition. mu is held while the
// log is opened.
type slot struct {
	mu   sync.Mutex
	log  *partition.Log // nil: not led
	dir  *ledDir        // of log; nil: nobody can lead the partition, and log is read-only
	used time.Time
	// looked is when the directory of a read-only log had the contents that contents describes.
	looked   time.Time
	contents string
}

// followEvery is how long the log of a partition that nobody can lead is used before the
// process looks for newer contents, and tries to lead the partition again: a mirror's target
// gets new records with each round, and can be led after its promotion.
const followEvery = time.Second

// committed are the offsets of a group, while this process leads their file, in an epoch of the
// coordination of the group.
type committed struct {
	*offsets.Offsets
	dir   *ledDir
	epoch uint64
	used  time.Time
}

func errStreamClosed(name string) error {
	return meta.E("open partition", meta.Unavailable, name, errors.New("the stream was closed"))
}

// Partition returns the log of a partition, opened by the partition's leader. Errors: NotFound
// (no such partition), NotOwner (another process leads the partition, or is to), Unavailable (the owner
// of the volume does not answer), and errors of partition.Open.
func (s *Stream) Partition(ctx context.Context, n int32) (*partition.Log, error) {
	shape := s.shape.Load()
	if n < 0 || int(n) >= shape.spec.Partitions {
		return nil, meta.E("open partition", meta.NotFound, s.name, fmt.Errorf("it has %d partitions, and no partition %d", shape.spec.Partitions, n))
	}
	slot := shape.slots[n]
	slot.mu.Lock()
	defer slot.mu.Unlock()
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil, errStreamClosed(s.name)
	}
	slot.used = time.Now()
	if slot.log == nil || slot.dir == nil || slot.log.Err() != nil {
		if g, other := s.Place(n); other {
			return nil, errElsewhere("open partition", fmt.Sprintf("%s, partition %d", s.name, n), g)
		}
	}
	if slot.log != nil && slot.log.Err() == nil {
		switch {
		case slot.dir == nil && time.Since(slot.looked) < followEvery:
			return slot.log, nil
		case slot.dir == nil:
			return s.lead(ctx, slot, n)
		case !slot.dir.Valid():
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
	return s.lead(ctx, slot, n)
}

// lead opens the log of a partition as the partition's leader, or for reads if nobody can lead
// the partition. The caller holds slot.mu.
func (s *Stream) lead(ctx context.Context, slot *slot, n int32) (*partition.Log, error) {
	dir, err := s.dir.makeSub(ctx, logDir)
	if err == nil {
		dir, err = dir.makeSub(ctx, strconv.Itoa(int(n)))
	}
	var right *penstock.Leadership
	if err == nil {
		right, err = dir.lead(ctx, leaderFile, s.address)
	}
	if errors.Is(err, meta.ReadOnly) {
		return s.openRead(ctx, slot, n)
	}
	if err != nil {
		return nil, err
	}
	led := &ledDir{volumeDir: dir, address: s.address, right: right, unsafe: s.unsafe}
	l, err := partition.Open(ctx, led, s.config(dir, n), s.unsafe.leadership(right))
	if err != nil {
		return nil, errors.Join(err, led.leave(ctx))
	}
	s.replace(slot, n, l)
	slot.dir = led
	return l, nil
}

// openRead opens the log of a partition for reads, unless the log is open and has what the
// partition's directory has. The caller holds slot.mu.
func (s *Stream) openRead(ctx context.Context, slot *slot, n int32) (*partition.Log, error) {
	dir, err := s.partitionDir(ctx, n)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	files := &ledDir{volumeDir: dir}
	contents, err := partition.Contents(ctx, files)
	if err != nil {
		return nil, err
	}
	if slot.log == nil || contents != slot.contents {
		l, err := partition.OpenRead(ctx, files, s.config(dir, n))
		if err != nil {
			return nil, err
		}
		s.replace(slot, n, l)
		slot.contents = contents
	}
	slot.dir, slot.looked = nil, now
	return slot.log, nil
}

// replace sets the log of a partition, and closes the one before, which is read-only. The
// caller holds slot.mu.
func (s *Stream) replace(slot *slot, n int32, l *partition.Log) {
	if slot.log != nil {
		if err := slot.log.Close(); err != nil {
			s.log.Warn("closing a log that was open for reads failed", "stream", s.name, "partition", n, "error", err)
		}
	}
	slot.log = l
}

// config configures the log of a partition.
func (s *Stream) config(dir volumeDir, n int32) partition.Config {
	return partition.Config{
		Name: fmt.Sprintf("%s, partition %d", s.name, n), Volume: uint64(dir.v.ID()), Logger: s.log, Policy: s.policy,
		UnsafeNoSync: s.unsafe.NoSync, Counters: s.counters,
	}
}

// policy returns the policy of the stream's logs at the moment.
func (s *Stream) policy() partition.Policy {
	spec := &s.shape.Load().spec
	return partition.Policy{
		SegmentBytes: spec.SegmentBytes, SegmentAge: spec.SegmentAge, Retention: spec.Retention, RetentionBytes: spec.RetentionBytes,
		Compact: spec.Compact, TombstoneAge: spec.TombstoneAge,
	}
}

// partitionDir returns the directory of a partition. Errors: NotFound.
func (s *Stream) partitionDir(ctx context.Context, n int32) (volumeDir, error) {
	dir, err := s.dir.sub(ctx, logDir)
	if err != nil {
		return dir, err
	}
	return dir.sub(ctx, strconv.Itoa(int(n)))
}

// key identifies a partition for placement.
func (s *Stream) key(n int32) placement.Key {
	return placement.Key{Volume: uint32(s.dir.v.ID()), Directory: uint64(s.dir.ino), Number: n}
}

// Place returns the gateway that is to lead a partition; other: the gateway is another process.
func (s *Stream) Place(n int32) (g placement.Gateway, other bool) {
	return s.list.elsewhere(s.key(n))
}

// Leader returns the gateway that leads a partition, or is to lead a partition without a leader,
// and the epoch of the last leader, -1 without a last leader. Errors: NotFound (no other gateway
// leads the partition, and this process is to lead the partition).
func (s *Stream) Leader(ctx context.Context, n int32) (g placement.Gateway, epoch int32, err error) {
	address, epoch, err := s.ledAt(ctx, n)
	if errors.Is(err, meta.NotFound) {
		if place, other := s.Place(n); other && place.Number != 0 {
			return place, epoch, nil
		}
	}
	if err != nil {
		return g, epoch, err
	}
	g, err = s.list.at(address)
	return g, epoch, err
}

// ledAt returns the address of the leader of a partition, and the epoch of the last leader, -1
// without a last leader; the epoch is also valid with NotFound. Errors: NotFound (nobody leads the
// partition).
func (s *Stream) ledAt(ctx context.Context, n int32) (address string, epoch int32, err error) {
	dir, err := s.partitionDir(ctx, n)
	if err != nil {
		return "", -1, err
	}
	epoch, err = partition.LastEpoch(ctx, &ledDir{volumeDir: dir})
	if err != nil {
		return "", -1, err
	}
	e, err := dir.lookup(ctx, leaderFile)
	if err != nil {
		return "", epoch, err
	}
	address, _, err = dir.v.Leaderships().Leader(ctx, e.Attr.Ino)
	return address, epoch, err
}

// movePause is the time between two moves: clients find the new leader of a partition before the
// next partition moves.
const movePause = 50 * time.Millisecond

// moveAway gives up the partitions that another gateway is to lead, in order. Appends under way end
// first. Clients then hear that this process does not lead the partition, and the other gateway leads
// the partition when a client asks there.
func (s *Stream) moveAway(ctx context.Context) {
	for i, slot := range s.slots() {
		g, other := s.Place(int32(i))
		if !other {
			continue
		}
		slot.mu.Lock()
		if slot.log == nil {
			slot.mu.Unlock()
			continue
		}
		began := time.Now()
		err := slot.close(context.Background())
		slot.mu.Unlock()
		if err != nil {
			s.log.Warn("giving a partition up for another gateway failed; the leadership ends with the session", "stream", s.name, "partition", i, "gateway", g.Number, "error", err)
		} else {
			s.log.Info("a partition moves to another gateway", "stream", s.name, "partition", i, "gateway", g.Number, "took", time.Since(began).Round(time.Millisecond))
		}
		select {
		case <-time.After(movePause):
		case <-ctx.Done():
			return
		}
	}
}

// status adds what the stream has.
func (s *Stream) status(to *Status) {
	ends := map[int32]int64{}
	for n, slot := range s.slots() {
		if !slot.mu.TryLock() {
			continue
		}
		if slot.log != nil && slot.dir != nil {
			_, ends[int32(n)] = slot.log.Bounds()
		}
		slot.mu.Unlock()
	}
	to.Led += len(ends)
	to.Unpublished += s.publisher.behind.Load()
	if !s.mu.TryLock() {
		return
	}
	defer s.mu.Unlock()
	for file, c := range s.groups {
		lag := Lag{Stream: s.name}
		lag.Group, _ = unescape(strings.TrimSuffix(file, groupSuffix))
		for _, at := range c.All() {
			if end, led := ends[at.Partition]; led {
				lag.Records += max(end-at.Offset, 0)
			}
		}
		to.Lags = append(to.Lags, lag)
	}
}

// close closes the log, and ends the leadership. The caller holds mu.
func (s *slot) close(ctx context.Context) error {
	err := s.log.Close()
	s.log = nil
	if s.dir == nil {
		return err
	}
	return errors.Join(err, s.dir.leave(ctx))
}

// retain removes old records of the open partitions, and compacts the partitions.
func (s *Stream) retain(ctx context.Context) {
	for i, slot := range s.slots() {
		slot.mu.Lock()
		l := slot.log
		slot.mu.Unlock()
		if l == nil {
			continue
		}
		if _, err := l.Retain(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("old records could not be removed; the gateway tries again", "stream", s.name, "partition", i, "error", err)
		}
		n, err := l.Compact(ctx)
		if err != nil && ctx.Err() == nil && l.Err() == nil {
			s.log.Warn("a partition could not be compacted; the gateway tries again", "stream", s.name, "partition", i, "error", err)
		}
		if n > 0 {
			s.log.Info("a partition was compacted", "stream", s.name, "partition", i, "removed", n)
		}
	}
}

// retainIdle removes old records of the partitions that no process leads.
func (s *Stream) retainIdle(ctx context.Context) error {
	var errs []error
	for n := range int32(s.Spec().Partitions) {
		old, err := s.mayBeOld(ctx, n)
		if err == nil && old {
			err = s.retainAlone(ctx, n)
		}
		if err != nil && !errors.Is(err, meta.NotFound) && !errors.Is(err, meta.NotOwner) {
			errs = append(errs, fmt.Errorf("partition %d: %w", n, err))
		}
	}
	return errors.Join(errs...)
}

// mayBeOld reports that a partition, which this process does not lead, has records, the first of
// which may be older than the retention.
func (s *Stream) mayBeOld(ctx context.Context, n int32) (bool, error) {
	slot := s.slots()[n]
	if !slot.mu.TryLock() {
		return false, nil // in use
	}
	led := slot.log != nil
	slot.mu.Unlock()
	if led {
		return false, nil
	}
	dir, err := s.partitionDir(ctx, n)
	if err != nil {
		return false, err
	}
	return partition.MayBeOld(ctx, &ledDir{volumeDir: dir}, time.Now().Add(-s.Spec().Retention))
}

// retainAlone leads a partition, removes its old records, and gives the partition up again,
// unless another use of the partition began meanwhile.
func (s *Stream) retainAlone(ctx context.Context, n int32) error {
	l, err := s.Partition(ctx, n)
	if err != nil {
		return err
	}
	slot := s.slots()[n]
	slot.mu.Lock()
	used := slot.used
	slot.mu.Unlock()
	_, err = l.Retain(ctx)
	slot.mu.Lock()
	defer slot.mu.Unlock()
	if slot.log == l && slot.used.Equal(used) && !l.Watched() {
		err = errors.Join(err, slot.close(ctx))
	}
	return err
}

// leads reports that the process leads something in the stream, or is about to.
func (s *Stream) leads() bool {
	for _, slot := range s.slots() {
		if !slot.mu.TryLock() {
			return true
		}
		led := slot.log != nil
		slot.mu.Unlock()
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
	for _, slot := range s.slots() {
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

// dropOffsets closes the offsets of groups, so that another process can lead their files.
func (s *Stream) dropOffsets(of func(Coordination) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, c := range s.groups {
		group, ok := unescape(strings.TrimSuffix(name, groupSuffix))
		if !ok || !of(Coordination{group, c.epoch}) {
			continue
		}
		delete(s.groups, name)
		if err := c.close(); err != nil {
			s.log.Warn("giving up the offsets of a group failed; the leadership ends with the session", "stream", s.name, "group", group, "error", err)
		}
	}
}

func (c *committed) close() error {
	return errors.Join(c.Offsets.Close(), c.dir.leave(context.Background()))
}

// end refuses to open partitions and offsets from now on.
func (s *Stream) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
}

func (s *Stream) close() error {
	s.mu.Lock()
	s.closed = true
	groups := s.groups
	s.groups = nil
	s.mu.Unlock()
	s.publisher.end()
	var errs []error
	for _, slot := range s.slots() {
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

// Coordination is a consumer group that this process coordinates, in an epoch (Host.Coordinate).
type Coordination struct {
	Group string
	Epoch uint64
}

// Offsets returns the offsets of a consumer group in the stream, whose file this process leads
// then. The end of the coordination closes the offsets, so a request of the coordination commits
// nothing later. Where nobody can lead the file, the offsets are those of the moment, unless make is
// true. Errors: Invalid (the group has no name, or too long a name), NotFound (make is false, and the
// group has no offsets), NotOwner (this process does not coordinate the group in the epoch), ReadOnly
// (make is true).
func (s *Stream) Offsets(ctx context.Context, of Coordination, make bool) (*offsets.Offsets, error) {
	group := of.Group
	name := Escape(group) + groupSuffix
	if group == "" || len(name) > meta.MaxName-len(replaceSuffix) {
		return nil, meta.E("open offsets", meta.Invalid, s.name, fmt.Errorf("a group's name has 1 to about 80 bytes"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errStreamClosed(s.name)
	}
	if s.coordinates(group) != of.Epoch {
		return nil, meta.E("open offsets", meta.NotOwner, s.name, fmt.Errorf("this process does not coordinate the group %s in epoch %d", group, of.Epoch))
	}
	if c := s.groups[name]; c != nil {
		if c.used = time.Now(); c.epoch == of.Epoch && c.dir.Valid() {
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
	c := &committed{dir: &ledDir{volumeDir: dir, address: s.address, unsafe: s.unsafe}, epoch: of.Epoch, used: time.Now()}
	if c.Offsets, err = offsets.Open(ctx, c.dir, name, s.log); err != nil {
		err = errors.Join(err, c.dir.leave(ctx))
		if !make && errors.Is(err, meta.ReadOnly) {
			return offsets.Read(ctx, c.dir, name)
		}
		return nil, err
	}
	c.UnsafeNoWrite = s.unsafe.NoOffsets
	s.groups[name] = c
	return c.Offsets, nil
}

// DeleteOffsets removes the file with the offsets of a consumer group; had is false if there was
// none. The caller keeps the group from commits meanwhile. Errors: ReadOnly, and those of Offsets.
func (s *Stream) DeleteOffsets(ctx context.Context, of Coordination) (had bool, err error) {
	if _, err := s.Offsets(ctx, of, false); err != nil {
		if errors.Is(err, meta.NotFound) {
			return false, nil
		}
		return false, err
	}
	name := Escape(of.Group) + groupSuffix
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.groups[name]
	if c == nil {
		return true, meta.E("delete offsets", meta.ReadOnly, s.name, errors.New("offsets can't be deleted here"))
	}
	if err := c.dir.Remove(ctx, name); err != nil {
		return true, err
	}
	if err := c.dir.v.FsyncDir(ctx, c.dir.volumeDir.ino); err != nil { // no crash brings the file back
		return true, err
	}
	delete(s.groups, name)
	c.close() // the file is gone: an error of close does not matter
	return true, nil
}

// DeleteOffsetsOf removes what a consumer group has committed in some partitions, and the file of
// the group when nothing is left. Errors: NotFound (the group has no offsets), ReadOnly, and those of
// Offsets.
func (s *Stream) DeleteOffsetsOf(ctx context.Context, of Coordination, partitions []int32) error {
	o, err := s.Offsets(ctx, of, false)
	if err != nil {
		return err
	}
	var gone []offsets.Commit
	all := o.All()
	for _, c := range all {
		if slices.Contains(partitions, c.Partition) {
			gone = append(gone, offsets.Commit{Partition: c.Partition, Offset: -1, Epoch: -1})
		}
	}
	if len(gone) == len(all) {
		_, err := s.DeleteOffsets(ctx, of)
		return err
	}
	return o.Commit(gone)
}
