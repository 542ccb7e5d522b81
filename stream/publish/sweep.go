package publish

import (
	"context"
	"errors"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/table/delta"
)

// sweepApp is the application of the Delta log that numbers the sweeps. A sweep removes files
// that a publisher wrote and never committed. The publisher may still live, so the sweep is
// committed first, and a publisher commits no file that was written before a sweep.
const sweepApp = "sweep"

// sweepDue reports whether a partition may have files for sweep, and the last sweep was a while
// ago.
func (t *Table) sweepDue(partition int) bool {
	return !t.clean[partition] && t.cfg.Now().Sub(t.swept[partition]) >= t.cfg.KeepJoined/2
}

// sweep removes files of a partition that are in the table no more, or never were, when they are
// old.
func (t *Table) sweep(ctx context.Context, partition int) error {
	if !t.sweepDue(partition) {
		return nil
	}
	now := t.cfg.Now()
	dir := dataDir(partition)
	list, err := t.files.List(ctx, dir)
	if err != nil {
		return err
	}
	old := now.Add(-t.cfg.KeepJoined)
	var gone []string
	orphans, left := false, false
	s := t.table.State()
	for _, f := range list {
		p := dir + f.Name
		if s.Files[p] != nil {
			continue
		}
		if removed := s.Removed[p]; f.Created.After(old) || removed != nil && removed.Deleted > old.UnixMilli() {
			left = true
			continue
		}
		gone, orphans = append(gone, p), orphans || s.Removed[p] == nil
	}
	if orphans {
		err := t.table.Commit(ctx, func(s *delta.State) ([]delta.Action, error) {
			gone = slices.DeleteFunc(gone, func(p string) bool { return s.Files[p] != nil })
			return append(t.begin(s, now.UnixMilli(), "VACUUM"), delta.Action{Txn: &delta.Txn{App: sweepApp, Version: s.Done(sweepApp) + 1, Updated: now.UnixMilli()}}), nil
		})
		if err != nil {
			return err
		}
	}
	for _, p := range gone {
		if err := t.files.Remove(ctx, p); err != nil && !errors.Is(err, meta.NotFound) {
			return err
		}
	}
	if err := t.sweepLog(ctx); err != nil {
		return err
	}
	t.swept[partition], t.clean[partition] = now, !left
	return nil
}

// sweepLog removes unfinished files of the Delta log when they are old.
func (t *Table) sweepLog(ctx context.Context) error {
	list, err := t.files.List(ctx, logDir)
	if err != nil {
		return err
	}
	for _, f := range list {
		if strings.HasSuffix(f.Name, Unfinished) && t.cfg.Now().Sub(f.Created) > t.cfg.KeepJoined {
			if err := t.files.Remove(ctx, logDir+f.Name); err != nil && !errors.Is(err, meta.NotFound) {
				return err
			}
		}
	}
	return nil
}

// Unfinished ends the names that Files gives to files while they are written.
const Unfinished = ".new"
