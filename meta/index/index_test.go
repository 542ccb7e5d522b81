package index

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"reflect"
	"testing"

	"penstock.io/penstock/meta"
)

var writeKept = flag.Bool("write-kept", false, "write testdata/v1.index anew, when the format gets another version")

type spool struct{ bytes.Buffer }

func (s *spool) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(s.Bytes()).ReadAt(p, off)
}

// sample is a tree with something of everything.
func sample() []*Node {
	own, other := meta.ChunkID{Volume: 7, Term: 1, Counter: 1}, meta.ChunkID{Volume: 3, Term: 2, Counter: 9}
	return []*Node{
		{Attr: meta.Attr{Ino: 1, Mode: meta.TypeDir | 0o755, Nlink: 3, Size: 20, Change: 9, Parent: 1}, Entries: []meta.Dirent{
			{Name: "sub", Ino: 2, Type: meta.TypeDir, Cookie: 3},
			{Name: "file", Ino: 5, Type: meta.TypeRegular, Cookie: 4},
			{Name: "\xff\x01", Ino: 5, Type: meta.TypeRegular, Cookie: 6},
			{Name: "other", Ino: meta.RootIno, Type: meta.TypeDir, Volume: 12, Cookie: 9},
			{Name: "disk", Ino: 8, Type: meta.TypeBlock, Cookie: 11},
		}},
		{Attr: meta.Attr{Ino: 2, Mode: meta.TypeDir | 0o700, Nlink: 2, UID: 5, GID: 6, Parent: 1}, Entries: []meta.Dirent{
			{Name: "link", Ino: 3, Type: meta.TypeSymlink, Cookie: 3}, {Name: "small", Ino: 4, Type: meta.TypeRegular, Cookie: 5},
		}},
		{Attr: meta.Attr{Ino: 3, Mode: meta.TypeSymlink | 0o777, Nlink: 1, Size: 7}, Data: []byte("../file")},
		{Attr: meta.Attr{Ino: 4, Mode: meta.TypeRegular | 0o4644, Nlink: 1, Size: 5, Blocks: 5, Flags: meta.FlagInline}, Data: []byte("bytes")},
		{Attr: meta.Attr{Ino: 5, Mode: meta.TypeRegular | 0o644, Nlink: 2, Size: 1 << 40, Blocks: 300, Atime: -5, Mtime: 6, Ctime: 7, Btime: 8, Flags: meta.FlagHasXattrs},
			Extents: []meta.Extent{{Off: 10, Len: 100, Chunk: own, ChunkOff: 5}, {Off: 200, Len: 100}, {Off: 1<<40 - 100, Len: 100, Chunk: other}},
			Xattrs:  []Xattr{{"user.b", []byte("2")}, {"user.a", nil}}},
		{Attr: meta.Attr{Ino: 8, Mode: meta.TypeBlock | 0o600, Nlink: 1, Rdev: 0x801}},
	}
}

