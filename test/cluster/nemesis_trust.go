package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"penstock.io/penstock/meta/peer"
)

func (n *nemesis) ofTrust() []fault {
	if n.c.creds.insecure {
		return nil
	}
	return []fault{
		{"rotate a certificate", []string{"rotate"}, 0, 2, n.rotate},
		{"revoke and grant again", []string{"client"}, 10 * time.Second, 2, n.revoke},
		{"evict a client", []string{"client"}, 8 * time.Second, 2, n.evict},
	}
}

// asked orders something of the cluster, which may be broken just now.
func (n *nemesis) asked(ctx context.Context, args ...string) (out []byte, err error) {
	err = eventually(ctx, time.Minute, func(ctx context.Context) (err error) {
		out, err = n.c.Penstock(ctx, args...)
		return err
	})
	return out, err
}

// rotate replaces the certificate of a running part. The part goes on with the new certificate,
// and its peers notice nothing.
func (n *nemesis) rotate(ctx context.Context, r *rand.Rand) (string, func(context.Context) error, error) {
	type part struct {
		role peer.Role
		name string
	}
	var parts []part
	for role, members := range map[peer.Role][]*Member{peer.Meta: n.metas(), peer.ChunkServer: n.chunks(), peer.Client: n.clients()} {
		for _, m := range members {
			parts = append(parts, part{role, m.Name})
		}
	}
	slices.SortFunc(parts, func(a, b part) int { return strings.Compare(a.name, b.name) })
	p := some(r, parts)
	return p.name, nil, eventually(ctx, time.Minute, func(ctx context.Context) error { return n.c.rotate(ctx, p.role, p.name) })
}

// revoke takes the last client's grant back for a while.
func (n *nemesis) revoke(ctx context.Context, _ *rand.Rand) (string, func(context.Context) error, error) {
	name := n.last()[0].Name
	out, err := n.asked(ctx, "grant", "list", "--output", "json")
	if err != nil {
		return "", nil, err
	}
	var grants []struct {
		ID  uint64 `json:"id"`
		Who string `json:"who"`
	}
	if err := json.Unmarshal(out, &grants); err != nil {
		return "", nil, fmt.Errorf("penstock grant list: %w\n%s", err, out)
	}
	revoked := 0
	for _, g := range grants {
		if g.Who == string(peer.Client)+"/"+name {
			revoked++
			if _, err := n.asked(ctx, "grant", "revoke", fmt.Sprint(g.ID)); err != nil {
				return "", nil, err
			}
		}
	}
	if revoked == 0 {
		return "", nil, fmt.Errorf("%s has no grant: %s", name, out)
	}
	return name, func(ctx context.Context) error {
		return eventually(ctx, time.Minute, func(ctx context.Context) error { return n.c.grant(ctx, name) })
	}, nil
}

// evict makes the last client's certificate worthless; the client comes back with a new
// certificate, as a new process.
func (n *nemesis) evict(ctx context.Context, _ *rand.Rand) (string, func(context.Context) error, error) {
	m := n.last()[0]
	m.serves(false)
	_, err := n.asked(ctx, "cluster", "evict", string(peer.Client)+"/"+m.Name)
	return m.Name, func(ctx context.Context) error {
		err := eventually(ctx, time.Minute, func(ctx context.Context) error { return n.c.rotate(ctx, peer.Client, m.Name) })
		m.Kill()
		return errors.Join(err, n.restart(m)(ctx))
	}, err
}
