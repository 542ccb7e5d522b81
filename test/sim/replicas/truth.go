package replicas

import (
	"bytes"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// truth has the state that no node knows as a whole: every promise of the system to a
// client.
type truth struct {
	w      *world
	chunks []*fact
	files  []*file
	dirty  []int // chunks touched by the present event
	round  int
}

// fact is the truth about one chunk.
type fact struct {
	acked    []byte // bytes that all replicas acknowledged to the writer
	promised uint64 // length for which a sync returned
	sealed   []byte // the chunk's content, once journaled
	isSealed bool
	gone     bool
	rude     bool // a successor of the writer appended, against rule 6
	granted  []meta.ServerID
	got      []uint64 // by server: greatest length ever
	broken   []bool   // by server: a fault destroyed the bytes
}

// file has the bytes of a file for which syncs returned.
type file struct {
	id   int
	data []byte
}

func (t *truth) touch(c int) { t.dirty = append(t.dirty, c) }

// committed: the journal has another entry.
func (t *truth) committed() {
	for c, rec := range t.w.journal.recs {
		if rec.State == meta.ChunkSealed && !t.chunks[c].isSealed {
			t.content(c, rec)
		}
	}
}

func (t *truth) handedOut(r *record) {
	if r.n != len(t.chunks) {
		t.w.fail("chunk %d is handed out after %d", r.n, len(t.chunks)-1)
	}
	t.chunks = append(t.chunks, &fact{granted: slices.Clone(r.Servers), broken: make([]bool, len(t.w.servers)), got: make([]uint64, len(t.w.servers))})
}

func (t *truth) unlinked(r *record) { t.chunks[r.n].gone = true }

// appending checks that no append of a fenced writer is taken. seen is the state that the
// replica told others, noted apart from the machine.
func (t *truth) appending(s *server, c int, f meta.Fence, r *rep) {
	t.touch(c)
	if f.Less(r.seen) {
		t.w.fail("%s takes an append to chunk %d from a fenced writer: %v after %v", s.name, c, f, r.seen)
	}
}

// appended: a replica has more bytes.
func (t *truth) appended(s *server, c int, off uint64, r *rep) {
	k := t.chunks[c]
	k.got[s.i] = max(k.got[s.i], r.Length)
	if off == 0 && k.promised == 0 {
		k.broken[s.i] = false // the replica begins anew
	}
}

// durable checks a replica's durable state before the replica reports it.
func (t *truth) durable(s *server, c int, r *rep) {
	t.touch(c)
	if r.seen.Less(r.Fence) {
		r.seen = r.Fence
	}
	if r.Fence.Less(r.seen) {
		t.w.fail("%s forgot fence %v of chunk %d: %v", s.name, r.seen, c, r.Fence)
	}
}

// sealing checks that the sealed content of a replica is the journal's.
func (t *truth) sealing(s *server, c int, r *rep) {
	t.touch(c)
	k := t.chunks[c]
	if rec := t.w.journal.recs[c]; !k.isSealed && rec.State == meta.ChunkDeleting && rec.Length == r.Length {
		return // the chunk has no references
	}
	if !k.isSealed {
		t.w.fail("%s cuts chunk %d at %d before the journal says so", s.name, c, r.Length)
		return
	}
	if !bytes.Equal(r.data, k.sealed) && !(r.rot > 0 && len(r.data) == len(k.sealed)) {
		t.w.fail("%s seals chunk %d with %d bytes that are not its content", s.name, c, len(r.data))
		return
	}
	k.got[s.i] = max(k.got[s.i], r.Length)
	if r.rot == 0 {
		k.broken[s.i] = false
	}
}

// deleting checks that the journal does not count on a deleted replica.
func (t *truth) deleting(s *server, c int, r *rep) {
	t.touch(c)
	rec := t.w.journal.recs[c]
	if rec.dropped || rec.State == meta.ChunkDeleting || !slices.Contains(rec.Servers, s.id()) {
		return
	}
	t.w.fail("%s deletes its replica of chunk %d, which the journal counts on", s.name, c)
}

// acked notes bytes that all replicas acknowledged to the writer.
func (t *truth) acked(c int, p []byte) {
	t.touch(c)
	k := t.chunks[c]
	n := min(len(p), len(k.acked))
	if !bytes.Equal(p[:n], k.acked[:n]) {
		t.w.fail("chunk %d: other bytes were acknowledged before", c)
	}
	if len(p) > len(k.acked) {
		k.acked = bytes.Clone(p)
		for _, id := range k.granted {
			if k.got[int(id)-1] < uint64(len(p)) {
				t.w.fail("chunk %d: %d bytes count as acknowledged, server %d never had more than %d", c, len(p), id, k.got[int(id)-1])
			}
		}
	}
}

// deciding checks a seal: it keeps the bytes that all replicas acknowledged, as long as
// an answering replica has them, and keeps synced bytes in any case.
func (t *truth) deciding(c int, q replica.Case, answers []replica.Answer, d replica.Decision) {
	k := t.chunks[c]
	if k.gone || k.isSealed {
		return // or a stopped owner has woken and decides; the journal will refuse
	}
	best := uint64(0)
	for i, a := range answers {
		if s := t.w.servers[int(q.Servers[i])-1]; a.Reach == replica.Answered && !a.Damaged && !k.broken[s.i] {
			best = max(best, a.Length)
		}
	}
	if d.Length < min(best, uint64(len(k.acked))) {
		t.w.fail("chunk %d is to be sealed at %d, %d bytes were acknowledged and a replica has %d", c, d.Length, len(k.acked), best)
	}
}

// lost says whether no answer can have all promised bytes.
func (t *truth) lost(c int, answers []replica.Answer) bool {
	k := t.chunks[c]
	best := uint64(0)
	for _, a := range answers {
		if !a.Damaged {
			best = max(best, a.Length)
		}
	}
	return k.gone || best >= k.promised
}

// promised notes that a sync of a file returned for the first pos bytes.
func (t *truth) promised(c *writer, pos uint64) {
	t.w.res.Promises++
	if c.rec != nil && pos > c.base {
		n := pos - c.base
		k := t.chunks[c.rec.n]
		if k.isSealed && !k.gone && n > uint64(len(k.sealed)) {
			t.w.fail("a sync returns for %d bytes of chunk %d, which was sealed at %d", n, c.rec.n, len(k.sealed))
		}
		if n > k.promised {
			k.promised = n
			if n > uint64(len(k.acked)) {
				k.acked = bytes.Clone(c.buf[c.base:pos])
			}
		}
		t.touch(c.rec.n)
	}
	for _, f := range t.files {
		if f.id == c.file {
			f.data = bytes.Clone(c.buf[:pos])
			return
		}
	}
	t.files = append(t.files, &file{c.file, bytes.Clone(c.buf[:pos])})
}

// readBack checks that a read of committed bytes returned the written bytes.
func (t *truth) readBack(c int, off uint64, p []byte) {
	k := t.chunks[c]
	have := k.acked
	if k.isSealed {
		have = k.sealed
	}
	if end := off + uint64(len(p)); !k.gone && (end > uint64(len(have)) || !bytes.Equal(have[off:end], p)) {
		t.w.fail("a read of chunk %d at %d gives other bytes", c, off)
	}
}

// broken: a server's bytes of a chunk are taken by force.
func (t *truth) broken(c int, s *server) {
	if c < len(t.chunks) && t.chunks[c].got[s.i] > 0 {
		t.chunks[c].broken[s.i] = true
	}
}

// holds says whether a server has the promised bytes of a chunk, on its disk and
// undamaged.
func (t *truth) holds(c int, s *server) bool {
	k, r := t.chunks[c], s.peek(c)
	if !k.isSealed && k.promised == 0 {
		return !k.broken[s.i]
	}
	if r == nil || k.broken[s.i] || r.rot > 0 || r.Damaged {
		return false
	}
	if k.isSealed {
		return len(r.disk.data) >= len(k.sealed) && bytes.Equal(r.disk.data[:len(k.sealed)], k.sealed)
	}
	return r.disk.mark >= k.promised && bytes.Equal(r.disk.data[:k.promised], k.acked[:k.promised])
}

// spare says whether a fault may destroy a server's replica: another replica has all
// bytes.
func (t *truth) spare(c int, s *server) bool {
	if c >= len(t.chunks) {
		return true
	}
	k, mine := t.chunks[c], s.peek(c)
	if k.gone || mine == nil || mine.Length == 0 {
		return true
	}
	need := mine.disk.mark
	if mine.Fence.Seals > 0 {
		need = mine.Length // an owner may have the answer, and is about to journal this length
	}
	for _, o := range t.w.servers {
		if r := o.peek(c); o != s && r != nil && t.holds(c, o) && (k.isSealed || r.disk.mark >= need && bytes.Equal(r.disk.data[:need], mine.data[:need])) {
			return true
		}
	}
	return false
}

// step checks the chunks that the event touched, and one other chunk.
func (t *truth) step() {
	for _, c := range t.dirty {
		t.check(c)
	}
	t.dirty = t.dirty[:0]
	if n := len(t.chunks); n > 0 {
		t.round = (t.round + 1) % n
		t.check(t.round)
	}
}

// check compares one chunk with the promised bytes.
func (t *truth) check(c int) {
	w, k, rec := t.w, t.chunks[c], t.w.journal.recs[c]
	if rec.State == meta.ChunkSealed && !k.isSealed {
		t.content(c, rec)
	}
	for _, s := range w.servers {
		r := s.peek(c)
		if r == nil {
			continue
		}
		if err := r.Check(); err != nil {
			w.fail("%s, chunk %d: %v", s.name, c, err)
		}
		if uint64(len(r.data)) != r.Length {
			w.fail("%s, chunk %d: %d bytes, %d by the machine", s.name, c, len(r.data), r.Length)
		}
		if r.State == replica.Sealed && k.isSealed && r.rot == 0 && !r.Damaged && !bytes.Equal(r.data, k.sealed) {
			w.fail("%s has chunk %d sealed with another content", s.name, c)
		}
	}
	if k.gone || rec.dropped || rec.State == meta.ChunkDeleting {
		return
	}
	held := 0
	for _, s := range w.servers {
		if t.holds(c, s) {
			held++
			continue
		}
		if !slices.Contains(rec.Servers, s.id()) {
			continue
		}
		r := s.peek(c)
		if !k.broken[s.i] && (r == nil || r.rot == 0 && !r.Damaged) {
			if k.isSealed {
				w.fail("%s is a replica of chunk %d and has not its %d bytes", s.name, c, len(k.sealed))
			} else {
				w.fail("%s has not the %d bytes of chunk %d that a sync returned for", s.name, k.promised, c)
			}
		}
	}
	if held == 0 && (k.promised > 0 || len(k.sealed) > 0) {
		w.fail("chunk %d: nobody has what was promised, %d bytes, sealed %d", c, k.promised, len(k.sealed))
	}
	if rec.committed > 0 && k.isSealed && rec.committed > uint64(len(k.sealed)) {
		w.fail("chunk %d: extents refer to %d bytes, it was sealed at %d", c, rec.committed, len(k.sealed))
	}
}

// content notes the content with which a chunk was sealed.
func (t *truth) content(c int, rec *record) {
	k := t.chunks[c]
	for _, s := range t.w.servers {
		// Replicas out of service count, too: a fault may have destroyed a replica after
		// its answer.
		r := s.peek(c)
		if r == nil || k.broken[s.i] || r.rot > 0 || uint64(len(r.disk.data)) < rec.Length || crcOf(r.disk.data[:rec.Length]) != rec.CRC {
			continue
		}
		k.sealed, k.isSealed = bytes.Clone(r.disk.data[:rec.Length]), true
		break
	}
	if !k.isSealed {
		t.w.fail("chunk %d is sealed at %d, which nobody has on its disk", c, rec.Length)
		return
	}
	if k.promised > rec.Length && !k.gone {
		t.w.fail("chunk %d is sealed at %d, a sync returned for %d", c, rec.Length, k.promised)
		return
	}
	n := min(len(k.sealed), len(k.acked))
	if !bytes.Equal(k.sealed[:n], k.acked[:n]) {
		t.w.fail("chunk %d is sealed with other bytes than were acknowledged", c)
	}
	if crcOf(k.sealed) != rec.CRC {
		t.w.fail("chunk %d is sealed with checksum %08x, its bytes have %08x", c, rec.CRC, crcOf(k.sealed))
	}
}

// settled tells whether nothing is left to do.
func (t *truth) settled() bool { return t.unsettled() == "" }

func (t *truth) unsettled() string {
	for _, r := range t.w.journal.recs {
		switch {
		case r.dropped:
		case r.State == meta.ChunkOpen && t.w.journal.expired[r.session]:
			return fmt.Sprintf("chunk %d is still open", r.n)
		case r.State == meta.ChunkOpen:
			return fmt.Sprintf("chunk %d is still written to", r.n)
		case r.State == meta.ChunkDeleting:
			return fmt.Sprintf("chunk %d is not deleted", r.n)
		case len(r.Servers) != copies:
			return fmt.Sprintf("chunk %d has %d replicas", r.n, len(r.Servers))
		}
		for _, s := range t.w.servers {
			k := s.peek(r.n)
			here := k != nil && (k.State == replica.Open || k.State == replica.Sealed)
			switch member := !r.dropped && slices.Contains(r.Servers, s.id()); {
			case member && !here:
				return fmt.Sprintf("%s has not its replica of chunk %d", s.name, r.n)
			case member && (k.State != replica.Sealed || k.rot > 0 || k.Damaged):
				return fmt.Sprintf("%s has chunk %d %v, damaged %v", s.name, r.n, k.State, k.rot > 0)
			case !member && here:
				return fmt.Sprintf("%s has chunk %d for nothing", s.name, r.n)
			}
		}
	}
	return ""
}

// atRest checks the final state: every replica is in its place, and files read as synced.
func (t *truth) atRest() {
	if why := t.unsettled(); why != "" {
		for _, c := range t.w.writers {
			t.w.trace("%s: session %d, sealing %v, chunk %v, %v", c.name, c.session, c.sealing, c.rec, c.m)
		}
		for _, o := range t.w.owners {
			t.w.trace("%s: term %d of %d, active %v, busy %v", o.name, o.term, t.w.journal.term, o.active, o.busy)
		}
		t.w.fail("at rest %s", why)
		return
	}
	for c := range t.chunks {
		t.check(c)
	}
	for _, f := range t.files {
		t.read(f)
	}
}

// read compares a file with the bytes for which syncs returned, unless the file was
// unlinked.
func (t *truth) read(f *file) {
	var pos uint64
	for _, r := range t.w.journal.recs {
		if r.file != f.id || !r.used {
			continue
		}
		k := t.chunks[r.n]
		if k.gone {
			return
		}
		if r.base > pos {
			break
		}
		n := r.committed
		if r.base+n > pos {
			p, err := t.w.servers[int(r.Servers[0])-1].read(r.n, r.Fence, 0, n)
			if err != nil {
				t.w.fail("chunk %d can't be read at rest: %v", r.n, err)
				return
			}
			pos = r.base + n
			if at := min(pos, uint64(len(f.data))); at > r.base && !bytes.Equal(p[:at-r.base], f.data[r.base:at]) {
				t.w.fail("file %d: bytes [%d,%d) in chunk %d are not what was synced", f.id, r.base, at, r.n)
				return
			}
		}
	}
	if pos < uint64(len(f.data)) {
		t.w.fail("file %d: a sync returned for %d bytes, %d are there", f.id, len(f.data), pos)
	}
}
