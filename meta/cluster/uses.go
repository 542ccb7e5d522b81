package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Grants for a use hold as long as something lasts, such as that a node's pods have a
// claim, and are taken back together by its name when it ends. Their keys say all but
// the rights, so that who makes them twice, or takes them back twice, does it once:
//
//	grants/for/<use>/client/<name>/<volume, 8 hex>
//
// The record is a Grant like others, with a number of its own: programs that know no
// uses honour it.

const usesPart = "/grants/for/"

// validUse has no slash, which parts the key.
var validUse = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:=@._~-]{0,599}$`)

// useKey begins the keys of what an identity has for a use; "": of what all have.
func (c *Cluster) useKey(use, who string) string {
	key := c.prefix + usesPart + use + "/"
	if who != "" {
		key += who + "/"
	}
	return key
}

// GrantFor gives a client, "client/NAME", rights on volumes for a use, beside what it
// has for it already. An administrator needs none and gets none. Errors: Invalid (the
// names), NotFound (nobody of that name joined, or it was evicted), NoSuchVolume, Exists
// (it has other rights on one of the volumes for that use), Unavailable.
func (c *Cluster) GrantFor(ctx context.Context, who, use string, want map[meta.VolumeID]Rights, now meta.Time) ([]Grant, error) {
	const op = "grant"
	name, client := strings.CutPrefix(who, string(peer.Client)+"/")
	if err := peer.CheckName(name); err != nil || !client {
		return nil, meta.E(op, meta.Invalid, who, errors.Join(errors.New("it is for one client, client/NAME"), err))
	}
	if !validUse.MatchString(use) {
		return nil, meta.E(op, meta.Invalid, use, errors.New("a use is letters, digits and :=@._~-, at most 600"))
	}
	for {
		bearer, err := c.bearerOf(ctx, name)
		if err != nil || bearer.Role == peer.Admin {
			return nil, err
		}
		given, err := list[Grant](ctx, c, strings.TrimPrefix(c.useKey(use, who), c.prefix))
		if err != nil {
			return nil, err
		}
		has := map[meta.VolumeID]Rights{}
		for _, g := range given {
			has[g.Volume] = g.Rights
		}
		// Whoever is evicted, or a volume that goes, meanwhile, is not left a grant.
		is := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(c.memberKey(bearer.Role, name)), "=", bearer.Revision)}
		var puts []clientv3.Op
		for _, v := range slices.Sorted(maps.Keys(want)) {
			switch rights, there := has[v]; {
			case there && rights != want[v]:
				return nil, meta.E(op, meta.Exists, who, fmt.Errorf("it may %s volume %d for this use already, which is not to %s", rights, v, want[v]))
			case there:
				continue
			}
			row, err := c.Volume(ctx, v)
			if err == nil && row.State != VolumeActive {
				err = meta.E(op, meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
			}
			if err != nil {
				return nil, err
			}
			g := Grant{Version: recordVersion, Who: who, Volume: v, Rights: want[v], Users: UsersAsIs, For: use, Created: now}
			if err := g.Check(); err != nil {
				return nil, err
			}
			if g.ID, err = c.nextID(ctx, "grant"); err != nil {
				return nil, err
			}
			key := fmt.Sprintf("%s%08x", c.useKey(use, who), uint32(v))
			is = append(is, clientv3.Compare(clientv3.ModRevision(c.rowKey(v)), "=", row.Revision), clientv3.Compare(clientv3.CreateRevision(key), "=", 0))
			puts = append(puts, clientv3.OpPut(key, encode(g)))
			given = append(given, g)
		}
		if len(puts) == 0 {
			return given, nil
		}
		t, err := c.cli.Txn(ctx).If(is...).Then(puts...).Commit()
		if err != nil {
			return nil, wrap(op, who, err)
		}
		if t.Succeeded {
			return given, nil
		}
	}
}

// EndUse takes back what a client, or with "" every one, was granted for a use, and
// tells how many grants that were. Errors: Invalid, Unavailable.
func (c *Cluster) EndUse(ctx context.Context, who, use string) (n int64, err error) {
	const op = "end grants"
	if !validUse.MatchString(use) || strings.Count(who, "/") > 1 {
		return 0, meta.E(op, meta.Invalid, use, errors.New("no use that anything is granted for"))
	}
	r, err := c.cli.Delete(ctx, c.useKey(use, who), clientv3.WithPrefix())
	if err != nil {
		return 0, wrap(op, use, err)
	}
	return r.Deleted, nil
}

// bearerOf finds who bears a name as a client, or as an administrator. Errors: NotFound.
func (c *Cluster) bearerOf(ctx context.Context, name string) (m Member, err error) {
	const op = "find member"
	for _, role := range []peer.Role{peer.Client, peer.Admin} {
		key := c.memberKey(role, name)
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return m, wrap(op, name, err)
		}
		if len(r.Kvs) == 0 {
			continue
		}
		if m, err = decode[Member](r.Kvs[0].Key, r.Kvs[0].Value); err != nil || !m.Evicted {
			m.Revision = r.Kvs[0].ModRevision
			return m, err
		}
	}
	return m, meta.E(op, meta.NotFound, name, errors.New("no client of that name joined the cluster, or it was evicted"))
}

// dropGrants removes the grants that a view shows and that are chosen.
func (c *Cluster) dropGrants(ctx context.Context, v *View, chosen func(*Grant) bool) error {
	for i := range v.Grants {
		if g := &v.Grants[i]; chosen(g) {
			if _, err := c.cli.Delete(ctx, c.keyOf(g)); err != nil {
				return wrap("revoke grant", g.Who, err)
			}
		}
	}
	return nil
}
