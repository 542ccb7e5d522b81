// Package cluster speaks to a Penstock cluster for the driver: volumes, where
// they hang in the tree, snapshots, and the machines that store bytes. It is a
// session and words; what is to be done is decided by its callers.
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

// Volume is one of the cluster's.
type Volume struct {
	ID   meta.VolumeID
	Name string
	Path string // in the tree; "": it stands alone
	policy.Terms
	Origin Origin // of a clone
	// Deleting: it is not there for anybody to use, because it is being made or
	// deleted, or in the trash.
	Deleting bool
	Trashed  bool // deleted, and kept for a while in case it was a mistake
}

// Origin is the snapshot that a clone was made of: Volume is zero for what is no
// clone, and for one whose snapshot was taken for it alone.
type Origin struct {
	Volume   meta.VolumeID
	Snapshot string
}

// Snapshot is one of a volume's.
type Snapshot struct {
	Name    string
	At      meta.Generation
	Created time.Time
	Bytes   uint64 // of the volume when it was taken
	Ready   bool   // else it is being deleted, or rolled back to
	Group   uint64 // the id of the group that it belongs to; 0: of none
}

// Config says where the cluster is and who asks.
type Config struct {
	Addrs []string
	Creds *peer.Credentials
	Name  string // for people
	// Admin: as an administrator, who may make and delete volumes; else as a
	// client, who learns of the volumes that it was granted.
	Admin  bool
	Logger *slog.Logger
}

// Cluster is a connection that is made when it is needed, and again when its
// session has ended for good. It is safe for concurrent use.
type Cluster struct {
	cfg Config

	mu     sync.Mutex
	sess   *client.Session
	dial   *dialing      // under way; nil: none is
	api    *admin.Client // nil: nobody has needed it yet
	closed bool
}

// dialing is a session's beginning: one at a time, for all who wait for it, each as
// long as it likes.
type dialing struct {
	done   chan struct{} // closed when there is an outcome:
	sess   *client.Session
	err    error
	cancel context.CancelFunc
}

// New makes one; nothing is connected yet.
func New(cfg Config) *Cluster { return &Cluster{cfg: cfg} }

// administration gives a client of the administrative API. Errors: Canceled (the Cluster is
// closed), Invalid (no address).
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

// known lists the metadata servers that the session was told of.
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

// session gives the one that there is, or a new one. Errors: Unavailable (ctx has
// ended before), Canceled (the Cluster is closed), those of client.Dial.
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
		// Not the caller's: others may wait for it, too.
		var within context.Context
		within, d.cancel = context.WithTimeout(context.WithoutCancel(ctx), dialWait)
		go c.begin(within, d) // ends within dialWait; Close waits for it
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

// with runs work in a session. One that has ended is given up, so that the next
// call begins another.
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
		_ = s.Close(end) // it has ended; only what it still holds goes
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

// Ready tells whether the cluster answers.
func (c *Cluster) Ready(ctx context.Context) error {
	return c.with(ctx, func(s *client.Session) error {
		_, err := s.Admin(ctx, wire.Admin{Op: wire.AdminVolumeByName, Volume: meta.RootVolume})
		if errors.Is(err, meta.AccessDenied) || errors.Is(err, meta.NotPermitted) || errors.Is(err, meta.NoSuchVolume) {
			return nil // it answers; that volume is not ours
		}
		return err
	})
}

func volumeOf(v client.Volume) (Volume, error) {
	terms := policy.Terms{Policy: v.Policy, TrashSeconds: v.Detail.TrashSeconds, AdvisoryBytes: v.Detail.AdvisoryBytes, AdvisoryInodes: v.Detail.AdvisoryInodes}
	x := Volume{ID: v.ID, Name: v.Name, Path: v.Path, Terms: terms, Deleting: v.Deleting, Trashed: v.Detail.State == wire.VolumeInTrash}
	if o := v.Detail.Origin; o != nil && !o.Implied {
		x.Origin = Origin{Volume: o.Volume, Snapshot: o.Snapshot}
	}
	var err error
	x.Compression, err = meta.ParseCompression(v.Detail.Compression)
	return x, err
}

// one runs a request whose answer is a volume.
func (c *Cluster) one(ctx context.Context, ask func(*client.Session) (client.Volume, error)) (v Volume, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		got, err := ask(s)
		if err == nil {
			v, err = volumeOf(got)
		}
		return err
	})
	return v, err
}

