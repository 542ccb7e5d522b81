package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// VolumeState is the stage of a volume's life.
type VolumeState string

const (
	VolumeActive   VolumeState = "active"
	VolumeTrash    VolumeState = "trash"    // deleted, but complete until Volume.Until; its name is free
	VolumeDeleting VolumeState = "deleting" // the name is free; the chunks are being deleted
	VolumeCreating VolumeState = "creating" // a clone not yet noted at its origin's snapshot
)

// AttachStep is the pending change of a junction. If the server that began the change does not
// finish it, the owner of the parent volume does.
type AttachStep string

const (
	Attached  AttachStep = "" // the junction is in the parent
	Attaching AttachStep = "attaching"
	Detaching AttachStep = "detaching"
)

// Attach is the junction that leads to a volume.
type Attach struct {
	Parent meta.VolumeID `json:"parent"`
	Ino    meta.Ino      `json:"ino"` // the directory in the parent
	Name   string        `json:"name"`
	Step   AttachStep    `json:"step,omitempty"`
}

// Same reports whether a and b are the same place, regardless of pending changes.
func (a Attach) Same(b Attach) bool {
	return a.Parent == b.Parent && a.Ino == b.Ino && a.Name == b.Name
}

// Origin is the snapshot from which a volume was cloned. As long as it is in the clone's row,
// the clone may need chunks of the origin. The origin notes the clone in its journal before
// the clone becomes active, and removes the note after Origin is gone.
type Origin struct {
	Volume    meta.VolumeID   `json:"volume"`
	At        meta.Generation `json:"at"`
	Snapshot  string          `json:"snapshot"`
	Implied   bool            `json:"implied,omitempty"` // the snapshot was taken for the clone, and is deleted with it
	Token     uint64          `json:"token,omitempty"`   // of the request for the clone
	Promoting bool            `json:"promoting,omitempty"`
	Rate      uint64          `json:"rate,omitempty"` // of promoting, bytes a second; 0: no bound
}

// Advisory is a quota that refuses nothing. The volume's owner records the time since which
// the volume exceeds the quota.
type Advisory struct {
	Bytes      uint64    `json:"bytes,omitempty"`
	Inodes     uint64    `json:"inodes,omitempty"`
	BytesOver  meta.Time `json:"bytes_over,omitempty"`
	InodesOver meta.Time `json:"inodes_over,omitempty"`
}

// Volume is a row of the volume table.
type Volume struct {
	Version int           `json:"v"`
	ID      meta.VolumeID `json:"id"`
	Name    string        `json:"name"`
	State   VolumeState   `json:"state"`
	Policy  meta.Policy   `json:"policy"`
	Attach  *Attach       `json:"attach,omitempty"` // nil: nowhere, or the root
	Created meta.Time     `json:"created"`
	Keep    string        `json:"keep,omitempty"`   // the schedule of its snapshots
	Origin  *Origin       `json:"origin,omitempty"` // of a clone
	// TrashSeconds is how long the volume stays in the trash after its deletion.
	TrashSeconds uint64    `json:"trash_seconds,omitempty"`
	Deleted      meta.Time `json:"deleted,omitempty"` // in the trash: since when, until when
	Until        meta.Time `json:"until,omitempty"`
	// Compression names how chunks are stored, see meta.ParseCompression; "": plain.
	Compression string    `json:"compression,omitempty"`
	Advisory    *Advisory `json:"advisory,omitempty"` // nil: none
	// Dropped are snapshots deleted while clones needed them. A dropped snapshot is removed
	// when no clone needs the snapshot.
	Dropped []meta.Generation `json:"dropped,omitempty"`
	// Done are the tokens of the last requests that changed the row, for recognising repeated
	// requests (see Did).
	Done []uint64 `json:"done,omitempty"`
	// Labels are the first labels for CreateVolume and CreateClone. Labels have a record of
	// their own, which Labels reads: a row read from etcd has none here.
	Labels map[string]string `json:"-"`
	// Revision of the row in etcd; not stored.
	Revision int64 `json:"-"`
}

// maxDone is the number of requests remembered by a row: at most this many other requests may
// come between a request and its repetition.
const maxDone = 8

