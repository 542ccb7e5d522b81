package rig

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of a Kubernetes, in a directory.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  crypto.Signer
	last int64 // serial number
}

func newAuthority(dir string) (*authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	a := &authority{dir: dir}
	t := &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, Subject: pkix.Name{CommonName: "penstock-e2e"}}
	if err := a.issue("ca", t); err != nil {
		return nil, err
	}
	// A separate key signs the tokens of service accounts.
	_, err := a.newKey("sa")
	return a, err
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

func (a *authority) newKey(name string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	b, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(a.path(name+".key"), "EC PRIVATE KEY", b)
}

func writePEM(path, kind string, b []byte) error {
	return os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600)
}

// issue writes NAME.key and NAME.crt.
func (a *authority) issue(name string, t *x509.Certificate) error {
	key, err := a.newKey(name)
	if err != nil {
		return err
	}
	a.last++
	t.SerialNumber = big.NewInt(a.last)
	t.NotBefore, t.NotAfter = time.Now().Add(-time.Minute), time.Now().Add(24*time.Hour)
	parent, signer := a.cert, a.key
	if t.IsCA {
		parent, signer = t, key
	} else {
		t.KeyUsage = x509.KeyUsageDigitalSignature
	}
	b, err := x509.CreateCertificate(rand.Reader, t, parent, key.Public(), signer)
	if err != nil {
		return err
	}
	if t.IsCA {
		if a.cert, err = x509.ParseCertificate(b); err != nil {
			return err
		}
		a.key = key
	}
	return writePEM(a.path(name+".crt"), "CERTIFICATE", b)
}

// server makes a certificate for a server with these names and addresses.
func (a *authority) server(name string, dns []string, addrs ...string) error {
	t := &x509.Certificate{Subject: pkix.Name{CommonName: name}, DNSNames: dns, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, ip := range addrs {
		t.IPAddresses = append(t.IPAddresses, net.ParseIP(ip))
	}
	return a.issue(name, t)
}

// client makes a certificate for a user of a group.
func (a *authority) client(name, user, group string) error {
	return a.issue(name, &x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: []string{group}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

// kubeconfig makes a client's certificate and a configuration file for kubectl, and
// returns the file's path.
func (a *authority) kubeconfig(name, user, group, server string) (string, error) {
	if err := a.client(name, user, group); err != nil {
		return "", err
	}
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: u, user: {client-certificate: %q, client-key: %q}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
`, server, a.path("ca.crt"), a.path(name+".crt"), a.path(name+".key"))
	return a.path(name + ".conf"), os.WriteFile(a.path(name+".conf"), []byte(text), 0o600)
}
