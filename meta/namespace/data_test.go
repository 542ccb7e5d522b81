package namespace

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

func (f *fixture) extents(ino meta.Ino) []meta.Extent {
	f.t.Helper()
	var l []meta.Extent
	t := &tx{view: view{r: f.s}}
	if err := t.begin(); err != nil {
		f.t.Fatal(err)
	}
	if err := t.extents().scanExtents(ino, 0, func(e extent) bool { l = append(l, e.Extent); return true }); err != nil {
		f.t.Fatal(err)
	}
	return l
}

func (f *fixture) wantExtents(ino meta.Ino, want ...meta.Extent) {
	f.t.Helper()
	if got := f.extents(ino); !slices.Equal(got, want) {
		f.t.Fatalf("extents\n got %+v\nwant %+v", got, want)
	}
}

func (f *fixture) live(id meta.ChunkID) uint64 {
	f.t.Helper()
	c, _, err := ReadChunk(f.s, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return c.Live
}

func (f *fixture) state(id meta.ChunkID) meta.ChunkState {
	f.t.Helper()
	c, _, err := ReadChunk(f.s, id)
	if err != nil {
		f.t.Fatal(err)
	}
	return c.State
}

func (f *fixture) seal(id meta.ChunkID, length uint64) *meta.Result {
	f.t.Helper()
	return f.do(&meta.SealChunk{Chunk: id, Length: length, CRC: 5, Fence: meta.Fence{Term: 3, Seals: 1}, Servers: []meta.ServerID{1}})
}

func TestWriteExtents(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(2, false)
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 100, Chunk: c[0]}}})
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 100, Len: 100, Chunk: c[0], ChunkOff: 100}}})
	f.wantExtents(ino, meta.Extent{Off: 0, Len: 200, Chunk: c[0]})
	// The place in the chunk does not continue: no joining.
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 200, Len: 100, Chunk: c[0], ChunkOff: 500}}})
	f.wantExtents(ino, meta.Extent{Off: 0, Len: 200, Chunk: c[0]}, meta.Extent{Off: 200, Len: 100, Chunk: c[0], ChunkOff: 500})
	// In the middle of both.
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 150, Len: 100, Chunk: c[1]}}})
	f.wantExtents(ino, meta.Extent{Off: 0, Len: 150, Chunk: c[0]}, meta.Extent{Off: 150, Len: 100, Chunk: c[1]}, meta.Extent{Off: 250, Len: 50, Chunk: c[0], ChunkOff: 550})
	if f.live(c[0]) != 200 || f.live(c[1]) != 100 {
		t.Errorf("live %d %d", f.live(c[0]), f.live(c[1]))
	}
	// Of two overlapping extents in one commit, the later counts.
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 300, Chunk: c[1], ChunkOff: 1000}, {Off: 10, Len: 5, Chunk: c[0], ChunkOff: 2000}}})
	f.wantExtents(ino, meta.Extent{Off: 0, Len: 10, Chunk: c[1], ChunkOff: 1000}, meta.Extent{Off: 10, Len: 5, Chunk: c[0], ChunkOff: 2000},
		meta.Extent{Off: 15, Len: 285, Chunk: c[1], ChunkOff: 1015})
	if a := f.attr(ino); a.Size != 300 || a.Blocks != 300 || a.Flags != 0 {
		t.Errorf("%+v", a)
	}
	for _, bad := range []struct {
		e    meta.Extent
		want meta.Kind
	}{
		{meta.Extent{Off: 0, Len: 0, Chunk: c[0]}, meta.Invalid},
		{meta.Extent{Off: 1 << 63, Len: 1, Chunk: c[0]}, meta.FileTooBig},
		{meta.Extent{Off: 1<<63 - 1, Len: 1, Chunk: c[0]}, meta.FileTooBig},
		{meta.Extent{Off: 1<<64 - 1, Len: 2, Chunk: c[0]}, meta.Invalid},
		{meta.Extent{Off: 0, Len: 1, Chunk: meta.ChunkID{Volume: testVolume, Term: 9}}, meta.NoSuchChunk},
		{meta.Extent{Off: 0, Len: 1, Chunk: meta.ChunkID{Volume: 1, Term: 9}}, meta.CrossVolume},
		{meta.Extent{Off: 0, Len: 1 << 62, Chunk: c[0], ChunkOff: 1<<64 - 2}, meta.Sealed},
		{meta.Extent{Off: 0, Len: 1, ChunkOff: 7}, meta.Invalid},
		{meta.Extent{Off: 300, Len: 1, Chunk: c[0], OpenEnded: true}, meta.Invalid}, // a packed chunk
	} {
		f.fails(bad.want, &meta.Write{Ino: ino, Extents: []meta.Extent{bad.e}})
	}
	f.seal(c[0], 3000)
	f.fails(meta.Sealed, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 1, Chunk: c[0], ChunkOff: 3000}}})
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 1, Chunk: c[0], ChunkOff: 2999}}})
	f.fails(meta.IsDir, &meta.Write{Ino: 1, Size: 5})
	f.fails(meta.Stale, &meta.Write{Ino: 99, Size: 5})
	fifo := f.create(1, "p", meta.TypeFIFO).Ino
	f.fails(meta.Invalid, &meta.Write{Ino: fifo, Size: 5})
}