func build(t testing.TB) ([]byte, Sum) {
	b, err := NewBuilder(Head{Volume: 7, At: 4, UsedBytes: 305, UsedInodes: 6}, func() (Spool, error) { return &spool{}, nil })
	if err != nil {
		t.Fatal(err)
	}
	for _, pl := range []meta.ChunkPlace{
		{ID: meta.ChunkID{Volume: 7, Term: 1, Counter: 1}, Servers: []meta.ServerID{1, 2, 3}, Sealed: true, Length: 4096},
		{ID: meta.ChunkID{Volume: 3, Term: 2, Counter: 9}, Servers: []meta.ServerID{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}},
	} {
		if err := b.Place(pl); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range sample() {
		if err := b.Add(n); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	n, sum, err := b.Finish(&out)
	if err != nil || n != uint64(out.Len()) {
		t.Fatal(n, err)
	}
	return out.Bytes(), sum
}

// TestKept reads an index made by a program of version 1: this program makes the same bytes, and
// reads the same contents.
func TestKept(t *testing.T) {
	const path, want = "testdata/v1.index", "f0e53a0afd85c3f083d2b7f5752bf5dfba399a72ec6d1d0a986526b4e5a45544"
	data, sum := build(t)
	if *writeKept {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		t.Fatalf("its digest is %x", sum)
	}
	kept, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(kept, data) || hex.EncodeToString(sum[:]) != want {
		t.Fatalf("the format changed without a new version: %x", sum)
	}
	x, err := Open(kept, sum)
	if err != nil {
		t.Fatal(err)
	}
	if x.Head != (Head{7, 4, 305, 6}) || x.Inodes() != 6 || x.Size() != uint64(len(kept)) {
		t.Fatalf("%+v", x.Head)
	}
	for _, n := range sample() {
		a, err := x.Attr(n.Attr.Ino)
		if err != nil || a != n.Attr {
			t.Fatalf("%+v, %v; want %+v", a, err, n.Attr)
		}
		for _, e := range n.Entries {
			a, v, err := x.Lookup(n.Attr.Ino, e.Name)
			if err != nil || v != e.Volume || v == 0 && a.Ino != e.Ino {
				t.Fatalf("%q: %+v, %d, %v", e.Name, a, v, err)
			}
		}
		if res, err := x.Query(&meta.Open{Ino: n.Attr.Ino}); err != nil || len(n.Extents) > 0 && !reflect.DeepEqual(res.Extents, n.Extents) {
			t.Fatalf("%+v, %v", res, err)
		}
	}
	res, err := x.Query(&meta.Open{Ino: 5})
	if err != nil || len(res.Places) != 2 || res.Places[0].Length != 4096 || len(res.Places[1].Servers) != MaxServers {
		t.Fatalf("%+v, %v", res, err)
	}
	if _, err := x.Query(&meta.Seek{Ino: 5}); meta.KindOf(err) != meta.NotSupported {
		t.Fatal(err)
	}
}

// TestNewerVersion: an index of a later version is refused as such.
func TestNewerVersion(t *testing.T) {
	data, sum := build(t)
	binary.LittleEndian.PutUint32(data[8:], Version+1)
	if _, err := Open(data, sum); meta.KindOf(err) != meta.Version {
		t.Fatal(err)
	}
}

// TestBuilderRefuses input that would make no valid index.
func TestBuilderRefuses(t *testing.T) {
	for name, nodes := range map[string][]*Node{
		"order":              {{Attr: meta.Attr{Ino: 2, Mode: meta.TypeFIFO}}, {Attr: meta.Attr{Ino: 2, Mode: meta.TypeFIFO}}},
		"chunk not known":    {{Attr: meta.Attr{Ino: 1, Mode: meta.TypeRegular}, Extents: []meta.Extent{{Len: 1, Chunk: meta.ChunkID{Counter: 1}}}}},
		"open-ended extent":  {{Attr: meta.Attr{Ino: 1, Mode: meta.TypeRegular}, Extents: []meta.Extent{{Len: 1, OpenEnded: true}}}},
		"inode of no number": {{Attr: meta.Attr{Mode: meta.TypeFIFO}}},
	} {
		b, err := NewBuilder(Head{}, func() (Spool, error) { return &spool{}, nil })
		for _, n := range nodes {
			if err == nil {
				err = b.Add(n)
			}
		}
		if meta.KindOf(err) != meta.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzIndex sends every query to arbitrarily wrong bytes with right checksums: no query panics,
// and none takes more memory than the bytes justify.
func FuzzIndex(f *testing.F) {
	data, _ := build(f)
	body := binary.LittleEndian.Uint64(data[bodyAt:])
	f.Add(data[:headerSize+body], uint64(5), "file")
	f.Add(data[:headerSize+body], uint64(2), "link")
	for i := range uint64(20) {
		bad := bytes.Clone(data[:headerSize+body])
		bad[(i*7919)%uint64(len(bad))] ^= 0xff
		f.Add(bad, i, "sub")
	}
	f.Fuzz(func(t *testing.T, b []byte, ino uint64, name string) {
		if len(b) < headerSize {
			return
		}
		b = bytes.Clone(b)
		copy(b, magic)
		binary.LittleEndian.PutUint32(b[8:], Version)
		binary.LittleEndian.PutUint32(b[12:], blockSize)
		binary.LittleEndian.PutUint64(b[bodyAt:], uint64(len(b)-headerSize))
		var sums []byte
		for p := b[headerSize:]; len(p) > 0; p = p[min(blockSize, len(p)):] {
			s := sha256.Sum256(p[:min(blockSize, len(p))])
			sums = append(sums, s[:]...)
		}
		sum := digest(b[:headerSize], sums)
		x, err := Open(append(b, sums...), sum)
		if err != nil {
			return
		}
		if err := x.Check(); err != nil {
			t.Fatal(err)
		}
		i := meta.Ino(ino)
		for _, op := range []meta.Op{
			&meta.GetAttr{Ino: i}, &meta.Lookup{Parent: i, Name: name}, &meta.Lookup{Parent: i, Name: ".."}, &meta.ReadDir{Ino: i, Plus: true},
			&meta.ReadDir{Ino: i, Cookie: ino}, &meta.ReadLink{Ino: i}, &meta.GetXattr{Ino: i, Name: name}, &meta.ListXattr{Ino: i},
			&meta.Open{Ino: i}, &meta.Open{Ino: i, Off: ino, Len: ino}, &meta.StatFSOp{},
		} {
			res, err := x.Query(op)
			if err == nil && len(res.Data) > len(b)+meta.MaxXattrs+meta.MaxName {
				t.Fatalf("%T: %d bytes out of %d", op, len(res.Data), len(b))
			}
		}
	})
}

// BenchmarkIndex measures questions of a directory of 100,000 files.
func BenchmarkIndex(b *testing.B) {
	w, err := NewBuilder(Head{Volume: 1, At: 1}, func() (Spool, error) { return &spool{}, nil })
	if err != nil {
		b.Fatal(err)
	}
	const files = 100_000
	root := &Node{Attr: meta.Attr{Ino: 1, Mode: meta.TypeDir | 0o755, Parent: 1}}
	name := func(i int) string { return fmt.Sprintf("sample-%08d.jpg", i*7919%files) }
	for i := range files {
		root.Entries = append(root.Entries, meta.Dirent{Name: name(i), Ino: meta.Ino(2 + i), Type: meta.TypeRegular, Cookie: uint64(3 + i)})
	}
	if err := w.Add(root); err != nil {
		b.Fatal(err)
	}
	chunk := meta.ChunkID{Volume: 1, Term: 1, Counter: 1}
	if err := w.Place(meta.ChunkPlace{ID: chunk, Servers: []meta.ServerID{1}, Sealed: true, Length: files * 100}); err != nil {
		b.Fatal(err)
	}
	for i := range files {
		if err := w.Add(&Node{Attr: meta.Attr{Ino: meta.Ino(2 + i), Mode: meta.TypeRegular | 0o644, Size: 100, Nlink: 1}, Extents: []meta.Extent{{Len: 100, Chunk: chunk, ChunkOff: uint64(100 * i)}}}); err != nil {
			b.Fatal(err)
		}
	}
	var out bytes.Buffer
	n, sum, err := w.Finish(&out)
	if err != nil {
		b.Fatal(err)
	}
	x, err := Open(out.Bytes(), sum)
	if err != nil {
		b.Fatal(err)
	}
	ask := func(what string, op func(i int) meta.Op) {
		b.Run(what, func(b *testing.B) {
			b.ReportMetric(float64(n)/files, "B/inode")
			i := 0
			for b.Loop() {
				i++
				if _, err := x.Query(op(i * 31 % files)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	ask("lookup", func(i int) meta.Op { return &meta.Lookup{Parent: 1, Name: name(i)} })
	ask("getattr", func(i int) meta.Op { return &meta.GetAttr{Ino: meta.Ino(2 + i)} })
	ask("open", func(i int) meta.Op { return &meta.Open{Ino: meta.Ino(2 + i)} })
	ask("readdir-1024", func(i int) meta.Op { return &meta.ReadDir{Ino: 1, Max: 1024, Cookie: uint64(i), Plus: true} })
}
