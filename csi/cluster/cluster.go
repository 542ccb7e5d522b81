// Package cluster speaks to a Penstock cluster for the driver: volumes, their places in the
// tree, snapshots, and the machines with chunk servers. The package keeps a session and
// translates requests; its callers decide what to do.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/wire"
)

// Volume is a volume of the cluster.
type Volume struct {
	ID   meta.VolumeID
	Name string
	Path string // in the tree; "": not attached
	policy.Terms
	Origin Origin // of a clone
	// Deleting: the volume is being created or deleted, or is in the trash. No client can use
	// the volume.
	Deleting bool
	Trashed  bool // deleted, but restorable for a while
}

// Origin is the snapshot from which a clone was made. Volume is zero for a volume that is no
// clone, and for a clone of a snapshot taken for the clone alone.
type Origin struct {
	Volume   meta.VolumeID
	Snapshot string
}

// Snapshot is a snapshot of a volume.
type Snapshot struct {
	Name    string
	At      meta.Generation
	Created time.Time
	Bytes   uint64 // size of the volume when the snapshot was taken
	Ready   bool   // false: the snapshot is being deleted, or rolled back to
	Group   uint64 // the id of the snapshot's group; 0: no group
}

// Config has the cluster's addresses and the driver's identity.
type Config struct {
	Addrs []string
	Creds *peer.Credentials
	Name  string // for people
	// Admin: connect as an administrator, able to create and delete volumes; else as a client,
	// which sees only the volumes granted to it.
	Admin  bool
	Logger *slog.Logger
}

// Cluster is a connection to a cluster. Cluster connects at the first use, and again after its
// session has ended for good. All methods are safe for concurrent use.
type Cluster struct {
	cfg Config

	mu     sync.Mutex
	sess   *client.Session
	dial   *dialing      // under way; nil: none is
	api    *admin.Client // nil: not used yet
	closed bool
}

// dialing is the start of a session: one at a time, shared by all waiting callers. Each caller
// waits as long as its own context allows.
type dialing struct {
	done   chan struct{} // closed once sess or err is set
	sess   *client.Session
	err    error
	cancel context.CancelFunc
}

// New returns an unconnected Cluster.
func New(cfg Config) *Cluster { return &Cluster{cfg: cfg} }

// administration returns the client of the administrative API. Errors: Canceled (the Cluster
// is closed), Invalid (no address).
func (c *Cluster) administration() (*admin.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, meta.E("connect", meta.Canceled, "", errors.New("the driver ends"))
	}
	if c.api == nil {
		api, err := admin.New(admin.Config{Addrs: c.cfg.Addrs, Known: c.known, Creds: c.cfg.Creds})
		if err != nil {
			return nil, err
		}
		c.api = api
	}
	return c.api, nil
}

// known lists the metadata servers known to the session.
func (c *Cluster) known() (addrs []string) {
	c.mu.Lock()
	s := c.sess
	c.mu.Unlock()
	if s != nil {
		for _, m := range s.MetaServers() {
			addrs = append(addrs, m.Addr)
		}
	}
	return addrs
}

// dialWait bounds a connection's beginning.
const dialWait = 10 * time.Second

// session returns the present session, or starts a session. Errors: Unavailable (ctx ended
// before), Canceled (the Cluster is closed), and client.Dial's.
func (c *Cluster) session(ctx context.Context) (*client.Session, error) {
	const op = "connect"
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, meta.E(op, meta.Canceled, "", errors.New("the driver ends"))
	}
	if s := c.sess; s != nil {
		c.mu.Unlock()
		return s, nil
	}
	d := c.dial
	if d == nil {
		d = &dialing{done: make(chan struct{})}
		c.dial = d
		// Not the caller's context: other callers may wait for the same dialing.
		var within context.Context
		within, d.cancel = context.WithTimeout(context.WithoutCancel(ctx), dialWait)
		go c.begin(within, d) // ends within dialWait; Close waits for the end
	}
	c.mu.Unlock()
	select {
	case <-d.done:
		return d.sess, d.err
	case <-ctx.Done():
		return nil, meta.E(op, meta.Unavailable, strings.Join(c.cfg.Addrs, ", "), fmt.Errorf("no answer yet: %w", context.Cause(ctx)))
	}
}

