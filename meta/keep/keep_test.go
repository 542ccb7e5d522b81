package keep

import (
	"bytes"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

func made(t testing.TB, arena int64) *Memory {
	t.Helper()
	m, err := New(arena)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func left(t testing.TB, m *Memory) (*Memory, []Record) {
	t.Helper()
	l, err := Left(m.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	r, err := l.Records()
	if err != nil {
		t.Fatal(err)
	}
	return l, r
}

// A successor finds the notes that were not erased, oldest first, with their bytes.
func TestLeft(t *testing.T) {
	m := made(t, 8<<20)
	if _, err := Left(m.FD()); !errors.Is(err, meta.IO) {
		t.Fatalf("a memory that was never whole: %v", err)
	}
	if err := m.SetHead([]byte(`{"a":1}`)); err != nil {
		t.Fatal(err)
	}
	var slots []Slot
	for i := range 100_000 {
		slots = append(slots, m.Note(Record{Kind: Volume, N: [6]uint64{uint64(i)}}))
	}
	buf := append(m.Buffer(10), "0123456789"...)
	data := m.Note(Record{Kind: Data, Aux: 3, N: [6]uint64{1, 2, 3, 10, m.Place(buf), 5}})
	m.EraseAll(slots) // a long run of free slots hides nothing
	moved, _ := m.Get(data)
	again := m.Note(moved) // with the same place in the order
	m.Erase(data)
	last := m.Note(Record{Kind: Chunk})
	m.SetN(last, 2, 77)
	m.Whole()

	l, r := left(t, m)
	if string(l.Head()) != `{"a":1}` {
		t.Errorf("head %q", l.Head())
	}
	if len(r) != 2 || r[0].Kind != Data || r[0].Aux != 3 || r[0].Seq != 100_001 || r[1].Kind != Chunk || r[1].N[2] != 77 {
		t.Fatalf("%+v, slot %d", r, again)
	}
	if b := l.Bytes(r[0]); string(b) != "0123456789" {
		t.Errorf("bytes %q", b)
	}
}

// Buffers don't overlap, and come back; beyond the arena no buffer exists.
func TestBuffers(t *testing.T) {
	m := made(t, 2<<20)
	seen := map[uint64]bool{}
	for range 1 << 20 / 4096 {
		b := m.Buffer(3000)
		if cap(b) != 4096 || seen[m.Place(b)] {
			t.Fatalf("cap %d at %d", cap(b), m.Place(b))
		}
		seen[m.Place(b)] = true
	}
	big := m.Buffer(1 << 20)
	if big == nil || m.Buffer(1) != nil {
		t.Fatal("the arena is 2 MiB")
	}
	if !m.Recycle(big) || m.Recycle(make([]byte, 10)) {
		t.Fatal("recycled what is not the arena's, or not what is")
	}
	if m.Buffer(1<<20) == nil {
		t.Fatal("a buffer that came back is gone")
	}
	if m.Place(make([]byte, 1)) != Nowhere {
		t.Fatal("a place in the arena for what is on the heap")
	}
}

// Unusable memories are refused: other versions, damage, lost records.
func TestRefused(t *testing.T) {
	for name, c := range map[string]struct {
		harm func(m *Memory)
		want meta.Kind
	}{
		"version": {func(m *Memory) { m.all[8] = Version + 1 }, meta.Version},
		"magic":   {func(m *Memory) { m.all[0] ^= 1 }, meta.Corrupt},
		"head":    {func(m *Memory) { m.all[headAt] ^= 1 }, meta.Corrupt},
		"sizes":   {func(m *Memory) { m.all[24]++ }, meta.Corrupt},
		"missed":  {func(m *Memory) { m.all[32] = 1 }, meta.IO},
	} {
		m := made(t, 1<<20)
		if err := m.SetHead([]byte("head")); err != nil {
			t.Fatal(err)
		}
		m.Whole()
		left(t, m)
		c.harm(m)
		if _, err := Left(m.FD()); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	m := made(t, 1<<20)
	m.Whole()
	m.Note(Record{Kind: Data, N: [6]uint64{0, 0, 0, 100, 1 << 20}})
	l, err := Left(m.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Records(); !errors.Is(err, meta.Corrupt) {
		t.Errorf("bytes outside the arena: %v", err)
	}
}

// The notes of a process, or of its successor, about the ends of its session in a volume stand
// beside the volume.
func TestEndsOfSessions(t *testing.T) {
	m, err := New(spanSize)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.Whole()
	m.Note(Record{Kind: Volume, N: [6]uint64{7}})
	m.Note(Record{Kind: Volume, N: [6]uint64{8}})
	m.Expired(8)
	l, err := Left(m.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.Void(8)
	l.Void(8)
	r, err := l.Records()
	if err != nil || len(r) != 2 || r[0].N != [6]uint64{7} || r[1].N != [6]uint64{8, 1, 2} {
		t.Errorf("%+v, %v", r, err)
	}
}

// Nil keeps nothing, so that a caller without a memory need not ask.
func TestNil(t *testing.T) {
	var m *Memory
	s := m.Note(Record{Kind: Open})
	m.SetN(s, 0, 1)
	m.Expired(1)
	m.Void(1)
	m.Erase(s)
	m.EraseAll([]Slot{s})
	m.Close()
	if m.Recycle([]byte("x")) {
		t.Error("recycled")
	}
}

// A memory of version 1, made by a program of version 1.
func TestVersion1(t *testing.T) {
	head, err := os.ReadFile("testdata/version1")
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	// The file holds the head, the first slots and the last bytes of the arena.
	const part = 8192
	for i, at := range []int64{0, slotsAt, slotsAt + maxSlots*slotSize + 1<<20 - part} {
		if _, err := unix.Pwrite(fd, head[i*part:(i+1)*part], at); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Ftruncate(fd, slotsAt+maxSlots*slotSize+1<<20); err != nil {
		t.Fatal(err)
	}
	l, err := Left(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r, err := l.Records()
	if err != nil || len(r) != 2 || r[0] != (Record{Kind: Volume, Seq: 1, N: [6]uint64{7}}) || !bytes.Equal(l.Bytes(r[1]), []byte("bytes")) {
		t.Errorf("%+v %v", r, err)
	}
}

// FuzzLeft: the reader stays within the memory, however damaged the memory is.
func FuzzLeft(f *testing.F) {
	head, err := os.ReadFile("testdata/version1")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(head[:16384])
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, b []byte) {
		m := &Memory{fd: -1, all: make([]byte, slotsAt+64*slotSize+4096), next: 1}
		n := copy(m.all[:headAt+4096], b)
		copy(m.all[slotsAt:], b[min(n, len(b)):])
		if m.check(int64(len(m.all))) != nil {
			return
		}
		m.Head()
		l, err := m.Records()
		if err != nil {
			return
		}
		for _, r := range l {
			if r.Kind == Data || r.Kind == Page {
				m.Bytes(r)
			}
		}
	})
}
