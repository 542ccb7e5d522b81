package penstock

import (
	"context"
	"iter"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/wire"
)

// The library's own calls of the administrative API: for mirrors, groups, pins, digests, indexes
// and health. Programs that administer use package meta/admin.

// administration is a client of the administrative API, made at the first call. Only mounts
// that pin a snapshot, demand a snapshot's digest or use its index need the client.
type administration struct {
	cfg admin.Config

	mu     sync.Mutex
	client *admin.Client
}

// any gives the client of the cluster.
func (a *administration) any() (*admin.Client, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client == nil {
		c, err := admin.New(a.cfg)
		if err != nil {
			return nil, err
		}
		a.client = c
	}
	return a.client, nil
}

// at gives the client of one metadata server.
func (a *administration) at(addr string) (*admin.Client, error) {
	c, err := a.any()
	if err != nil {
		return nil, err
	}
	return c.At(addr)
}

func (a *administration) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.client == nil {
		return nil
	}
	return a.client.Close()
}

// Health asks one metadata server for the problems that the server knows of. Errors:
// AccessDenied, Unavailable.
func (s session) Health(ctx context.Context, addr string) (h meta.ServerHealth, err error) {
	c, err := s.administration.at(addr)
	if err != nil {
		return h, err
	}
	answer, err := c.Health.GetServerHealth(ctx, &admin.GetServerHealthRequest{})
	if err == nil {
		admin.Hear(&h, answer)
	}
	return h, err
}

// Certificates asks one metadata server for the newest certificates of identities.
func (s session) Certificates(ctx context.Context, addr string, identities []string) (all []meta.CertHealth, err error) {
	c, err := s.administration.at(addr)
	if err != nil {
		return nil, err
	}
	answer, err := c.Health.ListCertificates(ctx, &admin.ListCertificatesRequest{Identities: identities})
	for _, x := range answer.GetCertificates() {
		var one meta.CertHealth
		admin.Hear(&one, x)
		all = append(all, one)
	}
	return all, err
}

// Servers lists the metadata servers that live or, if none answers, the servers that the session
// was told of.
func (s session) Servers(ctx context.Context) []wire.MetaServer {
	all, err := called(s, func(c *admin.Client) (*admin.ListServersResponse, error) {
		return c.Health.ListServers(ctx, &admin.ListServersRequest{})
	}, func(l *admin.ListServersResponse) (all []wire.MetaServer) {
		for _, m := range l.Servers {
			all = append(all, wire.MetaServer{Name: m.Name, Addr: m.Address})
		}
		return all
	})
	if err != nil {
		return s.MetaServers()
	}
	return all
}

// called makes a call of the administrative API and gives its answer in the words of package meta.
func called[A, W any](s session, call func(*admin.Client) (A, error), in func(A) W) (w W, err error) {
	c, err := s.administration.any()
	if err != nil {
		return w, err
	}
	answer, err := call(c)
	if err != nil {
		return w, err
	}
	return in(answer), nil
}

func (s session) Snapshots(ctx context.Context, v meta.VolumeID) (*meta.SnapshotList, error) {
	return called(s, func(c *admin.Client) (*admin.ListSnapshotsResponse, error) {
		return c.Snapshots.ListSnapshots(ctx, &admin.ListSnapshotsRequest{Volume: admin.Numbered(v)})
	}, (*admin.ListSnapshotsResponse).List)
}

func (s session) TakeSnapshot(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error) {
	return called(s, func(c *admin.Client) (*admin.Snapshot, error) {
		return c.Snapshots.CreateSnapshot(ctx, &admin.CreateSnapshotRequest{Volume: admin.Numbered(v), Name: name})
	}, (*admin.Snapshot).Info)
}

func (s session) DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) (meta.SnapshotInfo, error) {
	return called(s, func(c *admin.Client) (*admin.Snapshot, error) {
		return c.DeleteSnapshot(ctx, admin.Numbered(v), name, false)
	}, (*admin.Snapshot).Info)
}

func (s session) DiffSnapshots(ctx context.Context, v meta.VolumeID, from, to string, exact bool, fn func(meta.Change) error) error {
	c, err := s.administration.any()
	if err != nil {
		return err
	}
	return c.Diff(ctx, &admin.DiffSnapshotsRequest{Volume: admin.Numbered(v), From: from, To: to, Exact: exact}, fn)
}