// begin connects.
func (c *Cluster) begin(ctx context.Context, d *dialing) {
	defer d.cancel()
	role := wire.RoleClient
	if c.cfg.Admin {
		role = wire.RoleAdmin
	}
	s, err := client.Dial(ctx, client.Config{Addrs: c.cfg.Addrs, Creds: c.cfg.Creds, Role: role, Name: c.cfg.Name, Handler: cacheless{}, Logger: c.cfg.Logger})
	if err != nil {
		err = fmt.Errorf("no answer from %s: %w", strings.Join(c.cfg.Addrs, ", "), err)
	}
	c.mu.Lock()
	d.sess, d.err = s, err
	c.sess, c.dial = s, nil
	c.mu.Unlock()
	close(d.done)
}

// cacheless answers recalls at once: nothing is cached here.
type cacheless struct{}

func (cacheless) Granted(meta.VolumeID, meta.Grant) {}
func (cacheless) Recall(_ meta.Recall, done func()) { done() }
func (cacheless) Expired([]meta.VolumeID, error)    {}

// with runs work in a session. with closes an expired session, so that the next call starts a
// session.
func (c *Cluster) with(ctx context.Context, work func(*client.Session) error) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	err = work(s)
	if errors.Is(err, meta.SessionExpired) || errors.Is(err, meta.Canceled) && ctx.Err() == nil {
		c.mu.Lock()
		if c.sess == s {
			c.sess = nil
		}
		c.mu.Unlock()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = s.Close(end) // the session has ended; Close only releases its resources
	}
	return err
}

// Close ends the session, for good.
func (c *Cluster) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closed = true
	d := c.dial
	c.mu.Unlock()
	if d != nil {
		d.cancel()
		<-d.done
	}
	c.mu.Lock()
	s, api := c.sess, c.api
	c.sess, c.api = nil, nil
	c.mu.Unlock()
	var err error
	if api != nil {
		err = api.Close()
	}
	if s != nil {
		err = errors.Join(err, s.Close(ctx))
	}
	return err
}

// ID is the cluster's.
func (c *Cluster) ID(ctx context.Context) (id string, err error) {
	err = c.with(ctx, func(s *client.Session) error { id = s.Cluster(); return nil })
	return id, err
}

// Ready returns an error unless the cluster answers.
func (c *Cluster) Ready(ctx context.Context) error {
	return c.with(ctx, func(s *client.Session) error {
		_, err := s.LookUpVolume(ctx, meta.RootVolume, "")
		if errors.Is(err, meta.AccessDenied) || errors.Is(err, meta.NotPermitted) || errors.Is(err, meta.NoSuchVolume) {
			return nil // the cluster answers; the root volume is not granted
		}
		return err
	})
}

func volumeOf(v meta.VolumeInfo) (Volume, error) {
	terms := policy.Terms{Policy: v.Policy, TrashSeconds: v.TrashSeconds, AdvisoryBytes: v.AdvisoryBytes, AdvisoryInodes: v.AdvisoryInodes}
	x := Volume{ID: v.ID, Name: v.Name, Path: v.Path, Terms: terms, Deleting: !v.State.Usable(), Trashed: v.State == meta.VolumeInTrash}
	if o := v.Origin; o != nil && !o.Implied {
		x.Origin = Origin{Volume: o.Volume, Snapshot: o.Snapshot}
	}
	var err error
	x.Compression, err = meta.ParseCompression(v.Compression)
	return x, err
}

// Volume finds a volume by its number. Errors: NoSuchVolume.
func (c *Cluster) Volume(ctx context.Context, id meta.VolumeID) (Volume, error) {
	return c.one(func(api *admin.Client) (meta.VolumeInfo, error) { return api.FindVolume(ctx, admin.Numbered(id)) })
}

// VolumeByName finds a volume by its name. Errors: NoSuchVolume.
func (c *Cluster) VolumeByName(ctx context.Context, name string) (Volume, error) {
	return c.one(func(api *admin.Client) (meta.VolumeInfo, error) { return api.FindVolume(ctx, admin.Named(name)) })
}

// Volumes lists all volumes by number, including volumes being deleted.
func (c *Cluster) Volumes(ctx context.Context) (all []Volume, err error) {
	api, err := c.administration()
	if err != nil {
		return nil, err
	}
	for v, err := range api.EachVolume(ctx, &admin.ListVolumesRequest{}) {
		if err != nil {
			return nil, err
		}
		x, err := volumeOf(v)
		if err != nil {
			return nil, err
		}
		all = append(all, x)
	}
	return all, nil
}