// Did reports whether the row has the change of a request, or had it before others changed the
// row. A zero token stands for no request.
func (v *Volume) Did(token uint64) bool { return token != 0 && slices.Contains(v.Done, token) }

// Does notes the request that changes the row.
func (v *Volume) Does(token uint64) {
	if token == 0 || v.Did(token) {
		return
	}
	// Another's copy of the row may share the list.
	v.Done = append(slices.Clone(v.Done[max(0, len(v.Done)+1-maxDone):]), token)
}

// Undoes forgets a request that was refused after it had changed the row.
func (v *Volume) Undoes(token uint64) {
	if v.Did(token) {
		v.Done = slices.DeleteFunc(slices.Clone(v.Done), func(t uint64) bool { return t == token })
	}
}

// named reports whether the volume has its name: a deleted volume leaves its name to others.
func (v *Volume) named() bool { return v.State == VolumeActive || v.State == VolumeCreating }

func (c *Cluster) rowKey(id meta.VolumeID) string {
	return fmt.Sprintf("%s/table/%08x", c.prefix, uint32(id))
}

func (c *Cluster) nameKey(name string) string { return c.prefix + "/names/" + name }

// MaxVolumeName is the longest name of a volume, in bytes.
const MaxVolumeName = meta.MaxName

// CheckVolumeName refuses impossible names with Invalid. Mount sources have the form
// VOLUME@SNAPSHOT:PATH.
func CheckVolumeName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > MaxVolumeName || strings.ContainsAny(name, "/\x00@:") || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return meta.E("name volume", meta.Invalid, strconv.QuoteToGraphic(name), fmt.Errorf("a volume's name is text of 1 to %d bytes without '/', '@', ':' and control characters, and not '.' or '..'", MaxVolumeName))
	}
	return nil
}

// CreateVolume adds a volume. The first volume of a cluster gets meta.RootVolume. now is its
// time of creation; words set further fields of the row. Errors: VolumeExists (the name),
// Invalid (the name), ResourceExceeded (no ids left), Unavailable, NoSpace.
func (c *Cluster) CreateVolume(ctx context.Context, name string, p meta.Policy, now meta.Time, words ...func(*Volume)) (Volume, error) {
	v := Volume{Name: name, State: VolumeActive, Policy: p, Created: now}
	for _, say := range words {
		say(&v)
	}
	return c.createVolume(ctx, v)
}

// CreateClone adds a clone in state creating, with the origin's settings and labels, unless
// the origin's row changes at the same moment. Errors: as CreateVolume, NoSuchVolume (the
// origin is not active), Busy (its row changed).
func (c *Cluster) CreateClone(ctx context.Context, name string, p meta.Policy, now meta.Time, from Origin) (Volume, error) {
	origin, err := c.Volume(ctx, from.Volume)
	if err != nil {
		return Volume{}, err
	}
	if origin.State != VolumeActive {
		return Volume{}, meta.E("clone", meta.NoSuchVolume, origin.Name, fmt.Errorf("it is %s", origin.State))
	}
	all, err := c.Labels(ctx, from.Volume, from.Volume)
	labels := all[from.Volume]
	if err = errors.Join(err, labels.Err); err != nil {
		return Volume{}, err
	}
	v, err := c.createVolume(ctx, CloneRow(name, p, now, from, &origin, labels.Set),
		clientv3.Compare(clientv3.ModRevision(c.rowKey(origin.ID)), "=", origin.Revision))
	if meta.KindOf(err) == meta.VolumeExists {
		if _, ferr := c.VolumeByName(ctx, name); meta.KindOf(ferr) == meta.NoSuchVolume {
			err = meta.E("clone", meta.Busy, origin.Name, errors.New("it is being changed: try again"))
		}
	}
	return v, err
}

