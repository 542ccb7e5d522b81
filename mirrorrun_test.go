package penstock

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// fakeMirrors is a session of a cluster with one mirror, whose target is the world's
// volume.
type fakeMirrors struct {
	*fakeSession
	snapshotSession
	mirrorSession

	mu     sync.Mutex
	r      meta.Mirror
	filled bool
	denied bool // nothing of mirrors is for the session's role
}

func (s *fakeMirrors) Mirrors(ctx context.Context) ([]meta.Mirror, error) {
	r, err := s.Mirror(ctx, 1)
	return []meta.Mirror{r}, err
}

func (s *fakeMirrors) Mirror(context.Context, meta.VolumeID) (meta.Mirror, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.denied {
		return meta.Mirror{}, meta.E("call", meta.AccessDenied, "client/a", nil)
	}
	return s.r, nil
}

func (s *fakeMirrors) PutMirror(_ context.Context, r meta.Mirror) (meta.Mirror, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Revision != s.r.Revision {
		return r, meta.E("write mirror", meta.Again, "", nil)
	}
	r.Revision++
	s.r = r
	return r, nil
}

func (s *fakeMirrors) SetLock(_ context.Context, _ meta.VolumeID, l meta.Lock, _ bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.filled = l.Type == meta.LockWrite
	return nil
}

func (s *fakeMirrors) Snapshots(context.Context, meta.VolumeID) (*meta.SnapshotList, error) {
	return &meta.SnapshotList{Snapshots: []meta.SnapshotInfo{{Name: "m-empty", Shown: true}}}, nil
}

func (s *fakeMirrors) fills() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.filled
}

// TestMirrorsAreNotForTheRole: a process that may not list mirrors ends at once. A process that
// listed them once goes on.
func TestMirrorsAreNotForTheRole(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newClient(Config{Logger: slog.New(slog.DiscardHandler)})
		s := &fakeMirrors{fakeSession: &fakeSession{w: newWorld(t, meta.Policy{Replicas: 1}), c: c}, denied: true}
		c.attach(s, &fakeChunks{w: s.w, s: s.fakeSession})
		began := time.Now()
		soon, end := context.WithTimeout(t.Context(), time.Hour)
		defer end()
		if err := RunMirrors(soon, MirrorConfig{Client: c, Logger: slog.New(slog.DiscardHandler)}); !errors.Is(err, meta.AccessDenied) || time.Since(began) > 0 {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		s.denied, s.r.State = false, meta.MirrorPaused
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		time.AfterFunc(time.Minute, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.denied = true
		})
		if err := RunMirrors(ctx, MirrorConfig{Client: c, Logger: slog.New(slog.DiscardHandler)}); err != nil || ctx.Err() == nil {
			t.Errorf("a process that listed mirrors before: %v", err)
		}
	})
}

