package server

import (
	"os"
	"path/filepath"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// TestStoppedOwnersOrders: a stopped owner continues after another owner sent an order to
// this server: each of its orders with effects is refused, also after a restart of this
// server, and only for the volume with the new owner.
func TestStoppedOwnersOrders(t *testing.T) {
	f := &fabric{}
	dir, specs := t.TempDir(), mkdirs(t, 2)
	s := diskServer(t, f, 1, dir, specs...)
	data := random(1000, 1)
	if err := s.Append(ctx, id, fence, 0, data, chunkserver.CRC(data)); err != nil {
		t.Fatal(err)
	}
	order := func(v meta.VolumeID, term meta.Term, o meta.Order) meta.Kind {
		o.Owner, o.Term = v, term
		return s.Order(ctx, o).Err
	}
	late := func() {
		t.Helper()
		for _, o := range []meta.Order{
			{Kind: meta.OrderDelete, Chunk: id, Fence: meta.Fence{Term: 5, Seals: 9}},
			{Kind: meta.OrderSeal, Chunk: id, Fence: meta.Fence{Term: 5, Seals: 9}},
			{Kind: meta.OrderSeal, Chunk: id, Fence: meta.Fence{Term: 5, Seals: 9}, Final: true, Length: 10},
			{Kind: meta.OrderCopy, Chunk: meta.ChunkID{Volume: 1, Term: 5, Counter: 3}, From: id, Fence: meta.Fence{Term: 5}},
			{Kind: meta.OrderPull, Chunk: meta.ChunkID{Volume: 1, Term: 5, Counter: 3}, Fence: meta.Fence{Term: 5}},
		} {
			if k := order(1, 5, o); k != meta.Fenced {
				t.Errorf("order %d of an owner of before: %v", o.Kind, k)
			}
		}
		if k := order(1, 5, meta.Order{Kind: meta.OrderStat, Chunk: id}); k != meta.KindOK {
			t.Errorf("who asks only is answered: %v", k)
		}
		if i, err := s.Stat(ctx, id); err != nil || i.State != meta.ChunkOpen || i.Length != 1000 {
			t.Errorf("%+v, %v", i, err)
		}
	}
	if k := order(1, 5, meta.Order{Kind: meta.OrderStat, Chunk: id}); k != meta.KindOK {
		t.Fatal(k)
	}
	// The next owner only looks around.
	if k := order(1, 6, meta.Order{Kind: meta.OrderList, Volume: 1}); k != meta.KindOK {
		t.Fatal(k)
	}
	late()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = diskServer(t, f, 1, dir, specs...)
	late()
	if k := order(2, 1, meta.Order{Kind: meta.OrderDelete, Chunk: meta.ChunkID{Volume: 2, Term: 1, Counter: 1}, Fence: meta.Fence{Term: 1}}); k != meta.KindOK {
		t.Errorf("another volume: %v", k)
	}
	if k := order(0, 0, meta.Order{Kind: meta.OrderStat, Chunk: id}); k != meta.KindOK {
		t.Errorf("nobody's order: %v", k)
	}
	if k := order(1, 6, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: meta.Fence{Term: 6, Seals: 1}, Final: true, Length: 1000}); k != meta.KindOK {
		t.Errorf("the owner itself: %v", k)
	}
}

// TestTermsUnreadable: an unreadable file is begun anew, and a file of a later version
// stays.
func TestTermsUnreadable(t *testing.T) {
	for _, content := range []string{"{", `{"version": 2, "terms": "otherwise"}`, `{"version": 2, "terms": {}}`} {
		f := &fabric{}
		dir, specs := t.TempDir(), mkdirs(t, 1)
		path := filepath.Join(dir, termsFile)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		s := diskServer(t, f, 1, dir, specs...)
		for term, want := range []meta.Kind{meta.Fenced, meta.KindOK} {
			if term == 0 {
				s.Order(ctx, meta.Order{Kind: meta.OrderStat, Chunk: id, Owner: 1, Term: 1})
			}
			if k := s.Order(ctx, meta.Order{Kind: meta.OrderDelete, Chunk: id, Owner: 1, Term: meta.Term(term)}).Err; k != want {
				t.Errorf("%s: term %d: %v", content, term, k)
			}
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if later := content != "{"; later != (string(b) == content) {
			t.Errorf("%s became %s", content, b)
		}
	}
}
