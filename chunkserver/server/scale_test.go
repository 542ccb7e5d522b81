package server

import (
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"sync"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// bigDisk is a disk that pretends to have a million sealed chunks of one volume; written
// bytes lie in memory.
type bigDisk struct {
	chunks int
	mu     sync.Mutex
	files  map[string]*bigFile
}

type bigFile struct {
	mu sync.Mutex
	b  []byte
}

func (d *bigDisk) id(n int) meta.ChunkID {
	return meta.ChunkID{Volume: 1, Term: 1, Counter: uint64(n)}
}

// meta makes the .meta file of a chunk of one block.
func (d *bigDisk) meta(id meta.ChunkID) []byte {
	b := make([]byte, 52, 56)
	copy(b, "PSCM")
	b[4], b[5] = 1, byte(meta.ChunkSealed)
	raw := id.Bytes()
	copy(b[8:], raw[:])
	binary.BigEndian.PutUint64(b[24:], 1)
	binary.BigEndian.PutUint64(b[36:], 1000)
	binary.BigEndian.PutUint32(b[44:], 1)
	return binary.BigEndian.AppendUint32(b, chunkserver.CRC(b))
}

func (d *bigDisk) Open(name string, create bool) (store.File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.files[path.Clean(name)]
	if f == nil {
		if !create {
			if id, err := meta.ParseChunkID(strings.TrimSuffix(path.Base(name), ".meta")); err == nil && strings.HasSuffix(name, ".meta") && id.Counter < uint64(d.chunks) {
				return &bigFile{b: d.meta(id)}, nil
			}
			return nil, &os.PathError{Op: "open", Path: name, Err: os.ErrNotExist}
		}
		f = &bigFile{}
		d.files[path.Clean(name)] = f
	}
	return f, nil
}
func (d *bigDisk) OpenRead(name string) (store.File, error) { return d.Open(name, false) }
func (d *bigDisk) Remove(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.files, path.Clean(name))
	return nil
}
func (d *bigDisk) Rename(from, to string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files[to] = d.files[from]
	delete(d.files, from)
	return nil
}
func (d *bigDisk) Mkdir(name string) error { return nil }
func (d *bigDisk) List(name string) (all []string, err error) {
	if hex, ok := strings.CutPrefix(name, "chunks/"); ok {
		var dir int
		if _, err := fmt.Sscanf(hex, "%x", &dir); err != nil {
			return nil, err
		}
		for n := dir; n < d.chunks; n += 256 {
			id := d.id(n).String()
			all = append(all, id+".data", id+".meta")
		}
	}
	return all, nil
}
func (d *bigDisk) SyncDir(string) error                   { return nil }
func (d *bigDisk) SyncAll() error                         { return nil }
func (d *bigDisk) Space() (total, free uint64, err error) { return 1 << 44, 1 << 43, nil }
func (d *bigDisk) Lock() (io.Closer, error)               { return io.NopCloser(nil), nil }

func (f *bigFile) ReadAt(p []byte, off int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if off >= int64(len(f.b)) {
		return 0, io.EOF
	}
	n := copy(p, f.b[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}
func (f *bigFile) WriteAt(p []byte, off int64) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if need := off + int64(len(p)); need > int64(len(f.b)) {
		f.b = append(f.b, make([]byte, need-int64(len(f.b)))...)
	}
	return copy(f.b[off:], p), nil
}
func (f *bigFile) Sync() error { return nil }
func (f *bigFile) Truncate(n int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.b = append(f.b[:0:0], append(f.b, make([]byte, max(0, n-int64(len(f.b))))...)[:n]...)
	return nil
}
func (f *bigFile) Size() (int64, error)        { return int64(len(f.b)), nil }
func (f *bigFile) Stamp() (store.Stamp, error) { return store.Stamp{Size: int64(len(f.b))}, nil }
func (f *bigFile) WillNeed(off, n int64)       {}
func (f *bigFile) Allocate(off, n int64) error { return nil }
func (f *bigFile) StartWrite(off, n int64)     {}
func (f *bigFile) Close() error                { return nil }

func bigServer(b testing.TB, chunks int) *Server {
	b.Helper()
	d := &bigDisk{chunks: chunks, files: map[string]*bigFile{}}
	if err := store.Init(&bigDisk{files: d.files}, smallDisk); err != nil {
		b.Fatal(err)
	}
	st, err := store.Open(d, store.Options{Logger: quiet, Reserve: 1})
	if err != nil {
		b.Fatal(err)
	}
	s := New(Config{ID: 7, Logger: quiet, ScrubPeriod: -1}, st)
	b.Cleanup(func() { s.Close() })
	return s
}

// BenchmarkHeartbeat: a heartbeat costs some microseconds and some hundred bytes,
// whatever the number of chunks.
func BenchmarkHeartbeat(b *testing.B) {
	s := bigServer(b, 1_000_000)
	b.ReportAllocs()
	var frame []byte
	for b.Loop() {
		frame = wire.Append(frame[:0], wire.Version, 0, &wire.Report{Info: s.Info(), Generation: s.Generation(), Events: s.Events(0, wire.MaxEvents)})
	}
	b.ReportMetric(float64(len(frame)), "B/beat")
}

// BenchmarkList lists a million chunks, as an owner does when a server starts.
func BenchmarkList(b *testing.B) {
	s := bigServer(b, 1_000_000)
	for b.Loop() {
		var after meta.ChunkID
		n, bytes := 0, 0
		for {
			r := s.Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1, After: after})
			if r.Err != 0 {
				b.Fatal(r)
			}
			n += len(r.Chunks)
			bytes += len(wire.Append(nil, wire.Version, 0, &wire.OrderRe{Result: r}))
			if !r.More {
				break
			}
			after = r.Chunks[len(r.Chunks)-1].ID
		}
		if n != 1_000_000 {
			b.Fatalf("%d listed", n)
		}
		b.ReportMetric(float64(bytes)/float64(n), "B/chunk")
	}
}

// TestBigServer runs the benchmarks' work at a thousandth of the size, so that the benchmarks
// stay correct.
func TestBigServer(t *testing.T) {
	s := bigServer(t, 1000)
	r := s.Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1})
	if r.Err != 0 || len(r.Chunks) != 1000 || r.More || r.Chunks[0].State != meta.ChunkSealed || r.Chunks[0].Length != 1000 {
		t.Fatalf("%d listed: %v %s", len(r.Chunks), r.Err, r.Detail)
	}
	if n := len(wire.Append(nil, wire.Version, 0, &wire.Report{Info: s.Info(), Generation: s.Generation()})); n > 300 {
		t.Errorf("a heartbeat has %d bytes", n)
	}
}
