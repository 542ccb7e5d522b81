package peer

import (
	"crypto/tls"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A client of the cluster and a gateway of the cluster take each other; nobody else is taken for
// either of them.
func TestGatewaysAndClients(t *testing.T) {
	t.Parallel()
	ours, others := authorityOf(t, "ours"), authorityOf(t, "others")
	gateway := ours(Gateway, "g")
	connect := func(server *Credentials, client *tls.Config) (id Identity, err error) {
		a, b := net.Pipe()
		defer a.Close()
		defer b.Close()
		deadline := time.Now().Add(time.Minute)
		a.SetDeadline(deadline)
		b.SetDeadline(deadline)
		done := make(chan error, 1)
		s := tls.Server(b, &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return server.AsGateway("h2"), nil }})
		go func() {
			err := s.Handshake()
			if err == nil {
				_, err = s.Write([]byte("x"))
			} else {
				b.Close()
			}
			done <- err
		}()
		client.NextProtos = []string{"h2"}
		c := tls.Client(a, client)
		if err = c.Handshake(); err == nil {
			_, err = c.Read(make([]byte, 1))
		}
		a.Close()
		if serr := <-done; err == nil || serr != nil && strings.Contains(err.Error(), "EOF") {
			err = serr
		}
		if err == nil {
			id, err = server.ClientOf(s.ConnectionState())
		}
		return id, err
	}
	id, err := connect(gateway, ours(Client, "c").ToGateways())
	if err != nil || id.Role != Client || id.Name != "c" {
		t.Errorf("a client: %v, %v", id, err)
	}
	elsewhere := ours(Client, "c").ToGateways()
	elsewhere.ServerName = "example.com"
	for what, c := range map[string]struct {
		server *Credentials
		client *tls.Config
	}{
		"a client of another cluster":              {gateway, others(Client, "c").ToGateways()},
		"a gateway of another cluster":             {others(Gateway, "g"), ours(Client, "c").ToGateways()},
		"a chunk server that plays a gateway":      {ours(ChunkServer, "g"), ours(Client, "c").ToGateways()},
		"a client that plays a gateway":            {ours(Client, "g"), ours(Client, "c").ToGateways()},
		"a gateway that plays a client":            {gateway, ours(Gateway, "c").ToGateways()},
		"a client that asks for a name of the DNS": {gateway, elsewhere},
		"a client without a certificate":           {gateway, &tls.Config{InsecureSkipVerify: true, ServerName: GatewayServer}},
	} {
		if id, err := connect(c.server, c.client); err == nil {
			t.Errorf("%s is taken: %v", what, id)
		}
	}
}

// authorityOf returns a function that issues credentials of a new cluster.
func authorityOf(t *testing.T, cluster string) func(Role, string) *Credentials {
	a, err := NewAuthority(cluster, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return func(role Role, name string) *Credentials {
		t.Helper()
		dir := filepath.Join(t.TempDir(), "c")
		if err := a.Issue(dir, Identity{Cluster: cluster, Role: role, Name: name}, nil); err != nil {
			t.Fatal(err)
		}
		c, err := Load(dir, nil)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
}
