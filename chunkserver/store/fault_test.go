package store

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

func memStore(t *testing.T) (*memDisk, *Store) {
	t.Helper()
	d := newMemDisk()
	if err := Init(d, options()); err != nil {
		t.Fatal(err)
	}
	return d, reopen(t, d)
}

func reopen(t *testing.T, d *memDisk) *Store {
	t.Helper()
	s, err := Open(d, options())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Abandon)
	return s
}

func mustSync(t *testing.T, s *Store, id meta.ChunkID, upTo uint64) {
	t.Helper()
	if _, err := s.Sync(ctx, id, upTo); err != nil {
		t.Fatal(err)
	}
}

func mustSeal(t *testing.T, s *Store, id meta.ChunkID, length uint64) {
	t.Helper()
	if _, err := s.Seal(ctx, id, meta.Fence{Term: 1, Seals: 1}, true, length); err != nil {
		t.Fatal(err)
	}
}

// A bit flipped anywhere in a sealed chunk's data is noticed by reading, by
// scrubbing and by fsck, and the rest of the chunk still reads.
func TestFlipData(t *testing.T) {
	d, s := memStore(t)
	id := testID(1)
	data := pattern(200_000, 1)
	put(t, s, id, 0, data)
	mustSeal(t, s, id, 200_000)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, d)
	r := rand.New(rand.NewPCG(1, 1))
	raw := d.inode(dataName(id))
	for range 50 {
		at, bit := r.IntN(len(data)), byte(1)<<r.IntN(8)
		raw.now[at] ^= bit
		p := make([]byte, 1)
		if err := s.Read(ctx, id, p, uint64(at)); meta.KindOf(err) != meta.Corrupt {
			t.Fatalf("bit flipped at %d: %v", at, err)
		}
		far := (at + 100_000) % len(data)
		if err := s.Read(ctx, id, p, uint64(far)); err != nil || p[0] != data[far] {
			t.Fatalf("bit flipped at %d, reading %d: %v", at, far, err)
		}
		if rep, err := s.Scrub(ctx, 0); err != nil || len(rep.Bad) != 1 || rep.Bad[0].ID != id {
			t.Fatalf("bit flipped at %d, scrub: %+v, %v", at, rep, err)
		}
		if rep, err := Check(d); err != nil || len(rep.Problems) != 1 {
			t.Fatalf("bit flipped at %d, fsck: %+v, %v", at, rep, err)
		}
		raw.now[at] ^= bit
	}
	if s.Stats().Corrupt == 0 {
		t.Fatal("corruption isn't counted")
	}
}

// A bit flipped on the way in is refused.
func TestFlipAppend(t *testing.T) {
	_, s := memStore(t)
	p := pattern(1000, 1)
	crc := chunkserver.CRC(p)
	p[500] ^= 4
	if err := s.Append(ctx, testID(1), meta.Fence{Term: 1}, 0, p, crc); meta.KindOf(err) != meta.Corrupt {
		t.Fatalf("append of bytes that don't match: %v", err)
	}
}

// Any bit flipped in a .meta file makes its chunk unreadable, with no other effect; the chunk may
// still be deleted, and other chunks are unchanged.
func TestFlipMeta(t *testing.T) {
	d, s := memStore(t)
	put(t, s, testID(1), 0, pattern(70_000, 1))
	put(t, s, testID(2), 0, pattern(70_000, 2))
	mustSeal(t, s, testID(1), 70_000)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	raw := d.inode(metaName(testID(1)))
	for i := range len(raw.now) * 8 {
		raw.now[i/8] ^= 1 << (i % 8)
		s := reopen(t, d)
		if _, err := s.Stat(ctx, testID(1)); meta.KindOf(err) != meta.Corrupt {
			t.Fatalf("bit %d: %v", i, err)
		}
		if err := s.Read(ctx, testID(2), make([]byte, 70_000), 0); err != nil {
			t.Fatal(err)
		}
		if rep, err := Check(d); err != nil || len(rep.Problems) == 0 {
			t.Fatalf("bit %d: fsck %+v, %v", i, rep, err)
		}
		s.Abandon()
		raw.now[i/8] ^= 1 << (i % 8)
	}
	raw.now[9] ^= 1
	s = reopen(t, d)
	if err := s.Delete(ctx, testID(1), meta.Fence{Term: 9}); err != nil {
		t.Fatal(err)
	}
}

