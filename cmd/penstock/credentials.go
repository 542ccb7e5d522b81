package main

import (
	"os"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta/peer"
)

// credentials holds the flags that select a process's certificate.
type credentials struct {
	credentials string
	insecure    bool
}

func (c *credentials) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&c.credentials, "credentials", "", "directory with this process's certificate, as 'penstock cluster join' makes it (default $PENSTOCK_CREDENTIALS)")
	f.BoolVar(&c.insecure, "insecure", false, "plain TCP without certificates, between loopback addresses only: for trying things out on one machine")
	markDirs(cmd, "credentials")
}

// check refuses --insecure together with --credentials.
func (c *credentials) check() error {
	if c.insecure && c.credentials != "" {
		return usagef("--insecure and --credentials exclude each other")
	}
	return nil
}

// open loads the credentials. open returns nil without a directory and without --insecure: the
// process then uses Unix sockets only.
func (c *credentials) open() (*peer.Credentials, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	dir := c.credentials
	if c.insecure {
		return peer.Insecure(), nil
	}
	if dir == "" {
		dir = os.Getenv("PENSTOCK_CREDENTIALS")
	}
	if dir == "" {
		return nil, nil
	}
	return peer.Load(dir, nil)
}

// etcdFlags adds the flags of commands that connect to etcd.
func etcdFlags(cmd *cobra.Command, endpoints *[]string, t *local.EtcdTLS) {
	f := cmd.Flags()
	f.StringSliceVar(endpoints, "etcd", nil, "endpoints of the cluster's etcd (default: one embedded in --dir)")
	f.StringVar(&t.CA, "etcd-ca", "", "certificates of the authority that vouches for etcd, PEM")
	f.StringVar(&t.Cert, "etcd-cert", "", "our certificate for etcd, PEM")
	f.StringVar(&t.Key, "etcd-key", "", "its private key, PEM")
}
