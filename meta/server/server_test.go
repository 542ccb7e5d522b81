package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
)

func TestCreateIsSeenByOthersOnlyWhenDurable(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	r := a.create(t, "x")
	if a.mode(r.Attr.Ino) != meta.LeaseExclusive {
		t.Fatalf("the creator has lease %d, not an exclusive one", a.mode(r.Attr.Ino))
	}
	got := b.do(t, &meta.Lookup{Parent: meta.RootIno, Name: "x"}, meta.LeaseShared)
	if got.Attr.Ino != r.Attr.Ino {
		t.Fatalf("b sees inode %d, a made %d", got.Attr.Ino, r.Attr.Ino)
	}
	o := s.srv.hosted.opened(1)
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.ov.m) != 0 && o.durable < o.cur.seq-1 {
		t.Fatalf("b was answered while entry %d was not durable (%d is)", o.cur.seq, o.durable)
	}
	if a.mode(r.Attr.Ino) != meta.LeaseShared {
		t.Fatalf("after b's lookup a has lease %d, want shared", a.mode(r.Attr.Ino))
	}
}

func TestNamesAreRecalledBeforeTheyChange(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	if _, err := b.Do(t.Context(), 1, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "x"}, meta.LeaseShared); !errors.Is(err, meta.NotFound) {
		t.Fatal(err)
	}
	if b.mode(meta.RootIno) != meta.LeaseShared {
		t.Fatal("no lease with a negative answer")
	}
	b.mu.Lock()
	b.hold = true
	b.mu.Unlock()
	done := make(chan struct{})
	go func() { defer close(done); a.create(t, "x") }()
	select {
	case <-done:
		t.Fatal("the create did not wait for b to forget that there is no x")
	case <-time.After(100 * time.Millisecond):
	}
	b.mu.Lock()
	for _, d := range b.held {
		go d()
	}
	b.mu.Unlock()
	<-done
}

// TestReadTimesTakeNothingBack: sessions that read the same file each report their read time, and
// no session loses its cache of the file by the report. The file's writer is asked for the
// exclusive lease, as by any reader; and other times are changes like all others.
func TestReadTimesTakeNothingBack(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	made := a.create(t, "x").Attr
	read := func(at meta.Time) *meta.SetAttr {
		return &meta.SetAttr{Ino: made.Ino, Mask: meta.SetAtime | meta.SetCtime, Atime: at, Ctime: made.Ctime}
	}
	// modes demands the leases of a and b, by their own account and the owner's.
	modes := func(what string, wantA, wantB meta.LeaseMode) {
		t.Helper()
		o := s.srv.hosted.opened(1)
		o.mu.Lock()
		oa, ob := o.leases.Mode(s.srv.clients.session(a.ID()), made.Ino), o.leases.Mode(s.srv.clients.session(b.ID()), made.Ino)
		o.mu.Unlock()
		if a.mode(made.Ino) != wantA || b.mode(made.Ino) != wantB || oa != wantA || ob != wantB {
			t.Fatalf("after %s a has lease %v (the owner: %v), b %v (%v), not %v and %v", what, a.mode(made.Ino), oa, b.mode(made.Ino), ob, wantA, wantB)
		}
	}
	b.do(t, read(made.Ctime+1), meta.LeaseNone)
	modes("a read beside a writer", meta.LeaseShared, meta.LeaseNone)
	b.do(t, &meta.GetAttr{Ino: made.Ino}, meta.LeaseShared)
	for i := range 10 {
		for _, p := range []*peer{a, b} {
			at := made.Ctime + meta.Time(i+1)*meta.Time(25*time.Hour)
			if got := p.do(t, read(at), meta.LeaseNone).Attr; got.Atime != at || got.Ctime != made.Ctime {
				t.Fatalf("DATA: read at %v, it is %+v", at, got)
			}
		}
	}
	modes("reads", meta.LeaseShared, meta.LeaseShared)
	b.do(t, &meta.SetAttr{Ino: made.Ino, Mask: meta.SetAtime, Atime: made.Ctime}, meta.LeaseNone)
	modes("utimensat", meta.LeaseNone, meta.LeaseShared)
}

