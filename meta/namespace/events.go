package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

//
// Events. A volume with events keeps the last ones under prefix y, numbered without gaps. Each
// event is an effect of the described operation, so the journal has both or neither, and every
// follower has the event. The counters of events are in the volume's record, which nearly every
// operation writes anyway.
//
// The event about a file's contents comes when the writer closes the file. Only the client
// knows of the close: a commit leaves a note (prefix z) and asks the client for a message
// (Closed). A session that ends has closed everything.

const (
	// Beyond the bound, up to 1/trimPart of the kept events may exist, so trimming is an
	// occasional deletion of a range.
	trimPart = 8
	// maxClosed bounds the inodes of one Closed.
	maxClosed = 8192
)

const (
	eventFrom = 1 << iota
	eventReplaced
	eventVolume
	eventLast
)

// eventLog is the part of the volume's record about events.
type eventLog struct {
	keep  uint64 // 0: none are made
	first uint64 // INVARIANT: exactly the events [first, next) exist
	next  uint64 // 0: no event was ever added
}

// event adds an event with the next number. event sets Seq and Time.
func (t *tx) event(e *meta.Event) {
	l := &t.vol.events
	if l.keep == 0 {
		return
	}
	e.Seq, e.Time = l.next, t.c.Now
	s := t.mark()
	t.buf = appendEventKey(t.buf, e.Seq)
	v := len(t.buf)
	t.buf = appendEvent(t.buf, e)
	t.putAt(s, v)
	l.next++
	if l.next-l.first > l.keep+l.keep/trimPart {
		t.trimEvents(l.next - l.keep)
	}
}

// trimEvents drops the events before a number.
func (t *tx) trimEvents(first uint64) {
	l := &t.vol.events
	if first > l.first {
		t.mark()
		t.effects = append(t.effects, Effect{DeleteRange, appendEventKey(nil, l.first), appendEventKey(nil, first)})
		l.first = first
	}
}

// cutEvents drops all events and skips n numbers, so consumers notice the gap.
func (t *tx) cutEvents(n uint64) {
	l := &t.vol.events
	if l.next == 0 {
		return
	}
	t.trimEvents(l.next)
	l.next += n
	l.first = l.next
}

func (t *tx) setEvents(op *meta.SetEvents) error {
	if op.Keep != 0 && (op.Keep < meta.MinEvents || op.Keep > meta.MaxEvents) {
		return fail("set events", meta.Invalid, fmt.Sprintf("%d events are not %d to %d", op.Keep, meta.MinEvents, meta.MaxEvents))
	}
	l := &t.vol.events
	switch {
	case op.Keep == l.keep:
	case op.Keep == 0:
		t.trimEvents(l.next)
		t.effects = append(t.effects, Effect{DeleteRange, []byte{prefixChanger}, []byte{prefixChanger + 1}})
	case l.next == 0:
		l.first, l.next = 1, 1
	case l.keep == 0:
		t.cutEvents(1)
	case l.next-l.first > op.Keep:
		t.trimEvents(l.next - op.Keep)
	}
	l.keep = op.Keep
	return nil
}

// ---- advisory quotas

//
// The last reported state of the advisory quotas has a separate record. If an owner dies
// between writing a crossing into the volume's row and reporting the crossing, the successor
// reports the crossing, and nothing is reported twice.

var overKey = []byte{prefixOver}

const ( // bits of the record
	overBytes = 1 << iota
	overInodes
)

func (t *tx) tellQuota(op *meta.TellQuota) error {
	was, err := quotaTold(t.r)
	if err != nil {
		return err
	}
	var now byte
	for _, q := range []struct {
		bit         byte
		name        string
		over        bool
		used, limit uint64
	}{
		{overBytes, "bytes", op.BytesOver, t.vol.bytes, op.Bytes},
		{overInodes, "inodes", op.InodesOver, t.vol.inodes, op.Inodes},
	} {
		if q.over {
			now |= q.bit
		}
		if q.over != (was&q.bit != 0) {
			t.event(&meta.Event{Kind: meta.EventQuota, Name: q.name, Over: q.over, Used: q.used, Limit: q.limit})
		}
	}
	if now == was {
		return nil
	}
	s := t.mark()
	t.buf = append(t.buf, overKey...)
	if now == 0 {
		t.deleteAt(s)
		return nil
	}
	v := len(t.buf)
	t.buf = append(t.buf, overV1, now)
	t.putAt(s, v)
	return nil
}

