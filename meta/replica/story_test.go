package replica

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// disk is a replica with its bytes, for stories: every order is carried out at once, and the
// durable part is the part that would come back after a loss of power.
type disk struct {
	Replica
	id    meta.ServerID
	data  []byte
	mark  uint64
	fence meta.Fence
	whole bool
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func crcOf(p []byte) uint32 {
	if len(p) == 0 {
		return 0
	}
	return crc32.Checksum(p, castagnoli)
}

func disks(off *Off, n int) (l []*disk) {
	for i := range n {
		l = append(l, &disk{Replica: Replica{Off: off}, id: meta.ServerID(i + 1)})
	}
	return l
}

func ids(l ...*disk) (out []meta.ServerID) {
	for _, d := range l {
		out = append(out, d.id)
	}
	return out
}

func fence(term, seals int) meta.Fence {
	return meta.Fence{Term: meta.Term(term), Seals: uint32(seals)}
}

func (d *disk) append(f meta.Fence, off int, p string) error {
	o, n := uint64(off), uint64(len(p))
	do, err := d.Append(f, o, n)
	switch {
	case err != nil:
		return err
	case do == Compare && string(d.data[o:o+n]) != p:
		return d.Differs(o)
	case do == Write:
		had := d.Length
		for uint64(len(d.data)) < o {
			d.data = append(d.data, 0)
		}
		d.data = append(d.data[:o:o], p...)
		d.Appended(f, o+n-had)
		d.whole = d.whole || off == 0
	}
	return nil
}

func (d *disk) sync(upTo int) (uint64, error) {
	do, err := d.Sync(uint64(upTo))
	if err != nil {
		return 0, err
	}
	if do == Write {
		d.SyncedTo(d.Length)
		d.mark, d.fence = d.Synced, d.Fence
	}
	return d.Promise(uint64(upTo)), nil
}

func (d *disk) freeze(f meta.Fence, at int) Answer {
	do, err := d.Freeze(f)
	switch {
	case meta.KindOf(err) == meta.Fenced:
		return Answer{Reach: Superseded}
	case err != nil:
		return Answer{Reach: Answered}
	case do == Write:
		d.Frozen(f)
		d.fence = f
	}
	if d.State == Open && !d.Damaged {
		d.SyncedTo(d.Tells())
		d.mark = d.Synced
	}
	return d.tell(at)
}

func (d *disk) tell(at int) Answer {
	n := d.Length
	if at > 0 {
		n = min(n, uint64(at))
	}
	return Answer{Reach: Answered, State: d.State, Length: d.Length, Synced: d.Promised, At: n, CRC: crcOf(d.data[:n]), Damaged: d.Damaged, Whole: d.whole && d.State == Open}
}

func (d *disk) end(f meta.Fence, length uint64) error {
	if do, err := d.Freeze(f); err != nil {
		return err
	} else if do == Write {
		d.Frozen(f)
	}
	if do, err := d.End(f, length); err != nil || do == Nothing {
		return err
	}
	d.data = d.data[:length:length]
	d.Ended(length, crcOf(d.data))
	d.mark, d.fence = length, f
	return nil
}

func (d *disk) delete(f meta.Fence) error {
	do, err := d.Delete(f)
	if do == Write {
		d.Gone(f)
		*d = disk{Replica: d.Replica, id: d.id}
	}
	return err
}

func (d *disk) pull(f meta.Fence, from *disk) error {
	do, err := d.Install(f, from.Length, from.CRC)
	if do == Write {
		d.Installed(f, from.Length, from.CRC)
		d.data = bytes.Clone(from.data)
	}
	return err
}

// power loses the power: appended bytes come back, of which verified are right.
func (d *disk) power(verified, appended int) {
	f := Found{Fence: d.fence, Appended: uint64(appended), Synced: d.mark, Verified: uint64(verified)}
	r := Recovered(f, d.Off)
	data := bytes.Clone(d.data[:verified])
	for uint64(len(data)) < r.Length {
		data = append(data, '?')
	}
	*d = disk{Replica: r, id: d.id, data: data[:r.Length], mark: r.Length, fence: d.fence}
}

// seal asks some disks and decides as an owner does, asking again where necessary; nil is a
// silent disk.
func seal(c Case, f meta.Fence, l ...*disk) Decision {
	answers := make([]Answer, len(l))
	for i, d := range l {
		if d != nil {
			answers[i] = d.freeze(f, int(c.Need))
		}
	}
	for {
		d := DecideSeal(c, answers)
		if d.Verdict != Tell {
			return d
		}
		for i, x := range l {
			if x != nil && slices.Contains(d.Ask, x.id) {
				answers[i] = x.freeze(f, int(d.Length))
			}
		}
	}
}

var (
	w1 = fence(1, 0) // of the writer
	s1 = fence(1, 1) // of the owner's first seal
)

// write appends p to all disks and returns the first refusal.
func write(l []*disk, off int, p string) error {
	for _, d := range l {
		if err := d.append(w1, off, p); err != nil {
			return err
		}
	}
	return nil
}

func want(ok bool, format string, args ...any) error {
	if ok {
		return nil
	}
	return fmt.Errorf(format, args...)
}

// first is the first of several errors.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// kind wants an error of a kind.
func kind(err error, k meta.Kind) error {
	return want(meta.KindOf(err) == k, "want %v, got %v", k, err)
}

// stories are the rules that concern replicas: the interleaving in front, the
// rule behind. bug is the planted bug with which the story must go wrong.
var stories = []struct {
	rule int
	name string
	bug  *Off
	tell func(off *Off) error
}{
	// O1 freezes A and B, decides, is stopped and fenced; O2 seals C and B at another length. O1
	// wakes up: O1's decision was never journaled, so the decision is nowhere; and A, when A is
	// back, gets the content that O2 journaled.
	{1, "a seal that was never journaled is nowhere", &Off{Return: true}, func(off *Off) error {
		l := disks(off, 3)
		a, b, c := l[0], l[1], l[2]
		err := first(write(l, 0, "hello"), a.append(w1, 5, "!!"))
		q := Case{Servers: ids(l...), Off: off}
		o1 := seal(q, s1, a, b, nil)
		o2 := seal(q, fence(2, 1), nil, b, c)
		rec := meta.ChunkRecord{State: meta.ChunkSealed, Fence: fence(2, 1), Servers: o2.Servers, Length: o2.Length, CRC: o2.CRC}
		act := Return(rec, a.id, a.tell(0), 2, true, off)
		return first(err, want(o1.Verdict == Take && o2.Verdict == Take && o2.Length == 5, "%+v, then %+v", o1, o2),
			want(act == TellAt, "A is to be asked for its checksum, not to %v", act),
			want(Return(rec, a.id, a.freeze(fence(2, 2), 5), 2, true, off) == Join, "A has the bytes and may join"))
	}},
	// O1 is stopped, O2 takes over and seals; O1 wakes up and freezes, ends and deletes. O1's
	// term is over: replicas refuse O1.
	{2, "the orders of an owner that wakes up are refused", &Off{Fence: true}, func(off *Off) error {
		l := disks(off, 3)
		err := write(l, 0, "hello")
		d := seal(Case{Servers: ids(l...), Off: off}, fence(2, 1), l...)
		late := seal(Case{Servers: ids(l...), Off: off}, s1, l...)
		return first(err, want(d.Verdict == Take, "%+v", d), want(late.Verdict == Yield, "the old owner decides %v", late.Verdict),
			kind(l[0].end(s1, 5), meta.Fenced))
	}},
	// A server fails in the middle of the writer's stream; the chunk is sealed, and the writer
	// goes on in another chunk. Every byte is in exactly one of the two chunks.
	{3, "what the seal left out is sent again, and nothing else", &Off{AckLate: true}, func(off *Off) error {
		w := NewWriter(3, 0)
		w.Off = off
		_, _ = w.Append(100)
		w.AckedTo(0, 90)
		w.AckedTo(1, 80)
		w.AckedTo(2, 70)
		next := w.Fail(2, meta.Unavailable)
		w.AckedTo(2, 100) // late: no reader may rely on the bytes, the seal may be under way
		w.AckedTo(1, 100)
		from, to := w.Again(85)
		return first(want(next == Seal, "goes on"), want(w.Acked() == 70 && w.Need() == 70, "%d acknowledged", w.Acked()),
			want(from == 85 && to == 100, "sends [%d,%d) again", from, to))
	}},
	// A chunk is deleted; a late append arrives. Chunk ids are never used again: the append must
	// not make another chunk with some of a writer's bytes.
	{4, "a late append brings no deleted chunk back", &Off{Tomb: true}, func(off *Off) error {
		d := disks(off, 1)[0]
		return first(d.append(w1, 0, "hello"), d.delete(s1), kind(d.append(w1, 0, "hello"), meta.NoSuchChunk))
	}},
	// A replica moves away, the order to delete the replica is late; meanwhile the replica moves
	// back. The late order must not hit the new replica; nor may a late order to copy bring back
	// a replica deleted after the order.
	{4, "late orders don't undo later ones", &Off{OldDelete: true}, func(off *Off) error {
		l := disks(off, 2)
		a, b := l[0], l[1]
		err := first(write(l, 0, "hello"), a.end(s1, 5), b.end(s1, 5))
		return first(err, b.delete(fence(1, 2)), b.pull(fence(1, 3), a), kind(b.delete(fence(1, 2)), meta.Fenced),
			want(b.State == Sealed, "B is %v", b.State), b.delete(fence(1, 4)), kind(b.pull(fence(1, 3), a), meta.Fenced))
	}},
	// B loses its power and with the power acknowledged, unsynced bytes; C is away. A still has
	// the bytes, and the seal takes A's bytes.
	{5, "a seal takes what one replica still has", &Off{Longest: true}, func(off *Off) error {
		l := disks(off, 3)
		err := write(l, 0, "acknowledged")
		l[1].power(3, 3)
		d := seal(Case{Servers: ids(l...), Off: off}, s1, l[0], l[1], nil)
		return first(err, want(d.Verdict == Take && d.Length == 12 && slices.Equal(d.Servers, ids(l[0])), "%+v", d))
	}},
	// The writer dies in the middle: A has more than B and C. None lost power, so all
	// acknowledged bytes are on each replica: the shortest will do, and three replicas stay where
	// the longest would have left one replica.
	{5, "bytes on their way cost no replica", nil, func(off *Off) error {
		l := disks(off, 3)
		err := first(write(l, 0, "hello"), l[0].append(w1, 5, " on its way"))
		d := seal(Case{Servers: ids(l...), Off: off}, s1, l...)
		return first(err, want(d.Verdict == Take && d.Length == 5 && len(d.Servers) == 3 && slices.Equal(d.Cut, ids(l[0])), "%+v", d))
	}},
	// A sync returned for "hello"; B and C are cut off, A comes back from a crash with less than
	// its mark. A is corrupt, not short: the seal waits for the others rather than believe A.
	{5, "who verifies below its mark is corrupt, not short", &Off{Short: true}, func(off *Off) error {
		l := disks(off, 3)
		err := write(l, 0, "hello")
		_, serr := l[0].sync(5)
		l[0].power(2, 5)
		d := seal(Case{Servers: ids(l...), Off: off}, s1, l[0], nil, nil)
		return first(err, serr, want(d.Verdict == Wait, "%+v", d))
	}},
	// The same, and B and C answer, C with less: never below a recorded mark.
	{5, "never below what was synced", &Off{Bound: true}, func(off *Off) error {
		l := disks(off, 3)
		err := write(l, 0, "hello")
		for _, d := range l {
			if _, serr := d.sync(5); serr != nil {
				err = serr
			}
		}
		l[2] = disks(off, 3)[2] // an empty disk in its place
		d := seal(Case{Servers: ids(l...), Off: off}, s1, l...)
		return first(err, want(d.Verdict == Take && d.Length == 5 && slices.Equal(d.Servers, ids(l[0], l[1])), "%+v", d))
	}},
	// Extents of the journal refer to ten bytes; the only replica that answers has five. The seal
	// waits; when all have answered and none has the bytes, an operator accepts the loss.
	{5, "never below what the journal committed", &Off{Bound: true}, func(off *Off) error {
		l := disks(off, 3)
		err := write(l, 0, "hello")
		q := Case{Servers: ids(l...), Committed: 10, Off: off}
		wait := seal(q, s1, l[0], nil, nil)
		missing := seal(q, s1, l...)
		q.AcceptLoss = true
		d := seal(q, s1, l...)
		return first(err, want(wait.Verdict == Wait, "%+v", wait), want(missing.Verdict == Missing, "%+v", missing),
			want(d.Verdict == Take && d.Length == 5 && d.Lost == 5, "%+v", d))
	}},
	// All servers of a sealed chunk are gone for good, an operator accepts the loss, and reads
	// fail. A disk of the chunk turns up, whole: readers were told that the bytes never come
	// back, and may have acted on the error.
	{5, "what was accepted as lost never comes back", &Off{Lost: true}, func(off *Off) error {
		l := disks(off, 1)
		err := write(l, 0, "hello")
		d := seal(Case{Servers: ids(l...), Off: off}, s1, l...)
		err = first(err, l[0].end(s1, d.Length))
		rec := meta.ChunkRecord{State: meta.ChunkSealed, Length: d.Length, CRC: d.CRC, Servers: ids(l...)}
		before := Return(rec, l[0].id, l[0].tell(0), 0, true, off)
		rec.Servers, rec.Lost = nil, true
		after := Return(rec, l[0].id, l[0].tell(0), 0, true, off)
		return first(err, want(before == Keep, "before: %v", before), want(after == Discard, "%v", after))
	}},
	// A freeze reports five bytes, the journal names five, and then the power goes: the reported
	// bytes must be durable before the report.
	{5, "what a freeze tells survives", &Off{FreezeSync: true}, func(off *Off) error {
		l := disks(off, 1)
		err := write(l, 0, "hello")
		d := seal(Case{Servers: ids(l...), Off: off}, s1, l...)
		l[0].power(int(l[0].mark), int(l[0].mark))
		return first(err, want(d.Verdict == Take, "%+v", d), l[0].end(s1, d.Length))
	}},
	// A freeze makes unpromised bytes durable. The next freeze, at another length, must not take
	// the bytes for a promise, or two of three replicas would be thrown away for bytes that no
	// client knows of.
	{5, "what a freeze made durable was promised to nobody", nil, func(off *Off) error {
		l := disks(off, 3)
		err := first(write(l, 0, "hello"), l[0].append(w1, 5, " on its way"))
		q := Case{Servers: ids(l...), Asked: true, Need: 5, Off: off}
		_ = seal(q, s1, l...)
		d := seal(q, fence(1, 2), l...)
		return first(err, want(d.Length == 5 && len(d.Servers) == 3, "%+v", d))
	}},
	// The power goes in the middle of a write: the restarted replica ends with garbage. The
	// garbage is cut, and a retry appends at the cut.
	{5, "a torn tail is cut", &Off{KeepTail: true}, func(off *Off) error {
		d := disks(off, 1)[0]
		err := d.append(w1, 0, "hello")
		_, serr := d.sync(5)
		err = first(err, serr, d.append(w1, 5, " world"))
		d.power(7, 11)
		return first(err, want(d.Length == 7 && !d.Damaged, "%d bytes, damaged %v", d.Length, d.Damaged), d.append(w1, 7, "orld"),
			want(string(d.data) == "hello world", "%q", d.data))
	}},
	// A was away while the chunk was sealed with B and C; A has more bytes. A serves nothing, is
	// asked for its checksum at the sealed length, cut to the length, and joins. D has other
	// bytes in the sealed part, and E fewer: both are discarded once enough replicas exist, and
	// kept before, since both may be the last.
	{5, "who was away is checked before it serves", &Off{Return: true}, func(off *Off) error {
		l := disks(off, 5)
		err := first(write(l[:3], 0, "hello"), l[0].append(w1, 5, " more"), l[3].append(w1, 0, "jello, too"), l[4].append(w1, 0, "hell"))
		d := seal(Case{Servers: ids(l[:3]...), Off: off}, s1, nil, l[1], l[2])
		rec := meta.ChunkRecord{State: meta.ChunkSealed, Fence: s1, Servers: d.Servers, Length: d.Length, CRC: d.CRC}
		read := l[0].Read(s1, 0, 5)
		again := func(x *disk, others int, missing bool) Action {
			a := Return(rec, x.id, x.tell(0), others, missing, off)
			if a == TellAt {
				a = Return(rec, x.id, x.freeze(fence(1, 2), int(rec.Length)), others, missing, off)
			}
			return a
		}
		return first(err, kind(read, meta.Fenced), want(again(l[0], 2, true) == Join, "A: %v", again(l[0], 2, true)),
			l[0].end(fence(1, 3), rec.Length), l[0].Read(s1, 0, 5),
			want(again(l[3], 2, true) == Spare, "D, while one is missing: %v", again(l[3], 2, true)),
			want(again(l[3], 3, false) == Discard, "D: %v", again(l[3], 3, false)),
			want(again(l[4], 3, false) == Discard, "E: %v", again(l[4], 3, false)),
			want(again(l[4], 0, false) == Spare, "E, if it is the last: %v", again(l[4], 0, false)))
	}},
	// A disk was replaced by an empty disk, which alone answers. A file may end in the chunk at a
	// length that only the others know.
	{5, "an empty disk proves nothing", &Off{Empty: true}, func(off *Off) error {
		l := disks(off, 3)
		d := seal(Case{Servers: ids(l...), OpenEnded: true, Off: off}, s1, l[0], nil, nil)
		closed := seal(Case{Servers: ids(l...), Off: off}, s1, l[0], nil, nil)
		return first(want(d.Verdict == Wait, "%+v", d), want(closed.Verdict == Take && closed.Length == 0, "nothing refers to it: %+v", closed))
	}},
	// Two replicas have the length, with different bytes at the end (a successor broke rule 6).
	// The promised bytes are the same on both; one replica is sealed.
	{5, "tails that differ don't get into one chunk", &Off{Tails: true}, func(off *Off) error {
		l := disks(off, 3)
		err := first(write(l, 0, "hello"), l[0].append(w1, 5, " one"), l[1].append(w1, 5, " two"), l[2].append(w1, 5, " one"))
		d := seal(Case{Servers: ids(l...), Off: off}, s1, l...)
		for _, x := range l {
			if slices.Contains(d.Servers, x.id) {
				err = first(err, x.end(s1, d.Length), want(x.CRC == d.CRC, "%q is in service, checksum %08x, not %08x", x.data, x.CRC, d.CRC))
			}
		}
		return first(err, want(d.Verdict == Take && slices.Equal(d.Servers, ids(l[0], l[2])), "%+v", d))
	}},
	// One of three acknowledged: the others may never have got the bytes.
	{5, "an acknowledgement is that of every replica", &Off{AckAll: true}, func(off *Off) error {
		w := NewWriter(3, 0)
		w.Off = off
		_, _ = w.Append(10)
		w.AckedTo(0, 10)
		w.SyncedTo(1, 10, 10)
		return want(w.Acked() == 0 && w.Synced() == 0, "%d acknowledged, %d synced", w.Acked(), w.Synced())
	}},
	// The daemon is killed after its bytes went to A alone; its successor, without knowledge of
	// the bytes, sends others to the same place. A has acknowledged the first bytes: A must not
	// acknowledge the second, and must acknowledge a repetition of the first.
	{6, "a repeated append needs the same bytes", &Off{Compare: true}, func(off *Off) error {
		d := disks(off, 1)[0]
		return first(d.append(w1, 0, "hello"), d.append(w1, 0, "hello"), kind(d.append(w1, 0, "jello"), meta.WrongOffset))
	}},
	// An append is lost on the way and the next append arrives; or an append comes that overlaps
	// the end, as no writer cuts its stream. The replica takes neither.
	{6, "appends leave no gap and don't overlap", &Off{Offset: true}, func(off *Off) error {
		d := disks(off, 1)[0]
		return first(d.append(w1, 0, "hello"), kind(d.append(w1, 7, "gap"), meta.WrongOffset), kind(d.append(w1, 3, "lower"), meta.WrongOffset),
			want(string(d.data) == "hello", "%q", d.data))
	}},
	// An open-ended file was journaled with two bytes; its fsyncs were the replicas' alone. Its
	// writer dies, and B, which lost unsynced bytes, alone answers: the file ends no earlier than
	// the last fsync.
	{7, "an open-ended file ends no earlier than its last sync", &Off{Bound: true, Short: true}, func(off *Off) error {
		l := disks(off, 3)
		err := write(l, 0, "he")
		for _, d := range l {
			_, serr := d.sync(2)
			err = first(err, serr)
		}
		err = first(err, write(l, 2, "llo"))
		for _, d := range l {
			n, serr := d.sync(5)
			err = first(err, serr, want(n == 5, "synced %d", n))
		}
		l[1].power(3, 5) // the disk forgot its synced bytes
		d := seal(Case{Servers: ids(l...), Committed: 2, OpenEnded: true, Off: off}, s1, nil, l[1], nil)
		later := seal(Case{Servers: ids(l...), Committed: 2, OpenEnded: true, Off: off}, s1, l[0], l[1], nil)
		return first(err, want(d.Verdict == Wait, "%+v", d), want(later.Verdict == Take && later.Length == 5, "%+v", later))
	}},
	// The only file in an open packed chunk is unlinked while the writer appends the next file:
	// the chunk belongs to its session and is no orphan, whatever the list says.
	{12, "an open chunk is its session's", nil, func(off *Off) error {
		d := disks(off, 1)[0]
		err := d.append(w1, 0, "hello")
		act := Return(meta.ChunkRecord{State: meta.ChunkOpen, Servers: ids(d)}, d.id, d.tell(0), 0, true, off)
		return first(err, want(act == Keep, "%v", act))
	}},
	// A capability ran out under a writer that was busy elsewhere. The server is sound: the
	// writer gets a fresh capability, and sends unanswered requests again.
	{18, "expired is no failure of a replica", nil, func(off *Off) error {
		w := NewWriter(2, 0)
		_, _ = w.Append(10)
		next := w.Fail(0, meta.E("append", meta.BadCapability, "", Expired))
		err := first(want(next == Renew && w.Err() == nil, "%v, %v", next, w.Err()), want(!w.Has(0, 10), "acknowledged"))
		forged := w.Fail(0, meta.E("append", meta.BadCapability, "", nil))
		return first(err, want(forged == Seal && w.Err() != nil, "a refused one is"))
	}},
}

func TestStories(t *testing.T) {
	for _, s := range stories {
		t.Run(fmt.Sprintf("rule %d/%s", s.rule, s.name), func(t *testing.T) {
			if err := s.tell(nil); err != nil {
				t.Fatal(err)
			}
			if s.bug == nil {
				return
			}
			err := s.tell(s.bug)
			if err == nil {
				t.Fatalf("with %+v planted nothing goes wrong", *s.bug)
			}
			t.Logf("with the bug planted: %v", err)
		})
	}
}
