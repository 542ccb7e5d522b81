package delta

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"penstock.io/penstock/meta"
)

// Dir is the directory of a table's log. Errors are of package meta.
type Dir interface {
	// List returns the names of the files, in any order.
	List(ctx context.Context) ([]string, error)
	// ReadFile reads a whole file. Errors: NotFound.
	ReadFile(ctx context.Context, name string) ([]byte, error)
	// Create makes a file that contains data: the file exists whole or not at all, and is
	// durable when Create returns. Errors: Exists (a file has the name). After another error
	// the file may exist or not.
	Create(ctx context.Context, name string, data []byte) error
	// Replace makes a file like Create, and replaces a file that has the name.
	Replace(ctx context.Context, name string, data []byte) error
	// Remove removes a file. Errors: NotFound.
	Remove(ctx context.Context, name string) error
}

const (
	commitSuffix     = ".json"
	checkpointSuffix = ".checkpoint.parquet"
	lastName         = "_last_checkpoint"
)

func commitName(version int64) string     { return fmt.Sprintf("%020d%s", version, commitSuffix) }
func checkpointName(version int64) string { return fmt.Sprintf("%020d%s", version, checkpointSuffix) }

// versionOf parses the name of a commit or a checkpoint; ok is false for other files.
func versionOf(file, suffix string) (version int64, ok bool) {
	digits, ok := strings.CutSuffix(file, suffix)
	if !ok || len(digits) != 20 {
		return 0, false
	}
	version, err := strconv.ParseInt(digits, 10, 64)
	return version, err == nil && version >= 0
}

// Table is a table's log, opened for commits. Its methods must not be called concurrently;
// any number of programs may have the table open.
type Table struct {
	dir   Dir
	state *State
	// checkpoint is the version of the last known checkpoint, or -1.
	checkpoint int64
	// every is the number of commits between two checkpoints; keep is the number of commits that
	// stay before a checkpoint, for programs that read an older version.
	every, keep int64
	// unsafeNoNewest, a positive control, takes every commit that got a name for the next commit.
	unsafeNoNewest bool
}

// Open reads the log of a table. A directory without commits is a table without a version.
// Errors: Corrupt, Version, and errors of the directory.
func Open(ctx context.Context, dir Dir) (*Table, error) {
	t := &Table{dir: dir, state: NewState(), checkpoint: -1, every: 100, keep: 1000}
	if err := t.load(ctx); err != nil {
		return nil, err
	}
	if err := t.Refresh(ctx); err != nil {
		return nil, err
	}
	return t, nil
}

// last reads the version in _last_checkpoint; -1 if the file is missing or damaged. The file
// only saves readers a list of the directory. Two writers may have replaced the file in the
// wrong order: the file may name an older checkpoint than the newest.
func (t *Table) last(ctx context.Context) (int64, error) {
	b, err := t.dir.ReadFile(ctx, lastName)
	if errors.Is(err, meta.NotFound) {
		return -1, nil
	}
	if err != nil {
		return -1, err
	}
	version, err := decodeLast(b)
	if err != nil {
		return -1, nil
	}
	return version, nil
}

// newest returns the version of the newest checkpoint, or -1.
func (t *Table) newest(ctx context.Context) (int64, error) {
	names, err := t.dir.List(ctx)
	version := int64(-1)
	for _, n := range names {
		if v, ok := versionOf(n, checkpointSuffix); ok {
			version = max(version, v)
		}
	}
	return version, err
}

// load reads the newest checkpoint.
func (t *Table) load(ctx context.Context) error {
	version, err := t.newest(ctx)
	if err != nil || version < 0 {
		return err
	}
	b, err := t.dir.ReadFile(ctx, checkpointName(version))
	if errors.Is(err, meta.NotFound) {
		// Other writers may have removed the checkpoint meanwhile, but only after making a
		// newer checkpoint.
		if newer, nerr := t.newest(ctx); nerr != nil || newer > version {
			if nerr != nil {
				return nerr
			}
			return t.load(ctx)
		}
	}
	if err != nil {
		return err
	}
	actions, err := DecodeCheckpoint(b)
	if err != nil {
		return err
	}
	state := NewState()
	if err := state.apply(actions); err != nil {
		return err
	}
	state.Version = version
	t.state, t.checkpoint = state, version
	return nil
}