// A bit flipped in what the log holds of synced bytes is never taken for a
// torn end: the store either refuses to open or has everything.
func TestFlipLog(t *testing.T) {
	d, s := memStore(t)
	want := map[uint64][]byte{}
	for n := range uint64(4) {
		for i := range 5 {
			p := pattern(3000+i, byte(n))
			put(t, s, testID(n+1), uint64(len(want[n])), p)
			want[n] = append(want[n], p...)
		}
		mustSync(t, s, testID(n+1), uint64(len(want[n])))
	}
	s.Mark()
	end, slot := s.log.off, int(s.log.seq%uint64(len(s.log.files)))
	s.Abandon()
	pristine := d.clone()
	refused := 0
	for at := 0; at < int(end); at += 1 + at%97 {
		d := pristine.clone()
		d.inode(segName(slot)).now[at] ^= 1 << (at % 8)
		s, err := Open(d, options())
		if err != nil {
			if meta.KindOf(err) != meta.Corrupt {
				t.Fatalf("byte %d: %v", at, err)
			}
			refused++
			continue
		}
		for n, data := range want {
			p := make([]byte, len(data))
			if err := s.Read(ctx, testID(n+1), p, 0); err != nil || !bytes.Equal(p, data) {
				t.Fatalf("DATA: byte %d flipped: chunk %d lost what was synced: %v", at, n+1, err)
			}
		}
		s.Abandon()
	}
	if refused < 500 {
		t.Fatalf("only %d flips were noticed", refused)
	}
}

// Synced bytes that rot in the data file before the checkpoint are corruption, not a shorter
// chunk.
func TestRotBelowSynced(t *testing.T) {
	d, s := memStore(t)
	id := testID(1)
	data := pattern(300_000, 1) // too much for the log: the data file is synced
	put(t, s, id, 0, data)
	mustSync(t, s, id, 300_000)
	s.Abandon()
	d.inode(dataName(id)).now[70_000] ^= 1
	s = reopen(t, d)
	i, err := s.Stat(ctx, id)
	if err != nil || i.Length != 300_000 {
		t.Fatalf("the chunk is %d bytes long, %v", i.Length, err)
	}
	if err := s.Read(ctx, id, make([]byte, 300_000), 0); meta.KindOf(err) != meta.Corrupt {
		t.Fatalf("read: %v", err)
	}
	if err := s.Read(ctx, id, make([]byte, 1000), 200_000); err != nil {
		t.Fatalf("read of good blocks: %v", err)
	}
	if _, err := s.Seal(ctx, id, meta.Fence{Term: 2}, false, 0); meta.KindOf(err) != meta.Corrupt {
		t.Fatalf("seal: %v", err)
	}
}

// After a failed sync, no later sync succeeds: the kernel has dropped the pages.
func TestSyncError(t *testing.T) {
	for name, size := range map[string]int{"log": 1000, "data": 300_000} {
		t.Run(name, func(t *testing.T) {
			d, s := memStore(t)
			id := testID(1)
			put(t, s, id, 0, pattern(size, 1))
			// The first sync; the log's record before the sync is a write.
			for k := d.ops + 1; ; k++ {
				d.failAt, d.failErr = k, syscall.EIO
				_, err := s.Sync(ctx, id, uint64(size))
				if err != nil {
					break
				}
				t.Fatal("the sync doesn't fail")
			}
			d.failAt = 0
			for range 3 {
				if n, err := s.Sync(ctx, id, uint64(size)); meta.KindOf(err) != meta.IO {
					t.Fatalf("a later sync says %d, %v", n, err)
				}
			}
			if err := s.Append(ctx, testID(2), meta.Fence{Term: 1}, 0, []byte("x"), chunkserver.CRC([]byte("x"))); meta.KindOf(err) != meta.IO {
				t.Fatalf("append to a failed disk: %v", err)
			}
			if err := s.Close(); meta.KindOf(err) != meta.IO {
				t.Fatalf("close: %v", err)
			}
		})
	}
}

