package server

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	chunkclient "penstock.io/penstock/chunkserver/client"
	chunks "penstock.io/penstock/chunkserver/server"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

// Chunk servers with wrong clocks serve like others, since they judge capabilities by the clock
// of the metadata server that signed the capability; and a capability ends by the clock of the
// metadata server, however far behind a chunk server's clock is. Health tells of servers that are
// further off than certificates allow.
func TestChunkServersClocks(t *testing.T) {
	t.Parallel()
	offs := []time.Duration{-4 * time.Minute, 4 * time.Minute, 20 * time.Minute}
	g := newGrid(t, nil)
	for i, off := range offs {
		g.realServerWith(chunks.Config{ID: meta.ServerID(i + 1), Topology: fmt.Sprint("rack", i),
			Clock:          func() time.Time { return time.Now().Add(off) },
			UnsafeOwnClock: strings.Contains(os.Getenv("PENSTOCK_CONTROL"), "chunk-ownclock")}, t.TempDir())
	}
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 3})
	g.fillWith(p, 1, 4096)
	recs := g.records()
	if len(recs) != 1 || len(recs[0].Servers) != len(offs) {
		t.Fatalf("%+v", recs)
	}
	// hold is a client with a capability that ends after life.
	hold := func(life time.Duration) *chunkclient.Client {
		token := g.s.srv.chunkServers.sign(life, capability.Claims{Volume: meta.RootVolume, Rights: capability.Read})
		cl := chunkclient.New(chunkclient.Config{Resolve: g.s.srv.chunkServers.Resolve, Logger: slog.New(slog.DiscardHandler), Timeout: 30 * time.Second,
			ReadChunkCap: func(meta.ChunkID) []byte { return token }})
		t.Cleanup(func() { cl.Close() })
		return cl
	}
	fresh, over := hold(CapLife), hold(-time.Millisecond)
	for i, off := range offs {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if _, err := fresh.Stat(ctx, meta.ServerID(i+1), recs[0].ID); err != nil {
			t.Errorf("a clock that is %v ahead: %v", off, err)
		}
		if _, err := over.Stat(ctx, meta.ServerID(i+1), recs[0].ID); meta.KindOf(err) != meta.BadCapability {
			t.Errorf("a clock that is %v ahead takes a capability that has expired: %v", off, err)
		}
		cancel()
	}
	h := g.s.srv.health.Health(t.Context())
	if len(h.Clocks) != 1 || h.Clocks[0].ID != 3 || h.Clocks[0].Ahead < 10*time.Minute || h.Clocks[0].Ahead > 20*time.Minute {
		t.Errorf("health tells %+v", h.Clocks)
	}
}