// State returns the version that the table had at the last Open, Refresh or Commit. The caller
// must not change the state.
func (t *Table) State() *State { return t.state }

// Refresh reads the commits of other writers. Errors: Corrupt, Version, and errors of the
// directory.
func (t *Table) Refresh(ctx context.Context) error {
	for {
		next := t.state.Version + 1
		b, err := t.dir.ReadFile(ctx, commitName(next))
		if errors.Is(err, meta.NotFound) {
			// A checkpoint may have a later version: commits long before a checkpoint are
			// removed.
			last, err := t.last(ctx)
			if err != nil || last <= t.state.Version {
				return err
			}
			if err := t.load(ctx); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if err := t.applyBytes(next, b); err != nil {
			return err
		}
	}
}

func (t *Table) applyBytes(version int64, b []byte) error {
	actions, err := Decode(b)
	if err != nil {
		return meta.E("read commit", meta.KindOf(err), commitName(version), err)
	}
	return t.state.Apply(version, actions)
}

// Commit commits the actions that decide returns for the newest version of the table. When
// another writer commits first, Commit reads the other commit and calls decide again. If decide
// returns no actions, the table stays as it is. Errors: errors of decide, and errors of the
// directory. After an error of the directory the actions may have been committed or not:
// Refresh reads the commit if the commit exists.
func (t *Table) Commit(ctx context.Context, decide func(*State) ([]Action, error)) error {
	for {
		actions, err := decide(t.state)
		if err != nil || len(actions) == 0 {
			return err
		}
		version, b := t.state.Version+1, Encode(actions)
		err = t.dir.Create(ctx, commitName(version), b)
		if err != nil && !errors.Is(err, meta.Exists) {
			return err
		}
		if err == nil {
			// A writer that slept for very many commits may find the name of its commit free
			// again, because clean has removed the commit with the name. The new file is then
			// no commit, and clean removes the file. Or the writer slept after Create, and the
			// file was a commit: in the new state decide sees whether its actions are
			// committed.
			newest, err := t.newest(ctx)
			if err != nil {
				return err
			}
			if version >= newest-t.keep || t.unsafeNoNewest {
				return t.applyBytes(version, b)
			}
			if err := t.load(ctx); err != nil {
				return err
			}
		}
		if err := t.Refresh(ctx); err != nil {
			return err
		}
		if t.state.Version < version {
			return meta.E("commit", meta.IO, commitName(version), errors.New("the commit exists, and can't be read"))
		}
	}
}

// Checkpoint writes a checkpoint if many commits came after the last one, and then removes the
// oldest commits. now is in ms since 1970; the checkpoint forgets files that were removed from
// the table more than keepRemoved ms ago. Checkpoint is safe to repeat after an error.
func (t *Table) Checkpoint(ctx context.Context, now, keepRemoved int64) error {
	version := t.state.Version
	if version-t.checkpoint < t.every {
		return nil
	}
	actions := t.state.Actions(now - keepRemoved)
	b, err := EncodeCheckpoint(actions)
	if err != nil {
		return err
	}
	if err := t.dir.Replace(ctx, checkpointName(version), b); err != nil {
		return err
	}
	if last, err := t.last(ctx); err != nil {
		return err
	} else if last < version {
		if err := t.dir.Replace(ctx, lastName, encodeLast(version, len(actions))); err != nil {
			return err
		}
	}
	t.checkpoint = version
	for p, r := range t.state.Removed {
		if r.Deleted < now-keepRemoved {
			delete(t.state.Removed, p)
		}
	}
	return t.clean(ctx)
}

// clean removes commits and checkpoints long before the last checkpoint, the oldest first: so
// the remaining commits have no gap.
func (t *Table) clean(ctx context.Context) error {
	before := t.checkpoint - t.keep
	if before <= 0 {
		return nil
	}
	names, err := t.dir.List(ctx)
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		v, ok := versionOf(n, commitSuffix)
		if !ok {
			v, ok = versionOf(n, checkpointSuffix)
		}
		if !ok || v >= before {
			continue
		}
		if err := t.dir.Remove(ctx, n); err != nil && !errors.Is(err, meta.NotFound) {
			return err
		}
	}
	return nil
}