// The owner waits for a session that does not answer a recall until the session's lease ends, not
// longer.
func TestDeadSessionIsExpired(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second)
	a, b := s.dial("a"), s.dial("b")
	b.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseShared)
	b.mu.Lock()
	b.hold = true
	b.mu.Unlock()
	bs := s.srv.clients.session(b.ID())
	bs.renewed.Store(-int64(2 * DefaultCourtesy)) // as if no keep-alive had come
	began := time.Now()
	a.create(t, "x")
	// A keep-alive of b may have come after all; then the recall's bound counts.
	if d := time.Since(began); d > time.Minute {
		t.Fatalf("a waited %v for a dead session of 3 s", d)
	}
}

// A client that renews its lease but answers no recall does not delay other clients for ever.
func TestRecallIsNotWaitedForForEver(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second)
	a, b := s.dial("a"), s.dial("b")
	b.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseShared)
	b.mu.Lock()
	b.hold = true
	b.mu.Unlock()
	bs := s.srv.clients.session(b.ID())
	began := time.Now()
	a.create(t, "x")
	// On a loaded machine b's renewal may come too late, too: then its lease
	// ends the wait earlier than the recall's bound.
	if d := time.Since(began); d > time.Minute {
		t.Fatalf("a waited %v: b's lease is 3 s, and the recall's bound is 12 s", d)
	}
	if !bs.ended.Load() {
		t.Fatal("nobody waited for b, whose lease stands")
	}
	b.mu.Lock()
	b.hold = false
	b.mu.Unlock()
}

// A live client whose session ended learns of the end and goes on with a new session.
func TestExpiredClientHearsOfIt(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.crash()
	s.adjust = func(c *Config) { c.CommitDelay = time.Hour } // nothing is journaled unless somebody waits
	s.start()
	b := s.dial("b")
	made := b.create(t, "x").Attr.Ino
	s.srv.clients.endSession(s.srv.clients.session(b.ID()), errors.New("test"))
	deadline := time.Now().Add(time.Minute)
	for {
		_, err := b.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseShared)
		b.mu.Lock()
		expired := b.expired
		b.mu.Unlock()
		if err == nil && expired == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("expired %d times, last answer %v", expired, err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.mu.Lock()
	lost := slices.Clone(b.lost)
	b.mu.Unlock()
	if !slices.Equal(lost, []meta.Ino{meta.RootIno, made}) {
		t.Errorf("told that changes of inodes %v are lost, want %v", lost, []meta.Ino{meta.RootIno, made})
	}
	b.create(t, "y")
}

func TestEarlyRepliesSurviveTheServer(t *testing.T) {
	t.Parallel()
	for round := range 5 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			s := newSiteTTL(t, 10*time.Second)
			a := s.dial("a")
			made := map[string]meta.Ino{}
			for i := range 200 {
				name := fmt.Sprintf("f%d", i)
				made[name] = a.create(t, name).Attr.Ino
			}
			// The last files are surely not in the journal yet.
			s.crash()
			s.start()
			for name, ino := range made {
				r := a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseShared)
				if r.Attr.Ino != ino {
					t.Fatalf("%s is inode %d after the crash, was %d", name, r.Attr.Ino, ino)
				}
			}
			if a.expired != 0 {
				t.Fatal("the session expired")
			}
			if err := a.Sync(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			r, err := s.srv.checker.Fsck(t.Context(), 1)
			if err != nil || r.Count != 0 {
				t.Fatalf("DATA: fsck: %v %+v", err, r)
			}
			if r.Inodes != 201 {
				t.Fatalf("%d inodes, want 201", r.Inodes)
			}
		})
	}
}

