package local

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"os"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/server"
)

// EtcdTLS names the CA, certificate and key files for etcd; all empty: no TLS.
type EtcdTLS struct {
	CA, Cert, Key string
}

// Config reads the files; nil if all names are empty.
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
		// Read the files for each connection: etcd's certificates are renewed, too.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			c, err := tls.LoadX509KeyPair(e.Cert, e.Key)
			return &c, err
		}
	}
	return cfg, nil
}

// trust returns the means of a metadata server with credentials to let others join: the
// members, the cluster's key and the authority. trust returns nil without credentials.
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
		// No checkpoint has the authority: if etcd is lost, 'penstock cluster restore' takes
		// the authority from this copy.
		if err := peer.KeepAuthority(creds.Dir(), sealed); err != nil {
			log.Warn("the copy of the certificate authority could not be written beside cluster.key", "error", err)
		}
		return open, nil
	}
	if _, err := t.Authority(ctx); err != nil {
		log.Warn("the certificate authority can't be read now: no server and no client can join", "error", err)
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

// boundTo returns the identity that capabilities for a holder of creds are bound to; ""
// without certificates.
func boundTo(creds *peer.Credentials) string {
	if creds == nil || creds.IsInsecure() {
		return ""
	}
	return creds.Identity().String()
}

// keepRenewed renews a process's certificate at the cluster's metadata servers, until ctx
// ends.
func keepRenewed(ctx context.Context, addrs []string, creds *peer.Credentials, log *slog.Logger) {
	peer.KeepRenewed(ctx, creds, func(err error) { log.Warn("the certificate could not be renewed", "error", err) },
		func(ctx context.Context) error { return admin.Renew(ctx, addrs, creds) })
}

// KeepRenewed renews a client's certificate at the cluster's metadata servers, until ctx ends.
func KeepRenewed(ctx context.Context, addrs []string, creds *peer.Credentials, log *slog.Logger) {
	keepRenewed(ctx, addrs, creds, log)
}

// keepRenewed renews the metadata server's own certificate; the server signs with the
// cluster's authority.
func (m *Meta) keepRenewed(ctx context.Context, t *server.Trust) {
	creds := m.cfg.Creds
	peer.KeepRenewed(ctx, creds, func(err error) { m.cfg.Logger.Warn("the certificate could not be renewed", "error", err) },
		func(ctx context.Context) error {
			err := peer.Renew(creds, func(request []byte) ([]byte, error) {
				a, err := t.Authority(ctx)
				if err != nil {
					return nil, err
				}
				return a.Sign(creds.Identity(), request)
			})
			if err == nil {
				t.Renewed(ctx, creds.Identity(), m.cfg.Logger)
			}
			return err
		})
}
