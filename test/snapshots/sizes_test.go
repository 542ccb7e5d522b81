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
)

var sizes = flag.String("sizes", "1000,5000", "numbers of files at which snapshots and clones are timed, ascending")

// TestSizes times, in a whole system, what must not grow with a volume: taking a
// snapshot and making a clone; and a comparison, which grows with the change. The
// best of three counts.
func TestSizes(t *testing.T) {
	s := up(t)
	ctx := t.Context()
	sess, err := client.Dial(ctx, client.Config{Addrs: []string{s.Meta.Addr}, Role: wire.RoleClient, Name: "sizes", Handler: quiet{}})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(context.Background())
	v, err := sess.CreateVolume(ctx, "files", meta.Policy{Replicas: 1}, wire.VolumeWords{})
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
	type row struct{ snapshot, clone, opened, diff time.Duration }
	var rows []row
	const changed = 100
	for _, text := range strings.Split(*sizes, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < have+changed {
			t.Fatalf("sizes %s: ascending numbers, %v", *sizes, err)
		}
		more(n - changed - have)
		var r row
		r.snapshot = best(func(name string) error { _, err := sess.TakeSnapshot(ctx, v.ID, name); return err })
		if _, err := sess.TakeSnapshot(ctx, v.ID, "of "+text); err != nil {
			t.Fatal(err)
		}
		var of meta.VolumeID
		clone := func(name string) error {
			c, err := sess.Clone(ctx, v.ID, "of "+text, name)
			of = c.ID
			return err
		}
		r.clone = best(clone)
		r.opened = best(func(name string) error {
			if err := clone(name); err != nil {
				return err
			}
			_, err := sess.Do(ctx, of, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "f0"}, meta.LeaseNone)
			return err
		})
		more(changed)
		r.diff = best(func(string) error {
			found := 0
			err := sess.DiffSnapshots(ctx, v.ID, "of "+text, "", func(meta.Change) error { found++; return nil })
			// The directory that they are in has other times.
			if err == nil && (found < changed || found > changed+1) {
				err = fmt.Errorf("%d changes were found of %d", found, changed)
			}
			return err
		})
		t.Logf("%8d files: snapshot %v, clone %v, clone and its first lookup %v, comparison with %d new files %v", n,
			r.snapshot.Round(10*time.Microsecond), r.clone.Round(10*time.Microsecond), r.opened.Round(10*time.Microsecond), changed, r.diff.Round(10*time.Microsecond))
		rows = append(rows, r)
	}
	first, last := rows[0], rows[len(rows)-1]
	for _, c := range []struct {
		what        string
		small, much time.Duration
	}{{"a snapshot", first.snapshot, last.snapshot}, {"a clone", first.clone, last.clone}, {"a comparison", first.diff, last.diff}} {
		if c.much > 10*c.small+2*time.Second {
			t.Errorf("%s takes %v with the most files, %v with the fewest (%s)", c.what, c.much, c.small, *sizes)
		}
	}
}
