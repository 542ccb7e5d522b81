package local

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/server"
)

// EtcdTLS names the files that are shown to etcd; all empty: no TLS.
type EtcdTLS struct {
	CA, Cert, Key string
}

// Config reads them; nil without.
func (e EtcdTLS) Config() (*tls.Config, error) {
	const op = "read etcd's certificates"
	if e == (EtcdTLS{}) {
		return nil, nil
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if e.CA != "" {
		b, err := os.ReadFile(e.CA)
		if err != nil {
			return nil, meta.E(op, meta.IO, e.CA, err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(b) {
			return nil, meta.E(op, meta.Corrupt, e.CA, errors.New("no certificate in it"))
		}
	}
	if (e.Cert == "") != (e.Key == "") {
		return nil, meta.E(op, meta.Invalid, e.Cert+e.Key, errors.New("a certificate and its key go together"))
	}
	if e.Cert != "" {
		if _, err := tls.LoadX509KeyPair(e.Cert, e.Key); err != nil {
			return nil, meta.E(op, meta.Corrupt, e.Cert, err)
		}
		// Read again for each connection: etcd's certificates are renewed, too.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			c, err := tls.LoadX509KeyPair(e.Cert, e.Key)
			return &c, err
		}
	}
	return cfg, nil
}

// trust is what a meta server with credentials lets others join with; nil
// without.
func trust(ctx context.Context, c *cluster.Cluster, creds *peer.Credentials, log *slog.Logger) (*server.Trust, error) {
	if creds == nil || creds.IsInsecure() {
		return nil, nil
	}
	key, err := creds.ClusterKey()
	if err != nil {
		return nil, err
	}
	t := &server.Trust{Members: c, ClusterKey: key}
	var mu sync.Mutex
	var open *peer.Authority
	t.Authority = func(ctx context.Context) (*peer.Authority, error) {
		mu.Lock()
		defer mu.Unlock()
		if open != nil {
			return open, nil
		}
		sealed, err := c.Authority(ctx)
		if err != nil {
			return nil, err
		}
		if open, err = sealed.Open(key); err != nil {
			return nil, err
		}
		// No checkpoint has it: this copy is what it comes back from with a lost
		// etcd.
		if err := peer.KeepAuthority(creds.Dir(), sealed); err != nil {
			log.Warn("the copy of the certificate authority could not be written beside cluster.key", "error", err)
		}
		return open, nil
	}
	if _, err := t.Authority(ctx); err != nil {
		log.Warn("the certificate authority can't be read now: nobody joins", "error", err)
	}
	return t, nil
}

// checkRole refuses to start a server with the certificate of another role.
func checkRole(creds *peer.Credentials, role peer.Role) error {
	if creds == nil || creds.IsInsecure() || creds.Identity().Role == role {
		return nil
	}
	return meta.E("start", meta.AccessDenied, creds.Identity().String(), errors.New("these credentials are not a "+string(role)+"'s"))
}

// boundTo is what capabilities for a holder of credentials are bound to.
func boundTo(creds *peer.Credentials) string {
	if creds == nil || creds.IsInsecure() {
		return ""
	}
	return creds.Identity().String()
}

// keepRenewed renews a process's certificate at the cluster's meta servers.
func keepRenewed(ctx context.Context, addrs []string, creds *peer.Credentials, log *slog.Logger) {
	metaclient.KeepRenewed(ctx, creds, func(err error) { log.Warn("the certificate could not be renewed", "error", err) },
		func(ctx context.Context) error { return metaclient.Renew(ctx, addrs, creds) })
}

// KeepRenewed renews a client's certificate at the cluster's meta servers.
func KeepRenewed(ctx context.Context, addrs []string, creds *peer.Credentials, log *slog.Logger) {
	keepRenewed(ctx, addrs, creds, log)
}

// keepRenewed renews a meta server's certificate: it signs its own.
func (m *Meta) keepRenewed(ctx context.Context, t *server.Trust) {
	creds := m.cfg.Creds
	metaclient.KeepRenewed(ctx, creds, func(err error) { m.cfg.Logger.Warn("the certificate could not be renewed", "error", err) },
		func(ctx context.Context) error {
			return metaclient.RenewBy(creds, func(request []byte) ([]byte, error) {
				a, err := t.Authority(ctx)
				if err != nil {
					return nil, err
				}
				return a.Sign(creds.Identity(), request)
			})
		})
}

// FoundConfig is what a new cluster is made of.
type FoundConfig struct {
	// Dir is the data directory of the first meta server, whose embedded etcd
	// holds the cluster; or Etcd are the endpoints of one.
	Dir     string
	Etcd    []string
	EtcdTLS EtcdTLS
	// Credentials is a directory that does not exist yet: it gets one for the
	// first meta server and one for the administrator.
	Credentials string
	Meta        string        // name of the first meta server
	Life        time.Duration // of certificates
	Logger      *slog.Logger
}

// Found makes a cluster with a certificate authority. It never touches one that
// is there. Errors: Exists, Invalid.
func Found(ctx context.Context, cfg FoundConfig) (id string, err error) {
	if err := peer.CheckName(cfg.Meta); err != nil {
		return "", err
	}
	if _, err := os.Lstat(cfg.Credentials); err == nil {
		return "", meta.E("make cluster", meta.Exists, cfg.Credentials, errors.New("credentials are written to a directory that does not exist yet"))
	}
	var cli *clientv3.Client
	if len(cfg.Etcd) == 0 {
		_, lock, err := lockAndCheck(&cfg.Dir)
		if err != nil {
			return "", err
		}
		defer lock.Close()
		s, err := embedded.Start(embedded.Config{Dir: filepath.Join(cfg.Dir, etcdDir), Logger: cfg.Logger.With("part", "etcd")})
		if err != nil {
			return "", err
		}
		defer s.Close()
		cli = s.Client()
	} else {
		t, err := cfg.EtcdTLS.Config()
		if err != nil {
			return "", err
		}
		if cli, err = cluster.Dial(cfg.Etcd, t); err != nil {
			return "", err
		}
		defer cli.Close()
	}
	key := make([]byte, peer.SealKeySize)
	rand.Read(key)
	var a *peer.Authority
	var sealed peer.Sealed
	id, err = cluster.Found(ctx, cli, cluster.Config{}, func(id string) (peer.Sealed, error) {
		if a, err = peer.NewAuthority(id, cfg.Life); err != nil {
			return peer.Sealed{}, err
		}
		sealed, err = a.Seal(key)
		return sealed, err
	})
	if err != nil {
		return "", err
	}
	c, err := cluster.Open(ctx, cli, cluster.Config{Expect: id, Logger: cfg.Logger})
	if err != nil {
		return id, err
	}
	defer c.Close()
	for _, m := range []struct {
		dir        string
		role       peer.Role
		name       string
		clusterKey []byte
	}{{"meta", peer.Meta, cfg.Meta, key}, {"admin", peer.Admin, "admin", nil}} {
		if err := a.Issue(filepath.Join(cfg.Credentials, m.dir), peer.Identity{Cluster: id, Role: m.role, Name: m.name}, m.clusterKey); err != nil {
			return id, err
		}
		if m.role == peer.Meta {
			if err := peer.KeepAuthority(filepath.Join(cfg.Credentials, m.dir), sealed); err != nil {
				return id, err
			}
		}
		if _, err := c.Enrol(ctx, cluster.Member{Role: m.role, Name: m.name, Joined: meta.Time(time.Now().UnixNano())}, true); err != nil {
			return id, err
		}
	}
	return id, nil
}
