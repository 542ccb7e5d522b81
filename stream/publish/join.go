package publish

import (
	"cmp"
	"context"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/table/delta"
)

// Neighbouring files of the same level are joined when there are joinCount of them, unless they
// are large together. A record is so written about log8(n) times, and a partition has at most
// a few small files of each level.
const (
	joinCount = 8
	joinBytes = 64 << 20
)

// spans returns the files of a partition in the table, in the order of their records.
func spans(s *delta.State, partition int) (all []span) {
	for _, a := range s.Files {
		if f, ok := spanOf(a); ok && f.partition == partition {
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(a, b span) int { return cmp.Compare(a.first, b.first) })
	return all
}

// plan returns neighbouring files that should be joined; nil if there are none. all is in the
// order of the records.
func plan(all []span) []span {
	for i := 0; i+joinCount <= len(all); i++ {
		run := all[i : i+joinCount]
		size, same := int64(0), true
		for _, f := range run {
			size += f.size
			same = same && f.level == run[0].level
		}
		if same && size <= joinBytes {
			return run
		}
	}
	return nil
}

// join joins small files of a partition, if there are enough.
func (t *Table) join(ctx context.Context, partition int) error {
	for {
		run := plan(spans(t.table.State(), partition))
		if run == nil {
			return nil
		}
		t.clean[partition] = false
		if err := t.joinRun(ctx, run); err != nil {
			return err
		}
	}
}

func (t *Table) joinRun(ctx context.Context, run []span) error {
	out := span{partition: run[0].partition, first: run[0].first, next: run[len(run)-1].next, level: run[0].level + 1}
	var parts [][]byte
	for _, f := range run {
		p, err := t.files.ReadFile(ctx, f.path)
		if err != nil {
			return err
		}
		parts = append(parts, p)
		out.rows += f.rows
	}
	p, err := joinFiles(t.columns, parts)
	if err != nil {
		return meta.E("join files", meta.Corrupt, t.cfg.Name, err)
	}
	fence := t.table.State().Done(sweepApp)
	out.path, out.size = dataDir(out.partition)+out.name()+parquetSuffix, int64(len(p))
	if err := t.files.Create(ctx, out.path, p); err != nil {
		return err
	}
	now, done := t.cfg.Now().UnixMilli(), false
	err = t.table.Commit(ctx, func(s *delta.State) ([]delta.Action, error) {
		done = s.Done(sweepApp) == fence
		all := t.begin(s, now, "OPTIMIZE")
		for _, f := range run {
			done = done && s.Files[f.path] != nil
			all = append(all, delta.Action{Remove: &delta.Remove{Path: f.path, Deleted: now}})
		}
		if !done {
			return nil, nil // another publisher was here; the next round decides again
		}
		return append(all, out.add(now, false)), nil
	})
	if err == nil && !done {
		err = t.files.Remove(ctx, out.path)
	}
	return err
}
