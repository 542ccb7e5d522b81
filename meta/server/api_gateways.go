package server

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// gatewaysAPI is the service penstock.admin.v1.Gateways.
type gatewaysAPI struct {
	admin.UnimplementedGatewaysServer
	s *Server
}

// ownName refuses a name that is not the name of the caller's certificate. Administrators, and
// processes of the server's machine, may give any name.
func ownName(ctx context.Context, name string) error {
	who := callerOf(ctx).who
	if who.Anyone() || who.Role != peering.Gateway || who.Name == name {
		return nil
	}
	return meta.E("register gateway", meta.AccessDenied, who.String(), errors.New("the certificate is of another name than "+name))
}

func (a gatewaysAPI) RegisterGateway(ctx context.Context, q *admin.RegisterGatewayRequest) (*admin.RegisterGatewayResponse, error) {
	if err := ownName(ctx, q.Name); err != nil {
		return nil, err
	}
	g, lease, err := a.s.cfg.Gateways.Register(ctx, cluster.Gateway{
		Name: q.Name, Instance: q.Instance, Kafka: q.Kafka, Ingest: q.Ingest, IngestTLS: q.IngestTls, IngestMembers: q.IngestMembers,
	}, q.Lease)
	if err != nil {
		return nil, err
	}
	live, err := a.s.cfg.Gateways.List(ctx, false)
	if err != nil {
		return nil, err
	}
	return &admin.RegisterGatewayResponse{Gateway: sayGateway(g), Lease: lease, Term: durationpb.New(cluster.GatewayTerm), Live: sayGateways(live)}, nil
}

func (a gatewaysAPI) UnregisterGateway(ctx context.Context, q *admin.UnregisterGatewayRequest) (*admin.UnregisterGatewayResponse, error) {
	if err := ownName(ctx, q.Name); err != nil {
		return nil, err
	}
	return &admin.UnregisterGatewayResponse{}, a.s.cfg.Gateways.Unregister(ctx, q.Name, q.Instance)
}

func (a gatewaysAPI) ListGateways(ctx context.Context, _ *admin.ListGatewaysRequest) (*admin.ListGatewaysResponse, error) {
	all, err := a.s.cfg.Gateways.List(ctx, true)
	return &admin.ListGatewaysResponse{Gateways: sayGateways(all)}, err
}

func (a gatewaysAPI) GetAccess(ctx context.Context, q *admin.GetAccessRequest) (*admin.GetAccessResponse, error) {
	const op = "tell access"
	name, ok := strings.CutPrefix(q.Client, string(peering.Client)+"/")
	if !ok || peering.CheckName(name) != nil {
		return nil, meta.E(op, meta.Invalid, q.Client, errors.New("the identity of a client is client/NAME"))
	}
	who := peering.Identity{Role: peering.Client, Name: name, Admission: q.Admission}
	view := a.s.cfg.Cluster.View()
	if view == nil {
		return nil, meta.E(op, meta.NotSupported, q.Client, errors.New("the cluster has no certificates"))
	}
	access := view.Access(q.Client, meta.VolumeID(q.Volume))
	if access.Rights < cluster.WriteRights && !view.Evicted(who) {
		// The grant may have been made a moment ago, through another server.
		var err error
		if view, err = a.s.cfg.Cluster.Current(ctx); err != nil {
			return nil, err
		}
		access = view.Access(q.Client, meta.VolumeID(q.Volume))
	}
	if view.Evicted(who) {
		return nil, meta.E(op, meta.AccessDenied, q.Client, errors.New("the client was evicted, and its certificate is void"))
	}
	r := &admin.GetAccessResponse{}
	admin.Say(r, access)
	return r, nil
}

func sayGateway(g cluster.Gateway) *admin.Gateway {
	m := &admin.Gateway{}
	admin.Say(m, g)
	return m
}

func sayGateways(all []cluster.Gateway) (said []*admin.Gateway) {
	for _, g := range all {
		said = append(said, sayGateway(g))
	}
	return said
}
