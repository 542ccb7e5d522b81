package local

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"

	"penstock.io/penstock/meta"
)

// TestGatewayAddress: a default address that is taken is no error, a given one is, and others
// than loopback are refused.
func TestGatewayAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := GatewayConfig{Kafka: l.Addr().String(), Optional: true, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if g, err := StartGateway(t.Context(), cfg); g != nil || err != nil {
		t.Errorf("the default address is taken: %v, %v", g, err)
	}
	cfg.Optional = false
	if g, err := StartGateway(t.Context(), cfg); g != nil || !errors.Is(err, meta.Busy) {
		t.Errorf("the given address is taken: %v, %v", g, err)
	}
	for _, addr := range []string{"0.0.0.0:0", ":0", "192.0.2.1:9092", "no address"} {
		cfg.Kafka = addr
		if g, err := StartGateway(t.Context(), cfg); g != nil || !errors.Is(err, meta.Invalid) {
			t.Errorf("address %s: %v, %v", addr, g, err)
		}
	}
	cfg.Kafka = "127.0.0.1:0"
	g, err := StartGateway(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
