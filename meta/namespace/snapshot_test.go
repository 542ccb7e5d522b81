package namespace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"testing"

	"penstock.io/penstock/meta"
)

// TestDropSnapshotTellsWhatItFrees: the deletion of a snapshot reports, step by step, the
// bytes that only this snapshot saw, and leaves no useless notes.
func TestDropSnapshotTellsWhatItFrees(t *testing.T) {
	const piece = 4096
	f := newFixture(t)
	ino, id := f.file("f"), f.chunks(1, false)[0]
	placed := uint64(0)
	write := func(from, to uint64) {
		t.Helper()
		op := &meta.Write{Ino: ino, Synced: true}
		for i := from; i < to; i++ {
			op.Extents = append(op.Extents, meta.Extent{Off: i * piece, Len: piece, Chunk: id, ChunkOff: placed})
			placed += 2 * piece // pieces never lie side by side
		}
		f.do(op)
	}
	take := func(name string) meta.Generation {
		t.Helper()
		return meta.Generation(f.do(&meta.TakeSnapshot{Name: name}).Off)
	}
	write(0, 10)
	a := take("a")
	write(0, 4) // a alone sees 4
	b := take("b")
	write(0, 7) // b alone sees 4, both 3
	c := take("c")
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize}) // c alone sees 7, all 3
	for !f.do(&meta.Reap{Ino: ino}).EOF {
	}
	notes := func(upTo meta.Generation) (n int) {
		t.Helper()
		for _, p := range []byte{prefixInoGen, prefixNameGen} {
			if err := f.s.Scan([]byte{p}, after(binary.BigEndian.AppendUint32([]byte{p}, uint32(upTo))), func(_, _ []byte) bool {
				n++
				return true
			}); err != nil {
				t.Fatal(err)
			}
		}
		return n
	}
	for _, d := range []struct {
		at    meta.Generation
		frees uint64
		next  meta.Generation // the oldest remaining snapshot; 0: none
	}{{a, 4, b}, {b, 4 + 3, c}, {c, 7 + 3, 0}} {
		if d.next != 0 && notes(d.next) == 0 {
			t.Errorf("nothing changed between %d and %d", d.at, d.next)
		}
		was, err := Buried(f.s)
		if err != nil {
			t.Fatal(err)
		}
		freed := uint64(0)
		for {
			res := f.do(&meta.DropSnapshot{At: d.at, Max: 2})
			if res.Off > 2*piece {
				t.Errorf("a step of two versions freed %d bytes", res.Off)
			}
			freed += res.Off
			if res.EOF {
				break
			}
		}
		is, err := Buried(f.s)
		if err != nil {
			t.Fatal(err)
		}
		if freed != d.frees*piece || was-is != freed {
			t.Errorf("snapshot %d: %d bytes are told to be freed, %d are; it alone saw %d", d.at, freed, was-is, d.frees*piece)
		}
		upTo := d.next
		if upTo == 0 {
			upTo = c + 1
		}
		if n := notes(upTo); n != 0 {
			t.Errorf("%d notes of what changed before snapshot %d are left, which is the oldest", n, d.next)
		}
		f.check()
	}
}

// TestRollbackWaitsForWhatIsHeld: a volume can be rolled back only when no session holds
// state that the rollback would remove: an open chunk, an unlinked file, the rest of a
// file.
func TestRollbackWaitsForWhatIsHeld(t *testing.T) {
	f := newFixture(t)
	ino, id := f.file("f"), f.chunks(1, false)[0]
	const pieces = reapBatch + 10 // more than an unlink removes
	for i := uint64(0); i < pieces; i += 100 {
		op := &meta.Write{Ino: ino, Synced: true}
		for k := i; k < min(i+100, pieces); k++ {
			op.Extents = append(op.Extents, meta.Extent{Off: k * 4096, Len: 4096, Chunk: id, ChunkOff: k * 8192})
		}
		f.do(op)
	}
	f.seal(id, pieces*8192)
	was := f.attr(ino)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	back := func() {
		t.Helper()
		for op := (&meta.Rollback{To: at}); ; {
			res := f.do(op)
			if op.From = res.Data; res.EOF {
				break
			}
		}
		f.check()
	}
	back()
	busy := func() {
		t.Helper()
		f.fails(meta.Busy, &meta.Rollback{To: at})
	}
	open := f.chunks(1, false)[0]
	busy()
	f.seal(open, 0)
	f.do(&meta.DropChunk{Chunk: open})
	back()

	f.do(&meta.Unlink{Parent: meta.RootIno, Name: "f", Holders: []meta.SessionID{testSession}})
	busy()
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
	busy() // the file's bytes are not removed yet
	for !f.do(&meta.Reap{Ino: ino}).EOF {
	}
	back()
	if is := f.attr(ino); is.Size != was.Size || is.Blocks != was.Blocks {
		t.Errorf("the file is %+v, it was %+v", is, was)
	}
}

