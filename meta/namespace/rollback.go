package namespace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

//
// Rolling a volume back makes the live generation equal to a snapshot: the machine goes through
// the notes of later changes (prefixes g and h) and writes every noted entry and inode again in
// the old state. Inode numbers, cookies and change counters keep increasing, so nobody mistakes
// old for new (rule 17).

const (
	// rollBatch is the default number of notes that one Rollback works off.
	rollBatch = 256
	// rollExtents is the number of extents of one file that are compared at a time.
	rollExtents = 2048
)

// rollbacks are the steps of a rollback, within an operation on the namespace.
type rollbacks struct{ *tx }

func (t *tx) rollbacks() rollbacks { return rollbacks{t} }

// rollback does one step, and notes in the snapshot's record that more steps follow. The notes
// of the rollback's changes come up once more at the end; then nothing differs.
func (t rollbacks) rollback(op *meta.Rollback, res *meta.Result) error {
	sn, err := t.snaps().snapshotAt(uint32(op.To))
	if err != nil {
		return err
	}
	if err := t.rollSome(op, res); err != nil {
		return err
	}
	if res.EOF {
		t.cutEvents(1) // a rollback is no series of single events
	}
	if sn.rolling == res.EOF {
		sn.rolling = !res.EOF
		t.snaps().putSnapshot(&sn)
	}
	return nil
}

func (t rollbacks) rollSome(op *meta.Rollback, res *meta.Result) error {
	if err := t.checkIdle(); err != nil {
		return err
	}
	old := &tx{view: view{r: t.r, gen: uint32(op.To), base: t.base}, c: t.c, vol: t.vol}
	limit := int(op.Max)
	if limit == 0 {
		limit = rollBatch
	}
	from := op.From
	if len(from) == 0 {
		from = binary.BigEndian.AppendUint32([]byte{prefixInoGen}, uint32(op.To)+1)
	}
	if from[0] != prefixInoGen && from[0] != prefixNameGen {
		return fail("roll back", meta.Invalid, fmt.Sprintf("a step from %x", from))
	}
	var notes [][]byte
	if err := t.r.Scan(from, []byte{from[0] + 1}, func(k, _ []byte) bool {
		notes = append(notes, bytes.Clone(k))
		return len(notes) <= limit
	}); err != nil {
		return err
	}
	t.budget = rollExtents
	done := map[string]bool{} // the store does not show the effects of this step yet
	for i, k := range notes {
		if len(k) < 13 {
			return fail("roll back", meta.Corrupt, fmt.Sprintf("key %x", k))
		}
		at := meta.Ino(binary.BigEndian.Uint64(k[5:]))
		if i == limit || t.budget <= 0 {
			res.Data = k
			return nil
		}
		if done[string(k[5:])] {
			continue
		}
		done[string(k[5:])] = true
		if k[0] == prefixNameGen {
			if err := t.rollName(old, at, string(k[13:])); err != nil {
				return err
			}
			continue
		}
		all, err := t.rollInode(old, at)
		if err != nil {
			return err
		}
		if !all {
			res.Data = k
			return nil
		}
	}
	if from[0] == prefixInoGen {
		res.Data = binary.BigEndian.AppendUint32([]byte{prefixNameGen}, uint32(op.To)+1)
		return nil
	}
	res.EOF = true
	return nil
}

// checkIdle refuses a rollback while sessions hold inodes or chunks that would disappear.
func (t rollbacks) checkIdle() error {
	for _, prefix := range []byte{prefixWriter, prefixOrphan, prefixReap} {
		keys, err := t.snaps().keysFrom([]byte{prefix}, 1)
		if err != nil {
			return err
		}
		if len(keys) > 0 {
			return fail("roll back", meta.Busy, "files are open, or unlinked ones not yet gone")
		}
	}
	return nil
}

// rollName restores the inode behind one name.
func (t rollbacks) rollName(old *tx, dir meta.Ino, name string) error {
	was, had, err := old.findEntry(dir, name)
	if err != nil {
		return err
	}
	now, have, err := t.findEntry(dir, name)
	if err != nil || had == have && was == now {
		return err
	}
	if have && (!had || now.cookie != was.cookie) {
		s := t.mark()
		t.buf = appendCookieBase(t.buf, dir, now.cookie)
		if err := t.drop(s); err != nil {
			return err
		}
	}
	if !had {
		t.noteName(dir, name)
		s := t.mark()
		t.buf = appendDentryBase(t.buf, dir, name)
		return t.drop(s)
	}
	_, err = t.setEntry(&inode{Attr: meta.Attr{Ino: dir}}, name, was)
	return err
}