func TestWriteTimesAndFlags(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(1, false)[0]
	created := f.attr(ino)
	a := f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 10, Chunk: c}}, Size: 20}).Attr
	if a.Mtime != f.now || a.Ctime != f.now || a.Atime != created.Atime || a.Size != 20 || a.Blocks != 10 || a.Flags != meta.FlagUnsynced || a.Change != created.Change+1 {
		t.Errorf("%+v", a)
	}
	past := meta.Time(1000)
	a = f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 10, Chunk: c, ChunkOff: 10}}, Mtime: past, Synced: true}).Attr
	if a.Mtime != past || a.Ctime <= past || a.Flags != meta.FlagUnsynced {
		t.Errorf("a commit with a time: %+v", a)
	}
	before := a
	a = f.do(&meta.Write{Ino: ino, MarkSynced: true}).Attr
	if a.Flags != 0 || a.Mtime != before.Mtime || a.Ctime != before.Ctime || a.Change != before.Change {
		t.Errorf("marking as synced: %+v", a)
	}
	// Set-id bits and capabilities.
	f.do(&meta.SetXattr{Ino: ino, Name: "security.capability", Value: []byte("cap")})
	f.do(&meta.SetXattr{Ino: ino, Name: "user.keep", Value: []byte("v")})
	for _, m := range []struct{ mode, want uint32 }{{0o6755, 0o755}, {0o6745, 0o2745}, {0o4755, 0o755}, {0o1777, 0o1777}} {
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: m.mode})
		if a := f.do(&meta.Write{Ino: ino, Size: 1, Kill: true}).Attr; a.Mode != reg|m.want || a.Flags != meta.FlagHasXattrs {
			t.Errorf("mode %o became %o, flags %x", m.mode, a.Mode, a.Flags)
		}
	}
	f.fails(meta.NoAttribute, &meta.GetXattr{Ino: ino, Name: "security.capability"})
	// Sealed on close.
	a = f.do(&meta.Write{Ino: ino, Seal: true}).Attr
	if a.Flags&meta.FlagSealed == 0 {
		t.Errorf("%+v", a)
	}
	other := f.file("other")
	f.fails(meta.NotPermitted, &meta.Write{Ino: ino, Size: 100})
	f.fails(meta.NotPermitted, &meta.Write{Ino: ino, Inline: true})
	f.fails(meta.NotPermitted, &meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 0})
	f.fails(meta.NotPermitted, &meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: a.Size})
	f.fails(meta.NotPermitted, &meta.Fallocate{Ino: ino, Len: 10})
	f.fails(meta.NotPermitted, &meta.CopyRange{Src: other, Dst: ino, Len: 1})
	f.do(&meta.Write{Ino: ino, Seal: true})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode | meta.SetMtime, Mode: 0o400, Mtime: 5})
	f.do(&meta.Rename{Parent: 1, Name: "f", NewParent: 1, NewName: "other"})
}

func TestInline(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 0, Len: 8000, Chunk: c}}})
	a := f.do(&meta.Write{Ino: ino, Inline: true, Data: []byte("hello")}).Attr
	if a.Size != 5 || a.Blocks != 5 || a.Flags != meta.FlagInline || f.live(c) != 0 {
		t.Errorf("%+v, chunk %d", a, f.live(c))
	}
	f.fails(meta.TooBig, &meta.Write{Ino: ino, Inline: true, Data: make([]byte, meta.InlineMax+1)})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 3})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 9000})
	res := f.do(&meta.Open{Ino: ino})
	if string(res.Data) != "hel" || res.Attr.Size != 9000 || res.Attr.Blocks != 3 {
		t.Errorf("%+v", res)
	}
	// Extents behind the inline bytes leave the inline bytes alone; extents can't replace
	// a part of them.
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 4096, Len: 10, Chunk: c}}})
	f.fails(meta.Invalid, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 1, Len: 10, Chunk: c}}})
	f.fails(meta.Invalid, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 0, Len: 2, Chunk: c}}})
	if a := f.attr(ino); a.Flags&meta.FlagInline == 0 || a.Blocks != 13 {
		t.Errorf("%+v", a)
	}
	f.check()
	f.do(&meta.Fallocate{Ino: ino, Mode: 3, Off: 1, Len: 1})
	if d := f.do(&meta.Open{Ino: ino}).Data; string(d) != "h\x00l" {
		t.Errorf("%q", d)
	}
	f.fails(meta.NotSupported, &meta.CopyRange{Src: ino, Dst: f.file("g"), Len: 10})
	a = f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 0, Len: 2, Chunk: c}, {Off: 2, Len: 2, Chunk: c, ChunkOff: 100}}}).Attr
	if a.Flags&meta.FlagInline != 0 || a.Blocks != 14 {
		t.Errorf("%+v", a)
	}
	f.do(&meta.Write{Ino: ino, Inline: true})
	if a := f.attr(ino); a.Size != 0 || a.Blocks != 0 || a.Flags&meta.FlagInline != 0 {
		t.Errorf("%+v", a)
	}
}

// TestOpenEnded is rule 7.
func TestOpenEnded(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(2, true)
	oe := meta.Extent{Off: 0, Len: 10, Chunk: c[0], OpenEnded: true}
	a := f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{oe}}).Attr
	if a.Flags != meta.FlagOpenEnded || a.Size != 10 || a.Blocks != 10 || f.live(c[0]) != 0 {
		t.Errorf("%+v, live %d", a, f.live(c[0]))
	}
	n := 0
	if err := OpenEnded(f.s, func(i meta.Ino, r meta.ChunkRecord) bool { n++; return i == ino && r.ID == c[0] }); err != nil || n != 1 {
		t.Errorf("%d open-ended, %v", n, err)
	}
	// The open-ended extent may grow, not shrink, and no other extent may overlap it.
	oe.Len = 5000
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{oe}})
	other := f.file("g")
	for _, op := range []meta.Op{
		&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 0, Len: 10, Chunk: c[0], OpenEnded: true}}},
		&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 0, Len: 10, Chunk: c[1]}}},
		&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 5000, Len: 10, Chunk: c[1], OpenEnded: true}}},
		&meta.Write{Ino: ino, Size: 10_000},
		&meta.Write{Ino: ino, Inline: true},
		&meta.Write{Ino: ino, Seal: true},
		&meta.SetAttr{Ino: ino, Mask: meta.SetSize},
		&meta.Fallocate{Ino: ino, Len: 1},
		&meta.CopyRange{Src: ino, Dst: other, Len: 10},
	} {
		f.fails(meta.Busy, op)
	}
	f.fails(meta.Invalid, &meta.Write{Ino: other, Extents: []meta.Extent{{Off: 0, Len: 10, Chunk: c[0], OpenEnded: true}}})
}