func TestUnlinkedFileLivesWhileAnotherMayHaveItOpen(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "x").Attr.Ino
	b.do(t, &meta.Open{Ino: ino}, meta.LeaseShared)
	a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "x"}, meta.LeaseShared)
	a.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{ino}}, meta.LeaseNone)
	if r := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseShared); r.Attr.Nlink != 0 {
		t.Fatalf("nlink %d", r.Attr.Nlink)
	}
	b.mu.Lock()
	told := len(b.orphans) == 1 && b.orphans[0] == ino
	b.mu.Unlock()
	if !told {
		t.Fatalf("b was not told that it holds an orphan: %v", b.orphans)
	}
	b.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{ino}}, meta.LeaseNone)
	if _, err := b.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: ino}, meta.LeaseShared); !errors.Is(err, meta.Stale) && !errors.Is(err, meta.NotFound) {
		t.Fatalf("the orphan is still there: %v", err)
	}
}

// A session that is away when a file that the session may have open loses its last name learns of
// the removal on return: otherwise the session would hold the file, and its space, until the
// session ends.
func TestOrphansAreToldAgain(t *testing.T) {
	t.Parallel()
	for _, crash := range []bool{false, true} {
		t.Run(fmt.Sprintf("crash=%t", crash), func(t *testing.T) {
			s := newSite(t)
			a, b := s.dial("a"), s.dial("b")
			ino := a.create(t, "x").Attr.Ino
			b.do(t, &meta.Open{Ino: ino}, meta.LeaseShared)
			// Recalled, b stands at the inode without a lease: no session waits for b.
			a.do(t, &meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: meta.TypeRegular | 0o600}, meta.LeaseShared)
			away := s.srv.clients.session(b.ID())
			away.mu.Lock()
			conn := away.conn
			away.send = nil // messages to the session are lost, as in a partition
			away.mu.Unlock()
			a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "x"}, meta.LeaseShared)
			if err := a.Sync(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			if crash {
				s.crash()
				s.start()
			} else {
				conn.Close()
			}
			until(t, "b is told that it holds an orphan", func() bool {
				b.mu.Lock()
				defer b.mu.Unlock()
				return slices.Contains(b.orphans, ino)
			})
		})
	}
}

// Requests of a killed client, and requests that still waited, are not carried out after the
// client's connection is gone: other sessions have already seen that the requests were not.
func TestNothingIsDoneForTheKilled(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a, b := s.dial("a"), s.dial("b")
	ino := b.create(t, "x").Attr.Ino
	b.mu.Lock()
	b.hold = true // the owner asks for the session's lease, and the session takes its time
	b.mu.Unlock()
	chmod := &meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: meta.TypeRegular | 0o600}
	go a.Do(t.Context(), 1, meta.OpID{}, chmod, meta.LeaseNone)
	there := s.srv.clients.session(a.ID())
	until(t, "the call waits", func() bool {
		there.mu.Lock()
		defer there.mu.Unlock()
		return len(there.cancels) > 0
	})
	if err := os.Remove(s.addr); err != nil { // the session does not come back
		t.Fatal(err)
	}
	there.mu.Lock()
	conn := there.conn
	there.mu.Unlock()
	conn.Close()
	until(t, "the call is given up", func() bool {
		there.mu.Lock()
		defer there.mu.Unlock()
		return len(there.cancels) == 0
	})
	b.mu.Lock()
	held := b.held
	b.hold, b.held = false, nil
	b.mu.Unlock()
	for _, answer := range held {
		answer()
	}
	if r := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone); r.Attr.Mode&0o777 != 0o644 {
		t.Fatalf("mode %o", r.Attr.Mode)
	}
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// A drop that is lost with its connection leaves the owner with a lease that the client does not
// know: the client learns of the lease when the client asks again, or would never cache the inode
// any more.
func TestLeaseAfterALostDrop(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	ino := a.create(t, "x").Attr.Ino
	a.mu.Lock()
	clear(a.leases)
	a.mu.Unlock()
	there := s.srv.clients.session(a.ID())
	there.mu.Lock()
	conn := there.conn
	there.mu.Unlock()
	conn.Close() // the drop was on its way
	a.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
	if m := a.mode(ino); m != meta.LeaseExclusive {
		t.Fatalf("the client knows of lease %d", m)
	}
}

