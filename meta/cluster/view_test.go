package cluster

import (
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// TestNewerRecordsAreNoneThatWent: a record of a newer version is left out of a view, and
// does not count as a record deleted at the same time.
func TestNewerRecordsAreNoneThatWent(t *testing.T) {
	t.Parallel()
	cli := client(t)
	c := join(t, cli)
	ctx := t.Context()
	old, err := c.CreateVolume(ctx, "old", meta.Policy{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	shows := func(what string, want ...string) {
		t.Helper()
		v, err := c.Refresh(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ok := len(v.Volumes) == len(want)
		for i := range min(len(want), len(v.Volumes)) {
			ok = ok && v.Volumes[i].Name == want[i]
		}
		if !ok {
			t.Fatalf("%s: %+v, want %q", what, v.Volumes, want)
		}
	}
	shows("at first", "old")
	const newer = `{"v":99}`
	if _, err := cli.Txn(ctx).Then(clientv3.OpDelete(c.rowKey(old.ID)), clientv3.OpPut(c.rowKey(77), newer)).Commit(); err != nil {
		t.Fatal(err)
	}
	shows("one went and a newer one came")
	if _, err := c.CreateVolume(ctx, "next", meta.Policy{}, 0); err != nil {
		t.Fatal(err)
	}
	shows("beside the newer one", "next")
	// A known record is written by a newer program, and then by this version again.
	last, err := c.VolumeByName(ctx, "next")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cli.Put(ctx, c.rowKey(last.ID), newer); err != nil {
		t.Fatal(err)
	}
	shows("a newer program has the last one")
	if _, err := cli.Put(ctx, c.rowKey(last.ID), encode(last)); err != nil {
		t.Fatal(err)
	}
	shows("this one has it again", "next")
	if _, err := cli.Delete(ctx, c.rowKey(77)); err != nil {
		t.Fatal(err)
	}
	shows("the newer one went", "next")
}
