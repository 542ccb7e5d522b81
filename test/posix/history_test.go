package posix

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"golang.org/x/sys/unix"
)

// A history is checked against this model of one small directory: names to
// inode numbers. Inode numbers are what tells the objects apart, so a lookup
// that gives an old object under a new name shows. link(2) isn't among the
// operations: the kernel finds the old name first and makes the new one later,
// so that it isn't atomic on any file system.
type (
	call struct {
		op   string
		a, b string
	}
	answer struct {
		err error  // an errno, or nil
		ino uint64 // of the object that was made or found
	}
	// names is the state; Porcupine never changes one in place.
	names map[string]uint64
)

// step says which answers a state allows, and what the next state is.
func (s names) step(c call, out answer) (bool, names) {
	a, haveA := s[c.a]
	b, haveB := s[c.b]
	set := func(change func(n names)) (bool, names) {
		next := maps.Clone(s)
		change(next)
		return out.err == nil, next
	}
	fails := func(err error) (bool, names) { return errors.Is(out.err, err), s }
	switch c.op {
	case "create":
		if haveA {
			return fails(unix.EEXIST)
		}
		return set(func(n names) { n[c.a] = out.ino })
	case "lookup":
		if !haveA {
			return fails(unix.ENOENT)
		}
		return out.err == nil && out.ino == a, s
	case "unlink":
		if !haveA {
			return fails(unix.ENOENT)
		}
		return set(func(n names) { delete(n, c.a) })
	case "rename":
		if !haveA {
			return fails(unix.ENOENT)
		}
		return set(func(n names) { delete(n, c.a); n[c.b] = a })
	case "noreplace":
		if !haveA {
			return fails(unix.ENOENT)
		}
		if haveB {
			return fails(unix.EEXIST)
		}
		return set(func(n names) { delete(n, c.a); n[c.b] = a })
	case "exchange":
		if !haveA || !haveB {
			return fails(unix.ENOENT)
		}
		return set(func(n names) { n[c.a], n[c.b] = b, a })
	}
	panic("no such operation: " + c.op)
}

var directoryModel = porcupine.Model{
	Init: func() any { return names{} },
	Step: func(state, input, output any) (bool, any) {
		return state.(names).step(input.(call), output.(answer))
	},
	Equal: func(a, b any) bool { return maps.Equal(a.(names), b.(names)) },
	Hash: func(state any) uint64 {
		h := uint64(0)
		for name, ino := range state.(names) {
			h += (ino + uint64(name[0])<<56) * 0x9e3779b97f4a7c15
		}
		return h
	},
	DescribeOperation: func(input, output any) string { return fmt.Sprintf("%v -> %v", input, output) },
}

// do runs one call in the directory.
func do(dir string, c call) answer {
	a, b := filepath.Join(dir, c.a), filepath.Join(dir, c.b)
	var st unix.Stat_t
	switch c.op {
	case "create":
		fd, err := unix.Open(a, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_CLOEXEC, 0o644)
		if err != nil {
			return answer{err: err}
		}
		err = unix.Fstat(fd, &st)
		return answer{errors.Join(err, unix.Close(fd)), st.Ino}
	case "lookup":
		return answer{unix.Lstat(a, &st), st.Ino}
	case "unlink":
		return answer{err: unix.Unlink(a)}
	case "rename":
		return answer{err: unix.Rename(a, b)}
	case "noreplace":
		return answer{err: unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_NOREPLACE)}
	case "exchange":
		return answer{err: unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)}
	}
	panic("no such operation: " + c.op)
}

// TestDirectoryHistory crosses creates, renames, exchanges and unlinks of a few
// names from two mounts, two threads each, in one small directory after the
// other, and demands of each history that some order of its operations
// explains all answers. PENSTOCK_HISTORY sets the time that it goes on.
func TestDirectoryHistory(t *testing.T) {
	within := 10 * time.Second
	if s := os.Getenv("PENSTOCK_HISTORY"); s != "" {
		var err error
		if within, err = time.ParseDuration(s); err != nil {
			t.Fatalf("PENSTOCK_HISTORY: %v", err)
		}
	}
	a, b := twoMounts(t)
	operations, rounds := 0, 0
	for end := time.Now().Add(within); time.Now().Before(end); rounds++ {
		seed := *seedFlag + uint64(rounds)
		name := fmt.Sprint("history", rounds)
		if err := os.Mkdir(filepath.Join(a, name), 0o755); err != nil {
			t.Fatal(err)
		}
		history := crossing(filepath.Join(a, name), filepath.Join(b, name), seed)
		operations += len(history)
		switch result := porcupine.CheckOperationsTimeout(directoryModel, history, time.Minute); result {
		case porcupine.Ok:
		default:
			t.Fatalf("seed %d: the history is %s: no order of these operations explains their answers:\n%s", seed, result, tell(history))
		}
		if err := os.RemoveAll(filepath.Join(b, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d operations in %d directories", operations, rounds)
}

// crossing runs one history: four threads, then a lookup of every name by both
// mounts.
func crossing(a, b string, seed uint64) []porcupine.Operation {
	const perThread = 15
	all := []string{"a", "b", "c", "d"}
	start := time.Now()
	var mu sync.Mutex
	var history []porcupine.Operation
	run := func(client int, dir string, c call) {
		begin := time.Since(start)
		out := do(dir, c)
		end := time.Since(start)
		mu.Lock()
		history = append(history, porcupine.Operation{ClientId: client, Input: c, Call: int64(begin), Output: out, Return: int64(end)})
		mu.Unlock()
	}
	var wg sync.WaitGroup
	for client, dir := range []string{a, b, a, b} {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(client)))
			for range perThread {
				c := call{op: []string{"create", "create", "lookup", "lookup", "unlink", "rename", "rename", "noreplace", "exchange", "exchange"}[r.IntN(10)], a: all[r.IntN(4)]}
				if slices.Contains([]string{"rename", "noreplace", "exchange"}, c.op) {
					for c.b = c.a; c.b == c.a; {
						c.b = all[r.IntN(4)]
					}
				}
				run(client, dir, c)
			}
		})
	}
	wg.Wait()
	for _, name := range all {
		run(0, a, call{op: "lookup", a: name})
		run(1, b, call{op: "lookup", a: name})
	}
	return history
}

// tell prints a history in the order of its calls.
func tell(history []porcupine.Operation) string {
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var s strings.Builder
	for _, o := range history {
		c, out := o.Input.(call), o.Output.(answer)
		fmt.Fprintf(&s, "%9d..%9d us, thread %d: %s %s %s -> inode %d, %v\n", o.Call/1000, o.Return/1000, o.ClientId, c.op, c.a, c.b, out.ino, out.err)
	}
	return s.String()
}