// A session that syncs while its replays wait is answered after the replays: no earlier entry has
// the replayed changes.
func TestSyncWaitsForReplays(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a := s.dial("a")
	s.srv.clients.mu.Lock()
	sess := s.srv.clients.sessions[a.ID()]
	s.srv.clients.mu.Unlock()
	waits, goOn := make(chan struct{}), make(chan struct{})
	sess.inOrder(1, func() { // as a waiting replay
		close(waits)
		<-goOn
	})
	<-waits
	defer close(goOn)
	for i := range 50 { // the session does not ask for changes known to be durable
		a.create(t, fmt.Sprint("y", i))
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		err := a.Sync(ctx, 1)
		cancel()
		if errors.Is(err, meta.Interrupted) {
			return // the sync waited
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Error("syncs overtake a replay")
}

// As long as no session wants anything of a volume, its sessions have longer to come back to the
// next owner, as their machines may be overloaded or stand still; a session that wants something
// waits no longer than ever.
func TestUnwantedSessionsHaveLonger(t *testing.T) {
	t.Parallel()
	for _, wants := range []string{"nobody", "a status", "a session", "a question"} {
		t.Run(wants, func(t *testing.T) {
			t.Parallel()
			const ttl = 2 * time.Second
			s := newSiteTTL(t, ttl)
			a := s.dial("a")
			a.create(t, "x")
			if err := a.Sync(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
			a.Leave()
			s.crash()
			s.start()
			began := time.Now()
			o, err := s.srv.hosted.ownerFor(t.Context(), 1)
			if err != nil {
				t.Fatal(err)
			}
			b, answered := s.dial("b"), make(chan error, 1)
			go func() {
				var err error
				switch wants {
				case "a session":
					_, err = b.Do(t.Context(), 1, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "x"}, meta.LeaseShared)
				case "a question":
					_, err = s.srv.checker.Fsck(t.Context(), 1)
				case "a status":
					for o.isRecovering() && err == nil {
						_, err = s.srv.repairs.RepairStatus(t.Context(), 0)
					}
				}
				answered <- err
			}()
			waits := wants == "nobody" || wants == "a status"
			for ; ; time.Sleep(10 * time.Millisecond) {
				o.mu.Lock()
				unwanted := o.unwanted()
				o.mu.Unlock()
				if unwanted == waits {
					break
				}
				if time.Since(began) > 60*time.Second {
					t.Fatalf("nobody wants it: %v", unwanted)
				}
			}
			select {
			case <-o.recovered:
			case <-time.After(60 * time.Second):
				t.Fatal("it is waited for for ever")
			}
			if took := time.Since(began); waits && took < 2*ttl {
				t.Errorf("it was waited for for %v of leases of %v", took, ttl)
			}
			if err := <-answered; err != nil {
				t.Error(err)
			}
		})
	}
}

func (o *owner) isRecovering() bool {
	select {
	case <-o.recovered:
		return false
	default:
		return true
	}
}

// While a session replays the removal of a file, another session that has the file open may not
// have come back yet: the new owner does not know of the open file, and keeps the file.
func TestReplayedUnlinkKeepsWhatOthersMayHaveOpen(t *testing.T) {
	t.Parallel()
	for round := range 5 {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			s := newSiteTTL(t, 10*time.Second)
			a, b := s.dial("a"), s.dial("b")
			ino := a.create(t, "x").Attr.Ino
			b.do(t, &meta.Open{Ino: ino}, meta.LeaseShared)
			back := make(chan struct{})
			b.mu.Lock()
			b.comeBack = back
			b.mu.Unlock()
			a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "x"}, meta.LeaseShared)
			s.crash() // most likely the removal is not in the journal yet
			s.start()
			for o := s.srv.hosted.opened(1); ; time.Sleep(time.Millisecond) {
				o.mu.Lock()
				_, waited := o.awaited[a.ID()]
				o.mu.Unlock()
				if !waited {
					break
				}
			}
			close(back)
			release := func(p *peer) {
				p.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{ino}}, meta.LeaseNone)
				if err := p.Sync(t.Context(), 1); err != nil {
					t.Fatal(err)
				}
			}
			release(a)
			if r := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseShared); r.Attr.Nlink != 0 {
				t.Fatalf("nlink %d", r.Attr.Nlink)
			}
			release(b)
			r, err := s.srv.checker.Fsck(t.Context(), 1)
			if err != nil || r.Count != 0 || r.Orphans != 0 {
				t.Fatalf("DATA: fsck: %v %+v", err, r)
			}
		})
	}
}

