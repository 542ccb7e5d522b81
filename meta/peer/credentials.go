package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"penstock.io/penstock/meta"
)

// A directory of credentials, mode 0700:
//
//	ca.pem        the certificates of trusted authorities, one or more
//	identity.pem  the own private key, the own certificate, the authority's; mode 0600.
//	              One file, so that a rename replaces key and certificate together
//	joining.key   the own private key during the request for the first certificate; mode 0600
//	cluster.key   metadata servers only: decrypts the authority's own key, 64 hex
//	              digits; mode 0600
//	authority.sealed  metadata servers only: a copy of the authority as stored in etcd,
//	              JSON of Sealed; mode 0600. After the loss of etcd, the cluster gets its
//	              authority from this file, since no checkpoint has the authority
const (
	caFile         = "ca.pem"
	identityFile   = "identity.pem"
	joiningFile    = "joining.key"
	clusterKeyFile = "cluster.key"
	sealedFile     = "authority.sealed"
)

// Credentials are a process's certificate, and the authorities by which the process verifies
// its peers. Nil credentials allow Unix sockets only. After a change of the files, the next
// connection reads the files again, at most once a second. Safe for concurrent use.
type Credentials struct {
	insecure bool
	dir      string
	log      *slog.Logger

	now     atomic.Pointer[loaded]
	mu      sync.Mutex
	checked time.Time
}

// loaded is the contents of a directory at one time.
type loaded struct {
	stamp string // of the files
	cert  tls.Certificate
	leaf  *x509.Certificate
	id    Identity
	roots *x509.CertPool
	caPEM []byte
}

// Insecure returns credentials that trust every peer, between loopback addresses only.
func Insecure() *Credentials { return &Credentials{insecure: true} }

// IsInsecure reports whether Insecure made the credentials.
func (c *Credentials) IsInsecure() bool { return c != nil && c.insecure }

// Load reads a directory. Errors: NotFound (the directory has no credentials), AccessDenied
// (other users may read the key), Corrupt, IO.
func Load(dir string, log *slog.Logger) (*Credentials, error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	// The process may change its working directory before it reads the files again.
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, meta.E("read credentials", meta.IO, dir, err)
	}
	l, err := load(dir)
	if err != nil {
		return nil, err
	}
	c := &Credentials{dir: dir, log: log, checked: time.Now()}
	c.now.Store(l)
	return c, nil
}

func load(dir string) (*loaded, error) {
	const op = "read credentials"
	stamp, err := stampOf(dir)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, identityFile)
	st, err := os.Stat(path)
	if err != nil {
		return nil, meta.E(op, meta.IO, path, err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, meta.E(op, meta.AccessDenied, path, fmt.Errorf("its mode is %04o: others may read the private key; chmod 600 it, and replace it if others have read it", st.Mode().Perm()))
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, meta.E(op, meta.IO, path, err)
	}
	l := &loaded{stamp: stamp}
	if l.cert, err = tls.X509KeyPair(b, b); err != nil {
		return nil, meta.E(op, meta.Corrupt, path, err)
	}
	if l.leaf, err = x509.ParseCertificate(l.cert.Certificate[0]); err != nil {
		return nil, meta.E(op, meta.Corrupt, path, err)
	}
	if l.id, err = identityOf(l.leaf); err != nil {
		return nil, meta.E(op, meta.Corrupt, path, err)
	}
	path = filepath.Join(dir, caFile)
	if l.caPEM, err = os.ReadFile(path); err != nil {
		return nil, meta.E(op, meta.IO, path, err)
	}
	certs, err := parseCerts(l.caPEM)
	if err != nil {
		return nil, meta.E(op, meta.Corrupt, path, err)
	}
	l.roots = x509.NewCertPool()
	for _, r := range certs {
		l.roots.AddCert(r)
	}
	return l, nil
}

// stampOf identifies the present versions of the files.
func stampOf(dir string) (string, error) {
	var s strings.Builder
	for _, name := range []string{identityFile, caFile} {
		path := filepath.Join(dir, name)
		st, err := os.Stat(path)
		if errors.Is(err, os.ErrNotExist) {
			return "", meta.E("read credentials", meta.NotFound, path, errors.New("no credentials are there; 'penstock cluster join' gets some for a token"))
		}
		if err != nil {
			return "", meta.E("read credentials", meta.IO, path, err)
		}
		// The inode, because two files may be written within one tick of the kernel's clock.
		inode := st.Sys().(*syscall.Stat_t).Ino
		fmt.Fprintf(&s, "%d %d %d;", st.ModTime().UnixNano(), st.Size(), inode)
	}
	return s.String(), nil
}

