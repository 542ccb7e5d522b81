package server

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// enrolmentAPI is the service penstock.admin.v1.Enrolment. Each method is about the process that
// is at the other end of the connection.
type enrolmentAPI struct {
	admin.UnimplementedEnrolmentServer
	s *Server
}

func (a enrolmentAPI) EnrolChunkServer(ctx context.Context, q *admin.EnrolChunkServerRequest) (*admin.EnrolChunkServerResponse, error) {
	c, id := a.s.cfg.Cluster, meta.ServerID(q.Server)
	if id == 0 {
		var err error
		if id, err = c.NewServerID(ctx); err != nil {
			return nil, err
		}
	}
	if err := a.s.chunkServers.bind(ctx, callerOf(ctx).who, id); err != nil {
		return nil, err
	}
	return &admin.EnrolChunkServerResponse{Cluster: c.ID(), Server: uint64(id)}, nil
}

func (a enrolmentAPI) RenewCertificate(ctx context.Context, q *admin.RenewCertificateRequest) (*admin.RenewCertificateResponse, error) {
	chain, err := a.s.enrolment.renew(ctx, callerOf(ctx).who, q.Request)
	return &admin.RenewCertificateResponse{Chain: chain}, err
}
