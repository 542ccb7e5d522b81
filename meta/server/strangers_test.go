package server

import (
	"net"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// displaced is less than the time that a connection may stay silent (meta/peer): a connection
// that the server closed sooner made room for others.
const displaced = 4 * time.Second

// TestIdleStrangers: beside far more silent connections than the server allows, a client is
// served. The server closes silent connections, the oldest first, as others come.
func TestIdleStrangers(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.srv.cfg.MaxConns = 20
	s.grants(2, cluster.Grant{ID: 1, Who: "client/pod", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersAsIs})
	creds := s.creds(peering.Client, "pod")
	var lived time.Duration
	for range 8 { // a machine that is short of processors may take longer
		if lived = besideStrangers(t, s, creds); lived < displaced {
			return
		}
	}
	t.Errorf("the oldest of too many strangers was closed after %v: others do not displace it", lived)
}

// besideStrangers is a client's life beside strangers, and returns how long the first stranger's
// connection lasted.
func besideStrangers(t *testing.T, s *secured, creds *peering.Credentials) time.Duration {
	t.Helper()
	const strangers = 400
	begun := time.Now()
	oldest := make(chan time.Duration, 1)
	for i := range strangers {
		nc, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if i > 0 {
			continue
		}
		go func() { // ends with the connection
			_ = nc.SetReadDeadline(time.Now().Add(time.Minute))
			_, _ = nc.Read(make([]byte, 1))
			oldest <- time.Since(begun)
		}()
	}
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.addr}, Name: "pod", Handler: &peer{leases: map[meta.Ino]meta.LeaseMode{}}, Creds: creds})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(t.Context())
	if _, err := sess.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone); err != nil {
		t.Errorf("beside %d strangers: %v", strangers, err)
	}
	if n := s.srv.conns.Load(); n > 5 {
		t.Errorf("%d connections count as known", n)
	}
	return <-oldest
}