func TestOpenEndedCloses(t *testing.T) {
	start := func(t *testing.T) (*fixture, meta.Ino, meta.ChunkID) {
		f := newFixture(t)
		ino := f.file("f")
		c := f.chunks(2, true)
		f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 100, Chunk: c[1]}}})
		f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 100, Len: 10, Chunk: c[0], OpenEnded: true}}})
		return f, ino, c[0]
	}
	t.Run("at its length", func(t *testing.T) {
		f, ino, c := start(t)
		if a := f.do(&meta.Write{Ino: ino, CloseEnded: true}).Attr; a.Size != 110 || a.Flags != 0 || f.live(c) != 10 {
			t.Errorf("%+v", a)
		}
	})
	t.Run("with what follows in the chunk", func(t *testing.T) {
		f, ino, c := start(t)
		a := f.do(&meta.Write{Ino: ino, Synced: true, CloseEnded: true, Extents: []meta.Extent{{Off: 110, Len: 20, Chunk: c, ChunkOff: 10}}}).Attr
		if a.Size != 130 || a.Flags != 0 || f.live(c) != 30 || len(f.extents(ino)) != 2 {
			t.Errorf("%+v %v", a, f.extents(ino))
		}
	})
	t.Run("overwritten in the same commit", func(t *testing.T) {
		f, ino, c := start(t)
		p := f.chunks(1, false)[0]
		f.do(&meta.Write{Ino: ino, Synced: true, CloseEnded: true, Extents: []meta.Extent{{Off: 90, Len: 15, Chunk: p}}})
		if f.live(c) != 5 || f.live(p) != 15 || f.attr(ino).Size != 110 {
			t.Errorf("%v", f.extents(ino))
		}
	})
	t.Run("inline", func(t *testing.T) {
		f, ino, c := start(t)
		f.do(&meta.Write{Ino: ino, CloseEnded: true, Inline: true, Data: []byte("x")})
		if f.live(c) != 0 || f.attr(ino).Size != 1 {
			t.Errorf("%v", f.extents(ino))
		}
	})
	t.Run("another one follows", func(t *testing.T) {
		f, ino, c := start(t)
		d := f.chunks(1, true)[0]
		a := f.do(&meta.Write{Ino: ino, CloseEnded: true, Extents: []meta.Extent{{Off: 110, Len: 5, Chunk: d, OpenEnded: true}}}).Attr
		if a.Flags&meta.FlagOpenEnded == 0 || f.live(c) != 10 || f.live(d) != 0 {
			t.Errorf("%+v", a)
		}
		f.seal(d, 50)
		if a := f.attr(ino); a.Size != 160 {
			t.Errorf("%+v", a)
		}
	})
	for _, c := range []struct {
		length     uint64
		unsynced   bool
		size, live uint64
	}{{10, false, 110, 10}, {4000, false, 4100, 4000}, {3, true, 103, 3}, {0, true, 100, 0}} {
		t.Run(fmt.Sprint("sealed at ", c.length), func(t *testing.T) {
			f, ino, ch := start(t)
			if c.unsynced {
				f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 100, Len: 10, Chunk: ch, OpenEnded: true}}})
			}
			res := f.seal(ch, c.length)
			if res.Attr.Ino != ino || res.Attr.Size != c.size || res.Attr.Blocks != c.size || f.live(ch) != c.live || res.Attr.Flags&^meta.FlagUnsynced != 0 {
				t.Errorf("%+v", res)
			}
			if want := res.Attr.Mtime == f.now; want != (c.size != 110) {
				t.Errorf("time changed %v", want)
			}
			if gone := f.state(ch) == meta.ChunkDeleting; gone != (c.live == 0) {
				t.Errorf("chunk %v", f.state(ch))
			}
		})
	}
	t.Run("sealed below what was synced", func(t *testing.T) {
		f, ino, ch := start(t)
		f.seal(ch, 3)
		if a := f.attr(ino); a.Size != 110 {
			t.Errorf("a loss is hidden: %+v", a)
		}
		rep, err := Check(f.s)
		if err != nil || rep.Count != 1 {
			t.Errorf("%v %+v", err, rep)
		}
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize})
	})
	t.Run("unlinked", func(t *testing.T) {
		f, ino, ch := start(t)
		f.do(&meta.Unlink{Parent: 1, Name: "f"})
		f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
		f.check()
		f.seal(ch, 4000)
		if f.state(ch) != meta.ChunkDeleting {
			t.Error("the chunk stays")
		}
	})
}

func TestTruncate(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 100, Chunk: c}, {Off: 200, Len: 100, Chunk: c, ChunkOff: 100}}})
	f.do(&meta.Fallocate{Ino: ino, Mode: 1, Off: 4096, Len: 4096})
	for _, s := range []struct{ size, blocks, live uint64 }{{250, 150, 150}, {200, 100, 100}, {150, 100, 100}, {1000, 100, 100}, {50, 50, 50}, {50, 50, 50}, {0, 0, 0}} {
		a := f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: s.size}).Attr
		if a.Size != s.size || a.Blocks != s.blocks || f.live(c) != s.live || a.Mtime != f.now || a.Ctime != f.now {
			t.Errorf("to %d: %+v, live %d", s.size, a, f.live(c))
		}
	}
	f.fails(meta.FileTooBig, &meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 1 << 63})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 1<<63 - 1})
	f.fails(meta.IsDir, &meta.SetAttr{Ino: 1, Mask: meta.SetSize})
	f.fails(meta.Invalid, &meta.SetAttr{Ino: f.create(1, "l", meta.TypeFIFO).Ino, Mask: meta.SetSize})
	// Setting the same size drops preallocated space behind the size.
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 10})
	f.do(&meta.Fallocate{Ino: ino, Mode: 1, Off: 0, Len: 8192})
	if a := f.attr(ino); a.Blocks != 8192 || a.Size != 10 {
		t.Errorf("%+v", a)
	}
	if a := f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 10}).Attr; a.Blocks != 10 {
		t.Errorf("%+v", a)
	}
}

func TestFallocateModes(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	for _, c := range []struct {
		mode     uint32
		off, len uint64
		want     meta.Kind
	}{
		{0, 0, 0, meta.Invalid}, {0x02, 0, 1, meta.NotSupported}, {0x12, 0, 1, meta.NotSupported}, {0x40, 0, 1, meta.NotSupported},
		{0x41, 0, 1, meta.NotSupported}, {0x13, 0, 1, meta.NotSupported}, {0x09, 0, 4096, meta.Invalid}, {0x21, 0, 4096, meta.Invalid}, {0x28, 0, 4096, meta.Invalid},
		{0x80, 0, 1, meta.NotSupported}, {0, 1<<63 - 1, 1, meta.FileTooBig}, {0, 1 << 62, 1 << 62, meta.FileTooBig}, {0, 1 << 63, 1, meta.FileTooBig},
		{0x08, 0, 4096, meta.Invalid},  // at the end
		{0x20, 0, 4096, meta.Invalid},  // behind the end
		{0x08, 10, 4096, meta.Invalid}, // not aligned
	} {
		f.fails(c.want, &meta.Fallocate{Ino: ino, Mode: c.mode, Off: c.off, Len: c.len})
	}
	f.fails(meta.IsDir, &meta.Fallocate{Ino: 1, Len: 1})
	a := f.do(&meta.Fallocate{Ino: ino, Off: 100, Len: 5000}).Attr
	if a.Size != 5100 || a.Blocks != 8192 || a.Mtime != f.now || a.Ctime != f.now {
		t.Errorf("%+v", a)
	}
	f.wantExtents(ino, meta.Extent{Off: 0, Len: 8192})
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 1000, Len: 10, Chunk: c}}})
	if a := f.attr(ino); a.Blocks != 8192 || a.Size != 5100 {
		t.Errorf("a write into preallocated space: %+v", a)
	}
	for _, s := range []struct {
		off  uint64
		hole bool
		want uint64
	}{{0, false, 1000}, {0, true, 0}, {1000, true, 1010}, {1005, false, 1005}} {
		if got := f.do(&meta.Seek{Ino: ino, Off: s.off, Hole: s.hole}).Off; got != s.want {
			t.Errorf("seek %+v: %d", s, got)
		}
	}
	f.fails(meta.NoSuchOffset, &meta.Seek{Ino: ino, Off: 1010})
	f.fails(meta.NoSuchOffset, &meta.Seek{Ino: ino, Off: 5100, Hole: true})
	f.do(&meta.Fallocate{Ino: ino, Mode: 0x3, Off: 0, Len: 1 << 40})
	if a := f.attr(ino); a.Blocks != 0 || a.Size != 5100 || f.live(c) != 0 {
		t.Errorf("%+v", a)
	}
}

