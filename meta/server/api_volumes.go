package server

import (
	"cmp"
	"context"

	"penstock.io/penstock/meta/admin"
)

// volumesAPI is the service penstock.admin.v1.Volumes.
type volumesAPI struct {
	admin.UnimplementedVolumesServer
	s *Server
}

// owner returns the owner of the volume that a request names. Errors: NoSuchVolume, NotOwner.
func (a volumesAPI) owner(ctx context.Context, ref *admin.VolumeRef) (*owner, error) {
	v, err := a.s.named(ctx, ref)
	if err != nil {
		return nil, err
	}
	return a.s.ownerFor(ctx, v.ID)
}

func (a volumesAPI) CheckVolume(ctx context.Context, q *admin.CheckVolumeRequest) (*admin.VolumeCheck, error) {
	v, err := a.s.named(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	report, err := a.s.Fsck(ctx, v.ID)
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
	return &admin.CheckpointVolumeResponse{}, o.checkpointNow(ctx)
}

func (a volumesAPI) ListLostChunks(ctx context.Context, q *admin.ListLostChunksRequest) (*admin.ListLostChunksResponse, error) {
	o, err := a.owner(ctx, q.Volume)
	if err == nil {
		err = o.await(ctx, o.recovered)
	}
	if err != nil {
		return nil, err
	}
	page, err := o.lostChunks(ctx, q.PageToken)
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
	accepted, err := o.acceptLoss(ctx, q.Chunks, q.Damaged, cmp.Or(passer(ctx, caller), caller.String()))
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
