package server

import (
	"fmt"
	"net"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// hostile is a client with its own frames, which may claim anything.
type hostile struct {
	t  *testing.T
	nc net.Conn
	rd *wire.Reader
	n  uint64
}

// dialHostile says hello as a session, and enters the first volume; the owner asks for the claim.
func (s *site) dialHostile(id meta.SessionID, known bool) (h *hostile, session meta.SessionID, claim bool) {
	t := s.t
	t.Helper()
	nc, err := net.Dial("unix", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(2 * time.Minute))
	h = &hostile{t: t, nc: nc, rd: wire.NewReader(nc), n: uint64(time.Now().UnixNano())}
	var hello wire.Hello
	h.ask(&wire.Hello{Min: wire.Version, Max: wire.Version, Role: wire.RoleClient, Name: "hostile", Session: id, Resumed: known}, wire.THello, &hello)
	var e wire.Entered
	h.ask(&wire.Enter{Volume: 1, Known: known}, wire.TEntered, &e)
	if e.Status.Err != meta.KindOK || known != e.Known && known {
		t.Fatalf("%+v", e)
	}
	return h, hello.Session, e.Claim
}

// ask sends a frame and waits for the answer of a type.
func (h *hostile) ask(m wire.Message, typ wire.Type, re wire.Message) {
	h.t.Helper()
	h.n++
	if _, err := h.nc.Write(wire.Append(nil, wire.Version, h.n, m)); err != nil {
		h.t.Fatal(err)
	}
	for {
		got, id, body, err := h.rd.Next()
		if err != nil {
			h.t.Fatal(err)
		}
		if got == typ && (id == h.n || typ == wire.THello) {
			if err := wire.Decode(body, re); err != nil {
				h.t.Fatal(err)
			}
			return
		}
	}
}

// call makes an operation under a new number, and says whether the operation is a replay.
func (h *hostile) call(op meta.Op, replay bool) *wire.Reply {
	h.t.Helper()
	re := new(wire.Reply)
	h.n++
	h.ask(&wire.Call{Volume: 1, ID: meta.OpID{Incarnation: 99, Unique: h.n}, Op: op, Replay: replay}, wire.TReply, re)
	return re
}

// create makes a file that claims to have had a number.
func (h *hostile) create(name string, ino meta.Ino, replay bool) *wire.Reply {
	h.t.Helper()
	op := newFile(name)
	op.Ino = ino
	return h.call(op, replay)
}

// A client that calls its operations replays evades no quota, except in the time in which an
// owner can't know better: after the owner took the volume, until the session reports that the
// session is back. And the client takes inode numbers in that time alone, and only numbers that
// the previous owner may have given the client, so that the client can't use the numbers up.
func TestClaimedReplays(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a := s.dial("a")
	if _, err := a.SetVolume(t.Context(), 1, meta.Policy{Replicas: 1, QuotaInodes: 3}, meta.VolumeWords{}); err != nil {
		t.Fatal(err)
	}
	h, id, claim := s.dialHostile(0, false)
	if claim {
		t.Fatal("a new session is asked for claims")
	}
	first := h.create("first", 0, false)
	if first.Status.Err != meta.KindOK {
		t.Fatalf("%+v", first.Status)
	}
	last := first.Result.Attr.Ino
	refused := func(what string, re *wire.Reply) {
		t.Helper()
		if re.Status.Err != meta.NotPermitted {
			t.Errorf("%s: %+v", what, re.Status)
		}
	}
	outside := func(when string) {
		t.Helper()
		refused("a replay "+when, h.create("replay "+when, 0, true))
		refused("a replay with a number "+when, h.create("number "+when, last+1, true))
		refused("a number "+when, h.create("no replay "+when, last+1, false))
		timed := newFile("time " + when)
		timed.Time = 1
		refused("a time "+when, h.call(timed, false))
		refused("an unnamed file with a number "+when, h.call(&meta.Tmpfile{Parent: meta.RootIno, Mode: 0o600, Ino: last + 1}, false))
		refused("an unnamed replay "+when, h.call(&meta.Tmpfile{Parent: meta.RootIno, Mode: 0o600}, true))
	}
	outside("in a new session")
	if re := h.create("second", 0, false); re.Status.Err != meta.KindOK {
		t.Fatalf("%+v", re.Status)
	}
	if re := h.create("third", 0, false); re.Status.Err != meta.QuotaExceeded {
		t.Fatalf("beyond the quota: %+v", re.Status)
	}
	last++
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}

	s.crash()
	s.start()
	h, _, claim = s.dialHostile(id, true)
	if !claim {
		t.Fatal("the session is not asked for what it had")
	}
	for _, ino := range []meta.Ino{meta.RootIno, last + replayReach + 1, meta.MaxIno} {
		refused(fmt.Sprint("inode ", ino, " after ", last), h.create(fmt.Sprint("n", ino), ino, true))
	}
	if re := h.create("used", last, true); re.Status.Err != meta.Again {
		t.Errorf("a number that is in use: %+v", re.Status)
	}
	refused("a number without a replay", h.create("n", last+1, false))
	// The number that the client was told before the crash, as far as the owner knows.
	if re := h.create("kept", last+3, true); re.Status.Err != meta.KindOK || re.Result.Attr.Ino != last+3 {
		t.Errorf("a replay: %+v", re)
	}
	last += 3
	if _, err := h.nc.Write(wire.Append(nil, wire.Version, 0, &wire.Back{Volume: 1})); err != nil {
		t.Fatal(err)
	}
	outside("of a session that is back")
	if re := h.create("beyond", 0, false); re.Status.Err != meta.QuotaExceeded {
		t.Errorf("beyond the quota: %+v", re.Status)
	}
}

