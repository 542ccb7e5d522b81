package store

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

func bootOptions() Options {
	o := options()
	o.Boot = "5d1f0d3c-0000-4000-8000-000000000001"
	return o
}

// sealedIn makes a store in dir with one sealed chunk of n bytes.
func sealedIn(t *testing.T, dir string, o Options, n int) (*Store, meta.ChunkID, []byte) {
	t.Helper()
	if err := Init(DirDisk(dir), o); err != nil {
		t.Fatal(err)
	}
	s := openDir(t, dir, o)
	id, data := testID(1), pattern(n, 3)
	put(t, s, id, 0, data)
	mustSeal(t, s, id, uint64(n))
	return s, id, data
}

// vouchedBlocks counts the blocks that readers need not check.
func vouchedBlocks(t *testing.T, s *Store, id meta.ChunkID) (n int) {
	t.Helper()
	l, err := s.Local(id, 0, 4096, false)
	if err != nil {
		t.Fatal(err)
	}
	for i := range l.CRCs {
		n += int(l.Verified[i/8] >> (i % 8) & 1)
	}
	return n
}

// Verified blocks stay verified over restarts, orderly or not: nothing is read again. Blocks that
// were only written do not count.
func TestVerifiedSurvives(t *testing.T) {
	for name, orderly := range map[string]bool{"closed": true, "killed": false} {
		t.Run(name, func(t *testing.T) {
			dir, o := t.TempDir(), bootOptions()
			s, id, data := sealedIn(t, dir, o, 300_000)
			if n := vouchedBlocks(t, s, id); n != 0 {
				t.Fatalf("%d blocks count as verified because they were written", n)
			}
			if err := s.Verify(ctx, id); err != nil {
				t.Fatal(err)
			}
			if got := s.Stats().Checked; got != 300_000 {
				t.Fatalf("%d bytes were verified", got)
			}
			for range 3 {
				if orderly {
					if err := s.Close(); err != nil {
						t.Fatal(err)
					}
				} else {
					s.verified.save()
					s.Abandon()
				}
				s = openDir(t, dir, o)
				before := s.Stats().Checked // recovery reads the bytes named by the log
				if n := vouchedBlocks(t, s, id); n != 5 {
					t.Fatalf("%d blocks verified after the restart", n)
				}
				if err := s.Verify(ctx, id); err != nil {
					t.Fatal(err)
				}
				if got := s.Stats().Checked; got != before {
					t.Fatalf("%d bytes were verified again", got-before)
				}
			}
			p := make([]byte, len(data))
			if err := s.Read(ctx, id, p, 0); err != nil || !bytes.Equal(p, data) {
				t.Fatalf("DATA: other bytes, or %v", err)
			}
			if err := s.Delete(ctx, id, meta.Fence{Term: 2}); err != nil {
				t.Fatal(err)
			}
			if len(s.verified.vouched) != 0 {
				t.Fatal("a deleted chunk is remembered")
			}
		})
	}
}

