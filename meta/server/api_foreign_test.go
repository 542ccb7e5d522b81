package server

import (
	"crypto/tls"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/credentials"

	peering "penstock.io/penstock/meta/peer"
)

// foreignTLS makes the TLS configuration of a program outside this module from the files of a
// directory of credentials; nil: without a certificate.
func foreignTLS(t *testing.T, creds *peering.Credentials) credentials.TransportCredentials {
	t.Helper()
	cfg := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13} // another test looks at the server's identity
	if creds != nil {
		name := filepath.Join(creds.Dir(), "identity.pem")
		pair, err := tls.LoadX509KeyPair(name, name)
		if err != nil {
			t.Fatal(err)
		}
		cfg.Certificates = []tls.Certificate{pair}
	}
	return credentials.NewTLS(cfg)
}
