package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
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
	look := c.lookForUse(name, use, who, want)
	r, err := c.cli.Txn(ctx).Then(look...).Commit()
	for {
		if err != nil {
			return nil, wrap(op, who, err)
		}
		if asOf == 0 {
			asOf = r.Header.Revision
		}
		given, is, puts, err := c.grantsFor(r, name, use, who, asOf, want, now)
		if err != nil || len(puts) == 0 {
			return given, err
		}
		if r, err = c.cli.Txn(ctx).If(is...).Then(puts...).Else(look...).Commit(); err == nil && r.Succeeded {
			return given, nil
		}
	}
}

// lookForUse are the reads that GrantFor decides by, all in one request.
func (c *Cluster) lookForUse(name, use, who string, want map[meta.VolumeID]Rights) []clientv3.Op {
	ops := []clientv3.Op{
		clientv3.OpGet(c.memberKey(peer.Client, name)), clientv3.OpGet(c.memberKey(peer.Admin, name)),
		clientv3.OpGet(c.endedKey(who)), clientv3.OpGet(c.endedKey("")),
		clientv3.OpGet(c.counterKey(grantCounter)), clientv3.OpGet(c.useKey(use, who), clientv3.WithPrefix()),
	}
	for _, v := range slices.Sorted(maps.Keys(want)) {
		ops = append(ops, clientv3.OpGet(c.rowKey(v)))
	}
	return ops
}

// grantsFor decides by what lookForUse read: what the client has then, and what is to be
// written for it, if that is still so. Nothing is written for an administrator, of whom
// given is empty.
func (c *Cluster) grantsFor(r *clientv3.TxnResponse, name, use, who string, asOf int64, want map[meta.VolumeID]Rights, now meta.Time) (given []Grant, is []clientv3.Cmp, puts []clientv3.Op, err error) {
	const op = "grant"
	no := func(err error) ([]Grant, []clientv3.Cmp, []clientv3.Op, error) { return nil, nil, nil, err }
	found := func(i int) []*mvccpb.KeyValue { return r.Responses[i].GetResponseRange().Kvs }
	bearer, err := bearerOf(name, found(0), found(1))
	if err != nil || bearer.Role == peer.Admin {
		return no(err)
	}
	if bearer.Revision > asOf {
		return no(outrun(op, who))
	}
	// Whoever is evicted, or a volume that goes, meanwhile, is not left a grant.
	is = append(is, clientv3.Compare(clientv3.ModRevision(c.memberKey(bearer.Role, name)), "=", bearer.Revision))
	for i, key := range []string{c.endedKey(who), c.endedKey("")} {
		for _, kv := range found(2 + i) {
			if kv.ModRevision > asOf {
				return no(outrun(op, who))
			}
		}
		is = append(is, clientv3.Compare(clientv3.ModRevision(key), "<", asOf+1))
	}
	id, counted, err := lastID(found(4))
	if err != nil {
		return no(err)
	}
	has := map[meta.VolumeID]Grant{}
	for _, kv := range found(5) {
		g, err := decode[Grant](kv.Key, kv.Value)
		if err != nil {
			return no(err)
		}
		g.Revision = kv.ModRevision
		has[g.Volume] = g
		given = append(given, g)
	}
	fresh := 0
	for i, v := range slices.Sorted(maps.Keys(want)) {
		g, there := has[v]
		switch {
		case there && g.Rights != want[v]:
			return no(meta.E(op, meta.Exists, who, fmt.Errorf("it may %s volume %d for this use already, which is not to %s", g.Rights, v, want[v])))
		case there && g.Revision > asOf:
			continue
		}
		row, err := rowIn(v, found(6+i))
		if err == nil && row.State != VolumeActive {
			err = meta.E(op, meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
		}
		if err != nil {
			return no(err)
		}
		// One that is there is written again, as it is: an end that began before this
		// call must find it younger.
		revision := g.Revision
		if !there {
			id, fresh = id+1, fresh+1
			g = Grant{Version: recordVersion, ID: id, Who: who, Volume: v, Rights: want[v], Users: UsersAsIs, For: use, Created: now}
			if err := g.Check(); err != nil {
				return no(err)
			}
			given = append(given, g)
		}
		key := c.keyOf(&g)
		is = append(is, clientv3.Compare(clientv3.ModRevision(c.rowKey(v)), "=", row.Revision), clientv3.Compare(clientv3.ModRevision(key), "=", revision))
		puts = append(puts, clientv3.OpPut(key, encode(g)))
	}
	if fresh > 0 {
		key := c.counterKey(grantCounter)
		is = append(is, clientv3.Compare(clientv3.ModRevision(key), "=", counted))
		puts = append(puts, clientv3.OpPut(key, strconv.FormatUint(id, 10)))
	}
	return given, is, puts, nil
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

// bearerOf says who bears a name, as a client or as an administrator, by what was found
// of each. Errors: NotFound.
func bearerOf(name string, client, admin []*mvccpb.KeyValue) (m Member, err error) {
	for _, kvs := range [][]*mvccpb.KeyValue{client, admin} {
		if len(kvs) == 0 {
			continue
		}
		if m, err = decode[Member](kvs[0].Key, kvs[0].Value); err != nil || !m.Evicted {
			m.Revision = kvs[0].ModRevision
			return m, err
		}
	}
	return m, meta.E("find member", meta.NotFound, name, errors.New("no client of that name joined the cluster, or it was evicted"))
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
