package penstock

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/index"
)

// bufferSpool is a spool in memory.
type bufferSpool struct{ bytes.Buffer }

func (s *bufferSpool) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(s.Bytes()).ReadAt(p, off)
}

// indexed makes an index with a root and the file f in it, in two chunks.
func (w *world) indexed(at meta.Generation, root, f meta.Attr) *admin.SnapshotIndex {
	w.t.Helper()
	b, err := index.NewBuilder(index.Head{Volume: 1, At: at, UsedInodes: 2}, func() (index.Spool, error) { return new(bufferSpool), nil })
	if err != nil {
		w.t.Fatal(err)
	}
	for _, n := range []*index.Node{
		{Attr: root, Entries: []meta.Dirent{{Name: "f", Ino: f.Ino, Type: meta.TypeRegular, Cookie: 3}}},
		{Attr: f},
	} {
		if err := b.Add(n); err != nil {
			w.t.Fatal(err)
		}
	}
	var out bytes.Buffer
	n, sum, err := b.Finish(&out)
	if err != nil {
		w.t.Fatal(err)
	}
	a := &admin.SnapshotIndex{Generation: uint64(at), State: admin.IndexState_INDEX_READY, Version: index.Version, Digest: sum[:], Length: n, Inodes: 2}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range [][]byte{out.Bytes()[:n/3], out.Bytes()[n/3:]} {
		id := meta.ChunkID{Volume: 1, Term: 77, Counter: uint64(len(w.chunks) + 1)}
		w.chunks[id] = &fakeChunk{w: w, id: id, data: p, synced: uint64(len(p)), sealed: true}
		raw := id.Bytes()
		a.Parts = append(a.Parts, &admin.IndexPart{Chunk: raw[:], Length: uint64(len(p)), Servers: []uint64{1}, Sealed: true, ChunkLength: uint64(len(p))})
	}
	return a
}

