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

// A grant for a use is valid as long as the use lasts, for example while a node's pods have a
// claim, and all grants of a use are revoked together by the name of the use. The keys of such
// grants contain everything but the rights, so that a repeated grant or revocation has no
// further effect:
//
//	grants/for/<use>/client/<name>/<volume, 8 hex>
//
// The record is a Grant like any other, with a number of its own.
//
// A caller may give up a call that makes or ends grants of a client, and the call may take
// effect later, after newer calls. So each call carries asOf: the revision of the cluster's
// state (Revision) read while a caller waited for the call; 0: as of now. The grants that a
// call makes, or finds, are written after the call's asOf, and
//
//	ended/client/<name>    empty: written whenever uses of that client end
//	ended/all              empty: the same, for a use of all clients
//
// so both transactions can detect a newer call: an end finds younger grants, a grant a younger
// end. The older call is refused with Again, and a caller that still waits repeats the call
// with another asOf. A call may also be refused because of the end of another use of the same
// client: each client has only one record, so that the number of records does not grow with
// the volumes that the client ever had.

const usesPart = "/grants/for/"

// validUse has no slash, which parts the key.
var validUse = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:=@._~-]{0,599}$`)

// endedKey returns the key of the record about a client's ends or, with "", about the ends for
// all.
func (c *Cluster) endedKey(who string) string {
	if who == "" {
		who = "all"
	}
	return fmt.Sprintf("%s/ended/%s", c.prefix, who)
}

// Revision returns the revision of the cluster's state, not older than the call. Errors:
// Unavailable.
func (c *Cluster) Revision(ctx context.Context) (int64, error) {
	r, err := c.cli.Get(ctx, c.prefix+"/format", clientv3.WithKeysOnly())
	if err != nil {
		return 0, wrap("read revision", c.prefix, err)
	}
	return r.Header.Revision, nil
}

// outrun makes the error for a call that a newer call has overtaken.
func outrun(op, who string) error {
	return meta.E(op, meta.Again, who, errors.New("a later call was served before this one"))
}

// useKey returns the prefix of the keys of an identity's grants for a use; with "", of all
// identities.
func (c *Cluster) useKey(use, who string) string {
	key := c.prefix + usesPart + use + "/"
	if who != "" {
		key += who + "/"
	}
	return key
}

// ForUse says which rights GrantFor gives to which client.
type ForUse struct {
	Who    string // "client/NAME"
	Use    string
	Rights map[meta.VolumeID]Rights
	AsOf   int64 // see above
	Alone  bool  // refuse if another client has a grant for the use
}

// name returns the client's name. Errors: Invalid.
func (q *ForUse) name() (string, error) {
	const op = "grant"
	name, client := strings.CutPrefix(q.Who, string(peer.Client)+"/")
	if err := peer.CheckName(name); err != nil || !client {
		return "", meta.E(op, meta.Invalid, q.Who, errors.Join(errors.New("it is for one client, client/NAME"), err))
	}
	if !validUse.MatchString(q.Use) {
		return "", meta.E(op, meta.Invalid, q.Use, errors.New("a use is letters, digits and :=@._~-, at most 600"))
	}
	return name, nil
}

// GrantFor gives a client rights on volumes for a use, in addition to the client's present
// rights for the use. An administrator needs none and gets none. Errors: Invalid (the names),
// NotFound (no such member, or an evicted one), NoSuchVolume, Exists (the client has other
// rights on one of the volumes for the use), Busy (another client has a grant for a use that
// is to be alone), Again (uses of the client ended, or it joined, after AsOf), Unavailable.
func (c *Cluster) GrantFor(ctx context.Context, q ForUse, now meta.Time) ([]Grant, error) {
	const op = "grant"
	name, err := q.name()
	if err != nil {
		return nil, err
	}
	look := c.lookForUse(name, &q)
	r, err := c.cli.Txn(ctx).Then(look...).Commit()
	for {
		if err != nil {
			return nil, wrap(op, q.Who, err)
		}
		if q.AsOf == 0 {
			q.AsOf = r.Header.Revision
		}
		given, is, puts, err := c.grantsFor(r, name, &q, now)
		if err != nil || len(puts) == 0 {
			return given, err
		}
		if r, err = c.cli.Txn(ctx).If(is...).Then(puts...).Else(look...).Commit(); err == nil && r.Succeeded {
			return given, nil
		}
	}
}

// lookForUse returns the reads on which GrantFor decides, for one request.
func (c *Cluster) lookForUse(name string, q *ForUse) []clientv3.Op {
	ops := []clientv3.Op{
		clientv3.OpGet(c.memberKey(peer.Client, name)), clientv3.OpGet(c.memberKey(peer.Admin, name)),
		clientv3.OpGet(c.endedKey(q.Who)), clientv3.OpGet(c.endedKey("")),
		clientv3.OpGet(c.counterKey(grantCounter)), clientv3.OpGet(c.useKey(q.Use, q.looksAt()), clientv3.WithPrefix()),
	}
	for _, v := range slices.Sorted(maps.Keys(q.Rights)) {
		ops = append(ops, clientv3.OpGet(c.rowKey(v)))
	}
	return ops
}

// looksAt returns the identity whose grants for the use matter: the client, or with "" all
// identities.
func (q *ForUse) looksAt() string {
	if q.Alone {
		return ""
	}
	return q.Who
}

// grantsFor decides from the reads of lookForUse: the client's future grants, and the
// operations that write the grants if the reads are still valid. For an administrator
// grantsFor writes nothing, and given is empty.
func (c *Cluster) grantsFor(r *clientv3.TxnResponse, name string, q *ForUse, now meta.Time) (given []Grant, is []clientv3.Cmp, puts []clientv3.Op, err error) {
	const op = "grant"
	no := func(err error) ([]Grant, []clientv3.Cmp, []clientv3.Op, error) { return nil, nil, nil, err }
	found := func(i int) []*mvccpb.KeyValue { return r.Responses[i].GetResponseRange().Kvs }
	bearer, err := bearerOf(name, found(0), found(1))
	if err != nil {
		return no(err)
	}
	has := map[meta.VolumeID]Grant{}
	for _, kv := range found(5) {
		g, err := decode[Grant](kv.Key, kv.Value)
		if err != nil {
			return no(err)
		}
		if g.Who != q.Who {
			return no(meta.E(op, meta.Busy, q.Use, fmt.Errorf("it is for one client at a time, and granted to %s", g.Who)))
		}
		g.Revision = kv.ModRevision
		has[g.Volume] = g
		given = append(given, g)
	}
	if bearer.Role == peer.Admin {
		return no(nil)
	}
	if bearer.Revision > q.AsOf {
		return no(outrun(op, q.Who))
	}
	if q.Alone {
		// No client must get a grant for the use between the reads and the writes.
		is = append(is, clientv3.Compare(clientv3.ModRevision(c.useKey(q.Use, "")), "<", r.Header.Revision+1).WithPrefix())
	}
	// No grant must remain if the client is evicted, or the volume deleted, meanwhile.
	is = append(is, clientv3.Compare(clientv3.ModRevision(c.memberKey(bearer.Role, name)), "=", bearer.Revision))
	for i, key := range []string{c.endedKey(q.Who), c.endedKey("")} {
		for _, kv := range found(2 + i) {
			if kv.ModRevision > q.AsOf {
				return no(outrun(op, q.Who))
			}
		}
		is = append(is, clientv3.Compare(clientv3.ModRevision(key), "<", q.AsOf+1))
	}
	id, counted, err := lastID(found(4))
	if err != nil {
		return no(err)
	}
	fresh := 0
	for i, v := range slices.Sorted(maps.Keys(q.Rights)) {
		g, there := has[v]
		switch {
		case there && g.Rights != q.Rights[v]:
			return no(meta.E(op, meta.Exists, q.Who, fmt.Errorf("it may %s volume %d for this use already, which is not to %s", g.Rights, v, q.Rights[v])))
		case there && g.Revision > q.AsOf:
			continue
		}
		row, err := rowIn(v, found(6+i))
		if err == nil && row.State != VolumeActive {
			err = meta.E(op, meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
		}
		if err != nil {
			return no(err)
		}
		// An existing grant is written again, unchanged, so that the grant is younger than any
		// end that began before this call.
		revision := g.Revision
		if !there {
			id, fresh = id+1, fresh+1
			g = Grant{Version: recordVersion, ID: id, Who: q.Who, Volume: v, Rights: q.Rights[v], Users: UsersAsIs, For: q.Use, Created: now}
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

// GrantsOf lists the grants of all clients for a use, by number. Errors: Invalid, Unavailable.
func (c *Cluster) GrantsOf(ctx context.Context, use string) ([]Grant, error) {
	if !validUse.MatchString(use) {
		return nil, meta.E("list grants", meta.Invalid, use, errors.New("no use that anything is granted for"))
	}
	all, err := list[Grant](ctx, c, usesPart+use+"/")
	slices.SortFunc(all, byNumber)
	return all, err
}

// EndUse revokes the grants of a client, or with "" of all clients, for a use, and returns
// their number. Errors: Invalid, Again (a grant was made for the use after asOf; nothing is
// revoked), Unavailable.
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
		// A client that has not joined has no grants, and will get none as of a time before it
		// joins.
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

// bearerOf returns the member with a name, client or administrator, from the records found of
// each. Errors: NotFound.
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

// dropGrants removes the grants in a view for which chosen is true.
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
