package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// After the loss of etcd, a cluster is written anew: first its records, then the journals of
// the volumes, which the caller writes, and the format record last. Without the format record
// nothing opens the cluster, and the restoration can start again.

// Restoration is the record restored/<volume>: the volume was restored from its checkpoint.
type Restoration struct {
	Version int       `json:"v"`
	At      meta.Time `json:"at"`  // when
	Seq     meta.Seq  `json:"seq"` // of the checkpoint
	Term    meta.Term `json:"term"`
	// Quarantine: before this time, no disk deletes data unknown to the journal, since the
	// data may be the last copy of lost data.
	Quarantine meta.Time `json:"quarantine"`
	// Settled: the sessions that the checkpoint names were ended and inode numbers skipped.
	Settled bool `json:"settled,omitempty"`
}

// Founding is the beginning of a restored cluster.
type Founding struct {
	ID      string
	At      meta.Time // when: later than any restoring before
	Records []Record  // kept of the old etcd; rows and names are made of Volumes
	// Authority is the cluster's authority from a metadata server's credentials; nil for a
	// cluster without certificates.
	Authority *peer.Sealed
	Volumes   []Volume
	// Restored has the Restoration of each restored volume.
	Restored map[meta.VolumeID]Restoration
	// MaxVolume and MaxServer are the highest ids seen anywhere: new ids are assigned above.
	MaxVolume meta.VolumeID
	MaxServer meta.ServerID
	// Overwrite: overwrite the cluster in etcd.
	Overwrite bool
}

// HasAuthority tells whether the cluster will have a certificate authority.
func (f *Founding) HasAuthority() bool {
	return f.Authority != nil || slices.ContainsFunc(f.Records, func(r Record) bool { return r.Key == authorityKey })
}

// authorityKey is the key of the authority's record.
const authorityKey = "authority"

// skipIDs is the number of ids skipped above the highest seen: ids assigned after it are
// unknown.
const skipIDs = 64

// Absent checks that etcd has no cluster with this name. Errors: Exists, Invalid, Unavailable.
func Absent(ctx context.Context, cli *clientv3.Client, name string) error {
	const op = "restore cluster"
	if name == "" {
		name = "default"
	}
	if !validName.MatchString(name) {
		return meta.E(op, meta.Invalid, name, nil)
	}
	r, err := cli.Get(ctx, "/penstock/"+name+"/format")
	if err != nil {
		return wrap(op, name, err)
	}
	if len(r.Kvs) > 0 {
		return meta.E(op, meta.Exists, name, errors.New("etcd holds a cluster: nothing is restored over one that is there, unless --overwrite says so"))
	}
	return nil
}

// aliveWait is how long to wait for the end of a registered metadata server: its registration
// ends some seconds after the server and, after a start of etcd, which counts from its start,
// some seconds later.
const aliveWait = 10 * time.Second

