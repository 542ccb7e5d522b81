package server

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	trio "penstock.io/penstock/test/etcd"
)

// Health tells of clients whose sessions end while the client uses a volume, until the client is
// back; health does not tell of a client that said good-bye or used nothing.
func TestCutOffClientsAreTold(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	told := func() (names []string) {
		for _, c := range s.srv.health.Health(t.Context()).CutOff {
			names = append(names, c.Name)
		}
		return names
	}
	a, b := s.dial("w1:/mnt (pid 1)"), s.dial("w2:/mnt (pid 1)")
	a.create(t, "a")
	b.create(t, "b")
	s.dial("w3:/mnt (pid 1)") // uses nothing
	if err := b.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	sess := s.srv.clients.session(a.ID())
	a.Leave() // as a killed process leaves
	eventually(t, "its session ends", func() error {
		sess.renewed.Store(-int64(2 * DefaultCourtesy))
		if l := told(); len(l) != 1 || l[0] != "w1:/mnt (pid 1)" {
			return fmt.Errorf("told: %v", l)
		}
		return nil
	})
	s.dial("w1:/other (pid 1)")
	if l := told(); len(l) != 1 {
		t.Errorf("with another mount of the same machine: %v", l)
	}
	s.dial("w1:/mnt (pid 2)")
	if l := told(); len(l) != 0 {
		t.Errorf("though it was mounted anew: %v", l)
	}

	// A client that was mounted anew before its old session ended is not reported, also when the
	// client has left in order by then.
	x := s.dial("w4:/mnt (pid 1)")
	x.create(t, "x")
	sess = s.srv.clients.session(x.ID())
	x.Leave()
	sess.renewed.Store(int64(time.Since(s.srv.epoch) - time.Second))
	if err := s.dial("w4:/mnt (pid 2)").Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.runOut(sess)
	if l := told(); len(l) != 0 {
		t.Errorf("it was mounted anew, and left: %v", l)
	}
	var c cutOff
	for i := range cutOffKept + 10 {
		c.add(&session{name: fmt.Sprint(i)}, errors.New("x"))
	}
	if l := c.since(time.Time{}); len(l) != cutOffKept || l[0].Name != fmt.Sprint(cutOffKept+9) {
		t.Errorf("%d are remembered", len(l))
	}
	if l := c.since(time.Now()); len(l) != 0 {
		t.Errorf("%d of before are told", len(l))
	}
}

// Health does not tell of a volume that goes to another owner; health tells of a volume that
// can't be opened until the volume opens.
func TestVolumesThatFail(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	<-s.srv.hosted.opened(1).recovered
	told := func() (l []string) {
		for _, v := range s.srv.health.Health(t.Context()).Volumes {
			l = append(l, fmt.Sprint(v.ID, " ", v.Failed))
		}
		return l
	}
	v, err := s.cluster.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	refuse := func(err error) {
		s.cluster.mu.Lock()
		defer s.cluster.mu.Unlock()
		s.cluster.noOwner = err
	}
	refuse(meta.E("own", meta.Unavailable, "etcd", nil))
	if _, err := s.srv.hosted.open(t.Context(), v.ID); !errors.Is(err, meta.Unavailable) {
		t.Fatal(err)
	}
	if l := told(); len(l) != 0 {
		t.Errorf("etcd did not answer: %v", l)
	}
	refuse(meta.E("own", meta.Corrupt, "its journal", nil))
	if _, err := s.srv.hosted.open(t.Context(), v.ID); !errors.Is(err, meta.Corrupt) {
		t.Fatal(err)
	}
	if l := told(); len(l) != 1 || !strings.HasPrefix(l[0], "2 ") || !strings.Contains(l[0], "its journal") {
		t.Errorf("of what can't be opened: %v", l)
	}
	if l, left := s.srv.health.VolumesHealth(0); len(l) != 1 || l[0].ID != v.ID || l[0].Failed == "" || left != 0 {
		t.Errorf("asked for volumes alone: %+v, and %d more", l, left)
	}
	if l, _ := s.srv.health.VolumesHealth(v.ID); len(l) != 0 {
		t.Errorf("after the last one: %+v", l)
	}
	if l := s.srv.hosted.unable.unserved(time.Now().Add(2 * unservedTold)); len(l) != 0 {
		t.Errorf("nobody tries any more: %v", l)
	}
	refuse(nil)
	eventually(t, "it is opened", func() error { _, err := s.srv.hosted.open(t.Context(), v.ID); return err })
	o := s.srv.hosted.opened(v.ID)
	<-o.recovered
	if l := told(); len(l) != 0 {
		t.Errorf("though it is open: %v", l)
	}
	o.wg.Hold() // the volume is on the list of owners until the hold is released
	o.lose(errors.New("its lease ran out"))
	if l := told(); len(l) != 0 {
		t.Errorf("of one that goes: %v", l)
	}
	o.wg.Release()
}

