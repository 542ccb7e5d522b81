package server

import (
	"cmp"
	"context"
	"errors"
	"strconv"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
)

// volumesAPI is the service penstock.admin.v1.Volumes.
type volumesAPI struct {
	admin.UnimplementedVolumesServer
	s *Server
}

// owner returns the owner of the volume that a request names. Errors: NoSuchVolume, NotOwner.
func (a volumesAPI) owner(ctx context.Context, ref *admin.VolumeRef) (*owner, error) {
	v, err := a.s.catalogue.named(ctx, ref)
	if err != nil {
		return nil, err
	}
	return a.s.hosted.ownerFor(ctx, v.ID)
}

// maxListed bounds the volumes opened for a list.
const maxListed = 256

// volumesPage bounds the volumes in an answer.
const volumesPage = 1000

func (a volumesAPI) ListVolumes(ctx context.Context, q *admin.ListVolumesRequest) (*admin.ListVolumesResponse, error) {
	after := uint64(0)
	if q.PageToken != "" {
		var err error
		if after, err = strconv.ParseUint(q.PageToken, 10, 32); err != nil {
			return nil, meta.E("list volumes", meta.Invalid, q.PageToken, errors.New("it is no page token of a list of volumes"))
		}
	}
	if err := a.s.here(q.Server); err != nil {
		return nil, err
	}
	all, err := a.s.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return nil, err
	}
	if q.Server == "" && len(all) <= maxListed {
		// Closed volumes report no usage.
		if _, err := a.s.hosted.openHome(ctx, cluster.VolumeActive); err != nil {
			a.s.log.Info("not every volume could be opened to be listed", "error", err)
		}
	}
	var page []cluster.Volume
	more := false
	for _, v := range all {
		if uint64(v.ID) <= after || v.State == cluster.VolumeCreating || q.Server != "" && a.s.hosted.opened(v.ID) == nil {
			continue
		}
		if more = len(page) == volumesPage; more {
			break
		}
		page = append(page, v)
	}
	var infos []meta.VolumeInfo
	if q.Server == "" {
		if infos, err = a.s.catalogue.describeIn(ctx, newPaths(&a.s.junctions, all), page); err != nil {
			return nil, err
		}
		a.s.catalogue.usageElsewhere(ctx, infos)
	} else {
		for _, v := range page {
			infos = append(infos, a.s.catalogue.volumeInfo(v))
		}
	}
	answer := &admin.ListVolumesResponse{}
	for _, i := range infos {
		answer.Volumes = append(answer.Volumes, admin.VolumeOf(i))
	}
	fits := pageOf(answer.Volumes, func(v **admin.Volume) int { return proto.Size(*v) })
	if more = more || len(fits) < len(answer.Volumes); more {
		answer.NextPageToken = strconv.FormatUint(uint64(fits[len(fits)-1].Id), 10)
	}
	answer.Volumes = fits
	return answer, nil
}