// Two sessions were told of numbers that no journal has. The next owner takes the replays of the
// session with the higher numbers, and dies; the other session replays to the owner after that.
func TestPassedOverNumbers(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	late, lateID, _ := s.dialHostile(0, false)
	early, earlyID, _ := s.dialHostile(0, false)
	if re := late.create("late-first", 0, false); re.Status.Err != meta.KindOK {
		t.Fatalf("%+v", re.Status)
	}
	re := early.create("early-first", 0, false)
	if re.Status.Err != meta.KindOK {
		t.Fatalf("%+v", re.Status)
	}
	last := re.Result.Attr.Ino
	sync := func(h *hostile) {
		t.Helper()
		re := new(wire.Reply)
		h.ask(&wire.Sync{Volume: 1, Seq: wire.SyncAll}, wire.TReply, re)
		if re.Status.Err != meta.KindOK {
			t.Fatalf("%+v", re.Status)
		}
	}
	sync(early)

	s.crash()
	s.start()
	early, _, claim := s.dialHostile(earlyID, true)
	if re := early.create("early", last+2, true); !claim || re.Status.Err != meta.KindOK {
		t.Fatalf("claims: %v; a replay: %+v", claim, re.Status)
	}
	sync(early)

	s.crash()
	s.start()
	late, _, claim = s.dialHostile(lateID, true)
	re = late.create("late", last+1, true)
	if !claim || re.Status.Err != meta.KindOK || re.Result.Attr.Ino != last+1 {
		t.Errorf("DATA: a file that a session was told of is refused (claims: %v): %+v", claim, re.Status)
	}
}

// The numbers that an owner believes.
func TestReplayReach(t *testing.T) {
	const next = 10 * replayReach
	r := replays{next: next}
	for ino, want := range map[meta.Ino]bool{
		0: true, meta.RootIno: false, 2: false, next - replayReach: false, next - replayReach + 1: true,
		next: true, next + replayReach - 1: true, next + replayReach: false, meta.MaxIno: false,
	} {
		if err := r.check(ino); (err == nil) != want {
			t.Errorf("inode %d, the next is %d: %v", ino, next, err)
		}
	}
}
