package cluster

import (
	"errors"
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

// text returns the grants, by number.
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

// TestUses: a grant for a use is made once, however often it is requested, and goes with
// the use, the client or the volume, and no other grant goes with it.
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
		_, err := c.GrantFor(ctx, ForUse{Who: who, Use: use, Rights: map[meta.VolumeID]Rights{v: r}}, 7)
		want(t, err, kind)
	}
	end := func(who, use string, count int64) {
		t.Helper()
		if n, err := c.EndUse(ctx, who, use, 0); err != nil || n != count {
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
	for use, n := range map[string]int{"u:1": 3, "u:10": 1, "u": 0} {
		if of, err := c.GrantsOf(ctx, use); err != nil || len(of) != n {
			t.Errorf("for %s: %v, %v; want %d", use, of, err, n)
		}
	}
	_, err = c.GrantsOf(ctx, "a/b")
	want(t, err, meta.Invalid)
	view, err := c.Current(ctx)
	if err != nil || view.Access("client/a", 1).Rights != WriteRights || view.Access("client/a", 2).Rights != ReadRights || view.Access("client/b", 2).Rights != NoRights {
		t.Fatalf("%+v, %v", view, err)
	}
	end("client/a", "u:1", 2)
	end("client/a", "u:1", 0)
	is(hand + "client/a 2 read u:10\nclient/b 1 write u:1\n")

	for _, bad := range []string{"", "a/b", "-", "u\n", "../x"} {
		give("client/a", bad, 1, ReadRights, meta.Invalid)
		_, err := c.EndUse(ctx, "client/a", bad, 0)
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

	// An evicted client keeps the grants made by people, and gets only these when a token
	// admits it again.
	want(t, c.Evict(ctx, peer.Client, "b"), meta.KindOK)
	is(hand + "client/a 2 read u:10\n")
	give("client/b", "u:1", 1, WriteRights, meta.NotFound)
	if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: "b"}, true); err != nil {
		t.Fatal(err)
	}
	give("client/b", "u:1", 1, WriteRights, meta.KindOK)

	// A deleted volume's grants go.
	if _, err := c.UpdateVolume(ctx, 1, func(v *Volume) error { v.State = VolumeDeleting; return nil }); err != nil {
		t.Fatal(err)
	}
	give("client/a", "u:1", 1, ReadRights, meta.NoSuchVolume)
	want(t, c.DeleteVolume(ctx, 1), meta.KindOK)
	is("client/a 2 read u:10\n")

	// A grant for a use can be revoked by its number, as any grant.
	all, err := c.Grants(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want(t, c.RevokeGrant(ctx, byHand.ID), meta.NotFound)
	want(t, c.RevokeGrant(ctx, all[0].ID), meta.KindOK)
	is("")

	// The grants of all nodes for a use end at once; a grant without a use stays.
	give("client/a", "u:1", 2, ReadRights, meta.KindOK)
	give("client/b", "u:1", 2, ReadRights, meta.KindOK)
	if _, err := cli.Put(ctx, c.Prefix()+"/grants/00000000000000ff", `{"v":1,"id":255,"who":"client/a","volume":3,"rights":2,"users":"as-is","created":9}`); err != nil {
		t.Fatal(err)
	}
	end("", "u:1", 2)
	is("client/a 3 write \n")
}

// TestUsesMapNobody: a grant for a use gives rights; the grants made by people decide the mapping
// of ids, however wide, and however few their rights.
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
			want = UsersAsIs // the grant is another client's
		}
		for _, all := range [][]Grant{{use, hand}, {hand, use}} {
			if a := AccessOf(all, "client/worker-7", 5); a.Rights != WriteRights || a.Users != want {
				t.Errorf("with %+v: %+v", hand, a)
			}
		}
	}
}