// EIO at every single change: acknowledged and synced bytes from before the error are in the
// store after a restart.
func TestEIOAnywhere(t *testing.T) {
	for k := 1; k < 400; k += 3 {
		d := newMemDisk()
		if err := Init(d, options()); err != nil {
			t.Fatal(err)
		}
		l := &life{r: rand.New(rand.NewPCG(uint64(k), 5)), d: d, chunks: map[uint64]*modelChunk{}}
		s, err := Open(d, options())
		if err != nil {
			t.Fatal(err)
		}
		l.s = s
		d.failAt, d.failErr = d.ops+k, syscall.EIO
		for range 200 {
			if err := l.step(); err != nil {
				if strings.Contains(err.Error(), "BUG") {
					t.Fatalf("change %d: %v", k, err)
				}
				break
			}
		}
		s.Abandon()
		l.d, l.lost = d.crash(l.r), true
		if l.s, err = Open(l.d, options()); err != nil {
			t.Fatalf("change %d: open: %v", k, err)
		}
		if err := l.check(false); err != nil {
			t.Fatalf("change %d: %v", k, err)
		}
		l.s.Abandon()
	}
}

// A full disk refuses appends, keeps all its bytes, still syncs, seals and deletes, and goes on
// when the disk has room again.
func TestFullDisk(t *testing.T) {
	d, s := memStore(t)
	d.room = 3 << 20
	var n uint64
	data := pattern(100_000, 1)
	var err error
	for ; err == nil && n < 100; n++ {
		err = s.Append(ctx, testID(1), meta.Fence{Term: 1}, n*100_000, data, chunkserver.CRC(data))
	}
	n--
	if meta.KindOf(err) != meta.NoSpace {
		t.Fatalf("after %d appends: %v", n, err)
	}
	mustSync(t, s, testID(1), n*100_000)
	if err := s.Read(ctx, testID(1), make([]byte, n*100_000), 0); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(ctx, testID(1), meta.Fence{Term: 1}); err != nil {
		t.Fatal(err)
	}
	d.room = 3 << 20
	put(t, s, testID(2), 0, data)
	mustSeal(t, s, testID(2), 100_000)
	if err := s.Checkpoint(); err != nil {
		t.Fatal(err)
	}
}

// The write itself returns ENOSPC: the append is refused, with no other effect.
func TestWriteENOSPC(t *testing.T) {
	d, s := memStore(t)
	put(t, s, testID(1), 0, pattern(1000, 1))
	d.failAt, d.failErr = d.ops+1, syscall.ENOSPC
	p := pattern(1000, 2)
	if err := s.Append(ctx, testID(1), meta.Fence{Term: 1}, 1000, p, chunkserver.CRC(p)); meta.KindOf(err) != meta.NoSpace {
		t.Fatal(err)
	}
	put(t, s, testID(1), 1000, p)
	mustSync(t, s, testID(1), 2000)
}

// A checkpoint that finds no room fails and is done again later.
func TestCheckpointENOSPC(t *testing.T) {
	d, s := memStore(t)
	put(t, s, testID(1), 0, pattern(1000, 1))
	put(t, s, testID(2), 0, pattern(1000, 2))
	d.room = 10
	if err := s.Checkpoint(); meta.KindOf(err) != meta.NoSpace {
		t.Fatal(err)
	}
	d.room = 1 << 20
	put(t, s, testID(1), 1000, pattern(1000, 1))
	if err := s.Checkpoint(); err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	s = reopen(t, d.crash(rand.New(rand.NewPCG(1, 1))))
	for n, want := range map[uint64]uint64{1: 2000, 2: 1000} {
		if i, err := s.Stat(ctx, testID(n)); err != nil || i.Length != want {
			t.Fatalf("chunk %d: %+v, %v", n, i, err)
		}
	}
}

// After a higher fence, an older fence is refused, wherever the older fence comes late.
func TestFence(t *testing.T) {
	d, s := memStore(t)
	f1, f2 := meta.Fence{Term: 1}, meta.Fence{Term: 1, Seals: 1}
	app := func(n uint64, f meta.Fence, off uint64) meta.Kind {
		return meta.KindOf(s.Append(ctx, testID(n), f, off, []byte("x"), chunkserver.CRC([]byte("x"))))
	}
	if k := app(1, f1, 0); k != meta.KindOK {
		t.Fatal(k)
	}
	for _, n := range []uint64{1, 2} { // 2: nothing was written yet
		if _, err := s.Seal(ctx, testID(n), f2, false, 0); err != nil {
			t.Fatal(err)
		}
	}
	again := func() {
		t.Helper()
		if k := app(1, f1, 1); k != meta.Fenced {
			t.Fatalf("append with an old fence: %v", k)
		}
		if k := app(2, f1, 0); k != meta.Fenced {
			t.Fatalf("first append with an old fence: %v", k)
		}
		if _, err := s.Seal(ctx, testID(1), f1, true, 1); meta.KindOf(err) != meta.Fenced {
			t.Fatalf("seal with an old fence: %v", err)
		}
		if err := s.Delete(ctx, testID(1), f1); meta.KindOf(err) != meta.Fenced {
			t.Fatalf("delete with an old fence: %v", err)
		}
	}
	again()
	s.Abandon()
	d = d.crash(rand.New(rand.NewPCG(9, 9)))
	s = reopen(t, d)
	again()
	if err := s.Delete(ctx, testID(1), f2); err != nil {
		t.Fatal(err)
	}
	if k := app(1, f2, 0); k != meta.NoSuchChunk {
		t.Fatalf("a late append brings a deleted chunk back: %v", k)
	}
	if err := s.Delete(ctx, testID(1), f2); err != nil {
		t.Fatalf("deleting twice: %v", err)
	}
}

