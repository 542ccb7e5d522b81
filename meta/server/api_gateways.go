package server

import (
	"context"
	"errors"

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
	g, lease, err := a.s.cfg.Gateways.Register(ctx, cluster.Gateway{Name: q.Name, Instance: q.Instance, Kafka: q.Kafka, Ingest: q.Ingest}, q.Lease)
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
