package state

import (
	"bytes"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"penstock.io/penstock/meta"
)

// countingFS counts the bytes read from table files and written to any file.
type countingFS struct {
	vfs.FS
	read, written atomic.Int64
}

func (c *countingFS) wrap(f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return &countingFile{f, c}, nil
}

func (c *countingFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := c.FS.Open(name, opts...)
	if !strings.HasSuffix(name, ".sst") {
		return f, err
	}
	return c.wrap(f, err)
}

func (c *countingFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	return c.wrap(c.FS.Create(name, category))
}

type countingFile struct {
	vfs.File
	c *countingFS
}

func (f *countingFile) Read(p []byte) (int, error) {
	n, err := f.File.Read(p)
	f.c.read.Add(int64(n))
	return n, err
}

func (f *countingFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	f.c.read.Add(int64(n))
	return n, err
}

func (f *countingFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	f.c.written.Add(int64(n))
	return n, err
}

// TestCopyIsFlat: a store that begins as a copy can be read without reading or writing tables,
// though the tables are still to be compacted; the compaction comes after the first write.
func TestCopyIsFlat(t *testing.T) {
	const flushes, keys, size = 10, 800, 512
	fs := &countingFS{FS: vfs.Default}
	sh, top := shared(t), t.TempDir()
	sh.fs = fs
	empty, err := Create(filepath.Join(top, "v"), vol, sh)
	if err == nil {
		err = empty.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	s, err := open(filepath.Join(top, "v"), sh, atRest)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for n := 1; n <= flushes; n++ {
		err := s.Apply(pos(n), func(b Batch) error {
			for i := range keys { // in all tables: only a compaction puts the keys in order
				b.Put(key(i), bytes.Repeat([]byte{byte(n)}, size))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	fs.read.Store(0)
	fs.written.Store(0)
	tmp, dir := filepath.Join(top, "tmp"), filepath.Join(top, "copy")
	if err := s.Copy(tmp); err != nil {
		t.Fatal(err)
	}
	want(t, s.Copy(tmp), meta.Exists)
	if err := Rebase(tmp, vol+1, sh); err != nil {
		t.Fatal(err)
	}
	if err := Install(tmp, dir); err != nil {
		t.Fatal(err)
	}
	for range 2 { // closing would wait for the work that opening began
		c, err := Open(dir, vol+1, sh)
		if err != nil || c.Applied().Seq != 0 {
			t.Fatal(c.Applied(), err)
		}
		if v, ok, err := c.Get(key(3)); err != nil || !ok || len(v) != size || v[0] != flushes {
			t.Fatal(len(v), ok, err)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	const all = flushes * keys * size
	if r, w := fs.read.Load(), fs.written.Load(); r > all/4 || w > all/4 {
		t.Fatalf("of %d bytes of tables %d were read, and %d bytes written", all, r, w)
	}

	c, err := Open(dir, vol+1, sh)
	if err != nil {
		t.Fatal(err)
	}
	put(t, c, 1, key(1), []byte("mine"))
	for n := 2; c.db.Metrics().Levels[0].TablesCount > 4; n++ {
		if n > 3000 {
			t.Fatalf("%d tables in the uppermost level are left as they are", c.db.Metrics().Levels[0].TablesCount)
		}
		if err := c.Flush(); err != nil { // the store compacts from here on
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
	if v, _, err := c.Get(key(1)); err != nil || string(v) != "mine" {
		t.Fatalf("DATA: %q, %v", v, err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if v, _, err := s.Get(key(1)); err != nil || len(v) != size {
		t.Fatalf("the origin changed with its copy: %d bytes, %v", len(v), err)
	}
}
