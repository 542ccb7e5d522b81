package namespace

import (
	"encoding/binary"
	"testing"

	"penstock.io/penstock/meta"
)

// A snapshot that is deleted tells, step by step, the bytes that it alone saw, and
// leaves no notes that nobody will look for any more.
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
			placed += 2 * piece // they never lie side by side
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
		next  meta.Generation // the oldest that is left; 0: none
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

// A volume is rolled back when nobody holds anything in it that would not be there
// any more: a chunk that is being written, an unlinked file, the rest of one.
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
	busy() // its bytes are still to be let go
	for !f.do(&meta.Reap{Ino: ino}).EOF {
	}
	back()
	if is := f.attr(ino); is.Size != was.Size || is.Blocks != was.Blocks {
		t.Errorf("the file is %+v, it was %+v", is, was)
	}
}
