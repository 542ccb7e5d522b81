package peer

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// GatewayServer is the server name (SNI) by which a client of the cluster asks a gateway for the
// gateway's certificate of the cluster. Clients of other protocols ask the same server by a DNS name,
// and get a certificate with this DNS name. No DNS name ends in .invalid (RFC 6761).
const GatewayServer = "gateway.penstock.invalid"

// ToGateways returns the configuration of TLS with which a client of the cluster connects to
// gateways. The client shows its certificate, and takes a server of the cluster with the role
// gateway for a gateway, whatever the address. The credentials are not insecure.
func (c *Credentials) ToGateways() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, ServerName: GatewayServer,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &c.current().cert, nil },
		// VerifyConnection verifies the certificate, by its role rather than by a host name.
		InsecureSkipVerify: true,
		VerifyConnection: func(st tls.ConnectionState) error {
			id, err := c.current().verify(st.PeerCertificates, x509.ExtKeyUsageServerAuth)
			if err == nil && id.Role != Gateway {
				err = fmt.Errorf("%s answers where a gateway was expected", id)
			}
			return err
		},
	}
}

// AsGateway returns the configuration of TLS with which a gateway serves clients that ask for
// GatewayServer. protocols are the protocols above TLS (ALPN). The gateway shows its certificate of
// the cluster, and demands the certificate of a client of the cluster. Each call reads changed
// credentials.
func (c *Credentials) AsGateway(protocols ...string) *tls.Config {
	l := c.current()
	cfg := l.base()
	cfg.NextProtos = protocols
	cfg.ClientAuth = tls.RequireAnyClientCert
	cfg.VerifyConnection = func(st tls.ConnectionState) error {
		_, err := l.clientOf(st)
		return err
	}
	return cfg
}

// ClientOf returns the identity of a client that is connected to a gateway by AsGateway, as long as
// the certificate of the client is valid. An evicted client keeps its certificate: the metadata
// servers tell. Errors: why the certificate is none of a client.
func (c *Credentials) ClientOf(st tls.ConnectionState) (Identity, error) {
	return c.current().clientOf(st)
}

func (l *loaded) clientOf(st tls.ConnectionState) (Identity, error) {
	if st.ServerName != GatewayServer {
		return Identity{}, errors.New("the client has asked for another server name")
	}
	id, err := l.verify(st.PeerCertificates, x509.ExtKeyUsageClientAuth)
	if err == nil && id.Role != Client {
		err = fmt.Errorf("%s connects where a client was expected", id)
	}
	return id, err
}
