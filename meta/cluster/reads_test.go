package cluster

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// counted counts requests to etcd and the bytes of the answers.
type counted struct {
	clientv3.KV
	requests, bytes *atomic.Int64
}

func countedKV(cli *clientv3.Client) (*clientv3.Client, *counted) {
	c := *cli
	k := &counted{c.KV, new(atomic.Int64), new(atomic.Int64)}
	c.KV = k
	return &c, k
}

func (k *counted) book(n int, err error) {
	if k.requests.Add(1); err == nil {
		k.bytes.Add(int64(n))
	}
}

// since returns the counts since the last call.
func (k *counted) since() (requests, bytes int64) { return k.requests.Swap(0), k.bytes.Swap(0) }

func (k *counted) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	r, err := k.KV.Get(ctx, key, opts...)
	k.book((*pb.RangeResponse)(r).Size(), err)
	return r, err
}

func (k *counted) Put(ctx context.Context, key, val string, opts ...clientv3.OpOption) (*clientv3.PutResponse, error) {
	r, err := k.KV.Put(ctx, key, val, opts...)
	k.book((*pb.PutResponse)(r).Size(), err)
	return r, err
}

func (k *counted) Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	r, err := k.KV.Delete(ctx, key, opts...)
	k.book((*pb.DeleteRangeResponse)(r).Size(), err)
	return r, err
}

func (k *counted) Txn(ctx context.Context) clientv3.Txn { return &countedTxn{k.KV.Txn(ctx), k} }

type countedTxn struct {
	clientv3.Txn
	k *counted
}

func (t *countedTxn) If(l ...clientv3.Cmp) clientv3.Txn  { t.Txn = t.Txn.If(l...); return t }
func (t *countedTxn) Then(l ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Then(l...); return t }
func (t *countedTxn) Else(l ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(l...); return t }

func (t *countedTxn) Commit() (*clientv3.TxnResponse, error) {
	r, err := t.Txn.Commit()
	t.k.book((*pb.TxnResponse)(r).Size(), err)
	return r, err
}

// watching returns a cluster that reads views only on request.
func (c *Cluster) watching(cli *clientv3.Client) *Cluster {
	return &Cluster{cli: cli, prefix: c.prefix, log: c.log, changed: make(chan struct{})}
}

// goneNow deletes keys, and returns the watch's events about the deletions.
func goneNow(t *testing.T, cli *clientv3.Client, keys ...string) (l []*clientv3.Event) {
	t.Helper()
	for _, key := range keys {
		r, err := cli.Delete(t.Context(), key)
		if err != nil || r.Deleted != 1 {
			t.Fatal(key, err)
		}
		l = append(l, &clientv3.Event{Type: clientv3.EventTypeDelete, Kv: &mvccpb.KeyValue{Key: []byte(key), ModRevision: r.Header.Revision}})
	}
	return l
}

// TestViewAfterDeletions: a view after a deletion does not read the other keys again: the
// watch names the deleted keys. The same holds for records that were, or are now, left
// out of the view. If a watch misses the deletion, one part is read anew.
func TestViewAfterDeletions(t *testing.T) {
	t.Parallel()
	plain := client(t)
	c := join(t, plain)
	ctx := t.Context()
	const volumes, clients = 300, 50
	for i := range volumes {
		if _, err := c.CreateVolume(ctx, fmt.Sprint("v", i), meta.Policy{Replicas: 1}, 0); err != nil {
			t.Fatal(err)
		}
	}
	for i := range clients {
		if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: fmt.Sprint("n", i)}, false); err != nil {
			t.Fatal(err)
		}
	}
	cli, count := countedKV(plain)
	w := c.watching(cli)
	read := func(what string, most int64, heard []*clientv3.Event) *View {
		t.Helper()
		w.noteGone(heard)
		count.since()
		grown, err := w.Refresh(ctx)
		if err != nil {
			t.Fatal(err)
		}
		requests, bytes := count.since()
		t.Logf("%s: %d requests, %d bytes", what, requests, bytes)
		if bytes > most {
			t.Errorf("%s: %d bytes were read, at most %d were expected", what, bytes, most)
		}
		fresh, err := c.watching(plain).Refresh(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if g, f := fmt.Sprintf("%+v", grown), fmt.Sprintf("%+v", fresh); g != f {
			t.Fatalf("DATA: %s:\n%s\n%s", what, g, f)
		}
		return grown
	}
	const few = 3000
	all := read("all", 1<<20, nil)
	row := func(i int) string { return c.rowKey(all.Volumes[i].ID) }
	read("a volume went", few, goneNow(t, plain, row(3)))
	read("a client as well, and two volumes", few, goneNow(t, plain, row(4), c.memberKey(peer.Client, "n7"), row(5)))
	put := func(key, value string) {
		t.Helper()
		if _, err := plain.Put(ctx, key, value); err != nil {
			t.Fatal(err)
		}
	}
	const newer = `{"v":99}`
	put(row(6), newer)
	put(row(7), newer)
	read("a newer program has two", few, nil)
	read("one of them went, and another volume", few, goneNow(t, plain, row(6), row(8)))
	put(row(7), encode(all.Volumes[7]))
	read("this one has the other again", few, nil)
	heard := goneNow(t, plain, row(9), row(10))
	put(row(9), encode(all.Volumes[9]))
	read("one that went came again", few, heard)
	// A deletion after the view's revision is no part of the view, even if the watch was
	// faster.
	heard = goneNow(t, plain, row(11))
	heard[0].Kv.ModRevision += 5
	read("a watch says nothing of this one", 100<<10, heard)
}

// TestGrantsForUsesAreFewRequests: the grant for a node's pods takes three requests to
// etcd, with the request for the revision of the call, and the revocation takes two.
func TestGrantsForUsesAreFewRequests(t *testing.T) {
	t.Parallel()
	plain := client(t)
	c := join(t, plain)
	ctx := t.Context()
	want := map[meta.VolumeID]Rights{}
	for i := range 3 {
		v, err := c.CreateVolume(ctx, fmt.Sprint("v", i), meta.Policy{}, 0)
		if err != nil {
			t.Fatal(err)
		}
		want[v.ID] = WriteRights
	}
	if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: "a"}, false); err != nil {
		t.Fatal(err)
	}
	cli, count := countedKV(plain)
	w := c.watching(cli)
	asOf, err := w.Revision(ctx)
	if err != nil {
		t.Fatal(err)
	}
	given, err := w.GrantFor(ctx, ForUse{Who: "client/a", Use: "u", Rights: want, AsOf: asOf}, 7)
	if n, _ := count.since(); err != nil || len(given) != len(want) || n > 3 {
		t.Errorf("%d grants in %d requests, %v", len(given), n, err)
	}
	all, err := c.Grants(ctx)
	if err != nil || len(all) != len(want) {
		t.Fatal(all, err)
	}
	for i, g := range all {
		if g.ID != uint64(i+1) || g.Who != "client/a" || g.For != "u" || g.Rights != WriteRights || g.Created != 7 {
			t.Errorf("%+v", g)
		}
	}
	if asOf, err = w.Revision(ctx); err != nil {
		t.Fatal(err)
	}
	ended, err := w.EndUse(ctx, "client/a", "u", asOf)
	if n, _ := count.since(); err != nil || ended != int64(len(want)) || n > 2 {
		t.Errorf("%d grants ended in %d requests, %v", ended, n, err)
	}
}