// Overwritable checks that no process serves the cluster with this name in etcd. Errors: Busy
// (a metadata server runs), Invalid, Unavailable.
func Overwritable(ctx context.Context, cli *clientv3.Client, name string) error {
	const op = "restore cluster"
	prefix, err := prefixOf(op, Config{Name: name})
	if err != nil {
		return err
	}
	for began := time.Now(); ; {
		r, err := cli.Get(ctx, prefix+"/metaservers/", clientv3.WithPrefix())
		if err != nil {
			return wrap(op, prefix, err)
		}
		if len(r.Kvs) == 0 {
			return nil
		}
		if time.Since(began) > aliveWait {
			return meta.E(op, meta.Busy, strings.TrimPrefix(string(r.Kvs[0].Key), prefix+"/metaservers/"),
				errors.New("this metadata server runs on the cluster that is to be written over: stop it, and say this again"))
		}
		select {
		case <-ctx.Done():
			return wrap(op, prefix, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// Refound writes a cluster's records into an etcd without a cluster. volumes writes the
// journals below the given prefix. Errors: Exists (etcd has a cluster, or had one at the end),
// and those of volumes.
func Refound(ctx context.Context, cli *clientv3.Client, name string, f Founding, volumes func(prefix string) error) error {
	const op = "restore cluster"
	check := Absent
	if f.Overwrite {
		check = Overwritable
	}
	if err := check(ctx, cli, name); err != nil {
		return err
	}
	if name == "" {
		name = "default"
	}
	prefix := "/penstock/" + name
	// Remains of an unfinished restoration.
	if _, err := cli.Delete(ctx, prefix+"/", clientv3.WithPrefix()); err != nil {
		return wrap(op, name, err)
	}
	last := map[string]uint64{"volume": uint64(f.MaxVolume), "server": uint64(f.MaxServer)}
	put := func(key, value string) error {
		_, err := cli.Put(ctx, prefix+"/"+key, value)
		return wrap(op, key, err)
	}
	for _, r := range f.Records {
		switch {
		case strings.HasPrefix(r.Key, "table/"), strings.HasPrefix(r.Key, "names/"), strings.HasPrefix(r.Key, "restored/"), r.Key == "format":
			continue
		case strings.HasPrefix(r.Key, "counters/"):
			counter := strings.TrimPrefix(r.Key, "counters/")
			n, err := strconv.ParseUint(string(r.Value), 10, 64)
			if err != nil {
				return meta.E(op, meta.Corrupt, r.Key, err)
			}
			last[counter] = max(last[counter], n)
			continue
		case strings.HasPrefix(r.Key, "groups/") && readyGroup(r.Value): // of a backup
		case !keptRecord(r.Key):
			continue
		}
		if err := put(r.Key, string(r.Value)); err != nil {
			return err
		}
	}
	if f.Authority != nil {
		if err := put(authorityKey, encode(AuthorityRecord{recordVersion, *f.Authority})); err != nil {
			return err
		}
	}
	for counter, n := range last {
		if err := put("counters/"+counter, strconv.FormatUint(n+skipIDs, 10)); err != nil {
			return err
		}
	}
	for _, v := range f.Volumes {
		v.Version = recordVersion
		if err := put(fmt.Sprintf("table/%08x", uint32(v.ID)), encode(v)); err != nil {
			return err
		}
		if v.named() {
			if err := put("names/"+v.Name, fmt.Sprintf("%08x", uint32(v.ID))); err != nil {
				return err
			}
		}
	}
	for v, r := range f.Restored {
		r.Version = recordVersion
		if err := put(fmt.Sprintf("restored/%08x", uint32(v)), encode(r)); err != nil {
			return err
		}
	}
	if err := volumes(prefix); err != nil {
		return err
	}
	key := prefix + "/format"
	t, err := cli.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, encode(Format{Version: recordVersion, Format: FormatVersion, ID: f.ID, Restored: f.At}))).Commit()
	if err != nil {
		return wrap(op, name, err)
	}
	if !t.Succeeded {
		return meta.E(op, meta.Exists, name, errors.New("a server made a new cluster meanwhile: stop all meta servers"))
	}
	return nil
}

// readyGroup reports whether a group's snapshots are complete. If an undecided group were
// restored, its snapshots, which may have become complete since, would be deleted.
func readyGroup(value []byte) bool {
	var g meta.Group
	return json.Unmarshal(value, &g) == nil && g.Version == meta.GroupVersion && g.State == meta.GroupReady
}

// DecodeVolume decodes a volume's row from a checkpoint's manifest.
func DecodeVolume(b []byte) (Volume, error) { return decode[Volume]([]byte("row"), b) }

func (c *Cluster) restoredKey(v meta.VolumeID) string {
	return fmt.Sprintf("%s/restored/%08x", c.prefix, uint32(v))
}

// Restored returns a volume's Restoration, if it was restored from its checkpoint.
func (c *Cluster) Restored(ctx context.Context, v meta.VolumeID) (r Restoration, ok bool, err error) {
	got, err := c.cli.Get(ctx, c.restoredKey(v))
	if err != nil {
		return r, false, wrap("read restoration", fmt.Sprint(v), err)
	}
	if len(got.Kvs) == 0 {
		return r, false, nil
	}
	r, err = decode[Restoration](got.Kvs[0].Key, got.Kvs[0].Value)
	return r, err == nil, err
}

// SettleRestored notes that the old sessions of a restored volume are ended.
func (c *Cluster) SettleRestored(ctx context.Context, v meta.VolumeID) error {
	r, ok, err := c.Restored(ctx, v)
	if err != nil || !ok || r.Settled {
		return err
	}
	r.Settled = true
	_, err = c.cli.Put(ctx, c.restoredKey(v), encode(r))
	return wrap("note restoration", fmt.Sprint(v), err)
}