func (s session) AwaitDigest(ctx context.Context, v meta.VolumeID, name string, unpaced bool) (meta.SnapshotInfo, error) {
	return called(s, func(c *admin.Client) (*admin.Snapshot, error) {
		return c.Snapshots.GetSnapshotDigest(ctx, &admin.GetSnapshotDigestRequest{Volume: admin.Numbered(v), Snapshot: name, Unpaced: unpaced})
	}, (*admin.Snapshot).Info)
}

func (s session) PinSnapshotAt(ctx context.Context, v meta.VolumeID, name string, at meta.Generation, holder string, ttl time.Duration) (meta.PinInfo, error) {
	return called(s, func(c *admin.Client) (*admin.Pin, error) {
		return c.Snapshots.PinSnapshot(ctx, &admin.PinSnapshotRequest{Volume: admin.Numbered(v), Snapshot: name, Generation: uint64(at), Holder: holder, Ttl: durationpb.New(ttl)})
	}, (*admin.Pin).Info)
}

func (s session) UnpinSnapshot(ctx context.Context, v meta.VolumeID, name, holder string) (released bool, err error) {
	return called(s, func(c *admin.Client) (*admin.UnpinSnapshotResponse, error) {
		return c.Snapshots.UnpinSnapshot(ctx, &admin.UnpinSnapshotRequest{Volume: admin.Numbered(v), Snapshot: name, Holder: holder})
	}, (*admin.UnpinSnapshotResponse).GetReleased)
}

func (s session) Volumes(ctx context.Context) iter.Seq2[meta.VolumeInfo, error] {
	c, err := s.administration.any()
	if err != nil {
		return func(yield func(meta.VolumeInfo, error) bool) { yield(meta.VolumeInfo{}, err) }
	}
	return c.EachVolume(ctx, &admin.ListVolumesRequest{})
}

func (s session) FindVolume(ctx context.Context, name string) (meta.VolumeInfo, error) {
	return called(s, func(c *admin.Client) (*admin.Volume, error) {
		return c.Volumes.GetVolume(ctx, &admin.GetVolumeRequest{Volume: admin.Named(name)})
	}, (*admin.Volume).Info)
}

// volume makes a call that is answered with a volume in the words of package meta.
func (s session) volume(call func(*admin.Client) (meta.VolumeInfo, error)) (meta.VolumeInfo, error) {
	return called(s, call, func(i meta.VolumeInfo) meta.VolumeInfo { return i })
}

func (s session) CreateVolume(ctx context.Context, name string, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error) {
	return s.volume(func(c *admin.Client) (meta.VolumeInfo, error) { return c.CreateVolume(ctx, name, p, words) })
}

func (s session) SetVolume(ctx context.Context, id meta.VolumeID, p meta.Policy, words meta.VolumeWords) (meta.VolumeInfo, error) {
	return s.volume(func(c *admin.Client) (meta.VolumeInfo, error) { return c.SetVolume(ctx, id, p, words) })
}

func (s session) AttachVolume(ctx context.Context, id meta.VolumeID, at string, parents bool) (meta.VolumeInfo, error) {
	return s.volume(func(c *admin.Client) (meta.VolumeInfo, error) { return c.AttachVolume(ctx, s, id, at, parents) })
}

func (s session) DetachVolume(ctx context.Context, id meta.VolumeID) error {
	c, err := s.administration.any()
	if err != nil {
		return err
	}
	return c.DetachVolume(ctx, id)
}

func (s session) RenameVolume(ctx context.Context, id meta.VolumeID, name string) (meta.VolumeInfo, error) {
	return s.volume(func(c *admin.Client) (meta.VolumeInfo, error) { return c.RenameVolume(ctx, id, name) })
}

func (s session) DeleteVolume(ctx context.Context, id meta.VolumeID, now bool) error {
	c, err := s.administration.any()
	if err != nil {
		return err
	}
	return c.DeleteVolume(ctx, id, now)
}

func (s session) UndeleteVolume(ctx context.Context, id meta.VolumeID, name, as string) (meta.VolumeInfo, error) {
	return s.volume(func(c *admin.Client) (meta.VolumeInfo, error) { return c.UndeleteVolume(ctx, id, name, as) })
}