// current returns the contents of the directory, checked at most once a second. While the
// directory has no usable contents, the previous contents stay in use.
func (c *Credentials) current() *loaded {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.now.Load()
	if time.Since(c.checked) < time.Second {
		return l
	}
	c.checked = time.Now()
	if stamp, err := stampOf(c.dir); err == nil && stamp == l.stamp {
		return l
	}
	next, err := load(c.dir)
	if err == nil && (next.id.Cluster != l.id.Cluster || next.id.Role != l.id.Role || next.id.Name != l.id.Name) {
		err = fmt.Errorf("they are of %s of cluster %s, and this process is %s of cluster %s", next.id, next.id.Cluster, l.id, l.id.Cluster)
	}
	if err != nil {
		c.log.Warn("new credentials are not used", "dir", c.dir, "error", err)
		return l
	}
	c.log.Info("credentials read again", "identity", next.id.String(), "expires", next.leaf.NotAfter)
	c.now.Store(next)
	return next
}

// Identity returns the identity shown to peers; the zero value for insecure credentials.
func (c *Credentials) Identity() Identity {
	if c == nil || c.insecure {
		return Identity{}
	}
	return c.current().id
}

// RenewAt returns the time to request a new certificate: after half of the present
// certificate's life.
func (c *Credentials) RenewAt() time.Time {
	l := c.current().leaf
	return l.NotAfter.Add(-l.NotAfter.Sub(l.NotBefore.Add(skew)) / 2)
}

// ClusterKey reads the key that decrypts the authority's key. Errors: NotFound, Corrupt, IO.
func (c *Credentials) ClusterKey() ([]byte, error) {
	path := filepath.Join(c.dir, clusterKeyFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, meta.E("read cluster key", meta.NotFound, path, errors.New("only a meta server's credentials hold one"))
	}
	if err != nil {
		return nil, meta.E("read cluster key", meta.IO, path, err)
	}
	key, err := hex.DecodeString(strings.TrimSpace(string(b)))
	if err != nil || len(key) != SealKeySize {
		return nil, meta.E("read cluster key", meta.Corrupt, path, err)
	}
	return key, nil
}

// SealedAuthority reads the copy of the authority. Errors: NotFound, Corrupt, IO.
func (c *Credentials) SealedAuthority() (s Sealed, err error) {
	const op = "read authority"
	path := filepath.Join(c.dir, sealedFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return s, meta.E(op, meta.NotFound, path, errors.New("only a meta server's credentials hold one"))
	}
	if err != nil {
		return s, meta.E(op, meta.IO, path, err)
	}
	if err := json.Unmarshal(b, &s); err != nil || len(s.Cert) == 0 {
		return s, meta.E(op, meta.Corrupt, path, err)
	}
	return s, nil
}

// KeepAuthority writes a copy of the authority into a metadata server's directory, unless the
// directory has an identical copy. Errors: IO.
func KeepAuthority(dir string, s Sealed) error {
	b, err := json.Marshal(s)
	if err != nil {
		panic("peer: a sealed authority is plain data: " + err.Error())
	}
	if have, err := os.ReadFile(filepath.Join(dir, sealedFile)); err == nil && bytes.Equal(have, b) {
		return nil
	}
	return writeFile(dir, sealedFile, b)
}

// Dir returns the directory of the credentials; "" for insecure credentials.
func (c *Credentials) Dir() string { return c.dir }

// Replace installs a renewed certificate: key and chain from NewKey and Sign.
func (c *Credentials) Replace(keyPEM, chainPEM []byte) error {
	if err := check(keyPEM, chainPEM, c.current().roots, c.Identity()); err != nil {
		return err
	}
	if err := writeFile(c.dir, identityFile, append(bytes.Clone(keyPEM), chainPEM...)); err != nil {
		return err
	}
	c.mu.Lock()
	c.checked = time.Time{}
	c.mu.Unlock()
	c.current()
	return ForgetJoiningKey(c.dir)
}

// check verifies a new chain before the chain replaces a good chain. Errors: Corrupt,
// AccessDenied.
func check(keyPEM, chainPEM []byte, roots *x509.CertPool, want Identity) error {
	const op = "check new certificate"
	pair, err := tls.X509KeyPair(chainPEM, keyPEM)
	if err != nil {
		return meta.E(op, meta.Corrupt, want.String(), err)
	}
	leaf, err := x509.ParseCertificate(pair.Certificate[0])
	if err != nil {
		return meta.E(op, meta.Corrupt, want.String(), err)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		return meta.E(op, meta.AccessDenied, want.String(), err)
	}
	id, err := identityOf(leaf)
	if err != nil {
		return meta.E(op, meta.AccessDenied, want.String(), err)
	}
	if id.Cluster != want.Cluster || id.Role != want.Role || id.Name != want.Name {
		return meta.E(op, meta.AccessDenied, want.String(), fmt.Errorf("it was signed for %s of cluster %s", id, id.Cluster))
	}
	return nil
}

