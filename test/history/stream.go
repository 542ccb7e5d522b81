package history

import (
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"sync"
)

// Record is the content of a record of a stream: a number of a producer. Each number of a
// producer is sent once, in one partition, in ascending order.
type Record struct {
	Producer string
	Number   int64
}

// Value is the value of the record, of about some bytes: a text with a checksum.
func (r Record) Value(size int) string {
	text := fmt.Sprintf("%s %d ", r.Producer, r.Number)
	text += strings.Repeat("x", max(0, size-len(text)-8))
	return fmt.Sprintf("%s%08x", text, crc32.ChecksumIEEE([]byte(text)))
}

// ParseRecord is the reverse of Value. An error says that the value is damaged.
func ParseRecord(value string) (r Record, err error) {
	if _, err = fmt.Sscan(value, &r.Producer, &r.Number); err != nil {
		return r, fmt.Errorf("DATA: nobody sent the value %q", value)
	}
	if r.Value(len(value)) != value {
		return r, fmt.Errorf("DATA: the value %q is damaged: %q was sent", value, r.Value(len(value)))
	}
	return r, nil
}

// Partition names a partition.
type Partition struct {
	Topic  string
	Number int32
}

func (p Partition) String() string { return fmt.Sprintf("%s/%d", p.Topic, p.Number) }

// Stream records what producers and consumers of streams are told, and checks it, as the tests
// of Kafka by Jepsen do. Its methods may be called by several goroutines; a method that is told
// of an answer is called after the answer. The rules:
//
//   - an offset has one record, for ever, for producers, consumers and snapshots;
//   - a record was sent, to that partition;
//   - an acknowledged record is at its offset, and in the log at the end;
//   - a record of a producer with the promise Once (idempotent, or with sequence numbers) has one offset;
//   - the first occurrences of a producer's records in a partition are in the order of the numbers,
//     unless the producer has the promise Any;
//   - the polls of a consumer go on at the next offset: they neither skip nor go back;
//   - the members of a group together skip nothing, and begin at the group's committed offset;
//   - ends of logs and committed offsets never go back, and a committed offset was once sent;
//   - a snapshot has all records that were acknowledged before it;
//   - at the end all consumers reach the end.
type Stream struct {
	mu         sync.Mutex
	logs       map[Partition]*streamLog
	sent       map[Record]*sentRecord
	positions  map[reader]*position
	groups     map[reader]*progress
	violations []error
	more       int // violations beyond the list
}

// streamLog is the known state of a partition.
type streamLog struct {
	at  []Record // by offset; the zero value: unknown
	end int64    // the log has at least this end
}

type sentRecord struct {
	to      Partition
	promise Promise
	acked   bool
	offsets []int64 // at which the record was seen
}

// reader is a consumer, or a group, in a partition.
type reader struct {
	name string
	of   Partition
}

// position is where a consumer is in a partition.
type position struct {
	group string // "" for a consumer without a group
	next  int64  // -1: the first poll of a group's member has to come
	least int64  // the committed offset that the member must not go back behind
}

// progress is the known state of a group in a partition.
type progress struct {
	known   int64          // the least committed offset of the group; -1: none
	tried   map[int64]bool // offsets that members have sent as commits
	covered int64          // all records before were delivered
}

// NewStream returns an empty history.
func NewStream() *Stream {
	return &Stream{logs: map[Partition]*streamLog{}, sent: map[Record]*sentRecord{}, positions: map[reader]*position{}, groups: map[reader]*progress{}}
}

// mostViolations bounds the listed violations.
const mostViolations = 20

func (s *Stream) violated(format string, args ...any) {
	if len(s.violations) >= mostViolations {
		s.more++
		return
	}
	s.violations = append(s.violations, fmt.Errorf("DATA: "+format, args...))
}

// Err returns the violations so far.
func (s *Stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.errLocked()
}

func (s *Stream) errLocked() error {
	err := errors.Join(s.violations...)
	if s.more > 0 {
		err = fmt.Errorf("%w\nand %d more", err, s.more)
	}
	return err
}

func (s *Stream) log(p Partition) *streamLog {
	l := s.logs[p]
	if l == nil {
		l = &streamLog{}
		s.logs[p] = l
	}
	return l
}