func TestCollapseAndInsert(t *testing.T) {
	const b = meta.BlockSize
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 4 * b, Chunk: c}}})
	f.do(&meta.Fallocate{Ino: ino, Mode: 0x20, Off: b, Len: 2 * b})
	f.wantExtents(ino, meta.Extent{Len: b, Chunk: c}, meta.Extent{Off: 3 * b, Len: 3 * b, Chunk: c, ChunkOff: b})
	if a := f.attr(ino); a.Size != 6*b || a.Blocks != 4*b {
		t.Errorf("%+v", a)
	}
	f.do(&meta.Fallocate{Ino: ino, Mode: 0x8, Off: 0, Len: 4 * b})
	f.wantExtents(ino, meta.Extent{Off: 0, Len: 2 * b, Chunk: c, ChunkOff: 2 * b})
	if a := f.attr(ino); a.Size != 2*b || f.live(c) != 2*b {
		t.Errorf("%+v", a)
	}
	f.fails(meta.Invalid, &meta.Fallocate{Ino: ino, Mode: 0x8, Off: b, Len: b})
	// Keys of moved extents collide with keys of other extents.
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 0, Len: b, Chunk: c, ChunkOff: 100 * b}, {Off: b, Len: b, Chunk: c, ChunkOff: 200 * b}, {Off: 2 * b, Len: b, Chunk: c, ChunkOff: 300 * b}}})
	f.do(&meta.Fallocate{Ino: ino, Mode: 0x8, Off: 0, Len: b})
	f.wantExtents(ino, meta.Extent{Len: b, Chunk: c, ChunkOff: 200 * b}, meta.Extent{Off: b, Len: b, Chunk: c, ChunkOff: 300 * b})
	f.do(&meta.Fallocate{Ino: ino, Mode: 0x20, Off: 0, Len: b})
	f.wantExtents(ino, meta.Extent{Off: b, Len: b, Chunk: c, ChunkOff: 200 * b}, meta.Extent{Off: 2 * b, Len: b, Chunk: c, ChunkOff: 300 * b})
}

func TestCopyRange(t *testing.T) {
	f := newFixture(t)
	src, dst := f.file("s"), f.file("d")
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: src, Extents: []meta.Extent{{Off: 0, Len: 100, Chunk: c}, {Off: 200, Len: 100, Chunk: c, ChunkOff: 100}}})
	f.do(&meta.Write{Ino: dst, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 1000, Chunk: c, ChunkOff: 5000}}})
	res := f.do(&meta.CopyRange{Src: src, SrcOff: 50, Dst: dst, DstOff: 500, Len: 10_000})
	if res.Off != 250 || res.Attr.Size != 1000 || res.Attr.Blocks != 900 || res.Attr.Flags != meta.FlagUnsynced || res.Attr.Mtime != f.now {
		t.Errorf("%+v", res)
	}
	f.wantExtents(dst, meta.Extent{Off: 0, Len: 500, Chunk: c, ChunkOff: 5000}, meta.Extent{Off: 500, Len: 50, Chunk: c, ChunkOff: 50},
		meta.Extent{Off: 650, Len: 100, Chunk: c, ChunkOff: 100}, meta.Extent{Off: 750, Len: 250, Chunk: c, ChunkOff: 5750})
	if f.live(c) != 200+900 {
		t.Errorf("live %d", f.live(c))
	}
	f.fails(meta.Invalid, &meta.CopyRange{Src: dst, Dst: dst, DstOff: 10, Len: 20})
	f.do(&meta.CopyRange{Src: dst, Dst: dst, DstOff: 10, Len: 10})
	if r := f.do(&meta.CopyRange{Src: src, SrcOff: 300, Dst: dst, Len: 20}); r.Off != 0 {
		t.Errorf("behind the end: %d", r.Off)
	}
	f.fails(meta.FileTooBig, &meta.CopyRange{Src: src, Dst: dst, DstOff: 1<<63 - 1, Len: 2})
	f.fails(meta.IsDir, &meta.CopyRange{Src: 1, Dst: dst, Len: 2})
}

// TestCopyFromSnapshot: a changed or removed file is brought back from a snapshot by
// sharing the snapshot's bytes. The bytes stay when the snapshot goes, and each count is
// exact (the fixture checks the counts at the end).
func TestCopyFromSnapshot(t *testing.T) {
	f := newFixture(t)
	src, other := f.file("s"), f.file("o")
	c := f.chunks(2, false)
	f.do(&meta.Write{Ino: src, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 1000, Chunk: c[0]}}})
	f.do(&meta.TakeSnapshot{Name: "s"})
	at := meta.Generation(1)
	f.do(&meta.Write{Ino: src, Synced: true, Extents: []meta.Extent{{Off: 200, Len: 300, Chunk: c[1]}}})
	copying := &meta.CopyRange{Src: src, Dst: other, Len: 1 << 20, At: at}
	if l, err := Needs(f.s, copying); err != nil || len(l) > 0 {
		t.Errorf("what a snapshot shows is needed of %v, %v", l, err)
	}
	if res := f.do(copying); res.Off != 1000 || res.Attr.Size != 1000 {
		t.Errorf("%+v", res)
	}
	f.wantExtents(other, meta.Extent{Len: 1000, Chunk: c[0]})
	if n := f.live(c[0]); n != 1000+700+1000 { // the snapshot's bytes, the rest of the file, the copy
		t.Errorf("live %d", n)
	}
	// The file itself, copied over its present contents.
	if res := f.do(&meta.CopyRange{Src: src, SrcOff: 100, Dst: src, DstOff: 100, Len: 1 << 20, At: at}); res.Off != 900 {
		t.Errorf("%+v", res)
	}
	f.wantExtents(src, meta.Extent{Len: 1000, Chunk: c[0]})
	f.fails(meta.NoSuchSnapshot, &meta.CopyRange{Src: src, Dst: other, Len: 1, At: 2})
	f.fails(meta.NoSuchSnapshot, &meta.CopyRange{Src: src, Dst: other, Len: 1, At: 9})
	f.do(&meta.Unlink{Parent: meta.RootIno, Name: "s"})
	f.do(&meta.CopyRange{Src: src, SrcOff: 500, Dst: other, DstOff: 1000, Len: 500, At: at})
	for !f.do(&meta.DropSnapshot{At: at, Max: 1}).EOF {
		f.fails(meta.NoSuchSnapshot, &meta.CopyRange{Src: src, Dst: other, Len: 1, At: at})
	}
	f.wantExtents(other, meta.Extent{Len: 1000, Chunk: c[0]}, meta.Extent{Off: 1000, Len: 500, Chunk: c[0], ChunkOff: 500})
}