// Whatever happens to the data file or the record meanwhile, nothing counts as
// verified any more, and the store opens.
func TestVerifiedVoid(t *testing.T) {
	record := func(dir string) string { return filepath.Join(dir, verifiedName) }
	data := func(dir string) string { return filepath.Join(dir, dataName(testID(1))) }
	edit := func(name string, fn func(b []byte) []byte) error {
		b, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		return os.WriteFile(name, fn(b), 0o600)
	}
	same := func(b []byte) []byte { return b }
	for name, c := range map[string]struct {
		do   func(dir string, o *Options) error
		want int // blocks
	}{
		"nothing":      {func(dir string, o *Options) error { return nil }, 5},
		"other boot":   {func(dir string, o *Options) error { o.Boot = "other"; return nil }, 0},
		"boot unknown": {func(dir string, o *Options) error { o.Boot = ""; return nil }, 0},
		"no record":    {func(dir string, o *Options) error { return os.Remove(record(dir)) }, 0},
		"empty":        {func(dir string, o *Options) error { return os.Truncate(record(dir), 0) }, 0},
		"cut":          {func(dir string, o *Options) error { return os.Truncate(record(dir), 100) }, 0},
		"version": {func(dir string, o *Options) error {
			return edit(record(dir), func(b []byte) []byte { b[4]++; return b })
		}, 0},
		"flipped": {func(dir string, o *Options) error {
			return edit(record(dir), func(b []byte) []byte { b[verifiedHead+20] ^= 1; return b })
		}, 0},
		"written to": {func(dir string, o *Options) error {
			f, err := os.OpenFile(data(dir), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt([]byte{3}, 0) // the same byte as before
			return err
		}, 0},
		"mode": {func(dir string, o *Options) error { return os.Chmod(data(dir), 0o640) }, 0},
		"replaced": {func(dir string, o *Options) error {
			if err := os.Rename(data(dir), data(dir)+"x"); err != nil {
				return err
			}
			b, err := os.ReadFile(data(dir) + "x")
			return errors.Join(err, os.WriteFile(data(dir), b, 0o600))
		}, 0},
		"record written anew": {func(dir string, o *Options) error { return edit(record(dir), same) }, 5},
	} {
		t.Run(name, func(t *testing.T) {
			dir, o := t.TempDir(), bootOptions()
			s, id, _ := sealedIn(t, dir, o, 300_000)
			if err := s.Verify(ctx, id); err != nil {
				t.Fatal(err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(settleTime)
			if err := c.do(dir, &o); err != nil {
				t.Fatal(err)
			}
			s = openDir(t, dir, o)
			if n := vouchedBlocks(t, s, id); n != c.want {
				t.Fatalf("%d blocks count as verified", n)
			}
			if err := s.Verify(ctx, id); err != nil {
				t.Fatal(err)
			}
			if n := vouchedBlocks(t, s, id); n != 5 {
				t.Fatalf("%d blocks verified in the end", n)
			}
		})
	}
}

// A bit flipped in a verified chunk, running or stopped, is found.
func TestVerifiedFlip(t *testing.T) {
	for name, stopped := range map[string]bool{"running": false, "stopped": true} {
		t.Run(name, func(t *testing.T) {
			dir, o := t.TempDir(), bootOptions()
			s, id, data := sealedIn(t, dir, o, 300_000)
			if err := s.Verify(ctx, id); err != nil {
				t.Fatal(err)
			}
			if stopped {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(settleTime)
			f, err := os.OpenFile(filepath.Join(dir, dataName(id)), os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt([]byte{data[140_000] ^ 4}, 140_000); err != nil {
				t.Fatal(err)
			}
			if stopped {
				s = openDir(t, dir, o)
			}
			if n := vouchedBlocks(t, s, id); n != 0 {
				t.Fatalf("%d blocks still count as verified", n)
			}
			if err := s.Verify(ctx, id); meta.KindOf(err) != meta.Corrupt {
				t.Fatalf("verify: %v", err)
			}
			if n := vouchedBlocks(t, s, id); n != 2 {
				t.Fatalf("%d blocks count as verified before the bad one", n)
			}
		})
	}
}

// Chunks are verified without a caller once the disk is quiet, open chunks up to their last whole
// block, and the last sealed chunks at the close of the store.
func TestVerifiedByItself(t *testing.T) {
	dir, o := t.TempDir(), bootOptions()
	o.Manual = false
	s, id, _ := sealedIn(t, dir, o, 300_000)
	open := testID(2)
	put(t, s, open, 0, pattern(200_000, 1))
	for start := time.Now(); vouchedBlocks(t, s, id) != 5 || vouchedBlocks(t, s, open) != 3; {
		if time.Since(start) > time.Minute {
			t.Fatal("still not verified")
		}
		time.Sleep(50 * time.Millisecond)
	}
	mustSeal(t, s, open, 200_000)
	if n := vouchedBlocks(t, s, open); n != 0 {
		t.Fatalf("%d blocks still count as verified after the seal", n)
	}
	for start := time.Now(); ; { // the record is written now and then
		if _, err := os.Stat(filepath.Join(dir, verifiedName)); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) || time.Since(start) > time.Minute {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openDir(t, dir, bootOptions())
	if n := vouchedBlocks(t, s, open); n != 4 {
		t.Fatalf("%d blocks verified after the restart", n)
	}
	if n := vouchedBlocks(t, s, id); n != 5 || s.Stats().Checked != 0 {
		t.Fatalf("%d blocks verified after the restart, %d bytes read", n, s.Stats().Checked)
	}
}

// A chunk that was left open is read by its seal after a restart, and need not be read again.
func TestVerifiedBySeal(t *testing.T) {
	dir, o := t.TempDir(), bootOptions()
	if err := Init(DirDisk(dir), o); err != nil {
		t.Fatal(err)
	}
	s := openDir(t, dir, o)
	put(t, s, testID(1), 0, pattern(300_000, 1))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openDir(t, dir, o)
	mustSeal(t, s, testID(1), 300_000)
	if n := vouchedBlocks(t, s, testID(1)); n != 5 || s.Stats().Checked != 300_000 {
		t.Fatalf("%d blocks verified, %d bytes read", n, s.Stats().Checked)
	}
}

// Many callers at once share a single reading.
func TestVerifyTogether(t *testing.T) {
	s, id, _ := sealedIn(t, t.TempDir(), bootOptions(), 3_000_000)
	errs := make(chan error)
	for range 8 {
		go func() { errs <- s.Verify(context.Background(), id) }()
	}
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	if got := s.Stats().Checked; got != 3_000_000 {
		t.Fatalf("%d bytes were read", got)
	}
}

func FuzzVerified(f *testing.F) {
	var disk [16]byte
	all := map[meta.ChunkID]vouched{testID(1): {Stamp{1, 2, 3}, 3}, testID(2): {Stamp{1, -2, 1 << 40}, 0}}
	f.Add(encodeVerified(all, disk, "boot"))
	f.Add(encodeVerified(nil, disk, "boot"))
	f.Add([]byte(verifiedMagic + "\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := decodeVerified(b, disk, "boot")
		if err != nil {
			return
		}
		again, err := decodeVerified(encodeVerified(got, disk, "boot"), disk, "boot")
		if err != nil || !maps.Equal(got, again) {
			t.Fatalf("%v, then %v, %v", got, again, err)
		}
	})
}

// BenchmarkVerify verifies a chunk whose pages are in the page cache.
func BenchmarkVerify(b *testing.B) {
	dir, o := b.TempDir(), bootOptions()
	if err := Init(DirDisk(dir), o); err != nil {
		b.Fatal(err)
	}
	s := openDir(b, dir, o)
	const n = 128 << 20
	p := pattern(4<<20, 1)
	for off := 0; off < n; off += len(p) {
		put(b, s, testID(1), uint64(off), p)
	}
	if _, err := s.Seal(ctx, testID(1), meta.Fence{Term: 1, Seals: 1}, true, n); err != nil {
		b.Fatal(err)
	}
	time.Sleep(settleTime)
	b.SetBytes(n)
	for b.Loop() {
		s.verified.forget(testID(1))
		if err := s.Verify(ctx, testID(1)); err != nil {
			b.Fatal(err)
		}
	}
}
