package server

import (
	"context"
	"strconv"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// healthAPI is the service penstock.admin.v1.Health.
type healthAPI struct {
	admin.UnimplementedHealthServer
	s *Server
}

func (a healthAPI) ListServers(context.Context, *admin.ListServersRequest) (*admin.ListServersResponse, error) {
	answer := &admin.ListServersResponse{Cluster: a.s.cfg.Cluster.ID()}
	for _, m := range a.s.peers.metaList().Servers {
		answer.Servers = append(answer.Servers, &admin.MetadataServer{Name: m.Name, Address: m.Addr})
	}
	return answer, nil
}

func (a healthAPI) GetServerHealth(ctx context.Context, q *admin.GetServerHealthRequest) (*admin.ServerHealth, error) {
	if err := a.s.here(q.Server); err != nil {
		return nil, err
	}
	answer := &admin.ServerHealth{}
	admin.Say(answer, a.s.health.Health(ctx))
	return answer, nil
}

func (a healthAPI) ListVolumeHealth(_ context.Context, q *admin.ListVolumeHealthRequest) (*admin.ListVolumeHealthResponse, error) {
	if err := a.s.here(q.Server); err != nil {
		return nil, err
	}
	after, err := parsePageToken("list volumes' health", q.PageToken, 32)
	if err != nil {
		return nil, err
	}
	page, left := a.s.health.VolumesHealth(meta.VolumeID(after))
	answer := &admin.ListVolumeHealthResponse{}
	for _, v := range page {
		one := &admin.VolumeHealth{}
		admin.Say(one, v)
		answer.Volumes = append(answer.Volumes, one)
	}
	if left > 0 {
		answer.NextPageToken = strconv.FormatUint(uint64(page[len(page)-1].ID), 10)
	}
	return answer, nil
}

func (a healthAPI) ListCertificates(_ context.Context, q *admin.ListCertificatesRequest) (*admin.ListCertificatesResponse, error) {
	if err := a.s.here(q.Server); err != nil {
		return nil, err
	}
	answer := &admin.ListCertificatesResponse{}
	for _, c := range a.s.enrolment.certs.of(q.Identities) {
		one := &admin.Certificate{}
		admin.Say(one, c)
		answer.Certificates = append(answer.Certificates, one)
	}
	return answer, nil
}

func (a healthAPI) GetServerStatus(_ context.Context, q *admin.GetServerStatusRequest) (*admin.ServerStatus, error) {
	if err := a.s.here(q.Server); err != nil {
		return nil, err
	}
	answer := &admin.ServerStatus{}
	admin.Say(answer, a.s.Status())
	return answer, nil
}
