package server

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// fabric connects servers of one process, and breaks the connections.
type fabric struct {
	mu      sync.Mutex
	servers map[meta.ServerID]*Server
	before  func(server meta.ServerID, off uint64) error // a read
	after   func(server meta.ServerID, off uint64, p []byte)
	// deaf servers never answer: 1 from the first request on, 2 at reads.
	deaf map[meta.ServerID]int
	// asked counts the reads of each server, also of deaf servers.
	asked map[meta.ServerID]int
}

func (f *fabric) Stat(ctx context.Context, server meta.ServerID, id meta.ChunkID) (chunkserver.Info, error) {
	f.mu.Lock()
	s, deaf := f.servers[server], f.deaf[server] == 1
	f.mu.Unlock()
	if deaf {
		<-ctx.Done()
		s = nil
	}
	if s == nil {
		return chunkserver.Info{}, meta.E("stat", meta.Unavailable, "", nil)
	}
	return s.Stat(ctx, id)
}

// ReadAt asks one server after the other, as the client does; a deaf server delays the read only
// as the last server.
func (f *fabric) ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) (err error) {
	deaf := 0
	for _, id := range pl.Servers {
		f.mu.Lock()
		s, before, after := f.servers[id], f.before, f.after
		if f.asked != nil {
			f.asked[id]++
		}
		if f.deaf[id] > 0 {
			s = nil
			deaf++
		}
		f.mu.Unlock()
		err = meta.E("read", meta.Unavailable, "", nil)
		if s == nil {
			continue
		}
		if before != nil {
			if err = before(id, off); err != nil {
				continue
			}
		}
		if err = s.Read(ctx, pl.ID, p, off); err == nil {
			if after != nil {
				after(id, off, p)
			}
			return nil
		}
	}
	if deaf > 0 {
		<-ctx.Done()
		err = meta.E("read", meta.Unavailable, "", ctx.Err())
	}
	return err
}

func (f *fabric) Close() error { return nil }

// cluster makes servers 1 to n with a number of disks each, in directories.
func cluster(t *testing.T, n, disks int) (*fabric, []*Server) {
	t.Helper()
	f := &fabric{servers: map[meta.ServerID]*Server{}}
	var all []*Server
	for i := range n {
		s := diskServer(t, f, meta.ServerID(i+1), t.TempDir(), mkdirs(t, disks)...)
		f.servers[meta.ServerID(i+1)] = s
		all = append(all, s)
	}
	return f, all
}

func mkdirs(t *testing.T, n int) (all []DiskSpec) {
	for range n {
		all = append(all, DiskSpec{Path: t.TempDir(), Class: "ssd"})
	}
	return all
}

var smallDisk = store.Options{SegmentSize: 1 << 20, Segments: 4, Reserve: 1}

func diskServer(t *testing.T, f *fabric, id meta.ServerID, dir string, specs ...DiskSpec) *Server {
	t.Helper()
	d, err := OpenDisks(DisksConfig{Dir: dir, Disks: specs, Cluster: [16]byte{1}, Server: id, Options: smallDisk, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	s := NewWithDisks(Config{ID: id, Logger: quiet, PullRate: 1 << 40, Peers: func(func(meta.ServerID) (meta.ServerInfo, bool), func(meta.ChunkID) []byte) Peers { return f }}, d)
	t.Cleanup(func() { s.Close() })
	return s
}

func random(n int, seed uint64) []byte {
	p := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = r.Read(p)
	return p
}

// fill writes a chunk, seals the chunk, and returns the order to pull.
func fill(t *testing.T, id meta.ChunkID, data []byte, servers ...*Server) meta.Order {
	t.Helper()
	o := meta.Order{Kind: meta.OrderPull, Chunk: id, Length: uint64(len(data)), Fence: meta.Fence{Term: 1, Seals: 2}}
	for _, s := range servers {
		for at := 0; at < len(data); at += 1 << 20 {
			p := data[at:min(len(data), at+1<<20)]
			if err := s.Append(ctx, id, fence, uint64(at), p, chunkserver.CRC(p)); err != nil {
				t.Fatal(err)
			}
		}
		r := s.Order(ctx, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: meta.Fence{Term: 1, Seals: 1}, Final: true, Length: uint64(len(data))})
		if r.Err != 0 {
			t.Fatal(r)
		}
		o.CRC = r.CRC
		o.Sources = append(o.Sources, meta.ServerInfo{ID: s.cfg.ID})
	}
	return o
}

func holds(t *testing.T, s *Server, id meta.ChunkID, data []byte) {
	t.Helper()
	got := make([]byte, len(data))
	if err := s.Read(ctx, id, got, 0); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("DATA: server %d: %v", s.cfg.ID, err)
	}
}

