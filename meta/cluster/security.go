package cluster

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/peer"
)

// AuthorityRecord is the record of the cluster's certificate authority, with an encrypted key
// (see peer.Sealed).
type AuthorityRecord struct {
	Version int         `json:"v"`
	Sealed  peer.Sealed `json:"authority"`
}

// NewID returns a random id for a new cluster.
func NewID() string { return rand.Text() }

// errFounded is the refusal to make a second cluster in an etcd.
var errFounded = errors.New("this etcd holds a cluster of that name; it is left as it is ('penstock cluster join' makes a server one of it)")

// Vacant checks that etcd has nothing of a cluster. Remains of a cluster are an operator's
// data, so a lost format record must never lead to a new cluster in their place. Errors:
// Exists, Invalid (the name), Unavailable.
func Vacant(ctx context.Context, cli *clientv3.Client, cfg Config) error {
	const op = "make cluster"
	prefix, err := prefixOf(op, cfg)
	if err != nil {
		return err
	}
	r, err := cli.Get(ctx, prefix+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return wrap(op, prefix, err)
	}
	if r.Count > 0 {
		return meta.E(op, meta.Exists, prefix, errFounded)
	}
	return nil
}

// Found makes a new cluster with an id from NewID and a certificate authority, unless etcd has
// a cluster. A repeated call with the same id does nothing, so a caller without an answer can
// repeat the call. Errors: Exists (etcd has another cluster, or part of a cluster), Invalid
// (the name), Unavailable (the outcome is unknown).
func Found(ctx context.Context, cli *clientv3.Client, cfg Config, id string, sealed peer.Sealed) error {
	const op = "make cluster"
	prefix, err := prefixOf(op, cfg)
	if err != nil {
		return err
	}
	f := Format{Version: recordVersion, Format: FormatVersion, ID: id}
	vacant := Vacant(ctx, cli, cfg)
	if vacant == nil {
		t, err := cli.Txn(ctx).
			If(clientv3.Compare(clientv3.CreateRevision(prefix+"/format"), "=", 0),
				clientv3.Compare(clientv3.CreateRevision(prefix+"/authority"), "=", 0)).
			Then(clientv3.OpPut(prefix+"/format", encode(f)),
				clientv3.OpPut(prefix+"/authority", encode(AuthorityRecord{recordVersion, sealed}))).Commit()
		if err == nil && t.Succeeded {
			return nil
		}
		// Without an answer, the cluster may have been made all the same.
		if vacant = wrap(op, prefix, err); err == nil {
			vacant = meta.E(op, meta.Exists, prefix, errFounded)
		}
	}
	r, err := cli.Get(ctx, prefix+"/format")
	if err != nil {
		return vacant
	}
	if len(r.Kvs) > 0 {
		have, err := decode[Format](r.Kvs[0].Key, r.Kvs[0].Value)
		if err != nil {
			return err
		}
		if have.ID == id {
			return nil
		}
		return meta.E(op, meta.Exists, prefix, errFounded)
	}
	return vacant
}

// prefixOf returns the prefix of all keys of a cluster. Errors: Invalid.
func prefixOf(op string, cfg Config) (string, error) {
	name := cmp.Or(cfg.Name, "default")
	if !validName.MatchString(name) {
		return "", meta.E(op, meta.Invalid, name, errors.New("a cluster's name is letters, digits, dot, dash, underscore"))
	}
	return "/penstock/" + name, nil
}

// Authority reads the cluster's certificate authority. Errors: NotFound (the cluster was made
// without 'penstock cluster init').
func (c *Cluster) Authority(ctx context.Context) (peer.Sealed, error) {
	r, err := get[AuthorityRecord](ctx, c, "authority", "/authority")
	return r.Sealed, err
}

// get reads one record. Errors: NotFound.
func get[T any](ctx context.Context, c *Cluster, what, key string) (v T, err error) {
	r, err := c.cli.Get(ctx, c.prefix+key)
	if err != nil {
		return v, wrap("read "+what, key, err)
	}
	if len(r.Kvs) == 0 {
		return v, meta.E("read "+what, meta.NotFound, "", nil)
	}
	return decode[T](r.Kvs[0].Key, r.Kvs[0].Value)
}

// TokenRecord is the record of a join token. Its etcd lease ends it.
type TokenRecord struct {
	Version int       `json:"v,omitzero" pb:"-"`
	ID      string    `json:"id"`
	Role    peer.Role `json:"role"`
	Name    string    `json:"name,omitempty"`        // the name of the identity that joins; empty: any new name
	Hash    string    `json:"hash,omitempty" pb:"-"` // of the secret
	Expires meta.Time `json:"expires"`               // for people
}