func TestLocksWait(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "x").Attr.Ino
	l := meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}
	if err := a.SetLock(t.Context(), 1, l, false); err != nil {
		t.Fatal(err)
	}
	if err := b.SetLock(t.Context(), 1, l, false); !errors.Is(err, meta.WouldBlock) {
		t.Fatalf("b got %v", err)
	}
	done := make(chan error)
	go func() { done <- b.SetLock(t.Context(), 1, l, true) }()
	time.Sleep(50 * time.Millisecond)
	u := l
	u.Type = meta.LockUnlock
	if err := a.SetLock(t.Context(), 1, u, false); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// An operation that changes nothing has nothing to journal: no caller waits for a journal.
func TestNoEffectsNoWait(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	o := s.srv.hosted.opened(1)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 3 {
		if err := o.leases.durably(ctx, &meta.SetPolicy{Policy: meta.Policy{Replicas: 1}}); err != nil {
			t.Fatal(err)
		}
	}
}

// lingering is a mount whose process is gone, and whose session stands for another process.
func (s *site) lingering(name string, use func(p *peer)) *session {
	s.t.Helper()
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
	var err error
	if p.Session, err = client.Dial(s.t.Context(), client.Config{Addrs: []string{"unix:" + s.addr}, Name: name, Handler: p, Linger: time.Hour, Succeeded: true}); err != nil {
		s.t.Fatal(err)
	}
	use(p)
	sess := s.srv.clients.session(p.ID())
	p.Leave()
	return sess
}

// goAway lets a session's lease run out.
func (s *site) goAway(sess *session) {
	s.t.Helper()
	sess.renewed.Store(int64(time.Since(s.srv.epoch) - 2*s.ttl))
	eventually(s.t, "the session lingers", func() error { return unless(sess.away.Load() || sess.ended.Load()) })
}

// looked waits until the server has looked at all sessions.
func (s *site) looked() {
	s.t.Helper()
	for range 2 { // a look that had begun may be over with the first
		p := s.dial("decoy")
		sess := s.srv.clients.session(p.ID())
		p.Leave()
		s.runOut(sess)
	}
}

// The owner's own background work ends no lingering session, does not wait for the session, and
// keeps no other client from the session's files.
func TestBackgroundEndsNobody(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 5*time.Second)
	other := s.dial("other")
	var ino meta.Ino
	sess := s.lingering("mount", func(p *peer) { ino = p.create(t, "x").Attr.Ino })
	o := s.srv.hosted.opened(1)
	stands := func(when string) {
		t.Helper()
		s.looked()
		if sess.ended.Load() {
			t.Fatal("it ended ", when)
		}
	}
	other.snapshot(t, "one") // the mount is asked, and does not answer
	o.mu.Lock()
	o.leases.Extend(-time.Hour)
	if _, out, _ := o.leases.Waits(); out != 1 {
		t.Errorf("%d recalls are out", out)
	}
	o.mu.Unlock()
	s.goAway(sess)
	stands("for a snapshot")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if late, err := o.leases.recallWriters(ctx, 0); late.files != 1 || err != nil {
		t.Errorf("a snapshot waits for it: %v, %v", late, err)
	}
	if _, err := o.compaction.swapped(ino, func() (meta.Op, error) { return nil, errors.New("its extents are moved") }); !errors.Is(err, meta.Again) {
		t.Error(err)
	}
	stands("since its extents were to be moved")

	sess.touch() // the server hears from the session again
	stands("since it was asked long ago")
	s.goAway(sess)
	if err := other.try(t, &meta.Open{Ino: ino}); err != nil {
		t.Fatal(err)
	}
	if !sess.ended.Load() {
		t.Error("it stands, though another client wanted what it held")
	}
}