// TestUsesGivenUp: abandoned calls that are served after a later call change nothing: a
// grant after the end, and an end after a grant.
func TestUsesGivenUp(t *testing.T) {
	c, _ := uses(t)
	ctx := t.Context()
	now := func() int64 {
		t.Helper()
		r, err := c.Revision(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	give := func(who string, asOf int64, kind meta.Kind) {
		t.Helper()
		_, err := c.GrantFor(ctx, ForUse{Who: who, Use: "u", Rights: map[meta.VolumeID]Rights{1: WriteRights}, AsOf: asOf}, 7)
		want(t, err, kind)
	}
	end := func(who string, asOf int64, kind meta.Kind) {
		t.Helper()
		_, err := c.EndUse(ctx, who, "u", asOf)
		want(t, err, kind)
	}
	is := func(want string) {
		t.Helper()
		if got := text(t, c); got != want {
			t.Fatalf("grants:\n%swant:\n%s", got, want)
		}
	}
	const a, b = "client/a 1 write u\n", "client/b 1 write u\n"
	for _, ended := range []string{"client/a", ""} { // an end before any grant
		late := now()
		end(ended, now(), meta.KindOK)
		give("client/a", late, meta.Again)
		is("")
	}
	late := now()
	end("client/a", now(), meta.KindOK)
	give("client/b", late, meta.KindOK) // another's
	give("client/a", now(), meta.KindOK)
	is(b + a)
	for range 2 { // the grant exists from before, and sent twice it is one
		late := now()
		again := now()
		give("client/a", again, meta.KindOK)
		give("client/a", again, meta.KindOK)
		end("client/a", late, meta.Again)
		end("", late, meta.Again)
		is(b + a)
	}
	end("client/nobody", 0, meta.KindOK)
	if r, err := c.cli.Get(ctx, c.endedKey("client/nobody")); err != nil || len(r.Kvs) != 0 {
		t.Errorf("a record for nobody: %v, %v", r, err)
	}
	late = now()
	want(t, c.Evict(ctx, peer.Client, "b"), meta.KindOK)
	if _, err := c.Enrol(ctx, Member{Role: peer.Client, Name: "b"}, true); err != nil {
		t.Fatal(err)
	}
	give("client/b", late, meta.Again)
	give("client/b", now(), meta.KindOK)
	is(a + b)
}

// TestUsesOutrun: the same with both calls served at once: the call that began later
// counts.
func TestUsesOutrun(t *testing.T) {
	c, _ := uses(t)
	ctx := t.Context()
	until := func(call func(asOf int64) error) { // as a waiting caller does
		for {
			asOf, err := c.Revision(ctx)
			if err == nil {
				err = call(asOf)
			}
			if meta.KindOf(err) != meta.Again {
				want(t, err, meta.KindOK)
				return
			}
		}
	}
	give := func(asOf int64) error {
		_, err := c.GrantFor(ctx, ForUse{Who: "client/a", Use: "u", Rights: map[meta.VolumeID]Rights{1: WriteRights, 2: ReadRights}, AsOf: asOf}, 0)
		return err
	}
	end := func(asOf int64) error {
		_, err := c.EndUse(ctx, "client/a", "u", asOf)
		return err
	}
	for round := range 40 {
		before, after, left := give, end, ""
		if round%2 == 1 {
			before, after, left = end, give, "client/a 1 write u\nclient/a 2 read u\n"
		}
		asOf, err := c.Revision(ctx)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			time.Sleep(time.Duration(round%5) * time.Millisecond)
			if err := before(asOf); err != nil && !errors.Is(err, meta.Again) {
				t.Error(err)
			}
		})
		until(after)
		wg.Wait()
		if got := text(t, c); got != left {
			t.Fatalf("round %d:\n%swant:\n%s", round, got, left)
		}
	}
}

// TestUsesAlone: an exclusive use has one client, whatever the concurrent requests, and can go to
// another client only after its end for the first client.
func TestUsesAlone(t *testing.T) {
	c, _ := uses(t)
	ctx := t.Context()
	both := []string{"client/a", "client/b"}
	give := func(who string, alone bool) error {
		_, err := c.GrantFor(ctx, ForUse{Who: who, Use: "u", Rights: map[meta.VolumeID]Rights{1: WriteRights}, Alone: alone}, 0)
		return err
	}
	for round := range 20 {
		var errs [2]error
		var wg sync.WaitGroup
		for i, who := range both {
			wg.Go(func() { errs[i] = give(who, true) })
		}
		wg.Wait()
		won := 0
		if errs[0] != nil {
			won = 1
		}
		want(t, errs[won], meta.KindOK)
		want(t, errs[1-won], meta.Busy)
		if got, only := text(t, c), both[won]+" 1 write u\n"; got != only {
			t.Fatalf("round %d:\n%swant:\n%s", round, got, only)
		}
		want(t, give(both[won], true), meta.KindOK) // the same once more
		if _, err := c.EndUse(ctx, both[won], "u", 0); err != nil {
			t.Fatal(err)
		}
	}
	// Grants of other uses do not matter, nor is the mode recorded.
	want(t, give("client/a", true), meta.KindOK)
	_, err := c.GrantFor(ctx, ForUse{Who: "client/b", Use: "u1", Rights: map[meta.VolumeID]Rights{1: WriteRights}, Alone: true}, 0)
	want(t, err, meta.KindOK)
	want(t, give("client/b", false), meta.KindOK)
	want(t, give("client/a", true), meta.Busy)
	// An administrator has no grant, and nevertheless is not alone.
	if _, err := c.Enrol(ctx, Member{Role: peer.Admin, Name: "boss"}, false); err != nil {
		t.Fatal(err)
	}
	want(t, give("client/boss", true), meta.Busy)
	want(t, give("client/boss", false), meta.KindOK)
}

// TestUsesRace: a grant that is made while the client is evicted, or the volume deleted,
// is made before and goes, or is not made.
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
					_, err := c.GrantFor(ctx, ForUse{Who: who, Use: fmt.Sprintf("u%d.%d", i, n), Rights: map[meta.VolumeID]Rights{v.ID: ReadRights, 2: ReadRights}}, 0)
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

// TestGrantRequestAgain: a repeated request to grant, concurrent or later, grants once;
// another request with the same contents grants again.
func TestGrantRequestAgain(t *testing.T) {
	c, cli := uses(t)
	ctx := t.Context()
	other := c.watching(cli)
	give := func(c *Cluster, request uint64) uint64 {
		g, err := c.AddGrant(ctx, Grant{Who: "client/a", Volume: 1, Rights: ReadRights, Users: UsersAsIs, Request: request})
		if err != nil {
			t.Error(err)
		}
		return g.ID
	}
	var wg sync.WaitGroup
	var ids [16]uint64
	for i := range ids {
		wg.Go(func() { ids[i] = give([]*Cluster{c, other}[i%2], uint64(7+i/8)) })
	}
	wg.Wait()
	for i, id := range ids {
		if id != ids[i/8*8] {
			t.Errorf("request %d made the grants %d and %d", 7+i/8, ids[i/8*8], id)
		}
	}
	if again := give(c, 7); again != ids[0] || ids[0] == ids[8] {
		t.Errorf("later it made grant %d; two requests made %d and %d", again, ids[0], ids[8])
	}
	give(c, 0)
	give(c, 0)
	if all, err := c.Grants(ctx); err != nil || len(all) != 4 {
		t.Errorf("%+v, %v", all, err)
	}
}
