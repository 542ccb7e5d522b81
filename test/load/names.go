package load

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// namer creates, renames and removes names. The names are symbolic links,
// whose targets tell which operation made them: a name and its contents in one
// atomic step.
//
// After a crash the directory is as it was after some prefix of the operations,
// at least as long as what the last fsync of the directory covered.
type namer struct {
	dir    string
	rand   *rand.Rand
	over   func() bool
	meter  *Meter
	count  uint64
	start  map[string]string // before ops
	now    map[string]string // after ops, the last one included
	ops    []nameOp
	synced int // ops that are durable
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
	// Known before it is tried: if the mount dies, its outcome is open.
	n.ops = append(n.ops, op)
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
	found := map[string]string{}
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(n.dir, e.Name()))
		errs = append(errs, err)
		found[e.Name()] = target
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	state := maps.Clone(n.start)
	if state == nil {
		state = map[string]string{}
	}
	matches := -1
	for k := 0; ; k++ {
		if k >= n.synced && maps.Equal(state, found) {
			matches = k
			break
		}
		if k == len(n.ops) {
			break
		}
		n.ops[k].apply(state)
	}
	if matches < 0 {
		return violated("no prefix of the %d operations, at least the %d synced ones, explains the directory; against the state after all of them: %s", len(n.ops), n.synced, difference(state, found))
	}
	n.start, n.now, n.ops, n.synced = found, maps.Clone(found), nil, 0
	return nil
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
