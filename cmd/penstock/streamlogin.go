package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// kafkaAt is where and as whom a command uses a gateway.
type kafkaAt struct {
	addr         string
	user         string
	passwordFile string
	tls          bool
	ca           string
	cert, key    string
}

func (k *kafkaAt) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&k.addr, "kafka", defaultKafka, "address of the gateway")
	f.StringVar(&k.user, "user", "", "name of the user who logs in at the gateway, with the password of --password-file")
	f.StringVar(&k.passwordFile, "password-file", "", "file with the user's password, in the first line")
	f.BoolVar(&k.tls, "tls", false, "use TLS, and trust the authorities that the machine trusts")
	f.StringVar(&k.ca, "tls-ca", "", "file with the authorities (PEM) one of which has signed the gateway's certificate: use TLS")
	f.StringVar(&k.cert, "tls-cert", "", "file with a certificate (PEM) that logs in at the gateway, in place of --user: use TLS")
	f.StringVar(&k.key, "tls-key", "", "file with the private key (PEM) of --tls-cert")
	cmd.MarkFlagsRequiredTogether("user", "password-file")
	cmd.MarkFlagsRequiredTogether("tls-cert", "tls-key")
	cmd.MarkFlagsMutuallyExclusive("user", "tls-cert")
}

// client makes a client of the gateway, which is not connected yet.
func (k *kafkaAt) client(more ...kgo.Opt) (*kgo.Client, error) {
	opts := append([]kgo.Opt{kgo.SeedBrokers(k.addr)}, more...)
	if k.tls || k.ca != "" || k.cert != "" {
		config, err := k.config()
		if err != nil {
			return nil, err
		}
		opts = append(opts, kgo.DialTLSConfig(config))
	}
	if k.user != "" {
		b, err := os.ReadFile(k.passwordFile)
		if err != nil {
			return nil, err
		}
		line, _, _ := strings.Cut(string(b), "\n")
		password := strings.TrimSuffix(line, "\r")
		if password == "" {
			return nil, usagef("--password-file %s: the first line has no password", k.passwordFile)
		}
		opts = append(opts, kgo.SASL(scram.Auth{User: k.user, Pass: password}.AsSha256Mechanism()))
	}
	c, err := kgo.NewClient(opts...)
	if err != nil {
		return nil, &usageError{err}
	}
	return c, nil
}

func (k *kafkaAt) config() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if k.ca != "" {
		b, err := os.ReadFile(k.ca)
		if err != nil {
			return nil, err
		}
		if config.RootCAs = x509.NewCertPool(); !config.RootCAs.AppendCertsFromPEM(b) {
			return nil, usagef("--tls-ca %s has no certificate in PEM", k.ca)
		}
	}
	if k.cert != "" {
		pair, err := tls.LoadX509KeyPair(k.cert, k.key)
		if err != nil {
			return nil, &usageError{err}
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// reach makes a client of the gateway, and connects.
func (k *kafkaAt) reach(ctx context.Context, stream string, more ...kgo.Opt) (*kgo.Client, error) {
	c, err := k.client(more...)
	if err != nil {
		return nil, err
	}
	if err := c.Ping(ctx); err != nil {
		c.Close()
		return nil, fmt.Errorf("stream %s: %w", stream, k.unreached(err))
	}
	return c, nil
}

// unreached says what to do about a gateway that was not reached.
func (k *kafkaAt) unreached(err error) error {
	switch {
	case errors.Is(err, kerr.SaslAuthenticationFailed):
		return fmt.Errorf("the gateway at %s knows no user %s with this password: %w", k.addr, printable(k.user), err)
	case k.user == "" && k.cert == "":
		return fmt.Errorf("no gateway answers at %s; if the gateway asks for a login or for TLS, give --user and --password-file, --tls-ca: %w", k.addr, err)
	}
	return fmt.Errorf("no gateway answers at %s: %w", k.addr, err)
}