// TestReap: the extents of a large removed file are removed in steps.
func TestReap(t *testing.T) {
	const n = 2500
	setup := func(t *testing.T) (*fixture, meta.Ino, meta.ChunkID) {
		f := newFixture(t)
		ino := f.file("f")
		c := f.chunks(1, false)[0]
		for i := 0; i < n; i += 500 {
			op := &meta.Write{Ino: ino, Synced: true}
			for k := range uint64(500) {
				op.Extents = append(op.Extents, meta.Extent{Off: (uint64(i) + k) * 200, Len: 100, Chunk: c, ChunkOff: (uint64(i) + k) * 100})
			}
			f.do(op)
		}
		f.seal(c, n*100)
		return f, ino, c
	}
	queued := func(f *fixture) (l []meta.Ino) {
		if err := ReapQueue(f.s, func(ino meta.Ino) bool { l = append(l, ino); return true }); err != nil {
			f.t.Fatal(err)
		}
		return l
	}
	t.Run("unlinked", func(t *testing.T) {
		f, ino, c := setup(t)
		f.do(&meta.Unlink{Parent: 1, Name: "f"})
		f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
		if len(f.last) > reapBatch+10 {
			t.Errorf("%d effects at once", len(f.last))
		}
		f.fails(meta.Stale, &meta.GetAttr{Ino: ino})
		f.fails(meta.Stale, &meta.Open{Ino: ino})
		f.check()
		if q := queued(f); !slices.Equal(q, []meta.Ino{ino}) {
			t.Fatalf("queue %v", q)
		}
		steps := 0
		for !f.do(&meta.Reap{Ino: ino, Max: 400}).EOF {
			f.check()
			steps++
		}
		if steps != 3 || len(queued(f)) != 0 || f.state(c) != meta.ChunkDeleting {
			t.Errorf("%d steps, queue %v, chunk %v", steps, queued(f), f.state(c))
		}
		if bytes, inodes, _ := Usage(f.s); bytes != 0 || inodes != 1 {
			t.Errorf("%d bytes, %d inodes", bytes, inodes)
		}
		if !f.do(&meta.Reap{Ino: ino}).EOF {
			t.Error("nothing left, yet not the end")
		}
	})
	t.Run("truncated", func(t *testing.T) {
		f, ino, c := setup(t)
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 250})
		f.check()
		if res := f.do(&meta.Open{Ino: ino}); len(res.Extents) != 2 || res.Attr.Size != 250 {
			t.Errorf("%+v", res)
		}
		// Nothing may mix with the rest of the tail; cutting further may.
		d := f.chunks(1, false)[0]
		for _, op := range []meta.Op{&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 1000}, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 5, Chunk: d}}},
			&meta.Fallocate{Ino: ino, Len: 5}, &meta.Write{Ino: ino, Inline: true}, &meta.CopyRange{Src: ino, Dst: ino, DstOff: 1000, Len: 5}} {
			f.fails(meta.Again, op)
		}
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 50})
		f.check()
		if res := f.do(&meta.Open{Ino: ino}); len(res.Extents) != 1 || res.Extents[0].Len != 50 {
			t.Errorf("%+v", res)
		}
		if off := f.do(&meta.Seek{Ino: ino, Hole: true}).Off; off != 50 {
			t.Errorf("hole at %d", off)
		}
		for !f.do(&meta.Reap{Ino: ino}).EOF {
			f.check()
		}
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 1 << 20})
		if a := f.attr(ino); a.Blocks != 50 || f.live(c) != 50 {
			t.Errorf("%+v", a)
		}
	})
	t.Run("truncated, then replaced and unlinked", func(t *testing.T) {
		f, ino, _ := setup(t)
		f.do(&meta.Write{Ino: ino, Inline: true, Data: []byte("new")})
		if res := f.do(&meta.Open{Ino: ino}); len(res.Extents) != 0 || string(res.Data) != "new" {
			t.Errorf("%+v", res)
		}
		f.check()
		f.do(&meta.Unlink{Parent: 1, Name: "f"})
		f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
		f.check()
		for !f.do(&meta.Reap{Ino: ino}).EOF {
		}
		if bytes, inodes, _ := Usage(f.s); bytes != 0 || inodes != 1 {
			t.Errorf("%d bytes, %d inodes", bytes, inodes)
		}
	})
	t.Run("replaced by rename", func(t *testing.T) {
		f, ino, _ := setup(t)
		f.file("new")
		f.do(&meta.Rename{Parent: 1, Name: "new", NewParent: 1, NewName: "f"})
		f.do(&meta.SessionEnd{Session: testSession})
		if q := queued(f); !slices.Equal(q, []meta.Ino{ino}) {
			t.Fatalf("queue %v", q)
		}
	})
}

// TestReleaseIsBounded: thousands of orphans with attributes and extents are removed in
// steps that fit into a journal entry.
func TestReleaseIsBounded(t *testing.T) {
	f := newFixture(t)
	c := f.chunks(1, false)[0]
	var inos []meta.Ino
	for i := range 40 {
		ino := f.file(fmt.Sprint("f", i))
		inos = append(inos, ino)
		for k := range 30 {
			f.do(&meta.SetXattr{Ino: ino, Name: fmt.Sprint("user.", k), Value: []byte("v")})
		}
		op := &meta.Write{Ino: ino, Synced: true}
		for k := range uint64(30) {
			op.Extents = append(op.Extents, meta.Extent{Off: k * 20, Len: 10, Chunk: c, ChunkOff: uint64(i)*1000 + k*10})
		}
		f.do(op)
		f.do(&meta.Unlink{Parent: 1, Name: fmt.Sprint("f", i)})
	}
	f.do(&meta.ReleaseOrphans{Inos: inos})
	if len(f.last) > reapBatch+500 {
		t.Errorf("%d effects at once", len(f.last))
	}
	f.check()
	for _, ino := range inos {
		f.fails(meta.Stale, &meta.GetAttr{Ino: ino})
		for !f.do(&meta.Reap{Ino: ino, Max: 10}).EOF {
		}
	}
	if bytes, inodes, _ := Usage(f.s); bytes != 0 || inodes != 1 {
		t.Errorf("%d bytes, %d inodes", bytes, inodes)
	}
	n := 0
	if err := f.s.Scan([]byte{prefixXattr}, []byte{prefixXattr + 1}, func(_, _ []byte) bool { n++; return true }); err != nil || n != 0 {
		t.Errorf("%d attributes are left, %v", n, err)
	}
	f.fails(meta.ResourceExceeded, &meta.ReleaseOrphans{Inos: make([]meta.Ino, maxRelease+1)})
}