func (c *Cluster) createVolume(ctx context.Context, v Volume, more ...clientv3.Cmp) (Volume, error) {
	const op = "create volume"
	name := v.Name
	if err := CheckVolumeName(name); err != nil {
		return Volume{}, err
	}
	// A name in use costs no id.
	if _, err := c.VolumeByName(ctx, name); err == nil {
		return Volume{}, meta.E(op, meta.VolumeExists, name, nil)
	} else if meta.KindOf(err) != meta.NoSuchVolume {
		return Volume{}, err
	}
	n, err := c.nextID(ctx, "volume")
	if err != nil {
		return Volume{}, err
	}
	if n > uint64(meta.MaxVolume) {
		return Volume{}, meta.E(op, meta.ResourceExceeded, name, fmt.Errorf("all %d volume ids were given out", meta.MaxVolume))
	}
	v.ID, v.Version = meta.VolumeID(n), recordVersion
	t, err := c.cli.Txn(ctx).
		If(append(more, clientv3.Compare(clientv3.CreateRevision(c.nameKey(name)), "=", 0),
			clientv3.Compare(clientv3.CreateRevision(c.rowKey(v.ID)), "=", 0))...).
		Then(clientv3.OpPut(c.nameKey(name), fmt.Sprintf("%08x", uint32(v.ID))),
			clientv3.OpPut(c.rowKey(v.ID), encode(v)), c.putLabels(v.ID, v.Labels)).
		Commit()
	if err != nil {
		// If the row was committed after all, the next attempt finds the name in use; the
		// caller recognises its own row by the age.
		return Volume{}, wrap(op, name, err)
	}
	if !t.Succeeded {
		return Volume{}, meta.E(op, meta.VolumeExists, name, nil)
	}
	v.Revision = t.Header.Revision
	return v, nil
}

// Volume reads a row, linearizably. Errors: NoSuchVolume.
func (c *Cluster) Volume(ctx context.Context, id meta.VolumeID) (Volume, error) {
	r, err := c.cli.Get(ctx, c.rowKey(id))
	if err != nil {
		return Volume{}, wrap("read volume", fmt.Sprint(id), err)
	}
	return rowIn(id, r.Kvs)
}

// rowIn decodes a volume's row from the records found. Errors: NoSuchVolume, Corrupt.
func rowIn(id meta.VolumeID, found []*mvccpb.KeyValue) (Volume, error) {
	if len(found) == 0 {
		return Volume{}, meta.E("read volume", meta.NoSuchVolume, fmt.Sprint(id), nil)
	}
	v, err := decode[Volume](found[0].Key, found[0].Value)
	v.Revision = found[0].ModRevision
	return v, err
}

// VolumeByName finds a row by name, linearizably. Errors: NoSuchVolume.
func (c *Cluster) VolumeByName(ctx context.Context, name string) (Volume, error) {
	if CheckVolumeName(name) != nil {
		return Volume{}, meta.E("find volume", meta.NoSuchVolume, name, nil)
	}
	r, err := c.cli.Get(ctx, c.nameKey(name))
	if err != nil {
		return Volume{}, wrap("find volume", name, err)
	}
	if len(r.Kvs) == 0 {
		return Volume{}, meta.E("find volume", meta.NoSuchVolume, name, nil)
	}
	id, err := strconv.ParseUint(string(r.Kvs[0].Value), 16, 32)
	if err != nil {
		return Volume{}, meta.E("find volume", meta.Corrupt, name, err)
	}
	return c.Volume(ctx, meta.VolumeID(id))
}

// page bounds the rows of one range read.
const page = 500

// Volumes reads the whole table, by id: each page linearizably.
func (c *Cluster) Volumes(ctx context.Context) ([]Volume, error) {
	var all []Volume
	err := c.pages(ctx, c.prefix+"/table/", func(key, value []byte, rev int64) error {
		v, err := decode[Volume](key, value)
		v.Revision = rev
		all = append(all, v)
		return err
	})
	return all, err
}

// pages calls fn for every key below a prefix, ascending.
func (c *Cluster) pages(ctx context.Context, prefix string, fn func(key, value []byte, rev int64) error) error {
	return c.span(ctx, prefix, clientv3.GetPrefixRangeEnd(prefix), fn)
}

// span calls fn for every key in [from, end), ascending.
func (c *Cluster) span(ctx context.Context, from, end string, fn func(key, value []byte, rev int64) error) error {
	for first := from; ; {
		r, err := c.cli.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(page))
		if err != nil {
			return wrap("read cluster", first, err)
		}
		for _, kv := range r.Kvs {
			if err := fn(kv.Key, kv.Value, kv.ModRevision); err != nil {
				return err
			}
			from = string(kv.Key) + "\x00"
		}
		if len(r.Kvs) < page {
			return nil
		}
	}
}

