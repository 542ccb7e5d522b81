package history

import (
	"math"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"golang.org/x/sys/unix"
)

// TestRealDirectory: the kernel's own file system is linearizable.
func TestRealDirectory(t *testing.T) {
	dir := t.TempDir()
	seed := uint64(time.Now().UnixNano())
	h := Run(dir, dir, seed, false, nil)
	if err := Check(h, false); err != nil {
		t.Errorf("seed %d: %v", seed, err)
	}
	if len(h) != 4*15+8 {
		t.Errorf("%d operations", len(h))
	}
}

// TestStories are small histories, right and wrong ones.
func TestStories(t *testing.T) {
	op := func(begin, end int64, o, name string, out answer) porcupine.Operation {
		return porcupine.Operation{Input: call{op: o, a: name}, Call: begin, Output: out, Return: end}
	}
	rename := func(begin, end int64, a, b string, out answer) porcupine.Operation {
		return porcupine.Operation{Input: call{op: "rename", a: a, b: b}, Call: begin, Output: out, Return: end}
	}
	const never = math.MaxInt64
	unknown := answer{err: unix.EIO, open: true}
	for _, s := range []struct {
		name  string
		right bool
		h     []porcupine.Operation
	}{
		{"found after it was made", true, []porcupine.Operation{op(0, 1, "create", "a", answer{ino: 7}), op(2, 3, "lookup", "a", answer{ino: 7})}},
		{"lost", false, []porcupine.Operation{op(0, 1, "create", "a", answer{ino: 7}), op(2, 3, "lookup", "a", answer{err: unix.ENOENT})}},
		{"another one", false, []porcupine.Operation{op(0, 1, "create", "a", answer{ino: 7}), op(2, 3, "lookup", "a", answer{ino: 8})}},
		{"back again", false, []porcupine.Operation{op(0, 1, "create", "a", answer{ino: 7}), op(2, 3, "unlink", "a", answer{}), op(4, 5, "lookup", "a", answer{ino: 7})}},
		{"an error that says nothing, allowed nowhere", false, []porcupine.Operation{op(0, 1, "create", "a", answer{err: unix.EIO})}},
		{"open, it did not happen", true, []porcupine.Operation{op(0, never, "create", "a", unknown), op(2, 3, "lookup", "a", answer{err: unix.ENOENT})}},
		{"open, it happened", true, []porcupine.Operation{op(0, never, "create", "a", unknown), op(2, 3, "lookup", "a", answer{ino: 9}), op(4, 5, "lookup", "a", answer{ino: 9})}},
		{"open, it happened late", true, []porcupine.Operation{op(0, never, "create", "a", unknown), op(2, 3, "lookup", "a", answer{err: unix.ENOENT}), op(4, 5, "lookup", "a", answer{ino: 9})}},
		{"open, it happened twice", false, []porcupine.Operation{op(0, never, "create", "a", unknown), op(2, 3, "lookup", "a", answer{ino: 9}), op(4, 5, "unlink", "a", answer{}), op(6, 7, "lookup", "a", answer{ino: 9})}},
		{"open, and another inode", false, []porcupine.Operation{op(0, never, "create", "a", unknown), op(2, 3, "lookup", "a", answer{ino: 9}), op(4, 5, "lookup", "a", answer{ino: 10})}},
		{"an open rename", true, []porcupine.Operation{op(0, 1, "create", "a", answer{ino: 7}), rename(2, never, "a", "b", unknown), op(4, 5, "lookup", "b", answer{ino: 7}), op(6, 7, "lookup", "a", answer{err: unix.ENOENT})}},
		{"half an open rename", false, []porcupine.Operation{op(0, 1, "create", "a", answer{ino: 7}), rename(2, never, "a", "b", unknown), op(4, 5, "lookup", "b", answer{ino: 7}), op(6, 7, "lookup", "a", answer{ino: 7})}},
	} {
		for i := range s.h {
			s.h[i].ClientId = i
		}
		if err := Check(s.h, false); (err == nil) != s.right {
			t.Errorf("%s: %v", s.name, err)
		}
	}
}