// asksAgain has the owner recall again at once, in the background, the leases of a session that
// kept a lease.
func (o *owner) asksAgain() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.leases.RefusalRest = 0
}

// A client that can't commit its buffer gives nothing up for the owner's own background work: the
// work leaves the file, delays no client, and does not ask all the time. Another client that
// wants the file gets the file.
func TestMovingGivesNothingUp(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	a := s.dial("a")
	ino := a.create(t, "f").Attr.Ino
	holdOn := func(on bool) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.holdsOn = on
	}
	holdOn(true)
	o := s.srv.hosted.opened(1)
	moved := false
	move := func() error {
		_, err := o.compaction.swapped(ino, func() (meta.Op, error) {
			moved = true
			return nil, meta.E("move", meta.Stale, "", nil)
		})
		return err
	}
	for range 3 {
		if err := move(); !errors.Is(err, meta.Again) || moved {
			t.Fatalf("its extents were moved: %v, %v", moved, err)
		}
	}
	o.mu.Lock()
	if asked, out, blocks := o.leases.Waits(); asked != 1 || blocks != 0 || out != 0 || !o.compaction.heldBack {
		t.Errorf("asked %d times, %d wait, %d are asked still; held up: %v", asked, blocks, out, o.compaction.heldBack)
	}
	o.mu.Unlock()
	if a.mode(ino) != meta.LeaseExclusive || a.recalls != 0 {
		t.Fatalf("it has %v left after %d recalls", a.mode(ino), a.recalls)
	}
	a.do(t, &meta.Write{Ino: ino, Inline: true, Data: []byte("buffered"), Size: 8, Synced: true}, meta.LeaseNone)
	o.asksAgain()
	holdOn(false)
	if err := move(); !errors.Is(err, meta.Stale) || a.mode(ino) != meta.LeaseNone {
		t.Errorf("when it can commit: %v, it has %v", err, a.mode(ino))
	}
	a.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
	holdOn(true)
	o.mu.Lock()
	o.leases.RefusalRest = refusalRest
	o.mu.Unlock()
	if err := move(); !errors.Is(err, meta.Again) {
		t.Error(err)
	}
	if r := s.dial("b").do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive); string(r.Data) != "buffered" || a.mode(ino) != meta.LeaseNone {
		t.Errorf("DATA: another client sees %q", r.Data)
	}
	if o.leases.Refused(time.Now(), ino) {
		t.Error("it is taken for one that holds on still")
	}
}

// A session that the server hears from at the moment of a look is not away, and the time of its
// return is known.
func TestHeardOfAtTheLook(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 16*time.Second)
	sess := s.lingering("mount", func(p *peer) { p.create(t, "x") })
	if sess.touch(); sess.lapse() || sess.away.Load() {
		t.Error("it was heard of, and is away")
	}
	if sess.returned.Load() == 0 {
		t.Error("nothing tells when it came back")
	}
	sess.returned.Store(0)
	sess.renewed.Store(int64(time.Since(s.srv.epoch) - 2*s.ttl))
	if !sess.lapse() || !sess.away.Load() {
		t.Error("it was not heard of for long, and is not away")
	}
	sess.renewed.Store(int64(time.Since(s.srv.epoch))) // so far touch has come when the server looks
	eventually(t, "the server looks", func() error { return unless(!sess.away.Load()) })
	eventually(t, "it is noted when it came back", func() error { return unless(sess.returned.Load() > 0) })
}

