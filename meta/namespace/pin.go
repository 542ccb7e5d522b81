package namespace

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"penstock.io/penstock/meta"
)

//
// Pins protect snapshots from deletion while a holder needs them. Pins belong to no generation:
// rolling back does not change pins.

// snapshots are the operations on snapshots and pins, within an operation on the namespace.
type snapshots struct{ *tx }

func (t *tx) snaps() snapshots { return snapshots{t} }

// eachPin calls fn with the pins of one snapshot, or with snap zero of all, in
// order of snapshots and holders.
func (t snapshots) eachPin(snap uint32, fn func(p *meta.Pin)) error {
	lo := []byte{prefixPin}
	if snap != 0 {
		lo = appendPinKey(nil, snap, "")
	}
	var bad error
	err := t.r.Scan(lo, after(lo), func(k, v []byte) bool {
		if len(k) < 6 {
			bad = fail("pin", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		var p meta.Pin
		if p, bad = decodePin(v); bad == nil {
			p.Snapshot, p.Holder = meta.Generation(binary.BigEndian.Uint32(k[1:])), string(k[5:])
			fn(&p)
		}
		return bad == nil
	})
	return cmp.Or(err, bad)
}

func (t snapshots) deletePin(snap uint32, holder string) {
	s := t.mark()
	t.buf = appendPinKey(t.buf, snap, holder)
	t.deleteAt(s)
}

func checkHolder(holder string) error {
	bad := func(why string) error {
		return meta.E("pin snapshot", meta.Invalid, fmt.Sprintf("%q", holder), errors.New(why))
	}
	switch {
	case holder == "":
		return bad("a pin has a holder")
	case len(holder) > meta.MaxName:
		return fail("pin snapshot", meta.NameTooLong, holder)
	case !utf8.ValidString(holder) || strings.ContainsFunc(holder, unicode.IsControl):
		return bad("a holder's name is text")
	}
	return nil
}

func (t snapshots) pinSnapshot(op *meta.PinSnapshot, res *meta.Result) error {
	if err := checkHolder(op.Holder); err != nil {
		return err
	}
	if op.TTL <= 0 || op.TTL > meta.MaxPinTTL {
		return meta.E("pin snapshot", meta.Invalid, op.Holder, fmt.Errorf("for %v: more than nothing, at most %v", op.TTL, meta.MaxPinTTL))
	}
	sn, err := t.snapshotAt(uint32(op.At))
	if err != nil {
		return err
	}
	now := t.c.Now
	pin := meta.Pin{By: op.By, Made: now, Until: now + meta.Time(op.TTL)}
	n, longer := 0, false
	var over []string
	if err := t.eachPin(sn.gen, func(p *meta.Pin) {
		switch {
		case p.Holder == op.Holder:
			pin.By, pin.Made = p.By, min(p.Made, now)
			longer = p.Until >= pin.Until
			pin.Until = max(p.Until, pin.Until)
		case p.Over(now):
			over = append(over, p.Holder)
		default:
			n++
		}
	}); err != nil {
		return err
	}
	if n >= meta.MaxPins {
		return fail("pin snapshot", meta.ResourceExceeded, fmt.Sprintf("%d pins", n))
	}
	for _, holder := range over {
		t.deletePin(sn.gen, holder)
	}
	res.Off = uint64(pin.Until)
	if longer {
		return nil
	}
	s := t.mark()
	t.buf = appendPinKey(t.buf, sn.gen, op.Holder)
	v := len(t.buf)
	t.buf = appendPin(t.buf, &pin)
	t.putAt(s, v)
	return nil
}

func (t snapshots) unpinSnapshot(op *meta.UnpinSnapshot, res *meta.Result) error {
	_, ok, err := t.r.Get(appendPinKey(nil, uint32(op.At), op.Holder))
	if err != nil || !ok {
		return err
	}
	res.Existed = true
	t.deletePin(uint32(op.At), op.Holder)
	return nil
}

// shownPins is how many holders an error names.
const shownPins = 5

// unpinned fails while a holder has pinned the snapshot. Otherwise it removes expired pins.
func (t snapshots) unpinned(sn *snapshot) error {
	over, err := t.unheld(sn.gen, sn.name, t.c.Now)
	if err != nil {
		return err
	}
	for _, holder := range over {
		t.deletePin(sn.gen, holder)
	}
	return nil
}

// unheld fails while a holder has pinned the snapshot. Otherwise it returns the holders of
// expired pins.
func (t snapshots) unheld(gen uint32, name string, now meta.Time) (over []string, err error) {
	var held []string
	if err := t.eachPin(gen, func(p *meta.Pin) {
		if p.Over(now) {
			over = append(over, p.Holder)
			return
		}
		held = append(held, fmt.Sprintf("%s until %s", p.Holder, time.Unix(0, int64(p.Until)).UTC().Format(time.RFC3339)))
	}); err != nil {
		return nil, err
	}
	if n := len(held); n > 0 {
		if n > shownPins {
			held = append(held[:shownPins], fmt.Sprintf("%d others", n-shownPins))
		}
		return nil, meta.E("delete snapshot", meta.Busy, name, errors.New("it is pinned by "+strings.Join(held, ", ")))
	}
	return over, nil
}

// Unpinned fails, as deleting a snapshot does, while a holder has pinned the snapshot. Errors:
// Busy (the text names the holder and the end of the pin).
func Unpinned(r Reader, sn *meta.Snapshot, now meta.Time) error {
	t := tx{view: view{r: r}}
	_, err := t.snaps().unheld(uint32(sn.At), sn.Name, now)
	return err
}

// Pins lists the pins of a volume's snapshots, except surely expired ones.
func Pins(r Reader, now meta.Time) (l []meta.Pin, err error) {
	t := tx{view: view{r: r}}
	err = t.snaps().eachPin(0, func(p *meta.Pin) {
		if !p.Over(now) {
			l = append(l, *p)
		}
	})
	return l, err
}

func decodePin(b []byte) (p meta.Pin, err error) {
	d := decoder{b: b}
	if err := d.version(pinV1, "pin"); err != nil {
		return p, err
	}
	p.Made, p.Until = meta.Time(d.fixed64()), meta.Time(d.fixed64())
	p.By = string(d.bytes())
	if p.Until <= p.Made {
		d.bad = true
	}
	return p, d.end("pin")
}

func appendPin(b []byte, p *meta.Pin) []byte {
	b = append(b, pinV1)
	b = binary.BigEndian.AppendUint64(b, uint64(p.Made))
	b = binary.BigEndian.AppendUint64(b, uint64(p.Until))
	return appendBytes(b, p.By)
}