// The answers of Append, Sync and Seal to wrong and repeated requests.
func TestRequests(t *testing.T) {
	_, s := memStore(t)
	id := testID(1)
	p := pattern(1000, 1)
	put(t, s, id, 0, p)
	put(t, s, id, 1000, p)
	put(t, s, id, 0, p) // repeated
	put(t, s, id, 500, p[500:])
	f := meta.Fence{Term: 1}
	for name, c := range map[string]struct {
		err  error
		want meta.Kind
	}{
		"gap":               {s.Append(ctx, id, f, 3000, p, chunkserver.CRC(p)), meta.WrongOffset},
		"overlap":           {s.Append(ctx, id, f, 1500, p, chunkserver.CRC(p)), meta.WrongOffset},
		"other bytes":       {s.Append(ctx, id, f, 100, p, chunkserver.CRC(p)), meta.WrongOffset},
		"first not at 0":    {s.Append(ctx, testID(2), f, 10, p, chunkserver.CRC(p)), meta.WrongOffset},
		"empty":             {s.Append(ctx, id, f, 2000, nil, 0), meta.Invalid},
		"sync past end":     {second(s.Sync(ctx, id, 2001)), meta.WrongOffset},
		"sync of nothing":   {second(s.Sync(ctx, testID(3), 1)), meta.NoSuchChunk},
		"read past end":     {s.Read(ctx, id, make([]byte, 2), 1999), meta.NoSuchOffset},
		"read of nothing":   {s.Read(ctx, testID(3), make([]byte, 2), 0), meta.NoSuchChunk},
		"seal beyond end":   {second(s.Seal(ctx, id, f, true, 2001)), meta.WrongOffset},
		"delete of nothing": {s.Delete(ctx, testID(3), f), meta.KindOK},
	} {
		if meta.KindOf(c.err) != c.want {
			t.Errorf("%s: %v, want %v", name, c.err, c.want)
		}
	}
	i, err := s.Seal(ctx, id, f, true, 1500)
	if err != nil || i.Length != 1500 {
		t.Fatal(err)
	}
	j, err := s.Seal(ctx, id, f, true, 1500)
	if err != nil || i != j {
		t.Fatalf("sealing twice: %+v, %v", j, err)
	}
	if _, err := s.Seal(ctx, id, f, true, 1000); meta.KindOf(err) != meta.Sealed {
		t.Fatalf("sealing elsewhere: %v", err)
	}
	if err := s.Append(ctx, id, f, 1500, p, chunkserver.CRC(p)); meta.KindOf(err) != meta.Sealed {
		t.Fatalf("append to a sealed chunk: %v", err)
	}
	want := chunkserver.SealCRC([]uint32{chunkserver.CRC(append(bytes.Clone(p), p[:500]...))})
	if i.CRC != want {
		t.Fatalf("seal checksum %08x, want %08x", i.CRC, want)
	}
}

func second[T any](_ T, err error) error { return err }

