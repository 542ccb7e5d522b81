package server

import (
	"context"
	"errors"
	"sync"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// fakeGateways is a list of gateways in memory.
type fakeGateways struct {
	mu       sync.Mutex
	gateways []cluster.Gateway
}

func (f *fakeGateways) Register(_ context.Context, g cluster.Gateway, _ int64) (cluster.Gateway, int64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g.Number = 7
	f.gateways = append(f.gateways, g)
	return g, 5, nil
}

func (f *fakeGateways) Unregister(context.Context, string, string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gateways = nil
	return nil
}

func (f *fakeGateways) List(context.Context, bool) ([]cluster.Gateway, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gateways, nil
}

// A gateway registers and unregisters only the name in its certificate; an administrator
// registers any name.
func TestGatewaysNameIsTheCertificates(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	own := s.apiAs(s.creds(peering.Gateway, "a"))
	r, err := own.Gateways.RegisterGateway(t.Context(), &admin.RegisterGatewayRequest{Name: "a", Instance: "1", Kafka: "h:1"})
	if err != nil || r.Gateway.Number != 7 || r.Lease != 5 || len(r.Live) != 1 || r.Live[0].Kafka != "h:1" || r.Term.AsDuration() != cluster.GatewayTerm {
		t.Fatal(r, err)
	}
	if _, err := own.Gateways.RegisterGateway(t.Context(), &admin.RegisterGatewayRequest{Name: "b", Instance: "1"}); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("another name: %v", err)
	}
	if _, err := own.Gateways.UnregisterGateway(t.Context(), &admin.UnregisterGatewayRequest{Name: "b", Instance: "1"}); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("another name is taken from the list: %v", err)
	}
	if l, err := own.Gateways.ListGateways(t.Context(), &admin.ListGatewaysRequest{}); err != nil || len(l.Gateways) != 1 {
		t.Error(l, err)
	}
	if _, err := own.Gateways.UnregisterGateway(t.Context(), &admin.UnregisterGatewayRequest{Name: "a", Instance: "1"}); err != nil {
		t.Error(err)
	}
	if _, err := s.apiAs(s.creds(peering.Admin, "x")).Gateways.RegisterGateway(t.Context(), &admin.RegisterGatewayRequest{Name: "b", Instance: "1"}); err != nil {
		t.Error(err)
	}
	client := s.apiAs(s.creds(peering.Client, "a"))
	if _, err := client.Gateways.RegisterGateway(t.Context(), &admin.RegisterGatewayRequest{Name: "a", Instance: "1"}); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("a client is a gateway: %v", err)
	}
}