// Volume finds a volume by its number. Errors: NoSuchVolume.
func (c *Cluster) Volume(ctx context.Context, id meta.VolumeID) (Volume, error) {
	return c.one(ctx, func(s *client.Session) (client.Volume, error) { return s.VolumeByID(ctx, id) })
}

// VolumeByName finds a volume by its name. Errors: NoSuchVolume.
func (c *Cluster) VolumeByName(ctx context.Context, name string) (Volume, error) {
	return c.one(ctx, func(s *client.Session) (client.Volume, error) { return s.FindVolume(ctx, name) })
}

// Volumes lists all volumes by number, those that are going, too.
func (c *Cluster) Volumes(ctx context.Context) (all []Volume, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		for v, err := range s.Volumes(ctx) {
			if err != nil {
				return err
			}
			x, err := volumeOf(v)
			if err != nil {
				return err
			}
			all = append(all, x)
		}
		return nil
	})
	return all, err
}

// Create makes a volume. Errors: VolumeExists, Invalid, ResourceExceeded,
// NotSupported (the cluster knows no compression).
func (c *Cluster) Create(ctx context.Context, name string, t policy.Terms) (Volume, error) {
	return c.one(ctx, func(s *client.Session) (client.Volume, error) {
		return s.CreateVolume(ctx, name, t.Policy, words(t))
	})
}

// Set changes a volume's terms where those that it is to have differ from those that
// it was seen to have: what others change at the same moment stays. Errors:
// NoSuchVolume, Invalid, NotSupported.
func (c *Cluster) Set(ctx context.Context, id meta.VolumeID, from, to policy.Terms) (Volume, error) {
	return c.one(ctx, func(s *client.Session) (client.Volume, error) {
		return s.SetVolume(ctx, id, to.Policy, changed(from, to))
	})
}

// changed are the words of terms that differ from those of before.
func changed(from, to policy.Terms) wire.VolumeWords {
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

func words(t policy.Terms) wire.VolumeWords {
	name := t.Compression.String()
	return wire.VolumeWords{Compression: &name, TrashSeconds: &t.TrashSeconds, AdvisoryBytes: &t.AdvisoryBytes, AdvisoryInodes: &t.AdvisoryInodes}
}

// Delete deletes a volume that hangs nowhere, with everything in it; one that an
// administrator gave a trash time goes into the trash. It goes on where an
// earlier call ended. Errors: NoSuchVolume, Busy (it is attached), NotEmpty
// (another is attached in it).
func (c *Cluster) Delete(ctx context.Context, id meta.VolumeID) error {
	return c.with(ctx, func(s *client.Session) error { return s.DeleteVolume(ctx, id, false) })
}

// Nodes lists the machines that store bytes, also those that don't answer now, but not
// those that were given up.
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

// How long is listened for chunk servers: two seconds.
const (
	hearTries = 100
	hearPoll  = 20 * time.Millisecond
)

// Here is the place of the chunk server that stands on this machine; "" where
// none does.
func (c *Cluster) Here(ctx context.Context) (at string, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		// A session hears of chunk servers a moment after it began.
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

// TakeSnapshot keeps a volume as it is now. Errors: Exists, NoSuchVolume,
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

// Unpin gives up what a holder has of a snapshot; that there is nothing is no
// error. Errors: NoSuchVolume, AccessDenied.
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

// DeleteSnapshot deletes one; if clones need it, it goes with the last of them, and is
// not Ready until then. Errors: NoSuchSnapshot, Busy.
func (c *Cluster) DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	_, err = api.DeleteSnapshot(ctx, admin.Numbered(v), name, true)
	return err
}

// Attach hangs a volume into the tree and makes the directories on the way to
// it. Errors: Exists (the name is taken, or the volume hangs elsewhere), NotDir.
func (c *Cluster) Attach(ctx context.Context, id meta.VolumeID, at string) error {
	return c.with(ctx, func(s *client.Session) error {
		_, err := s.AttachVolume(ctx, id, at, true)
		return err
	})
}

// Detach takes a volume out of the tree. Errors: NotAttached, NoSuchVolume.
func (c *Cluster) Detach(ctx context.Context, id meta.VolumeID) error {
	return c.with(ctx, func(s *client.Session) error { return s.DetachVolume(ctx, id) })
}

// Tidy removes the directory that a volume hung in if nothing is left in it. One
// that lies in the root of the tree stays.
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