// MaxTokenLife bounds a join token's life.
const MaxTokenLife = 30 * 24 * time.Hour

// AddToken keeps a token for a while. Errors: Invalid.
func (c *Cluster) AddToken(ctx context.Context, t TokenRecord, life time.Duration) error {
	const op = "make join token"
	if life < time.Second || life > MaxTokenLife {
		return meta.E(op, meta.Invalid, life.String(), fmt.Errorf("a token holds for a second to %v", MaxTokenLife))
	}
	lease, err := c.cli.Grant(ctx, int64((life+time.Second-1)/time.Second))
	if err != nil {
		return wrap(op, "", err)
	}
	t.Version = recordVersion
	_, err = c.cli.Put(ctx, c.prefix+"/tokens/"+t.ID, encode(t), clientv3.WithLease(lease.ID))
	return wrap(op, "", err)
}

// Token reads a valid token. Errors: NotFound.
func (c *Cluster) Token(ctx context.Context, id string) (TokenRecord, error) {
	if strings.ContainsAny(id, "/\x00") {
		return TokenRecord{}, meta.E("read join token", meta.NotFound, "", nil)
	}
	return get[TokenRecord](ctx, c, "join token", "/tokens/"+id)
}

// Tokens lists the valid tokens.
func (c *Cluster) Tokens(ctx context.Context) ([]TokenRecord, error) {
	return list[TokenRecord](ctx, c, "/tokens/")
}

// list reads all records below a prefix, a page at a time.
func list[T any](ctx context.Context, c *Cluster, prefix string) (all []T, err error) {
	from, end := c.prefix+prefix, clientv3.GetPrefixRangeEnd(c.prefix+prefix)
	for {
		r, err := c.cli.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page))
		if err != nil {
			return nil, wrap("list records", prefix, err)
		}
		for _, kv := range r.Kvs {
			v, err := decode[T](kv.Key, kv.Value)
			if err != nil {
				return nil, err
			}
			all = append(all, v)
			from = string(kv.Key) + "\x00"
		}
		if !r.More {
			return all, nil
		}
	}
}

// RevokeToken ends a token. Errors: NotFound.
func (c *Cluster) RevokeToken(ctx context.Context, id string) error {
	if _, err := c.Token(ctx, id); err != nil {
		return err
	}
	_, err := c.cli.Delete(ctx, c.prefix+"/tokens/"+id)
	return wrap("revoke join token", id, err)
}

// Member is an identity for which certificates were signed.
type Member struct {
	Version int       `json:"v,omitzero" pb:"-"`
	Role    peer.Role `json:"role"`
	Name    string    `json:"name"`
	Joined  meta.Time `json:"joined"`
	Token   string    `json:"token,omitempty"` // id of the token; empty: made with the cluster
	// Key is the digest of the key with which the identity joined (peer.KeyDigest); empty: it
	// has renewed its certificate since, or was made with the cluster.
	Key string `json:"key,omitempty" pb:"-"`
	// Evicted: its certificates are void.
	Evicted bool `json:"evicted,omitempty"`
	// Admission counts how often the name was admitted again after an eviction: certificates
	// with a lower count stay void.
	Admission uint32 `json:"admission,omitempty"`
	// Revision of the record in etcd; not stored.
	Revision int64 `json:"-"`
}

// String is "role/name".
func (m Member) String() string { return string(m.Role) + "/" + m.Name }

func (c *Cluster) memberKey(role peer.Role, name string) string {
	return c.prefix + "/members/" + string(role) + "/" + name
}

// Enrol records an identity. Unless again is set, an existing identity with another key is
// refused: a second bearer of a name would have the rights of the first. With the same key, it
// is the first bearer, which did not receive the answer. The result has the admission for the
// certificate. Errors: Exists, Unavailable (the outcome is unknown).
func (c *Cluster) Enrol(ctx context.Context, m Member, again bool) (Member, error) {
	const op = "enrol"
	m.Version = recordVersion
	key := c.memberKey(m.Role, m.Name)
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return m, wrap(op, m.String(), err)
		}
		var rev int64
		if len(r.Kvs) > 0 {
			rev = r.Kvs[0].ModRevision
			was, err := decode[Member](r.Kvs[0].Key, r.Kvs[0].Value)
			if err != nil {
				return m, err
			}
			if !again && !was.Evicted && m.Key != "" && was.Key == m.Key {
				return was, nil
			}
			if !again {
				return m, meta.E(op, meta.Exists, m.String(), errors.New("the name is taken; if its bearer is to be replaced, make a token for that name"))
			}
			if m.Admission = was.Admission; was.Evicted {
				m.Admission++
			}
		}
		t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).Then(clientv3.OpPut(key, encode(m))).Commit()
		if err != nil {
			return m, wrap(op, m.String(), err)
		}
		if t.Succeeded {
			return m, nil
		}
	}
}