// one makes a call that is answered with a volume.
func (c *Cluster) one(call func(*admin.Client) (meta.VolumeInfo, error)) (Volume, error) {
	api, err := c.administration()
	if err != nil {
		return Volume{}, err
	}
	v, err := call(api)
	if err != nil {
		return Volume{}, err
	}
	return volumeOf(v)
}

// Create makes a volume. Errors: VolumeExists, Invalid, ResourceExceeded,
// NotSupported (the cluster knows no compression).
func (c *Cluster) Create(ctx context.Context, name string, t policy.Terms) (Volume, error) {
	return c.one(func(api *admin.Client) (meta.VolumeInfo, error) {
		return api.CreateVolume(ctx, name, t.Policy, words(t))
	})
}

// Set changes the terms of a volume in which to differs from from, the terms last seen.
// Concurrent changes of other terms stay. Errors: NoSuchVolume, Invalid, NotSupported.
func (c *Cluster) Set(ctx context.Context, id meta.VolumeID, from, to policy.Terms) (Volume, error) {
	return c.one(func(api *admin.Client) (meta.VolumeInfo, error) {
		return api.SetVolume(ctx, id, to.Policy, changed(from, to))
	})
}

// changed returns the words of the terms in which to differs from from.
func changed(from, to policy.Terms) meta.VolumeWords {
	w := words(to)
	w.Only = to.Policy.Differs(&from.Policy)
	if to.Compression == from.Compression {
		w.Compression = nil
	}
	if to.TrashSeconds == from.TrashSeconds {
		w.TrashSeconds = nil
	}
	if to.AdvisoryBytes == from.AdvisoryBytes {
		w.AdvisoryBytes = nil
	}
	if to.AdvisoryInodes == from.AdvisoryInodes {
		w.AdvisoryInodes = nil
	}
	return w
}

func words(t policy.Terms) meta.VolumeWords {
	name := t.Compression.String()
	return meta.VolumeWords{Compression: &name, TrashSeconds: &t.TrashSeconds, AdvisoryBytes: &t.AdvisoryBytes, AdvisoryInodes: &t.AdvisoryInodes}
}

// Delete deletes an unattached volume with everything in it; a volume with a trash time goes
// into the trash. Delete continues the work of an earlier, interrupted call. Errors:
// NoSuchVolume, Busy (the volume is attached), NotEmpty (another volume is attached in it).
func (c *Cluster) Delete(ctx context.Context, id meta.VolumeID) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	return api.DeleteVolume(ctx, id, false)
}

// Nodes lists the machines with chunk servers, including machines that don't answer now, but
// not removed machines.
func (c *Cluster) Nodes(ctx context.Context) (sites []policy.Site, err error) {
	api, err := c.administration()
	if err != nil {
		return nil, err
	}
	answer, err := api.Nodes.ListNodes(ctx, &admin.ListNodesRequest{})
	if err != nil {
		return nil, err
	}
	for _, n := range answer.Nodes {
		if n.State == admin.NodeState_NODE_REMOVED {
			continue
		}
		site := policy.Site{Topology: n.Topology, Away: !n.Live || n.State != admin.NodeState_NODE_ACTIVE}
		for _, d := range n.Disks {
			switch {
			case d.State == admin.DiskState_DISK_OK && !site.Away:
				site.Disks = append(site.Disks, policy.Disk{Class: d.Class, Free: d.FreeBytes})
			case d.State == admin.DiskState_DISK_FAILING, d.State == admin.DiskState_DISK_FAILED, d.State == admin.DiskState_DISK_REMOVED:
			default: // full, or of a machine of which only the record is known
				site.Disks = append(site.Disks, policy.Disk{Class: d.Class})
			}
		}
		sites = append(sites, site)
	}
	return sites, nil
}

// Here waits for the list of chunk servers for hearTries * hearPoll, two seconds.
const (
	hearTries = 100
	hearPoll  = 20 * time.Millisecond
)

