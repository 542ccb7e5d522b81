package cluster

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/peer"
)

func client(t *testing.T) *clientv3.Client {
	t.Helper()
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s, err := embedded.Start(embedded.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s.Client()
}

func join(t *testing.T, cli *clientv3.Client) *Cluster {
	t.Helper()
	c, err := Open(t.Context(), cli, Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func want(t *testing.T, err error, kind meta.Kind) {
	t.Helper()
	if meta.KindOf(err) != kind {
		t.Fatalf("error %v, want kind %v", err, kind)
	}
}

func TestVolumes(t *testing.T) {
	cli := client(t)
	c, ctx := join(t, cli), t.Context()
	root, err := c.CreateVolume(ctx, "root", meta.Policy{Replicas: 1}, 1)
	if err != nil || root.ID != meta.RootVolume {
		t.Fatal(root, err)
	}
	_, err = c.CreateVolume(ctx, "root", meta.Policy{}, 2)
	want(t, err, meta.VolumeExists)
	for _, bad := range []string{"", ".", "..", "a/b", "a\x00b", "a@b", "a:b", "a\nb", "a\xff", string(bytes.Repeat([]byte("x"), 256))} {
		_, err = c.CreateVolume(ctx, bad, meta.Policy{}, 2)
		want(t, err, meta.Invalid)
	}
	data, err := c.CreateVolume(ctx, "data", meta.Policy{QuotaBytes: 9}, 2)
	if err != nil || data.ID != 2 { // refused requests use up no id
		t.Fatal(data, err)
	}
	v, err := c.UpdateVolume(ctx, 2, func(v *Volume) error {
		v.Attach = &Attach{Parent: 1, Ino: 1, Name: "d"}
		v.Name = "other"
		return nil
	})
	if err != nil || v.Attach.Name != "d" {
		t.Fatal(v, err)
	}
	_, err = c.VolumeByName(ctx, "data")
	want(t, err, meta.NoSuchVolume)
	got, err := c.VolumeByName(ctx, "other")
	if err != nil || got.ID != 2 || got.Policy.QuotaBytes != 9 || got.Attach == nil || got.Attach.Ino != 1 || got.Created != 2 {
		t.Fatal(got, err)
	}
	_, err = c.UpdateVolume(ctx, 2, func(v *Volume) error { v.Name = "root"; return nil })
	want(t, err, meta.VolumeExists)
	_, err = c.UpdateVolume(ctx, 2, func(v *Volume) error { v.Name = "a@b"; return nil })
	want(t, err, meta.Invalid)
	// A volume under deletion frees its name.
	if _, err = c.UpdateVolume(ctx, 2, func(v *Volume) error { v.State = VolumeDeleting; return nil }); err != nil {
		t.Fatal(err)
	}
	again, err := c.CreateVolume(ctx, "other", meta.Policy{}, 3)
	if err != nil || again.ID != 3 {
		t.Fatal(again, err)
	}
	if _, err := cli.Put(ctx, c.Prefix()+"/volumes/00000002/journal/0000000000000001", "x"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.DeleteVolume(ctx, 2); err != nil {
			t.Fatal(err)
		}
	}
	if r, err := cli.Get(ctx, c.Prefix()+"/volumes/", clientv3.WithPrefix()); err != nil || len(r.Kvs) != 0 {
		t.Fatal(r, err)
	}
	if _, err := c.VolumeByName(ctx, "other"); err != nil {
		t.Fatal(err)
	}
	all, err := c.Volumes(ctx)
	if err != nil || len(all) != 2 || all[0].ID != 1 || all[1].ID != 3 {
		t.Fatal(all, err)
	}
}

// Many create at once: names and ids are unique.
func TestConcurrentCreate(t *testing.T) {
	cli := client(t)
	c := join(t, cli)
	var wg sync.WaitGroup
	var mu sync.Mutex
	ids, made := map[meta.VolumeID]bool{}, map[string]int{}
	for i := range 40 {
		wg.Go(func() {
			name := fmt.Sprint("v", i%20)
			v, err := c.CreateVolume(t.Context(), name, meta.Policy{}, 0)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				if ids[v.ID] {
					t.Errorf("id %d given twice", v.ID)
				}
				ids[v.ID] = true
				made[name]++
			} else if meta.KindOf(err) != meta.VolumeExists {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i := range 20 {
		if n := made[fmt.Sprint("v", i)]; n != 1 {
			t.Errorf("v%d was made %d times", i, n)
		}
	}
}

func TestView(t *testing.T) {
	cli := client(t)
	c, other := join(t, cli), join(t, cli)
	ctx := t.Context()
	if c.ID() != other.ID() || c.ID() == "" {
		t.Fatal(c.ID(), other.ID())
	}
	await := func(what string, ok func(*View) bool) {
		t.Helper()
		deadline := time.After(time.Minute)
		for {
			ch := other.Changed()
			if ok(other.View()) {
				return
			}
			select {
			case <-ch:
			case <-deadline:
				t.Fatalf("no view with %s: %+v", what, other.View())
			}
		}
	}
	began := time.Now()
	if _, err := c.CreateVolume(ctx, "root", meta.Policy{}, 0); err != nil {
		t.Fatal(err)
	}
	await("a volume", func(v *View) bool { r, ok := v.Volume(1); return ok && r.Name == "root" })
	t.Logf("seen after %v", time.Since(began))
	id, err := c.NewServerID(ctx)
	if err != nil || id != 1 {
		t.Fatal(id, err)
	}
	lease, err := cli.Grant(ctx, 60)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.RegisterChunkServer(ctx, lease.ID, meta.ServerInfo{ID: id, Addr: "unix:/x", Topology: "/a/b/c"}); err != nil {
		t.Fatal(err)
	}
	if err := c.RegisterMetaServer(ctx, lease.ID, "m1", "unix:/m"); err != nil {
		t.Fatal(err)
	}
	await("servers", func(v *View) bool {
		return v.ChunkServers[1].Topology == "/a/b/c" && len(v.MetaServers) == 1 && v.MetaServers[0].Addr == "unix:/m" && len(v.Servers()) == 1
	})
	keys, err := c.CapKeys(ctx)
	if err != nil || len(keys) != 1 || keys[0].ID != 1 || len(keys[0].Secret) != 32 {
		t.Fatal(keys, err)
	}
	same, err := other.CapKeys(ctx)
	if err != nil || !bytes.Equal(same[0].Secret, keys[0].Secret) {
		t.Fatal(same, err)
	}
	for range 2 {
		if err := rotateNow(ctx, c); err != nil {
			t.Fatal(err)
		}
	}
	if keys, err = c.CapKeys(ctx); err != nil {
		t.Fatal(err)
	}
	if len(keys) != 2 || keys[1].ID != 3 {
		t.Fatal(keys)
	}
	await("keys", func(v *View) bool { return len(v.CapKeys) == 2 && v.CapKeys[1].ID == 3 })
	// The servers' lease ends.
	if _, err := cli.Revoke(ctx, lease.ID); err != nil {
		t.Fatal(err)
	}
	await("no servers", func(v *View) bool { return len(v.ChunkServers) == 0 && len(v.MetaServers) == 0 })
}

func TestNewerCluster(t *testing.T) {
	cli := client(t)
	ctx := t.Context()
	if _, err := cli.Put(ctx, "/penstock/new/format", `{"v":1,"format":2,"id":"x","more":true}`); err != nil {
		t.Fatal(err)
	}
	before, err := cli.Get(ctx, "/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(ctx, cli, Config{Name: "new"})
	want(t, err, meta.Version)
	after, err := cli.Get(ctx, "/", clientv3.WithPrefix())
	if err != nil || after.Header.Revision != before.Header.Revision {
		t.Fatal("something was written", err)
	}
	_, err = Open(ctx, cli, Config{Name: "a/b"})
	want(t, err, meta.Invalid)
}

// TestViewGrows: after any changes, a view made from the previous view equals a view read
// from scratch.
func TestViewGrows(t *testing.T) {
	cli := client(t)
	c := join(t, cli)
	ctx := t.Context()
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 0))
	lease, err := cli.Grant(ctx, 600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: "n0"}, false); err != nil {
		t.Fatal(err)
	}
	for i := range 190 {
		n := rng.IntN(8)
		switch rng.IntN(9) {
		case 0:
			_, err = c.CreateVolume(ctx, fmt.Sprint("v", n), meta.Policy{}, 0)
		case 1:
			err = c.DeleteVolume(ctx, meta.VolumeID(n))
		case 2:
			_, err = c.UpdateVolume(ctx, meta.VolumeID(n), func(v *Volume) error { v.Policy.QuotaBytes++; return nil })
		case 3:
			err = c.RegisterChunkServer(ctx, lease.ID, meta.ServerInfo{ID: meta.ServerID(n), Free: rng.Uint64()})
		case 4:
			err = c.RegisterMetaServer(ctx, lease.ID, fmt.Sprint("m", n), fmt.Sprint(i))
		case 5:
			_, err = cli.Delete(ctx, fmt.Sprintf("%s/%s%d", c.Prefix(), []string{"metaservers/m", "chunkservers/000000000000000"}[rng.IntN(2)], n))
		case 6:
			err = rotateNow(ctx, c)
		case 7:
			_, err = c.AddGrant(ctx, Grant{Who: "client/n*", Volume: meta.VolumeID(n), Rights: ReadRights, Users: UsersAsIs})
		case 8:
			_, err = c.GrantFor(ctx, ForUse{Who: "client/n0", Use: fmt.Sprint("u", rng.IntN(3)), Rights: map[meta.VolumeID]Rights{meta.VolumeID(n): ReadRights}}, 0)
		}
		if k := meta.KindOf(err); k != meta.KindOK && k != meta.VolumeExists && k != meta.NoSuchVolume {
			t.Fatal(err)
		}
		if rng.IntN(3) == 0 {
			continue
		}
		grown, err := c.Refresh(ctx)
		if err != nil {
			t.Fatal(err)
		}
		want, err := c.watching(cli).Refresh(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if g, w := fmt.Sprintf("%+v", grown), fmt.Sprintf("%+v", want); g != w {
			t.Fatalf("seed %d step %d:\n%s\n%s", seed, i, g, w)
		}
	}
}

// TestCurrent: Current shows the writes of other processes, however late the watch is;
// many concurrent callers share few readings.
func TestCurrent(t *testing.T) {
	cli := client(t)
	a, b, ctx := join(t, cli), join(t, cli), t.Context()
	for i := range 20 {
		if _, err := a.AddGrant(ctx, Grant{Who: "client/x", Rights: ReadRights, Users: UsersAsIs}); err != nil {
			t.Fatal(err)
		}
		v, err := b.Current(ctx)
		if err != nil || len(v.Grants) != i+1 {
			t.Fatalf("after %d grants: %+v, %v", i+1, v, err)
		}
	}
	// 4,000 calls, 8 at a time: calls that come while a reading waits for its turn share the
	// reading.
	var mu sync.Mutex
	views := map[*View]int{}
	var wg sync.WaitGroup
	began := time.Now()
	for range 8 {
		wg.Go(func() {
			var each sync.WaitGroup
			for range 500 {
				each.Go(func() {
					v, err := b.Current(ctx)
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					views[v]++
					mu.Unlock()
				})
			}
			each.Wait()
		})
	}
	wg.Wait()
	if most := 2 + int(time.Since(began)/minPause); len(views) > most {
		t.Errorf("4,000 that asked within %v got %d readings, not %d at most", time.Since(began), len(views), most)
	}
	b.Close()
	if _, err := b.Current(ctx); err == nil {
		t.Error("a closed one answers")
	}
}

// TestManyCloseAtOnce: clusters that share the client of an embedded etcd can be closed,
// although many watches ending at once can make the client and the server wait for each
// other.
func TestManyCloseAtOnce(t *testing.T) {
	cli := client(t)
	var all []*Cluster
	for range 16 {
		all = append(all, join(t, cli))
	}
	done := make(chan struct{})
	go func() {
		var wg sync.WaitGroup
		for _, c := range all {
			wg.Go(c.Close)
		}
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("they do not end")
	}
}
