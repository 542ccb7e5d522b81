package server

import (
	"crypto/tls"
	"path/filepath"
	"testing"

	"google.golang.org/grpc/credentials"

	peering "penstock.io/penstock/meta/peer"
)

// foreignTLS is TLS as a program that is none of ours does it, with the files of a directory of
// credentials; nil: without a certificate.
func foreignTLS(t *testing.T, creds *peering.Credentials) credentials.TransportCredentials {
	t.Helper()
	cfg := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13} // who answers is another test's matter
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
