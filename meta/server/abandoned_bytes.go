package server

import (
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// abandonedTold is how long health reports bytes that an operator gave up.
const abandonedTold = 24 * time.Hour

// abandonedBytes counts, by volume, the bytes not yet durable that an operator gave up, as
// reported by clients. The counts are lost when the server restarts.
type abandonedBytes struct {
	mu sync.Mutex
	m  map[meta.VolumeID]*abandonedOf
}

// abandonedOf counts the bytes given up of a volume. The count ends when no bytes were given
// up for abandonedTold.
type abandonedOf struct {
	files, bytes uint64
	by           string // the client of the last report
	at           time.Time
}

func (g *abandonedBytes) add(m *wire.GaveUp, by string, now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgetLocked(now)
	of := g.m[m.Volume]
	if of == nil {
		if g.m == nil {
			g.m = map[meta.VolumeID]*abandonedOf{}
		}
		of = &abandonedOf{}
		g.m[m.Volume] = of
	}
	of.files, of.bytes, of.by, of.at = of.files+m.Files, of.bytes+m.Bytes, by, now
}

// forgetLocked drops the counts older than abandonedTold. The caller holds mu.
func (g *abandonedBytes) forgetLocked(now time.Time) {
	for v, of := range g.m {
		if now.Sub(of.at) > abandonedTold {
			delete(g.m, v)
		}
	}
}

// told returns the counts to report, by volume.
func (g *abandonedBytes) told(now time.Time) map[meta.VolumeID]abandonedOf {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.forgetLocked(now)
	all := make(map[meta.VolumeID]abandonedOf, len(g.m))
	for v, of := range g.m {
		all[v] = *of
	}
	return all
}

func (of abandonedOf) tell(v *meta.VolumeHealth) {
	v.GivenUpFiles, v.GivenUpBytes, v.GivenUpBy, v.GivenUpAt = of.files, of.bytes, of.by, of.at
}

// gaveUp records a session's report of bytes that an operator gave up.
func (cl *clients) gaveUp(sess *session, m *wire.GaveUp) {
	cl.log.Error("an operator gave up bytes that a client had not made durable: the files are as of their last sync", "volume", m.Volume, "session", sess.name, "identity", sess.holder(), "files", m.Files, "bytes", m.Bytes)
	cl.abandoned.add(m, sess.name, time.Now())
}