// nothing fails unless the server has and tells nothing at all of the chunk.
func nothing(t *testing.T, s *Server, id meta.ChunkID) {
	t.Helper()
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderStat, Chunk: id}); r.Err != meta.NoSuchChunk {
		t.Errorf("stat: %+v", r)
	}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderList, Volume: id.Volume}); r.Err != 0 || r.More ||
		slices.ContainsFunc(r.Chunks, func(c meta.ReplicaInfo) bool { return c.ID == id }) {
		t.Errorf("list: %+v", r)
	}
	for _, d := range s.disks.list() {
		_ = filepath.WalkDir(filepath.Join(d.path, "chunks"), func(path string, e os.DirEntry, err error) error {
			if err != nil || strings.HasPrefix(e.Name(), id.String()) {
				t.Errorf("%s is left: %v", path, err)
			}
			return nil
		})
	}
}

func TestPull(t *testing.T) {
	f, s := cluster(t, 3, 1)
	data := random(9_000_000, 1)
	o := fill(t, id, data, s[0], s[1])
	r := s[2].Order(ctx, o)
	if r.Err != 0 || r.State != meta.ChunkSealed || r.Length != o.Length || r.CRC != o.CRC || r.Fence != o.Fence {
		t.Fatalf("%+v", r)
	}
	holds(t, s[2], id, data)
	// Once more reads nothing.
	f.before = func(meta.ServerID, uint64) error { t.Error("it is copied again"); return nil }
	if r := s[2].Order(ctx, o); r.Err != 0 || r.CRC != o.CRC {
		t.Fatalf("%+v", r)
	}
	if n := s[2].Stats().Pulled; n != 1 {
		t.Errorf("%d pulled", n)
	}
}

// TestPullFailsOver: a source that breaks in the middle, or has bad bytes, is replaced
// piece by piece; a replica that is not sealed as recorded is no source.
func TestPullFailsOver(t *testing.T) {
	f, s := cluster(t, 4, 1)
	data := random(13_000_000, 2)
	o := fill(t, id, data, s[0], s[1])
	f.before = func(server meta.ServerID, off uint64) error {
		switch {
		case server == 1 && off >= 8<<20:
			return meta.E("read", meta.Unavailable, "", errors.New("it was killed"))
		case server == 2 && off < 4<<20:
			return meta.E("read", meta.Corrupt, "", nil)
		}
		return nil
	}
	if r := s[3].Order(ctx, o); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	holds(t, s[3], id, data)

	// Not sealed; sealed at another length; missing; other content.
	id2 := meta.ChunkID{Volume: 2, Term: 1, Counter: 2}
	f.before = nil
	o2 := fill(t, id2, data[:300_000], s[0])
	if err := s[1].Append(ctx, id2, fence, 0, data[:300_000], chunkserver.CRC(data[:300_000])); err != nil {
		t.Fatal(err)
	}
	for _, src := range []meta.ServerID{2, 3, 9} {
		bad := o2
		bad.Sources = []meta.ServerInfo{{ID: src}}
		if r := s[3].Order(ctx, bad); r.Err == 0 {
			t.Errorf("server %d was taken for a source", src)
		}
	}
	bad := o2
	bad.CRC ^= 1
	if r := s[3].Order(ctx, bad); r.Err == 0 {
		t.Error("another content was taken")
	}
	nothing(t, s[3], id2)
	bad = o2
	bad.Sources = append([]meta.ServerInfo{{ID: 2}, {ID: 9}}, o2.Sources...)
	if r := s[3].Order(ctx, bad); r.Err != 0 {
		t.Fatalf("the third source is good: %+v", r)
	}

	// A source that serves other bytes than it reports, without a bad block.
	id3 := meta.ChunkID{Volume: 3, Term: 1, Counter: 3}
	o3 := fill(t, id3, data[:6_000_000], s[0], s[1])
	f.after = func(server meta.ServerID, off uint64, p []byte) {
		if server == 1 && off == 0 {
			p[5] ^= 1
		}
	}
	if r := s[3].Order(ctx, o3); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	holds(t, s[3], id3, data[:6_000_000])
}

