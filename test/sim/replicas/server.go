package replicas

import (
	"bytes"
	"errors"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// server is a chunk server with one disk. The machine of meta/replica decides; the server
// here only stores the bytes, in memory and on the disk.
type server struct {
	node
	w    *world
	reps []*rep // by chunk
}

func (s *server) id() meta.ServerID { return meta.ServerID(s.i + 1) }

// rep is one replica: the machine, its present bytes, and the state that the disk would
// return after a loss of power.
type rep struct {
	replica.Replica
	data  []byte
	whole bool // the replica has every acknowledged byte
	busy  bool // a freeze, seal, delete or copy is not on the disk yet
	rot   int  // a flipped byte is at rot-1
	seen  meta.Fence

	disk  image
	marks int // syncs under way
}

// image is the durable state of one replica.
type image struct {
	state replica.State
	fence meta.Fence
	data  []byte
	mark  uint64
	bad   bool // found damaged
}

func (s *server) rep(c int) *rep {
	for len(s.reps) <= c {
		s.reps = append(s.reps, nil)
	}
	if s.reps[c] == nil {
		s.reps[c] = &rep{Replica: replica.Replica{Off: &s.w.cfg.Off.Off}}
	}
	return s.reps[c]
}

// peek returns the replica of a chunk, or nil. Unlike rep, peek makes no replica.
func (s *server) peek(c int) *rep {
	if c < len(s.reps) {
		return s.reps[c]
	}
	return nil
}

func crcOf(p []byte) uint32 {
	if len(p) == 0 {
		return 0
	}
	return chunkserver.SealCRC([]uint32{chunkserver.CRC(p)})
}

// flush returns the duration of a flush of the disk.
func (s *server) flush() int64 {
	if s.w.chance(20) {
		return 20 + s.w.rng.Int64N(100)
	}
	return 1 + s.w.rng.Int64N(3)
}

// append answers nil or why not.
func (s *server) append(c int, f meta.Fence, off uint64, p []byte, reply func(error)) {
	r := s.rep(c)
	if s.w.chance(2) {
		reply(meta.E("append", meta.BadCapability, "", replica.Expired))
		return
	}
	n := uint64(len(p))
	do, err := r.Append(f, off, n)
	if errors.Is(err, meta.Fenced) {
		s.w.res.Fenced++
	}
	switch {
	case err != nil:
	case do == replica.Compare:
		s.w.res.Repeats++
		if !bytes.Equal(r.data[off:off+n], p) {
			err = r.Differs(off)
		}
	case do == replica.Write:
		s.w.truth.appending(s, c, f, r)
		s.w.res.Appends++
		if off == 0 {
			r.whole = true
		}
		had := r.Length
		for uint64(len(r.data)) < off {
			r.data = append(r.data, 0xee)
		}
		r.data = append(r.data[:off:off], p...)
		r.Appended(f, off+n-had)
		s.w.truth.appended(s, c, off, r)
		s.w.mix(r.Length)
	}
	reply(err)
}

// put makes the first n bytes durable, with the mark of a sync.
func (r *rep) put(n uint64) {
	n = min(n, r.Length)
	r.SyncedTo(n)
	if n > r.disk.mark || r.disk.state != replica.Open {
		r.disk.data = bytes.Clone(r.data[:max(n, r.Synced)])
		r.disk.mark = max(n, r.Synced)
	}
	r.disk.state, r.disk.fence = r.State, r.Fence
}

// sync answers with the mark, or why not.
func (s *server) sync(c int, upTo uint64, reply func(uint64, error)) {
	r := s.rep(c)
	do, err := r.Sync(upTo)
	if err != nil {
		reply(0, err)
		return
	}
	if do == replica.Nothing {
		reply(r.Promise(upTo), nil)
		return
	}
	s.w.res.Syncs++
	to := r.Length
	r.marks++
	s.w.after(s.flush(), &s.node, func() {
		r.marks--
		if s.reps[c] != r || r.State != replica.Open {
			// Sealed, deleted or replaced meanwhile: ask again.
			s.sync(c, upTo, reply)
			return
		}
		r.put(to)
		s.w.truth.durable(s, c, r)
		reply(r.Promise(upTo), nil)
	})
}

// later runs do if no freeze, seal, delete or copy of the chunk is under way.
func (s *server) later(r *rep, do func()) bool {
	if !r.busy {
		return false
	}
	s.w.after(2, &s.node, do)
	return true
}

// freeze answers with the bytes that a seal could keep.
func (s *server) freeze(c int, f meta.Fence, at uint64, reply func(replica.Answer)) {
	r := s.rep(c)
	if s.later(r, func() { s.freeze(c, f, at, reply) }) {
		return
	}
	do, err := r.Freeze(f)
	switch {
	case errors.Is(err, meta.Fenced):
		reply(replica.Answer{Reach: replica.Superseded})
		return
	case err != nil:
		reply(replica.Answer{Reach: replica.Answered})
		return
	case r.State == replica.Sealed:
		reply(s.tell(r, 0))
		return
	case do == replica.Write:
		r.Frozen(f)
	}
	if r.rot > 0 && uint64(r.rot) <= r.Length {
		r.Damaged = true
	}
	r.busy = true
	tells := r.Tells()
	s.w.after(s.flush(), &s.node, func() {
		r.busy = false
		if !r.Damaged {
			r.put(tells)
			s.w.truth.durable(s, c, r)
		}
		r.disk.state, r.disk.fence = r.State, r.Fence
		reply(s.tell(r, at))
	})
}

// tell returns the answer about a replica.
func (s *server) tell(r *rep, at uint64) replica.Answer {
	if at == 0 {
		at = r.Length
	}
	at = min(at, r.Length)
	a := replica.Answer{
		Reach: replica.Answered, State: r.State, Length: r.Length, Synced: r.Promised,
		At: at, CRC: crcOf(r.data[:at]), Damaged: r.Damaged, Whole: r.whole && r.State == replica.Open,
	}
	if r.State == replica.Sealed {
		a.At, a.CRC = r.Length, r.CRC
	}
	return a
}

// end answers nil once the chunk is sealed at length, under a fence.
func (s *server) end(c int, f meta.Fence, length uint64, reply func(error)) {
	r := s.rep(c)
	if s.later(r, func() { s.end(c, f, length, reply) }) {
		return
	}
	if do, err := r.Freeze(f); err != nil {
		reply(err)
		return
	} else if do == replica.Write {
		r.Frozen(f)
	}
	do, err := r.End(f, length)
	if err != nil {
		reply(err)
		return
	}
	sealed := do == replica.Nothing
	if !sealed {
		r.Ending = true
	}
	r.busy = true
	s.w.after(s.flush(), &s.node, func() {
		r.busy = false
		if r.Fence.Less(f) {
			r.Fence = f // older orders to delete are then refused
		}
		if !sealed {
			r.data = r.data[:length:length]
			r.Ended(length, crcOf(r.data))
			s.w.truth.sealing(s, c, r)
		}
		r.disk = image{state: replica.Sealed, fence: r.Fence, data: bytes.Clone(r.data), mark: length}
		s.w.truth.durable(s, c, r)
		reply(nil)
	})
}

func (s *server) delete(c int, f meta.Fence, reply func(error)) {
	r := s.rep(c)
	if s.later(r, func() { s.delete(c, f, reply) }) {
		return
	}
	do, err := r.Delete(f)
	if err != nil || do == replica.Nothing {
		reply(err)
		return
	}
	r.busy = true
	s.w.after(s.flush(), &s.node, func() {
		s.w.res.Deletes++
		s.w.truth.deleting(s, c, r)
		r.Gone(f)
		*r = rep{Replica: r.Replica, seen: r.seen, disk: image{state: r.State, fence: r.Fence}}
		reply(nil)
	})
}

// read answers with the bytes, verified.
func (s *server) read(c int, known meta.Fence, off, n uint64) ([]byte, error) {
	r := s.peek(c)
	if r == nil {
		return nil, meta.NoSuchChunk
	}
	if err := r.Read(known, off, n); err != nil {
		return nil, err
	}
	if r.Damaged || r.rot > 0 {
		r.Damaged = true
		return nil, meta.Corrupt
	}
	return bytes.Clone(r.data[off : off+n]), nil
}

// fetch is a read of all of a sealed chunk, for a copy.
func (s *server) fetch(c int, length uint64, crc uint32) ([]byte, error) {
	r := s.peek(c)
	if s.w.cfg.Off.Pull && r != nil && r.State != replica.Deleted {
		return bytes.Clone(r.data), nil
	}
	if r == nil || r.State != replica.Sealed || r.Length != length || r.CRC != crc {
		return nil, meta.NoSuchChunk
	}
	return s.read(c, meta.Fence{}, 0, length)
}

// pull copies a sealed chunk from the first server of a list that has the chunk.
func (s *server) pull(c int, f meta.Fence, length uint64, crc uint32, from []*server, reply func(error)) {
	r := s.rep(c)
	if s.later(r, func() { s.pull(c, f, length, crc, from, reply) }) {
		return
	}
	do, err := r.Install(f, length, crc)
	if err != nil || do == replica.Nothing {
		reply(err)
		return
	}
	if r.State == replica.Sealed && !r.Damaged && r.rot == 0 && r.Length == length && r.CRC == crc {
		s.install(c, r, f, r.data, reply) // the server has the content: only the fence changes
		return
	}
	if len(from) == 0 {
		reply(meta.Unavailable)
		return
	}
	src := from[0]
	call(s.w, &s.node, &src.node, false, func(answer func([]byte)) {
		p, err := src.fetch(c, length, crc)
		if err != nil {
			p = nil
		}
		answer(p)
	}, func(a answer[[]byte]) {
		if !s.w.cfg.Off.Pull && (!a.ok || uint64(len(a.v)) != length || crcOf(a.v) != crc) {
			s.pull(c, f, length, crc, from[1:], reply)
			return
		}
		s.install(c, r, f, a.v, reply)
	})
}

func (s *server) install(c int, r *rep, f meta.Fence, p []byte, reply func(error)) {
	if s.reps[c] != r {
		reply(meta.Unavailable)
		return
	}
	if s.later(r, func() { s.install(c, r, f, p, reply) }) {
		return
	}
	if _, err := r.Install(f, uint64(len(p)), crcOf(p)); err != nil {
		reply(err)
		return
	}
	r.busy = true
	s.w.after(s.flush(), &s.node, func() {
		s.w.res.Pulls++
		r.Installed(f, uint64(len(p)), crcOf(p))
		*r = rep{Replica: r.Replica, seen: r.seen, data: bytes.Clone(p), disk: image{state: replica.Sealed, fence: f, data: bytes.Clone(p), mark: r.Length}}
		s.w.truth.sealing(s, c, r)
		s.w.truth.durable(s, c, r)
		reply(nil)
	})
}

// ---- faults

// kill ends the process; the page cache lives on.
func (s *server) kill() {
	s.w.res.Kills++
	s.w.trace("%s is killed", s.name)
	s.life++
	s.down = s.w.Now + s.w.rng.Int64N(60)
	for _, r := range s.reps {
		if r != nil {
			r.restarted()
		}
	}
}

// restarted sets the state after a restart of the process; the page cache survives.
func (r *rep) restarted() { r.busy, r.Ending, r.whole, r.marks = false, false, false, 0 }

// crash loses the power: unsynced bytes are lost except for a random prefix, and the end
// of this prefix may be garbage.
func (s *server) crash() {
	s.w.res.Crashes++
	s.w.trace("%s loses power", s.name)
	s.life++
	s.down = s.w.Now + s.w.rng.Int64N(200)
	for c, r := range s.reps {
		if r != nil {
			s.recover(c, r)
		}
	}
}

func (s *server) recover(c int, r *rep) {
	rng := s.w.rng
	d := &r.disk
	if r.marks > 0 && r.State == replica.Open && s.w.cfg.Off.MarkInPlace {
		d.mark = 0
	}
	if d.state != replica.Open && d.state != replica.Absent || r.State == replica.Deleted || r.State == replica.Sealed {
		// One record makes a replica sealed or deleted.
		data := bytes.Clone(d.data)
		n := replica.Replica{State: d.state, Fence: d.fence, Length: uint64(len(data)), Synced: uint64(len(data)), Promised: uint64(len(data)), CRC: crcOf(data), Off: r.Off}
		if d.state == replica.Sealed && r.rot > 0 {
			n.CRC, n.Damaged = r.CRC, r.Damaged // the next read finds the damage again
		}
		*r = rep{Replica: n, data: data, rot: r.rot, seen: r.seen, disk: *d}
		return
	}
	f := replica.Found{Fence: d.fence, Synced: d.mark, Damaged: d.bad}
	f.Appended = d.mark + rng.Uint64N(r.Length-d.mark+1)
	f.Verified = d.mark
	if f.Appended > d.mark && rng.IntN(2) == 0 {
		f.Verified += rng.Uint64N(f.Appended - d.mark + 1)
	}
	lies := 60
	if s.w.cfg.Lonely {
		lies = 300
	}
	if d.mark > 0 && s.w.chance(lies) && s.w.truth.spare(c, s) {
		// The worst case: a disk that lied about a sync.
		f.Verified = rng.Uint64N(d.mark)
		s.w.truth.broken(c, s)
		s.w.res.Rots++
	}
	if f.Appended > 0 && r.Fence != d.fence && rng.IntN(2) == 0 {
		f.Fence = r.Fence
	}
	if r.rot > 0 && uint64(r.rot) <= f.Verified {
		f.Verified = uint64(r.rot) - 1
	}
	n := replica.Recovered(f, r.Off)
	data := bytes.Clone(r.data[:f.Verified])
	for uint64(len(data)) < n.Length {
		data = append(data, byte(rng.IntN(256)))
	}
	data = data[:n.Length]
	if n.Length == 0 && n.Fence == (meta.Fence{}) {
		n.State = replica.Absent
	}
	s.w.trace("  chunk %d: %d of %d bytes come back, %d were synced, fence %v", c, n.Length, r.Length, d.mark, n.Fence)
	*r = rep{Replica: n, data: data, rot: r.rot, seen: f.Fence, disk: image{state: n.State, fence: n.Fence, data: bytes.Clone(data), mark: n.Length, bad: n.Damaged}}
	if r.rot > int(n.Length) {
		r.rot = 0
	}
}

// wipe replaces a server's disk by an empty disk. Only replicas that no chunk depends on
// are lost.
func (s *server) wipe() {
	s.w.res.Wipes++
	s.w.trace("%s gets an empty disk", s.name)
	s.life++
	s.down = s.w.Now + s.w.rng.Int64N(40)
	for c, r := range s.reps {
		switch {
		case r == nil:
		case s.w.rng.IntN(4) > 0 && s.w.truth.spare(c, s):
			s.w.truth.broken(c, s)
			s.reps[c] = nil
		default:
			r.restarted()
		}
	}
}

// rot flips a byte of a replica that the chunk does not depend on.
func (s *server) rot() {
	if len(s.reps) == 0 {
		return
	}
	c := s.w.rng.IntN(len(s.reps))
	r := s.reps[c]
	if r == nil || len(r.disk.data) == 0 || r.rot > 0 || r.busy || !s.w.truth.spare(c, s) {
		return
	}
	s.w.res.Rots++
	at := s.w.rng.IntN(len(r.disk.data))
	s.w.trace("%s: byte %d of chunk %d flips", s.name, at, c)
	r.rot = at + 1
	r.data[at] ^= 0x40
	r.disk.data[at] ^= 0x40
	s.w.truth.broken(c, s)
}