// A directory that is empty, another cluster's, another disk's, newer, or open elsewhere is
// refused and stays unchanged.
func TestRefusedDirectories(t *testing.T) {
	o := options()
	o.Cluster, o.Disk = [16]byte{1}, [16]byte{2}
	empty := newMemDisk()
	if _, err := Open(empty, o); meta.KindOf(err) != meta.NotFound || empty.ops != 0 {
		t.Fatalf("empty: %v, %d changes", err, empty.ops)
	}
	d := newMemDisk()
	if err := Init(d, o); err != nil {
		t.Fatal(err)
	}
	if err := Init(d, o); meta.KindOf(err) != meta.Exists {
		t.Fatalf("made again: %v", err)
	}
	for name, other := range map[string]Options{"cluster": {Cluster: [16]byte{9}}, "disk": {Disk: [16]byte{9}}} {
		if _, err := Open(d, other); meta.KindOf(err) != meta.Invalid {
			t.Fatalf("another %s: %v", name, err)
		}
	}
	s, err := Open(d, o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(d, o); meta.KindOf(err) != meta.DirectoryInUse {
		t.Fatalf("open twice: %v", err)
	}
	s.Abandon()
	b := d.inode(formatName).now
	binary.BigEndian.PutUint32(b[8:], FormatVersion+1)
	if _, err := Open(d, o); meta.KindOf(err) != meta.Version {
		t.Fatalf("newer: %v", err)
	}
}

// A small log under many appends is emptied as the log fills.
func TestLogWraps(t *testing.T) {
	d, s := memStore(t)
	want := map[uint64]uint64{}
	r := rand.New(rand.NewPCG(4, 4))
	for i := range 400 {
		n := uint64(r.IntN(5) + 1)
		p := pattern(20_000, byte(n))
		put(t, s, testID(n), want[n], p)
		want[n] += 20_000
		mustSync(t, s, testID(n), want[n])
		if i%100 == 99 {
			s.Abandon()
			d = d.crash(r)
			s = reopen(t, d)
		}
	}
	for n, length := range want {
		if i, err := s.Stat(ctx, testID(n)); err != nil || i.Length != length {
			t.Fatalf("chunk %d: %+v, %v", n, i, err)
		}
	}
}

func FuzzMeta(f *testing.F) {
	m := chunkMeta{id: testID(1), state: meta.ChunkSealed, fence: meta.Fence{Term: 1}, length: 70_000, crcs: []uint32{1, 2}}
	f.Add(m.encode())
	m.pack = newPacking(meta.CompressZstd, []uint32{30_000})
	f.Add(m.encode())
	m.pack = newPacking(meta.CompressS2, []uint32{70_000 | frameAsIs})
	f.Add(m.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(testID(1), b)
		if err == nil && chunkserver.Blocks(m.length) != uint64(len(m.crcs)) {
			t.Fatal("blocks don't fit the length")
		}
		if err == nil && m.pack != nil && (m.pack.size() > m.length || checkFrames(m.pack.lens, m.length) != nil) {
			t.Fatal("frames don't fit the length")
		}
	})
}

func FuzzRecord(f *testing.F) {
	f.Add(byte(recAppend), appendBody(testID(1), meta.Fence{Term: 1}, 10, 70_000, []uint32{1, 2}))
	f.Add(byte(recSync), append(syncBody(testID(1), 10, 13), 1, 2, 3))
	f.Add(byte(recSeal), sealBody(testID(1), meta.Fence{Term: 1}, 7, 8))
	f.Add(byte(recFence), fenceBody(testID(1), meta.Fence{Term: 1}))
	f.Fuzz(func(t *testing.T, typ byte, b []byte) {
		r, ok := decodeBody(recType(typ), b)
		if !ok {
			return
		}
		if r.typ == recAppend && pieces(r.off, r.end-r.off) != len(r.crcs) {
			t.Fatal("checksums don't fit the append")
		}
		if r.typ == recSync && r.inline != nil && uint64(len(r.inline)) != r.end-r.off {
			t.Fatal("bytes don't fit the sync")
		}
	})
}

func FuzzFormat(f *testing.F) {
	f.Add(format{segmentSize: 1 << 20, segments: 4}.encode())
	f.Fuzz(func(t *testing.T, b []byte) { _, _ = decodeFormat(b) })
}

// FuzzLog replays a log file of any bytes.
func FuzzLog(f *testing.F) {
	f.Add(uint32(5000), []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, at uint32, junk []byte) {
		d := newMemDisk()
		if err := Init(d, testOptions); err != nil {
			t.Fatal(err)
		}
		s, err := Open(d, testOptions)
		if err != nil {
			t.Fatal(err)
		}
		p := pattern(5000, 1)
		for i := range uint64(3) {
			put(t, s, testID(1), i*5000, p)
			if _, err := s.Sync(ctx, testID(1), i*5000); err != nil {
				t.Fatal(err)
			}
		}
		s.Abandon()
		seg := d.inode(segName(int(s.log.seq) % 5))
		copy(seg.now[int(at)%len(seg.now):], junk)
		s, err = Open(d, testOptions)
		if err == nil {
			s.Abandon()
		} else if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
			t.Fatal(err)
		}
	})
}
