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

// A cluster whose etcd was lost whole is written anew: its records first, the
// volumes' journals by the caller, the format record last. As long as that is
// missing nothing opens the cluster, and the restoring may begin again.

// Restoration is the record restored/<volume>: the volume was made again from
// its checkpoint.
type Restoration struct {
	Version int       `json:"v"`
	At      meta.Time `json:"at"`  // when
	Seq     meta.Seq  `json:"seq"` // of the checkpoint
	Term    meta.Term `json:"term"`
	// Quarantine: until then nothing that the journal does not know is deleted
	// from any disk, since it may be all that is left of what was lost.
	Quarantine meta.Time `json:"quarantine"`
	// Settled: the sessions of before were ended and inode numbers skipped.
	Settled bool `json:"settled,omitempty"`
}

// Founding is what a cluster begins again with.
type Founding struct {
	ID      string
	At      meta.Time // when: later than any restoring before
	Records []Record  // kept of the old etcd; rows and names are made of Volumes
	// Authority is the cluster's, as a metadata server's credentials have it; nil
	// for a cluster without certificates.
	Authority *peer.Sealed
	Volumes   []Volume
	// Restored says, by volume, what to note of it.
	Restored map[meta.VolumeID]Restoration
	// MaxVolume and MaxServer are the highest numbers that were seen anywhere:
	// new ones are given out above.
	MaxVolume meta.VolumeID
	MaxServer meta.ServerID
	// Overwrite: the cluster that etcd holds is written over.
	Overwrite bool
}

// HasAuthority tells whether the cluster will have a certificate authority.
func (f *Founding) HasAuthority() bool {
	return f.Authority != nil || slices.ContainsFunc(f.Records, func(r Record) bool { return r.Key == authorityKey })
}

// authorityKey is where it lies.
const authorityKey = "authority"

// skipIDs is how many ids are left out above the highest that was seen: those
// given out after it are not known.
const skipIDs = 64

// Absent makes sure that etcd holds no cluster of a name. Errors: Exists, Invalid,
// Unavailable.
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

// aliveWait is how long a metadata server that is registered is waited for to end: what it
// is registered with ends some seconds after it, and after a start of etcd, which knows of
// no time before.
const aliveWait = 10 * time.Second

// Overwritable makes sure that nobody serves the cluster of a name that etcd holds.
// Errors: Busy (a metadata server lives), Invalid, Unavailable.
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

// Refound writes a cluster's records into an etcd that holds none. volumes
// writes the journals, below the prefix that it is given.
// Errors: Exists (etcd holds a cluster, or did when we were done), and volumes'.
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
	// What a restoring that did not end has left.
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
		case r.Key == authorityKey && f.Authority == nil: // of an older program's checkpoint
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

// readyGroup tells whether a group's snapshots are whole: one that was undecided would have
// snapshots deleted that are whole since.
func readyGroup(value []byte) bool {
	var g meta.Group
	return json.Unmarshal(value, &g) == nil && g.Version == meta.GroupVersion && g.State == meta.GroupReady
}

// DecodeVolume reads a volume's row as a checkpoint's manifest holds it.
func DecodeVolume(b []byte) (Volume, error) { return decode[Volume]([]byte("row"), b) }

func (c *Cluster) restoredKey(v meta.VolumeID) string {
	return fmt.Sprintf("%s/restored/%08x", c.prefix, uint32(v))
}

// Restored tells whether a volume was made again from its checkpoint, and how.
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

// SettleRestored notes that a restored volume's sessions of before are ended.
func (c *Cluster) SettleRestored(ctx context.Context, v meta.VolumeID) error {
	r, ok, err := c.Restored(ctx, v)
	if err != nil || !ok || r.Settled {
		return err
	}
	r.Settled = true
	_, err = c.cli.Put(ctx, c.restoredKey(v), encode(r))
	return wrap("note restoration", fmt.Sprint(v), err)
}
