package namespace

import (
	"bytes"
	"testing"

	"github.com/google/btree"

	"penstock.io/penstock/meta"
)

// memStore is an ordered map that implements Reader; Apply works as for the journal's
// followers.
type memStore struct{ t *btree.BTreeG[memItem] }

type memItem struct{ k, v []byte }

func newMemStore() *memStore {
	return &memStore{btree.NewG(32, func(a, b memItem) bool { return bytes.Compare(a.k, b.k) < 0 })}
}

func (m *memStore) Get(k []byte) ([]byte, bool, error) {
	it, ok := m.t.Get(memItem{k: k})
	return it.v, ok, nil
}

func (m *memStore) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	m.t.AscendRange(memItem{k: lo}, memItem{k: hi}, func(it memItem) bool { return fn(it.k, it.v) })
	return nil
}

func (m *memStore) apply(l []Effect) {
	for _, e := range l {
		switch e.Kind {
		case Put:
			m.t.ReplaceOrInsert(memItem{bytes.Clone(e.Key), bytes.Clone(e.Value)})
		case Delete:
			m.t.Delete(memItem{k: e.Key})
		case DeleteRange:
			var gone []memItem
			m.t.AscendRange(memItem{k: e.Key}, memItem{k: e.Value}, func(it memItem) bool {
				gone = append(gone, it)
				return true
			})
			for _, it := range gone {
				m.t.Delete(it)
			}
		}
	}
}

func (m *memStore) dump() []byte {
	var b []byte
	m.t.Ascend(func(it memItem) bool {
		b = appendBytes(appendBytes(b, it.k), it.v)
		return true
	})
	return b
}

const (
	testVolume  = meta.VolumeID(7)
	testSession = meta.SessionID(0x1111)
	otherSess   = meta.SessionID(0x2222)
)

// fixture is a volume under test, with a clock that advances with each operation. It
// replays all effects, coded and decoded as in the journal, on a second store.
type fixture struct {
	t       testing.TB
	s       *memStore
	replica *memStore
	now     meta.Time
	session meta.SessionID
	replay  bool
	// noStreams: the caller does not serve streams.
	noStreams bool
	last      []Effect
	journal   bool // entries are kept
	entries   [][]byte
}

func newFixture(t testing.TB) *fixture {
	f := &fixture{t: t, s: newMemStore(), replica: newMemStore(), now: 1_700_000_000_000_000_000, session: testSession}
	f.commit(Format(testVolume, f.now, 0o755, 0, 0, meta.Policy{Replicas: 1}))
	for _, s := range []meta.SessionID{testSession, otherSess} {
		f.do(&meta.SessionStart{Session: s, Name: "test", Host: "boot", PID: 1, Start: 2})
	}
	t.Cleanup(func() {
		if !t.Failed() {
			f.check()
		}
	})
	return f
}

// check verifies the volume, and that the effects alone give the same volume.
func (f *fixture) check() {
	f.t.Helper()
	rep, err := Check(f.s)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, p := range rep.Problems {
		f.t.Errorf("check: %v", p)
	}
	if !rep.OK() {
		f.t.FailNow()
	}
	if !bytes.Equal(f.s.dump(), f.replica.dump()) {
		f.t.Fatal("the effects replayed on a second store give other bytes")
	}
}

func (f *fixture) commit(l []Effect) {
	f.last = l
	f.s.apply(l)
	entry := AppendEffects(nil, l)
	if f.journal {
		f.entries = append(f.entries, entry)
	}
	back, err := DecodeEffects(entry)
	if err != nil {
		f.t.Fatalf("decode effects: %v", err)
	}
	f.replica.apply(back)
}

func (f *fixture) ctx() Context {
	return Context{Now: f.now, Session: f.session, Term: 3, Volume: testVolume, Replay: f.replay, NoStreams: f.noStreams}
}

func (f *fixture) try(op meta.Op) (*meta.Result, error) {
	f.t.Helper()
	if !op.Code().Mutates() {
		return Query(f.s, f.ctx(), op)
	}
	f.now++
	res, l, err := Execute(f.s, f.ctx(), op)
	if err != nil {
		if len(l) != 0 || res != nil {
			f.t.Fatalf("%T failed (%v) and yet has effects", op, err)
		}
		return nil, err
	}
	f.commit(l)
	return res, nil
}

func (f *fixture) do(op meta.Op) *meta.Result {
	f.t.Helper()
	res, err := f.try(op)
	if err != nil {
		f.t.Fatalf("%T %+v: %v", op, op, err)
	}
	return res
}

func (f *fixture) fails(want meta.Kind, op meta.Op) {
	f.t.Helper()
	if _, err := f.try(op); meta.KindOf(err) != want {
		f.t.Fatalf("%T %+v: error %v, want %v", op, op, err, want)
	}
}

func (f *fixture) create(parent meta.Ino, name string, mode uint32) meta.Attr {
	f.t.Helper()
	return f.do(&meta.Create{Parent: parent, Name: name, Mode: mode, Excl: true}).Attr
}

func (f *fixture) file(name string) meta.Ino {
	f.t.Helper()
	return f.create(meta.RootIno, name, meta.TypeRegular|0o644).Ino
}

func (f *fixture) mkdir(parent meta.Ino, name string) meta.Ino {
	f.t.Helper()
	return f.create(parent, name, meta.TypeDir|0o755).Ino
}

func (f *fixture) attr(ino meta.Ino) meta.Attr {
	f.t.Helper()
	return f.do(&meta.GetAttr{Ino: ino}).Attr
}

func (f *fixture) chunks(n int, own bool) []meta.ChunkID {
	f.t.Helper()
	op := &meta.AllocChunks{N: uint32(n), Own: own, Fence: meta.Fence{Term: 3}}
	for range n {
		op.Servers = append(op.Servers, []meta.ServerID{1})
	}
	var ids []meta.ChunkID
	for _, c := range f.do(op).Chunks {
		ids = append(ids, c.ID)
	}
	return ids
}
