package fuse

import (
	"bytes"
	"slices"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta/keep"
)

// cutAll cuts a text that comes in parts of some length, as a goroutine of an open file does.
func cutAll(text []byte, step int) (lines [][]byte, rest []byte, long bool) {
	skipping := false
	for len(text) > 0 || len(rest) > 0 {
		n := min(step, len(text))
		rest, text = append(slices.Clone(rest), text[:n]...), text[n:]
		for {
			batch, used, tooLong, inside := cut(rest, skipping)
			if used == 0 {
				break
			}
			lines, rest, skipping, long = append(lines, batch...), rest[used:], inside, long || tooLong
		}
		if n == 0 {
			break
		}
	}
	return lines, rest, long
}

// FuzzInputCut: the lines of a text do not depend on the WRITEs in which the text comes, and count
// agrees with cut.
func FuzzInputCut(f *testing.F) {
	f.Add([]byte("a\nb\r\n\n\nc"), 2)
	f.Add([]byte("\n"), 1)
	f.Fuzz(func(t *testing.T, text []byte, step int) {
		if step < 1 || len(text) > 1<<12 {
			return
		}
		all, rest, _ := cutAll(text, len(text)+1)
		lines, end, _ := cutAll(text, step)
		if !slices.EqualFunc(all, lines, bytes.Equal) || !bytes.Equal(rest, end) {
			t.Errorf("DATA: %q in parts of %d bytes: %q and %q, not %q and %q", text, step, lines, end, all, rest)
		}
		if n := count(text, false); n != int64(len(all)) {
			t.Errorf("%q has %d lines, and count says %d", text, len(all), n)
		}
	})
}

// TestInputCut: lines that are too long, and batches.
func TestInputCut(t *testing.T) {
	good := bytes.Repeat([]byte("x"), maxLine)
	text := slices.Concat([]byte("1\n"), good, []byte("\r\n"), good, []byte("y\n2\n"), bytes.Repeat([]byte("z\n"), 3*batchLines), good, good)
	for _, step := range []int{maxLine / 3, maxLine, len(text)} {
		lines, rest, long := cutAll(text, step)
		if len(lines) != 3+3*batchLines || !bytes.Equal(lines[1], good) || string(lines[2]) != "2" || !long || len(rest) > 0 {
			t.Errorf("DATA: in parts of %d bytes: %d lines, %d bytes left, long %v", step, len(lines), len(rest), long)
		}
	}
	if n := count(text, true); n != 2+3*batchLines { // the first line is the end of a long line
		t.Errorf("count says %d", n)
	}
}

// TestInputRestore: a successor has the bytes of WRITEs that are not done, and the number of the last
// WRITE, also when bytes are missing.
func TestInputRestore(t *testing.T) {
	part := func(at, unique, size uint64, place uint64) keep.Record {
		return keep.Record{Kind: keep.Line, N: [6]uint64{1, at, unique, size, place}}
	}
	text := []byte("aa\nbb\ncc\nd")
	read := func(r keep.Record) []byte {
		if r.N[4] == keep.Nowhere {
			return nil
		}
		return text[r.N[4]:][:r.N[3]]
	}
	for name, c := range map[string]struct {
		parts  []keep.Record
		text   string
		done   uint64
		next   int64
		failed bool
	}{
		"all done":     {[]keep.Record{part(0, 7, 3, 0)}, "", 3, 2, false},
		"half done":    {[]keep.Record{part(0, 6, 5, 0), part(5, 7, 5, 5)}, "bb\ncc\nd", 3, 2, false},
		"bytes lost":   {[]keep.Record{part(3, 6, 3, keep.Nowhere), part(6, 7, 4, 6)}, "cc\nd", 6, 5, true},
		"out of order": {[]keep.Record{part(6, 7, 4, 6), part(3, 6, 3, 3)}, "bb\ncc\nd", 3, 2, false},
	} {
		i := &input{s: &streamFiles{f: &fileSystem{}}, changed: make(chan struct{}), inputTaken: inputTaken{next: 2}, done: 3}
		i.restore(c.parts, read)
		if string(i.text) != c.text || i.done != c.done || i.next != c.next || i.written != 7 || (i.failed != nil) != c.failed || i.promised != i.next+count(i.text, false) {
			t.Errorf("%s: %q from %d on, number %d, last WRITE %d, %v", name, i.text, i.done, i.next, i.written, i.failed)
		}
	}
}

// TestInputResent: a WRITE that the kernel sends again counts once, also after more lines were appended
// and in a second successor.
func TestInputResent(t *testing.T) {
	s := &streamFiles{f: &fileSystem{}}
	begin := func(left []keep.Record, text string) *input {
		i := &input{s: s, fh: 5, changed: make(chan struct{}), inputTaken: inputTaken{next: 1}}
		i.restore(left, func(r keep.Record) []byte { return []byte(text)[:r.N[3]] })
		s.inputs.open = map[uint64]*input{5: i}
		return i
	}
	write := func(unique uint64, text string) {
		t.Helper()
		in := &fuse.WriteIn{Fh: 5}
		in.Unique = unique
		if n, err := s.writeInput(nil, in, []byte(text)); int(n) != len(text) || err != nil {
			t.Fatalf("a WRITE of %q: %d, %v", text, n, err)
		}
	}
	i := begin([]keep.Record{{Kind: keep.Line, N: [6]uint64{5, 0, 8, 2, 0}}}, "a\n")
	write(8|resent, "a\n")
	write(10, "b\n")
	write(10|resent, "b\n")
	if string(i.text) != "a\nb\n" {
		t.Errorf("DATA: after WRITEs that came again, the text is %q", i.text)
	}
	i.advance(4, 2, false, 0, nil, nil)
	write(10|resent, "b\n")
	if len(i.text) > 0 || i.next != 3 || len(i.parts) != 1 {
		t.Errorf("DATA: a WRITE that came again after its lines were appended: %q, number %d, %d records", i.text, i.next, len(i.parts))
	}
	i = begin([]keep.Record{{Kind: keep.Line, N: [6]uint64{5, 0, 10, 0, 0}}}, "") // as the last record of i is, after another takeover
	write(10|resent, "b\n")
	if len(i.text) > 0 {
		t.Errorf("DATA: in a second successor, a WRITE that came again is %q", i.text)
	}
}
