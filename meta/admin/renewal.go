package admin

import (
	"context"

	"penstock.io/penstock/meta/peer"
)

// Renew gets a new certificate for valid credentials, from any of the metadata servers. Errors:
// as of RenewCertificate, and those of files that can't be replaced.
func Renew(ctx context.Context, addrs []string, creds *peer.Credentials) error {
	c, err := New(Config{Addrs: addrs, Creds: creds})
	if err != nil {
		return err
	}
	defer c.Close()
	return peer.Renew(creds, func(request []byte) ([]byte, error) {
		answer, err := c.Enrolment.RenewCertificate(ctx, &RenewCertificateRequest{Request: request})
		return answer.GetChain(), err
	})
}