// TestEditAgainstBytes compares the extent arithmetic with an array.
func TestEditAgainstBytes(t *testing.T) {
	const size = 64
	type place struct {
		chunk uint64
		off   uint64
	}
	for seed := range uint64(100) {
		rng := rand.New(rand.NewPCG(seed, 3))
		f := newFixture(t)
		ino := f.file("f")
		chunks := f.chunks(3, false)
		var want [size]place
		end := uint64(0)
		for step := range 60 {
			op := &meta.Write{Ino: ino, Synced: true}
			for range rng.IntN(4) + 1 {
				off := rng.Uint64N(size)
				e := meta.Extent{Off: off, Len: rng.Uint64N(min(size-off, 12)) + 1, Chunk: chunks[rng.IntN(3)]}
				e.ChunkOff = off + rng.Uint64N(3) // often continues its neighbour
				op.Extents = append(op.Extents, e)
				for i := range e.Len {
					want[off+i] = place{e.Chunk.Counter, e.ChunkOff + i}
				}
				end = max(end, e.End())
			}
			f.do(op)
			if rng.IntN(5) == 0 {
				off := rng.Uint64N(size)
				n := rng.Uint64N(size-off) + 1
				f.do(&meta.Fallocate{Ino: ino, Mode: 3, Off: off, Len: n})
				clear(want[off : off+n])
			}
			var got [size]place
			l := f.extents(ino)
			for i, e := range l {
				for k := range e.Len {
					got[e.Off+k] = place{e.Chunk.Counter, e.ChunkOff + k}
				}
				if i > 0 && l[i-1].End() == e.Off && l[i-1].Chunk == e.Chunk && l[i-1].ChunkOff+l[i-1].Len == e.ChunkOff {
					t.Fatalf("seed %d step %d: %+v and %+v should be one", seed, step, l[i-1], e)
				}
			}
			if got != want || f.attr(ino).Size != end {
				t.Fatalf("seed %d step %d: after %+v\n got %v\nwant %v", seed, step, op.Extents, got, want)
			}
		}
		f.check()
	}
}

// TestManySmallWrites: the cost of a commit with extents far apart grows with the touched
// extents.
func TestManySmallWrites(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(2, false)
	for i := range uint64(20) {
		op := &meta.Write{Ino: ino, Synced: true}
		for k := range uint64(1000) {
			n := i*1000 + k
			op.Extents = append(op.Extents, meta.Extent{Off: n * 20, Len: 10, Chunk: c[0], ChunkOff: n * 10})
		}
		f.do(op)
	}
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 5, Len: 10, Chunk: c[1]}, {Off: 20*19_999 + 5, Len: 10, Chunk: c[1], ChunkOff: 10}}})
	if len(f.last) > 10 {
		t.Errorf("%d effects for two extents", len(f.last))
	}
	f.fails(meta.ResourceExceeded, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 0, Len: 400_000, Chunk: c[1], ChunkOff: 100}}})
	res := f.do(&meta.Open{Ino: ino})
	if len(res.Extents) != maxOpen || res.EOF || len(res.Places) != 2 {
		t.Errorf("%d extents, %v, %d places", len(res.Extents), res.EOF, len(res.Places))
	}
	last := res.Extents[maxOpen-1].End()
	if res := f.do(&meta.Open{Ino: ino, Off: last, Len: 45}); len(res.Extents) != 2 || !res.EOF || res.Extents[0].Off < last {
		t.Errorf("%+v", res.Extents)
	}
}

func TestQuota(t *testing.T) {
	f := newFixture(t)
	f.do(&meta.SetPolicy{Policy: meta.Policy{Replicas: 1, QuotaBytes: 1000, QuotaInodes: 3}})
	ino := f.file("a")
	f.file("b")
	f.fails(meta.QuotaExceeded, &meta.Create{Parent: 1, Name: "c", Mode: reg})
	f.fails(meta.QuotaExceeded, &meta.Tmpfile{Parent: 1, Mode: 0o600})
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Len: 1000, Chunk: c}}})
	f.fails(meta.QuotaExceeded, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 1000, Len: 1, Chunk: c, ChunkOff: 1000}}})
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 500, Len: 500, Chunk: c, ChunkOff: 1000}}})
	f.fails(meta.QuotaExceeded, &meta.Fallocate{Ino: ino, Off: 5000, Len: 1})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 1 << 40}) // a hole costs nothing
	// An operation that was admitted before is admitted again as a replay.
	f.replay = true
	f.do(&meta.Create{Parent: 1, Name: "c", Mode: reg})
	f.replay = false
	// Over quota, operations that free bytes pass.
	f.do(&meta.SetPolicy{Policy: meta.Policy{Replicas: 1, QuotaBytes: 10, QuotaInodes: 1}})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 500})
	f.do(&meta.Unlink{Parent: 1, Name: "c"})
	st := f.do(&meta.StatFSOp{}).StatFS
	if st.UsedBytes != 500 || st.UsedInodes != 4 || st.QuotaBytes != 10 || st.QuotaInode != 1 {
		t.Errorf("%+v", st)
	}
}

