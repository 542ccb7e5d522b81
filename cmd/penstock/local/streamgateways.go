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

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"penstock.io/penstock/meta"
)

// StreamGateways says how a mount reaches gateways, for lines that programs append to streams.
type StreamGateways struct {
	// Addresses are the addresses, host:port, of the servers of gateways for appends; none: programs
	// can't append through the mount.
	Addresses []string
	// CA is the file (PEM) of the authorities of the gateways' certificates; "": those of the system,
	// or no TLS if all addresses are loopback addresses.
	CA string
	// Cert and Key are the files (PEM) of the certificate that logs the mount in, Login is a file with
	// NAME:PASSWORD; "": none.
	Cert, Key, Login string

	dial []grpc.DialOption
}

// Open reads the files. Errors: Invalid.
func (g *StreamGateways) Open() error {
	bad := func(name string, err error) error {
		return meta.E("read credentials for gateways", meta.Invalid, name, err)
	}
	encrypts := g.CA != "" || g.Cert != ""
	for _, at := range g.Addresses {
		host, _, err := net.SplitHostPort(at)
		if err != nil {
			return bad(at, err)
		}
		ip := net.ParseIP(host)
		encrypts = encrypts || host != "localhost" && (ip == nil || !ip.IsLoopback())
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
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
	return nil
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