// A session whose client asked to linger outlives its lease as long as no other session wants its
// leases, for a process that goes on with the session; and not a moment longer.
func TestLingering(t *testing.T) {
	t.Parallel()
	lock := func(ino meta.Ino) meta.Lock {
		return meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}
	}
	for _, c := range []struct {
		name   string
		linger time.Duration
		want   func(t *testing.T, other *peer, ino meta.Ino) error // nil: nobody wants anything
		ends   bool
	}{
		{"nobody wants anything", time.Hour, nil, false},
		{"nor did it ask", 0, nil, true},
		{"for long enough", 1500 * time.Millisecond, nil, true},
		{"a lease is wanted", time.Hour, func(t *testing.T, other *peer, ino meta.Ino) error {
			return other.try(t, &meta.Open{Ino: ino})
		}, true},
		{"a lock is wanted", time.Hour, func(t *testing.T, other *peer, ino meta.Ino) error {
			return other.SetLock(t.Context(), 1, lock(ino), true)
		}, true},
		{"a lock was wanted", time.Hour, func(t *testing.T, other *peer, ino meta.Ino) error {
			for {
				err := other.SetLock(t.Context(), 1, lock(ino), false)
				if !errors.Is(err, meta.WouldBlock) || t.Context().Err() != nil {
					return err
				}
				time.Sleep(20 * time.Millisecond)
			}
		}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newSiteWith(t, 3*time.Second, func(cfg *Config) { cfg.Courtesy = 1 })
			other := s.dial("other")
			p := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
			cfg := client.Config{Addrs: []string{"unix:" + s.addr}, Name: "mount", Handler: p, Linger: c.linger, Succeeded: true}
			var err error
			if p.Session, err = client.Dial(t.Context(), cfg); err != nil {
				t.Fatal(err)
			}
			ino := p.create(t, "x").Attr.Ino
			if err := p.SetLock(t.Context(), 1, lock(ino), false); err != nil {
				t.Fatal(err)
			}
			p.Leave()
			stands := func() bool { return s.srv.clients.session(p.ID()) != nil }
			if c.want != nil {
				// Beyond its lease, or the test would try a live session.
				eventually(t, "its lease is over", func() error {
					sess := s.srv.clients.session(p.ID())
					if sess == nil {
						return errors.New("there is no such session")
					}
					if idle := sess.idle(); idle <= s.ttl {
						return fmt.Errorf("it was heard of %v ago", idle)
					}
					return nil
				})
				if err := c.want(t, other, ino); err != nil {
					t.Fatal(err)
				}
			}
			if c.ends {
				eventually(t, "it ends", func() error {
					if stands() {
						return errors.New("it stands")
					}
					return nil
				})
				return
			}
			for begun := time.Now(); time.Since(begun) < 3*s.ttl; time.Sleep(20 * time.Millisecond) {
				if !stands() {
					t.Fatal("it ended, and nobody waited for it")
				}
			}
			cfg.Session, cfg.Joined, cfg.Generation = p.ID(), []meta.VolumeID{1}, 1
			next := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
			cfg.Handler = next
			if next.Session, err = client.Dial(t.Context(), cfg); err != nil {
				t.Fatal(err)
			}
			next.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseShared)
			if err := other.SetLock(t.Context(), 1, lock(ino), false); !errors.Is(err, meta.WouldBlock) {
				t.Errorf("another one gets the lock: %v", err)
			}
			next.mu.Lock()
			expired := next.expired
			next.mu.Unlock()
			if expired > 0 {
				t.Error("the successor hears that the session had ended")
			}
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			next.Close(ctx)
		})
	}
}