// TestRollbackOverGenerations: a record with changes in several generations is met
// several times by a rollback step, and is rolled back once.
func TestRollbackOverGenerations(t *testing.T) {
	f := newFixture(t)
	ino, id := f.file("f"), f.chunks(1, false)[0]
	placed := uint64(0)
	write := func(from, to uint64) {
		t.Helper()
		op := &meta.Write{Ino: ino, Synced: true}
		for i := from; i < to; i++ {
			op.Extents = append(op.Extents, meta.Extent{Off: i * 4096, Len: 4096, Chunk: id, ChunkOff: placed})
			placed += 8192
		}
		f.do(op)
	}
	write(0, 10)
	gone := f.file("gone")
	was, live := f.attr(ino), f.live(id)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	name := "f"
	for i := range uint64(4) {
		write(i, i+3)
		f.do(&meta.SetXattr{Ino: ino, Name: "user.x", Value: []byte{byte(i)}})
		next := name + "+"
		f.do(&meta.Rename{Parent: meta.RootIno, Name: name, NewParent: meta.RootIno, NewName: next})
		f.do(&meta.Rename{Parent: meta.RootIno, Name: next, NewParent: meta.RootIno, NewName: name})
		f.file(string(rune('a' + i)))
		if i == 0 {
			f.do(&meta.Unlink{Parent: meta.RootIno, Name: "gone"})
			f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{gone}})
		}
		f.do(&meta.TakeSnapshot{Name: string(rune('0' + i))})
	}
	f.seal(id, placed)
	for op := (&meta.Rollback{To: at, Max: 1000}); ; {
		res := f.do(op)
		if op.From = res.Data; res.EOF {
			break
		}
	}
	f.check()
	is := f.attr(ino)
	if is.Size != was.Size || is.Blocks != was.Blocks || f.attr(gone).Nlink != 1 {
		t.Errorf("the file is %+v, it was %+v", is, was)
	}
	if n := f.do(&meta.ReadDir{Ino: meta.RootIno}).Entries; len(n) != 2 {
		t.Errorf("%+v", n)
	}
	if now := f.live(id); now < live {
		t.Errorf("%d bytes of the chunk are counted, %d were", now, live)
	}
	if l, err := Diff(f.s, at, 0); err != nil || len(l) != 0 {
		t.Error(l, err)
	}
}

// TestTakeSnapshotRefuses: a snapshot is refused while a file has an unknown end, and
// when the volume has the largest number of snapshots.
func TestTakeSnapshotRefuses(t *testing.T) {
	f := newFixture(t)
	ino, id := f.file("f"), f.chunks(1, true)[0]
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 4096, Chunk: id, OpenEnded: true}}})
	f.fails(meta.Busy, &meta.TakeSnapshot{Name: "s"})
	f.seal(id, 4096)
	// As after so many snapshots: each new one looks at all before it.
	raw, _, err := f.s.Get(volumeKey)
	var v volume
	if err == nil {
		err = decodeVolume(raw, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	var effects []Effect
	for ; v.snaps < meta.MaxSnapshots-1; v.snaps++ {
		effects = append(effects, Effect{Put, appendSnapKey(nil, v.gen), appendSnapshot(nil, &snapshot{gen: v.gen, state: snapshotLive, name: fmt.Sprint(v.gen)})})
		v.lastSnap = v.gen
		v.gen++
	}
	f.commit(append(effects, Effect{Put, volumeKey, appendVolume(nil, &v)}))
	f.check()
	f.do(&meta.TakeSnapshot{Name: "last"})
	f.fails(meta.ResourceExceeded, &meta.TakeSnapshot{Name: "more"})
	f.do(&meta.DropSnapshot{At: 1})
	f.do(&meta.TakeSnapshot{Name: "more"})
}

// TestPartEndsOverATombstone: a write cuts an extent, and the remaining part ends at the
// same offset as an earlier, shorter extent, whose key a snapshot sees as absent: the
// tombstone is kept for the snapshot.
func TestPartEndsOverATombstone(t *testing.T) {
	f := newFixture(t)
	ino, id := f.file("f"), f.chunks(1, false)[0]
	placed := uint64(0)
	write := func(off, n uint64) {
		t.Helper()
		f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: off * 4096, Len: n * 4096, Chunk: id, ChunkOff: placed}}})
		placed += (n + 1) * 4096
		f.check()
	}
	write(0, 1)
	write(1, 1)
	f.do(&meta.TakeSnapshot{Name: "short"})
	write(0, 3)
	f.do(&meta.TakeSnapshot{Name: "long"})
	write(1, 1)
}

