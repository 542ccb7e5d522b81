// Package cluster owns what a whole cluster knows, in etcd: its identity and
// format, the volume table, chunk servers, meta servers, capability keys.
//
// Keys, under /penstock/<cluster name>/; values are JSON with a version field v:
//
//	format                       Format: the cluster's id and format version; refused if newer
//	counters/volume              the last volume id given out, decimal; ids are never reused
//	counters/server              the last chunk server id given out
//	table/<volume, 8 hex>        Volume
//	names/<volume's name>        the volume's id, 8 hex: makes names unique
//	chunkservers/<server, 16 hex>  leased: ChunkServer
//	metaservers/<name>           leased: MetaServer
//	nodes/<server, 16 hex>       Node: a chunk server that was seen once, and what is wanted with it
//	bearers/<server, 16 hex>     Bearer: whose certificate a chunk server's number belongs to
//	gateways/<name>              leased: Gateway
//	gatewaynames/<name>          GatewayName: the number that belongs to a gateway's name for ever
//	counters/gateway             the last number of a gateway given out
//	deleted/<volume, 8 hex>      Deleted: a volume that is gone, and who may still have chunks of it
//	capkeys                      capKeys: the keys that capabilities are signed with
//	keyhold                      leased, empty: no capability key is added now
//	restored/<volume, 8 hex>     Restoration: the volume was made again from a checkpoint
//	authority                    AuthorityRecord: the certificate authority, its key sealed
//	tokens/<id>                  leased: TokenRecord, a join token
//	members/<role>/<name>        Member: an identity that certificates were signed for
//	grants/<number, 16 hex>      Grant: what an identity may do on a volume
//	grants/for/<use>/...         Grant: the same, for as long as a use lasts: see GrantFor
//	ended/...                    empty: when a client's uses ended last: see GrantFor
//	groups/<name>                meta.Group: snapshots of several volumes, of one moment
//	settings                     Settings
//	volumes/<volume, 8 hex>/...  journal and ownership: see package meta/journal/etcd
//
// A View is a snapshot of all of it but the last, refreshed when a watch hints
// at a change and every few seconds anyway. It is always one revision's state,
// and never the base of a decision that must be linearizable.
package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// FormatVersion is the newest cluster format of this program; recordVersion that of single
// records.
const (
	FormatVersion = 1
	recordVersion = 1
)

// refresh is how often the view is read although nothing hinted at a change.
const refresh = 5 * time.Second

// Format identifies the cluster of the keys.
type Format struct {
	Version int    `json:"v"`
	Format  int    `json:"format"`
	ID      string `json:"id"` // random, made with the cluster
	// Restored is the time of the last restoration after the loss of etcd, 0 if there was
	// none: state that a server kept from before is older than the restored cluster.
	Restored meta.Time `json:"restored,omitempty"`
}

// Config says which cluster.
type Config struct {
	Name   string // "" means "default"; letters, digits, dot, dash, underscore
	Logger *slog.Logger
	// Expect is the id of the caller's cluster, if any: Open refuses another cluster, and
	// makes none in an empty etcd, which has lost its data.
	Expect string
	// Replaced, if not nil, is called once when etcd no longer has this cluster, or has an
	// older copy of the cluster.
	Replaced func(error)
}

// Cluster reads and writes the cluster's keys.
type Cluster struct {
	cli    *clientv3.Client
	prefix string
	format Format
	log    *slog.Logger

	run    context.Context // ends with Close
	cancel context.CancelFunc
	joined sync.WaitGroup
	view   atomic.Pointer[View]

	mu      sync.Mutex
	changed chan struct{} // closed and replaced with every new view
	// gone has the keys deleted as the watches reported, in the order of the reports. goneMore
	// is closed at the next report; nil: no goroutine waits.
	gone     []deletion
	goneMore chan struct{}
	// For Current: the read that has not begun, or nil; the newest read; and the earliest time
	// of the next.
	next, last *lookup
	calm       time.Time
}

