package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

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

// Gateways learn what grants let a client do, also by a grant that another server made a moment ago;
// clients do not. A client finds gateways.
func TestGatewaysLearnAccess(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	grants := []cluster.Grant{
		{ID: 1, Who: "client/writer", Volume: 5, Rights: cluster.WriteRights, Users: cluster.UsersAllTo, UID: 7, GID: 8},
		{ID: 2, Who: "client/read*", Rights: cluster.ReadRights, Users: cluster.UsersAsIs},
		{ID: 3, Who: "client/gone", Rights: cluster.WriteRights, Users: cluster.UsersAsIs},
		{ID: 4, Who: "client/back", Rights: cluster.WriteRights, Users: cluster.UsersNoRoot},
		{ID: 5, Who: "gateway/g", Rights: cluster.WriteRights, Users: cluster.UsersAsIs},
	}
	members := []cluster.Member{
		{Role: peering.Client, Name: "back", Admission: 1},
		{Role: peering.Client, Name: "gone", Evicted: true},
	}
	s.g.set(&cluster.View{Revision: 2, Grants: grants, Members: members})
	gateway := s.apiAs(s.creds(peering.Gateway, "g"))
	ask := func(client string, admission, volume uint32) (*admin.GetAccessResponse, error) {
		return gateway.Gateways.GetAccess(t.Context(), &admin.GetAccessRequest{Client: client, Admission: admission, Volume: volume})
	}
	for _, c := range []struct {
		client            string
		admission, volume uint32
		want              *admin.GetAccessResponse
		kind              meta.Kind
	}{
		{"client/writer", 0, 5, &admin.GetAccessResponse{Rights: admin.Right_RIGHT_WRITE, Users: admin.Users_USERS_ALL_TO, Uid: 7, Gid: 8}, 0},
		{"client/writer", 0, 6, &admin.GetAccessResponse{}, 0},
		{"client/reader", 0, 6, &admin.GetAccessResponse{Rights: admin.Right_RIGHT_READ, Users: admin.Users_USERS_AS_IS}, 0},
		{"client/gone", 0, 6, nil, meta.AccessDenied},
		{"client/back", 0, 6, nil, meta.AccessDenied},
		{"client/back", 1, 6, &admin.GetAccessResponse{Rights: admin.Right_RIGHT_WRITE, Users: admin.Users_USERS_ROOT_SQUASH}, 0},
		{"gateway/g", 0, 6, nil, meta.Invalid},
		{"client/", 0, 6, nil, meta.Invalid},
	} {
		got, err := ask(c.client, c.admission, c.volume)
		if c.kind != 0 && !errors.Is(err, c.kind) || c.kind == 0 && (err != nil || !proto.Equal(got, c.want)) {
			t.Errorf("%s, admission %d, volume %d: %v, %v; want %v, %v", c.client, c.admission, c.volume, got, err, c.want, c.kind)
		}
	}
	newer := append(slices.Clone(grants), cluster.Grant{ID: 6, Who: "client/new", Volume: 5, Rights: cluster.WriteRights, Users: cluster.UsersAsIs})
	s.g.newer.Store(&cluster.View{Revision: 3, Grants: newer, Members: members})
	if got, err := ask("client/new", 0, 5); err != nil || got.Rights != admin.Right_RIGHT_WRITE {
		t.Errorf("a grant made a moment ago: %v, %v", got, err)
	}
	client := s.apiAs(s.creds(peering.Client, "writer"))
	if _, err := client.Gateways.GetAccess(t.Context(), &admin.GetAccessRequest{Client: "client/reader", Volume: 5}); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("a client learns another client's access: %v", err)
	}
	if _, err := client.Gateways.ListGateways(t.Context(), &admin.ListGatewaysRequest{}); err != nil {
		t.Errorf("a client does not find gateways: %v", err)
	}
}
