package store

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

var quietly = func() Options {
	o := testOptions
	o.Logger = silent
	return o
}()

// packDisk is a store in memory with some sealed chunks that shrink.
func packDisk(t *testing.T, o Options, chunks ...[]byte) (*memDisk, *Store, []meta.ChunkID) {
	t.Helper()
	o.Logger = silent
	d := newMemDisk()
	if err := Init(d, o); err != nil {
		t.Fatal(err)
	}
	s, err := Open(d, o)
	if err != nil {
		t.Fatal(err)
	}
	var ids []meta.ChunkID
	for i, p := range chunks {
		ids = append(ids, sealed(t, s, uint64(i+1), p))
	}
	if err := s.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	return d, s, ids
}

func reads(t *testing.T, s *Store, id meta.ChunkID, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if err := s.Read(t.Context(), id, got, 0); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("DATA: chunk %v: %v, right bytes: %v", id, err, bytes.Equal(got, want))
	}
}

// has tells whether a file exists.
func (d *memDisk) has(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, base := d.find(name)
	return dir.now[base] != nil
}

// Compressing takes no space that writers may still have: the compression does not begin without
// room for its largest file, and gives up when other writers take the room.
func TestPackLeavesRoom(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 1))
	const reserve = 1 << 20
	o := testOptions
	o.Reserve = reserve
	want := text(r, 3<<20)
	copy(want, noise(r, 1<<20)) // plain frames in front: the file soon gets long
	d, s, ids := packDisk(t, o, want, text(r, 3<<20))
	full := func(room int64) {
		d.mu.Lock()
		d.room = room
		d.mu.Unlock()
		s.space.forget()
	}
	p := want[:64<<10]
	appends := func(n uint64, times int) {
		t.Helper()
		for i := range times {
			if err := s.Append(t.Context(), testID(n), meta.Fence{Term: 1}, uint64(i*len(p)), p, chunkserver.CRC(p)); err != nil {
				t.Fatalf("append %d of %d: %v", i, times, err)
			}
		}
	}
	// Room for the compressed file, but not for its largest possible size.
	full(reserve + int64(len(want)) - 1)
	if _, err := s.Pack(t.Context(), ids[0], meta.CompressZstd); meta.KindOf(err) != meta.NoSpace {
		t.Fatalf("it was begun: %v", err)
	}
	if d.has(packName(ids[0])) {
		t.Error("it left a file")
	}
	appends(100, len(want)/len(p)-1)
	// A writer takes the room meanwhile.
	full(reserve + fullAt + int64(len(want)))
	d.before = func(op, name string) error {
		if op == "open" && name == packName(ids[0]) {
			appends(101, len(want)/len(p)/2)
		}
		return nil
	}
	if _, err := s.Pack(t.Context(), ids[0], meta.CompressZstd); meta.KindOf(err) != meta.NoSpace {
		t.Fatalf("it went on: %v", err)
	}
	d.before = nil
	if d.has(packName(ids[0])) {
		t.Error("it left a file")
	}
	// A file that waits for a checkpoint counts for the next file.
	full(reserve + fullAt + int64(len(want)))
	if n, err := s.Pack(t.Context(), ids[0], meta.CompressZstd); err != nil || n == 0 {
		t.Fatal(err)
	}
	full(reserve + fullAt + int64(len(want)))
	if _, err := s.Pack(t.Context(), ids[1], meta.CompressZstd); meta.KindOf(err) != meta.NoSpace {
		t.Fatalf("it was begun beside what waits: %v", err)
	}
	if err := s.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	full(reserve + fullAt + int64(len(want)))
	if n, err := s.Pack(t.Context(), ids[1], meta.CompressZstd); err != nil || n == 0 {
		t.Fatal(err)
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	reads(t, s, ids[0], want)
}

