package client

import (
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

// put writes and seals a chunk.
func (f *fixture) put(data []byte) meta.ChunkPlace {
	f.t.Helper()
	g := f.grant()
	w := f.NewWriter(g)
	defer w.Close()
	if _, err := w.Append(f.t.Context(), data); err != nil {
		f.t.Fatal(err)
	}
	if err := w.Sync(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	return f.seal(g, uint64(len(data)))
}

// kinds counts the connections to a server.
func (f *fixture) kinds(id meta.ServerID) (encrypted, open int) {
	p := f.peer(id)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, pool := range p.pools {
		for _, l := range pool {
			if l.TLS() {
				encrypted++
			} else {
				open++
			}
		}
	}
	return encrypted, open
}

// TestPlainIsAskedFor: bytes go over plain connections only if the capability allows plain.
func TestPlainIsAskedFor(t *testing.T) {
	f := newFixture(t, "tls", 1, Config{})
	pl := f.put(random(100_000, 1))
	readAll(t, f, pl, random(100_000, 1))
	if enc, open := f.kinds(1); enc == 0 || open != 0 {
		t.Errorf("%d connections with TLS, %d without", enc, open)
	}
	f = newFixture(t, "ticket", 1, Config{})
	pl = f.put(random(100_000, 1))
	readAll(t, f, pl, random(100_000, 1))
	if enc, open := f.kinds(1); enc != 1 || open < 2 {
		t.Errorf("%d connections with TLS, %d without", enc, open)
	}
}

// TestEncryptedVolumeRefusesPlain: a server refuses a volume's bytes on a plain connection if the
// capability does not allow plain, whatever the client requests.
func TestEncryptedVolumeRefusesPlain(t *testing.T) {
	f := newFixture(t, "ticket", 1, Config{})
	pl := f.put(random(1000, 1))
	ctx := t.Context()
	l, err := f.peer(1).link(ctx, forOthers+plain)
	if err != nil {
		t.Fatal(err)
	}
	defer l.release()
	for _, x := range []struct {
		t      wire.Type
		rights capability.Rights
		kind   meta.Kind
	}{
		{wire.Stat, capability.Read | capability.Plain, meta.KindOK},
		{wire.Stat, capability.Read, meta.BadCapability},
		{wire.Sync, capability.Append, meta.BadCapability},
		// Requests that go over TLS only, whatever the capability.
		{wire.Seal, capability.Seal | capability.Plain, meta.AccessDenied},
		{wire.Delete, capability.Delete | capability.Plain, meta.AccessDenied},
		{wire.Ticket, capability.Plain, meta.AccessDenied},
	} {
		q := wire.Request{Chunk: pl.ID, Cap: capability.Sign(f.key, capability.Claims{Volume: 1, Rights: x.rights, Client: "client/c",
			Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})}
		if err := l.do(ctx, &q, &call{t: x.t}, 0); meta.KindOf(err) != x.kind {
			t.Errorf("type %d with rights %d: %v, want %v", x.t, x.rights, err, x.kind)
		}
	}
}

// TestTicketsEndWithTheServer: a restarted server knows no earlier tickets: the client
// gets another.
func TestTicketsEndWithTheServer(t *testing.T) {
	f := newFixture(t, "ticket", 1, Config{})
	data := random(300_000, 1)
	pl := f.put(data)
	readAll(t, f, pl, data)
	if err := f.servers[1].Close(); err != nil {
		t.Fatal(err)
	}
	f.start(1, "ticket")
	deadline := time.Now().Add(time.Minute)
	for {
		got := make([]byte, 100)
		err := f.ReadAt(t.Context(), pl, got, 7)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
	}
	readAll(t, f, pl, data)
}

// TestStolenCapability: a capability belongs to its holder: another client with a valid
// certificate can't use it.
func TestStolenCapability(t *testing.T) {
	for _, network := range []string{"tls", "ticket"} {
		f := newFixture(t, network, 1, Config{})
		pl := f.put(random(1000, 1))
		token := func(client string) []byte {
			return capability.Sign(f.key, capability.Claims{Volume: 1, Rights: capability.Read | f.plainRight(), Client: client,
				Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
		}
		for client, kind := range map[string]meta.Kind{"client/c": meta.KindOK, "": meta.KindOK, "client/other": meta.BadCapability, "admin/c": meta.BadCapability} {
			k := &call{t: wire.Stat}
			err := f.ask(t.Context(), 1, &wire.Request{Chunk: pl.ID, Cap: token(client)}, k, 0)
			if meta.KindOf(err) != kind {
				t.Errorf("%s: a capability of %q: %v, want %v", network, client, err, kind)
			}
		}
	}
}

// BenchmarkSecureRead: plain reads of a sealed chunk need no copy through the server; the
// figures stand beside those of TLS.
func BenchmarkSecureRead(b *testing.B) {
	data := random(8<<20, 1)
	for _, network := range []string{"tcp", "ticket", "tls"} {
		b.Run(network, func(b *testing.B) {
			f := newFixture(b, network, 1, Config{})
			pl := f.put(data)
			buf := make([]byte, chunkserver.MaxAppend)
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				for off := 0; off < len(data); off += len(buf) {
					if err := f.ReadAt(b.Context(), pl, buf[:min(len(buf), len(data)-off)], uint64(off)); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