// TestMirrorWaitsForNoDeadSource: the copier tries an unreachable source ever more
// seldom, and meanwhile delays no caller: a caller that pauses or promotes the mirror
// gets the right to fill it at once, and a requested round is tried at once.
func TestMirrorWaitsForNoDeadSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, meta.Policy{Replicas: 1})
		c := newClient(Config{Logger: slog.New(slog.DiscardHandler)})
		s := &fakeMirrors{fakeSession: &fakeSession{w: w, c: c, events: make(chan func(), 1<<16), done: make(chan struct{}), left: 8 * time.Second}}
		s.r = meta.Mirror{Name: "m", Version: meta.MirrorVersion, Target: 1, State: meta.MirrorRunning, Keep: 1,
			Source: meta.MirrorSource{Meta: []string{"far"}, Volume: "v", ID: 2}}
		w.mu.Lock()
		w.startLocked(s.fakeSession)
		w.mu.Unlock()
		c.attach(s, &fakeChunks{w: w, s: s.fakeSession})
		go s.run()
		ctx, cancel := context.WithCancel(t.Context())
		dials := make(chan struct{}, 1000)
		ended := make(chan error, 1)
		go func() {
			ended <- RunMirrors(ctx, MirrorConfig{Client: c, Logger: slog.New(slog.DiscardHandler), Dial: func(context.Context, meta.MirrorSource) (*Client, error) {
				dials <- struct{}{}
				return nil, meta.E("dial", meta.Unavailable, "far", nil)
			}})
		}()
		mirrors, err := c.Mirrors()
		if err != nil {
			t.Fatal(err)
		}
		change := func(fn func(r *Mirror)) {
			t.Helper()
			if _, err := mirrors.change(ctx, 1, func(r *Mirror) error { fn(r); return nil }); err != nil {
				t.Fatal(err)
			}
		}
		soon := func(what string, is func() bool) {
			t.Helper()
			const most = 5 * time.Second
			began := time.Now()
			for !is() {
				if time.Sleep(100 * time.Millisecond); time.Since(began) > time.Hour {
					t.Fatalf("%s: never", what)
				}
			}
			if took := time.Since(began); took > most {
				t.Errorf("%s: after %v", what, took)
			}
		}
		for i := range 5 {
			time.Sleep(10*time.Minute + time.Duration(i)*13*time.Second)
			if n := len(dials); n < 9 || n > 25 {
				t.Errorf("%d tries in ten minutes", n)
			}
			for len(dials) > 0 {
				<-dials
			}
			if !s.fills() {
				t.Fatal("nobody fills the target")
			}
			change(func(r *Mirror) { r.Asked++ })
			soon("a round that was asked for", func() bool { return len(dials) > 0 })
			time.Sleep(20 * time.Second)
			change(func(r *Mirror) { r.State = meta.MirrorPaused })
			soon("paused", func() bool { return !s.fills() })
			change(func(r *Mirror) { r.State = meta.MirrorRunning })
			soon("resumed", s.fills)
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
		close(s.events)
		<-s.done
	})
}

// digestSession is a session of two volumes' owners, which compute digests.
type digestSession struct {
	*fakeSession
	snapshotSession
	// answers has the answers for each volume, in order; the last answer repeats.
	answers map[meta.VolumeID][]meta.SnapshotInfo
	asked   map[meta.VolumeID]int
	unpaced int // how often
}

func (s *digestSession) AwaitDigest(_ context.Context, v meta.VolumeID, name string, unpaced bool) (meta.SnapshotInfo, error) {
	if unpaced {
		s.unpaced++
	}
	i := s.answers[v][0]
	if len(s.answers[v]) > 1 {
		s.answers[v] = s.answers[v][1:]
	}
	s.asked[v]++
	return i, nil
}

// TestMirrorAwaitsDigests: a round fails while a digest can't be computed, but not for an
// earlier failure while the digest is being computed again; and both owners learn that a
// caller waits.
func TestMirrorAwaitsDigests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		done := meta.SnapshotInfo{Digest: &meta.DigestInfo{Digest: "d"}}
		failed := meta.SnapshotInfo{DigestError: "the server is away"}
		again := failed
		again.DigestTrying = true
		type infos = []meta.SnapshotInfo
		for _, x := range []struct {
			src, dst infos
			ok       bool
		}{
			{infos{{}, {}, done}, infos{{}, done}, true},
			{infos{again, again, done}, infos{{}, again, done}, true},
			{infos{failed}, infos{{}, done}, false},
			{infos{done}, infos{{}, again, failed, done}, false},
		} {
			s := &digestSession{answers: map[meta.VolumeID][]meta.SnapshotInfo{1: x.src, 2: x.dst}, asked: map[meta.VolumeID]int{}}
			c := &Client{sess: s}
			w := &mirrorWorker{src: bareVolume(c, 1), dst: bareVolume(c, 2)}
			sum, err := w.verify(t.Context(), "s", false)
			if x.ok && (err != nil || sum != "d") || !x.ok && meta.KindOf(err) != meta.Unavailable {
				t.Errorf("%+v: %q, %v", x, sum, err)
			}
			if s.asked[1] == 0 || s.asked[2] == 0 {
				t.Errorf("%+v: asked %v", x, s.asked)
			}
		}
	})
}

