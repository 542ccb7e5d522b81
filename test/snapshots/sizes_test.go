package snapshots

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
	"penstock.io/penstock/test/operator"
)

var (
	sizes   = flag.String("sizes", "1000,5000", "numbers of files at which snapshots and clones are timed, ascending")
	changes = flag.String("changes", "100", "numbers of new files at which comparisons are timed, ascending")
)

// numbers parses a list of ascending numbers.
func numbers(t *testing.T, list string) (l []int) {
	t.Helper()
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || len(l) > 0 && n <= l[len(l)-1] {
			t.Fatalf("%s: ascending numbers, %v", list, err)
		}
		l = append(l, n)
	}
	return l
}

// TestSizes times, in a whole system, the steps that must not grow with a volume: taking
// a snapshot and making a clone; and a comparison, which grows with the change. The best
// of three runs counts. The test also counts the journaled bytes of a snapshot and a
// clone, which must be equal for all sizes. Further counts: the reads of a comparison in
// meta/namespace (TestDiffReadsInProportion), the work of a clone's store in meta/state
// (TestCopyIsFlat).
func TestSizes(t *testing.T) {
	s := up(t)
	ctx := t.Context()
	sess, err := client.Dial(ctx, client.Config{Addrs: []string{s.Meta.Addr}, Role: wire.RoleClient, Name: "sizes", Handler: quiet{}})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(context.Background())
	o := operator.New(t, s.Meta.Addr, nil)
	v, err := o.CreateVolume(ctx, "files", meta.Policy{Replicas: 1}, meta.VolumeWords{})
	if err != nil {
		t.Fatal(err)
	}
	have, taken := 0, 0
	more := func(n int) {
		t.Helper()
		for ; n > 0; n -= 1000 {
			var ops []client.BatchOp
			for range min(n, 1000) {
				ops = append(ops, client.BatchOp{Op: &meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("f", have), Mode: meta.TypeRegular | 0o644, Excl: true}})
				have++
			}
			_, errs, err := sess.DoBatch(ctx, v.ID, client.AnyEpoch, ops)
			for _, e := range append(errs, err) {
				if e != nil {
					t.Fatal(e)
				}
			}
		}
		if err := sess.Sync(ctx, v.ID); err != nil {
			t.Fatal(err)
		}
	}
	// best is the shortest of three.
	best := func(do func(name string) error) time.Duration {
		t.Helper()
		least := time.Duration(1<<63 - 1)
		for range 3 {
			taken++
			name := fmt.Sprint("x", taken)
			began := time.Now()
			if err := do(name); err != nil {
				t.Fatal(err)
			}
			least = min(least, time.Since(began))
		}
		return least
	}
	// count returns the bytes journaled so far, also for work in the background. An entry
	// is counted before the next entry is written.
	count := func() uint64 {
		t.Helper()
		if _, err := sess.Do(ctx, v.ID, meta.OpID{}, &meta.SetAttr{Ino: meta.RootIno, Mask: meta.SetMtimeNow}, meta.LeaseNone); err != nil {
			t.Fatal(err)
		}
		if err := sess.Sync(ctx, v.ID); err != nil {
			t.Fatal(err)
		}
		return s.Meta.Server.Counters().JournalBytes
	}
	journaled := func(do func()) uint64 {
		before := count()
		do()
		return count() - before
	}
	for _, n := range numbers(t, *sizes) {
		if n <= have {
			t.Fatalf("-sizes %s: %d files are there already", *sizes, have)
		}
		add := n - have
		files := journaled(func() { more(add) }) / uint64(add) * uint64(n)
		of := fmt.Sprint("of ", n)
		var snapshot, cloned, opened time.Duration
		var made meta.VolumeID
		clone := func(name string) error {
			c, err := o.Clone(ctx, v.ID, of, name)
			made = c.ID
			return err
		}
		bytes := journaled(func() {
			snapshot = best(func(name string) error { _, err := o.TakeSnapshot(ctx, v.ID, name); return err })
			if _, err := o.TakeSnapshot(ctx, v.ID, of); err != nil {
				t.Fatal(err)
			}
			cloned = best(clone)
			opened = best(func(name string) error {
				if err := clone(name); err != nil {
					return err
				}
				_, err := sess.Do(ctx, made, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "f0"}, meta.LeaseNone)
				return err
			})
		})
		t.Logf("%8d files: snapshot %v, clone %v, clone and its first lookup %v; %d bytes were journaled for all", n,
			snapshot.Round(10*time.Microsecond), cloned.Round(10*time.Microsecond), opened.Round(10*time.Microsecond), bytes)
		// Four snapshots and six clones, some hundred bytes each.
		if bytes > 16<<10 || files < 10*bytes {
			t.Errorf("%d bytes were journaled for snapshots and clones of %d files, which took %d", bytes, n, files)
		}
		added := 0
		for _, changed := range numbers(t, *changes) {
			more(changed - added)
			added = changed
			took := best(func(string) error {
				found := 0
				err := o.DiffSnapshots(ctx, v.ID, of, "", func(meta.Change) error { found++; return nil })
				// The directory of the changed files has other times, too.
				if err == nil && (found < changed || found > changed+1) {
					err = fmt.Errorf("%d changes were found of %d", found, changed)
				}
				return err
			})
			t.Logf("%8d files: comparison with %d new files %v", n, changed, took.Round(10*time.Microsecond))
		}
	}
}