// QuotaTold says which advisory quotas were told to be crossed, events on or off.
func QuotaTold(r Reader) (bytes, inodes bool, err error) {
	bits, err := quotaTold(r)
	return bits&overBytes != 0, bits&overInodes != 0, err
}

func quotaTold(r Reader) (bits byte, err error) {
	b, have, err := r.Get(overKey)
	if err != nil || !have {
		return 0, err
	}
	return decodeOver(b)
}

func decodeOver(b []byte) (bits byte, err error) {
	d := decoder{b: b}
	if err := d.version(overV1, "crossed quotas"); err != nil {
		return 0, err
	}
	if bits = d.byte(); bits == 0 || bits > overBytes|overInodes {
		d.bad = true
	}
	return bits, d.end("crossed quotas")
}

// fileEvent adds an event about an inode, under a name of the inode. Without names, fileEvent
// adds no event.
func (t *tx) fileEvent(kind meta.EventKind, in *inode) error {
	if t.vol.events.keep == 0 || in.Nlink == 0 {
		return nil
	}
	e := meta.Event{Kind: kind, Ino: in.Ino, Type: in.Mode & meta.TypeMask}
	name, err := t.nameIn(in, in.home)
	if err != nil {
		return err
	}
	if name != "" {
		e.Parent, e.Name = in.home, name
	}
	t.event(&e)
	return nil
}

// changing notes that a session changes a file's contents, and asks the session to report the
// close. For a change by the owner itself, the event comes at once.
func (t *tx) changing(in *inode, res *meta.Result) error {
	if t.vol.events.keep == 0 {
		return nil
	}
	if t.c.Session == 0 {
		return t.fileEvent(meta.EventChanged, in)
	}
	res.Existed = true
	_, noted, err := t.r.Get(appendChangerKey(t.scratch[:0], t.c.Session, in.Ino))
	if err == nil && !noted {
		s := t.mark()
		t.buf = appendChangerKey(t.buf, t.c.Session, in.Ino)
		t.putMarker(s)
	}
	return err
}

// changed ends the note of changing, if the note exists.
func (t *tx) changed(session meta.SessionID, ino meta.Ino, tell bool) error {
	if t.vol.events.keep == 0 {
		return nil
	}
	_, noted, err := t.r.Get(appendChangerKey(t.scratch[:0], session, ino))
	if err != nil || !noted {
		return err
	}
	s := t.mark()
	t.buf = appendChangerKey(t.buf, session, ino)
	t.deleteAt(s)
	if !tell {
		return nil
	}
	in, err := t.load(ino)
	if meta.KindOf(err) == meta.Stale {
		return nil
	}
	if err != nil {
		return err
	}
	return t.fileEvent(meta.EventChanged, in)
}

func (t *tx) closed(op *meta.Closed) error {
	if len(op.Inos) > maxClosed {
		return fail("closed", meta.ResourceExceeded, fmt.Sprintf("%d inodes, at most %d go at once", len(op.Inos), maxClosed))
	}
	seen := make(map[meta.Ino]bool, len(op.Inos))
	for _, ino := range op.Inos {
		if seen[ino] {
			continue // the store does not show the step's effects yet
		}
		seen[ino] = true
		if err := t.changed(t.c.Session, ino, true); err != nil {
			return err
		}
		if err := t.release(); err != nil {
			return err
		}
	}
	return nil
}

// endChanges adds the events about files that an ending session was changing, some in each
// call.
func (t *tx) endChanges(s meta.SessionID) (more bool, err error) {
	var inos []meta.Ino
	lo := appendChangerKey(nil, s, 0)
	err = t.r.Scan(lo, after(lo[:9]), func(k, _ []byte) bool {
		if len(inos) == endBatch {
			more = true
			return false
		}
		if len(k) == 17 {
			inos = append(inos, meta.Ino(binary.BigEndian.Uint64(k[9:])))
		}
		return true
	})
	for _, ino := range inos {
		if err == nil {
			err = t.changed(s, ino, true)
		}
	}
	return more, err
}