func TestImmutable(t *testing.T) {
	f := newFixture(t)
	ino := f.file("a")
	held := f.file("held")
	c := f.chunks(2, false)
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Len: 10, Chunk: c[0]}}})
	f.do(&meta.Unlink{Parent: 1, Name: "held"})
	f.do(&meta.SetPolicy{Policy: meta.Policy{Immutable: true}})
	for _, op := range []meta.Op{
		&meta.Create{Parent: 1, Name: "new", Mode: reg}, &meta.Tmpfile{Parent: 1}, &meta.Link{Ino: ino, Parent: 1, Name: "l"},
		&meta.Unlink{Parent: 1, Name: "a"}, &meta.Rename{Parent: 1, Name: "a", NewParent: 1, NewName: "b"}, &meta.SetAttr{Ino: ino, Mask: meta.SetMode},
		&meta.Write{Ino: ino, Size: 5}, &meta.Fallocate{Ino: ino, Len: 1}, &meta.CopyRange{Src: ino, Dst: ino, Len: 1, DstOff: 10},
		&meta.SetXattr{Ino: ino, Name: "user.a"}, &meta.RemoveXattr{Ino: ino, Name: "user.a"}, &meta.Junction{Parent: 1, Name: "v", Volume: 9},
	} {
		f.fails(meta.ReadOnly, op)
	}
	f.do(&meta.Create{Parent: 1, Name: "a", Mode: reg}) // opens the existing file
	f.fails(meta.Exists, &meta.Create{Parent: 1, Name: "a", Mode: reg, Excl: true})
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{held}})
	f.do(&meta.ReplaceExtents{Ino: ino, Old: []meta.Extent{{Len: 10, Chunk: c[0]}}, New: []meta.Extent{{Len: 10, Chunk: c[1]}}})
	f.seal(c[0], 10)
	f.do(&meta.DropChunk{Chunk: c[0]})
	f.do(&meta.SessionEnd{Session: otherSess})
	f.do(&meta.SetPolicy{Policy: meta.Policy{}})
	f.do(&meta.Unlink{Parent: 1, Name: "a"})
}

func TestAllocAndSeal(t *testing.T) {
	f := newFixture(t)
	f.fails(meta.Invalid, &meta.AllocChunks{N: 2, Servers: [][]meta.ServerID{{1}}})
	f.fails(meta.Invalid, &meta.AllocChunks{})
	res := f.do(&meta.AllocChunks{N: 2, Own: true, Servers: [][]meta.ServerID{{1, 2}, {3}}, Fence: meta.Fence{Term: 3}})
	for i, c := range res.Chunks {
		want := meta.ChunkRecord{ID: meta.ChunkID{Volume: testVolume, Term: 3, Counter: uint64(i + 1)}, State: meta.ChunkOpen, Session: testSession,
			Fence: meta.Fence{Term: 3}, Servers: [][]meta.ServerID{{1, 2}, {3}}[i], Own: true}
		got, _, err := ReadChunk(f.s, c.ID)
		if err != nil || fmt.Sprint(c) != fmt.Sprint(want) || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%+v, %+v, want %+v", c, got, want)
		}
	}
	id := res.Chunks[0].ID
	f.fails(meta.Fenced, &meta.SealChunk{Chunk: id, Length: 5, Fence: meta.Fence{Term: 2, Seals: 9}})
	f.fails(meta.NoSuchChunk, &meta.SealChunk{Chunk: meta.ChunkID{Volume: 5}, Length: 5})
	f.fails(meta.Busy, &meta.DropChunk{Chunk: id})
	f.seal(id, 77) // nothing refers to it
	if f.state(id) != meta.ChunkDeleting {
		t.Error("it stays")
	}
	f.seal(id, 77) // again
	f.fails(meta.Sealed, &meta.SealChunk{Chunk: id, Length: 78, CRC: 5})
	ino := f.file("f")
	f.fails(meta.NoSuchChunk, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 1, Chunk: id}}})
	f.do(&meta.DropChunk{Chunk: id})
	f.do(&meta.DropChunk{Chunk: id})
	// Held by its session while open, whatever refers to it (rule 12).
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Len: 100, Chunk: c}}})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize})
	if f.state(c) != meta.ChunkOpen {
		t.Error("an open chunk was judged")
	}
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Len: 40, Chunk: c, ChunkOff: 100}}})
	f.seal(c, 200)
	sparse := 0
	err := Chunks(f.s, func(r meta.ChunkRecord) bool {
		if r.State == meta.ChunkSealed && r.Live < r.Length/2 {
			sparse++
		}
		return true
	})
	if err != nil || sparse != 1 {
		t.Errorf("%d sparse, %v", sparse, err)
	}
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize})
	if f.state(c) != meta.ChunkDeleting {
		t.Error("a dead chunk stays")
	}
}

func TestReplaceExtents(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(3, false)
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 0, Len: 100, Chunk: c[0]}, {Off: 100, Len: 100, Chunk: c[1]}}})
	before := f.attr(ino)
	x := func(off, n uint64, ch meta.ChunkID, at uint64) meta.Extent {
		return meta.Extent{Off: off, Len: n, Chunk: ch, ChunkOff: at}
	}
	for _, b := range []struct {
		old, fresh []meta.Extent
		want       meta.Kind
	}{
		{[]meta.Extent{x(0, 100, c[0], 0)}, []meta.Extent{x(0, 99, c[2], 0)}, meta.Invalid},
		{[]meta.Extent{x(0, 100, c[0], 0)}, []meta.Extent{{Len: 100}}, meta.Invalid},
		{nil, nil, meta.Invalid},
		{[]meta.Extent{x(0, 100, c[0], 1)}, []meta.Extent{x(0, 100, c[2], 0)}, meta.Again},
		{[]meta.Extent{x(0, 101, c[0], 0)}, []meta.Extent{x(0, 101, c[2], 0)}, meta.Again},
		{[]meta.Extent{x(150, 51, c[1], 50)}, []meta.Extent{x(150, 51, c[2], 0)}, meta.Again},
		{[]meta.Extent{x(500, 10, c[1], 50)}, []meta.Extent{x(500, 10, c[2], 0)}, meta.Again},
	} {
		f.fails(b.want, &meta.ReplaceExtents{Ino: ino, Old: b.old, New: b.fresh})
	}
	f.do(&meta.ReplaceExtents{Ino: ino, Old: []meta.Extent{x(100, 100, c[1], 0), x(50, 50, c[0], 50)}, New: []meta.Extent{x(50, 150, c[2], 7)}})
	f.wantExtents(ino, x(0, 50, c[0], 0), x(50, 150, c[2], 7))
	if f.attr(ino) != before {
		t.Errorf("%+v became %+v", before, f.attr(ino))
	}
	if f.live(c[0]) != 50 || f.live(c[1]) != 0 || f.live(c[2]) != 150 {
		t.Error("live counts")
	}
}