// Here returns the place of the chunk server on this machine; "" without such a chunk server.
func (c *Cluster) Here(ctx context.Context) (at string, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		// The metadata servers send a session the list of chunk servers shortly after its
		// start.
		for range hearTries {
			all := s.Servers()
			for _, i := range all {
				if i.Host != "" && i.Host == process.Boot() && i.Topology != "" {
					at = i.Topology
					return nil
				}
			}
			if len(all) > 0 {
				return nil
			}
			select {
			case <-ctx.Done():
				return meta.E("list chunk servers", meta.Unavailable, "", context.Cause(ctx))
			case <-time.After(hearPoll):
			}
		}
		return nil
	})
	return at, err
}

// Snapshots lists a volume's snapshots, oldest first. Errors: NoSuchVolume.
func (c *Cluster) Snapshots(ctx context.Context, v meta.VolumeID) (all []Snapshot, err error) {
	api, err := c.administration()
	if err != nil {
		return nil, err
	}
	answer, err := api.Snapshots.ListSnapshots(ctx, &admin.ListSnapshotsRequest{Volume: admin.Numbered(v)})
	for _, x := range answer.GetSnapshots() {
		all = append(all, snapshotOf(x))
	}
	return all, err
}

func snapshotOf(x *admin.Snapshot) Snapshot {
	return Snapshot{
		Name: x.Name, At: meta.Generation(x.Generation), Created: x.Created.AsTime(), Bytes: x.Bytes,
		Ready: x.State == admin.SnapshotState_SNAPSHOT_READY, Group: x.Group,
	}
}

// TakeSnapshot takes a snapshot of a volume's present state. Errors: Exists, NoSuchVolume,
// ResourceExceeded, Unavailable.
func (c *Cluster) TakeSnapshot(ctx context.Context, v meta.VolumeID, name string) (Snapshot, error) {
	api, err := c.administration()
	if err != nil {
		return Snapshot{}, err
	}
	x, err := api.Snapshots.CreateSnapshot(ctx, &admin.CreateSnapshotRequest{Volume: admin.Numbered(v), Name: name})
	if err != nil {
		return Snapshot{}, err
	}
	return snapshotOf(x), nil
}

// Unpin releases a holder's pin on a snapshot. Without such a pin or snapshot, Unpin succeeds.
// Errors: NoSuchVolume, AccessDenied.
func (c *Cluster) Unpin(ctx context.Context, v meta.VolumeID, snapshot, holder string) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	_, err = api.Snapshots.UnpinSnapshot(ctx, &admin.UnpinSnapshotRequest{Volume: admin.Numbered(v), Snapshot: snapshot, Holder: holder})
	if errors.Is(err, meta.NoSuchSnapshot) {
		return nil
	}
	return err
}

// DeleteSnapshot deletes a snapshot. If clones need the snapshot, the cluster deletes it with
// the last clone; until then the snapshot is not Ready. Errors: NoSuchSnapshot, Busy.
func (c *Cluster) DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	_, err = api.DeleteSnapshot(ctx, admin.Numbered(v), name, true)
	return err
}

// Attach attaches a volume to the tree at path at, and makes missing parent directories.
// Errors: Exists (the name is taken, or the volume is attached elsewhere), NotDir.
func (c *Cluster) Attach(ctx context.Context, id meta.VolumeID, at string) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	return c.with(ctx, func(s *client.Session) error {
		_, err := api.AttachVolume(ctx, s, id, at, true)
		return err
	})
}

// Detach takes a volume out of the tree. Errors: NotAttached, NoSuchVolume.
func (c *Cluster) Detach(ctx context.Context, id meta.VolumeID) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	return api.DetachVolume(ctx, id)
}

// Tidy removes a directory in which a volume was attached if the directory is empty. A
// directory in the tree's root stays.
func (c *Cluster) Tidy(ctx context.Context, dir string) error {
	if path.Dir(dir) == "/" || dir == "/" {
		return nil
	}
	err := c.with(ctx, func(s *client.Session) error {
		v, parent, err := s.Walk(ctx, path.Dir(dir), false)
		if err != nil {
			return err
		}
		_, err = s.Do(ctx, v, s.NextOp(), &meta.Unlink{Parent: parent, Name: path.Base(dir), Dir: true}, meta.LeaseNone)
		return err
	})
	if errors.Is(err, meta.NotFound) || errors.Is(err, meta.NotEmpty) || errors.Is(err, meta.NotDir) || errors.Is(err, meta.Busy) {
		return nil
	}
	return err
}
