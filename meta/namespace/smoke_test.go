package namespace

import (
	"testing"

	"penstock.io/penstock/meta"
)

func TestSmoke(t *testing.T) {
	f := newFixture(t)
	d := f.mkdir(meta.RootIno, "d")
	a := f.create(d, "a", meta.TypeRegular|0o644)
	n := 0
	for _, e := range f.last {
		t.Logf("%d %q %x", e.Kind, e.Key, e.Value)
		n += len(e.Key) + len(e.Value)
	}
	t.Logf("create: %d bytes in %d effects, journal %d", n, len(f.last), len(AppendEffects(nil, f.last)))
	if got := f.do(&meta.Lookup{Parent: d, Name: "a"}).Attr; got != a {
		t.Fatalf("lookup %+v, created %+v", got, a)
	}
	c := f.chunks(1, false)[0]
	f.do(&meta.Write{Ino: a.Ino, Extents: []meta.Extent{{Off: 0, Len: 5000, Chunk: c}}, Synced: true})
	f.do(&meta.Write{Ino: a.Ino, Extents: []meta.Extent{{Off: 5000, Len: 5000, Chunk: c, ChunkOff: 5000}, {Off: 100, Len: 10, Chunk: c, ChunkOff: 20000}}, Synced: true})
	r := f.do(&meta.Open{Ino: a.Ino})
	t.Logf("%+v", r)
	if len(r.Extents) != 3 || r.Attr.Size != 10000 || r.Attr.Blocks != 10000 {
		t.Fatal("extents")
	}
	f.do(&meta.SealChunk{Chunk: c, Length: 30000, CRC: 1, Fence: meta.Fence{Term: 3}, Servers: []meta.ServerID{1}})
	f.do(&meta.Unlink{Parent: d, Name: "a"})
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{a.Ino}})
	f.fails(meta.Stale, &meta.GetAttr{Ino: a.Ino})
	n = 0
	if err := DeletingChunks(f.s, func(c meta.ChunkRecord) bool { n++; return true }); err != nil || n != 1 {
		t.Fatal(err, n)
	}
	f.do(&meta.DropChunk{Chunk: c})
	f.do(&meta.Unlink{Parent: meta.RootIno, Name: "d", Dir: true, Holders: []meta.SessionID{0}})
	if by, in, err := Usage(f.s); by != 0 || in != 1 || err != nil {
		t.Fatal(by, in, err)
	}
}
