package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// CreateVolume makes a volume, or finds the volume made by an earlier call:
//
//	draft (of its content) -> class's terms -> attached -> named
//
// The call checks before each step whether the step is done. Until a volume is complete it has
// a draft's name, by which a later call continues the work. The orchestrator does not know of
// a draft. So after a final error the call deletes the draft: the orchestrator sends no
// DeleteVolume after such an error, and an unknown volume would stay. The plain way, to tell a
// call's progress from the volume's policy, fails if the policy of the clone's source was
// changed meanwhile.
func (s *Server) CreateVolume(ctx context.Context, q *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if q.GetName() == "" {
		return nil, status.Error(codes.InvalidArgument, "no name")
	}
	if len(q.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "no volume capabilities")
	}
	if err := reply.Capabilities(q.GetVolumeCapabilities()); err != nil {
		return nil, err
	}
	class, err := policy.ReadClass(q.GetParameters(), q.GetMutableParameters(), q.GetName())
	if err != nil {
		return nil, reply.Error(err)
	}
	from, err := s.contentOf(ctx, q.GetVolumeContentSource())
	if err != nil {
		return nil, reply.Error(err)
	}
	required, limit := q.GetCapacityRange().GetRequiredBytes(), q.GetCapacityRange().GetLimitBytes()
	if class.Policy.QuotaBytes, err = policy.Size(required, limit); err != nil {
		return nil, reply.Error(err)
	}
	if from != nil && from.snapshot != "" && !slices.ContainsFunc(q.GetVolumeCapabilities(), func(c *csi.VolumeCapability) bool { return !reply.ReadOnly(c) }) {
		// The volume has no writer: it stays equal to the snapshot, and nodes mount the
		// snapshot.
		class.Policy.Immutable = true
	}
	if from != nil && class.Policy.QuotaBytes > 0 && class.Policy.QuotaBytes < from.bytes {
		return nil, status.Errorf(codes.OutOfRange, "what it is made of has %d bytes, more than the %d that are asked for", from.bytes, class.Policy.QuotaBytes)
	}
	name := handle.NameOf(class.Prefix, q.GetName())
	end, err := s.pending.Begin(name)
	if err != nil {
		return nil, err
	}
	defer end()

	v, err := s.Cluster.VolumeByName(ctx, name)
	switch {
	case errors.Is(err, meta.NoSuchVolume):
		if v, err = s.makeVolume(ctx, name, class, from, q.GetAccessibilityRequirements()); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, reply.Error(err)
	case v.Deleting:
		return nil, status.Errorf(codes.Aborted, "a volume of the name %q is being made or deleted", q.GetName())
	default:
		same, err := s.isOf(ctx, v, from)
		if err != nil {
			return nil, reply.Error(err)
		}
		if !same || !sameVolume(v, class, required, limit) {
			return nil, status.Errorf(codes.AlreadyExists, "volume %q exists with other contents or parameters, or of another size", q.GetName())
		}
		// An earlier driver without drafts made the volume, or an operator detached the
		// volume.
		if class.AttachPath != "" && v.Path == "" {
			if v.Path, err = s.attach(ctx, v, class.AttachPath); err != nil {
				return nil, unfinished(err)
			}
		}
	}
	out, err := s.describe(ctx, v)
	if err != nil {
		return nil, reply.Error(err)
	}
	out.ContentSource = q.GetVolumeContentSource()
	return &csi.CreateVolumeResponse{Volume: out}, nil
}

// sameVolume reports whether a volume satisfies a repeated call. The volume's topology was
// chosen by the first call, within the class's topology.
func sameVolume(v cluster.Volume, c policy.Class, required, limit int64) bool {
	want := c.Terms
	if c.Level != policy.Anywhere && policy.Under(v.Policy.Topology, want.Policy.Topology) {
		want.Policy.Topology = v.Policy.Topology
	}
	return policy.Same(v.Terms, want) && policy.Fits(v.Policy.QuotaBytes, required, limit)
}

