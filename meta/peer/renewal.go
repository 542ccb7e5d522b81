package peer

import (
	"context"
	"time"
)

// Renew replaces the key of credentials and their certificate. sign has a request (PKCS #10, DER)
// signed, and returns the chain of certificates (PEM).
func Renew(creds *Credentials, sign func(request []byte) ([]byte, error)) error {
	key, request, err := NewKey()
	if err != nil {
		return err
	}
	chain, err := sign(request)
	if err != nil {
		return err
	}
	return creds.Replace(key, chain)
}

// KeepRenewed renews credentials after half of their life, and repeats a failed renewal until
// it succeeds. It runs until ctx ends, and returns at once if creds are nil or insecure.
func KeepRenewed(ctx context.Context, creds *Credentials, failed func(error), renew func(context.Context) error) {
	if creds == nil || creds.IsInsecure() {
		return
	}
	for {
		wait := max(min(time.Until(creds.RenewAt()), time.Minute), 0) // looks every minute: an operator may replace the files, too
		if wait == 0 {
			call, cancel := context.WithTimeout(ctx, 20*time.Second)
			err := renew(call)
			cancel()
			if err != nil && ctx.Err() == nil {
				failed(err)
			}
			if err != nil {
				wait = max(min(time.Until(creds.Identity().Expires)/20, time.Minute), 200*time.Millisecond)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
