package local

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// Doors configures how the servers of a gateway authenticate their clients, and from
// which addresses clients can connect.
type Doors struct {
	// Users is the file of users (stream.Users): clients log in as one of them; "": the
	// servers ask for no credentials.
	Users string
	// Cert and Key are the files (PEM) of the servers' certificate and its key; "": the servers do
	// not encrypt.
	Cert, Key string
	// ClientCA is the file (PEM) of the authorities whose client certificates log a client in as the
	// user with the certificate's common name; "": only passwords do.
	ClientCA string
	// Open lets the servers listen beyond loopback without Users or without Cert.
	Open bool
}

// check refuses settings that do not go together. Errors: Invalid.
func (d *Doors) check() error {
	bad := func(why string) error {
		return meta.E("start gateway", meta.Invalid, "flags", errors.New(why))
	}
	switch {
	case (d.Cert == "") != (d.Key == ""):
		return bad("--tls-cert and --tls-key go together")
	case d.ClientCA != "" && d.Cert == "":
		return bad("--tls-client-ca needs --tls-cert and --tls-key: client certificates are a part of TLS")
	case d.ClientCA != "" && d.Users == "":
		return bad("--tls-client-ca needs --stream-users: the file of users has the user id of each certificate's name; 'penstock stream password NAME --no-password' adds one")
	}
	return nil
}

// users opens the file of users; nil without one.
func (d *Doors) users() (*stream.Users, error) {
	if d.Users == "" {
		return nil, nil
	}
	return stream.OpenUsers(d.Users)
}

// beyondLoopback says what is missing before a server may listen beyond loopback; nil: nothing.
func (d *Doors) beyondLoopback() error {
	if d.Open || d.Users != "" && d.Cert != "" {
		return nil
	}
	return errors.New("beyond loopback addresses a gateway's servers need users and TLS: give --stream-users, --tls-cert and --tls-key, or a loopback address such as 127.0.0.1:9092; --stream-insecure lets everybody on the network read and write streams")
}

// tls returns the configuration of TLS for a server that speaks some protocols over TLS (ALPN); nil
// without a certificate. The files are read again when they change; until the new files are
// whole, the old ones count.
func (d *Doors) tls(logger *slog.Logger, protocols ...string) (*tls.Config, error) {
	if d.Cert == "" {
		return nil, nil
	}
	k := &keptTLS{doors: d, protocols: protocols, logger: logger}
	if err := k.load(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return k.config(), nil },
	}, nil
}

// tlsEvery is how often a server looks for changed files, at the next connection.
const tlsEvery = time.Second

// keptTLS is a configuration of TLS from files.
type keptTLS struct {
	doors     *Doors
	protocols []string
	logger    *slog.Logger

	mu     sync.Mutex
	loaded *tls.Config
	files  []fs.FileInfo // of loaded
	looked time.Time
}

// config returns the configuration for a new connection.
func (k *keptTLS) config() *tls.Config {
	k.mu.Lock()
	defer k.mu.Unlock()
	if time.Since(k.looked) > tlsEvery {
		if err := k.load(); err != nil {
			k.logger.Warn("changed files of TLS can't be used; the gateway goes on with the earlier certificate", "error", err)
		}
	}
	return k.loaded
}

// load reads the files, unless they are as before. The caller holds mu, or has k alone. Errors:
// Invalid.
func (k *keptTLS) load() error {
	k.looked = time.Now()
	var files []fs.FileInfo
	same := len(k.files) > 0
	for i, name := range []string{k.doors.Cert, k.doors.Key, k.doors.ClientCA} {
		if name == "" {
			continue
		}
		info, err := os.Stat(name)
		if err != nil {
			return meta.E("read certificate", meta.Invalid, name, err)
		}
		files = append(files, info)
		same = same && os.SameFile(info, k.files[i]) && info.ModTime().Equal(k.files[i].ModTime()) && info.Size() == k.files[i].Size()
	}
	if same {
		return nil
	}
	cert, err := tls.LoadX509KeyPair(k.doors.Cert, k.doors.Key)
	if err != nil {
		return meta.E("read certificate", meta.Invalid, k.doors.Cert, err)
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: k.protocols, Certificates: []tls.Certificate{cert}}
	if k.doors.ClientCA != "" {
		b, err := os.ReadFile(k.doors.ClientCA)
		c.ClientCAs = x509.NewCertPool()
		if err == nil && !c.ClientCAs.AppendCertsFromPEM(b) {
			err = errors.New("it has no certificate in PEM form")
		}
		if err != nil {
			return meta.E("read certificate", meta.Invalid, k.doors.ClientCA, fmt.Errorf("the authorities of clients: %w", err))
		}
		c.ClientAuth = tls.VerifyClientCertIfGiven
	}
	// A resumed session would outlive a change of the authorities.
	c.SessionTicketsDisabled = true
	k.loaded, k.files = c, files
	return nil
}
