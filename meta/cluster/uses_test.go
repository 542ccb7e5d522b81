package cluster

import (
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// uses is a cluster with volumes 1 to 3 and the clients a and b.
func uses(t *testing.T) (*Cluster, *clientv3.Client) {
	t.Helper()
	cli := client(t)
	c := join(t, cli)
	for i := range 3 {
		if _, err := c.CreateVolume(t.Context(), fmt.Sprint("v", i+1), meta.Policy{}, 0); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "b"} {
		if _, err := c.Enrol(t.Context(), Member{Role: peer.Client, Name: name}, false); err != nil {
			t.Fatal(err)
		}
	}
	return c, cli
}

// text is what is granted, by number.
func text(t *testing.T, c *Cluster) (s string) {
	t.Helper()
	all, err := c.Grants(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range all {
		s += fmt.Sprintf("%s %d %s %s\n", g.Who, g.Volume, g.Rights, g.For)
	}
	return s
}

// TestUses: what is granted for a use is granted once, however often, and goes with the
// use, the client or the volume, and nothing else with it.
func TestUses(t *testing.T) {
	c, cli := uses(t)
	ctx := t.Context()
	is := func(want string) {
		t.Helper()
		if got := text(t, c); got != want {
			t.Fatalf("grants:\n%swant:\n%s", got, want)
		}
	}
	give := func(who, use string, v meta.VolumeID, r Rights, kind meta.Kind) {
		t.Helper()
		_, err := c.GrantFor(ctx, who, use, map[meta.VolumeID]Rights{v: r}, 7)
		want(t, err, kind)
	}
	end := func(who, use string, count int64) {
		t.Helper()
		if n, err := c.EndUse(ctx, who, use); err != nil || n != count {
			t.Fatalf("%d grants ended, %v; want %d", n, err, count)
		}
	}
	byHand, err := c.AddGrant(ctx, Grant{Who: "client/a", Volume: 1, Rights: ReadRights, Users: UsersAsIs, For: "forged"})
	if err != nil {
		t.Fatal(err)
	}
	const hand = "client/a 1 read \n"
	is(hand)
	for range 2 {
		give("client/a", "u:1", 1, WriteRights, meta.KindOK)
	}
	give("client/a", "u:1", 1, ReadRights, meta.Exists)
	give("client/a", "u:1", 2, ReadRights, meta.KindOK)
	give("client/a", "u:10", 2, ReadRights, meta.KindOK)
	give("client/b", "u:1", 1, WriteRights, meta.KindOK)
	is(hand + "client/a 1 write u:1\nclient/a 2 read u:1\nclient/a 2 read u:10\nclient/b 1 write u:1\n")
	view, err := c.Current(ctx)
	if err != nil || view.Access("client/a", 1).Rights != WriteRights || view.Access("client/a", 2).Rights != ReadRights || view.Access("client/b", 2).Rights != NoRights {
		t.Fatalf("%+v, %v", view, err)
	}
	end("client/a", "u:1", 2)
	end("client/a", "u:1", 0)
	is(hand + "client/a 2 read u:10\nclient/b 1 write u:1\n")

	for _, bad := range []string{"", "a/b", "-", "u\n", "../x"} {
		give("client/a", bad, 1, ReadRights, meta.Invalid)
		_, err := c.EndUse(ctx, "client/a", bad)
		want(t, err, meta.Invalid)
	}
	for _, bad := range []string{"client/*", "admin/a", "a", "client/", "client/a/b"} {
		give(bad, "u", 1, ReadRights, meta.Invalid)
	}
	give("client/a", "u", 9, ReadRights, meta.NoSuchVolume)
	give("client/nobody", "u", 1, ReadRights, meta.NotFound)
	if _, err := c.Enrol(ctx, Member{Role: peer.Admin, Name: "boss"}, false); err != nil {
		t.Fatal(err)
	}
	give("client/boss", "u", 1, ReadRights, meta.KindOK)
	is(hand + "client/a 2 read u:10\nclient/b 1 write u:1\n")

	// Who is evicted keeps what people granted, and comes back by a token to that alone.
	want(t, c.Evict(ctx, peer.Client, "b"), meta.KindOK)
	is(hand + "client/a 2 read u:10\n")
	give("client/b", "u:1", 1, WriteRights, meta.NotFound)
	if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: "b"}, true); err != nil {
		t.Fatal(err)
	}
	give("client/b", "u:1", 1, WriteRights, meta.KindOK)

	// A volume goes with all that was granted on it.
	if _, err := c.UpdateVolume(ctx, 1, func(v *Volume) error { v.State = VolumeDeleting; return nil }); err != nil {
		t.Fatal(err)
	}
	give("client/a", "u:1", 1, ReadRights, meta.NoSuchVolume)
	want(t, c.DeleteVolume(ctx, 1), meta.KindOK)
	is("client/a 2 read u:10\n")

	// By its number one is revoked as others are.
	all, err := c.Grants(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want(t, c.RevokeGrant(ctx, byHand.ID), meta.NotFound)
	want(t, c.RevokeGrant(ctx, all[0].ID), meta.KindOK)
	is("")

	// Of all nodes at once; and a record as programs of before write one.
	give("client/a", "u:1", 2, ReadRights, meta.KindOK)
	give("client/b", "u:1", 2, ReadRights, meta.KindOK)
	if _, err := cli.Put(ctx, c.Prefix()+"/grants/00000000000000ff", `{"v":1,"id":255,"who":"client/a","volume":3,"rights":2,"users":"as-is","created":9}`); err != nil {
		t.Fatal(err)
	}
	end("", "u:1", 2)
	is("client/a 3 write \n")
}

// TestUsesMapNobody: what is granted for a use gives rights; how ids map is for people's
// grants to say, however wide they are, and however little they let.
func TestUsesMapNobody(t *testing.T) {
	use := Grant{ID: 1, Who: "client/worker-7", Volume: 5, Rights: WriteRights, Users: UsersAsIs, For: "u"}
	for _, hand := range []Grant{
		{ID: 2, Who: "client/worker-*", Rights: WriteRights, Users: UsersNoRoot},
		{ID: 2, Who: "client/*", Rights: ReadRights, Users: UsersAllTo, UID: 7},
		{ID: 2, Who: "client/worker-7", Volume: 5, Rights: ReadRights, Users: UsersNoRoot},
		{ID: 2, Who: "client/worker-8", Rights: ReadRights},
	} {
		want := hand.Users
		if want == "" {
			want = UsersAsIs // it is another's
		}
		for _, all := range [][]Grant{{use, hand}, {hand, use}} {
			if a := AccessOf(all, "client/worker-7", 5); a.Rights != WriteRights || a.Users != want {
				t.Errorf("with %+v: %+v", hand, a)
			}
		}
	}
}

// TestUsesRace: grants that are made while the client is evicted, or the volume
// deleted, are there before that and go, or are not made.
func TestUsesRace(t *testing.T) {
	c, _ := uses(t)
	ctx := t.Context()
	for round := range 8 {
		name := fmt.Sprint("n", round)
		if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: name}, false); err != nil {
			t.Fatal(err)
		}
		v, err := c.CreateVolume(ctx, fmt.Sprint("w", round), meta.Policy{}, 0)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i, who := range []string{"client/" + name, "client/a", "client/b"} {
			wg.Go(func() {
				for n := range 10 {
					_, err := c.GrantFor(ctx, who, fmt.Sprintf("u%d.%d", i, n), map[meta.VolumeID]Rights{v.ID: ReadRights, 2: ReadRights}, 0)
					if k := meta.KindOf(err); k != meta.KindOK && k != meta.NotFound && k != meta.NoSuchVolume {
						t.Error(err)
					}
				}
			})
		}
		time.Sleep(time.Duration(round) * 2 * time.Millisecond)
		wg.Go(func() {
			if err := c.Evict(ctx, peer.Client, name); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			_, err := c.UpdateVolume(ctx, v.ID, func(v *Volume) error { v.State = VolumeDeleting; return nil })
			if err == nil {
				err = c.DeleteVolume(ctx, v.ID)
			}
			if err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		all, err := c.Grants(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range all {
			if g.Who == "client/"+name || g.Volume == v.ID {
				t.Errorf("round %d: %+v is left", round, g)
			}
		}
	}
}
