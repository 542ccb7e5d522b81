package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Rights are an identity's rights on a volume. Each value includes the smaller ones.
type Rights uint8

// The rights.
const (
	NoRights    Rights = iota
	ReadRights         // look at names, attributes and bytes
	WriteRights        // change them
	AdminRights        // the volume's policy, attaching and deleting it, attaching others in it
)

// String is the right's name.
func (r Rights) String() string {
	switch r {
	case ReadRights:
		return "read"
	case WriteRights:
		return "write"
	case AdminRights:
		return "admin"
	}
	return "none"
}

// ParseRights reads a name. Errors: Invalid.
func ParseRights(s string) (Rights, error) {
	for _, r := range []Rights{ReadRights, WriteRights, AdminRights} {
		if s == r.String() {
			return r, nil
		}
	}
	return 0, meta.E("rights", meta.Invalid, s, errors.New("rights are read, write or admin"))
}

// Users says how the user ids in a client's requests are mapped to stored ids.
type Users string

// The ways.
const (
	UsersAsIs   Users = "as-is"
	UsersNoRoot Users = "root-squash" // user and group 0 become NobodyID
	UsersAllTo  Users = "all-to"      // everybody is the grant's UID and GID
)

// NobodyID is the id to which root is squashed.
const NobodyID = 65534

// Grant gives identities rights on a volume, or on all.
type Grant struct {
	Version int           `json:"v,omitzero" pb:"-"`
	ID      uint64        `json:"id"`
	Who     string        `json:"who" pb:"client"` // "client/name"; the name may be a pattern as in path.Match
	Volume  meta.VolumeID `json:"volume"`          // 0: all
	Rights  Rights        `json:"rights"`
	Users   Users         `json:"users"`
	UID     uint32        `json:"uid,omitempty"` // UsersAllTo
	GID     uint32        `json:"gid,omitempty"`
	Created meta.Time     `json:"created"`
	// For is the use with which the grant ends (see GrantFor); empty: an administrator revokes
	// it.
	For string `json:"for,omitempty" pb:"use"`
	// Request is the id of the request that made the grant: a repeated request makes no second
	// grant.
	Request uint64 `json:"request,omitempty" pb:"-"`
	// Revision of the record in etcd; not stored.
	Revision int64  `json:"-"`
	key      string // in a view: the record's, without the cluster's prefix
}

// Check refuses a meaningless grant. Errors: Invalid.
func (g *Grant) Check() error {
	bad := func(why string) error { return meta.E("grant", meta.Invalid, g.Who, errors.New(why)) }
	role, name, ok := strings.Cut(g.Who, "/")
	if !ok || !peer.Role(role).Granted() {
		return bad("grants are for clients and gateways, client/NAME or gateway/NAME: servers and administrators need none")
	}
	if _, err := path.Match(name, "x"); err != nil || name == "" || len(name) > 255 || strings.Contains(name, "/") {
		return bad("the name is no pattern: letters, *, ?, [a-z]")
	}
	if g.Rights < ReadRights || g.Rights > AdminRights {
		return bad("rights are read, write or admin")
	}
	switch g.Users {
	case UsersAsIs, UsersNoRoot, UsersAllTo:
		return nil
	}
	return bad("user ids are as-is, root-squash or all-to")
}

// matches tells whether the grant is for an identity and a volume.
func (g *Grant) matches(who string, v meta.VolumeID) bool {
	if g.Volume != 0 && g.Volume != v {
		return false
	}
	ok, err := path.Match(g.Who, who)
	return err == nil && ok
}

// Access is an identity's rights and id mapping on a volume.
type Access struct {
	Rights   Rights
	Users    Users
	UID, GID uint32
}

// AccessOf combines the matching grants. The rights are the greatest of a single grant. The
// most specific grant determines the mapping of user ids: an exact name before a pattern, a
// volume before all volumes, then the older grant. A grant for a use determines it only if no
// other grant matches: such a grant gives rights, and nobody chose its mapping.
func AccessOf(grants []Grant, who string, v meta.VolumeID) (a Access) {
	var first *Grant
	for i := range grants {
		g := &grants[i]
		if !g.matches(who, v) {
			continue
		}
		a.Rights = max(a.Rights, g.Rights)
		if first == nil || particular(g, who) > particular(first, who) || particular(g, who) == particular(first, who) && g.ID < first.ID {
			first = g
		}
	}
	if first != nil {
		a.Users, a.UID, a.GID = first.Users, first.UID, first.GID
	}
	return a
}

