package server

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
)

// clonesAPI is the service penstock.admin.v1.Clones.
type clonesAPI struct {
	admin.UnimplementedClonesServer
	s *Server
}

// sayClone translates a clone. names are the names of the volumes.
func sayClone(v *cluster.Volume, names map[meta.VolumeID]string) *admin.Clone {
	m, from := &admin.Clone{}, v.Origin
	admin.Say(m, meta.CloneInfo{ID: v.ID, Name: v.Name, Origin: names[from.Volume], Snapshot: from.Snapshot, Implied: from.Implied, Created: goTime(v.Created)})
	return m
}

func (a clonesAPI) ListClones(ctx context.Context, q *admin.ListClonesRequest) (*admin.ListClonesResponse, error) {
	all, err := a.s.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return nil, err
	}
	of := meta.VolumeID(0)
	if q.Volume != nil {
		v, err := a.s.catalogue.named(ctx, q.Volume)
		if err != nil {
			return nil, err
		}
		of = v.ID
	}
	names := map[meta.VolumeID]string{}
	for _, v := range all {
		names[v.ID] = v.Name
	}
	answer := &admin.ListClonesResponse{}
	for _, v := range all {
		if from := v.Origin; from != nil && v.State == cluster.VolumeActive && (of == 0 || from.Volume == of) {
			answer.Clones = append(answer.Clones, sayClone(&v, names))
		}
	}
	return answer, nil
}

func (a clonesAPI) CreateClone(ctx context.Context, q *admin.CreateCloneRequest) (*admin.Clone, error) {
	o, v, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	c, err := o.clones.makeClone(ctx, q.Name, q.Snapshot, q.RequestId)
	if err != nil {
		return nil, err
	}
	return sayClone(&c, map[meta.VolumeID]string{v.ID: v.Name}), nil
}

func (a clonesAPI) PromoteClone(ctx context.Context, q *admin.PromoteCloneRequest) (*admin.Promotion, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	st, err := o.promotion.promote(ctx, q.Rate)
	if err != nil {
		return nil, err
	}
	answer := &admin.Promotion{}
	admin.Say(answer, st)
	return answer, nil
}
