package bulk

import (
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver/client"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(child.Main[role](built{m})) }

// built runs the tests of the package with a penstock for the tests to start.
type built struct{ m *testing.M }

func (b built) Run() int { return program.Main(b.m) }

// size is the number of bytes of each round, and the number of rounds; the full form is for
// figures.
func size() (n, rounds int) {
	if os.Getenv("PENSTOCK_BULK") == "full" {
		return 512 << 20, 5
	}
	return 128 << 20, 3
}

func token(chunk meta.ChunkID, r capability.Rights) []byte {
	return capability.Sign(testKey, capability.Claims{Volume: 1, Chunk: chunk, Rights: r, Fence: meta.Fence{Term: 1}, MaxLen: 2 << 30,
		Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
}

func newClient(t testing.TB, servers []*child.Process, conns int, creds *peer.Credentials, more capability.Rights) *client.Client {
	read := capability.Sign(testKey, capability.Claims{Volume: 1, Rights: capability.Read | more, Client: "client/c",
		Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
	c := client.New(client.Config{
		Resolve: func(id meta.ServerID) (meta.ServerInfo, bool) {
			return meta.ServerInfo{ID: id, Addr: servers[id-1].Addr}, true
		},
		ReadCap: func(meta.VolumeID) []byte { return read },
		Creds:   creds, Logger: slog.New(slog.DiscardHandler), Conns: conns,
	})
	t.Cleanup(func() { c.Close() })
	return c
}

var block = func() []byte {
	p := make([]byte, 1<<20)
	r := rand.New(rand.NewPCG(1, 2))
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}()

// write appends n bytes to a fresh chunk and syncs the chunk.
func write(t testing.TB, c *client.Client, id uint64, servers []meta.ServerID, n int) meta.ChunkID {
	t.Helper()
	chunk := meta.ChunkID{Volume: 1, Term: 1, Counter: id}
	w := c.NewWriter(meta.ChunkGrant{ID: chunk, Fence: meta.Fence{Term: 1}, Servers: servers, MaxLen: 2 << 30, Cap: token(chunk, capability.Append)})
	defer w.Close()
	for range n / len(block) {
		if _, err := w.Append(t.Context(), block); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	return chunk
}

// readWay reads a chunk over one connection, in steps.
type readWay struct {
	figure
	c    *client.Client
	srv  *child.Process
	pl   meta.ChunkPlace
	step int
}

// sealed writes a chunk of n bytes and has a permitted caller seal the chunk.
func sealed(t testing.TB, c, owner *client.Client, id uint64, n int) meta.ChunkPlace {
	t.Helper()
	chunk := write(t, c, id, []meta.ServerID{1}, n)
	if _, err := owner.Seal(t.Context(), 1, token(chunk, capability.Seal), chunk, meta.Fence{Term: 1}, true, uint64(n)); err != nil {
		t.Fatal(err)
	}
	return meta.ChunkPlace{ID: chunk, Servers: []meta.ServerID{1}, Sealed: true, Length: uint64(n)}
}

// credentials makes certificates for a chunk server, a client and a meta server.
func credentials(t testing.TB) (srv string, cl, owner *peer.Credentials) {
	t.Helper()
	a, err := peer.NewAuthority("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var creds [3]*peer.Credentials
	for i, role := range []peer.Role{peer.ChunkServer, peer.Client, peer.Meta} {
		own := filepath.Join(dir, string(role))
		if err := a.Issue(own, peer.Identity{Cluster: "test", Role: role, Name: "c"}, nil); err != nil {
			t.Fatal(err)
		}
		if creds[i], err = peer.Load(own, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
	}
	return filepath.Join(dir, string(peer.ChunkServer)), creds[1], creds[2]
}

func TestRemoteRead(t *testing.T) {
	n, rounds := size()
	dir := t.TempDir()
	srv := child.Start(t, role{Kind: "chunks", ID: 1, Dir: dir})
	open := newClient(t, []*child.Process{srv}, 1, peer.Insecure(), 0)
	pl := sealed(t, open, open, 1, n)
	name := pl.ID.String()
	sf := child.Start(t, role{Kind: "sendfile", File: filepath.Join(dir, "chunks", name[30:], name+".data")})
	certs, creds, owner := credentials(t)
	safe := child.Start(t, role{Kind: "chunks", ID: 1, Dir: t.TempDir(), Creds: certs})
	overTLS := newClient(t, []*child.Process{safe}, 1, creds, 0)
	safePlace := sealed(t, overTLS, newClient(t, []*child.Process{safe}, 1, owner, 0), 1, n)
	ticketed := newClient(t, []*child.Process{safe}, 1, creds, capability.Plain)
	plain := &figure{name: "sendfile, plain socket"}
	ways := []*readWay{
		{figure{name: "chunk, reads of 128 KiB"}, open, srv, pl, 128 << 10},
		{figure{name: "chunk, reads of 1 MiB"}, open, srv, pl, 1 << 20},
		{figure{name: "chunk, reads of 8 MiB"}, open, srv, pl, 8 << 20},
		{figure{name: "ticketed, reads of 128 KiB"}, ticketed, safe, safePlace, 128 << 10},
		{figure{name: "ticketed, reads of 1 MiB"}, ticketed, safe, safePlace, 1 << 20},
		{figure{name: "TLS, reads of 1 MiB"}, overTLS, safe, safePlace, 1 << 20},
	}
	buf := make([]byte, 8<<20)
	for range rounds {
		err := plain.measure(n, []*child.Process{sf}, func() error {
			nc, err := net.Dial("tcp", sf.Addr)
			if err != nil {
				return err
			}
			defer nc.Close()
			cubic(nc.(*net.TCPConn))
			got := 0
			for {
				k, err := nc.Read(buf[:1<<20])
				got += k
				if err == io.EOF && got == n {
					return nil
				}
				if err != nil {
					return fmt.Errorf("%d bytes of %d: %w", got, n, err)
				}
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range ways {
			err := w.measure(n, []*child.Process{w.srv}, func() error {
				for off := 0; off < n; off += w.step {
					if err := w.c.ReadAt(t.Context(), w.pl, buf[:w.step], uint64(off)); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	report(t, plain, &ways[0].figure, &ways[1].figure, &ways[2].figure, &ways[3].figure, &ways[4].figure)
	// Encryption may cost any time.
	f := &ways[5].figure
	t.Logf("%-28s %7.0f MB/s %6.2f CPU-s/GB", f.name, median(f.mbs), median(f.cpu))
}

func TestWriteThree(t *testing.T) {
	n, rounds := size()
	var fan, chain, sinks []*child.Process
	for i := range 3 {
		fan = append(fan, child.Start(t, role{Kind: "chunks", ID: meta.ServerID(i + 1), Dir: t.TempDir()}))
		sinks = append(sinks, child.Start(t, role{Kind: "sink", Dir: t.TempDir()}))
	}
	var next []string
	for i := 3; i > 0; i-- {
		p := child.Start(t, role{Kind: "chain", ID: meta.ServerID(i), Dir: t.TempDir(), Next: next})
		chain = append(chain, p)
		next = []string{p.Addr}
	}
	head := []*child.Process{chain[2]}
	fc, cc := newClient(t, fan, 4, peer.Insecure(), 0), newClient(t, head, 4, peer.Insecure(), 0)
	plain := &figure{name: "three plain streams, fdatasync"}
	fanned, chained := &figure{name: "three replicas, fan-out"}, &figure{name: "three replicas, chain"}
	for r := range rounds {
		err := plain.measure(n, sinks, func() error {
			errs := make([]error, 3)
			var wg sync.WaitGroup
			for i, s := range sinks {
				wg.Go(func() {
					nc, err := net.Dial("tcp", s.Addr)
					if err != nil {
						errs[i] = err
						return
					}
					defer nc.Close()
					cubic(nc.(*net.TCPConn))
					for range n / len(block) {
						if _, err := nc.Write(block); err != nil {
							errs[i] = err
							return
						}
					}
					_ = nc.(*net.TCPConn).CloseWrite()
					_, errs[i] = io.ReadFull(nc, make([]byte, 1))
				})
			}
			wg.Wait()
			return errs[0]
		})
		if err != nil {
			t.Fatal(err)
		}
		_ = fanned.measure(n, fan, func() error { write(t, fc, uint64(r+1), []meta.ServerID{1, 2, 3}, n); return nil })
		_ = chained.measure(n, chain, func() error { write(t, cc, uint64(r+1), []meta.ServerID{1}, n); return nil })
		for i := range 3 {
			id := meta.ChunkID{Volume: 1, Term: 1, Counter: uint64(r + 1)}
			_ = fc.Delete(t.Context(), meta.ServerID(i+1), token(id, capability.Delete), id, meta.Fence{Term: 1})
		}
	}
	report(t, plain, fanned, chained)

	// Latency of a small append with its sync.
	for _, way := range []struct {
		name    string
		c       *client.Client
		servers []meta.ServerID
	}{{"fan-out", fc, []meta.ServerID{1, 2, 3}}, {"chain", cc, []meta.ServerID{1}}} {
		id := meta.ChunkID{Volume: 1, Term: 1, Counter: 1000}
		w := way.c.NewWriter(meta.ChunkGrant{ID: id, Fence: meta.Fence{Term: 1}, Servers: way.servers, MaxLen: 2 << 30, Cap: token(id, capability.Append)})
		var took []float64
		for range 300 {
			begun := time.Now()
			if _, err := w.Append(t.Context(), block[:4096]); err != nil {
				t.Fatal(err)
			}
			if err := w.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			took = append(took, float64(time.Since(begun).Microseconds()))
		}
		w.Close()
		t.Logf("append of 4 KiB with sync, %s: median %.0f us", way.name, median(took))
	}
}
