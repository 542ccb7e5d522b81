package local

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/peer"
)

// StreamGateways says how a mount reaches gateways, for lines that programs append to streams.
type StreamGateways struct {
	// Addresses are the addresses, host:port, of the servers of gateways for appends; none: the mount
	// finds gateways on the list of the metadata servers Meta.
	Addresses []string
	// CA is the file (PEM) of the authorities of the gateways' certificates; "": those of the system.
	CA string
	// Cert and Key are the files (PEM) of the certificate that logs the mount in, Login is a file with
	// NAME:PASSWORD. Without CA, Cert and Login the mount logs in with Creds, its certificate of the
	// cluster, except at given addresses that are all loopback addresses: there it does not log in, and
	// does not encrypt.
	Cert, Key, Login string
	// Meta are addresses of metadata servers; Creds are shown to them.
	Meta  []string
	Creds *peer.Credentials

	dial []grpc.DialOption
	list *admin.Client // nil: the addresses are given, or nobody has a list

	mu     sync.Mutex
	found  []string
	away   bool      // a known gateway does not run
	looked time.Time // when the metadata servers told found and away
}

// foundFor is how long a mount goes by a list of gateways.
const foundFor = 2 * time.Second

// Open reads the files. Errors: Invalid.
func (g *StreamGateways) Open() error {
	bad := func(name string, err error) error {
		return meta.E("read credentials for gateways", meta.Invalid, name, err)
	}
	encrypts := g.CA != "" || g.Cert != "" || len(g.Addresses) == 0 && g.given()
	for _, at := range g.Addresses {
		if _, _, err := net.SplitHostPort(at); err != nil {
			return bad(at, err)
		}
		encrypts = encrypts || !isLoopback(at)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if member := !g.given() && g.certified(); member && (encrypts || len(g.Addresses) == 0) {
		config, encrypts = g.Creds.ToGateways(), true
	}
	if g.CA != "" {
		b, err := os.ReadFile(g.CA)
		config.RootCAs = x509.NewCertPool()
		if err == nil && !config.RootCAs.AppendCertsFromPEM(b) {
			err = errors.New("it has no certificate in PEM form")
		}
		if err != nil {
			return bad(g.CA, err)
		}
	}
	if g.Cert != "" || g.Key != "" {
		cert, err := tls.LoadX509KeyPair(g.Cert, g.Key)
		if err != nil {
			return bad(g.Cert, err)
		}
		config.Certificates = []tls.Certificate{cert}
	}
	how := insecure.NewCredentials()
	if encrypts {
		how = credentials.NewTLS(config)
	}
	g.dial = []grpc.DialOption{grpc.WithTransportCredentials(how)}
	if g.Login != "" {
		b, err := os.ReadFile(g.Login)
		text := strings.TrimRight(string(b), "\r\n")
		if err == nil && !strings.Contains(text, ":") {
			err = errors.New("the file has a line NAME:PASSWORD")
		}
		if err != nil {
			return bad(g.Login, err)
		}
		g.dial = append(g.dial, grpc.WithPerRPCCredentials(basicLogin{"Basic " + base64.StdEncoding.EncodeToString([]byte(text)), encrypts}))
	}
	if len(g.Addresses) > 0 || len(g.Meta) == 0 {
		return nil
	}
	var err error
	g.list, err = admin.New(admin.Config{Addrs: g.Meta, Creds: g.Creds})
	return err
}

// Close ends the connection to the metadata servers.
func (g *StreamGateways) Close() error {
	if g.list == nil {
		return nil
	}
	return g.list.Close()
}

// given reports that the mount has a login of its own for gateways, or authorities.
func (g *StreamGateways) given() bool { return g.CA != "" || g.Cert != "" || g.Login != "" }

// certified reports that the mount has a certificate of the cluster.
func (g *StreamGateways) certified() bool { return g.Creds != nil && !g.Creds.IsInsecure() }

// isLoopback reports whether an address is a loopback address, or at localhost.
func isLoopback(at string) bool {
	host, _, err := net.SplitHostPort(at)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}

// addresses returns the addresses of the gateways at which the mount can log in. Errors: those of the
// metadata servers.
func (g *StreamGateways) addresses(ctx context.Context) ([]string, error) {
	if g.list == nil {
		return g.Addresses, nil
	}
	g.mu.Lock()
	found, fresh := g.found, time.Since(g.looked) < foundFor
	g.mu.Unlock()
	if fresh {
		return found, nil
	}
	answer, err := g.list.Gateways.ListGateways(ctx, &admin.ListGatewaysRequest{})
	if err != nil {
		return nil, err
	}
	found = nil
	away := false
	for _, gw := range answer.Gateways {
		away = away || gw.Instance == ""
		if gw.Instance != "" && gw.Ingest != "" && g.suits(gw) {
			found = append(found, gw.Ingest)
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.found, g.away, g.looked = found, away, time.Now()
	return found, nil
}

// hasAddresses reports whether there is a gateway at which the mount can log in, or may be one soon: a
// known gateway that does not run may be restarting. Errors: those of the metadata servers.
func (g *StreamGateways) hasAddresses(ctx context.Context) (bool, error) {
	found, err := g.addresses(ctx)
	if err != nil || len(found) > 0 {
		return err == nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.away, nil
}

// suits reports whether the mount can log in at a gateway of the list. Without TLS the mount can't
// tell a gateway from another program: the mount then takes gateways of the own machine only, in a
// cluster without certificates.
func (g *StreamGateways) suits(gw *admin.Gateway) bool {
	switch {
	case g.given():
		return gw.IngestTls
	case g.certified():
		return gw.IngestMembers
	}
	return !gw.IngestTls && isLoopback(gw.Ingest)
}

// basicLogin logs each call in with a name and a password.
type basicLogin struct {
	header   string
	encrypts bool // only over TLS
}

func (l basicLogin) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": l.header}, nil
}

func (l basicLogin) RequireTransportSecurity() bool { return l.encrypts }
