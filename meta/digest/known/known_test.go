package known

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"penstock.io/penstock/meta/digest"
)

func block(i int) digest.Sum { return digest.Block(fmt.Append(nil, i)) }

func reopen(t *testing.T, dir string) *Blocks {
	t.Helper()
	b, err := Open(dir)
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

// TestKnown: what was put is there after a crash that loses the last batch at
// most, and after each digest only what that one used.
func TestKnown(t *testing.T) {
	dir := t.TempDir()
	b := reopen(t, dir)
	for i := range 3 * batch {
		b.Put(block(i), block(-i))
	}
	b.has(t, 0, 3*batch, true)
	b.Put(block(3*batch), block(-3*batch)) // not yet written: lost
	b.next.f.Close()
	b.old.f.Close()

	b = reopen(t, dir)
	b.has(t, 0, 3*batch, true)
	b.has(t, 3*batch, 3*batch+1, false)
	if err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	b = reopen(t, dir) // the next digest uses the first batch
	b.has(t, 0, batch, true)
	if err := b.Close(); err != nil { // interrupted: all is known still
		t.Fatal(err)
	}
	b = reopen(t, dir)
	b.has(t, 2*batch, 3*batch, true)
	if err := b.Finish(); err != nil {
		t.Fatal(err)
	}
	b = reopen(t, dir)
	defer b.Close()
	b.has(t, 0, batch, true)
	b.has(t, batch, 2*batch, false)
	b.has(t, 2*batch, 3*batch, true)
}

// TestDamage: damaged files never give another block than was put.
func TestDamage(t *testing.T) {
	dir := t.TempDir()
	b := reopen(t, dir)
	for i := range batch {
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
	for at := 0; at < len(good); at += 131 {
		bad := append([]byte(nil), good...)
		bad[at] ^= 0x10
		if err := os.WriteFile(name, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		b := reopen(t, dir)
		for i := range batch {
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