var validName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// Open joins a cluster, and makes the cluster's first record if missing. Open writes nothing
// into a cluster of a newer format. Errors: Version, Corrupt, Invalid (the name), Unavailable,
// NoSpace.
func Open(ctx context.Context, cli *clientv3.Client, cfg Config) (*Cluster, error) {
	const op = "open cluster"
	prefix, err := prefixOf(op, cfg)
	if err != nil {
		return nil, err
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c := &Cluster{cli: cli, prefix: prefix, log: cfg.Logger, changed: make(chan struct{})}
	f, err := c.identify(ctx, cfg.Expect)
	if err != nil {
		return nil, err
	}
	c.format = f
	v, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	c.view.Store(v)
	run, cancel := context.WithCancel(context.Background())
	c.run, c.cancel = run, cancel
	c.joined.Go(func() { c.keepView(run) })
	if cfg.Replaced != nil {
		c.joined.Go(func() { c.watchFormat(run, cfg.Replaced) })
	}
	return c, nil
}

// identify reads the format record, or makes it.
func (c *Cluster) identify(ctx context.Context, expect string) (Format, error) {
	const op = "open cluster"
	key := c.prefix + "/format"
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return Format{}, wrap(op, c.prefix, err)
		}
		if len(r.Kvs) > 0 {
			var f Format
			if err := json.Unmarshal(r.Kvs[0].Value, &f); err != nil || f.ID == "" {
				return Format{}, meta.E(op, meta.Corrupt, key, err)
			}
			if f.Format > FormatVersion || f.Version > recordVersion {
				return Format{}, meta.E(op, meta.Version, c.prefix, fmt.Errorf("its format is %d, this program knows up to %d: use a newer program", f.Format, FormatVersion))
			}
			if expect != "" && f.ID != expect {
				return Format{}, meta.E(op, meta.Invalid, c.prefix, fmt.Errorf("etcd holds cluster %s, this server belongs to %s", f.ID, expect))
			}
			return f, nil
		}
		if expect != "" {
			return Format{}, meta.E(op, meta.Invalid, c.prefix, fmt.Errorf("etcd holds no cluster, but this server belongs to %s: if etcd was lost, 'penstock cluster restore' makes the cluster again", expect))
		}
		f := Format{Version: recordVersion, Format: FormatVersion, ID: NewID()}
		if _, err := c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
			Then(clientv3.OpPut(key, encode(f))).Commit(); err != nil {
			return Format{}, wrap(op, c.prefix, err)
		}
	}
}

// ID is the cluster's random identity.
func (c *Cluster) ID() string { return c.format.ID }

// RestoredAt returns the time of the last restoration after the loss of etcd, 0 if there was
// none.
func (c *Cluster) RestoredAt() meta.Time { return c.format.Restored }

// Prefix returns the prefix of all keys of the cluster, without a slash at the end.
func (c *Cluster) Prefix() string { return c.prefix }

// Client is etcd's.
func (c *Cluster) Client() *clientv3.Client { return c.cli }

// Close stops the view. The client stays open: it belongs to the caller.
func (c *Cluster) Close() {
	c.mu.Lock()
	c.cancel() // under mu: Current begins nothing afterwards
	c.mu.Unlock()
	c.joined.Wait()
}

// nextID counts a counter up. Numbers are lost, never given twice.
func (c *Cluster) nextID(ctx context.Context, counter string) (uint64, error) {
	const op = "give out an id"
	key := c.counterKey(counter)
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return 0, wrap(op, counter, err)
		}
		last, rev, err := lastID(r.Kvs)
		if err != nil {
			return 0, err
		}
		t, err := c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, strconv.FormatUint(last+1, 10))).Commit()
		if err != nil {
			return 0, wrap(op, counter, err)
		}
		if t.Succeeded {
			return last + 1, nil
		}
	}
}

func (c *Cluster) counterKey(counter string) string { return c.prefix + "/counters/" + counter }

// lastID decodes the record of a counter: the last assigned id, and the record's revision.
// Errors: Corrupt.
func lastID(kvs []*mvccpb.KeyValue) (last uint64, rev int64, err error) {
	if len(kvs) == 0 {
		return 0, 0, nil
	}
	if last, err = strconv.ParseUint(string(kvs[0].Value), 10, 64); err != nil {
		return 0, 0, meta.E("give out an id", meta.Corrupt, string(kvs[0].Key), err)
	}
	return last, kvs[0].ModRevision, nil
}

// encode gives a record's JSON.
func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic("cluster: records are plain data: " + err.Error())
	}
	return string(b)
}

// decode reads a record, which has a version field.
func decode[T any](key, value []byte) (T, error) {
	var v T
	var head struct {
		Version int `json:"v"`
	}
	if err := json.Unmarshal(value, &head); err != nil || head.Version < 1 {
		return v, meta.E("read cluster record", meta.Corrupt, string(key), err)
	}
	if head.Version > recordVersion {
		return v, meta.E("read cluster record", meta.Version, string(key), fmt.Errorf("the record has version %d, this program knows version %d", head.Version, recordVersion))
	}
	if err := json.Unmarshal(value, &v); err != nil {
		return v, meta.E("read cluster record", meta.Corrupt, string(key), err)
	}
	return v, nil
}

func wrap(op, subject string, err error) error {
	if err == nil {
		return nil
	}
	kind := meta.Unavailable
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace), errors.Is(err, rpctypes.ErrGRPCNoSpace):
		kind = meta.NoSpace
	case errors.Is(err, context.Canceled):
		kind = meta.Canceled
	}
	return meta.E(op, kind, subject, err)
}
