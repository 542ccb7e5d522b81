package known

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"penstock.io/penstock/meta/digest"
)

var blocks = flag.Int("blocks", 20_000, "how many blocks TestMany remembers")

func block(i int) digest.Sum { return digest.Block(fmt.Append(nil, i)) }

func reopen(t *testing.T, dir string) *Blocks {
	t.Helper()
	b, err := Open(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *Blocks) has(t *testing.T, from, to int, want bool) {
	t.Helper()
	for i := from; i < to; i++ {
		if got, ok := b.Get(block(i)); ok != want || ok && got != block(-i) {
			t.Fatalf("block %d: %v %v", i, ok, got)
		}
	}
}

// many is enough for files to grow, few is not.
const many, few = 1000, 100

// TestKnown: put blocks survive a crash, and after each digest the file keeps only the blocks
// that the digest used.
func TestKnown(t *testing.T) {
	dir := t.TempDir()
	b := reopen(t, dir)
	for i := range 3 * many {
		b.Put(block(i), block(-i))
	}
	b.has(t, 0, 3*many, true)
	b.has(t, 3*many, 4*many, false)
	b.next.f.Close()
	b.old.f.Close()

	b = reopen(t, dir)
	b.has(t, 0, 3*many, true)
	if err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	b = reopen(t, dir) // the next digest uses the first part
	b.has(t, 0, many, true)
	if err := b.Close(); err != nil { // interrupted: all is known still
		t.Fatal(err)
	}
	b = reopen(t, dir)
	b.has(t, 2*many, 3*many, true)
	if err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	b = reopen(t, dir)
	defer b.Close()
	b.has(t, 0, many, true)
	b.has(t, many, 2*many, false)
	b.has(t, 2*many, 3*many, true)
}

// TestApart: the blocks of a digest are in the file once the digest was kept, in any number, and
// not because another digest was finished; the blocks of a killed digest are not.
func TestApart(t *testing.T) {
	dir := t.TempDir()
	b := reopen(t, dir)
	apart := func() *Apart {
		t.Helper()
		a, err := b.Apart()
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	finish := func() {
		t.Helper()
		if err := b.Finish(); err != nil {
			t.Fatal(err)
		}
		b = reopen(t, dir)
	}
	killed := apart()
	killed.Put(block(0), block(0))
	killed.t.f.Close()
	b.Close()

	b = reopen(t, dir)
	outer := apart()
	fill := func(a *Apart, from, to int) {
		for i := from; i < to; i++ {
			b.PutUnproved(block(i), block(-i))
			a.Put(block(i), block(-i))
		}
	}
	fill(outer, 1, few)
	inner := apart()
	fill(inner, few, 3*many)
	if err := inner.Keep(); err != nil {
		t.Fatal(err)
	}
	for _, a := range []*Apart{inner, outer} {
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	finish()
	defer func() { b.Close() }()
	b.has(t, 0, few, false)
	b.has(t, few, 3*many, true)
	for i := range 3 * many {
		if before := b.Before(block(i)); before != (i >= few) {
			t.Fatalf("block %d: %v", i, before)
		}
		if got, ok := b.GetUnproved(block(i)); ok != (i > 0) || ok && got != block(-i) {
			t.Fatalf("block %d: %v %v", i, ok, got)
		}
	}
	last := apart()
	fill(last, 0, 1)
	if err := last.Keep(); err != nil {
		t.Fatal(err)
	}
	if err := last.Close(); err != nil {
		t.Fatal(err)
	}
	finish()
	if !b.Before(block(0)) || !b.Before(block(few)) {
		t.Error("what was kept is not there")
	}
	if l, err := os.ReadDir(dir); err != nil || len(l) != 2 {
		t.Error(l, err)
	}
}

// TestMany: a file grows with the number of blocks, loses none, and takes a bounded amount of
// disk for each block.
func TestMany(t *testing.T) {
	dir := t.TempDir()
	b := reopen(t, dir)
	for i := range *blocks {
		b.Put(block(i), block(-i))
	}
	b.has(t, 0, *blocks, true)
	st, err := b.next.f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d blocks in %d bytes, %.0f each", *blocks, st.Size(), float64(st.Size())/float64(*blocks))
	if st.Size() > int64(*blocks)*8*int64(recordSize) {
		t.Errorf("%d bytes for %d blocks", st.Size(), *blocks)
	}
	if err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	b = reopen(t, dir)
	defer b.Close()
	b.has(t, 0, *blocks, true)
}

// TestNoRoom: a file that may not grow remembers as many blocks as fit.
func TestNoRoom(t *testing.T) {
	b := reopen(t, t.TempDir())
	defer b.Close()
	b.next.full = true
	for i := range many {
		b.Put(block(i), block(-i))
	}
	n := 0
	for i := range many {
		if got, ok := b.Get(block(i)); ok {
			if n++; got != block(-i) {
				t.Fatalf("block %d: %v", i, got)
			}
		}
	}
	if most := 1<<minBits + window - 1; n < 1<<minBits || n > most || b.next.bits != minBits {
		t.Errorf("%d are known, of %d slots", n, most)
	}
}

// TestGrowthFails: a file that can't grow keeps all blocks.
func TestGrowthFails(t *testing.T) {
	dir := t.TempDir()
	b := reopen(t, dir)
	for i := range 100 {
		b.Put(block(i), block(-i))
	}
	if err := os.Mkdir(filepath.Join(dir, "next"+newEnd), 0o700); err != nil { // in the way
		t.Fatal(err)
	}
	for i := range many {
		b.Put(block(i), block(-i))
	}
	b.has(t, 0, 100, true)
	if err := b.Close(); err == nil {
		t.Error("nobody hears of it")
	}
	b = reopen(t, dir)
	defer b.Close()
	b.has(t, 0, 100, true)
}

// TestGrowthStops: a caller that lets others read while a file grows hears of the growth before;
// a file whose growth was interrupted stays unchanged, and works the next time.
func TestGrowthStops(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(t.Context())
	b, err := Open(ctx, dir)
	if err != nil {
		t.Fatal(err)
	}
	var bits []uint8
	b.Growing = func() {
		if bits = append(bits, b.next.bits); len(bits) == 3 {
			cancel()
		}
	}
	n := 0
	for ; ctx.Err() == nil; n++ {
		b.Put(block(n), block(-n))
	}
	for i := range many {
		b.Put(block(n+i), block(-n-i))
	}
	if want := []uint8{minBits, minBits + 1, minBits + 2}; !slices.Equal(bits, want) || b.next.bits != minBits+2 {
		t.Errorf("it grew from %d, want %d, to %d", bits, want, b.next.bits)
	}
	b.has(t, 0, n-1, true)
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if names, err := filepath.Glob(filepath.Join(dir, "*"+newEnd)); len(names) > 0 || err != nil {
		t.Errorf("%q is left, %v", names, err)
	}
	b = reopen(t, dir)
	defer b.Close()
	for i := range 3 * many {
		b.Put(block(i), block(-i))
	}
	b.has(t, 0, 3*many, true)
}

// TestDamage: damaged files never give another block than was put.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	b := reopen(t, dir)
	for i := range few {
		b.Put(block(i), block(-i))
	}
	if err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "blocks")
	good, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(good); at += 499 {
		bad := append([]byte(nil), good...)
		bad[at] ^= 0x10
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		b := reopen(t, dir)
		for i := range few {
			if got, ok := b.Get(block(i)); ok && got != block(-i) {
				t.Fatalf("byte %d flipped: block %d is %v", at, i, got)
			}
		}
		b.Close()
		os.Remove(filepath.Join(dir, "next"))
	}
	for _, bad := range [][]byte{nil, []byte("x"), good[:len(good)/2]} {
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		b := reopen(t, dir)
		b.Put(block(1), block(-1))
		b.has(t, 1, 2, true)
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		os.Remove(filepath.Join(dir, "next"))
	}
}
