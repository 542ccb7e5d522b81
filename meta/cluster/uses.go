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
//
// Calls that make and end grants of one client may be given up by who made them and
// take effect later, when another call came after them. So each carries asOf: the
// revision of the cluster's state (Revision) that was read while somebody waited for it,
// 0: as of now. The grants that a call makes, or finds, are written after its asOf, and
//
//	ended/client/<name>    empty: written whenever uses of that client end
//	ended/all              empty: the same, for a use of all clients
//
// so both transactions can tell that a call came after theirs: an end finds younger
// grants, a grant a younger end. Such a call is refused with Again, and who still waits
// for it makes it again with another asOf. It also meets ends of other uses of that
// client, since one record for each client does not grow with the volumes that it ever had.

const usesPart = "/grants/for/"

// validUse has no slash, which parts the key.
var validUse = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:=@._~-]{0,599}$`)

// endedKey is the record of a client's ends, or with "" that of the ends for all.
func (c *Cluster) endedKey(who string) string {
	if who == "" {
		who = "all"
	}
	return fmt.Sprintf("%s/ended/%s", c.prefix, who)
}

// Revision is that of the cluster's state, not older than the call. Errors: Unavailable.
func (c *Cluster) Revision(ctx context.Context) (int64, error) {
	r, err := c.cli.Get(ctx, c.prefix+"/format", clientv3.WithKeysOnly())
	if err != nil {
		return 0, wrap("read revision", c.prefix, err)
	}
	return r.Header.Revision, nil
}

// outrun refuses a call after which another one came.
func outrun(op, who string) error {
	return meta.E(op, meta.Again, who, errors.New("a later call was served before this one"))
}

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
// (it has other rights on one of the volumes for that use), Again (uses of the client
// ended, or it joined, after asOf), Unavailable.
func (c *Cluster) GrantFor(ctx context.Context, who, use string, asOf int64, want map[meta.VolumeID]Rights, now meta.Time) ([]Grant, error) {
	const op = "grant"
	name, client := strings.CutPrefix(who, string(peer.Client)+"/")
	if err := peer.CheckName(name); err != nil || !client {
		return nil, meta.E(op, meta.Invalid, who, errors.Join(errors.New("it is for one client, client/NAME"), err))
	}
	if !validUse.MatchString(use) {
		return nil, meta.E(op, meta.Invalid, use, errors.New("a use is letters, digits and :=@._~-, at most 600"))
	}
	if asOf == 0 {
		var err error
		if asOf, err = c.Revision(ctx); err != nil {
			return nil, err
		}
	}
	ends := []string{c.endedKey(who), c.endedKey("")}
	for {
		bearer, err := c.bearerOf(ctx, name)
		if err != nil || bearer.Role == peer.Admin {
			return nil, err
		}
		if bearer.Revision > asOf {
			return nil, outrun(op, who)
		}
		given, err := c.given(ctx, use, who)
		if err != nil {
			return nil, err
		}
		has := map[meta.VolumeID]Grant{}
		for _, g := range given {
			has[g.Volume] = g
		}
		// Whoever is evicted, or a volume that goes, meanwhile, is not left a grant.
		is := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(c.memberKey(bearer.Role, name)), "=", bearer.Revision)}
		var puts, look []clientv3.Op
		for _, key := range ends {
			is = append(is, clientv3.Compare(clientv3.ModRevision(key), "<", asOf+1))
			look = append(look, clientv3.OpGet(key))
		}
		for _, v := range slices.Sorted(maps.Keys(want)) {
			g, there := has[v]
			switch {
			case there && g.Rights != want[v]:
				return nil, meta.E(op, meta.Exists, who, fmt.Errorf("it may %s volume %d for this use already, which is not to %s", g.Rights, v, want[v]))
			case there && g.Revision > asOf:
				continue
			}
			row, err := c.Volume(ctx, v)
			if err == nil && row.State != VolumeActive {
				err = meta.E(op, meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
			}
			if err != nil {
				return nil, err
			}
			// One that is there is written again, as it is: an end that began before this
			// call must find it younger.
			revision := g.Revision
			if !there {
				g = Grant{Version: recordVersion, Who: who, Volume: v, Rights: want[v], Users: UsersAsIs, For: use, Created: now}
				if err := g.Check(); err != nil {
					return nil, err
				}
				if g.ID, err = c.nextID(ctx, "grant"); err != nil {
					return nil, err
				}
				given = append(given, g)
			}
			key := c.keyOf(&g)
			is = append(is, clientv3.Compare(clientv3.ModRevision(c.rowKey(v)), "=", row.Revision), clientv3.Compare(clientv3.ModRevision(key), "=", revision))
			puts = append(puts, clientv3.OpPut(key, encode(g)))
		}
		if len(puts) == 0 {
			return given, nil
		}
		t, err := c.cli.Txn(ctx).If(is...).Then(puts...).Else(look...).Commit()
		if err != nil {
			return nil, wrap(op, who, err)
		}
		if t.Succeeded {
			return given, nil
		}
		for _, r := range t.Responses {
			for _, kv := range r.GetResponseRange().Kvs {
				if kv.ModRevision > asOf {
					return nil, outrun(op, who)
				}
			}
		}
	}
}

// GrantsOf lists what all clients have for a use, by number. Errors: Invalid, Unavailable.
func (c *Cluster) GrantsOf(ctx context.Context, use string) ([]Grant, error) {
	if !validUse.MatchString(use) {
		return nil, meta.E("list grants", meta.Invalid, use, errors.New("no use that anything is granted for"))
	}
	all, err := list[Grant](ctx, c, usesPart+use+"/")
	slices.SortFunc(all, byNumber)
	return all, err
}

// given reads what a client has for a use.
func (c *Cluster) given(ctx context.Context, use, who string) (all []Grant, err error) {
	r, err := c.cli.Get(ctx, c.useKey(use, who), clientv3.WithPrefix())
	if err != nil {
		return nil, wrap("list grants", use, err)
	}
	for _, kv := range r.Kvs {
		g, err := decode[Grant](kv.Key, kv.Value)
		if err != nil {
			return nil, err
		}
		g.Revision = kv.ModRevision
		all = append(all, g)
	}
	return all, nil
}

// EndUse takes back what a client, or with "" every one, was granted for a use, and
// tells how many grants that were. Errors: Invalid, Again (something was granted for it
// after asOf: nothing is taken back), Unavailable.
func (c *Cluster) EndUse(ctx context.Context, who, use string, asOf int64) (n int64, err error) {
	const op = "end grants"
	if !validUse.MatchString(use) || strings.Count(who, "/") > 1 {
		return 0, meta.E(op, meta.Invalid, use, errors.New("no use that anything is granted for"))
	}
	if asOf == 0 {
		if asOf, err = c.Revision(ctx); err != nil {
			return 0, err
		}
	}
	key := c.useKey(use, who)
	note := clientv3.OpPut(c.endedKey(who), "")
	if name, client := strings.CutPrefix(who, string(peer.Client)+"/"); client {
		// Of nobody there are no grants, nor will there be any as of before it joins.
		joined := clientv3.Compare(clientv3.CreateRevision(c.memberKey(peer.Client, name)), ">", 0)
		note = clientv3.OpTxn([]clientv3.Cmp{joined}, []clientv3.Op{note}, nil)
	}
	t, err := c.cli.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(key), "<", asOf+1).WithPrefix()).
		Then(clientv3.OpDelete(key, clientv3.WithPrefix()), note).Commit()
	if err != nil {
		return 0, wrap(op, use, err)
	}
	if !t.Succeeded {
		return 0, outrun(op, who)
	}
	return t.Responses[0].GetResponseDeleteRange().Deleted, nil
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