// UpdateVolume changes a row by compare-and-swap: change gets the present row and modifies
// policy, state, attach or name. It may be called several times. Errors: NoSuchVolume,
// VolumeExists (the new name), change's, Unavailable.
func (c *Cluster) UpdateVolume(ctx context.Context, id meta.VolumeID, change func(*Volume) error) (Volume, error) {
	const op = "change volume"
	for {
		old, err := c.Volume(ctx, id)
		if err != nil {
			return Volume{}, err
		}
		v := old
		if old.Attach != nil {
			a := *old.Attach
			v.Attach = &a
		}
		if old.Origin != nil {
			o := *old.Origin
			v.Origin = &o
		}
		if err := change(&v); err != nil {
			return Volume{}, err
		}
		v.ID, v.Version, v.Created = old.ID, recordVersion, old.Created
		cmps := []clientv3.Cmp{clientv3.Compare(clientv3.ModRevision(c.rowKey(id)), "=", old.Revision)}
		ops := []clientv3.Op{clientv3.OpPut(c.rowKey(id), encode(v))}
		if old.named() && (!v.named() || v.Name != old.Name) {
			ops = append(ops, clientv3.OpDelete(c.nameKey(old.Name)))
		}
		if v.named() && (!old.named() || v.Name != old.Name) {
			if err := CheckVolumeName(v.Name); err != nil && v.Name != old.Name {
				return Volume{}, err
			}
			if _, err := c.VolumeByName(ctx, v.Name); err == nil {
				return Volume{}, meta.E(op, meta.VolumeExists, v.Name, nil)
			}
			cmps = append(cmps, clientv3.Compare(clientv3.CreateRevision(c.nameKey(v.Name)), "=", 0))
			ops = append(ops, clientv3.OpPut(c.nameKey(v.Name), fmt.Sprintf("%08x", uint32(id))))
		}
		t, err := c.cli.Txn(ctx).If(cmps...).Then(ops...).Commit()
		if err != nil {
			return Volume{}, wrap(op, old.Name, err)
		}
		if t.Succeeded {
			v.Revision = t.Header.Revision
			return v, nil
		}
	}
}

// DeleteVolume removes a volume's row, name and whole journal, the grants on the volume, and
// the record of a mirror with this target. The removal fences the volume's owner, if any. The
// id is never reused. Servers that may still have chunks of the volume are recorded (see
// Deleted). Deleting an absent volume succeeds. Errors: Busy (the row changed meanwhile),
// Unavailable.
func (c *Cluster) DeleteVolume(ctx context.Context, id meta.VolumeID, on ...meta.ServerID) error {
	const op = "delete volume"
	v, err := c.Volume(ctx, id)
	if meta.KindOf(err) == meta.NoSuchVolume {
		return nil
	}
	if err != nil {
		return err
	}
	// A call that grants rights reads the volume's row first, and finds the volume being
	// deleted. So a view newer than the row's change shows all grants that will ever exist.
	view := c.View()
	if view.Revision < v.Revision {
		if view, err = c.Current(ctx); err != nil {
			return err
		}
	}
	if err := c.dropGrants(ctx, view, func(g *Grant) bool { return g.Volume == id }); err != nil {
		return err
	}
	keys := fmt.Sprintf("%s/volumes/%08x/", c.prefix, uint32(id))
	ops := []clientv3.Op{clientv3.OpDelete(c.rowKey(id)), clientv3.OpDelete(keys, clientv3.WithPrefix()), clientv3.OpDelete(c.mirrorKey(id)), c.putLabels(id, nil)}
	if v.named() {
		ops = append(ops, clientv3.OpDelete(c.nameKey(v.Name)))
	}
	if len(on) > 0 {
		ops = append(ops, clientv3.OpPut(c.deletedKey(id), encode(Deleted{recordVersion, id, on})))
	}
	t, err := c.cli.Txn(ctx).If(clientv3.Compare(clientv3.ModRevision(c.rowKey(id)), "=", v.Revision)).Then(ops...).Commit()
	if err != nil {
		return wrap(op, v.Name, err)
	}
	if !t.Succeeded {
		return meta.E(op, meta.Busy, v.Name, errors.New("it is being changed: try again"))
	}
	return nil
}