// Renewed notes that an identity has a certificate for a new key. A process with the key of
// the join is then not the bearer any more, but has a copy of the bearer's old files. Errors:
// Unavailable.
func (c *Cluster) Renewed(ctx context.Context, role peer.Role, name string) error {
	const op = "note renewal"
	key := c.memberKey(role, name)
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return wrap(op, name, err)
		}
		if len(r.Kvs) == 0 {
			return nil
		}
		m, err := decode[Member](r.Kvs[0].Key, r.Kvs[0].Value)
		if err != nil || m.Key == "" {
			return err
		}
		m.Key = ""
		t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", r.Kvs[0].ModRevision)).Then(clientv3.OpPut(key, encode(m))).Commit()
		if err != nil {
			return wrap(op, m.String(), err)
		}
		if t.Succeeded {
			return nil
		}
	}
}

// Members lists all identities.
func (c *Cluster) Members(ctx context.Context) ([]Member, error) {
	return list[Member](ctx, c, "/members/")
}

// Evict voids the certificates of an identity for good, and revokes its grants for uses.
// A token for the identity's name admits the identity again, with new certificates.
// Errors: NotFound, Unavailable (the identity may be evicted; a repetition completes the
// rest).
func (c *Cluster) Evict(ctx context.Context, role peer.Role, name string) error {
	m, err := get[Member](ctx, c, "member", strings.TrimPrefix(c.memberKey(role, name), c.prefix))
	if err != nil {
		return err
	}
	m.Evicted = true
	if _, err = c.cli.Put(ctx, c.memberKey(role, name), encode(m)); err != nil {
		return wrap("evict", m.String(), err)
	}
	if role != peer.Client {
		return nil
	}
	v, err := c.Current(ctx)
	if err != nil {
		return err
	}
	return c.dropGrants(ctx, v, func(g *Grant) bool { return g.For != "" && g.Who == m.String() })
}

// Settings are the cluster's settings.
type Settings struct {
	Version int `json:"v" pb:"-"`
	// PlainBulk allows plain TCP, with tickets, for bytes of volumes that do not require
	// encryption.
	PlainBulk bool `json:"plain_bulk"`
	// KeyLife is the time, in nanoseconds, for which a key signs capabilities before the
	// next key takes its place: at least MinKeyLife; zero: DefaultKeyLife.
	KeyLife time.Duration `json:"key_life,omitempty"`
	// ClientRate bounds the operations per second of a client identity, over all mounts of the
	// identity, at a metadata server; zero: DefaultClientRate.
	ClientRate uint32 `json:"client_rate,omitempty"`
}

const (
	// DefaultClientRate is more than one client needs, in operations per second.
	DefaultClientRate = 50_000
	// MinClientRate: with a lower rate, a client's queued requests could delay its signs of
	// life beyond the end of its session.
	MinClientRate = 5_000
	// DefaultKeyLife is the age at which a signing key of capabilities is replaced.
	DefaultKeyLife = 24 * time.Hour
	// MinKeyLife is the shortest interval: capabilities signed by the previous key must end
	// while that key is valid, even if clocks differ.
	MinKeyLife = 2 * capability.MaxLife
)

// Check refuses impossible settings. Errors: Invalid.
func (s *Settings) Check() error {
	if s.KeyLife != 0 && s.KeyLife < MinKeyLife {
		return meta.E("set", meta.Invalid, "key life", fmt.Errorf("%v: capabilities are in use for up to %v after their key signed them, so it is at least %v", s.KeyLife, capability.MaxLife, MinKeyLife))
	}
	if s.ClientRate != 0 && s.ClientRate < MinClientRate {
		return meta.E("set", meta.Invalid, "client rate", fmt.Errorf("%d operations a second: it is at least %d", s.ClientRate, MinClientRate))
	}
	return nil
}

// SetSettings replaces the settings. Errors: Invalid.
func (c *Cluster) SetSettings(ctx context.Context, s Settings) error {
	if err := s.Check(); err != nil {
		return err
	}
	s.Version = recordVersion
	_, err := c.cli.Put(ctx, c.prefix+"/settings", encode(s))
	return wrap("set", "settings", err)
}
