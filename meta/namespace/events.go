package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// Events. A volume that has them switched on keeps the last ones under prefix y,
// numbered without gaps: each is one effect of the operation that it tells of,
// so it is in the journal exactly if that is, and every follower has it. Their
// counters stand in the volume's record, which nearly every operation writes
// anyway.
//
// A file's contents are told of when its writer closes it. Only the client knows
// when that is: a commit leaves a note (prefix z) and asks to be told (Closed).
// Who ends without a word has closed everything.

const (
	// trimPart of what is kept may be there beyond it, so that trimming is one
	// deletion of a range now and then.
	trimPart = 8
	// maxClosed is how many inodes one Closed may name.
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
	first uint64 // INVARIANT: events [first, next) are there, and no others
	next  uint64 // 0: there never were any
}

// event makes one, with the next number. Seq and Time are filled in.
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

// cutEvents drops all of them, and leaves n numbers out: who was following hears
// that it missed something.
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

// What was told of advisory quotas last stands in a record of its own, so that an
// owner that dies between writing a crossing into the volume's row and telling of
// it leaves that to its successor, and nothing is told twice.

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

// fileEvent tells of an inode as it is, under one of its names. Who has none is
// not spoken of.
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

// changing notes that a session changes a file's contents, and asks it to tell
// when it closed the file. What the owner itself changes is told at once.
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

// changed ends what changing began, if it did.
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
			continue // the store does not show yet what this step did
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

// endChanges tells of what a session that ends was changing, a part at a time.
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

// EventLog tells which events are there.
func EventLog(r Reader) (meta.EventLog, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	l := t.vol.events
	return meta.EventLog{Keep: l.keep, First: l.first, Last: max(l.next, 1) - 1}, err
}

// Events reads those after a number, at most limit. They are as dense as the
// store that is asked: what is not there is not looked for.
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
		// In the places of other fields, which programs that don't know the kind
		// can read: they pass over it.
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

// decodeEvent reads an event whose number is in the key. Kinds that this program
// does not know are as good as others.
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