// TestPullInterrupted: a pull that is interrupted at any moment leaves nothing; the same holds if
// the chunk is deleted meanwhile.
func TestPullInterrupted(t *testing.T) {
	f, s := cluster(t, 2, 1)
	data := random(17_000_000, 3)
	o := fill(t, id, data, s[0])
	for _, at := range []uint64{0, 8 << 20, 16 << 20} {
		ctx, cancel := context.WithCancel(ctx)
		f.before = func(_ meta.ServerID, off uint64) error {
			if off == at {
				cancel()
			}
			return nil
		}
		if r := s[1].Order(ctx, o); r.Err != meta.Canceled {
			t.Fatalf("%+v", r)
		}
		nothing(t, s[1], id)
	}
	reached, deleted := make(chan struct{}), make(chan meta.OrderResult)
	f.before = func(_ meta.ServerID, off uint64) error {
		if off == 8<<20 {
			p, canceled := &s[1].pulls, make(chan struct{})
			p.mu.Lock()
			k := p.busy[id]
			cancel := k.cancel
			k.cancel = func() { cancel(); close(canceled) }
			p.mu.Unlock()
			close(reached)
			select {
			case <-canceled:
			case <-time.After(time.Minute): // the copy succeeds
			}
		}
		return nil
	}
	go func() {
		<-reached
		deleted <- s[1].Order(ctx, meta.Order{Kind: meta.OrderDelete, Chunk: id, Fence: meta.Fence{Term: 1, Seals: 3}})
	}()
	if r := s[1].Order(ctx, o); r.Err != meta.Canceled {
		t.Fatalf("%+v", r)
	}
	if r := <-deleted; r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	nothing(t, s[1], id)
	f.before = nil
	if r := s[1].Order(ctx, o); r.Err != meta.Fenced {
		t.Errorf("a copy ordered before the deletion came in: %+v", r)
	}
	o.Fence.Seals = 4
	if r := s[1].Order(ctx, o); r.Err != 0 {
		t.Fatalf("%+v", r)
	}
	holds(t, s[1], id, data)
}

// TestPullRate: two orders at once make one copy; the rate holds.
func TestPullRate(t *testing.T) {
	_, s := cluster(t, 2, 1)
	data := random(24<<20, 4)
	o := fill(t, id, data, s[0])
	o.Rate = 40 << 20
	start := time.Now()
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			if r := s[1].Order(ctx, o); r.Err != 0 {
				t.Errorf("%+v", r)
			}
		})
	}
	wg.Wait()
	// The first piece goes at once: 20 MiB have to wait.
	if took := time.Since(start); took < 400*time.Millisecond {
		t.Errorf("24 MiB at 40 MiB/s took %v", took)
	}
	if st := s[1].Stats(); st.Pulled != 1 || st.PulledBytes != 24<<20 {
		t.Errorf("%+v", st)
	}
}