func (s session) Clone(ctx context.Context, v meta.VolumeID, snapshot, name string) (meta.CloneInfo, error) {
	return called(s, func(c *admin.Client) (*admin.Clone, error) {
		return c.Clones.CreateClone(ctx, &admin.CreateCloneRequest{Volume: admin.Numbered(v), Snapshot: snapshot, Name: name})
	}, (*admin.Clone).Info)
}

func (s session) Clones(ctx context.Context, v meta.VolumeID) ([]meta.CloneInfo, error) {
	return called(s, func(c *admin.Client) (*admin.ListClonesResponse, error) {
		return c.Clones.ListClones(ctx, &admin.ListClonesRequest{Volume: admin.Numbered(v)})
	}, (*admin.ListClonesResponse).List)
}

func (s session) Promote(ctx context.Context, v meta.VolumeID, rate *uint64) (meta.PromoteStatus, error) {
	return called(s, func(c *admin.Client) (*admin.Promotion, error) {
		return c.Clones.PromoteClone(ctx, &admin.PromoteCloneRequest{Volume: admin.Numbered(v), Rate: rate})
	}, (*admin.Promotion).Status)
}

func (s session) SnapshotIndex(ctx context.Context, v meta.VolumeID, name string) (*admin.SnapshotIndex, error) {
	return called(s, func(c *admin.Client) (*admin.SnapshotIndex, error) {
		return c.Snapshots.GetSnapshotIndex(ctx, &admin.GetSnapshotIndexRequest{Volume: admin.Numbered(v), Snapshot: name})
	}, func(x *admin.SnapshotIndex) *admin.SnapshotIndex { return x })
}

func (s session) Groups(ctx context.Context) ([]meta.Group, error) {
	return called(s, func(c *admin.Client) (*admin.ListGroupsResponse, error) {
		return c.Groups.ListGroups(ctx, &admin.ListGroupsRequest{})
	}, (*admin.ListGroupsResponse).Records)
}

func (s session) Group(ctx context.Context, name string) (meta.Group, error) {
	return called(s, func(c *admin.Client) (*admin.Group, error) {
		return c.Groups.GetGroup(ctx, &admin.GetGroupRequest{Group: &admin.GroupRef{Name: name}})
	}, (*admin.Group).Record)
}

func (s session) TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID, strict bool) (meta.Group, error) {
	return called(s, func(c *admin.Client) (*admin.Group, error) {
		return c.TakeGroup(ctx, name, volumes, strict)
	}, (*admin.Group).Record)
}

func (s session) DeleteGroup(ctx context.Context, name string) error {
	c, err := s.administration.any()
	if err != nil {
		return err
	}
	return c.DeleteGroup(ctx, name)
}

// Mirrors lists the records of mirrors. Errors: AccessDenied, Unavailable.
func (s session) Mirrors(ctx context.Context) ([]meta.Mirror, error) {
	return called(s, func(c *admin.Client) (*admin.ListMirrorsResponse, error) {
		return c.Mirrors.ListMirrors(ctx, &admin.ListMirrorsRequest{})
	}, (*admin.ListMirrorsResponse).Records)
}

func (s session) Mirror(ctx context.Context, target meta.VolumeID) (meta.Mirror, error) {
	return called(s, func(c *admin.Client) (*admin.Mirror, error) {
		return c.Mirrors.GetMirror(ctx, &admin.GetMirrorRequest{Target: admin.Numbered(target)})
	}, (*admin.Mirror).Record)
}

func (s session) PutMirror(ctx context.Context, m meta.Mirror) (meta.Mirror, error) {
	return called(s, func(c *admin.Client) (*admin.Mirror, error) {
		return c.Mirrors.PutMirror(ctx, &admin.PutMirrorRequest{Target: admin.Numbered(m.Target), Mirror: admin.SayMirror(m)})
	}, (*admin.Mirror).Record)
}

func (s session) DropMirror(ctx context.Context, target meta.VolumeID) error {
	c, err := s.administration.any()
	if err == nil {
		_, err = c.Mirrors.DropMirror(ctx, &admin.DropMirrorRequest{Target: admin.Numbered(target)})
	}
	return err
}