// makeVolume makes a volume, or continues its draft. Errors: statuses; after a final error no
// draft is left.
func (s *Server) makeVolume(ctx context.Context, name string, class policy.Class, from *content, want *csi.TopologyRequirement) (v cluster.Volume, err error) {
	draft := handle.DraftOf(name)
	v, err = s.Cluster.VolumeByName(ctx, draft)
	switch {
	case err == nil && v.Deleting:
		return v, status.Errorf(codes.Aborted, "what an earlier call began of volume %q is being deleted", name)
	case err == nil:
		same, err := s.isOf(ctx, v, from)
		if err == nil && !same {
			err = s.discard(ctx, draft)
			v = cluster.Volume{}
		}
		if err != nil {
			return v, unfinished(err)
		}
	case !errors.Is(err, meta.NoSuchVolume):
		return v, reply.Error(err)
	}
	if v, err = s.bring(ctx, v, name, class, from, want); err == nil {
		return v, nil
	}
	told := reply.Error(err)
	if goesOn(told) {
		return v, told
	}
	if left := s.discard(ctx, draft); left != nil {
		s.Logger.Warn("a half-made volume could not be deleted: a later call deletes it", "volume", draft, "err", left)
		return v, unfinished(err)
	}
	return v, told
}

// bring completes a draft; v is zero if no draft exists yet.
func (s *Server) bring(ctx context.Context, v cluster.Volume, name string, class policy.Class, from *content, want *csi.TopologyRequirement) (cluster.Volume, error) {
	err := s.place(ctx, &class, want)
	if err != nil {
		return v, err
	}
	if v.ID == 0 {
		s.Step("create.make")
		if from != nil {
			v, err = s.clone(ctx, from, handle.DraftOf(name))
		} else {
			v, err = s.Cluster.Create(ctx, handle.DraftOf(name), class.Terms)
		}
		if err != nil {
			return v, err
		}
		s.Step("create.made")
	}
	if v.Terms != class.Terms {
		s.Step("create.set")
		if v, err = s.Cluster.Set(ctx, v.ID, v.Terms, class.Terms); err != nil {
			return v, err
		}
	}
	if class.AttachPath != "" && v.Path == "" {
		if _, err = s.attach(ctx, v, class.AttachPath); err != nil {
			return v, err
		}
	}
	s.Step("create.name")
	if v, err = s.Cluster.Rename(ctx, v.ID, name); err != nil {
		return v, err
	}
	s.Step("create.named")
	// Another controller discarding the draft may have detached the volume.
	if class.AttachPath != "" && v.Path == "" {
		if _, err = s.attach(ctx, v, class.AttachPath); err != nil {
			return v, unfinished(err) // the volume has its name: the next call attaches it
		}
	}
	return v, nil
}

// goesOn reports whether the orchestrator repeats a call after this error, even if no claim
// needs the volume any more. After any other error the orchestrator may forget the call.
func goesOn(err error) bool {
	switch status.Code(err) {
	case codes.OK, codes.Aborted, codes.Canceled, codes.DeadlineExceeded, codes.Unavailable:
		return true
	}
	return false
}

// unfinished returns the status for an error while a draft remains that the orchestrator does
// not know: a status after which the orchestrator calls again.
func unfinished(err error) error {
	if told := reply.Error(err); goesOn(told) {
		return told
	}
	return status.Error(codes.Unavailable, err.Error())
}

// discardWait bounds discard, independent of the call's context. A sidecar stops leading 10 s
// after its last renewal, and the next sidecar leads 5 s later. So discard has ended before
// the next leader's first call, and that holds even if metadata servers don't check the
// draft's name.
const discardWait = 5 * time.Second

// discard detaches and deletes a draft, and removes the draft's empty directory. discard finds
// the draft by name, because the answer to the creation may have been lost. A volume completed
// by another controller meanwhile has another name and stays. Errors: the cluster's; the
// orchestrator must then call again.
func (s *Server) discard(ctx context.Context, draft string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), discardWait)
	defer cancel()
	v, err := s.Cluster.VolumeByName(ctx, draft)
	if errors.Is(err, meta.NoSuchVolume) {
		return nil
	}
	if err != nil {
		return err
	}
	s.Step("discard.detach")
	if err := s.detach(ctx, v); err != nil {
		return err
	}
	s.Step("discard.delete")
	if err = s.Cluster.Discard(ctx, v.ID, draft); errors.Is(err, meta.NoSuchVolume) {
		return nil
	}
	if errors.Is(err, meta.Busy) && v.Path != "" {
		if now, ferr := s.Cluster.Volume(ctx, v.ID); ferr == nil && made(now) && !now.Deleting && now.Path == "" {
			return errors.Join(err, s.Cluster.Attach(ctx, v.ID, v.Path))
		}
	}
	return err
}