// TestListPages: lists have every replica of the volume once, whatever the pages, over all disks,
// or are marked as incomplete.
func TestListPages(t *testing.T) {
	_, s := cluster(t, 1, 3)
	r := rand.New(rand.NewPCG(5, 6))
	want := map[meta.ChunkID]uint64{}
	for range 400 {
		id := meta.ChunkID{Volume: meta.VolumeID(1 + r.IntN(2)), Term: uint32(1 + r.IntN(3)), Counter: uint64(r.IntN(1 << 12))}
		p := random(1+r.IntN(500), 1)
		if err := s[0].Append(ctx, id, fence, 0, p, chunkserver.CRC(p)); err != nil {
			continue // the replica is listed
		}
		if id.Volume == 1 {
			want[id] = uint64(len(p))
		}
	}
	list := func(most uint32) (all []meta.ReplicaInfo) {
		var after meta.ChunkID
		for {
			r := s[0].Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1, After: after, Max: most})
			if r.Err != 0 || len(r.Chunks) > int(most) {
				t.Fatalf("%+v", r)
			}
			all = append(all, r.Chunks...)
			if !r.More {
				return all
			}
			after = r.Chunks[len(r.Chunks)-1].ID
		}
	}
	for _, most := range []uint32{1, 7, 100, 4096} {
		got := map[meta.ChunkID]uint64{}
		disks := map[string]bool{}
		for _, c := range list(most) {
			if _, twice := got[c.ID]; twice {
				t.Fatalf("%v is listed twice", c.ID)
			}
			got[c.ID] = c.Length
			disks[c.Disk] = true
		}
		if len(got) != len(want) || len(disks) != 3 {
			t.Fatalf("pages of %d: %d of %d chunks, %d disks", most, len(got), len(want), len(disks))
		}
		for id, n := range want {
			if got[id] != n {
				t.Fatalf("%v has %d bytes, listed are %d", id, n, got[id])
			}
		}
	}
	// A directory that can't be listed: no list at all.
	dir := filepath.Join(s[0].disks.list()[1].path, "chunks", "80")
	if err := os.Rename(dir, dir+"x"); err != nil {
		t.Fatal(err)
	}
	if r := s[0].Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1}); r.Err == 0 {
		t.Error("a list without a directory counts as whole")
	}
	if err := os.Rename(dir+"x", dir); err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// TestCorruptReplica: a flipped bit is found by reading or by scrubbing, reported, listed
// as corrupt and kept, also over a restart, until a good copy takes its place.
func TestCorruptReplica(t *testing.T) {
	f, s := cluster(t, 2, 1)
	data := random(400_000, 7)
	o := fill(t, id, data, s[0], s[1])
	dir, spec := s[1].disks.cfg.Dir, s[1].disks.cfg.Disks[0]
	flip := func(at int64) {
		t.Helper()
		file, err := os.OpenFile(filepath.Join(spec.Path, "chunks", "01", id.String()+".data"), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		b := make([]byte, 1)
		if _, err := file.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 4
		if _, err := file.WriteAt(b, at); err != nil {
			t.Fatal(err)
		}
	}
	told := func() bool {
		return slices.ContainsFunc(s[1].Events(0, 100), func(e meta.ReplicaEvent) bool {
			return e.Kind == meta.EventCorrupt && e.Chunk == id && e.Disk == s[1].disks.list()[0].id
		})
	}
	listed := func() meta.Kind {
		r := s[1].Order(ctx, meta.Order{Kind: meta.OrderList, Volume: 1})
		if r.Err != 0 || len(r.Chunks) != 1 {
			t.Fatalf("%+v", r)
		}
		return r.Chunks[0].Err
	}
	for round, find := range []func(){
		func() {
			if err := s[1].Read(ctx, id, make([]byte, 10), 70_000); meta.KindOf(err) != meta.Corrupt {
				t.Fatal(err)
			}
		},
		func() { s[1].Order(ctx, meta.Order{Kind: meta.OrderVerify, Chunk: id}) },
		func() { s[1].Order(ctx, meta.Order{Kind: meta.OrderScrub, Rate: 1 << 30}) },
	} {
		if listed() != meta.KindOK || told() {
			t.Fatalf("round %d: corrupt already", round)
		}
		flip(70_001)
		find()
		eventually(t, "the corrupt replica is not reported", told)
		if listed() != meta.Corrupt {
			t.Fatalf("round %d: not listed as corrupt", round)
		}
		if n := len(s[1].Events(0, 100)); n != 1 {
			t.Errorf("%d events of one bad chunk", n)
		}
		// Blocks that verify are still served.
		got := make([]byte, 1000)
		if err := s[1].Read(ctx, id, got, 300_000); err != nil || !bytes.Equal(got, data[300_000:301_000]) {
			t.Errorf("DATA: the sound part: %v", err)
		}
		if err := s[1].Close(); err != nil {
			t.Fatal(err)
		}
		s[1] = diskServer(t, f, 2, dir, spec)
		if listed() != meta.Corrupt {
			t.Fatalf("round %d: forgotten at a restart", round)
		}
		o.Fence.Seals++
		if r := s[1].Order(ctx, o); r.Err != 0 {
			t.Fatalf("%+v", r)
		}
		holds(t, s[1], id, data)
	}
}
