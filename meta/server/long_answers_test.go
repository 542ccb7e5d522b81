package server

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Answers are bounded in bytes. The contents of a volume can make an answer arbitrarily long:
// directories nest deeper than any path reaches.

// deep makes n directories with the longest name inside each other.
func (p *peer) deep(t *testing.T, n int, of string) meta.Ino {
	t.Helper()
	at := meta.RootIno
	for range n {
		r, err := p.Do(t.Context(), 1, meta.OpID{}, &meta.Create{Parent: at, Name: strings.Repeat(of, meta.MaxName), Mode: meta.TypeDir | 0o755}, meta.LeaseNone)
		if err != nil {
			t.Fatal(err)
		}
		at = r.Attr.Ino
	}
	return at
}

// all runs operations in batches.
func (p *peer) all(t *testing.T, ops []meta.Op) (inos []meta.Ino) {
	t.Helper()
	for some := range slices.Chunk(ops, 200) {
		var batch []client.BatchOp
		for _, op := range some {
			batch = append(batch, client.BatchOp{Op: op})
		}
		res, errs, err := p.DoBatch(t.Context(), 1, client.AnyEpoch, batch)
		if err = errors.Join(append(errs, err)...); err != nil {
			t.Fatal(err)
		}
		for _, r := range res {
			inos = append(inos, r.Attr.Ino)
		}
	}
	return inos
}

func mkdirs(dir meta.Ino, n int, name string) (ops []meta.Op) {
	for i := range n {
		ops = append(ops, &meta.Create{Parent: dir, Name: fmt.Sprint(i, name), Mode: meta.TypeDir | 0o755})
	}
	return ops
}

func filesIn(dirs []meta.Ino) (ops []meta.Op) {
	for _, d := range dirs {
		ops = append(ops, &meta.Create{Parent: d, Name: "f", Mode: meta.TypeRegular | 0o644})
	}
	return ops
}

// Events and comparisons of a tree with arbitrarily long paths come in pages; each event once,
// without the path of a directory that no path reaches.
func TestAnswersAboutDeepTrees(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.snapshot(t, "before")
	const n = 900
	far := a.all(t, mkdirs(a.deep(t, 60, "f"), n, ""))
	near := a.all(t, mkdirs(a.deep(t, 14, "n"), n, strings.Repeat("x", 200)))
	s.keepEvents(meta.MaxEvents)
	api := s.api()
	a.all(t, filesIn(far))
	a.all(t, filesIn(near))
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	eventually(t, "events", func() error {
		log, err := api.EventLog(t.Context(), admin.Numbered(1))
		return errors.Join(err, unless(log.Last == 2*n))
	})
	seen, named := 0, 0
	if err := api.Follow(t.Context(), eventsAfter(0), false, func(e admin.VolumeEvent) error {
		seen++
		if e.Path != "" {
			if len(e.Path) >= meta.MaxPath || !strings.HasSuffix(e.Path, "/f") || !slices.Contains(near, e.Parent) {
				return fmt.Errorf("%d bytes: %s", len(e.Path), e.Path)
			}
			named++
		}
		return nil
	}); err != nil || seen != 2*n || named != n {
		t.Errorf("%d events, %d with a path, %v", seen, named, err)
	}
	o := s.srv.hosted.opened(1)
	for since := uint64(0); since < 2*n; {
		ans, err := o.eventWaits.events(t.Context(), eventsQuery{since: since})
		if err != nil || len(ans.Events) == 0 {
			t.Fatal(len(ans.Events), err)
		}
		since = ans.Events[len(ans.Events)-1].Seq
		if b := proto.Size(ans); b > pageBytes+16<<10 {
			t.Errorf("an answer of %d bytes", b)
		}
	}
	changes, bytes := 0, 0
	if err := a.DiffExact(t.Context(), 1, "before", "", func(c meta.Change) error {
		changes++
		bytes += len(c.Path)
		return nil
	}); err != nil || changes < 4*n || bytes < wire.MaxFrame {
		t.Errorf("%d changes, %d bytes: %v", changes, bytes, err)
	}
	if s.srv.hosted.opened(1) != o {
		t.Error("the owner is another")
	}
}

