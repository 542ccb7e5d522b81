package namespace

import "encoding/binary"

// checkedLeaders is the walk's knowledge of leaders.
type checkedLeaders struct {
	last uint64 // epoch counted for the volume
	all  []checkedLeader
}

type checkedLeader struct {
	key            []byte
	epoch, session uint64
}

// record takes in one record, and tells bad of damage.
func (l *checkedLeaders) record(k, v []byte, bad func(key []byte, format string, args ...any)) {
	w := walker{b: v}
	ver, epoch := w.u8(), w.n()
	if len(k) == 1 {
		if problem := w.done(ver); problem != "" || epoch == 0 {
			bad(k, "epoch %d: %s", epoch, problem)
		}
		l.last = epoch
		return
	}
	session := w.u64()
	address := w.take(int(min(w.n(), 1<<20)))
	if problem := w.done(ver); len(k) != 9 || problem != "" || epoch == 0 || len(address) > 255 {
		bad(k, "a leader of epoch %d, address of %d bytes: %s", epoch, len(address), problem)
		return
	}
	l.all = append(l.all, checkedLeader{append([]byte(nil), k...), epoch, session})
}

// compare checks that every leader is a journaled session, that no epoch is above the
// last one, and that no two leaderships have the same epoch.
func (l *checkedLeaders) compare(sessions map[uint64]bool, bad func(key []byte, format string, args ...any)) {
	epochs := map[uint64]bool{}
	for _, f := range l.all {
		switch ino := binary.BigEndian.Uint64(f.key[1:]); {
		case !sessions[f.session]:
			bad(f.key, "inode %d is led by session %x, which has no record", ino, f.session)
		case f.epoch > l.last || epochs[f.epoch]:
			bad(f.key, "inode %d is led in epoch %d: the last one begun is %d, or another file has it", ino, f.epoch, l.last)
		}
		epochs[f.epoch] = true
	}
}
