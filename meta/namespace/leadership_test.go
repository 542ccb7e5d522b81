package namespace

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"penstock.io/penstock/meta"
)

// TestLeadership compares random leaderships of two sessions over files that come and go,
// snapshots and rollbacks with a model: at most one leader for a file, epochs that grow for
// ever, and changes within a leadership (meta.Led) while it lasts and at no other time.
func TestLeadership(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	f := newFixture(t)
	sessions := []meta.SessionID{testSession, otherSess}
	type led struct {
		epoch   uint64
		session meta.SessionID
		address string
	}
	model := map[meta.Ino]led{}
	last := uint64(0)
	var inos []meta.Ino
	for i := range 6 {
		inos = append(inos, f.file(fmt.Sprint(i)))
	}
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "a"}).Off)
	within, refused := 0, 0
	for i := range 800 {
		f.session = sessions[rng.IntN(2)]
		ino := inos[rng.IntN(len(inos))]
		switch now, have := model[ino]; rng.IntN(10) {
		case 0, 1, 2, 3:
			address := fmt.Sprint("host:", i)
			res, err := f.try(&meta.Lead{Ino: ino, Address: address})
			if _, gone := Query(f.s, f.ctx(), &meta.GetAttr{Ino: ino}); meta.KindOf(gone) == meta.Stale {
				// The file was removed, maybe while a session led it: the last session that held it ended.
				if meta.KindOf(err) != meta.Stale {
					t.Fatalf("step %d: a removed file is led: %v", i, err)
				}
				break
			}
			if have && now.session != f.session {
				if meta.KindOf(err) != meta.Busy {
					t.Fatalf("DATA: step %d: a second leader: %v", i, err)
				}
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if res.Off <= last {
				t.Fatalf("DATA: epoch %d after epoch %d", res.Off, last)
			}
			last = res.Off
			model[ino] = led{last, f.session, address}
		case 4:
			f.do(&meta.EndLead{Ino: ino, Epoch: now.epoch})
			if have && now.session == f.session {
				delete(model, ino)
			}
		case 5:
			f.do(&meta.EndLead{Ino: ino, Epoch: now.epoch + 1}) // of another leadership
		case 8, 9:
			led := meta.Led{Ino: ino, Epoch: now.epoch}
			if !have || rng.IntN(4) == 0 {
				led.Epoch = 1 + rng.Uint64N(last+1)
			}
			_, err := f.try(f.ledChange(i, led))
			lasts := have && now.session == f.session && now.epoch == led.Epoch
			if lasts != (err == nil) || err != nil && meta.KindOf(err) != meta.Fenced {
				t.Fatalf("DATA: step %d: a change of session %d within %+v: %v; the leader is %+v %v", i, f.session, led, err, now, have)
			}
			if lasts {
				within++
			} else {
				refused++
			}
		case 6:
			for from := uint64(0); ; {
				res := f.do(&meta.SessionEnd{Session: f.session, From: meta.Ino(from)})
				if from = res.Off; res.EOF {
					break
				}
			}
			for ino, l := range model {
				if l.session == f.session {
					delete(model, ino)
				}
			}
			f.do(&meta.SessionStart{Session: f.session, Name: "again"})
		case 7:
			if len(model) > 0 {
				break
			}
			f.try(&meta.Unlink{Parent: 1, Name: fmt.Sprint(rng.IntN(6))})
			if rng.IntN(2) == 0 {
				break
			}
			for _, s := range sessions {
				for from := uint64(0); ; {
					res := f.do(&meta.SessionEnd{Session: s, From: meta.Ino(from)})
					if from = res.Off; res.EOF {
						break
					}
				}
			}
			f.session = 0
			for from := []byte(nil); ; {
				res := f.do(&meta.Rollback{To: at, From: from})
				if from = res.Data; res.EOF {
					break
				}
			}
			for _, s := range sessions {
				f.do(&meta.SessionStart{Session: s, Name: "again"})
			}
		}
		for _, ino := range inos {
			res, err := Query(f.s, f.ctx(), &meta.Leader{Ino: ino})
			want, have := model[ino]
			if have != (err == nil) || have && (res.Off != want.epoch || string(res.Data) != want.address) {
				t.Fatalf("DATA: step %d: the leader of %d is %+v, %v; the model says %+v %v", i, ino, res, err, want, have)
			}
		}
		f.check()
	}
	if within < 10 || refused < 10 {
		t.Errorf("%d changes within a leadership, %d refused ones", within, refused)
	}
}

