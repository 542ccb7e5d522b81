package server

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// TestIdleStrangers: beside far more connections that say nothing than there may be at
// all, a client is served. They are closed, the oldest first.
func TestIdleStrangers(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.srv.cfg.MaxConns = 20
	s.grants(2, cluster.Grant{ID: 1, Who: "client/pod", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersAsIs})
	const strangers = 400
	var idle []net.Conn
	for range strangers {
		nc, err := net.Dial("tcp", s.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		idle = append(idle, nc)
	}
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.addr}, Name: "pod", Handler: &peer{leases: map[meta.Ino]meta.LeaseMode{}}, Creds: s.creds(peering.Client, "pod")})
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
	_ = idle[0].SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := idle[0].Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the oldest stranger: %v", err)
	}
}