// A disk that gets full compresses as much as possible: files that wait for a checkpoint are put
// in place, which makes room, before the compression gives up.
func TestCompressOnAFullDisk(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 2))
	const reserve, n, size = 1 << 20, 6, 1 << 20
	o := testOptions
	o.Reserve = reserve
	var all [][]byte
	for range n {
		all = append(all, text(r, size))
	}
	d, s, ids := packDisk(t, o, all...)
	s.Abandon()
	d.room = reserve + fullAt + size + 100_000 // for a chunk beside its plain form, and for .meta
	o.Manual, o.Logger = false, silent
	s, err := Open(d, o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, id := range ids {
		s.Compress(id, meta.CompressZstd)
	}
	for end := time.Now().Add(30 * time.Second); s.Stats().Packed < n; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d chunks were compressed", s.Stats().Packed, n)
		}
	}
}

// Whichever write finds the disk full while a chunk is compressed: the chunk
// reads as before, nothing stays of what was begun, and the disk has not failed.
func TestPackENOSPC(t *testing.T) {
	want := text(rand.New(rand.NewPCG(7, 3)), 400_000)
	for at, whole := 1, false; !whole; at++ {
		d, s, ids := packDisk(t, testOptions, want)
		d.failAt, d.failErr = d.ops+at, syscall.ENOSPC
		_, err := s.Pack(t.Context(), ids[0], meta.CompressZstd)
		if err == nil {
			err = s.Checkpoint()
		}
		whole = d.ops < d.failAt
		if ferr := s.Err(); ferr != nil {
			if !d.syncFailed { // that fails the disk, whatever the error
				t.Fatalf("change %d: %v", at, ferr)
			}
			continue
		}
		if err != nil && meta.KindOf(err) != meta.NoSpace {
			t.Fatalf("change %d: %v", at, err)
		}
		reads(t, s, ids[0], want)
		if err := s.Checkpoint(); err != nil {
			t.Fatalf("change %d: %v", at, err)
		}
		if _, err := s.DirAll(t.Context(), byte(ids[0].Counter)); err != nil {
			t.Fatal(err)
		}
		if i, err := s.Stat(t.Context(), ids[0]); err != nil || d.has(packName(ids[0])) != (i.Form != 0) || d.has(dataName(ids[0])) == (i.Form != 0) {
			t.Fatalf("change %d: %+v, %v; plain %v, compressed %v", at, i, err, d.has(dataName(ids[0])), d.has(packName(ids[0])))
		}
		reads(t, s, ids[0], want)
	}
}