func TestSessions(t *testing.T) {
	f := newFixture(t)
	f.fails(meta.Invalid, &meta.SessionStart{})
	s := meta.SessionStart{Session: 5, Name: "n", Host: "h", PID: 7, Start: 8}
	f.do(&s)
	f.do(&s)
	if len(f.last) != 0 {
		t.Error("starting again wrote something")
	}
	f.session = 5
	var inos []meta.Ino
	for i := range 2*endBatch + 10 {
		inos = append(inos, f.file(fmt.Sprint("f", i)))
		f.do(&meta.Unlink{Parent: 1, Name: fmt.Sprint("f", i)})
	}
	f.chunks(endBatch+10, false)
	f.commit([]Effect{PutReply(5, 3, meta.OpID{Incarnation: 1, Unique: 2, Step: 3}, &meta.Result{})})
	f.session = 0
	steps := 0
	for !f.do(&meta.SessionEnd{Session: 5}).EOF {
		f.check()
		if steps == 0 {
			f.fails(meta.SessionExpired, &s)
			if err := Sessions(f.s, func(x meta.SessionStart, ended bool) bool {
				if ended != (x == s) {
					t.Errorf("%+v ended %v", x, ended)
				}
				return true
			}); err != nil {
				t.Error(err)
			}
		}
		steps++
	}
	if steps < 3 {
		t.Errorf("%d steps", steps)
	}
	for _, ino := range inos {
		f.fails(meta.Stale, &meta.GetAttr{Ino: ino})
	}
	open := 0
	if err := OpenChunks(f.s, 0, func(c meta.ChunkRecord, _ meta.Ino) bool { open++; return c.Session == 0 }); err != nil || open != endBatch+10 {
		t.Errorf("%d open chunks without a writer, %v", open, err)
	}
	n := 0
	if err := Replies(f.s, 0, func(_, _ []byte) bool { n++; return true }); err != nil || n != 0 {
		t.Errorf("%d replies, %v", n, err)
	}
	if !f.do(&meta.SessionEnd{Session: 5}).EOF {
		t.Error("ending twice")
	}
}

func TestReplies(t *testing.T) {
	f := newFixture(t)
	results := []*meta.Result{
		{},
		f.do(&meta.Create{Parent: 1, Name: "d", Mode: dir | 0o755}),
		f.do(&meta.Create{Parent: 1, Name: "l", Mode: meta.TypeSymlink, Target: "t"}),
		f.do(&meta.Create{Parent: 1, Name: "f", Mode: reg}),
		f.do(&meta.Rename{Parent: 1, Name: "f", NewParent: 1, NewName: "l"}),
		f.do(&meta.AllocChunks{N: 2, Servers: [][]meta.ServerID{{1}, {2, 3}}}),
		{Off: 12345, EOF: true, Existed: true},
	}
	for i, res := range results {
		f.commit([]Effect{PutReply(testSession, meta.Seq(i), meta.OpID{Incarnation: 9, Unique: uint64(i), Step: 4}, res)})
	}
	i := 0
	if err := Replies(f.s, testSession, func(k, v []byte) bool {
		s, seq, op, res, err := DecodeReply(k, v)
		want := *results[i]
		want.ParentAttr, want.NewParentAttr = meta.Attr{}, meta.Attr{}
		want.Attr.Parent, want.Attr2.Parent = res.Attr.Parent, res.Attr2.Parent
		if err != nil || s != testSession || seq != meta.Seq(i) || op != (meta.OpID{Incarnation: 9, Unique: uint64(i), Step: 4}) || fmt.Sprintf("%+v", *res) != fmt.Sprintf("%+v", want) {
			t.Errorf("%d: %v\n got %+v\nwant %+v", i, err, *res, want)
		}
		i++
		return true
	}); err != nil || i != len(results) {
		t.Fatal(err, i)
	}
	f.commit([]Effect{DeleteReplies(testSession, 0, 4)})
	var left []meta.Seq
	if err := Replies(f.s, 0, func(k, v []byte) bool {
		_, seq, _, _, _ := DecodeReply(k, v)
		left = append(left, seq)
		return true
	}); err != nil || !slices.Equal(left, []meta.Seq{0, 5, 6}) {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestEffectsCodec(t *testing.T) {
	l := []Effect{{Put, []byte("k"), []byte("v")}, {Delete, []byte("k"), nil}, {DeleteRange, []byte("a"), []byte("b")}, {Put, []byte{}, bytes.Repeat([]byte("x"), 300)}}
	b := AppendEffects([]byte("head"), l)[4:]
	got, err := DecodeEffects(b)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(l) {
		t.Fatalf("%v %v", got, err)
	}
	for i := range b {
		if _, err := DecodeEffects(b[:i]); meta.KindOf(err) != meta.Corrupt {
			t.Errorf("cut to %d: %v", i, err)
		}
	}
	if _, err := DecodeEffects(append(b, 0)); meta.KindOf(err) != meta.Corrupt {
		t.Errorf("one more: %v", err)
	}
	b[0] = 2
	if _, err := DecodeEffects(b); meta.KindOf(err) != meta.Version {
		t.Errorf("version 2: %v", err)
	}
}

// SetReplicas is a compare-and-swap on sealed chunks, and changes nothing else.
func TestSetReplicas(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Len: 100, Chunk: c}}})
	f.fails(meta.Busy, &meta.SetReplicas{Chunk: c, Expect: []meta.ServerID{1}, Servers: []meta.ServerID{2}})
	f.seal(c, 200)
	f.fails(meta.NoSuchChunk, &meta.SetReplicas{Chunk: meta.ChunkID{Volume: 5}, Servers: []meta.ServerID{2}})
	for _, bad := range [][]meta.ServerID{nil, {0}, {2, 3, 2}, make([]meta.ServerID, maxReplicas+1)} {
		f.fails(meta.Invalid, &meta.SetReplicas{Chunk: c, Expect: []meta.ServerID{1}, Servers: bad})
	}
	for _, other := range [][]meta.ServerID{nil, {2}, {1, 2}} {
		f.fails(meta.Again, &meta.SetReplicas{Chunk: c, Expect: other, Servers: []meta.ServerID{2}})
	}
	want, _, err := ReadChunk(f.s, c)
	if err != nil {
		t.Fatal(err)
	}
	want.Servers, want.Fence.Seals = []meta.ServerID{3, 2}, want.Fence.Seals+4
	res := f.do(&meta.SetReplicas{Chunk: c, Expect: []meta.ServerID{1}, Servers: want.Servers, Fence: want.Fence})
	got, _, err := ReadChunk(f.s, c)
	if err != nil || fmt.Sprint(got) != fmt.Sprint(want) || fmt.Sprint(res.Chunks) != fmt.Sprint([]meta.ChunkRecord{want}) {
		t.Errorf("%+v, %+v, %v; want %+v", got, res.Chunks, err, want)
	}
	if res = f.do(&meta.SetReplicas{Chunk: c, Expect: want.Servers, Servers: want.Servers}); res.Chunks[0].Fence != want.Fence {
		t.Errorf("the fence went from %v back to %v", want.Fence, res.Chunks[0].Fence)
	}
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize}) // nothing refers to it
	f.fails(meta.NoSuchChunk, &meta.SetReplicas{Chunk: c, Expect: want.Servers, Servers: []meta.ServerID{1}})
}