func (a volumesAPI) GetVolume(ctx context.Context, q *admin.GetVolumeRequest) (*admin.Volume, error) {
	v, err := a.s.catalogue.named(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	// A request by name asks for all of an active volume, often before using the volume: the
	// owner answers. Requests by number are frequent: any server answers.
	if q.Volume.GetName() != "" && v.State == cluster.VolumeActive {
		if _, err := a.s.hosted.ownerFor(ctx, v.ID); err != nil {
			return nil, err
		}
	}
	all := []cluster.Volume{v}
	infos, err := a.s.catalogue.describeIn(ctx, newPaths(&a.s.junctions, all), all)
	if err != nil {
		return nil, err
	}
	return admin.VolumeOf(infos[0]), nil
}

func (a volumesAPI) CreateVolume(ctx context.Context, q *admin.CreateVolumeRequest) (*admin.Volume, error) {
	p, w, err := q.Settings.Words()
	if err != nil {
		return nil, err
	}
	v, err := a.s.catalogue.createVolume(ctx, q.Name, p, &w, q.RequestId)
	return a.described(ctx, v, err)
}

func (a volumesAPI) SetVolume(ctx context.Context, q *admin.SetVolumeRequest) (*admin.Volume, error) {
	p, w, err := q.Settings.Words()
	if err != nil {
		return nil, err
	}
	v, err := a.s.catalogue.named(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	i, err := a.s.catalogue.setVolume(ctx, v, p, &w)
	if err != nil {
		return nil, err
	}
	return admin.VolumeOf(i), nil
}

func (a volumesAPI) DeleteVolume(ctx context.Context, q *admin.DeleteVolumeRequest) (*admin.DeleteVolumeResponse, error) {
	v, err := a.numbered(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	return &admin.DeleteVolumeResponse{}, a.s.trash.deleteVolume(ctx, v, deletion{token: q.RequestId, now: q.Now, name: q.Name})
}

func (a volumesAPI) UndeleteVolume(ctx context.Context, q *admin.UndeleteVolumeRequest) (*admin.Volume, error) {
	v, err := a.s.trash.undeleteVolume(ctx, meta.VolumeID(q.Volume.GetId()), q.Volume.GetName(), q.Name, q.RequestId)
	return a.described(ctx, v, err)
}

func (a volumesAPI) RenameVolume(ctx context.Context, q *admin.RenameVolumeRequest) (*admin.Volume, error) {
	v, err := a.numbered(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	v, err = a.s.catalogue.renameVolume(ctx, v, q.Name, q.RequestId)
	return a.described(ctx, v, err)
}

func (a volumesAPI) AttachVolume(ctx context.Context, q *admin.AttachVolumeRequest) (*admin.Volume, error) {
	v, err := a.numbered(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	parent, err := a.s.catalogue.named(ctx, q.Parent)
	if err != nil {
		return nil, err
	}
	at := cluster.Attach{Parent: parent.ID, Ino: meta.Ino(q.Directory), Name: string(q.Name), Step: cluster.Attaching}
	v, err = a.s.junctions.attachVolume(ctx, v, at, q.RequestId)
	return a.described(ctx, v, err)
}

func (a volumesAPI) DetachVolume(ctx context.Context, q *admin.DetachVolumeRequest) (*admin.Volume, error) {
	v, err := a.numbered(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	v, err = a.s.junctions.detachVolume(ctx, v, q.RequestId)
	return a.described(ctx, v, err)
}

// described describes a volume that was changed, unless err is an error.
func (a volumesAPI) described(ctx context.Context, v cluster.Volume, err error) (*admin.Volume, error) {
	if err != nil {
		return nil, err
	}
	return admin.VolumeOf(a.s.catalogue.described(ctx, v)), nil
}

// numbered returns the volume that a request names by number. A request that is done once can't
// name a volume by its name: when the request comes again, another volume may have the name.
// Errors: NoSuchVolume, Invalid.
func (a volumesAPI) numbered(ctx context.Context, ref *admin.VolumeRef) (cluster.Volume, error) {
	if name := ref.GetName(); name != "" {
		return cluster.Volume{}, meta.E("find volume", meta.Invalid, name, errors.New("the request is done once, so it needs the number of the volume, not the name"))
	}
	return a.s.catalogue.named(ctx, ref)
}

func (a volumesAPI) CheckVolume(ctx context.Context, q *admin.CheckVolumeRequest) (*admin.VolumeCheck, error) {
	v, err := a.s.catalogue.named(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	report, err := a.s.checker.Fsck(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	answer := &admin.VolumeCheck{}
	admin.Say(answer, report)
	return answer, nil
}

func (a volumesAPI) CheckpointVolume(ctx context.Context, q *admin.CheckpointVolumeRequest) (*admin.CheckpointVolumeResponse, error) {
	o, err := a.owner(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	return &admin.CheckpointVolumeResponse{}, o.checkpoints.checkpointNow(ctx)
}

func (a volumesAPI) ListLostChunks(ctx context.Context, q *admin.ListLostChunksRequest) (*admin.ListLostChunksResponse, error) {
	o, err := a.owner(ctx, q.Volume)
	if err == nil {
		err = o.await(ctx, o.recovered)
	}
	if err != nil {
		return nil, err
	}
	page, err := o.losses.lostChunks(ctx, q.PageToken)
	if err != nil {
		return nil, err
	}
	return &admin.ListLostChunksResponse{Chunks: sayLost(page.chunks), NextPageToken: page.after, MoreChunks: page.more}, nil
}

func (a volumesAPI) AcceptLoss(ctx context.Context, q *admin.AcceptLossRequest) (*admin.AcceptLossResponse, error) {
	o, err := a.owner(ctx, q.Volume)
	if err == nil {
		err = o.await(ctx, o.recovered)
	}
	if err != nil {
		return nil, err
	}
	caller := callerOf(ctx).who
	accepted, err := o.losses.acceptLoss(ctx, q.Chunks, q.Damaged, cmp.Or(passer(ctx, caller), caller.String()))
	if err != nil {
		return nil, err
	}
	return &admin.AcceptLossResponse{Chunks: sayLost(accepted.chunks)}, nil
}

// sayLost translates lost chunks.
func sayLost(all []LostChunk) (said []*admin.LostChunk) {
	for _, c := range all {
		one := &admin.LostChunk{}
		admin.Say(one, c)
		said = append(said, one)
	}
	return said
}
