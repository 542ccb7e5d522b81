package store

import (
	"bytes"
	"context"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

var testOptions = Options{SegmentSize: minSegment, Segments: 5, Manual: true, Reserve: 1}

func testID(n uint64) meta.ChunkID { return meta.ChunkID{Volume: 1, Term: 1, Counter: n} }

func pattern(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i>>8) ^ byte(i)*31 ^ seed
	}
	return b
}

func openDir(t testing.TB, dir string, o Options) *Store {
	t.Helper()
	s, err := Open(DirDisk(dir), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Abandon)
	return s
}

func put(t testing.TB, s *Store, id meta.ChunkID, off uint64, p []byte) {
	t.Helper()
	if err := s.Append(context.Background(), id, meta.Fence{Term: 1}, off, p, chunkserver.CRC(p)); err != nil {
		t.Fatal(err)
	}
}

// A chunk appended to, synced and sealed is unchanged after the process died, and after a clean
// close.
func TestReopen(t *testing.T) {
	dir := t.TempDir()
	ctx := t.Context()
	if err := Init(DirDisk(dir), testOptions); err != nil {
		t.Fatal(err)
	}
	s := openDir(t, dir, testOptions)
	data := pattern(300_000, 7)
	id := testID(5)
	for off := 0; off < len(data); off += 50_000 {
		put(t, s, id, uint64(off), data[off:off+50_000])
		if _, err := s.Sync(ctx, id, uint64(off)); err != nil {
			t.Fatal(err)
		}
	}
	check := func(state meta.ChunkState) {
		t.Helper()
		got := make([]byte, len(data))
		if err := s.Read(ctx, id, got, 0); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("DATA: read back: %v", err)
		}
		if i, err := s.Stat(ctx, id); err != nil || i.State != state || i.Length != uint64(len(data)) {
			t.Fatalf("stat: %+v, %v", i, err)
		}
	}
	check(meta.ChunkOpen)
	s.Abandon()
	s = openDir(t, dir, testOptions)
	check(meta.ChunkOpen)
	if _, err := s.Seal(ctx, id, meta.Fence{Term: 1, Seals: 1}, true, uint64(len(data))); err != nil {
		t.Fatal(err)
	}
	check(meta.ChunkSealed)
	s.Abandon()
	s = openDir(t, dir, testOptions)
	check(meta.ChunkSealed)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openDir(t, dir, testOptions)
	check(meta.ChunkSealed)
	if rep, err := s.Scrub(ctx, 0); err != nil || len(rep.Bad) > 0 || rep.Bytes != uint64(len(data)) {
		t.Fatalf("scrub: %+v, %v", rep, err)
	}
	if err := s.Delete(ctx, id, meta.Fence{Term: 2}); err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	s = openDir(t, dir, testOptions)
	if _, err := s.Stat(ctx, id); meta.KindOf(err) != meta.NoSuchChunk {
		t.Fatal(err)
	}
}