func particular(g *Grant, who string) (n int) {
	if g.For != "" {
		return -1
	}
	if g.Who == who {
		n += 2
	}
	if g.Volume != 0 {
		n++
	}
	return n
}

// Owner maps the owner and group that a client requests for an inode.
func (a Access) Owner(uid, gid uint32) (uint32, uint32) {
	switch a.Users {
	case UsersAllTo:
		return a.UID, a.GID
	case UsersNoRoot:
		if uid == 0 {
			uid = NobodyID
		}
		if gid == 0 {
			gid = NobodyID
		}
	}
	return uid, gid
}

// MapOp returns the operation with mapped user ids.
func (a Access) MapOp(op meta.Op) meta.Op {
	if a.Users == UsersAsIs || a.Users == "" {
		return op
	}
	switch o := op.(type) {
	case *meta.Create:
		c := *o
		c.UID, c.GID = a.Owner(o.UID, o.GID)
		return &c
	case *meta.Tmpfile:
		c := *o
		c.UID, c.GID = a.Owner(o.UID, o.GID)
		return &c
	case *meta.SetAttr:
		if o.Mask&(meta.SetUID|meta.SetGID) == 0 {
			return op
		}
		c := *o
		c.UID, c.GID = a.Owner(o.UID, o.GID)
		return &c
	}
	return op
}

// grantCounter numbers grants.
const grantCounter = "grant"

func (c *Cluster) grantKey(id uint64) string { return fmt.Sprintf("%s/grants/%016x", c.prefix, id) }

// keyOf is where a grant's record lies.
func (c *Cluster) keyOf(g *Grant) string {
	if g.For != "" {
		return fmt.Sprintf("%s%08x", c.useKey(g.For, g.Who), uint32(g.Volume))
	}
	return c.grantKey(g.ID)
}

// AddGrant adds a grant without a use and numbers the grant. A repeated request adds no grant
// while the grant of the first request exists. Errors: Invalid.
func (c *Cluster) AddGrant(ctx context.Context, g Grant) (Grant, error) {
	const op = "grant"
	g.For = ""
	if err := g.Check(); err != nil {
		return g, err
	}
	g.Version = recordVersion
	counter := c.counterKey(grantCounter)
	for {
		r, err := c.cli.Get(ctx, counter)
		if err != nil {
			return g, wrap(op, g.Who, err)
		}
		last, revision, err := lastID(r.Kvs)
		if err != nil {
			return g, err
		}
		if made, is, err := c.grantOfRequest(ctx, g.Request); is || err != nil {
			return made, err
		}
		g.ID = last + 1
		// Whatever was granted since the look has raised the counter.
		t, err := c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(counter), "=", revision)).
			Then(clientv3.OpPut(counter, strconv.FormatUint(g.ID, 10)), clientv3.OpPut(c.grantKey(g.ID), encode(g))).Commit()
		if err != nil || t.Succeeded {
			return g, wrap(op, g.Who, err)
		}
	}
}

// grantOfRequest finds the grant that a request made; 0 is none's id.
func (c *Cluster) grantOfRequest(ctx context.Context, request uint64) (g Grant, found bool, err error) {
	if request == 0 {
		return g, false, nil
	}
	all, err := list[Grant](ctx, c, "/grants/0") // not those for a use
	i := slices.IndexFunc(all, func(g Grant) bool { return g.Request == request })
	if err != nil || i < 0 {
		return g, false, err
	}
	return all[i], true, nil
}

// RevokeGrant removes a grant. Errors: NotFound.
func (c *Cluster) RevokeGrant(ctx context.Context, id uint64) error {
	const op = "revoke grant"
	r, err := c.cli.Delete(ctx, c.grantKey(id))
	if err != nil || r.Deleted > 0 {
		return wrap(op, fmt.Sprint(id), err)
	}
	all, err := list[Grant](ctx, c, usesPart)
	if err != nil {
		return err
	}
	for i := range all {
		if all[i].ID == id {
			_, err := c.cli.Delete(ctx, c.keyOf(&all[i]))
			return wrap(op, fmt.Sprint(id), err)
		}
	}
	return meta.E(op, meta.NotFound, fmt.Sprint(id), nil)
}

// Grants lists all, by number.
func (c *Cluster) Grants(ctx context.Context) ([]Grant, error) {
	all, err := list[Grant](ctx, c, "/grants/")
	slices.SortFunc(all, byNumber)
	return all, err
}

func byNumber(a, b Grant) int { return cmp.Compare(a.ID, b.ID) }