// Damage found between the compression and the checkpoint, or during the compression, voids the
// compression: neither its file nor its descriptor stays.
func TestPackVoidedByDamage(t *testing.T) {
	want := text(rand.New(rand.NewPCG(7, 4)), 400_000)
	rot := func(d *memDisk, s *Store, id meta.ChunkID) {
		d.mu.Lock()
		d.inode(dataName(id)).now[1000] ^= 1
		d.mu.Unlock()
		if err := s.bad.markDamaged(id); meta.KindOf(err) != meta.Corrupt {
			t.Errorf("the damage is not seen: %v", err)
		}
	}
	for _, when := range []string{"before the checkpoint", "while it is written"} {
		d, s, ids := packDisk(t, testOptions, want)
		id := ids[0]
		if when == "while it is written" {
			d.before = func(op, name string) error {
				if op == "open" && name == packName(id) {
					rot(d, s, id)
					d.inode(dataName(id)).now[1000] ^= 1 // the source of the compression is sound again
				}
				return nil
			}
			if n, err := s.Pack(t.Context(), id, meta.CompressZstd); err == nil || n > 0 {
				t.Errorf("%s: %d, %v", when, n, err)
			}
			d.before = nil
		} else {
			if n, err := s.Pack(t.Context(), id, meta.CompressZstd); err != nil || n == 0 {
				t.Fatal(n, err)
			}
			rot(d, s, id)
		}
		if err := s.Checkpoint(); err != nil {
			t.Fatal(err)
		}
		if n := d.opened[packName(id)]; n > 0 || d.has(packName(id)) {
			t.Errorf("%s: %d descriptors, the file is there: %v", when, n, d.has(packName(id)))
		}
		if i, err := s.Peek(id); meta.KindOf(err) != meta.Corrupt || i.Form != meta.CompressNone {
			t.Errorf("%s: %+v, %v", when, i, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		for name, n := range d.opened {
			t.Errorf("%s: %s is open %d times after the store was closed", when, name, n)
		}
	}
}

// A chunk that is deleted just before its compressed file is made leaves a file without a record
// if the process dies then. The list has the file as such, and the file goes.
func TestPackLeftAlone(t *testing.T) {
	want := text(rand.New(rand.NewPCG(7, 5)), 3<<20)
	d, s, ids := packDisk(t, testOptions, want)
	id, fence := ids[0], meta.Fence{Term: 1, Seals: 1}
	checked := s.Stats().Checked
	d.before = func(op, name string) error {
		if op == "open" && name == packName(id) {
			d.before = nil
			if err := s.Delete(t.Context(), id, fence); err != nil {
				t.Error(err)
			}
		}
		return nil
	}
	if n, err := s.Pack(t.Context(), id, meta.CompressZstd); n > 0 || meta.KindOf(err) != meta.Canceled {
		t.Errorf("%d, %v", n, err)
	}
	if d.has(packName(id)) {
		t.Error("the file of a deleted chunk stays")
	}
	if n := s.Stats().Checked - checked; n > FrameSize {
		t.Errorf("a deleted chunk went on being compressed: %d bytes of it were read", n)
	}
	if err := s.Checkpoint(); err != nil { // then the log doesn't name the chunk any more
		t.Fatal(err)
	}
	s.Abandon()

	// As above, but the process dies with the file made.
	f, err := d.Open(packName(id), true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(want[:9000], 0); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if s, err = Open(d, quietly); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	found, err := s.Dir(t.Context(), id.Volume, byte(id.Counter))
	if err != nil || len(found) != 1 || found[0] != id {
		t.Fatalf("%v, %v", found, err)
	}
	if _, err := s.Peek(id); meta.KindOf(err) != meta.NoSuchChunk || !s.Leftover(id) {
		t.Fatalf("it does not count as left over: %v", err)
	}
	listed := 0
	if err := s.List(t.Context(), func(i chunkserver.Info, err error) bool { listed++; return i.ID == id && err == nil }); err != nil || listed != 1 {
		t.Fatalf("%d, %v", listed, err)
	}
	if err := s.Delete(t.Context(), id, fence); err != nil {
		t.Fatal(err)
	}
	if d.has(packName(id)) || s.Leftover(id) {
		t.Error("it does not go")
	}
}

// A checkpoint that fails between two chunks has put the compressed file of the first in place
// only in the cache: the plain file stays until the new file is durable.
func TestPackPlainStaysUntilDurable(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 6))
	a, b := text(r, 100_000), text(r, 100_000)
	for seed := range uint64(40) {
		d, s, ids := packDisk(t, testOptions, a, b)
		for _, id := range ids {
			if n, err := s.Pack(t.Context(), id, meta.CompressS2); err != nil || n == 0 {
				t.Fatal(n, err)
			}
		}
		renamed := 0
		d.before = func(op, name string) error {
			if op == "rename" && strings.HasSuffix(name, ".meta") {
				if renamed++; renamed == 2 {
					return syscall.ENOSPC
				}
			}
			return nil
		}
		if err := s.Checkpoint(); meta.KindOf(err) != meta.NoSpace {
			t.Fatal(err)
		}
		list := func(s *Store) {
			for _, id := range ids {
				if _, err := s.DirAll(t.Context(), byte(id.Counter)); err != nil {
					t.Fatal(err)
				}
			}
		}
		list(s)
		after := d.keep(rand.New(rand.NewPCG(seed, 1)), 0.5)
		back, err := Open(after, quietly)
		if err != nil {
			t.Fatal(err)
		}
		reads(t, back, ids[0], a)
		reads(t, back, ids[1], b)
		back.Abandon()

		// Once a checkpoint succeeds, the plain files go at once.
		d.before = nil
		if err := s.Checkpoint(); err != nil {
			t.Fatal(err)
		}
		for _, id := range ids {
			if d.has(dataName(id)) {
				t.Fatal("a plain file stays")
			}
		}
		if n := s.Stats().Packed; n != 2 {
			t.Fatalf("%d chunks count as compressed", n)
		}
		s.Abandon()
	}
}

// A process that is killed between putting .meta in place and syncing the directory leaves a
// .meta that is not durable; the next process removes no plain file before .meta is durable.
func TestPackPlainStaysAfterAKill(t *testing.T) {
	want := text(rand.New(rand.NewPCG(7, 7)), 100_000)
	killed := errors.New("killed")
	for seed := range uint64(40) {
		d, s, ids := packDisk(t, testOptions, want)
		if _, err := s.Pack(t.Context(), ids[0], meta.CompressS2); err != nil {
			t.Fatal(err)
		}
		placed := false
		d.before = func(op, name string) error {
			placed = placed || op == "rename" && name == metaName(ids[0])
			if placed && op == "sync" {
				return killed
			}
			return nil
		}
		if err := s.Checkpoint(); !errors.Is(err, killed) {
			t.Fatal(err)
		}
		d.before = nil
		s.Abandon()
		s, err := Open(d, quietly)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.DirAll(t.Context(), byte(ids[0].Counter)); err != nil {
			t.Fatal(err)
		}
		back, err := Open(d.keep(rand.New(rand.NewPCG(seed, 2)), 0.5), quietly)
		if err != nil {
			t.Fatal(err)
		}
		reads(t, back, ids[0], want)
		back.Abandon()
		s.Abandon()
	}
}

// slowDisk reads slowly.
type slowDisk struct{ *memDisk }

type slowFile struct{ File }

const slowRead = 5 * time.Millisecond

func (d slowDisk) OpenRead(name string) (File, error) {
	f, err := d.memDisk.OpenRead(name)
	return slowFile{f}, err
}

func (f slowFile) ReadAt(p []byte, off int64) (int, error) {
	time.Sleep(slowRead)
	return f.File.ReadAt(p, off)
}

// Compressing takes half of the time of an idle disk, and a quarter of the time of a used disk.
func TestPackIsPaced(t *testing.T) {
	for _, used := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			o := testOptions
			d, s, ids := packDisk(t, o, text(rand.New(rand.NewPCG(7, 8)), 24*FrameSize))
			s.Abandon()
			o.Manual, o.Logger = false, silent
			s, err := Open(slowDisk{d}, o)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			time.Sleep(2 * quietAppend)
			began := time.Now()
			const work = 24 * FrameSize / block * slowRead
			s.Compress(ids[0], meta.CompressS2)
			for s.Stats().Packed == 0 && time.Since(began) < time.Minute {
				time.Sleep(time.Millisecond)
				if used {
					s.lastRead.Store(time.Now().UnixNano())
				}
			}
			least, most := 2*work, 5*work/2
			if used {
				least, most = 4*work, 5*work
			}
			if took := time.Since(began); took < least-work/10 || took > most {
				t.Errorf("used %v: %v for what takes %v", used, took, work)
			}
		})
	}
}

// Nothing of the mistakes of a decoder is taken for success.
func TestPackErrorsSayWhat(t *testing.T) {
	if err := differs(4096, nil); err == nil || strings.Contains(err.Error(), "%!") || strings.Contains(err.Error(), "nil") {
		t.Errorf("%v", err)
	}
	if err := differs(4096, errPacked); !errors.Is(err, errPacked) {
		t.Errorf("%v", err)
	}
	want := text(rand.New(rand.NewPCG(7, 9)), 100_000)
	d, s, ids := packDisk(t, testOptions, want)
	d.before = func(op, name string) error {
		if strings.HasSuffix(name, ".pack") {
			return syscall.ENOSPC
		}
		return nil
	}
	_, err := s.Pack(t.Context(), ids[0], meta.CompressS2)
	var e *meta.Error
	if !errors.As(err, &e) || e.Op != "compress chunk" || e.Kind != meta.NoSpace {
		t.Errorf("%v", err)
	}
}
