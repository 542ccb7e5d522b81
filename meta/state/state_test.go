package state

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

const vol meta.VolumeID = 5

func shared(t testing.TB) *Shared {
	s := NewShared(8<<20, 100, nil)
	t.Cleanup(s.Close)
	return s
}

// pos is the position of entry n in a made-up journal.
func pos(n int) journal.Position {
	return journal.Position{Seq: meta.Seq(n), Hash: journal.Hash{byte(n), byte(n >> 8), byte(n >> 16), 1}}
}

func key(i int) []byte { return fmt.Appendf(nil, "k%08d", i) }

func put(t testing.TB, s *Store, n int, k, v []byte) {
	t.Helper()
	if err := s.Apply(pos(n), func(b Batch) error { b.Put(k, v); return nil }); err != nil {
		t.Fatal(err)
	}
}

func want(t *testing.T, err error, kind meta.Kind) {
	t.Helper()
	if meta.KindOf(err) != kind {
		t.Fatalf("error %v, want kind %v", err, kind)
	}
}

func TestApplyReadReopen(t *testing.T) {
	sh, dir := shared(t), filepath.Join(t.TempDir(), "v")
	_, err := Open(dir, vol, sh)
	want(t, err, meta.NotFound)
	s, err := Create(dir, vol, sh)
	if err != nil {
		t.Fatal(err)
	}
	if s.Applied() != (journal.Position{}) {
		t.Fatal(s.Applied())
	}
	err = s.Apply(pos(1), func(b Batch) error {
		for i := range 100 {
			b.Put(key(i), fmt.Append(nil, i))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	err = s.Apply(pos(2), func(b Batch) error {
		b.Delete(key(3))
		b.DeleteRange(key(10), key(90))
		b.Put(key(50), []byte("again"))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	if err := s.Apply(pos(3), func(b Batch) error { b.Put(key(1), nil); return boom }); !errors.Is(err, boom) {
		t.Fatal(err)
	}
	check := func(s *Store) {
		t.Helper()
		if s.Applied() != pos(2) {
			t.Fatal(s.Applied())
		}
		if v, ok, err := s.Get(key(1)); err != nil || !ok || string(v) != "1" {
			t.Fatal("DATA:", v, ok, err)
		}
		if _, ok, err := s.Get(key(3)); err != nil || ok {
			t.Fatal(ok, err)
		}
		var got []string
		if err := s.Scan(key(8), key(92), func(k, v []byte) bool { got = append(got, string(v)); return true }); err != nil {
			t.Fatal(err)
		}
		if fmt.Sprint(got) != "[8 9 again 90 91]" {
			t.Fatal(got)
		}
		n := 0
		if err := s.Scan(key(0), key(99), func(k, v []byte) bool { n++; return n < 3 }); err != nil || n != 3 {
			t.Fatal(n, err)
		}
	}
	check(s)
	if s.Size() <= 0 {
		t.Fatal(s.Size())
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = Create(dir, vol, sh)
	want(t, err, meta.Exists)
	_, err = Open(dir, vol+1, sh)
	want(t, err, meta.Corrupt)
	if s, err = Open(dir, vol, sh); err != nil {
		t.Fatal(err)
	}
	check(s)
	put(t, s, 3, key(1), []byte("x"))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// A newer format is refused before anything is written.
func TestNewerFormat(t *testing.T) {
	sh, dir := shared(t), filepath.Join(t.TempDir(), "v")
	s, err := Create(dir, vol, sh)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, formatFile)
	if err := os.WriteFile(name, []byte("penstock-state 2 everything else may differ\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	before := tree(t, dir)
	_, err = Open(dir, vol, sh)
	want(t, err, meta.Version)
	if after := tree(t, dir); after != before {
		t.Fatalf("before %s after %s", before, after)
	}
}

// tree is names, sizes and times of all files below dir.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		fmt.Fprintln(&b, p, fi.Size(), fi.ModTime().UnixNano())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// fill makes a store with several table files and n keys.
func fill(t *testing.T, dir string, sh *Shared, n int) *Store {
	t.Helper()
	s, err := Create(dir, vol, sh)
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= n; i++ {
		put(t, s, i, key(i), bytes.Repeat([]byte{byte(i)}, 500))
		if i%(n/4) == 0 {
			if err := s.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	return s
}

func tables(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, storeDir, "*.sst"))
	if err != nil || len(names) == 0 {
		t.Fatal(names, err)
	}
	return names
}

// Wherever a bit flips in a table file, no wrong value is ever read: an error
// of kind Corrupt, or the right value (the bit was in a part nobody reads).
func TestFlippedBit(t *testing.T) {
	sh, dir := shared(t), filepath.Join(t.TempDir(), "v")
	const n = 400
	s := fill(t, dir, sh, n)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	name := tables(t, dir)[0]
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	corrupt := 0
	for at := 7; at < len(good); at += len(good)/60 + 1 {
		bad := bytes.Clone(good)
		bad[at] ^= 0x10
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		fresh := NewShared(1<<20, 100, nil) // no cached blocks
		err := func() error {
			s, err := Open(dir, vol, fresh)
			if err != nil {
				return err
			}
			defer s.closeDB()
			for i := 1; i <= n; i++ {
				v, ok, err := s.Get(key(i))
				if err != nil {
					return err
				}
				if !ok || !bytes.Equal(v, bytes.Repeat([]byte{byte(i)}, 500)) {
					t.Fatalf("DATA: byte %d of %d flipped: key %d has a wrong value", at, len(good), i)
				}
			}
			m := 0
			if err := s.Scan(key(0), key(n+1), func(k, v []byte) bool { m++; return true }); err != nil {
				return err
			}
			if m != n {
				t.Fatalf("byte %d flipped: %d keys", at, m)
			}
			return nil
		}()
		fresh.Close()
		if err != nil {
			want(t, err, meta.Corrupt)
			corrupt++
		}
	}
	if corrupt < 40 {
		t.Fatalf("only %d of 60 flips were noticed", corrupt)
	}
}

// Open returns Corrupt for missing or cut files, so that the caller rebuilds.
func TestDamagedDirectory(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(dir string) error
	}{
		{"no table file", func(dir string) error { return os.Remove(tables(t, dir)[0]) }},
		{"no store", func(dir string) error { return os.RemoveAll(filepath.Join(dir, storeDir)) }},
		{"empty store", func(dir string) error {
			d := filepath.Join(dir, storeDir)
			return errors.Join(os.RemoveAll(d), os.Mkdir(d, 0o700))
		}},
		{"no manifest", func(dir string) error { return remove(dir, "MANIFEST-*") }},
		{"no markers", func(dir string) error { return remove(dir, "marker.*") }},
		{"no FORMAT", func(dir string) error { return os.Remove(filepath.Join(dir, formatFile)) }},
		{"FORMAT flipped", func(dir string) error {
			name := filepath.Join(dir, formatFile)
			b, err := os.ReadFile(name)
			b[30] ^= 1
			return errors.Join(err, os.WriteFile(name, b, 0o600))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			sh, dir := shared(t), filepath.Join(t.TempDir(), "v")
			if err := fill(t, dir, sh, 40).Close(); err != nil {
				t.Fatal(err)
			}
			if err := c.damage(dir); err != nil {
				t.Fatal(err)
			}
			s, err := Open(dir, vol, NewShared(1<<20, 10, nil))
			if err == nil {
				t.Fatalf("opened at %v", s.Applied())
			}
			want(t, err, meta.Corrupt)
		})
	}
}

func remove(dir, pattern string) error {
	names, err := filepath.Glob(filepath.Join(dir, storeDir, pattern))
	if err != nil || len(names) == 0 {
		return fmt.Errorf("%s: %v %w", pattern, names, err)
	}
	for _, n := range names {
		err = errors.Join(err, os.Remove(n))
	}
	return err
}

func TestCheckpointRestore(t *testing.T) {
	sh, top := shared(t), t.TempDir()
	s := fill(t, filepath.Join(top, "v"), sh, 400)
	defer s.Close()
	// All in the lowest level: nothing moves between the checkpoints.
	if err := s.db.Compact(t.Context(), key(0), key(500), false); err != nil {
		t.Fatal(err)
	}
	cpDir := filepath.Join(top, "cp")
	at, files, err := s.Checkpoint(cpDir, sh)
	if err != nil || at != pos(400) || len(files) < 3 {
		t.Fatal(at, files, err)
	}
	_, _, err = s.Checkpoint(cpDir, sh)
	want(t, err, meta.Exists)
	put(t, s, 401, key(1), []byte("later"))
	get := fromDir(cpDir)
	to := filepath.Join(top, "r")
	if err := Restore(to, vol, files, get); err != nil {
		t.Fatal(err)
	}
	want(t, Restore(to, vol, files, get), meta.Exists)
	r, err := Open(to, vol, sh)
	if err != nil || r.Applied() != at {
		t.Fatal(r, err)
	}
	for i := 1; i <= 400; i++ {
		if v, ok, err := r.Get(key(i)); err != nil || !ok || !bytes.Equal(v, bytes.Repeat([]byte{byte(i)}, 500)) {
			t.Fatal("DATA:", i, v, ok, err)
		}
	}
	put(t, r, 401, key(1), []byte("other"))
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	// Old table files keep name and sum: no need to store the files again.
	at2, files2, err := s.Checkpoint(filepath.Join(top, "cp2"), sh)
	if err != nil || at2 != pos(401) {
		t.Fatal(at2, err)
	}
	same := 0
	for _, f := range files2 {
		for _, g := range files {
			if f.Name == g.Name && f.Sum == g.Sum && strings.HasSuffix(f.Name, ".sst") && f.Size > 10_000 {
				same++
			}
		}
	}
	if same == 0 {
		t.Fatal("no table file is the same", files, files2)
	}
	// A damaged or wrong file is refused, and nothing is left behind.
	for _, damage := range []func(b []byte) []byte{
		func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		func(b []byte) []byte { return b[:len(b)-1] },
		func(b []byte) []byte { return append(b, 0) },
	} {
		bad := func(f journal.File) (io.ReadCloser, error) {
			b, err := os.ReadFile(filepath.Join(cpDir, storeDir, f.Name))
			if strings.HasSuffix(f.Name, ".sst") {
				b = damage(b)
			}
			return io.NopCloser(bytes.NewReader(b)), err
		}
		to := filepath.Join(top, "bad")
		want(t, Restore(to, vol, files, bad), meta.Corrupt)
		if _, err := os.Stat(to); !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	evil := []journal.File{{Name: "../evil"}}
	want(t, Restore(filepath.Join(top, "bad"), vol, evil, get), meta.Corrupt)
}

// fromDir gets files from Checkpoint's directory.
func fromDir(dir string) func(journal.File) (io.ReadCloser, error) {
	return func(f journal.File) (io.ReadCloser, error) { return os.Open(filepath.Join(dir, storeDir, f.Name)) }
}

func FuzzParseFormat(f *testing.F) {
	f.Add("penstock-state 1 volume 00000005 id AAAABBBBCCCCDDDDEEEEFFFFGG crc 00000000\n")
	f.Add("penstock-state 2 anything\n")
	f.Add("penstock-state 1 volume 5 id x crc 0e8b4e39\n")
	f.Fuzz(func(t *testing.T, line string) {
		version, v, err := parseFormat(line)
		if err != nil || version > Version {
			return
		}
		if version != 1 || !strings.HasPrefix(line, "penstock-state 1 volume ") {
			t.Fatal(version, v, line)
		}
	})
}