// TestTakeIndex: the processes of a machine fetch an index from its chunks once, and read
// it from the machine's disk afterwards, also while another process fetches another
// index. A damaged index, or an index of another snapshot, is never used.
func TestTakeIndex(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	dir := t.TempDir()
	_, v := open(t, w, Config{})
	ino := create(t, v, "f")
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	at := w.take("s")
	attr := func(v *Volume, ino meta.Ino) meta.Attr {
		t.Helper()
		e, err := v.GetAttr(t.Context(), ino)
		if err != nil {
			t.Fatal(err)
		}
		return e.Attr
	}
	s := snapshotOf(t, v, "s")
	a := w.indexed(at, attr(s, meta.RootIno), attr(s, ino))
	path := filepath.Join(dir, hex.EncodeToString(a.Digest)+indexEnd)
	reads := 0 // of chunks; under w.mu
	w.mu.Lock()
	w.failRead = func() error { reads++; return nil }
	w.mu.Unlock()
	read := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		n := reads
		reads = 0
		return n
	}
	other := func(keep int64) *Volume {
		t.Helper()
		_, v := open(t, w, Config{IndexDir: dir, IndexKeep: keep})
		return snapshotOf(t, v, "s")
	}
	take := func(v *Volume, a *admin.SnapshotIndex, want meta.Kind) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := v.index.take(ctx, a); meta.KindOf(err) != want {
			t.Fatalf("%v, want %v", err, want)
		}
		if in := v.index.inUse() != nil; in != (want == meta.KindOK) {
			t.Fatalf("in use: %v", in)
		}
	}
	files := func() (l []string) {
		t.Helper()
		all, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			l = append(l, e.Name())
		}
		return l
	}

	// An index that does not fit is not used.
	newer := proto.CloneOf(a)
	newer.Version++
	take(other(0), newer, meta.Version)
	for _, bad := range []func(a *admin.SnapshotIndex){
		func(a *admin.SnapshotIndex) { a.Length++ },
		func(a *admin.SnapshotIndex) { a.Digest = a.Digest[1:] },
		func(a *admin.SnapshotIndex) { a.Parts = nil },
		func(a *admin.SnapshotIndex) { a.Parts[0].Chunk = a.Parts[0].Chunk[1:] },
		func(a *admin.SnapshotIndex) { a.Parts[0].Length = index.MaxSize + 1 },
	} {
		x := proto.CloneOf(a)
		bad(x)
		take(other(0), x, meta.Protocol)
	}
	if n := read(); n != 0 {
		t.Errorf("%d reads of what does not fit", n)
	}
	id := meta.ChunkIDFromBytes(a.Parts[1].Chunk)
	flip := func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		data := w.chunks[id].data
		data[len(data)/2] ^= 1
	}
	flip()
	take(other(0), a, meta.Corrupt)
	if l := files(); len(l) != 0 {
		t.Errorf("%q is left of what was damaged", l)
	}
	flip()
	read()

	// Another process is fetching a long index.
	begin := func(sum string) *os.File {
		t.Helper()
		f, err := beginIndex(t.Context(), filepath.Join(dir, indexTemp+sum))
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	long := begin("another")
	take(other(0), a, meta.KindOK)
	read()
	if err := errors.Join(os.Remove(long.Name()), long.Close(), os.Remove(path)); err != nil {
		t.Fatal(err)
	}

	// While another process fetches this index, no other process does; if that process is
	// killed, its unfinished file is not used.
	part := begin(hex.EncodeToString(a.Digest))
	if _, err := part.WriteString(strings.Repeat("x", 1<<20)); err != nil {
		t.Fatal(err)
	}
	waiting := other(0)
	took := make(chan error, 1)
	go func() { took <- waiting.index.take(t.Context(), a) }()
	select {
	case err := <-took:
		t.Fatalf("it was taken beside another process: %v", err)
	case <-time.After(100 * time.Millisecond): // two looks
	}
	if n := read(); n != 0 {
		t.Errorf("%d parts were read beside another process", n)
	}
	part.Close()
	if err := <-took; err != nil || read() != len(a.Parts) {
		t.Error(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}

	// Several callers at once: one fetches the index.
	var wg sync.WaitGroup
	for range 4 {
		v := other(0)
		wg.Go(func() {
			if err := v.index.take(t.Context(), a); err != nil || v.index.inUse() == nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := read(); n != len(a.Parts) {
		t.Errorf("%d parts were read, there are %d", n, len(a.Parts))
	}
	if l := files(); len(l) != 1 || l[0] != filepath.Base(path) {
		t.Errorf("kept: %q", l)
	}

	// From the disk.
	x := other(0)
	take(x, a, meta.KindOK)
	if n := read(); n != 0 {
		t.Errorf("%d reads of what is on the disk", n)
	}
	if st := x.Index(); st.State != "ready" || st.Inodes != 2 || st.Bytes != a.Length {
		t.Errorf("%+v", st)
	}
	w.mu.Lock()
	was := w.callsAt
	w.mu.Unlock()
	if e, err := x.Lookup(t.Context(), meta.RootIno, "f"); err != nil || e.Attr.Ino != ino {
		t.Errorf("%+v, %v", e, err)
	}
	w.mu.Lock()
	if w.callsAt != was {
		t.Error("the owner was asked")
	}
	w.mu.Unlock()

	// An index that is damaged on the disk is fetched again, in its place.
	for _, damage := range []func(b []byte) []byte{
		func([]byte) []byte { return nil },
		func(b []byte) []byte { return b[:len(b)-1] },
		func(b []byte) []byte { return bytes.Repeat([]byte{7}, len(b)) },
	} {
		b, err := os.ReadFile(path)
		if err == nil {
			err = os.Remove(path) // other views have the file mapped
		}
		if err == nil {
			err = os.WriteFile(path, damage(b), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		x := other(0)
		take(x, a, meta.KindOK)
		if n := read(); n != len(a.Parts) {
			t.Errorf("%d parts were read, there are %d", n, len(a.Parts))
		}
		if n := x.c.stats.refused.Load(); n != 1 {
			t.Errorf("%d were refused", n)
		}
		if again, err := os.ReadFile(path); err != nil || !bytes.Equal(again, b) {
			t.Errorf("DATA: not made good: %d bytes, %v", len(again), err)
		}
	}

	// The whole index of another snapshot.
	foreign := w.indexed(at+1, attr(s, meta.RootIno), attr(s, ino))
	foreign.Generation = uint64(at)
	take(other(0), foreign, meta.Corrupt)

	// The folder keeps no more than its bound; unfinished files of killed processes go in
	// time.
	old := filepath.Join(dir, indexTemp+"old")
	ago := time.Now().Add(-2 * indexTempAge)
	if err := os.WriteFile(old, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(old, ago, ago); err != nil {
		t.Fatal(err)
	}
	take(other(1), a, meta.KindOK)
	if l := files(); len(l) != 1 || !strings.HasPrefix(filepath.Base(path), l[0]) {
		t.Errorf("kept: %q", l)
	}
}
