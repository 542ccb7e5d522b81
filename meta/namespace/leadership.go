package namespace

import (
	"cmp"
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// A leader is a record of the live volume, not of a generation: no snapshot has it. The last
// epoch is counted for the whole volume and is never lowered or removed. So the epochs of a
// file grow over rollbacks, also those of a file that was removed and comes back with a rollback.

// leader is the leader of a file.
type leader struct {
	epoch   uint64
	session meta.SessionID
	address string
}

var lastEpochKey = []byte{prefixLeader}

func appendLeaderKey(b []byte, ino meta.Ino) []byte {
	return binary.BigEndian.AppendUint64(append(b, prefixLeader), uint64(ino))
}

func appendLeader(b []byte, l *leader) []byte {
	b = binary.AppendUvarint(append(b, leaderV1), l.epoch)
	b = binary.BigEndian.AppendUint64(b, uint64(l.session))
	return append(binary.AppendUvarint(b, uint64(len(l.address))), l.address...)
}

func decodeLeader(b []byte) (l leader, err error) {
	d := decoder{b: b}
	if err := d.version(leaderV1, "leader"); err != nil {
		return l, err
	}
	l.epoch, l.session, l.address = d.uint(), meta.SessionID(d.fixed64()), string(d.bytes())
	if l.epoch == 0 || l.session == 0 || len(l.address) > meta.MaxLeaderAddress {
		d.bad = true
	}
	return l, d.end("leader")
}

func appendLastEpoch(b []byte, epoch uint64) []byte {
	return binary.AppendUvarint(append(b, epochV1), epoch)
}

func decodeLastEpoch(b []byte) (uint64, error) {
	d := decoder{b: b}
	if err := d.version(epochV1, "epoch"); err != nil {
		return 0, err
	}
	epoch := d.uint()
	if epoch == 0 {
		d.bad = true
	}
	return epoch, d.end("epoch")
}

func readLeader(r Reader, ino meta.Ino) (l leader, ok bool, err error) {
	b, ok, err := r.Get(appendLeaderKey(nil, ino))
	if err != nil || !ok {
		return l, false, err
	}
	l, err = decodeLeader(b)
	return l, err == nil, err
}

// lastEpoch returns the epoch of the last leadership begun in the volume; zero: none.
func lastEpoch(r Reader) (uint64, error) {
	b, ok, err := r.Get(lastEpochKey)
	if err != nil || !ok {
		return 0, err
	}
	return decodeLastEpoch(b)
}

// leaderships are the operations on leaders, within an operation on the namespace.
type leaderships struct{ *tx }

func (t *tx) leaderships() leaderships { return leaderships{t} }

func (t leaderships) begin(op *meta.Lead, res *meta.Result) error {
	const name = "lead"
	if t.c.Session == 0 || len(op.Address) > meta.MaxLeaderAddress {
		return fail(name, meta.Invalid, fmt.Sprintf("session %x, an address of %d bytes", uint64(t.c.Session), len(op.Address)))
	}
	in, err := t.content().regular(name, op.Ino)
	if err != nil {
		return err
	}
	now, led, err := readLeader(t.r, op.Ino)
	if err != nil {
		return err
	}
	if led && now.session != t.c.Session {
		return fail(name, meta.Busy, fmt.Sprintf("inode %d is led in epoch %d from %q", op.Ino, now.epoch, now.address))
	}
	if err := in.checkClosed(name); err != nil {
		return err
	}
	epoch, err := lastEpoch(t.r)
	if err != nil {
		return err
	}
	epoch++
	m := t.mark()
	t.buf = append(t.buf, lastEpochKey...)
	v := len(t.buf)
	t.buf = appendLastEpoch(t.buf, epoch)
	t.putAt(m, v)
	m = t.mark()
	t.buf = appendLeaderKey(t.buf, op.Ino)
	v = len(t.buf)
	t.buf = appendLeader(t.buf, &leader{epoch, t.c.Session, op.Address})
	t.putAt(m, v)
	res.Off = epoch
	return nil
}

// require refuses an operation whose condition (meta.Led) does not hold.
func (t leaderships) require(op meta.Op) error {
	var want meta.Led
	switch op := op.(type) {
	case *meta.Create:
		want = op.Led
	case *meta.Unlink:
		want = op.Led
	case *meta.Rename:
		want = op.Led
	case *meta.SetAttr:
		want = op.Led
	}
	if want == (meta.Led{}) {
		return nil
	}
	now, led, err := readLeader(t.r, want.Ino)
	if err == nil && (!led || now.session != t.c.Session || now.epoch != want.Epoch) {
		err = fail("change", meta.Fenced, fmt.Sprintf("session %x does not lead inode %d in epoch %d", uint64(t.c.Session), want.Ino, want.Epoch))
	}
	return err
}

// give ends a leadership that its leader gives up.
func (t leaderships) give(op *meta.EndLead) error {
	now, led, err := readLeader(t.r, op.Ino)
	if err != nil || !led || now.session != t.c.Session || op.Epoch != 0 && now.epoch != op.Epoch {
		return err
	}
	t.drop(op.Ino)
	return nil
}

func (t leaderships) drop(ino meta.Ino) {
	m := t.mark()
	t.buf = appendLeaderKey(t.buf, ino)
	t.deleteAt(m)
}

// end ends the leaderships of an ending session, some in each call.
func (t leaderships) end(s meta.SessionID) (more bool, err error) {
	var inos []meta.Ino
	err = leaders(t.r, func(ino meta.Ino, l leader) bool {
		if l.session == s {
			if len(inos) == endBatch {
				more = true
				return false
			}
			inos = append(inos, ino)
		}
		return true
	})
	if err != nil {
		return false, err
	}
	for _, ino := range inos {
		t.drop(ino)
	}
	return more, nil
}

func (t leaderships) query(op *meta.Leader, res *meta.Result) error {
	if t.c.At != 0 {
		return fail("leader", meta.NotSupported, "files of a snapshot have no leader")
	}
	l, led, err := readLeader(t.r, op.Ino)
	if err != nil {
		return err
	}
	if !led {
		return fail("leader", meta.NotFound, fmt.Sprintf("inode %d is led by no session", op.Ino))
	}
	res.Off, res.Data = l.epoch, []byte(l.address)
	return nil
}

func leaders(r Reader, fn func(ino meta.Ino, l leader) bool) error {
	var inner error
	err := r.Scan(appendLeaderKey(nil, 0), after(lastEpochKey), func(k, v []byte) bool {
		if len(k) != 9 {
			inner = fail("leaders", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		var l leader
		if l, inner = decodeLeader(v); inner != nil {
			return false
		}
		return fn(meta.Ino(binary.BigEndian.Uint64(k[1:])), l)
	})
	return cmp.Or(inner, err)
}

// Leaders visits the files with a leader, each with the session of its leader.
func Leaders(r Reader, fn func(ino meta.Ino, s meta.SessionID)) error {
	return leaders(r, func(ino meta.Ino, l leader) bool {
		fn(ino, l.session)
		return true
	})
}