// Of each identity the newest certificate counts, shown or signed, and health warns of a
// certificate's end only for connected identities.
func TestEndingCertificatesAreTold(t *testing.T) {
	t.Parallel()
	now := time.Now()
	id := func(name string, left time.Duration) peering.Identity {
		return peering.Identity{Cluster: "c", Role: peering.Client, Name: name, Begins: now.Add(left - 7*24*time.Hour), Expires: now.Add(left)}
	}
	var c seenCerts
	names := func(l []meta.CertHealth) (all []string) {
		for _, x := range l {
			all = append(all, x.Identity)
		}
		return all
	}
	c.shown(id("fresh", 4*24*time.Hour))
	gone := c.shown(id("old", 41*time.Hour))
	c.shown(id("older", time.Hour))
	c.shown(peering.Identity{Local: true})
	if l := names(c.ending(now)); !slices.Equal(l, []string{"client/older", "client/old"}) {
		t.Errorf("these end soon: %v", l)
	}
	gone()
	c.signed(id("older", 7*24*time.Hour))
	if l := names(c.ending(now)); len(l) != 0 {
		t.Errorf("one is gone, one has a new one: %v", l)
	}
	if l := c.of([]string{"client/old", "client/older", "client/nobody"}); len(l) != 2 || l[1].Ends != now.Add(7*24*time.Hour) {
		t.Errorf("asked for them: %v", l)
	}
	for i := range seenCertsMost {
		c.signed(id(fmt.Sprint(i), time.Hour))
	}
	if len(c.m) > seenCertsMost || c.m["client/fresh"] == nil || c.away != len(c.m)-2 {
		t.Errorf("%d are remembered, %d of those are not connected", len(c.m), c.away)
	}

	// The certificate of a connection is noted; the certificate of a renewal, too.
	s := newSecured(t)
	creds := s.creds(peering.Admin, "x")
	api := s.apiAs(creds)
	if _, err := api.Health.GetServerHealth(t.Context(), &admin.GetServerHealthRequest{}); err != nil {
		t.Errorf("an administrator asks: %v", err)
	}
	if l := s.srv.enrolment.certs.of([]string{"admin/x"}); len(l) != 1 || !l[0].Ends.Equal(creds.Identity().Expires) {
		t.Errorf("of who is connected: %v", l)
	}
	h := s.srv.health.Health(t.Context())
	if len(h.Certificates) != 0 {
		t.Errorf("%+v", h)
	}
}

// Health tells etcd's size, alarms and members as etcd reports each.
func TestEtcdIsTold(t *testing.T) {
	t.Parallel()
	x := trio.Start(t, 24<<20)
	cli := x.Client()
	c, err := cluster.Open(t.Context(), cli, cluster.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	eventually(t, "all are well", func() error {
		h := c.Etcd(t.Context(), x.Endpoints())
		if h.Members != 3 || len(h.Alarms) != 0 || h.Error != "" || len(h.Endpoints) != 3 {
			return fmt.Errorf("%+v", h)
		}
		for _, e := range h.Endpoints {
			if e.Error != "" || e.Quota != 24<<20 || e.Bytes == 0 || e.Used > e.Bytes || e.NoLeader {
				return fmt.Errorf("%+v", e)
			}
		}
		return nil
	})
	full, taken := string(make([]byte, 1<<20)), 0
	eventually(t, "its space is used", func() error {
		for taken <= 40 {
			// A member that stands still for a moment has its leader changed.
			if _, err := cli.Put(t.Context(), fmt.Sprint("/full/", taken), full); errors.Is(err, rpctypes.ErrNoSpace) {
				return nil
			} else if err != nil {
				return err
			}
			taken++
		}
		return fmt.Errorf("%d MiB were taken", taken)
	})
	eventually(t, "the alarm is told", func() error {
		if h := c.Etcd(t.Context(), x.Endpoints()); !slices.Equal(h.Alarms, []string{"NOSPACE"}) {
			return fmt.Errorf("%+v", h)
		}
		return nil
	})
	x.Members[2].Kill()
	eventually(t, "a member that is away is told", func() error {
		h := c.Etcd(t.Context(), x.Endpoints())
		if h.Members != 3 || h.Endpoints[2].Error == "" || h.Endpoints[0].Error != "" {
			return fmt.Errorf("%+v", h)
		}
		return nil
	})
}
