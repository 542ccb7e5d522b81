package server

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// maxNews bounds the kept events; a stream with older unacknowledged events must list.
const maxNews = 8192

// news are events, sent to each stream until the stream acknowledges the events.
type news struct {
	mu         sync.Mutex
	generation uint64
	seq        uint64
	events     []meta.ReplicaEvent // oldest first
	more       chan struct{}       // closed and replaced at each event
}

func newGeneration() uint64 {
	var b [8]byte
	rand.Read(b[:])
	return binary.LittleEndian.Uint64(b[:]) | 1 // never zero
}

func (n *news) begin() { n.generation, n.more = newGeneration(), make(chan struct{}) }

// add adds an event; with relist, earlier lists prove nothing any more.
func (n *news) add(e meta.ReplicaEvent, relist bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.seq++
	e.Seq = n.seq
	if len(e.Detail) > 512 {
		e.Detail = e.Detail[:512]
	}
	n.events = append(n.events, e)
	if len(n.events) > maxNews {
		n.events = append(n.events[:0], n.events[maxNews/2:]...)
		relist = true // a stream may have missed the dropped event
	}
	if relist {
		n.generation = newGeneration()
	}
	close(n.more)
	n.more = make(chan struct{})
}

// Generation changes whenever an earlier list may be wrong in ways that no event tells.
func (s *Server) Generation() uint64 {
	s.news.mu.Lock()
	defer s.news.mu.Unlock()
	return s.news.generation
}

// Events returns at most most events after an acknowledged one, oldest first.
func (s *Server) Events(after uint64, most int) []meta.ReplicaEvent {
	s.news.mu.Lock()
	defer s.news.mu.Unlock()
	all := s.news.events
	for len(all) > 0 && all[0].Seq <= after {
		all = all[1:]
	}
	return append([]meta.ReplicaEvent(nil), all[:min(len(all), most)]...)
}

// More is closed at the next event.
func (s *Server) More() <-chan struct{} {
	s.news.mu.Lock()
	defer s.news.mu.Unlock()
	return s.news.more
}

// badReplica is called by stores for chunks with wrong checksums and for unreadable chunks.
func (s *Server) badReplica(d *disk, id meta.ChunkID, err error) {
	if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
		d.mu.Lock()
		if d.unreadable == nil {
			d.unreadable = map[meta.ChunkID]struct{}{}
		}
		_, known := d.unreadable[id]
		if len(d.unreadable) < 1<<16 {
			d.unreadable[id] = struct{}{}
		}
		d.mu.Unlock()
		if known {
			return
		}
	}
	s.slog.Error("a replica is bad", "chunk", id.String(), "disk", d.id, "path", d.path, "error", err)
	s.news.add(meta.ReplicaEvent{Kind: meta.EventCorrupt, Chunk: id, Disk: d.id, Detail: err.Error()}, false)
}

const (
	// watchEvery is how often disks are looked at, probeEvery how often a few
	// bytes are written to each and synced.
	watchEvery = 500 * time.Millisecond
	probeEvery = 5 * time.Second
	// hungAfter is how long a probe may take before the disk counts as failed, until the probe
	// ends.
	hungAfter = 20 * time.Second
	// A disk is slow when probes took longer than slowAfter slowProbes times in
	// a row, and no longer once as many did not.
	slowAfter  = 2 * time.Second
	slowProbes = 6
)

// watchDisks notices disks that fail, fill up, hang or are slow, and tells.
func (s *Server) watchDisks() {
	t := time.NewTicker(watchEvery)
	defer t.Stop()
	probes := map[*disk]*probe{}
	for {
		all := s.disks.list()
		for _, d := range all {
			p := probes[d]
			if p == nil {
				p = &probe{done: make(chan time.Duration, 1), next: time.Now().Add(probeEvery)}
				probes[d] = p
			}
			p.step(d, time.Now())
			s.told(d)
		}
		for d := range probes {
			if !contains(all, d) {
				delete(probes, d)
			}
		}
		s.scrubDisks()
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
	}
}

func contains(all []*disk, d *disk) bool {
	for _, x := range all {
		if x == d {
			return true
		}
	}
	return false
}

// told reports a disk whose state has changed.
func (s *Server) told(d *disk) {
	state, why := d.state()
	d.mu.Lock()
	was := d.last
	d.last = state
	d.mu.Unlock()
	good := func(x meta.DiskState) bool { return x == meta.DiskOK || x == meta.DiskFull }
	if state == was {
		return
	}
	switch e := (meta.ReplicaEvent{Disk: d.id, Detail: d.path + ": " + why}); {
	case good(state) && !good(was):
		s.slog.Info("disk serves", "disk", d.id, "path", d.path)
		e.Kind = meta.EventDiskBack
		s.news.add(e, true)
	case !good(state):
		s.slog.Error("disk "+state.String(), "disk", d.id, "path", d.path, "why", why)
		e.Kind = meta.EventDiskFailed
		s.news.add(e, true)
	default:
		s.slog.Warn("disk "+state.String(), "disk", d.id, "path", d.path)
	}
}

// probe is watchDisks' knowledge of one disk.
type probe struct {
	next    time.Time
	started time.Time // zero: none is under way
	done    chan time.Duration
	late    int // in a row
	intime  int
}

func (p *probe) step(d *disk, now time.Time) {
	select {
	case took := <-p.done:
		p.started = time.Time{}
		if took > slowAfter {
			p.late, p.intime = p.late+1, 0
		} else {
			p.late, p.intime = 0, p.intime+1
		}
		d.mu.Lock()
		d.hung = nil
		if p.late >= slowProbes {
			d.slow = fmt.Errorf("%d times in a row it took longer than %v to sync a few bytes, the last time %v", p.late, slowAfter, took.Round(time.Millisecond))
		} else if p.intime >= slowProbes {
			d.slow = nil
		}
		d.mu.Unlock()
	default:
	}
	if !p.started.IsZero() {
		if took := now.Sub(p.started); took > hungAfter {
			d.mu.Lock()
			if d.hung == nil {
				d.hung = errors.New("it does not answer: syncing a few bytes has taken more than " + hungAfter.String())
			}
			d.mu.Unlock()
		}
		return
	}
	st := d.st.Load()
	if st == nil || now.Before(p.next) {
		return
	}
	p.started, p.next = now, now.Add(probeEvery)
	// Nobody waits for this goroutine: a hanging disk may never answer.
	go func() {
		if _ = st.Probe(); st.Err() != nil { // the store keeps the error
			// Check that the disk can still be read. The store reports unreadable chunks.
			readSome(st)
		}
		p.done <- time.Since(now)
	}()
}

// readSome reads a little of some chunks.
func readSome(st *store.Store) {
	ctx := context.Background()
	tried := 0
	b := make([]byte, 1)
	for dir := range 256 {
		ids, err := st.DirAll(ctx, byte(dir))
		if err != nil {
			return // the next list shows the chunk
		}
		for _, id := range ids {
			if meta.KindOf(st.Read(ctx, id, b, 0)) != meta.NoSuchChunk {
				tried++
			}
			if tried >= 2*unreadableMost {
				return
			}
		}
	}
}

// orderDisk carries out OrderDisk.
func (s *Server) orderDisk(o meta.Order) error {
	if s.disks.cfg.Dir == "" {
		return meta.E("order", meta.NotSupported, o.Disk, errors.New("this server's disks are fixed"))
	}
	if o.Adopt {
		return s.disks.Replace(o.Disk)
	}
	return s.disks.Retire(o.Disk)
}
