package journal

import (
	"context"
	"errors"
	"sync"

	"penstock.io/penstock/meta"
)

// Memory is the in-memory form: the log of one volume, shared by the owners and readers of a
// test. Intercept adds faults.
type Memory struct {
	volume meta.VolumeID

	mu       sync.Mutex
	records  []Record // ascending, dense
	cp       []byte
	revision int64 // of cp
	owner    int64 // fencing token: 0 nobody, else the token of the last taker
	taken    int64
	term     meta.Term
	pins     map[int64]meta.Seq
	hints    map[chan struct{}]struct{}
	full     bool
}

// NewMemory makes an empty log.
func NewMemory(v meta.VolumeID) *Memory {
	return &Memory{volume: v, pins: map[int64]meta.Seq{}, hints: map[chan struct{}]struct{}{}}
}

// Take makes the caller the owner: the previous owner is fenced from now on.
func (m *Memory) Take() (Store, meta.Term) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken++
	m.owner = m.taken
	m.term++
	return &memoryStore{m, m.owner}, m.term
}

// Reader returns a store without ownership.
func (m *Memory) Reader() Store { return &memoryStore{m, -1} }

// SetFull makes every write fail with NoSpace, as etcd's alarm does.
func (m *Memory) SetFull(full bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.full = full
}

// Damage replaces the bytes of a record behind the log's back; a nil value removes the record.
func (m *Memory) Damage(seq meta.Seq, value []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, r := range m.records {
		if r.Seq != seq {
			continue
		}
		if value == nil {
			m.records = append(m.records[:i:i], m.records[i+1:]...)
		} else {
			m.records[i].Value = value
		}
		return
	}
}

type memoryStore struct {
	m     *Memory
	token int64
}

// find returns the index of record seq, or the index at which it would be.
func (m *Memory) find(seq meta.Seq) (int, bool) {
	for i, r := range m.records {
		if r.Seq >= seq {
			return i, r.Seq == seq
		}
	}
	return len(m.records), false
}

func (s *memoryStore) Commit(ctx context.Context, seq meta.Seq, value []byte) (bool, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full {
		return false, meta.E("commit", meta.NoSpace, "", nil)
	}
	_, prev := m.find(seq - 1)
	_, there := m.find(seq)
	if m.owner != s.token || there || seq > 1 && !prev || seq == 1 && m.cp != nil {
		return false, nil
	}
	m.records = append(m.records, Record{seq, append([]byte(nil), value...)})
	for h := range m.hints {
		select {
		case h <- struct{}{}:
		default:
		}
	}
	return true, nil
}

func (s *memoryStore) Inspect(ctx context.Context, seq meta.Seq) (Inspection, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	in := Inspection{Owned: m.owner == s.token}
	_, in.Prev = m.find(seq - 1)
	if i, ok := m.find(seq); ok {
		in.Value = m.records[i].Value
	}
	return in, nil
}

func (s *memoryStore) Range(ctx context.Context, from meta.Seq, limit int) ([]Record, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	i, _ := m.find(from)
	var recs []Record
	for _, r := range m.records[i:min(len(m.records), i+limit)] {
		recs = append(recs, Record{r.Seq, append([]byte(nil), r.Value...)})
	}
	return recs, nil
}

func (s *memoryStore) Last(ctx context.Context) (Record, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.records) == 0 {
		return Record{}, nil
	}
	return m.records[len(m.records)-1], nil
}

func (s *memoryStore) Checkpoint(ctx context.Context) ([]byte, int64, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.m.cp, s.m.revision, nil
}

func (s *memoryStore) PutCheckpoint(ctx context.Context, rev int64, value []byte) (bool, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full {
		return false, meta.E("put checkpoint", meta.NoSpace, "", nil)
	}
	if m.owner != s.token || m.revision != rev {
		return false, nil
	}
	m.cp, m.revision = append([]byte(nil), value...), rev+1
	return true, nil
}

func (s *memoryStore) DeleteBefore(ctx context.Context, seq meta.Seq) error {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	if i, _ := m.find(seq); i == len(m.records) && i > 0 {
		return meta.E("delete", meta.Invalid, "", errors.New("the last entry is never trimmed"))
	} else if i > 0 {
		m.records = append([]Record(nil), m.records[i:]...)
	}
	return nil
}

func (s *memoryStore) Pin(ctx context.Context, seq meta.Seq) (func(context.Context) error, error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken++
	id := m.taken
	m.pins[id] = seq
	return func(context.Context) error {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.pins, id)
		return nil
	}, nil
}

func (s *memoryStore) OldestPin(ctx context.Context) (seq meta.Seq, ok bool, err error) {
	m := s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.pins {
		if !ok || p < seq {
			seq, ok = p, true
		}
	}
	return seq, ok, nil
}

func (s *memoryStore) Hint(ctx context.Context) <-chan struct{} {
	m := s.m
	h := make(chan struct{}, 1)
	m.mu.Lock()
	m.hints[h] = struct{}{}
	m.mu.Unlock()
	context.AfterFunc(ctx, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.hints, h)
	})
	return h
}
