package cluster

import (
	"fmt"
	"maps"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

func TestLabels(t *testing.T) {
	cli := client(t)
	c, ctx := join(t, cli), t.Context()
	labelled := func(l map[string]string) func(*Volume) { return func(v *Volume) { v.Labels = l } }
	var ids []meta.VolumeID
	for i, l := range []map[string]string{nil, {"team": "vision"}, {"team": "speech", "draft": ""}} {
		v, err := c.CreateVolume(ctx, fmt.Sprint("v", i), meta.Policy{Replicas: 1}, 1, labelled(l))
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, v.ID)
	}
	check := func(v meta.VolumeID, want map[string]string) {
		t.Helper()
		if got, err := c.Labels(ctx, v, v); err != nil || got[v].Err != nil || !maps.Equal(got[v].Set, want) || len(got) > 1 {
			t.Fatalf("%v, %v; want %v", got, err, want)
		}
	}
	check(ids[0], nil)
	check(ids[1], map[string]string{"team": "vision"})
	if got, err := c.Labels(ctx, 1, meta.MaxVolume); err != nil || len(got) != 2 || got[ids[2]].Set["team"] != "speech" {
		t.Fatal(got, err)
	}
	if got, err := c.Labels(ctx, ids[0], ids[1]); err != nil || len(got) != 1 {
		t.Fatal(got, err)
	}
	one := "1"
	if err := c.ChangeLabels(ctx, ids[2], map[string]*string{"draft": nil, "run": &one, "nothing": nil}); err != nil {
		t.Fatal(err)
	}
	want2 := map[string]string{"team": "speech", "run": "1"}
	check(ids[2], want2)
	// A change of the row leaves the labels unchanged.
	if _, err := c.UpdateVolume(ctx, ids[2], func(v *Volume) error { v.Keep = "1d:daily"; v.Labels = nil; return nil }); err != nil {
		t.Fatal(err)
	}
	check(ids[2], want2)
	want(t, c.ChangeLabels(ctx, 99, map[string]*string{"a": &one}), meta.NoSuchVolume)
	many := map[string]*string{}
	for i := range meta.MaxLabels {
		many[fmt.Sprint("k", i)] = &one
	}
	want(t, c.ChangeLabels(ctx, ids[2], many), meta.ResourceExceeded)
	check(ids[2], want2)

	// Each of many at once comes through.
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			if err := c.ChangeLabels(ctx, ids[0], map[string]*string{fmt.Sprint("l", i): &one}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, err := c.Labels(ctx, ids[0], ids[0]); err != nil || len(got[ids[0]].Set) != 20 {
		t.Fatal(got, err)
	}

	// A clone begins with its origin's labels, and the labels of a deleted volume go.
	v, err := c.CreateClone(ctx, "clone", meta.Policy{Replicas: 1}, 1, Origin{Volume: ids[2], At: 1})
	if err != nil {
		t.Fatal(err)
	}
	check(v.ID, want2)
	if err := c.DeleteVolume(ctx, v.ID); err != nil {
		t.Fatal(err)
	}
	check(v.ID, nil)
	for k := range want2 {
		if err := c.ChangeLabels(ctx, ids[2], map[string]*string{k: nil}); err != nil {
			t.Fatal(err)
		}
	}
	check(ids[2], nil)
	r, err := cli.Get(ctx, c.prefix+"/labels/", clientv3.WithPrefix())
	if err != nil || len(r.Kvs) != 2 {
		t.Fatalf("records of volumes without labels: %v, %v", r, err)
	}
	// A record of a newer version is not guessed at.
	for record, kind := range map[string]meta.Kind{fmt.Sprintf(`{"v":2,"volume":%d}`, ids[2]): meta.Version, `{"v":1,"volume":99,"labels":{"a":"b"}}`: meta.Corrupt, `{`: meta.Corrupt} {
		if _, err := cli.Put(ctx, c.labelsKey(ids[2]), record); err != nil {
			t.Fatal(err)
		}
		got, err := c.Labels(ctx, 1, meta.MaxVolume)
		if err != nil || len(got) != 3 || len(got[ids[0]].Set) != 20 || got[ids[2]].Set != nil {
			t.Fatal(got, err)
		}
		want(t, got[ids[2]].Err, kind)
		want(t, c.ChangeLabels(ctx, ids[2], map[string]*string{"a": &one}), kind)
		_, err = c.CreateClone(ctx, "clone", meta.Policy{Replicas: 1}, 1, Origin{Volume: ids[2], At: 1})
		want(t, err, kind)
	}
	// A record of today's version reads as written.
	if _, err := cli.Put(ctx, c.labelsKey(ids[2]), fmt.Sprintf(`{"v":1,"volume":%d,"labels":{"team":"speech"}}`, ids[2])); err != nil {
		t.Fatal(err)
	}
	check(ids[2], map[string]string{"team": "speech"})
}