// Save makes a directory of credentials; clusterKey is for metadata servers. Save never
// replaces an identity. Errors: Exists, IO, and check's.
func Save(dir string, id Identity, keyPEM, chainPEM, caPEM, clusterKey []byte) error {
	const op = "write credentials"
	certs, err := parseCerts(caPEM)
	if err != nil {
		return meta.E(op, meta.Corrupt, dir, err)
	}
	roots := x509.NewCertPool()
	for _, r := range certs {
		roots.AddCert(r)
	}
	if err := check(keyPEM, chainPEM, roots, id); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return meta.E(op, meta.IO, dir, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, identityFile)); err == nil {
		return meta.E(op, meta.Exists, dir, errors.New("it holds credentials already"))
	}
	if clusterKey != nil {
		if err := writeFile(dir, clusterKeyFile, []byte(hex.EncodeToString(clusterKey)+"\n")); err != nil {
			return err
		}
	}
	if err := writeFile(dir, caFile, caPEM); err != nil {
		return err
	}
	if err := writeFile(dir, identityFile, append(bytes.Clone(keyPEM), chainPEM...)); err != nil {
		return err
	}
	return ForgetJoiningKey(dir)
}

// JoiningKey is NewKey for the first certificate of a directory of credentials. Until Save or
// ForgetJoiningKey, JoiningKey returns the same key, also after a kill, so that a process
// without an answer repeats its request with the same key. made: the key is new, so no request
// was sent with the key. Errors: Exists (the directory has credentials), Corrupt, IO.
func JoiningKey(dir string) (keyPEM, request []byte, made bool, err error) {
	const op = "make key"
	if _, err := os.Lstat(filepath.Join(dir, identityFile)); err == nil {
		return nil, nil, false, meta.E(op, meta.Exists, dir, errors.New("it holds credentials already"))
	}
	path := filepath.Join(dir, joiningFile)
	switch keyPEM, err = os.ReadFile(path); {
	case errors.Is(err, fs.ErrNotExist):
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, nil, false, meta.E(op, meta.IO, dir, err)
		}
		if keyPEM, request, err = NewKey(); err == nil {
			err = writeFile(dir, joiningFile, keyPEM)
		}
		return keyPEM, request, true, err
	case err != nil:
		return nil, nil, false, meta.E(op, meta.IO, path, err)
	}
	block, _ := pem.Decode(keyPEM)
	if block == nil {
		return nil, nil, false, meta.E(op, meta.Corrupt, path, errors.New("it is no key; remove it"))
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, nil, false, meta.E(op, meta.Corrupt, path, err)
	}
	request, err = requestFor(key)
	return keyPEM, request, false, err
}

// ForgetJoiningKey removes the key of JoiningKey, after the cluster refused or signed the key.
// After a kill between writing the credentials and the removal, the next join or renewal
// removes the key. Errors: IO.
func ForgetJoiningKey(dir string) error {
	if err := os.Remove(filepath.Join(dir, joiningFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return meta.E("write credentials", meta.IO, dir, err)
	}
	return nil
}

// writeFile replaces a file: write, sync, rename, sync the folder.
func writeFile(dir, name string, b []byte) error {
	path := filepath.Join(dir, name)
	f, err := os.CreateTemp(dir, "."+name+".*") // mode 0600
	if err != nil {
		return meta.E("write credentials", meta.IO, path, err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return meta.E("write credentials", meta.IO, path, err)
	}
	d, err := os.Open(dir)
	if err == nil {
		err = errors.Join(d.Sync(), d.Close())
	}
	if err != nil {
		return meta.E("write credentials", meta.IO, path, err)
	}
	return nil
}

// verify checks a peer's chain and returns the peer's identity.
func (l *loaded) verify(chain []*x509.Certificate, usage x509.ExtKeyUsage) (Identity, error) {
	if len(chain) == 0 {
		return Identity{}, errors.New("it showed no certificate")
	}
	between := x509.NewCertPool()
	for _, c := range chain[1:] {
		between.AddCert(c)
	}
	if _, err := chain[0].Verify(x509.VerifyOptions{Roots: l.roots, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{usage}}); err != nil {
		if _, is := errors.AsType[x509.UnknownAuthorityError](err); is && l.id.Cluster != "" {
			err = fmt.Errorf("it belongs to another cluster than ours, %s: its certificate comes from another authority: %w", l.id.Cluster, err)
		}
		return Identity{}, err
	}
	id, err := identityOf(chain[0])
	if err != nil {
		return Identity{}, err
	}
	if id.Cluster != l.id.Cluster {
		return Identity{}, fmt.Errorf("it is %s of cluster %s, and this is cluster %s", id, id.Cluster, l.id.Cluster)
	}
	return id, nil
}

// base returns the configuration common to both sides of a handshake.
func (l *loaded) base() *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{l.cert}, MinVersion: tls.VersionTLS13, NextProtos: []string{"penstock"},
		// A resumed session would outlive the certificate with which the session began.
		SessionTicketsDisabled: true,
	}
}