func (s *Stream) group(name string, p Partition) *progress {
	g := s.groups[reader{name, p}]
	if g == nil {
		g = &progress{known: -1, tried: map[int64]bool{}}
		s.groups[reader{name, p}] = g
	}
	return g
}

// Promise is the promise of a log to a producer.
type Promise int

// The promises to producers.
const (
	// Any: a record may be in the log repeatedly, and behind later records: the producer sends the record
	// again, perhaps to another leader, and does not wait for the end of the first request.
	Any Promise = iota
	// Ordered: a record may be repeated. The first occurrences are in the order of the numbers.
	Ordered
	// Once: a record is in the log once, in the order of the numbers.
	Once
)

// Send says that a record is about to be sent.
func (s *Stream) Send(r Record, to Partition, promise Promise) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent[r] != nil {
		panic(fmt.Sprintf("record %v is sent twice", r))
	}
	s.sent[r] = &sentRecord{to: to, promise: promise}
}

// Acknowledged says that a record is durable at an offset; -1: the producer did not hear at which.
func (s *Stream) Acknowledged(r Record, offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.sent[r]
	x.acked = true
	if offset >= 0 {
		s.see("the producer's acknowledgement", x.to, offset, r)
	}
}

// see notes that a client was told of a record at an offset.
func (s *Stream) see(who string, p Partition, offset int64, r Record) {
	x := s.sent[r]
	if x == nil || x.to != p {
		s.violated("%s: offset %d of %v has record %v, which nobody sent there", who, offset, p, r)
		return
	}
	l := s.log(p)
	if grow := int(offset) + 1 - len(l.at); grow > 0 {
		l.at = append(l.at, make([]Record, grow)...)
	}
	if have := l.at[offset]; have != (Record{}) && have != r {
		s.violated("%s: offset %d of %v has record %v, and had record %v", who, offset, p, r, have)
		return
	}
	l.at[offset] = r
	l.end = max(l.end, offset+1)
	if !slices.Contains(x.offsets, offset) {
		x.offsets = append(x.offsets, offset)
		if x.promise == Once && len(x.offsets) > 1 {
			s.violated("%s: record %v is at the offsets %v of %v, and was to be there once", who, r, x.offsets, p)
		}
	}
}

// Assign says that a consumer without a group reads a partition from an offset on.
func (s *Stream) Assign(consumer string, p Partition, from int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.positions[reader{consumer, p}] = &position{next: from}
}

// Join says that a member of a group begins to read a partition. The call comes before the
// member's client asks for the committed offset.
func (s *Stream) Join(group, consumer string, p Partition) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.positions[reader{consumer, p}] = &position{group: group, next: -1, least: s.group(group, p).known}
}

// Leave says that a consumer reads a partition no more.
func (s *Stream) Leave(consumer string, p Partition) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.positions, reader{consumer, p})
}

// Read says that a poll of a consumer returned a record.
func (s *Stream) Read(consumer string, p Partition, offset int64, r Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.see(consumer, p, offset, r)
	x := s.positions[reader{consumer, p}]
	switch {
	case x == nil:
		s.violated("consumer %s read offset %d of %v, which the consumer does not read", consumer, offset, p)
		return
	case x.next < 0:
		if offset < x.least {
			s.violated("consumer %s of group %s begins at offset %d of %v, and the group had committed %d", consumer, x.group, offset, p, x.least)
		}
	case offset > x.next:
		s.violated("consumer %s skipped the offsets %d to %d of %v", consumer, x.next, offset-1, p)
	case offset < x.next:
		s.violated("consumer %s went back from offset %d to %d of %v", consumer, x.next, offset, p)
	}
	x.next = offset + 1
	if x.group == "" {
		return
	}
	g := s.group(x.group, p)
	if offset > g.covered {
		s.violated("consumer %s of group %s read offset %d of %v, and no member has read offset %d", consumer, x.group, offset, p, g.covered)
	}
	g.covered = max(g.covered, offset+1)
}

// Position returns the offset that a consumer reads next in a partition; -1: unknown.
func (s *Stream) Position(consumer string, p Partition) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.positions[reader{consumer, p}]
	if x == nil {
		return -1
	}
	return x.next
}

// Commit says that a member of a group is about to commit an offset.
func (s *Stream) Commit(group string, p Partition, offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.group(group, p).tried[offset] = true
}

