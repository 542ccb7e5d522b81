package server

import (
	"context"
	"errors"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// mirrorsAPI is the service penstock.admin.v1.Mirrors.
type mirrorsAPI struct {
	admin.UnimplementedMirrorsServer
	s *Server
}

func (a mirrorsAPI) ListMirrors(ctx context.Context, _ *admin.ListMirrorsRequest) (*admin.ListMirrorsResponse, error) {
	all, err := a.s.catalogue.mirrors(ctx)
	if err != nil {
		return nil, err
	}
	answer := &admin.ListMirrorsResponse{}
	for _, m := range all {
		answer.Mirrors = append(answer.Mirrors, admin.SayMirror(m))
	}
	return answer, nil
}

func (a mirrorsAPI) GetMirror(ctx context.Context, q *admin.GetMirrorRequest) (*admin.Mirror, error) {
	v, err := a.s.catalogue.named(ctx, q.Target)
	if err != nil {
		return nil, err
	}
	m, err := a.s.cfg.Cluster.Mirror(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	return admin.SayMirror(m), nil
}

func (a mirrorsAPI) PutMirror(ctx context.Context, q *admin.PutMirrorRequest) (*admin.Mirror, error) {
	v, err := a.s.catalogue.named(ctx, q.Target)
	if err != nil {
		return nil, err
	}
	if q.Mirror == nil {
		return nil, meta.E("write mirror", meta.Invalid, v.Name, errors.New("the request has no record"))
	}
	m := q.Mirror.Record()
	m.Target = v.ID
	if m, err = a.s.cfg.Cluster.PutMirror(ctx, m); err != nil {
		return nil, err
	}
	return admin.SayMirror(m), nil
}

func (a mirrorsAPI) DropMirror(ctx context.Context, q *admin.DropMirrorRequest) (*admin.DropMirrorResponse, error) {
	v, err := a.s.catalogue.named(ctx, q.Target)
	if err != nil {
		return nil, err
	}
	return &admin.DropMirrorResponse{}, a.s.cfg.Cluster.DropMirror(ctx, v.ID)
}
