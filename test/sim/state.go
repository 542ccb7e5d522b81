package sim

import (
	"strings"

	"github.com/google/btree"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
)

type item struct {
	k string
	v []byte
}

// store is a volume's state at a position of the log.
type store struct {
	t   *btree.BTreeG[item]
	pos journal.Position
}

func newStore() *store {
	return &store{t: btree.NewG(16, func(a, b item) bool { return a.k < b.k })}
}

func (s *store) clone() *store { return &store{t: s.t.Clone(), pos: s.pos} }

func (s *store) Get(key []byte) ([]byte, bool, error) {
	i, ok := s.t.Get(item{k: string(key)})
	return i.v, ok, nil
}

func (s *store) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	s.t.AscendRange(item{k: string(lo)}, item{k: string(hi)}, func(i item) bool { return fn([]byte(i.k), i.v) })
	return nil
}

func (s *store) apply(pos journal.Position, effects []namespace.Effect) {
	for _, e := range effects {
		switch e.Kind {
		case namespace.Put:
			s.t.ReplaceOrInsert(item{string(e.Key), e.Value})
		case namespace.Delete:
			s.t.Delete(item{k: string(e.Key)})
		case namespace.DeleteRange:
			var gone []item
			s.t.AscendRange(item{k: string(e.Key)}, item{k: string(e.Value)}, func(i item) bool { gone = append(gone, i); return true })
			for _, i := range gone {
				s.t.Delete(i)
			}
		}
	}
	s.pos = pos
}

// pending is the newest value of a key, of an entry that is not in the store yet.
type pending struct {
	k   string
	v   []byte
	del bool
	seq meta.Seq
	by  meta.SessionID
}

// view is the state that one session's operation sees: pending effects over the store.
// view notes which entry must be durable before the answer may be sent (rule 13).
type view struct {
	o        *owner
	session  meta.SessionID
	counters bool
	wait     meta.Seq
}

func (w *view) note(p *pending) {
	if p.by == w.session || p.by == 0 || p.seq <= w.o.durable || w.o.w.cfg.Off.Wait {
		return
	}
	if len(p.k) == 1 && !w.counters {
		return // the volume's counters, read for the next inode number only
	}
	w.wait = max(w.wait, p.seq)
}

func (w *view) Get(key []byte) ([]byte, bool, error) {
	if p, ok := w.o.over.Get(&pending{k: string(key)}); ok {
		w.note(p)
		return p.v, !p.del, nil
	}
	return w.o.st.Get(key)
}

func (w *view) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	var over []*pending
	w.o.over.AscendRange(&pending{k: string(lo)}, &pending{k: string(hi)}, func(p *pending) bool { over = append(over, p); return true })
	more := true
	emit := func() {
		p := over[0]
		over = over[1:]
		w.note(p)
		if !p.del {
			more = fn([]byte(p.k), p.v)
		}
	}
	err := w.o.st.Scan(lo, hi, func(k, v []byte) bool {
		for more && len(over) > 0 && over[0].k < string(k) {
			emit()
		}
		if !more {
			return false
		}
		if len(over) > 0 && strings.Compare(over[0].k, string(k)) == 0 {
			emit()
			return more
		}
		more = fn(k, v)
		return more
	})
	for err == nil && more && len(over) > 0 {
		emit()
	}
	return err
}
