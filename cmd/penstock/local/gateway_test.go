package local

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// TestGatewayAddress: a default address in use is no error, a given address in use is an error,
// and addresses beyond loopback are refused.
func TestGatewayAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	logger := slog.New(slog.NewTextHandler(io.Discard, nil))
	for _, with := range []func(addr string, optional bool) GatewayConfig{
		func(addr string, optional bool) GatewayConfig {
			return GatewayConfig{Kafka: addr, KafkaOptional: optional, Logger: logger}
		},
		func(addr string, optional bool) GatewayConfig {
			return GatewayConfig{Ingest: addr, IngestOptional: optional, Logger: logger}
		},
	} {
		if g, err := StartGateway(t.Context(), with(l.Addr().String(), true)); g != nil || err != nil {
			t.Errorf("the default address is taken: %v, %v", g, err)
		}
		if g, err := StartGateway(t.Context(), with(l.Addr().String(), false)); g != nil || !errors.Is(err, meta.Busy) {
			t.Errorf("the given address is taken: %v, %v", g, err)
		}
		for _, addr := range []string{"0.0.0.0:0", ":0", "192.0.2.1:9092", "no address"} {
			if g, err := StartGateway(t.Context(), with(addr, false)); g != nil || !errors.Is(err, meta.Invalid) {
				t.Errorf("address %s: %v, %v", addr, g, err)
			}
		}
	}
	cfg := GatewayConfig{Kafka: "127.0.0.1:0", Ingest: "127.0.0.1:0", Logger: logger}
	g, err := StartGateway(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if g.Kafka == g.Ingest || g.Kafka == "" || g.Ingest == "" {
		t.Errorf("the servers are at %q and %q", g.Kafka, g.Ingest)
	}
	if err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestDoors: beyond loopback a gateway starts only with users and TLS or with the flag that says
// so, and flags that do not go together are refused; each refusal names the missing flag.
func TestDoors(t *testing.T) {
	users := filepath.Join(t.TempDir(), "users.json")
	if err := stream.SetUser(users, "ann", "secret", &stream.User{UID: 1, GIDs: []uint32{1}}); err != nil {
		t.Fatal(err)
	}
	logger := slog.New(slog.DiscardHandler)
	for _, c := range []struct {
		doors Doors
		want  string
	}{
		{Doors{}, "--stream-insecure"},
		{Doors{Users: users}, "--tls-cert"},
		{Doors{Users: users, Cert: "c"}, "--tls-key"},
		{Doors{ClientCA: "a"}, "--tls-cert"},
		{Doors{Cert: "c", Key: "k", ClientCA: "a"}, "--stream-users"},
		{Doors{Users: users, Cert: "/no/such/file", Key: "k"}, "/no/such/file"},
	} {
		g, err := StartGateway(t.Context(), GatewayConfig{Kafka: "0.0.0.0:0", Doors: c.doors, Logger: logger})
		if g != nil || !errors.Is(err, meta.Invalid) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c.doors, err)
		}
	}
	g, err := StartGateway(t.Context(), GatewayConfig{Kafka: "0.0.0.0:0", Doors: Doors{Open: true}, Logger: logger})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