// TestJunctionsSince: names that led to a volume at a snapshot, or lead to one now, are
// found page by page from the first later change on.
func TestJunctionsSince(t *testing.T) {
	f := newFixture(t)
	hang := func(name string, v meta.VolumeID, detach bool) {
		t.Helper()
		f.do(&meta.Junction{Parent: meta.RootIno, Name: name, Volume: v, Detach: detach})
	}
	hang("goes", 20, false)
	hang("moves", 21, false)
	hang("stays", 22, false)
	hang("returns", 23, false)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	hang("comes", 24, false)
	f.file("file")
	hang("goes", 20, true)
	hang("returns", 23, true)
	f.do(&meta.TakeSnapshot{Name: "t"})
	hang("returns", 23, false)
	hang("moves", 21, true)
	hang("moves", 25, false)
	want := map[string][2]meta.VolumeID{"comes": {0, 24}, "goes": {20, 0}, "moves": {21, 25}}
	for limit := 1; limit < 12; limit++ {
		got := map[string][2]meta.VolumeID{}
		for from := []byte(nil); ; {
			l, next, err := JunctionsSince(f.s, at, from, limit)
			if err != nil || len(l) > limit {
				t.Fatal(l, err)
			}
			for _, c := range l {
				got[c.Name] = [2]meta.VolumeID{c.Was, c.Now}
			}
			if from = next; from == nil {
				break
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("%d a page: %v", limit, got)
		}
	}
	for name, v := range map[string]meta.VolumeID{"goes": 20, "moves": 21, "stays": 22, "comes": 0, "file": 0} {
		if then, err := JunctionThen(f.s, at, meta.RootIno, name); err != nil || then != v {
			t.Errorf("%s led to %d, %v", name, then, err)
		}
	}
	if _, _, err := JunctionsSince(f.s, at+7, nil, 1); meta.KindOf(err) != meta.NoSuchSnapshot {
		t.Error(err)
	}
}

// TestIndexRecords: the bytes of a snapshot's index count in their chunks until the index
// is replaced, given up, or deleted with the snapshot; an index that does not fit is
// refused.
func TestIndexRecords(t *testing.T) {
	f := newFixture(t)
	f.file("f")
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	ids := f.chunks(3, false)
	index := func(version uint8, parts ...meta.IndexPart) *meta.SetIndex {
		x := meta.SnapshotIndex{Version: version, Inodes: 2, Made: f.now, Parts: parts}
		for _, p := range parts {
			x.Length += p.Length
		}
		return &meta.SetIndex{At: at, Index: x}
	}
	a, b, c := meta.IndexPart{Chunk: ids[0], Length: 5000}, meta.IndexPart{Chunk: ids[1], Length: 70}, meta.IndexPart{Chunk: ids[2], Length: 9}
	live := func(want ...uint64) {
		t.Helper()
		f.check()
		for i, id := range ids {
			if n := f.live(id); n != want[i] {
				t.Errorf("chunk %d has %d bytes in use, want %d", i, n, want[i])
			}
		}
	}
	for _, bad := range []*meta.SetIndex{
		index(0, a), index(1, a, a), index(1, a, meta.IndexPart{Chunk: ids[1]}), index(1, meta.IndexPart{Length: 1}),
	} {
		f.fails(meta.Invalid, bad)
	}
	long := index(1, a)
	long.Index.Length++
	f.fails(meta.Invalid, long)
	lost := index(1, a)
	lost.At++
	f.fails(meta.NoSuchSnapshot, lost)
	live(0, 0, 0)

	f.do(index(1, a, b))
	live(5000, 70, 0)
	if !f.do(index(1, c)).Existed {
		t.Error("another of the same form took its place")
	}
	live(5000, 70, 0)
	f.do(index(2, c))
	live(0, 0, 9)
	f.do(&meta.SetIndex{At: at})
	live(0, 0, 0)
	f.do(index(1, a))
	live(5000, 0, 0)
	f.do(&meta.DropSnapshot{At: at, Max: 1})
	live(0, 0, 0)
	if l, err := Indexes(f.s); err != nil || len(l) != 0 {
		t.Error(l, err)
	}

	at = meta.Generation(f.do(&meta.TakeSnapshot{Name: "t"}).Off)
	f.do(index(1, a, b))
	record := appendIndex(nil, &index(1, a, b).Index)
	x, err := decodeIndex(record)
	if err != nil || !bytes.Equal(appendIndex(nil, &x), record) {
		t.Errorf("%+v, %v", x, err)
	}
	for n := range record {
		if _, err := decodeIndex(record[:n]); err == nil {
			t.Errorf("the first %d bytes of %d are a record", n, len(record))
		}
	}
	if _, err := decodeIndex(append(bytes.Clone(record), 0)); meta.KindOf(err) != meta.Corrupt {
		t.Errorf("a byte more: %v", err)
	}
	record[0]++
	if _, err := decodeIndex(record); meta.KindOf(err) != meta.Version {
		t.Errorf("a newer one: %v", err)
	}
}

// TestNumberUsedAgain: an inode number that a snapshot sees as absent is used for another
// inode: the snapshot's view stays.
func TestNumberUsedAgain(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	f.do(&meta.TakeSnapshot{Name: "there"})
	f.do(&meta.Unlink{Parent: meta.RootIno, Name: "f"})
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "gone"}).Off)
	if got := f.do(&meta.Create{Parent: meta.RootIno, Name: "g", Mode: meta.TypeRegular | 0o600, Ino: ino}).Attr.Ino; got != ino {
		t.Fatal(got)
	}
	f.check()
	c := f.ctx()
	c.At = at
	if _, err := Query(f.s, c, &meta.GetAttr{Ino: ino}); meta.KindOf(err) != meta.Stale {
		t.Errorf("the snapshot shows it: %v", err)
	}
}