// ledChange makes a change within a leadership that no other rule refuses.
func (f *fixture) ledChange(step int, led meta.Led) meta.Op {
	name := fmt.Sprint("new", step)
	if step%4 > 1 {
		f.file(name)
	}
	switch step % 4 {
	case 0:
		return &meta.Create{Parent: 1, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true, Led: led}
	case 1:
		return &meta.SetAttr{Ino: 1, Mask: meta.SetMode, Mode: 0o755, Led: led}
	case 2:
		return &meta.Rename{Parent: 1, Name: name, NewParent: 1, NewName: name + "b", Led: led}
	default:
		return &meta.Unlink{Parent: 1, Name: name, Led: led}
	}
}

// TestLeadNeedsAClosedEnd: a new leader knows the end of the file.
func TestLeadNeedsAClosedEnd(t *testing.T) {
	f := newFixture(t)
	ino := f.file("log")
	c := f.chunks(1, true)[0]
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Len: 50, Chunk: c, OpenEnded: true}}})
	f.fails(meta.Busy, &meta.Lead{Ino: ino})
	f.seal(c, 70)
	f.do(&meta.Lead{Ino: ino})
	if size := f.attr(ino).Size; size != 70 {
		t.Fatalf("DATA: %d bytes of 70", size)
	}
	f.fails(meta.Invalid, &meta.Lead{Ino: f.file("other"), Address: string(make([]byte, meta.MaxLeaderAddress+1))})
	f.fails(meta.IsDir, &meta.Lead{Ino: 1})
}

// TestLeaderDamage: fsck sees a leader without a session, and epochs out of order.
func TestLeaderDamage(t *testing.T) {
	f := newFixture(t)
	a, b := f.file("a"), f.file("b")
	f.do(&meta.Lead{Ino: a, Address: "one"})
	f.do(&meta.Lead{Ino: b})
	f.check()
	for _, bad := range []memItem{
		{lastEpochKey, appendLastEpoch(nil, 1)},
		{appendLeaderKey(nil, a), appendLeader(nil, &leader{epoch: 3, session: testSession})},
		{appendLeaderKey(nil, a), appendLeader(nil, &leader{epoch: 2, session: testSession})},
		{appendLeaderKey(nil, a), appendLeader(nil, &leader{epoch: 1, session: 77})},
	} {
		was, _, _ := f.s.Get(bad.k)
		was = bytes.Clone(was)
		f.s.t.ReplaceOrInsert(bad)
		if r, err := Check(f.s); err != nil || len(r.Problems) == 0 {
			t.Errorf("%x %x: fsck sees nothing: %v", bad.k, bad.v, err)
		}
		f.s.t.ReplaceOrInsert(memItem{bad.k, was})
	}
	f.check()
}

func FuzzLeader(f *testing.F) {
	f.Add(appendLeader(nil, &leader{epoch: 1, session: 2, address: "host:1"}))
	f.Add(appendLeader(nil, &leader{epoch: 1 << 60, session: 1 << 63}))
	f.Add(appendLastEpoch(nil, 300))
	f.Fuzz(func(t *testing.T, b []byte) {
		for what, again := range map[string]func() ([]byte, error){
			"leader": func() ([]byte, error) { l, err := decodeLeader(b); return appendLeader(nil, &l), err },
			"epoch":  func() ([]byte, error) { e, err := decodeLastEpoch(b); return appendLastEpoch(nil, e), err },
		} {
			switch v, err := again(); {
			case err != nil:
				if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
					t.Fatalf("%s: kind %v", what, k)
				}
			case len(v) > len(b):
				t.Fatalf("%s: %x became %x", what, b, v)
			}
		}
	})
}
