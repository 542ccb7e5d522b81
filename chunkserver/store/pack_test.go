package store

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// text is n bytes that shrink to about a third.
func text(r *rand.Rand, n int) []byte {
	words := []string{"water ", "under ", "pressure ", "turbine ", "valve ", "\n", "penstock ", "gate "}
	b := make([]byte, 0, n+16)
	for len(b) < n {
		b = append(b, words[r.IntN(len(words))]...)
	}
	return b[:n]
}

// noise is n bytes that don't shrink.
func noise(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// sealed puts a whole chunk on a store.
func sealed(t testing.TB, s *Store, n uint64, p []byte) meta.ChunkID {
	t.Helper()
	id := testID(n)
	for off := 0; off < len(p); off += chunkserver.MaxAppend {
		put(t, s, id, uint64(off), p[off:min(len(p), off+chunkserver.MaxAppend)])
	}
	if _, err := s.Seal(t.Context(), id, meta.Fence{Term: 1, Seals: 1}, true, uint64(len(p))); err != nil {
		t.Fatal(err)
	}
	return id
}

func packed(t testing.TB, s *Store, id meta.ChunkID, alg meta.Compression) chunkserver.Info {
	t.Helper()
	if _, err := s.Pack(t.Context(), id, alg); err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	i, err := s.Stat(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// A compressed chunk reads, at any offset and length, like the plain chunk, before and after a
// restart; its file is smaller, no reader gets the file, and the file counts by its size.
func TestPackReads(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 2))
	for _, alg := range []meta.Compression{meta.CompressS2, meta.CompressZstd} {
		for _, size := range []int{packFrom, FrameSize, FrameSize + 1, 3*FrameSize - 5, 5<<20 + 77} {
			dir := t.TempDir()
			if err := Init(DirDisk(dir), testOptions); err != nil {
				t.Fatal(err)
			}
			s := openDir(t, dir, testOptions)
			want := text(r, size)
			copy(want[size/2:], noise(r, size/10)) // frames left plain, too
			id := sealed(t, s, 1, want)
			was, err := s.Stat(t.Context(), id)
			if err != nil || was.Form != meta.CompressNone || was.Stored != uint64(size) {
				t.Fatalf("%+v, %v", was, err)
			}
			i := packed(t, s, id, alg)
			if i.Form != alg || i.Stored >= uint64(size)*3/4 || i.CRC != was.CRC || i.Length != was.Length || i.State != was.State {
				t.Fatalf("%v of %d: %+v, was %+v", alg, size, i, was)
			}
			if _, err := os.Stat(filepath.Join(dir, dataName(id))); !errors.Is(err, os.ErrNotExist) {
				t.Fatalf("the plain data stays: %v", err)
			}
			if st, err := os.Stat(filepath.Join(dir, packName(id))); err != nil || uint64(st.Size()) != i.Stored {
				t.Fatalf("%v, %v", st, err)
			}
			for round := range 2 {
				for range 200 {
					off := r.IntN(size)
					p := make([]byte, 1+r.IntN(min(size-off, 300_000)))
					if err := s.Read(t.Context(), id, p, uint64(off)); err != nil || !bytes.Equal(p, want[off:off+len(p)]) {
						t.Fatalf("DATA: round %d, %d bytes at %d: %v", round, len(p), off, err)
					}
				}
				if _, err := s.Local(id, 0, 10, true); meta.KindOf(err) != meta.NotSupported {
					t.Fatalf("the compressed file is handed out: %v", err)
				}
				before := s.Stats()
				fd, _, done, err := s.Raw(id, 0, uint64(size))
				if err != nil || fd >= 0 {
					t.Fatalf("the compressed file is sent: %d, %v", fd, err)
				}
				done()
				if after := s.Stats(); after.Reads != before.Reads || after.ReadBytes != before.ReadBytes {
					t.Fatalf("nothing was sent, and %d bytes count as read", after.ReadBytes-before.ReadBytes)
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				if rep, err := Check(DirDisk(dir)); err != nil || len(rep.Problems) > 0 || rep.Packed != 1 || rep.Bytes != uint64(size) {
					t.Fatalf("%+v, %v", rep, err)
				}
				s = openDir(t, dir, testOptions)
			}
			if err := s.Delete(t.Context(), id, meta.Fence{Term: 1, Seals: 1}); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Stat(filepath.Join(dir, packName(id))); !errors.Is(err, os.ErrNotExist) {
				t.Fatalf("deleted, and still there: %v", err)
			}
			s.Close()
		}
	}
}

// Bytes that do not shrink stay plain, and the store knows so after a restart.
func TestPackDense(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	dir := t.TempDir()
	if err := Init(DirDisk(dir), testOptions); err != nil {
		t.Fatal(err)
	}
	s := openDir(t, dir, testOptions)
	id := sealed(t, s, 1, noise(r, 3<<20))
	small := sealed(t, s, 2, text(r, packFrom-1))
	for round := range 2 {
		for _, id := range []meta.ChunkID{id, small} {
			if i := packed(t, s, id, meta.CompressZstd); i.Form != meta.CompressNone || !i.Dense {
				t.Fatalf("round %d: %+v", round, i)
			}
			if _, err := os.Stat(filepath.Join(dir, packName(id))); !errors.Is(err, os.ErrNotExist) {
				t.Fatalf("round %d: %v", round, err)
			}
			l, err := s.Local(id, 0, 10, true)
			if err != nil {
				t.Fatal(err) // plain chunks are handed out as ever
			}
			l.File.Close()
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		s = openDir(t, dir, testOptions)
	}
}

// Whatever byte of a compressed chunk rots, no read returns a changed byte, and the check of the
// disk reports the chunk, too.
func TestPackRot(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	for _, alg := range []meta.Compression{meta.CompressS2, meta.CompressZstd} {
		dir := t.TempDir()
		if err := Init(DirDisk(dir), testOptions); err != nil {
			t.Fatal(err)
		}
		s := openDir(t, dir, testOptions)
		want := text(r, 400_000)
		copy(want[150_000:], noise(r, 120_000))
		id := sealed(t, s, 1, want)
		i := packed(t, s, id, alg)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(dir, packName(id))
		good, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for range 60 {
			bad := bytes.Clone(good)
			bad[r.IntN(len(bad))] ^= 1 << r.IntN(8)
			if r.IntN(10) == 0 {
				bad = bad[:r.IntN(len(bad))]
			}
			if err := os.WriteFile(name, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			s := openDir(t, dir, testOptions)
			hit := false
			for off := 0; off < len(want); off += 50_000 {
				p := make([]byte, min(50_000, len(want)-off))
				err := s.Read(t.Context(), id, p, uint64(off))
				if err == nil && !bytes.Equal(p, want[off:off+len(p)]) {
					t.Fatalf("DATA: %v: other bytes were read at %d", alg, off)
				}
				if err != nil && meta.KindOf(err) != meta.Corrupt {
					t.Fatal(err)
				}
				hit = hit || err != nil
			}
			rep, err := Check(DirDisk(dir))
			if err != nil {
				t.Fatal(err)
			}
			// A decoder may not care for some bits: then the bytes are right.
			if hit != (len(rep.Problems) > 0) {
				t.Fatalf("%v: reads failed: %v; the check: %v", alg, hit, rep.Problems)
			}
			if hit {
				found++
			}
			s.Abandon()
		}
		if found < 40 {
			t.Fatalf("%v: of 60 flipped bits in %d bytes, %d were found", alg, i.Stored, found)
		}
	}
}

// A chunk is deleted, or fenced, at any time during its compression, and an earlier reader goes
// on.
func TestPackBesideOthers(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	dir := t.TempDir()
	o := testOptions
	o.Manual = false
	if err := Init(DirDisk(dir), o); err != nil {
		t.Fatal(err)
	}
	s := openDir(t, dir, o)
	want := text(r, 3<<20)
	ids := []meta.ChunkID{}
	for n := range uint64(12) {
		id := sealed(t, s, n+1, want)
		ids = append(ids, id)
		s.Compress(id, meta.CompressS2)
	}
	done := make(chan error, len(ids))
	for n, id := range ids {
		go func() {
			r := rand.New(rand.NewPCG(3, uint64(n)))
			p := make([]byte, 100_000)
			for i := range 60 {
				off := r.IntN(len(want) - len(p))
				if err := s.Read(ctx, id, p, uint64(off)); err != nil || !bytes.Equal(p, want[off:off+len(p)]) {
					done <- fmt.Errorf("DATA: chunk %d: %w", n, err)
					return
				}
				if n%3 == 0 && i == 10+n {
					done <- s.Delete(ctx, id, meta.Fence{Term: 1, Seals: 1})
					return
				}
			}
			done <- nil
		}()
	}
	for range ids {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	rep, err := Check(DirDisk(dir))
	if err != nil || len(rep.Problems) > 0 || rep.Chunks != 8 {
		t.Fatalf("%+v, %v", rep, err)
	}
	s = openDir(t, dir, testOptions)
	for n, id := range ids {
		_, plain := os.Stat(filepath.Join(dir, dataName(id)))
		_, pack := os.Stat(filepath.Join(dir, packName(id)))
		if n%3 == 0 && (plain == nil || pack == nil) || n%3 > 0 && (plain == nil) == (pack == nil) {
			t.Errorf("chunk %d: plain: %v, compressed: %v", n, plain, pack)
		}
	}
}

func FuzzFrame(f *testing.F) {
	r := rand.New(rand.NewPCG(5, 5))
	for _, alg := range []meta.Compression{meta.CompressS2, meta.CompressZstd} {
		for _, n := range []int{1000, FrameSize} {
			p := text(r, n)
			f.Add(byte(alg), uint32(n), encodeFrame(alg, make([]byte, 2*FrameSize), p))
		}
	}
	// A bomb: much out of little.
	bomb := zstdWriter().EncodeAll(make([]byte, 64<<20), nil)
	f.Add(byte(meta.CompressZstd), uint32(FrameSize), bomb)
	f.Fuzz(func(t *testing.T, alg byte, n uint32, frame []byte) {
		n %= FrameSize + 1
		buf := bytes.Repeat([]byte{0xa5}, int(n)+64)
		err := decodeFrame(meta.Compression(alg), buf[:n:n], frame)
		if !bytes.Equal(buf[n:], bytes.Repeat([]byte{0xa5}, 64)) {
			t.Fatal("DATA: bytes beyond the frame were written")
		}
		if err != nil || n == 0 {
			return
		}
		// Decoded bytes, coded again, decode to the same bytes.
		a := meta.Compression(alg)
		if z := encodeFrame(a, make([]byte, 2*FrameSize), buf[:n]); z != nil {
			again := make([]byte, n)
			if err := decodeFrame(a, again, z); err != nil || !bytes.Equal(again, buf[:n]) {
				t.Fatalf("DATA: coded again: %v", err)
			}
		}
	})
}

// The decoder takes no more memory than its frame.
func TestPackBomb(t *testing.T) {
	bomb := zstdWriter().EncodeAll(make([]byte, 64<<20), nil)
	out := make([]byte, FrameSize)
	const times = 20
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range times {
		if decodeFrame(meta.CompressZstd, out, bomb) == nil {
			t.Fatal("64 MiB went into a frame")
		}
	}
	runtime.ReadMemStats(&after)
	if n := (after.TotalAlloc - before.TotalAlloc) / times; n > 1<<20 {
		t.Fatalf("a frame of %d bytes was decoded with %d bytes of memory", len(bomb), n)
	}
}

// cpu is the CPU time of this process so far.
func cpu() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Program text, words by chance and random bytes through each algorithm: CPU
// seconds for a GB of plain bytes, and the ratio.
func BenchmarkPack(b *testing.B) {
	r := rand.New(rand.NewPCG(5, 6))
	names, err := filepath.Glob("*.go")
	if err != nil {
		b.Fatal(err)
	}
	var source []byte
	for _, n := range names {
		p, err := os.ReadFile(n)
		if err != nil {
			b.Fatal(err)
		}
		source = append(source, p...)
	}
	for _, alg := range []meta.Compression{meta.CompressS2, meta.CompressZstd} {
		for _, data := range []struct {
			name  string
			bytes []byte
		}{{"source", source[:len(source)/FrameSize*FrameSize]}, {"words", text(r, 16*FrameSize)}, {"noise", noise(r, 16*FrameSize)}} {
			p, frames := data.bytes, len(data.bytes)/FrameSize
			scratch, out := make([]byte, 2*FrameSize), make([]byte, FrameSize)
			coded, total := make([][]byte, frames), 0
			for i := range coded {
				coded[i] = bytes.Clone(encodeFrame(alg, scratch, p[i*FrameSize:(i+1)*FrameSize]))
				if total += len(coded[i]); coded[i] == nil {
					total += FrameSize
				}
			}
			for _, do := range []string{"encode", "decode"} {
				if do == "decode" && coded[0] == nil {
					continue
				}
				b.Run(fmt.Sprint(alg, "/", data.name, "/", do), func(b *testing.B) {
					b.SetBytes(FrameSize)
					n, began := 0, cpu()
					for b.Loop() {
						i := n % frames
						n++
						if do == "encode" {
							encodeFrame(alg, scratch, p[i*FrameSize:(i+1)*FrameSize])
						} else if err := decodeFrame(alg, out, coded[i]); err != nil {
							b.Fatal(err)
						}
					}
					b.ReportMetric((cpu()-began).Seconds()*1e9/float64(n*FrameSize), "CPU-s/GB")
					b.ReportMetric(float64(len(p))/float64(total), "ratio")
				})
			}
		}
	}
}

var keep = flag.Bool("keep", false, "write testdata/packed-v1 anew: only with a new version")

// Today's program reads the bytes of the program that brought the format.
func TestPackOfBefore(t *testing.T) {
	want := text(rand.New(rand.NewPCG(20, 26)), FrameSize+9000)
	copy(want[FrameSize:], noise(rand.New(rand.NewPCG(20, 27)), 9000)) // a plain frame
	for _, alg := range []meta.Compression{meta.CompressS2, meta.CompressZstd} {
		kept := filepath.Join("testdata", "packed-v1", alg.String())
		dir := t.TempDir()
		if err := Init(DirDisk(dir), testOptions); err != nil {
			t.Fatal(err)
		}
		files := map[string]string{kept + ".meta": metaName(testID(1)), kept + ".pack": packName(testID(1)), filepath.Join("testdata", "packed-v1", "format"): formatName}
		if *keep {
			s := openDir(t, dir, testOptions)
			packed(t, s, sealed(t, s, 1, want), alg)
			s.Close()
			for to, from := range files {
				b, err := os.ReadFile(filepath.Join(dir, from))
				if err == nil {
					err = os.WriteFile(to, b, 0o644)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			continue
		}
		for from, to := range files {
			b, err := os.ReadFile(from)
			if to == formatName {
				if _, err := decodeFormat(b); err != nil {
					t.Fatal(err)
				}
				continue
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, to), b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		s := openDir(t, dir, testOptions)
		got := make([]byte, len(want))
		if err := s.Read(t.Context(), testID(1), got, 0); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("DATA: %v: %v", alg, err)
		}
		if i, err := s.Stat(t.Context(), testID(1)); err != nil || i.Form != alg {
			t.Fatalf("%+v, %v", i, err)
		}
	}
}