// Lost chunks come in pages, each chunk once, with its files; accepted losses are told at once,
// with fewer files.
func TestLossesInPages(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.lostPage = 18 }, racks[0])
	p := g.s.dial("a")
	const chunks, files = 24, 100
	dir := p.all(t, mkdirs(p.deep(t, 15, "n"), 1, strings.Repeat("x", 200)))[0]
	far := p.deep2(t, dir)
	var ids []meta.ChunkID
	for i := range chunks {
		gr := p.alloc(t, false)
		for _, id := range gr.Servers {
			node := g.nodes[id]
			node.mu.Lock()
			node.chunks[gr.ID] = &gridChunk{data: make([]byte, files), state: meta.ChunkOpen, fence: gr.Fence}
			node.mu.Unlock()
		}
		in := dir
		if i == 0 {
			in = far
		}
		var ops []meta.Op
		for k := range files {
			ops = append(ops, &meta.Create{Parent: in, Name: fmt.Sprint(i, ".", k), Mode: meta.TypeRegular | 0o644})
		}
		inos := p.all(t, ops)
		for k := range ops {
			ops[k] = &meta.Write{Ino: inos[k], Size: 1, Synced: true, Extents: []meta.Extent{{Len: 1, Chunk: gr.ID, ChunkOff: uint64(k)}}}
		}
		p.all(t, ops)
		if _, err := p.SealChunk(t.Context(), 1, gr.ID); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, gr.ID)
	}
	g.await("full", full)
	g.nodes[1].halt()
	if err := g.s.srv.repairs.removeNode(t.Context(), 1, true); err != nil {
		t.Fatal(err)
	}
	g.await("lost", func(st *RepairStatus) bool { return st.Lost == chunks })
	api := g.s.api().Volumes
	var told []meta.ChunkID
	pages := 0
	for q := (&admin.ListLostChunksRequest{Volume: admin.Numbered(1)}); ; pages++ {
		page, err := api.ListLostChunks(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		// The bound of bytes ends the page before the bound of chunks.
		if n := proto.Size(page); n > pageBytes+1<<10 || len(page.Chunks) >= 18 {
			t.Errorf("%d chunks in %d bytes", len(page.Chunks), n)
		}
		for _, x := range page.Chunks {
			c := heardLost(t, x)
			if c.State != LossTotal || len(c.Files) != files || c.More != 0 || (c.Files[7].Path == "") != (c.ID == ids[0]) {
				t.Errorf("%s %s: %d files", c.Chunk, c.State, len(c.Files))
			}
			told = append(told, c.ID)
		}
		if (page.NextPageToken == "") != (page.MoreChunks == 0) {
			t.Errorf("%d chunks more, and the page token %q", page.MoreChunks, page.NextPageToken)
		}
		if q.PageToken = page.NextPageToken; q.PageToken == "" {
			break
		}
	}
	if pages < 2 || pages > 4 {
		t.Errorf("%d pages", pages+1)
	}
	if slices.SortFunc(ids, meta.ChunkID.Compare); !slices.Equal(told, ids) {
		t.Errorf("%v\n%v", told, ids)
	}
	if _, err := api.ListLostChunks(t.Context(), &admin.ListLostChunksRequest{Volume: admin.Numbered(1), PageToken: "x"}); !errors.Is(err, meta.Invalid) {
		t.Errorf("a bad page token: %v", err)
	}
	g.accepts(meta.Invalid, false, make([]meta.ChunkID, maxAccepted+1)...)
	done, err := g.accept(false, ids...)
	if err != nil || len(done) != chunks {
		t.Fatalf("%d accepted, %v", len(done), err)
	}
	listed := uint64(0)
	for _, c := range done {
		if c.State != admin.LossState_LOSS_ACCEPTED {
			t.Errorf("%+v", c)
		}
		listed += uint64(len(c.Files)) + c.MoreFiles
	}
	if listed != chunks*files {
		t.Errorf("%d files", listed)
	}
}