// server greets an accepted TCP connection.
func (c *Credentials) server(ctx context.Context, nc net.Conn, joiners bool) (net.Conn, Identity, error) {
	if c.insecure {
		if a, ok := nc.RemoteAddr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
			return nil, Identity{}, errors.New("no loopback address")
		}
		return nc, Identity{Insecure: true}, nil
	}
	l := c.current()
	cfg := l.base()
	cfg.ClientAuth = tls.RequireAnyClientCert
	if joiners {
		// A metadata server: gRPC clients require a server that announces HTTP/2.
		cfg.NextProtos = append(cfg.NextProtos, "h2")
		cfg.ClientAuth = tls.RequestClientCert
	}
	var id Identity
	cfg.VerifyConnection = func(st tls.ConnectionState) (err error) {
		if len(st.PeerCertificates) == 0 && joiners {
			return nil
		}
		id, err = l.verify(st.PeerCertificates, x509.ExtKeyUsageClientAuth)
		return err
	}
	t := tls.Server(nc, cfg)
	ctx, cancel := context.WithTimeout(ctx, handshakeWait)
	defer cancel()
	if err := t.HandshakeContext(ctx); err != nil {
		return nil, Identity{}, err
	}
	return t, id, nil
}

// client does the handshake of the dialling side; the peer must have the role.
func (c *Credentials) client(ctx context.Context, nc net.Conn, role Role) (net.Conn, error) {
	l := c.current()
	cfg := l.base()
	// VerifyConnection verifies the certificate, by its role rather than by a host name.
	cfg.InsecureSkipVerify = true
	cfg.VerifyConnection = func(st tls.ConnectionState) error {
		id, err := l.verify(st.PeerCertificates, x509.ExtKeyUsageServerAuth)
		if err == nil && id.Role != role {
			err = fmt.Errorf("%s answers where a %s was expected", id, role)
		}
		return err
	}
	t := tls.Client(nc, cfg)
	if err := shakeHands(ctx, t); err != nil {
		return nil, err
	}
	return t, nil
}

// silentError is a handshake that the peer did not answer in time.
type silentError struct{ cause error }

func (e silentError) Error() string {
	if e.cause == context.DeadlineExceeded {
		return "the peer did not answer in time"
	}
	return e.cause.Error()
}

// Unwrap lets callers tell a timeout.
func (e silentError) Unwrap() error { return context.DeadlineExceeded }

// shakeHands does the handshake of the dialling side, within handshakeWait. Errors:
// context.DeadlineExceeded, with the cause of ctx as its text; those of crypto/tls.
func shakeHands(ctx context.Context, t *tls.Conn) error {
	ctx, cancel := context.WithTimeoutCause(ctx, handshakeWait, fmt.Errorf("the peer did not answer within %v", handshakeWait))
	defer cancel()
	err := t.HandshakeContext(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		return silentError{context.Cause(ctx)}
	}
	return err
}

// DialStranger connects to a metadata server without own credentials. The server must belong
// to the authority whose certificate has the given fingerprint, taken from a join token.
// DialStranger also returns this certificate, PEM. Errors: Unavailable, AccessDenied (a server
// of another authority answers).
func DialStranger(ctx context.Context, addr, authority string) (net.Conn, []byte, error) {
	const op = "dial"
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, nil, meta.E(op, meta.Unavailable, addr, err)
	}
	var ca []byte
	t := tls.Client(nc, &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{"penstock"}, SessionTicketsDisabled: true,
		InsecureSkipVerify: true, // verified below, against the fingerprint
		VerifyConnection: func(st tls.ConnectionState) error {
			l := loaded{roots: x509.NewCertPool()}
			for _, c := range st.PeerCertificates {
				if fingerprint(c) == authority && c.IsCA {
					l.roots.AddCert(c)
					ca = certPEM(c.Raw)
				}
			}
			if ca == nil {
				return errors.New("it does not belong to the cluster that the token is for: its certificate comes from another authority")
			}
			if id, err := identityOf(st.PeerCertificates[0]); err == nil {
				l.id.Cluster = id.Cluster // the token names none; the authority vouches
			}
			id, err := l.verify(st.PeerCertificates, x509.ExtKeyUsageServerAuth)
			if err == nil && id.Role != Meta {
				err = fmt.Errorf("%s answers where a meta server was expected", id)
			}
			return err
		},
	})
	if err := shakeHands(ctx, t); err != nil {
		nc.Close()
		return nil, nil, meta.E(op, handshakeKind(err), addr, err)
	}
	return t, ca, nil
}
