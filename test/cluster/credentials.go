package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/netns"
)

// credentials are how the parts of the cluster trust each other: certificates
// of the cluster's own authority in one directory for each part, or nothing,
// which works between loopback addresses only.
type credentials struct {
	insecure bool
	base     string
	tokens   map[peer.Role]string // join tokens; a single token lets all parts of a role in
}

func (c credentials) network() (*netns.Net, error) {
	if c.insecure {
		return netns.NewLoopback()
	}
	return netns.New()
}

// dir is where a part's credentials lie; empty without certificates.
func (c credentials) dir(name string) string {
	if c.insecure {
		return ""
	}
	return filepath.Join(c.base, name)
}

// flags are the arguments that name a part's certificate.
func (c credentials) flags(name string) []string {
	if c.insecure {
		return []string{"--insecure"}
	}
	return []string{"--credentials", c.dir(name)}
}

// admin is the administrator's name.
const admin = "admin"

// found makes the cluster's authority, and the credentials of the first metadata
// server and of the administrator.
func (c *Cluster) found(ctx context.Context) error {
	c.creds.tokens = map[peer.Role]string{}
	if c.creds.insecure {
		return nil
	}
	args := []string{"cluster", "init", "--etcd", c.etcdURLs(), "--credentials", c.creds.base, "--meta-name", c.Metas[0].Name}
	if c.cfg.CertificateLife != 0 {
		args = append(args, "--certificate-life", c.cfg.CertificateLife.String())
	}
	if out, err := c.admin.Output(ctx, c.cfg.Penstock, args...); err != nil {
		return fmt.Errorf("penstock cluster init: %w\n%s", err, out)
	}
	return os.Rename(c.creds.dir("meta"), c.creds.dir(c.Metas[0].Name))
}

// join gets the first credentials of a part, unless the part has credentials; at least one
// metadata server must serve.
func (c *Cluster) join(ctx context.Context, role peer.Role, name string) error {
	if c.creds.insecure {
		return nil
	}
	if _, err := os.Stat(c.creds.dir(name)); err == nil {
		return nil
	}
	if c.creds.tokens[role] == "" {
		out, err := c.Penstock(ctx, "cluster", "join-token", "--role", string(role))
		if err != nil {
			return err
		}
		c.creds.tokens[role] = strings.TrimSpace(string(out))
	}
	return c.enrol(ctx, c.creds.tokens[role], name, c.creds.dir(name))
}

// enrol shows a token, and writes the credentials to a new directory.
func (c *Cluster) enrol(ctx context.Context, token, name, dir string) error {
	file := dir + ".token"
	if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
		return err
	}
	defer os.Remove(file)
	if out, err := c.admin.Run(ctx, c.cfg.Penstock, "cluster", "join", "--cluster", c.metaAddrs(), "--name", name, "--credentials", dir, "--token-file", file); err != nil {
		return fmt.Errorf("penstock cluster join %s: %w\n%s", name, err, out)
	}
	return nil
}

// rotate gives a running part a new key and certificate, from a token for the part's very name,
// in one rename.
func (c *Cluster) rotate(ctx context.Context, role peer.Role, name string) error {
	out, err := c.Penstock(ctx, "cluster", "join-token", "--role", string(role), "--name", name, "--ttl", "5m")
	if err != nil {
		return err
	}
	const identity = "identity.pem"
	next := fmt.Sprintf("%s.%d", c.creds.dir(name), time.Now().UnixNano())
	if err := c.enrol(ctx, strings.TrimSpace(string(out)), name, next); err != nil {
		return errors.Join(err, os.RemoveAll(next))
	}
	return errors.Join(os.Rename(filepath.Join(next, identity), filepath.Join(c.creds.dir(name), identity)), os.RemoveAll(next))
}

// grant lets a client use every volume; pattern may match several clients.
func (c *Cluster) grant(ctx context.Context, pattern string) error {
	if c.creds.insecure {
		return nil
	}
	_, err := c.Penstock(ctx, "grant", "add", pattern, "*", "--rights", "write")
	return err
}
