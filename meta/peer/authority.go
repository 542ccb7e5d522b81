package peer

import (
	"crypto"
	"crypto/aes"
	"crypto/cipher"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"penstock.io/penstock/meta"
)

// Certificates. The authority is one ECDSA P-256 key with a self-signed certificate. The
// authority signs leaf certificates, which are valid for days and renewed by their bearers. A
// leaf contains one URI:
//
//	penstock://<cluster id>/<role>/<name>
//
// Certificates contain no host names: a part of the cluster is identified by its role and
// name, not by its machine.

const (
	scheme       = "penstock"
	authorityFor = 20 * 365 * 24 * time.Hour
	// LeafFor is the life of a leaf, unless the cluster was made with another life.
	LeafFor = 7 * 24 * time.Hour
	// skew is the largest tolerated difference between the clocks of two machines.
	skew = 5 * time.Minute
)

var (
	validName    = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$`)
	validCluster = regexp.MustCompile(`^[A-Za-z0-9]{1,64}$`)
)

// CheckName refuses a name that a certificate can't contain. Errors: Invalid.
func CheckName(name string) error {
	if !validName.MatchString(name) {
		return meta.E("name", meta.Invalid, name, errors.New("a name has 1 to 63 letters, digits, dots, dashes, underscores, and begins with a letter or digit"))
	}
	return nil
}

// maxName is the longest name, in bytes.
const maxName = 63

// FitName returns name if name has at most 63 bytes. For a longer name, such as a Kubernetes
// node's (up to 253 bytes), FitName returns a name of 63 bytes for certificates: the beginning
// of name, and a digest of the whole name.
func FitName(name string) string {
	if len(name) <= maxName {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	digest := "-" + hex.EncodeToString(sum[:8])
	return name[:maxName-len(digest)] + digest
}

// ParseRole reads a role. Errors: Invalid.
func ParseRole(s string) (Role, error) {
	if r := Role(s); slices.Contains([]Role{Meta, ChunkServer, Client, Admin, Gateway}, r) {
		return r, nil
	}
	return "", meta.E("role", meta.Invalid, s, errors.New("a role is meta, chunkserver, client, gateway or admin"))
}

// admission is the prefix of Identity.Admission in the serial number of a certificate's
// subject.
const admission = "admission "

// URI returns the URI in the identity's certificates.
func (i Identity) URI() *url.URL {
	return &url.URL{Scheme: scheme, Host: i.Cluster, Path: "/" + string(i.Role) + "/" + i.Name}
}

// identityOf parses the URI of a verified certificate.
func identityOf(c *x509.Certificate) (Identity, error) {
	if len(c.URIs) != 1 || len(c.DNSNames)+len(c.IPAddresses)+len(c.EmailAddresses) != 0 {
		return Identity{}, errors.New("its certificate does not name one URI and nothing else")
	}
	u := c.URIs[0]
	role, name, ok := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	id := Identity{Cluster: u.Host, Role: Role(role), Name: name, Begins: c.NotBefore.Add(skew), Expires: c.NotAfter}
	if _, err := ParseRole(role); err != nil || !ok || !validName.MatchString(name) || !validCluster.MatchString(u.Host) || id.URI().String() != u.String() {
		return Identity{}, fmt.Errorf("its certificate names %q, no identity of a cluster", u)
	}
	if s := c.Subject.SerialNumber; s != "" {
		n, err := strconv.ParseUint(strings.TrimPrefix(s, admission), 10, 32)
		if err != nil || s != admission+strconv.FormatUint(n, 10) {
			return Identity{}, fmt.Errorf("its certificate says %q, which is no admission", s)
		}
		id.Admission = uint32(n)
	}
	return id, nil
}

// IdentityIn returns the identity in the first certificate of a chain (PEM) that the caller
// has signed or verified. Errors: Invalid.
func IdentityIn(chain []byte) (Identity, error) {
	certs, err := parseCerts(chain)
	if err != nil {
		return Identity{}, meta.E("read certificate", meta.Invalid, "", err)
	}
	id, err := identityOf(certs[0])
	if err != nil {
		return Identity{}, meta.E("read certificate", meta.Invalid, "", err)
	}
	return id, nil
}

// Authority signs certificates for a cluster.
type Authority struct {
	cert *x509.Certificate
	key  crypto.Signer
	// Life is the life of the leaves.
	Life time.Duration
}

// NewAuthority makes a key and its self-signed certificate. Errors: Invalid, IO.
func NewAuthority(cluster string, life time.Duration) (*Authority, error) {
	const op = "make certificate authority"
	if !validCluster.MatchString(cluster) {
		return nil, meta.E(op, meta.Invalid, cluster, errors.New("a cluster's id is letters and digits"))
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, meta.E(op, meta.IO, cluster, err)
	}
	now := time.Now()
	t := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "penstock " + cluster},
		NotBefore: now.Add(-skew), NotAfter: now.Add(authorityFor),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, meta.E(op, meta.Invalid, cluster, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, meta.E(op, meta.Invalid, cluster, err)
	}
	return &Authority{cert: cert, key: key, Life: life}, nil
}

// serial is a random number of 127 bits.
func serial() *big.Int {
	b := make([]byte, 16)
	rand.Read(b)
	b[0] &= 0x7f
	return new(big.Int).SetBytes(b)
}

// CertPEM is the authority's certificate, which everybody may see.
func (a *Authority) CertPEM() []byte { return certPEM(a.cert.Raw) }

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// Fingerprint is the SHA-256 of the authority's certificate, in hexadecimal.
func (a *Authority) Fingerprint() string { return fingerprint(a.cert) }

func fingerprint(c *x509.Certificate) string {
	s := sha256.Sum256(c.Raw)
	return hex.EncodeToString(s[:])
}

// CheckRequest parses a request and checks that Sign would accept the request for id. Errors:
// Invalid.
func CheckRequest(id Identity, request []byte) (*x509.CertificateRequest, error) {
	const op = "sign certificate"
	if err := CheckName(id.Name); err != nil {
		return nil, err
	}
	if _, err := ParseRole(string(id.Role)); err != nil {
		return nil, err
	}
	csr, err := x509.ParseCertificateRequest(request)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil {
		return nil, meta.E(op, meta.Invalid, id.String(), err)
	}
	if k, ok := csr.PublicKey.(*ecdsa.PublicKey); !ok || k.Curve != elliptic.P256() {
		return nil, meta.E(op, meta.Invalid, id.String(), errors.New("its key is not ECDSA P-256"))
	}
	return csr, nil
}

// KeyDigest names the key of a request: SHA-256 of the public key, hexadecimal.
func KeyDigest(request *x509.CertificateRequest) string {
	s := sha256.Sum256(request.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(s[:])
}

// Sign makes a certificate for id and the key of a request (PKCS #10 in DER). The request
// proves that its sender has the key; Sign uses no other part of the request. Sign returns the
// leaf and the authority's certificate, PEM. Errors: Invalid.
func (a *Authority) Sign(id Identity, request []byte) ([]byte, error) {
	csr, err := CheckRequest(id, request)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	life := a.Life
	if life == 0 {
		life = LeafFor
	}
	t := &x509.Certificate{
		SerialNumber: serial(), URIs: []*url.URL{id.URI()},
		NotBefore: now.Add(-skew), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, BasicConstraintsValid: true,
	}
	if id.Admission > 0 {
		t.Subject.SerialNumber = admission + strconv.FormatUint(uint64(id.Admission), 10)
	}
	// Servers are also clients of other servers; clients and administrators serve no
	// connections.
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if id.Role == Meta || id.Role == ChunkServer || id.Role == Gateway {
		t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, csr.PublicKey, a.key)
	if err != nil {
		return nil, meta.E("sign certificate", meta.Invalid, id.String(), err)
	}
	return append(certPEM(der), a.CertPEM()...), nil
}

// SealKeySize is the size, in bytes, of the key that encrypts an authority's own key.
const SealKeySize = 32

// Sealed is the authority in the form stored in etcd: its certificate, and its encrypted key
// (AES-256-GCM, the nonce in front). Metadata servers have the encryption key in their
// credentials, and etcd never sees the encryption key. So a copy of etcd's data alone makes
// nobody a member of the cluster.
type Sealed struct {
	Cert []byte        `json:"cert"` // PEM
	Key  []byte        `json:"key"`
	Life time.Duration `json:"life"` // of leaves, nanoseconds
}

// Seal encrypts.
func (a *Authority) Seal(sealKey []byte) (Sealed, error) {
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		return Sealed{}, meta.E("seal authority", meta.Invalid, "", err)
	}
	aead, err := sealer(sealKey)
	if err != nil {
		return Sealed{}, err
	}
	nonce := make([]byte, aead.NonceSize())
	rand.Read(nonce)
	return Sealed{Cert: a.CertPEM(), Key: aead.Seal(nonce, nonce, der, a.cert.Raw), Life: a.Life}, nil
}

// PrivateKey returns the authority's key, PKCS #8. The bearer of the key can act as any member
// of the cluster. Only tests call PrivateKey, to search for the key in forbidden places.
func (a *Authority) PrivateKey() ([]byte, error) { return x509.MarshalPKCS8PrivateKey(a.key) }

// Open decrypts the authority. Errors: AccessDenied (encrypted with another key), Corrupt.
func (s Sealed) Open(sealKey []byte) (*Authority, error) {
	const op = "open authority"
	aead, err := sealer(sealKey)
	if err != nil {
		return nil, err
	}
	certs, err := parseCerts(s.Cert)
	if err != nil || len(certs) != 1 {
		return nil, meta.E(op, meta.Corrupt, "", err)
	}
	if len(s.Key) < aead.NonceSize() {
		return nil, meta.E(op, meta.Corrupt, "", errors.New("the sealed key is too short"))
	}
	der, err := aead.Open(nil, s.Key[:aead.NonceSize()], s.Key[aead.NonceSize():], certs[0].Raw)
	if err != nil {
		return nil, meta.E(op, meta.AccessDenied, "", errors.New("the cluster key of these credentials does not open it"))
	}
	k, err := x509.ParsePKCS8PrivateKey(der)
	key, ok := k.(*ecdsa.PrivateKey)
	if err != nil || !ok || !key.PublicKey.Equal(certs[0].PublicKey) {
		return nil, meta.E(op, meta.Corrupt, "", errors.New("key and certificate do not belong together"))
	}
	return &Authority{cert: certs[0], key: key, Life: s.Life}, nil
}

func sealer(key []byte) (cipher.AEAD, error) {
	if len(key) != SealKeySize {
		return nil, meta.E("open authority", meta.Invalid, "", fmt.Errorf("a cluster key has %d bytes, not %d", SealKeySize, len(key)))
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, meta.E("open authority", meta.Invalid, "", err)
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		return nil, meta.E("open authority", meta.Invalid, "", err)
	}
	return aead, nil
}

// NewKey makes a key pair and the request for its certificate. keyPEM is secret.
func NewKey() (keyPEM, request []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, meta.E("make key", meta.IO, "", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, meta.E("make key", meta.IO, "", err)
	}
	request, err = requestFor(key)
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), request, err
}

func requestFor(key any) ([]byte, error) {
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, meta.E("make key", meta.IO, "", err)
	}
	return request, nil
}

func parseCerts(b []byte) (all []*x509.Certificate, err error) {
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	if len(all) == 0 {
		return nil, errors.New("no certificate in it")
	}
	return all, nil
}

// Issue makes a directory of credentials for an identity, with a new key. clusterKey is for
// metadata servers.
func (a *Authority) Issue(dir string, id Identity, clusterKey []byte) error {
	key, request, err := NewKey()
	if err != nil {
		return err
	}
	chain, err := a.Sign(id, request)
	if err != nil {
		return err
	}
	return Save(dir, id, key, chain, a.CertPEM(), clusterKey)
}