// EventLog returns the range of the kept events.
func EventLog(r Reader) (meta.EventLog, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	l := t.vol.events
	return meta.EventLog{Keep: l.keep, First: l.first, Last: max(l.next, 1) - 1}, err
}

// Events reads at most limit events with numbers above after. Events does not check for gaps.
func Events(r Reader, after uint64, limit int) (all []meta.Event, err error) {
	if after+1 == 0 {
		return nil, nil
	}
	var inner error
	err = r.Scan(appendEventKey(nil, after+1), []byte{prefixEvent + 1}, func(k, v []byte) bool {
		if len(all) == limit {
			return false
		}
		if len(k) != 9 {
			inner = fail("events", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		var e meta.Event
		if e, inner = decodeEvent(v); inner != nil {
			return false
		}
		e.Seq = binary.BigEndian.Uint64(k[1:])
		all = append(all, e)
		return true
	})
	if err == nil {
		err = inner
	}
	return all, err
}

func appendEvent(b []byte, e *meta.Event) []byte {
	if e.Kind == meta.EventQuota {
		// In place of other fields, so programs without the kind can decode the event, and skip
		// the event.
		e = &meta.Event{Kind: e.Kind, Time: e.Time, Name: e.Name, Ino: meta.Ino(e.Used), Replaced: meta.Ino(e.Limit), Last: e.Over}
	}
	var bits byte
	if e.FromParent != 0 {
		bits |= eventFrom
	}
	if e.Replaced != 0 {
		bits |= eventReplaced
	}
	if e.Volume != 0 {
		bits |= eventVolume
	}
	if e.Last {
		bits |= eventLast
	}
	b = append(b, eventV1, byte(e.Kind), bits, byte(e.Type>>12))
	b = binary.BigEndian.AppendUint64(b, uint64(e.Time))
	b = binary.AppendUvarint(b, uint64(e.Ino))
	b = binary.AppendUvarint(b, uint64(e.Parent))
	b = appendBytes(b, e.Name)
	if bits&eventFrom != 0 {
		b = binary.AppendUvarint(b, uint64(e.FromParent))
		b = appendBytes(b, e.From)
	}
	if bits&eventReplaced != 0 {
		b = binary.AppendUvarint(b, uint64(e.Replaced))
	}
	if bits&eventVolume != 0 {
		b = binary.AppendUvarint(b, uint64(e.Volume))
	}
	return b
}

// decodeEvent decodes an event; the number is part of the key. Unknown kinds are not an error.
func decodeEvent(b []byte) (e meta.Event, err error) {
	d := decoder{b: b}
	if err := d.version(eventV1, "event"); err != nil {
		return e, err
	}
	e.Kind = meta.EventKind(d.byte())
	bits := d.byte()
	e.Type = uint32(d.byte()) << 12
	e.Time = meta.Time(d.fixed64())
	e.Ino, e.Parent, e.Name = meta.Ino(d.uint()), meta.Ino(d.uint()), string(d.bytes())
	if bits&eventFrom != 0 {
		e.FromParent, e.From = meta.Ino(d.uint()), string(d.bytes())
		d.bad = d.bad || e.FromParent == 0
	}
	if bits&eventReplaced != 0 {
		e.Replaced = meta.Ino(d.uint())
		d.bad = d.bad || e.Replaced == 0
	}
	if bits&eventVolume != 0 {
		e.Volume = meta.VolumeID(d.uint32())
		d.bad = d.bad || e.Volume == 0
	}
	e.Last = bits&eventLast != 0
	if e.Kind == 0 || e.Type&^meta.TypeMask != 0 || bits > eventFrom|eventReplaced|eventVolume|eventLast {
		d.bad = true
	}
	if e.Kind == meta.EventQuota {
		e.Used, e.Limit, e.Over = uint64(e.Ino), uint64(e.Replaced), e.Last
		e.Ino, e.Replaced, e.Last = 0, 0, false
		d.bad = d.bad || bits&^(eventReplaced|eventLast) != 0 || e.Type != 0 || e.Parent != 0
	}
	return e, d.end("event")
}