// Committed says that the commit of an offset was acknowledged.
func (s *Stream) Committed(group string, p Partition, offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.group(group, p)
	g.known = max(g.known, offset)
}

// AskCommitted is called before the committed offset of a group is asked for. The caller gives
// the result to SawCommitted.
func (s *Stream) AskCommitted(group string, p Partition) (least int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.group(group, p).known
}

// SawCommitted says which offset a group has committed; -1: none. The offset least comes from
// AskCommitted. A commit without an answer holds or does not hold when a later commit is acknowledged,
// and takes no effect after that.
func (s *Stream) SawCommitted(group string, p Partition, least, offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.group(group, p)
	switch {
	case offset < 0 && least < 0:
	case offset < 0:
		s.violated("group %s has committed nothing in %v, and had committed %d", group, p, least)
	case !g.tried[offset]:
		s.violated("group %s has committed offset %d in %v, which no member sent", group, offset, p)
	case offset >= least:
		g.known = max(g.known, offset)
	default:
		s.violated("the committed offset of group %s in %v went back from %d to %d", group, p, least, offset)
	}
}

// AskEnd is called before the end of a log is asked for, or before a snapshot is taken. The caller
// gives the result to SawEnd, or to Snapshot.
func (s *Stream) AskEnd(p Partition) (least int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log(p).end
}

// SawEnd says where a log begins and ends. No record was removed from the log.
func (s *Stream) SawEnd(p Partition, least, start, end int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if start != 0 {
		s.violated("%v begins at offset %d, and nothing was removed", p, start)
	}
	if end < least {
		s.violated("the end of %v went back from %d to %d", p, least, end)
	}
	l := s.log(p)
	l.end = max(l.end, end)
}

// Snapshot says which records a snapshot has of a partition, from offset 0 on. least is the result of
// AskEnd before the snapshot was taken.
func (s *Stream) Snapshot(name string, p Partition, least int64, records []Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if int64(len(records)) < least {
		s.violated("snapshot %s has %d records of %v, and %d were there before", name, len(records), p, least)
	}
	for i, r := range records {
		if int64(i) < least {
			s.see("snapshot "+name, p, int64(i), r)
		} else if x := s.sent[r]; x == nil || x.to != p {
			s.violated("snapshot %s: offset %d of %v has record %v, which nobody sent there", name, i, p, r)
		}
	}
}

// Final checks the whole history. ends has the end of each partition after the last
// acknowledgement; consumers, all of which have reached these ends, are named.
func (s *Stream) Final(ends map[Partition]int64, consumers []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for p, end := range ends {
		l := s.log(p)
		if l.end > end {
			s.violated("%v ends at offset %d, and had offset %d", p, end, l.end-1)
		}
		for i := int64(0); i < end; i++ {
			if i >= int64(len(l.at)) || l.at[i] == (Record{}) {
				s.violated("no consumer read offset %d of %v, which ends at %d", i, p, end)
			}
		}
		for _, name := range consumers {
			if x := s.positions[reader{name, p}]; x != nil && x.next != end {
				s.violated("consumer %s stands at offset %d of %v, which ends at %d", name, x.next, p, end)
			}
		}
		s.order(p, l)
	}
	for r, x := range s.sent {
		if x.acked && len(x.offsets) == 0 {
			s.violated("record %v was acknowledged, and %v does not have the record", r, x.to)
		}
	}
	for r, g := range s.groups {
		if end, ok := ends[r.of]; ok && g.covered != end {
			s.violated("group %s was given the offsets before %d of %v, which ends at %d", r.name, g.covered, r.of, end)
		}
	}
	return s.errLocked()
}

// order checks the order of each producer's records in a partition.
func (s *Stream) order(p Partition, l *streamLog) {
	last := map[string]int64{}
	for i, r := range l.at {
		x := s.sent[r]
		if x == nil || x.promise == Any || slices.Min(x.offsets) < int64(i) {
			continue // unknown, in no order, or a repetition
		}
		if before, ok := last[r.Producer]; ok && r.Number < before {
			s.violated("offset %d of %v has record %v, behind record %d of the producer", i, p, r, before)
		}
		last[r.Producer] = max(last[r.Producer], r.Number)
	}
}

// Acknowledgements counts the acknowledged records.
func (s *Stream) Acknowledgements() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, x := range s.sent {
		if x.acked {
			n++
		}
	}
	return n
}
