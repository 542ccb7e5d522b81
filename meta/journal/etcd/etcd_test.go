package etcd_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/journal/journaltest"
	"penstock.io/penstock/meta/process"
)

// server starts an etcd for one test.
func server(t testing.TB) *embedded.Server {
	t.Helper()
	dir, err := os.MkdirTemp("", "etcd") // t.TempDir's paths are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s, err := embedded.Start(embedded.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

const prefix = "/penstock/test"

// owners makes a process's lease, as one of several processes.
func owners(t testing.TB, cli *clientv3.Client, name string, cfg etcd.LeaseConfig) *etcd.Owners {
	t.Helper()
	l, err := etcd.NewLease(t.Context(), cli, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(closing()) })
	return etcd.NewOwners(cli, l, etcd.OwnersConfig{Prefix: prefix, Server: name, Addr: "unix:/" + name})
}

func TestSuite(t *testing.T) {
	s := server(t)
	n := 0
	journaltest.Run(t, func(t *testing.T) journaltest.Form {
		n++
		at := fmt.Sprintf("/penstock/%d", n)
		cli := s.Client()
		lease, err := etcd.NewLease(t.Context(), cli, etcd.LeaseConfig{TTL: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { lease.Close(closing()) })
		// Every taker believes that the previous owner is dead.
		o := etcd.NewOwners(cli, lease, etcd.OwnersConfig{Prefix: at, Dead: func(etcd.Owner) bool { return true }, UnsafeNoFence: os.Getenv("PENSTOCK_CONTROL") == "journal-nofence"})
		key := func(seq meta.Seq) string {
			return fmt.Sprintf("%sjournal/%016x", etcd.VolumePrefix(at, journaltest.Volume), uint64(seq))
		}
		return journaltest.Form{
			Take: func(t *testing.T) (journal.Store, meta.Term, <-chan struct{}) {
				own, err := o.Acquire(t.Context(), journaltest.Volume)
				if err != nil {
					t.Fatal(err)
				}
				return own.Store(), own.Term, own.Lost()
			},
			Reader: func(t *testing.T) journal.Store { return etcd.ReadStore(cli, at, journaltest.Volume, lease) },
			Damage: func(t *testing.T, seq meta.Seq, value []byte) {
				var err error
				if value == nil {
					_, err = cli.Delete(t.Context(), key(seq))
				} else {
					_, err = cli.Put(t.Context(), key(seq), string(value))
				}
				if err != nil {
					t.Fatal(err)
				}
			},
		}
	})
}

func TestOwnership(t *testing.T) {
	cli := server(t).Client()
	ctx := t.Context()
	a, b := owners(t, cli, "a", etcd.LeaseConfig{}), owners(t, cli, "b", etcd.LeaseConfig{})
	oa, err := a.Acquire(ctx, 3)
	if err != nil || oa.Term != 1 || oa.Previous.Version != 0 {
		t.Fatal(oa, err)
	}
	_, err = b.Acquire(ctx, 3)
	var e *meta.Error
	if !errors.As(err, &e) || e.Kind != meta.NotOwner || e.Subject != "unix:/a" {
		t.Fatal(err)
	}
	if h, held, err := b.Last(ctx, 3); err != nil || !held || h.Server != "a" || h.Term != 1 {
		t.Fatal(h, held, err)
	}
	// Another volume is another matter.
	if o, err := b.Acquire(ctx, 4); err != nil || o.Term != 1 {
		t.Fatal(o, err)
	}
	// A planned hand-over: b waits, a releases, b need not wait for a lease.
	got := make(chan *etcd.Ownership, 1)
	go func() {
		o, err := b.Await(ctx, 3)
		if err != nil {
			t.Error(err)
		}
		got <- o
	}()
	time.Sleep(20 * time.Millisecond)
	began := time.Now()
	if err := oa.Release(ctx); err != nil {
		t.Fatal(err)
	}
	select {
	case <-oa.Lost():
	default:
		t.Fatal("released, but not lost")
	}
	ob := <-got
	if ob == nil || ob.Term != 2 || !ob.Previous.Released || ob.Previous.Server != "a" || ob.Previous.Term != 1 {
		t.Fatalf("%+v", ob)
	}
	t.Logf("hand-over in %v", time.Since(began))
	if err := oa.Release(ctx); meta.KindOf(err) != meta.Fenced {
		t.Fatal(err)
	}
	if _, err := a.Acquire(ctx, 3); meta.KindOf(err) != meta.NotOwner {
		t.Fatal(err)
	}
}

// Who expects a release takes the volume as everybody else does, whether the
// release came, something else came, or nothing; and learns where the log ends.
func TestExpect(t *testing.T) {
	cli := server(t).Client()
	ctx := t.Context()
	a, b := owners(t, cli, "a", etcd.LeaseConfig{}), owners(t, cli, "b", etcd.LeaseConfig{})
	oa, err := a.Acquire(ctx, 3)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := oa.Head(); ok {
		t.Fatal("a log without entries has an end")
	}
	e := journal.Next(3, journal.Position{}, oa.Term, []byte("x"))
	if err := etcd.OpenLog(oa).Append(ctx, e); err != nil {
		t.Fatal(err)
	}
	expect := func() {
		t.Helper()
		if err := b.Expect(ctx, 3); err != nil {
			t.Fatal(err)
		}
	}
	expect()
	if _, err := b.Acquire(ctx, 3); meta.KindOf(err) != meta.NotOwner {
		t.Fatal("not released, and taken:", err)
	}
	expect()
	if err := oa.Release(ctx); err != nil {
		t.Fatal(err)
	}
	ob, err := b.Acquire(ctx, 3)
	if err != nil || ob.Term != 2 || !ob.Previous.Released || ob.Previous.Server != "a" || ob.Previous.Term != 1 {
		t.Fatalf("%+v %v", ob, err)
	}
	if at, ok := ob.Head(); !ok || at != e.Position() {
		t.Fatal(at, ok)
	}
	if err := ob.Release(ctx); err != nil {
		t.Fatal(err)
	}
	// The expected owner is outdated: two owners came and went meanwhile.
	if oa, err = a.Acquire(ctx, 3); err != nil {
		t.Fatal(err)
	}
	expect()
	for _, o := range []*etcd.Owners{a, a} {
		if err := oa.Release(ctx); err != nil {
			t.Fatal(err)
		}
		if oa, err = o.Acquire(ctx, 3); err != nil {
			t.Fatal(err)
		}
	}
	if err := oa.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if ob, err = b.Acquire(ctx, 3); err != nil || ob.Term != 6 || ob.Previous.Term != 5 {
		t.Fatalf("%+v %v", ob, err)
	}
}

// An owner that could not open the volume gives the volume back: the next owner still learns that
// the owner before the two did not release the volume.
func TestYield(t *testing.T) {
	cli := server(t).Client()
	ctx := t.Context()
	take := func(name string) *etcd.Ownership {
		t.Helper()
		o := etcd.NewOwners(cli, owners(t, cli, name, etcd.LeaseConfig{}).Lease(), etcd.OwnersConfig{Prefix: prefix, Server: name, Dead: func(o etcd.Owner) bool { return o.Server == "crashed" }})
		own, err := o.Acquire(ctx, 3)
		if err != nil {
			t.Fatal(err)
		}
		return own
	}
	if err := take("first").Yield(ctx); err != nil {
		t.Fatal(err)
	}
	if o := take("crashed"); o.Term != 2 || !o.Previous.Released {
		t.Fatalf("%+v", o)
	}
	o := take("b")
	if o.Term != 3 || o.Previous.Server != "crashed" || o.Previous.Released {
		t.Fatalf("%+v", o)
	}
	if err := o.Yield(ctx); err != nil {
		t.Fatal(err)
	}
	if o = take("c"); o.Term != 4 || o.Previous.Server != "crashed" || o.Previous.Released || !o.PreviousDead {
		t.Fatalf("%+v", o)
	}
	if err := o.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if o = take("d"); o.Term != 5 || o.Previous.Server != "c" || !o.Previous.Released {
		t.Fatalf("%+v", o)
	}
}

// The holder's process stops (its renewals hang): the holder must notice before etcd lets another
// owner in, and the holder's appends must fail afterwards.
func TestLeaseExpires(t *testing.T) {
	t.Parallel()
	const ttl = 8 * time.Second // a disk, or the machine, may stand still for a while
	cli := server(t).Client()
	ctx := t.Context()
	paused := make(chan struct{})
	a := owners(t, cli, "a", etcd.LeaseConfig{TTL: ttl, Margin: 300 * time.Millisecond,
		KeepAlive: func(ctx context.Context, id clientv3.LeaseID) (time.Duration, error) {
			select {
			case <-paused:
				<-ctx.Done()
				return 0, ctx.Err()
			default:
			}
			r, err := cli.KeepAliveOnce(ctx, id)
			if err != nil {
				return 0, err
			}
			return time.Duration(r.TTL) * time.Second, nil
		}})
	b := owners(t, cli, "b", etcd.LeaseConfig{})
	oa, err := a.Acquire(ctx, 3)
	if err != nil {
		t.Fatal(err)
	}
	log := etcd.OpenLog(oa)
	at := journal.Next(3, journal.Position{}, oa.Term, []byte("one"))
	if err := log.Append(ctx, at); err != nil {
		t.Fatal(err)
	}
	time.Sleep(ttl + ttl/2) // renewals carry the lease beyond one TTL
	if a.Lease().Left() == 0 || a.Lease().Err() != nil {
		t.Fatal("lost while renewing", a.Lease().Err())
	}
	close(paused)
	began := time.Now()
	got := make(chan time.Duration, 1)
	go func() {
		o, err := b.Await(ctx, 3)
		if left := a.Lease().Left(); left > 0 {
			t.Errorf("another owns while the holder believes in its lease for another %v", left)
		}
		if err != nil || o.Term != 2 || o.Previous.Released {
			t.Error(o, err)
		}
		got <- time.Since(began)
	}()
	<-oa.Lost()
	noticed := time.Since(began)
	if a.Lease().Left() != 0 || a.Lease().Err() == nil {
		t.Fatal("lost, but something is left")
	}
	if err := log.Append(ctx, journal.Next(3, at.Position(), oa.Term, nil)); meta.KindOf(err) != meta.Fenced {
		t.Fatal(err)
	}
	taken := <-got
	t.Logf("holder noticed after %v, successor owned after %v", noticed, taken)
}

// No owner need wait for a holder that was killed on this machine.
func TestDeadHolder(t *testing.T) {
	cli := server(t).Client()
	self, err := process.Self()
	if err != nil {
		t.Fatal(err)
	}
	if self.Dead(self) {
		t.Fatal("the living are dead")
	}
	dead := self
	dead.Start++ // the number was reused
	for _, p := range []struct {
		holder process.Process
		dead   bool
	}{
		{dead, true},
		{self, false},
		{process.Process{Boot: "elsewhere", PIDNS: self.PIDNS, PID: 1 << 30}, false},
		{process.Process{Boot: self.Boot, PIDNS: "pid:[1]", PID: 1 << 30}, false},
		{process.Process{Boot: self.Boot, PIDNS: self.PIDNS, PID: 1 << 30}, true},
	} {
		if p.holder.Dead(self) != p.dead {
			t.Errorf("%+v: dead %v", p.holder, !p.dead)
		}
	}
	la, err := etcd.NewLease(t.Context(), cli, etcd.LeaseConfig{TTL: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer la.Close(closing())
	a := etcd.NewOwners(cli, la, etcd.OwnersConfig{Prefix: prefix, Server: "a", Process: dead})
	b := etcd.NewOwners(cli, la, etcd.OwnersConfig{Prefix: prefix, Server: "b", Process: self})
	oa, err := a.Acquire(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	log := etcd.OpenLog(oa)
	one := journal.Next(3, journal.Position{}, oa.Term, nil)
	if err := log.Append(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	ob, err := b.Acquire(t.Context(), 3)
	if err != nil || !ob.PreviousDead || ob.Term != 2 {
		t.Fatal(ob, err)
	}
	if err := log.Append(t.Context(), journal.Next(3, one.Position(), oa.Term, nil)); meta.KindOf(err) != meta.Fenced {
		t.Fatal(err)
	}
}

// closing is a context for cleaning up, when the test's own has ended.
func closing() context.Context { return context.Background() }

// A member answers keep-alives although the lease has ended: the holder believes in its
// ownership, another process owns. The fence decides.
func TestKeepAlivesLie(t *testing.T) {
	t.Parallel()
	cli := server(t).Client()
	ctx := t.Context()
	a := owners(t, cli, "a", etcd.LeaseConfig{TTL: 8 * time.Second,
		KeepAlive: func(context.Context, clientv3.LeaseID) (time.Duration, error) { return time.Minute, nil }})
	b := owners(t, cli, "b", etcd.LeaseConfig{TTL: time.Minute})
	oa, err := a.Acquire(ctx, 3)
	if err != nil {
		t.Fatal(err)
	}
	log := etcd.OpenLog(oa)
	one := journal.Next(3, journal.Position{}, oa.Term, []byte("one"))
	if err := log.Append(ctx, one); err != nil {
		t.Fatal(err)
	}
	ob, err := b.Await(ctx, 3) // etcd ends the lease without renewals
	if err != nil || ob.Term != 2 {
		t.Fatal(ob, err)
	}
	if a.Lease().Left() == 0 {
		t.Fatal("the holder noticed: nothing was tried")
	}
	other := etcd.OpenLog(ob)
	two := journal.Next(3, one.Position(), ob.Term, []byte("two"))
	if err := other.Append(ctx, two); err != nil {
		t.Fatal(err)
	}
	for _, e := range []journal.Entry{
		journal.Next(3, one.Position(), oa.Term, []byte("late")),
		journal.Next(3, two.Position(), oa.Term, []byte("late")),
	} {
		if err := etcd.OpenLog(oa).Append(ctx, e); meta.KindOf(err) != meta.Fenced && meta.KindOf(err) != meta.Again {
			t.Fatal(err)
		}
	}
	// Nor may the old owner move the checkpoint.
	err = etcd.OpenLog(oa).Trim(ctx, journal.Checkpoint{Volume: 3, Position: one.Position(), Term: oa.Term})
	if meta.KindOf(err) != meta.Fenced {
		t.Fatal(err)
	}
	n := 0
	if err := other.Read(ctx, journal.Position{}, func(journal.Entry) error { n++; return nil }); err != nil || n != 2 {
		t.Fatal(n, err)
	}
}

// A lease that was given up is not renewed: a renewal would keep other owners out.
func TestLostLeaseIsGivenBack(t *testing.T) {
	cli := server(t).Client()
	ctx := t.Context()
	stuck := make(chan struct{})
	a := owners(t, cli, "a", etcd.LeaseConfig{TTL: 2 * time.Second,
		KeepAlive: func(ctx context.Context, id clientv3.LeaseID) (time.Duration, error) {
			select {
			case <-stuck:
				r, err := cli.KeepAliveOnce(ctx, id)
				if err != nil {
					return 0, err
				}
				return time.Duration(r.TTL) * time.Second, nil
			case <-ctx.Done():
				// The request reached etcd, but no answer comes back: etcd keeps the lease.
				cli.KeepAliveOnce(context.Background(), id)
				return 0, ctx.Err()
			}
		}})
	if _, err := a.Acquire(ctx, 3); err != nil {
		t.Fatal(err)
	}
	<-a.Lease().Lost()
	close(stuck)
	began := time.Now()
	b := owners(t, cli, "b", etcd.LeaseConfig{TTL: time.Minute})
	call, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if _, err := b.Await(call, 3); err != nil {
		t.Fatalf("%v after %v: the lease that was given up is renewed on", err, time.Since(began))
	}
}
