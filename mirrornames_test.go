package penstock

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// farSession is a session whose owner is far away.
type farSession struct {
	*fakeSession
	far *far
}

// far counts the requests under way to owners.
type far struct {
	mu     sync.Mutex
	takes  time.Duration
	now    int // how much is
	calls  int
	beside int // how much was, at each call
}

func (f *far) travel() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	f.now++
	f.beside += f.now
	takes := f.takes
	f.mu.Unlock()
	time.Sleep(takes)
	f.mu.Lock()
	f.now--
}

func (s *farSession) Do(ctx context.Context, v meta.VolumeID, epoch uint64, id meta.OpID, op meta.Op, want meta.LeaseMode, over func()) (*meta.Result, error) {
	s.far.travel()
	return s.fakeSession.Do(ctx, v, epoch, id, op, want, over)
}

func (s *farSession) DoAt(ctx context.Context, v meta.VolumeID, at meta.Generation, op meta.Op) (*meta.Result, error) {
	s.far.travel()
	return s.fakeSession.DoAt(ctx, v, at, op)
}

// paths lists the paths of a volume, with modes and link counts.
func paths(t *testing.T, v *Volume, dir meta.Ino, at string, all map[string]string) map[string]string {
	t.Helper()
	for from, eof := (DirCursor{}), false; !eof; {
		var l []DirEntry
		var err error
		if l, eof, err = v.ReadDir(t.Context(), dir, &from, 0, false); err != nil {
			t.Fatal(err)
		}
		for _, e := range l {
			a := must(v.GetAttr(t.Context(), e.Ino)).Attr
			all[at+e.Name] = fmt.Sprintf("%o %d", a.Mode, a.Nlink)
			if a.IsDir() {
				paths(t, v, e.Ino, at+e.Name+"/", all)
			}
		}
	}
	return all
}

// TestMirrorNamesSideBySide: the changes of names in a round do not wait for each other's
// round trips, whatever the changes are; and a round continues after its process was
// killed.
func TestMirrorNamesSideBySide(t *testing.T) {
	const n = 60 // of each kind
	ctx := t.Context()
	road := &far{}
	var sess [2]*farSession
	var vols [2]*Volume
	var worlds [2]*world
	dial := func(i int) {
		t.Helper()
		w := worlds[i]
		c := newClient(Config{Logger: slog.New(slog.DiscardHandler)})
		s := &farSession{&fakeSession{w: w, c: c, events: make(chan func(), 1<<16), done: make(chan struct{}), left: 8 * time.Second}, road}
		w.mu.Lock()
		w.startLocked(s.fakeSession)
		w.mu.Unlock()
		c.attach(s, &fakeChunks{w: w, s: s.fakeSession})
		go s.run()
		v, err := c.Volume(ctx, "root")
		if err != nil {
			t.Fatal(err)
		}
		sess[i], vols[i] = s, v
	}
	end := func(i int) {
		t.Helper()
		if err := vols[i].c.Close(ctx); err != nil {
			t.Fatal(err)
		}
		worlds[i].check()
		close(sess[i].events)
		<-sess[i].done
	}
	for i := range worlds {
		worlds[i] = newWorld(t, meta.Policy{Replicas: 1})
		dial(i)
	}
	src, dst := vols[0], vols[1]
	made := func(dir meta.Ino, name string, mode uint32) meta.Ino {
		t.Helper()
		return must(src.Create(ctx, &Call{}, meta.Create{Parent: dir, Name: name, Mode: mode})).Attr.Ino
	}
	try := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	round := func(m *mirrorCopy, changes []meta.Change) {
		t.Helper()
		m.dst, m.most = dst, 0
		try(m.run(ctx, changes))
		want, got := paths(t, m.to, meta.RootIno, "", map[string]string{}), paths(t, dst, meta.RootIno, "", map[string]string{})
		if !maps.Equal(want, got) {
			t.Fatalf("the target holds %v, it should %v", got, want)
		}
	}
	var files, gone []meta.Ino
	old, linked := made(meta.RootIno, "old", meta.TypeDir|0o755), made(meta.RootIno, "linked", meta.TypeRegular)
	for i := range n {
		made(old, fmt.Sprint("gone", i), meta.TypeRegular)
		gone = append(gone, made(old, fmt.Sprint("gone-dir", i), meta.TypeDir))
		made(gone[i], "in it", meta.TypeRegular)
		made(gone[i], "saved", meta.TypeRegular)
		made(old, fmt.Sprint("moved", i), meta.TypeRegular)
		made(old, fmt.Sprint("moved-dir", i), meta.TypeDir)
		files = append(files, made(old, fmt.Sprint("changed", i), meta.TypeRegular))
	}
	flushAll(t, src)
	base := worlds[0].take("base")
	round(&mirrorCopy{to: snapshotOf(t, src, "base")}, nil)
	worlds[1].take("base")

	up := made(meta.RootIno, "new", meta.TypeDir|0o700)
	for i := range n {
		try(src.Unlink(ctx, &Call{}, old, fmt.Sprint("gone", i), false))
		try(src.Unlink(ctx, &Call{}, gone[i], "in it", false))
		try(src.Rename(ctx, &Call{}, gone[i], "saved", up, fmt.Sprint("saved", i), 0))
		try(src.Unlink(ctx, &Call{}, old, fmt.Sprint("gone-dir", i), true))
		try(src.Rename(ctx, &Call{}, old, fmt.Sprint("moved", i), up, fmt.Sprint("moved", i), 0))
		try(src.Rename(ctx, &Call{}, old, fmt.Sprint("moved-dir", i), up, fmt.Sprint("moved-dir", i), 0))
		try(second(src.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: files[i], Mask: meta.SetMode, Mode: 0o600})))
		made(up, fmt.Sprint("made", i), meta.TypeRegular)
		made(made(up, fmt.Sprint("made-dir", i), meta.TypeDir), "in it", meta.TypeRegular)
		if i%10 == 0 { // changes of one inode: one after the other
			try(second(src.Link(ctx, &Call{}, linked, up, fmt.Sprint("linked", i))))
		}
	}
	try(src.Unlink(ctx, &Call{}, meta.RootIno, "linked", false))
	flushAll(t, src)
	next := worlds[0].take("next")
	worlds[0].mu.Lock() // unlinked inodes are released in parallel
	changes, err := namespace.DiffExact(worlds[0].store, base, next)
	worlds[0].mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	m := &mirrorCopy{to: snapshotOf(t, src, "next"), from: snapshotOf(t, src, "base"), base: snapshotOf(t, dst, "base")}
	road.mu.Lock()
	road.takes, road.calls, road.beside = 5*time.Millisecond, 0, 0
	road.mu.Unlock()
	m.dst = dst
	try(m.run(ctx, changes))
	road.mu.Lock()
	road.takes = 0
	calls, atOnce := road.calls, float64(road.beside)/float64(road.calls)
	road.mu.Unlock()
	t.Logf("%d changes, %d calls, %.1f at a time", len(changes), calls, atOnce)
	if atOnce < mirrorFiles/3 {
		t.Errorf("only %.1f calls were under way at a time", atOnce)
	}
	// Once more, by another process: everything is there, and the removed directories are
	// gone for good.
	end(1)
	dial(1)
	dst = vols[1]
	round(&mirrorCopy{to: m.to, from: m.from, base: snapshotOf(t, dst, "base")}, changes)
	end(0)
	end(1)
}