// rollInode restores one inode, and returns whether it is complete.
func (t rollbacks) rollInode(old *tx, ino meta.Ino) (all bool, err error) {
	was, err := old.load(ino)
	if meta.KindOf(err) == meta.Stale || err == nil && was.Nlink == 0 {
		was, err = nil, nil // no session holds an unlinked file of that time any more
	}
	if err != nil {
		return false, err
	}
	old.inodes = nil
	in, err := t.load(ino)
	if meta.KindOf(err) == meta.Stale {
		in, err = nil, nil
	}
	switch {
	case err != nil:
		return false, err
	case was == nil && in == nil:
		return true, nil
	case was == nil:
		return t.rollAway(in)
	case in == nil:
		in = &inode{dirty: true}
		in.Attr = meta.Attr{Ino: ino, Mode: was.Mode}
		t.vol.inodes++
		t.inodes = append(t.inodes, in)
	}
	if in.IsRegular() {
		if all, err = t.rollExtents(old, in, was); err != nil || !all {
			in.dirty = true
			return false, err
		}
	}
	if err := t.rollXattrs(old, in, was); err != nil {
		return false, err
	}
	a := was.Attr
	a.Change, a.Blocks = in.Change, in.Blocks
	inline := uint64(0)
	if was.Flags&meta.FlagInline != 0 {
		inline = uint64(len(was.data))
	}
	if in.Flags&meta.FlagInline != 0 {
		a.Blocks -= uint64(len(in.data))
	}
	a.Blocks += inline
	next := max(in.next, was.next)
	if a == in.Attr && next == in.next && bytes.Equal(was.data, in.data) && was.home == in.home && was.homeAt == in.homeAt {
		return true, nil
	}
	in.Attr, in.next, in.data, in.home, in.homeAt = a, next, was.data, was.home, was.homeAt
	in.Change = max(in.Change, was.Change)
	touch(in)
	return true, nil
}

// rollAway removes an inode that did not exist, within the budget.
func (t rollbacks) rollAway(in *inode) (all bool, err error) {
	if in.IsRegular() {
		if all, err = t.extents().cutTail(in, 0); err != nil || !all {
			in.dirty = true
			return false, err
		}
	}
	if _, err := t.xattrs().dropXattrs(in); err != nil {
		return false, err
	}
	return true, in.vanish()
}

// rollExtents restores the extents of a file, from the first difference on.
func (t rollbacks) rollExtents(old *tx, in, was *inode) (all bool, err error) {
	var then, now []extent
	collect := func(l *[]extent) func(e extent) bool {
		return func(e extent) bool {
			*l = append(*l, e)
			return len(*l) <= rollExtents
		}
	}
	// The unchanged first part is skipped without keeping it in memory.
	from, err := t.sameUpTo(old, in, was)
	if err != nil {
		return false, err
	}
	if err := old.extents().scanLive(was, from, collect(&then)); err != nil {
		return false, err
	}
	if err := t.extents().scanExtents(in.Ino, from, collect(&now)); err != nil {
		return false, err
	}
	upTo := uint64(meta.MaxFileSize)
	for _, l := range [][]extent{then, now} {
		if len(l) > rollExtents {
			upTo = min(upTo, l[rollExtents-1].End())
		}
	}
	t.budget -= len(then) + len(now)
	var news []meta.Extent
	for _, e := range then {
		if e.Off < upTo && e.End() > from {
			news = append(news, sub(e.Extent, max(e.Off, from), min(e.End(), upTo)))
		}
	}
	if len(now) > 0 || len(news) > 0 {
		if err := t.extents().edit(in, []span{{from, upTo}}, news); err != nil {
			return false, err
		}
	}
	return upTo == meta.MaxFileSize, nil
}

// sameUpTo returns the offset below which a file's extents are unchanged.
func (t rollbacks) sameUpTo(old *tx, in, was *inode) (uint64, error) {
	at := uint64(0)
	for {
		var l [2][]meta.Extent
		for i, read := range []func(func(extent) bool) error{
			func(fn func(extent) bool) error { return old.extents().scanLive(was, at, fn) },
			func(fn func(extent) bool) error { return t.extents().scanExtents(in.Ino, at, fn) },
		} {
			if err := read(func(e extent) bool {
				l[i] = append(l[i], e.Extent)
				return len(l[i]) < rollExtents
			}); err != nil {
				return 0, err
			}
		}
		n := 0
		for n < len(l[0]) && n < len(l[1]) && l[0][n] == l[1][n] {
			at = l[0][n].End()
			n++
		}
		if n < rollExtents {
			return at, nil
		}
	}
}

func (t rollbacks) rollXattrs(old *tx, in, was *inode) error {
	type pair struct {
		name string
		val  []byte
	}
	var l [2][]pair
	for i, side := range []struct {
		t  *tx
		in *inode
	}{{old, was}, {t.tx, in}} {
		if err := side.t.xattrs().eachXattr(side.in, func(name string, val []byte) bool {
			l[i] = append(l[i], pair{name, bytes.Clone(val)})
			return true
		}); err != nil {
			return err
		}
	}
	for _, p := range l[1] {
		if !slices.ContainsFunc(l[0], func(q pair) bool { return q.name == p.name }) {
			s := t.mark()
			t.buf = appendXattrBase(t.buf, in.Ino, p.name)
			if err := t.drop(s); err != nil {
				return err
			}
			in.dirty = true
		}
	}
	for _, p := range l[0] {
		if !slices.ContainsFunc(l[1], func(q pair) bool { return q.name == p.name && bytes.Equal(q.val, p.val) }) {
			if err := t.xattrs().putXattr(in, p.name, p.val); err != nil {
				return err
			}
			in.dirty = true
		}
	}
	return nil
}
