package load

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
)

// namer creates, renames and removes names. The names are symbolic links with targets
// that name the operation: so one atomic step makes a name and its contents.
//
// After a crash, the directory is in the state after some prefix of the operations, which
// includes all operations that the last fsync of the directory covered.
type namer struct {
	dir    string
	rand   *rand.Rand
	over   func() bool
	meter  *Meter
	count  uint64
	start  map[string]string // before ops
	now    map[string]string // after all of ops
	ops    []nameOp
	synced int // number of durable ops

	mu   sync.Mutex
	told names
}

// names says how far a namer is. Its numbers count all operations, also the operations
// before start.
type names struct {
	progress
	base  uint64 // of the first in ops
	start map[string]string
	ops   []nameOp
}

// tell notes that the first done of ops were acknowledged.
func (n *namer) tell(done int) {
	t := n.told
	t.start, t.ops = n.start, n.ops
	t.begun, t.done, t.synced = t.base+uint64(len(n.ops)), t.base+uint64(done), t.base+uint64(n.synced)
	n.is(t)
}

func (n *namer) is(t names) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.told = t
}

func (n *namer) progress() names {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.told
}

func (n *namer) Freeze() func(bool) Check {
	before := n.progress()
	return func(whole bool) Check {
		after := n.progress()
		if before.past != after.past {
			return nil
		}
		return func(dir string) error {
			_, _, err := after.explain(dir, before.least(n.progress().progress, whole))
			return err
		}
	}
}

type nameOp struct {
	kind     string // create, rename, remove
	name, to string // to: target of create, new name of rename
}

const nameCount = 40

func (n *namer) Step() error {
	if n.now == nil {
		n.start, n.now = map[string]string{}, map[string]string{}
	}
	name := func() string { return fmt.Sprintf("name-%02d", n.rand.IntN(nameCount)) }
	op := nameOp{name: name()}
	_, exists := n.now[op.name]
	switch {
	case !exists:
		n.count++
		op.kind, op.to = "create", fmt.Sprintf("operation-%d", n.count)
	case n.rand.IntN(3) == 0:
		op.kind = "remove"
	default:
		op.kind, op.to = "rename", name()
		if op.to == op.name {
			return nil
		}
	}
	// The operation is noted before it is tried: if the mount dies, its outcome is
	// unknown.
	n.ops = append(n.ops, op)
	n.tell(len(n.ops) - 1)
	if err := n.meter.Time(Name, 0, func() error { return n.do(op) }); err != nil {
		return err
	}
	op.apply(n.now)
	if n.rand.IntN(20) == 0 {
		if err := n.meter.Time(Sync, 0, n.Settle); err != nil {
			return err
		}
		if !n.over() {
			n.synced = len(n.ops)
		}
	}
	n.tell(len(n.ops))
	return nil
}

func (n *namer) do(op nameOp) error {
	path := filepath.Join(n.dir, op.name)
	switch op.kind {
	case "create":
		return os.Symlink(op.to, path)
	case "rename":
		return os.Rename(path, filepath.Join(n.dir, op.to))
	}
	return os.Remove(path)
}

func (op nameOp) apply(to map[string]string) {
	switch op.kind {
	case "create":
		to[op.name] = op.to
	case "rename":
		to[op.to] = to[op.name]
		delete(to, op.name)
	case "remove":
		delete(to, op.name)
	}
}

func (n *namer) Close() {}

func (n *namer) Settle() error { return SyncDir(n.dir) }

func (n *namer) Verify() error {
	t := n.told
	t.start, t.ops = n.start, n.ops
	found, last, err := t.explain(n.dir, t.base+uint64(n.synced))
	if err != nil {
		return err
	}
	n.start, n.now, n.ops, n.synced = found, maps.Clone(found), nil, 0
	// The numbers of operations that were not done are not used again.
	begun := t.base + uint64(len(t.ops))
	t.progress = t.verified(last)
	n.is(names{progress{t.past, t.lost, begun, begun, begun}, begun, n.start, nil})
	return nil
}

// explain reads a directory and finds the longest prefix of the operations, of least or
// more, that explains the names.
func (t *names) explain(dir string, least uint64) (found map[string]string, last uint64, err error) {
	found = map[string]string{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, 0, err
	}
	var errs []error
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		errs = append(errs, err)
		found[e.Name()] = target
	}
	if err := errors.Join(errs...); err != nil {
		return nil, 0, err
	}
	state := maps.Clone(t.start)
	if state == nil {
		state = map[string]string{}
	}
	explained := false
	for k := t.base; ; k++ {
		if k >= least && maps.Equal(state, found) {
			last, explained = k, true
		}
		if k == t.base+uint64(len(t.ops)) {
			break
		}
		t.ops[k-t.base].apply(state)
	}
	if !explained {
		return nil, 0, violated("no prefix of the %d operations, at least %d of them, explains the directory; against the state after all of them: %s", len(t.ops), least-t.base, difference(state, found))
	}
	return found, last, nil
}

// difference tells in words how two directories differ.
func difference(want, got map[string]string) string {
	s := ""
	for name, target := range want {
		if got[name] != target {
			s += fmt.Sprintf(" %s is %q, want %q;", name, got[name], target)
		}
	}
	for name, target := range got {
		if _, ok := want[name]; !ok {
			s += fmt.Sprintf(" %s is %q, should be absent;", name, target)
		}
	}
	return s
}