// TestMirrorDigestsSource: the source's owner is asked for the digest while a round
// copies without a rate, until the digest exists; with a rate it is not asked.
func TestMirrorDigestsSource(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, x := range []struct {
			rate uint64
			src  []meta.SnapshotInfo
			asks int
		}{
			{0, []meta.SnapshotInfo{{}}, 4},
			{0, []meta.SnapshotInfo{{}, {Digest: &meta.DigestInfo{}}}, 2},
			{1 << 20, []meta.SnapshotInfo{{}}, 0},
		} {
			s := &digestSession{answers: map[meta.VolumeID][]meta.SnapshotInfo{1: x.src}, asked: map[meta.VolumeID]int{}}
			w := &mirrorWorker{src: bareVolume(&Client{sess: s}, 1)}
			done := w.digestSource(t.Context(), &Mirror{Rate: x.rate, Round: &MirrorRound{Snapshot: "s"}})
			time.Sleep(3*mirrorDigest + time.Second)
			done()
			time.Sleep(3 * mirrorDigest)
			if s.asked[1] != x.asks || s.unpaced != x.asks {
				t.Errorf("%+v: asked %d times, %d at no rate", x, s.asked[1], s.unpaced)
			}
		}
	})
}

// TestMirrorAwaited: a caller that waits for a round is told once why rounds fail, goes
// on waiting, and learns that the mirror was paused.
func TestMirrorAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &fakeMirrors{r: meta.Mirror{Name: "m", Version: meta.MirrorVersion, Target: 1, State: meta.MirrorRunning, Keep: 1, Error: "the disk is full"}}
		m := Mirrors{s: s}
		change := func(fn func(r *Mirror)) Mirror {
			t.Helper()
			r, err := m.change(t.Context(), 1, func(r *Mirror) error { fn(r); return nil })
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		asked := change(func(r *Mirror) { r.Asked++ })
		ended := make(chan error, 1)
		var heard []string
		wait := func(ctx context.Context) {
			go func() {
				_, err := m.Await(ctx, asked, func(why string) { heard = append(heard, why) })
				ended <- err
			}()
		}
		wait(t.Context())
		time.Sleep(time.Hour)
		change(func(r *Mirror) { r.Error = "the source is gone" })
		time.Sleep(time.Hour)
		change(func(r *Mirror) { r.Heard, r.Round = r.Asked, &MirrorRound{} })
		time.Sleep(time.Hour)
		select {
		case err := <-ended:
			t.Fatalf("it ended before the round was complete: %v", err)
		default:
		}
		change(func(r *Mirror) { r.Round, r.Error = nil, "" })
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		if want := []string{"the disk is full", "the source is gone"}; !slices.Equal(heard, want) {
			t.Errorf("it heard %q, want %q", heard, want)
		}
		asked = change(func(r *Mirror) { r.Asked++ })
		wait(t.Context())
		time.Sleep(time.Minute)
		change(func(r *Mirror) { r.State = meta.MirrorPaused })
		if err := <-ended; meta.KindOf(err) != meta.Canceled {
			t.Errorf("paused meanwhile: %v", err)
		}
		change(func(r *Mirror) { r.State = meta.MirrorRunning })
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		wait(ctx)
		if err := <-ended; meta.KindOf(err) != meta.Interrupted {
			t.Errorf("after a minute: %v", err)
		}
	})
}

// bareVolume is a volume without policy and chunks.
func bareVolume(c *Client, id meta.VolumeID) *Volume {
	v := &Volume{c: c, id: id}
	v.lodge(newNames())
	return v
}