// place sets the topology of the class's policy. While the cluster has no known site, every
// policy is accepted unless want asks for a place. Errors: NoSpace, ResourceExceeded (the
// cluster can't meet the class's policy).
func (s *Server) place(ctx context.Context, class *policy.Class, want *csi.TopologyRequirement) error {
	sites, err := s.Cluster.Nodes(ctx)
	if err != nil {
		return err
	}
	if want != nil {
		if err := policy.Place(class, sites, segments(want.GetPreferred()), segments(want.GetRequisite()), class.Policy.QuotaBytes); err != nil {
			return err
		}
	}
	if len(sites) == 0 {
		return nil
	}
	return policy.Meetable(sites, class.Policy)
}

func segments(topologies []*csi.Topology) (all []map[string]string) {
	for _, t := range topologies {
		all = append(all, t.GetSegments())
	}
	return all
}

// describe translates a volume into the interface's message.
func (s *Server) describe(ctx context.Context, v cluster.Volume) (*csi.Volume, error) {
	id, err := s.handleOf(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	out := &csi.Volume{VolumeId: id, CapacityBytes: signed(v.Policy.QuotaBytes), VolumeContext: map[string]string{}}
	if near := policy.Segments(v.Policy.Topology, false); near != nil {
		out.AccessibleTopology = []*csi.Topology{{Segments: near}}
	}
	return out, nil
}

// DeleteVolume detaches a volume from the tree, and deletes the volume with everything in it.
// A volume with snapshots of this driver, or a published volume, is refused.
func (s *Server) DeleteVolume(ctx context.Context, q *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	done := &csi.DeleteVolumeResponse{}
	v, err := s.mine(ctx, q.GetVolumeId())
	if errors.Is(err, meta.NoSuchVolume) {
		return done, nil
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	end, err := s.pending.Begin(v.Name)
	if err != nil {
		return nil, err
	}
	defer end()
	if v.Trashed {
		return done, nil
	}
	if !v.Deleting {
		if err := s.unneeded(ctx, v); err != nil {
			return nil, reply.Error(err)
		}
	}
	s.Step("delete.detach")
	if err := s.detach(ctx, v); err != nil {
		return nil, reply.Error(err)
	}
	s.Step("delete.delete")
	if err := s.Cluster.Delete(ctx, v.ID); err != nil && !errors.Is(err, meta.NoSuchVolume) {
		return nil, reply.Error(err)
	}
	s.index.drop(v.ID)
	s.Step("delete.deleted")
	return done, nil
}

// unneeded refuses to delete a volume that has snapshots of the orchestrator, or is published
// to a node. Errors: Busy, and the cluster's.
func (s *Server) unneeded(ctx context.Context, v cluster.Volume) error {
	id, err := s.handleOf(ctx, v.ID)
	if err != nil {
		return err
	}
	published, err := s.Grants.Published(ctx, id)
	if err != nil {
		return err
	}
	if nodes := published[id]; len(nodes) > 0 {
		return meta.E("delete volume", meta.Busy, v.Name, fmt.Errorf("it is published to %s: it goes when that is over (penstock grant list, penstock grant revoke)", strings.Join(nodes, ", ")))
	}
	all, err := s.Cluster.Snapshots(ctx, v.ID)
	if err != nil && !errors.Is(err, meta.NoSuchVolume) {
		return err
	}
	for _, x := range all {
		if x.Ready && strings.HasPrefix(x.Name, handle.Made) {
			return meta.E("delete volume", meta.Busy, v.Name, errors.New("it has snapshots; delete them first"))
		}
	}
	return nil
}

// ListVolumes lists the volumes made by this driver, by number, so that a token stays valid
// after volumes were made or deleted between two pages.
func (s *Server) ListVolumes(ctx context.Context, q *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	after, err := readToken(q.GetStartingToken(), q.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	all, err := s.Cluster.Volumes(ctx)
	if err != nil {
		return nil, reply.Error(err)
	}
	all = slices.DeleteFunc(all, func(v cluster.Volume) bool { return !made(v) || v.Deleting || uint64(v.ID) <= after })
	slices.SortFunc(all, func(a, b cluster.Volume) int { return int(a.ID) - int(b.ID) })
	r := &csi.ListVolumesResponse{}
	if n := int(q.GetMaxEntries()); n > 0 && len(all) > n {
		all = all[:n]
		r.NextToken = strconv.FormatUint(uint64(all[n-1].ID), 10)
	}
	published, err := s.Grants.Published(ctx, "")
	if err != nil {
		return nil, reply.Error(err)
	}
	for _, v := range all {
		out, err := s.describe(ctx, v)
		if err != nil {
			return nil, reply.Error(err)
		}
		r.Entries = append(r.Entries, &csi.ListVolumesResponse_Entry{Volume: out, Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: published[out.GetVolumeId()]}})
	}
	return r, nil
}

// readToken parses the token of a list's next page. Errors: statuses of Aborted (invalid
// token), as the specification demands, and InvalidArgument.
func readToken(token string, entries int32) (after uint64, err error) {
	if entries < 0 {
		return 0, status.Error(codes.InvalidArgument, "max_entries is negative")
	}
	if token == "" {
		return 0, nil
	}
	if after, err = strconv.ParseUint(token, 10, 64); err != nil {
		return 0, status.Error(codes.Aborted, "starting_token is not one that this driver gave")
	}
	return after, nil
}

// ControllerGetVolume describes a volume made by this driver.
func (s *Server) ControllerGetVolume(ctx context.Context, q *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	v, err := s.mine(ctx, q.GetVolumeId())
	if err == nil && v.Deleting {
		err = meta.E("find volume", meta.NoSuchVolume, v.Name, nil)
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	out, err := s.describe(ctx, v)
	if err != nil {
		return nil, reply.Error(err)
	}
	published, err := s.Grants.Published(ctx, out.GetVolumeId())
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.ControllerGetVolumeResponse{Volume: out, Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: published[out.GetVolumeId()]}}, nil
}

// ControllerExpandVolume raises a volume's quota; mounts see the new quota within seconds.
func (s *Server) ControllerExpandVolume(ctx context.Context, q *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if q.GetVolumeId() != "" && q.GetCapacityRange() == nil {
		return nil, status.Error(codes.InvalidArgument, "no capacity range")
	}
	required, limit := q.GetCapacityRange().GetRequiredBytes(), q.GetCapacityRange().GetLimitBytes()
	v, err := s.change(ctx, q.GetVolumeId(), "expand", func(t *policy.Terms) error {
		p := &t.Policy
		size, err := policy.Size(required, limit)
		if err != nil {
			return err
		}
		switch {
		case p.QuotaBytes == 0 || p.QuotaBytes >= size && (limit == 0 || p.QuotaBytes <= uint64(limit)): // large enough
		case p.QuotaBytes > size:
			return meta.E("expand volume", meta.Range, strconv.FormatUint(p.QuotaBytes, 10), errors.New("the volume is larger than the limit: volumes don't shrink"))
		default:
			p.QuotaBytes = size
		}
		return nil
	})
	if err != nil {
		return nil, reply.Error(err)
	}
	size := v.Policy.QuotaBytes
	if size == 0 { // without a quota every requested size fits
		size = uint64(required)
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: signed(size)}, nil
}

// ControllerModifyVolume applies the parameters of a volume attributes class to a volume's
// terms. New bytes follow the new terms at once; repair converts older bytes.
func (s *Server) ControllerModifyVolume(ctx context.Context, q *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	_, err := s.change(ctx, q.GetVolumeId(), "modify", func(t *policy.Terms) error { return policy.Change(t, q.GetMutableParameters()) })
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.ControllerModifyVolumeResponse{}, nil
}

// change changes a volume's terms.
func (s *Server) change(ctx context.Context, id, step string, change func(*policy.Terms) error) (cluster.Volume, error) {
	v, err := s.mine(ctx, id)
	if err != nil {
		return v, err
	}
	end, err := s.pending.Begin(v.Name)
	if err != nil {
		return v, err
	}
	defer end()
	if v, err = s.Cluster.Volume(ctx, v.ID); err != nil { // read again under the claim
		return v, err
	}
	if v.Deleting {
		return v, meta.E("find volume", meta.NoSuchVolume, v.Name, nil)
	}
	t := v.Terms
	if err := change(&t); err != nil || t == v.Terms {
		return v, err
	}
	s.Step(step + ".set")
	v, err = s.Cluster.Set(ctx, v.ID, v.Terms, t)
	if err == nil {
		s.Step(step + ".done")
	}
	return v, err
}
