package server

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// Accounts: an idle account allows a second's worth at once, then the rate per second.
func TestPace(t *testing.T) {
	t.Parallel()
	var a pace
	now := time.Unix(1000, 0)
	for i := range 100 {
		if w := a.take(now, 1, 100); w > 0 {
			t.Fatalf("operation %d of the first 100 waits %v", i, w)
		}
	}
	if w := a.take(now, 50, 100); w != 500*time.Millisecond {
		t.Errorf("50 more wait %v", w)
	}
	if w := a.take(now.Add(time.Hour), 100, 100); w > 0 {
		t.Errorf("after an hour 100 wait %v", w)
	}
}

// A client asks for as much as possible over several sessions. The client gets its rate and no
// more, without an error; another client works undisturbed meanwhile.
func TestFloodIsHeldUp(t *testing.T) {
	const rate = 200
	s := newSecured(t)
	s.g.set(&cluster.View{Revision: 2, Settings: cluster.Settings{ClientRate: rate},
		Grants: []cluster.Grant{{ID: 1, Who: "client/*", Volume: 1, Rights: cluster.ReadRights, Users: cluster.UsersAsIs}}})
	dial := func(name string) *client.Session {
		sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.addr}, Name: name, Handler: &peer{leases: map[meta.Ino]meta.LeaseMode{}}, Creds: s.creds(peering.Client, name)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sess.Close(t.Context()) })
		return sess
	}
	read := func(sess *client.Session) error {
		_, err := sess.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone)
		return err
	}
	quietly := dial("quiet")
	if err := read(quietly); err != nil {
		t.Fatal(err)
	}
	var served atomic.Int64
	var stop atomic.Bool
	var wg sync.WaitGroup
	began := time.Now()
	for range 2 {
		loud := dial("loud")
		for range 16 {
			wg.Go(func() {
				for !stop.Load() {
					if err := read(loud); err != nil {
						t.Errorf("who is held up gets an error: %v", err)
						return
					}
					served.Add(1)
				}
			})
		}
	}
	for (served.Load() < 2*rate || s.srv.Counters().Held == 0) && time.Since(began) < time.Minute {
		time.Sleep(10 * time.Millisecond)
	}
	held := s.srv.Counters().Held
	// The other client has an account of its own: a hundred operations are never delayed.
	for range 100 {
		if err := read(quietly); err != nil {
			t.Fatal(err)
		}
	}
	stop.Store(true)
	wg.Wait()
	took := time.Since(began)
	// A second's worth at once, the rate since, and a frame or two read ahead for
	// each session.
	if n, most := served.Load(), int64(rate*(1+took.Seconds()))+16; n > most {
		t.Errorf("%d operations in %v, at most %d are its share", n, took, most)
	}
	if held == 0 {
		t.Error("nothing was held up")
	}
	if a := s.srv.clients.paces.of(peering.Identity{Role: peering.Client, Name: "quiet"}); a.take(time.Now(), 0, rate) > 0 {
		t.Error("who asked for little is held up")
	}
}
