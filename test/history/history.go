// Package history owns the checks of the answers that several clients got at once.
package history

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
	"golang.org/x/sys/unix"
)

// A history is checked against this model of one small directory: names to
// inode numbers. Inode numbers are what tells the objects apart, so a lookup
// that gives an old object under a new name shows. link(2) isn't among the
// operations: the kernel finds the old name first and makes the new one later,
// so that it isn't atomic on any file system.
//
// Between two mounts the same holds for what the kernel decides from its own
// two lookups of a rename, old name first: if both gave the same inode, since
// the other mount renamed it from one name to the other in between, rename
// succeeds and does nothing; if the new name was there, RENAME_NOREPLACE fails
// with EEXIST though the old name may be gone meanwhile. No file system server
// hears of these calls. The model allows them when there are two mounts, and
// only where the inode did have the old name once.
type (
	call struct {
		op   string
		a, b string
	}
	answer struct {
		err error  // an errno, or nil
		ino uint64 // of the made or found object
		// open: the call failed with an error that leaves its outcome open.
		open bool
	}
	binding struct {
		name string
		ino  uint64
	}
	// directory is the state; Porcupine never changes a state in place.
	directory struct {
		names map[string]uint64
		ever  map[binding]bool // all objects that a name ever had
	}
)

// set is the state after a change.
func (s directory) set(change func(n map[string]uint64)) directory {
	next := directory{maps.Clone(s.names), maps.Clone(s.ever)}
	change(next.names)
	for name, ino := range next.names {
		next.ever[binding{name, ino}] = true
	}
	return next
}

// whoKnows stands for the inode of an object that a call of unknown outcome made, until a lookup
// returns the inode.
const whoKnows = 0

// step returns the states that a call with this answer can lead to; none means a wrong answer.
func (s directory) step(c call, out answer, twoMounts bool) []directory {
	a, haveA := s.names[c.a]
	b, haveB := s.names[c.b]
	if out.open {
		// The call did nothing, or had the effect of a success.
		return append(s.strictly(c, answer{ino: whoKnows}, a, b, haveA, haveB), s)
	}
	if twoMounts && haveB {
		if (c.op == "rename" || c.op == "exchange") && out.err == nil && (s.ever[binding{c.a, b}] || b == whoKnows) {
			return append(s.strictly(c, out, a, b, haveA, haveB), s)
		}
		if c.op == "noreplace" && errors.Is(out.err, unix.EEXIST) {
			return []directory{s}
		}
	}
	return s.strictly(c, out, a, b, haveA, haveB)
}

// strictly is the step of one atomic operation.
func (s directory) strictly(c call, out answer, a, b uint64, haveA, haveB bool) []directory {
	when := func(ok bool, next directory) []directory {
		if ok {
			return []directory{next}
		}
		return nil
	}
	fails := func(err error) []directory { return when(errors.Is(out.err, err), s) }
	works := func(change func(n map[string]uint64)) []directory { return when(out.err == nil, s.set(change)) }
	if c.op == "create" {
		if haveA {
			return fails(unix.EEXIST)
		}
		return works(func(n map[string]uint64) { n[c.a] = out.ino })
	}
	if !haveA {
		return fails(unix.ENOENT)
	}
	switch c.op {
	case "lookup":
		if a == whoKnows {
			return works(func(n map[string]uint64) { n[c.a] = out.ino })
		}
		return when(out.err == nil && (out.ino == a || out.ino == whoKnows), s)
	case "unlink":
		return works(func(n map[string]uint64) { delete(n, c.a) })
	case "rename":
		return works(func(n map[string]uint64) { delete(n, c.a); n[c.b] = a })
	case "noreplace":
		if haveB {
			return fails(unix.EEXIST)
		}
		return works(func(n map[string]uint64) { delete(n, c.a); n[c.b] = a })
	case "exchange":
		if !haveB {
			return fails(unix.ENOENT)
		}
		return works(func(n map[string]uint64) { n[c.a], n[c.b] = b, a })
	}
	panic("no such operation: " + c.op)
}

func directoryModel(twoMounts bool) porcupine.Model {
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{directory{map[string]uint64{}, map[binding]bool{}}} },
		Step: func(state, input, output any) []any {
			var next []any
			for _, s := range state.(directory).step(input.(call), output.(answer), twoMounts) {
				next = append(next, s)
			}
			return next
		},
		Equal: func(a, b any) bool {
			x, y := a.(directory), b.(directory)
			return maps.Equal(x.names, y.names) && maps.Equal(x.ever, y.ever)
		},
	}
	return m.ToModel()
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
		return answer{err: errors.Join(err, unix.Close(fd)), ino: st.Ino}
	case "lookup":
		err := unix.Lstat(a, &st)
		return answer{err: err, ino: st.Ino}
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

// definite are the errors of calls that the file system refused without effect.
var definite = []error{unix.ENOENT, unix.EEXIST, unix.EINVAL, unix.ENOTDIR, unix.EISDIR, unix.EPERM, unix.EACCES, unix.ENOSPC, unix.EDQUOT}

// Run crosses creates, renames, exchanges and unlinks of a few names in one directory, given by
// its paths on one mount or two: two threads a path, and at the end a lookup of every name by
// each thread. Open outcomes are allowed if the system below the mounts may fail; otherwise an
// unexpected error explains nothing. observe, if not nil, hears of each call.
func Run(a, b string, seed uint64, mayFail bool, observe func(time.Duration, error)) []porcupine.Operation {
	const perThread = 15
	all := []string{"a", "b", "c", "d"}
	start := time.Now()
	var mu sync.Mutex
	var history []porcupine.Operation
	var opened int
	run := func(client int, dir string, c call) {
		begin := time.Since(start)
		out := do(dir, c)
		end := time.Since(start)
		if observe != nil {
			observe(end-begin, out.err)
		}
		out.open = mayFail && out.err != nil && !slices.ContainsFunc(definite, func(e error) bool { return errors.Is(out.err, e) })
		if out.open && c.op == "lookup" {
			return // says nothing, and did nothing
		}
		mu.Lock()
		defer mu.Unlock()
		op := porcupine.Operation{ClientId: client, Input: c, Call: int64(begin), Output: out, Return: int64(end)}
		if out.open {
			// The call ends after everything else, and its thread is another from here on.
			opened++
			op.ClientId, op.Return = 100+opened, math.MaxInt64
		}
		history = append(history, op)
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

// Check demands that some order of the operations explains all answers. A check that takes longer
// than a minute counts as failed.
func Check(history []porcupine.Operation, twoMounts bool) error {
	result := porcupine.CheckOperationsTimeout(directoryModel(twoMounts), history, time.Minute)
	switch result {
	case porcupine.Ok:
		return nil
	case porcupine.Unknown:
		return fmt.Errorf("no order of these operations was found within a minute:\n%s", tell(history))
	}
	return fmt.Errorf("DATA: no order of these operations explains their answers:\n%s", tell(history))
}

// tell prints a history in the order of its calls.
func tell(history []porcupine.Operation) string {
	slices.SortFunc(history, func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var s strings.Builder
	for _, o := range history {
		c, out := o.Input.(call), o.Output.(answer)
		fmt.Fprintf(&s, "%9d..%9d us, thread %d: %s %s %s -> inode %d, %v%s\n", o.Call/1000, o.Return/1000, o.ClientId, c.op, c.a, c.b, out.ino, out.err, map[bool]string{true: " (open)"}[out.open])
	}
	return s.String()
}