// deep2 goes on below a directory, to where no path reaches.
func (p *peer) deep2(t *testing.T, dir meta.Ino) meta.Ino {
	t.Helper()
	return p.all(t, mkdirs(dir, 1, strings.Repeat("y", 200)))[0]
}

// An answer that is over the bound all the same is an error, for clients and for
// other servers, and nobody's connection or server ends.
func TestAnswersThatDoNotFit(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "f")
	s.cluster.mu.Lock()
	for id := range meta.VolumeID(300) {
		s.cluster.rows[1000+id] = cluster.Volume{ID: 1000 + id, Name: strings.Repeat("v", 64<<10), State: cluster.VolumeTrash}
	}
	s.cluster.mu.Unlock()
	srv := s.srv
	s.cluster.mu.Lock()
	s.cluster.rows[2000] = cluster.Volume{ID: 2000, Name: strings.Repeat("v", wire.MaxFrame), State: cluster.VolumeTrash}
	s.cluster.mu.Unlock()
	a.refused(t, meta.ResourceExceeded, wire.Admin{Op: wire.AdminVolumeByName, Volume: 2000})
	near, far := net.Pipe()
	defer near.Close()
	go func() {
		defer far.Close()
		srv.peers.servePeer(far, wire.NewReader(far), wire.Version, &session{srv: srv, role: wire.RolePeer, who: peering.Identity{Role: peering.Meta, Name: "n"}})
	}()
	go near.Write(wire.Append(nil, wire.Version, 9, &wire.Admin{Op: wire.AdminVolumeByName, Volume: 2000}))
	typ, id, body, err := wire.NewReader(near).Next()
	var re wire.AdminRe
	if err == nil {
		err = wire.Decode(body, &re)
	}
	if err != nil || typ != wire.TAdminRe || id != 9 || re.Status.Err != meta.ResourceExceeded {
		t.Errorf("%v %d: %+v, %v", typ, id, re.Status, err)
	}
	// The others fit into several answers.
	s.cluster.mu.Lock()
	delete(s.cluster.rows, 2000)
	s.cluster.mu.Unlock()
	first, err := a.API.Volumes.ListVolumes(t.Context(), &admin.ListVolumesRequest{})
	if err != nil || first.NextPageToken == "" {
		t.Errorf("%d volumes are told at once, %v", len(first.GetVolumes()), err)
	}
	listed := 0
	for v, err := range a.Volumes(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if v.ID >= 1000 {
			listed++
		}
	}
	if listed != 300 {
		t.Errorf("%d of 300 volumes are listed", listed)
	}
	a.create(t, "g")
	if a.expired > 0 {
		t.Error("the session ended")
	}
}

// A volume's pins may be many: as many are listed as an answer holds.
func TestListedPins(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	const snapshots, pins = 8, 400
	for i := range snapshots {
		at := a.snapshot(t, fmt.Sprint(i)).At
		o := s.srv.hosted.opened(1)
		o.mu.Lock()
		for k := range pins {
			if _, err := o.run(&meta.PinSnapshot{At: at, Holder: fmt.Sprint(k, strings.Repeat("<", 240)), By: "client/somebody", TTL: 1 << 40}, 0); err != nil {
				t.Fatal(err)
			}
		}
		o.mu.Unlock()
	}
	l, err := a.Snapshots(t.Context(), 1)
	if err != nil || len(l.Snapshots) != snapshots {
		t.Fatal(len(l.Snapshots), err)
	}
	listed := 0
	for _, sn := range l.Snapshots {
		if len(sn.Pins)+int(sn.MorePins) != pins {
			t.Errorf("%d pins, %d more", len(sn.Pins), sn.MorePins)
		}
		listed += len(sn.Pins)
	}
	if listed == 0 || listed == snapshots*pins {
		t.Errorf("%d are listed", listed)
	}
}
