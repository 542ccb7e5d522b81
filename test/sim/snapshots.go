package sim

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// Snapshots: a client takes snapshots, reads snapshots of other clients, deletes some,
// and now and then rolls the volume back. A snapshot has every change that was finished
// before the request. Every later owner of the volume shows the same bytes, until the
// snapshot is deleted.

// An orderMsg is a request about snapshots; ordered is the answer, once the request is
// journaled.
type (
	orderMsg struct {
		req   uint64
		what  order
		token uint64          // of the taking of a snapshot
		at    meta.Generation // of the others
	}
	ordered struct {
		req uint64
		at  meta.Generation
	}
)

type order int

const (
	takes order = iota
	drops
	rolls
)

// shot is the state that a snapshot must show.
type shot struct {
	names map[place]change // at the moment of the snapshot
	tree  map[string]leaf
}

// leaf is a file, and the operation that wrote its bytes (zero: none).
type leaf struct {
	ino   meta.Ino
	wrote meta.OpID
}

// shotID names a snapshot.
type shotID struct {
	vol meta.VolumeID
	at  meta.Generation
}

// order carries out a session's request.
func (o *owner) order(s *session, m orderMsg) {
	c := s.conn
	if !o.recovered {
		o.w.after(5, &o.srv.node, func() {
			if !o.ended && s.conn == c && o.live[s.id] == s {
				o.order(s, m)
			}
		})
		return
	}
	switch m.what {
	case takes:
		before := len(o.cur.effects)
		res, err := o.run(&meta.TakeSnapshot{Name: fmt.Sprint(m.token), Token: m.token}, 0)
		if err != nil {
			o.w.fail("volume %d: taking a snapshot: %v", o.l.vol, err)
			return
		}
		m.at = meta.Generation(res.Off)
		if len(o.cur.effects) > before { // otherwise the snapshot existed already
			o.w.truth.shots[shotID{o.l.vol, m.at}] = o.shoot()
			o.w.trace("volume %d: snapshot %d in entry %d", o.l.vol, m.at, o.cur.seq)
		}
	case drops:
		if _, err := o.run(&meta.DropSnapshot{At: m.at, Max: 1}, 0); err != nil {
			o.w.fail("volume %d: deleting snapshot %d: %v", o.l.vol, m.at, err)
			return
		}
		o.w.trace("volume %d: snapshot %d is deleted", o.l.vol, m.at)
	case rolls:
		o.close(m.at)
		return
	}
	seq := o.cur.seq
	if len(o.cur.effects) == 0 {
		seq--
	}
	o.await(s, seq, func() { s.conn.down(ordered{m.req, m.at}) })
}

// shoot returns the present state of the volume.
func (o *owner) shoot() shot {
	sh := shot{maps.Clone(o.names), map[string]leaf{}}
	dir, err := namespace.Query(&view{o: o}, o.context(0), &meta.ReadDir{Ino: meta.RootIno, Max: 4096})
	if err != nil {
		o.w.fail("%v", err)
		return sh
	}
	for _, d := range dir.Entries {
		sh.tree[d.Name] = leaf{d.Ino, o.names[place{o.l.vol, d.Ino, ""}].op}
	}
	return sh
}

// dropSome does one step of a snapshot's deletion.
func (o *owner) dropSome() {
	all, err := namespace.Snapshots(&view{o: o})
	if err != nil {
		o.w.fail("%v", err)
	}
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Deleting })
	if i < 0 || !o.recovered || o.closed {
		return
	}
	if _, err := o.run(&meta.DropSnapshot{At: all[i].At, Max: 3}, 0); err != nil {
		o.w.fail("volume %d: deleting snapshot %d: %v", o.l.vol, all[i].At, err)
	}
}

// close ends every session, and rolls back; nobody is let in meanwhile.
func (o *owner) close(at meta.Generation) {
	all, err := namespace.Snapshots(&view{o: o})
	if err != nil {
		o.w.fail("%v", err)
	}
	if !slices.ContainsFunc(all, func(s meta.Snapshot) bool { return s.At == at && !s.Deleting }) {
		return // another request deleted the snapshot
	}
	o.w.trace("volume %d is rolled back to %d", o.l.vol, at)
	o.closed = true
	for _, id := range sorted(o.live) {
		if c := o.live[id].conn; c != nil {
			c.down(goneMsg{})
		}
		o.end(id)
	}
	o.roll(at, nil)
}

// reopen continues the work on snapshots that the previous owner did not finish.
func (o *owner) reopen() {
	all, err := namespace.Snapshots(o.st)
	if err != nil {
		o.w.fail("%v", err)
	}
	if i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Rolling }); i >= 0 {
		o.closed = true
		o.roll(all[i].At, nil)
	}
}

// roll does a step.
func (o *owner) roll(at meta.Generation, from []byte) {
	if o.ended || !o.holds() {
		return
	}
	o.reap()
	res, err := o.run(&meta.Rollback{To: at, From: from, Max: 2}, 0)
	switch {
	case errors.Is(err, meta.Busy): // chunks are being sealed, files reaped
	case err != nil:
		o.w.fail("volume %d: rolling back to %d: %v", o.l.vol, at, err)
		return
	case res.EOF:
		o.rolled(at)
		return
	default:
		from = res.Data
	}
	o.w.after(1+o.w.rng.Int64N(10), &o.srv.node, func() { o.roll(at, from) })
}

// rolled notes a rollback: every place returns to its earlier state, and each return
// counts as a change.
func (o *owner) rolled(at meta.Generation) {
	o.w.res.Rollbacks++
	o.w.truth.last++
	was := o.w.truth.shots[shotID{o.l.vol, at}].names
	for p := range o.names {
		c := change{at: p, op: was[p].op, ver: o.w.truth.last}
		o.names[p] = c
		o.cur.changes = append(o.cur.changes, c)
	}
	o.closed = false
	o.w.trace("volume %d was rolled back to %d in entry %d", o.l.vol, at, o.cur.seq)
}

// snap does something about snapshots.
func (cv *clientVolume) snap() {
	w, t := cv.w, cv.w.truth
	end := func(any) { cv.busy-- }
	order := func(m orderMsg, done func(any)) {
		cv.ask(func(req uint64) any { m.req = req; return m }, done)
	}
	p := w.rng.IntN(100)
	if p < 25 {
		start := w.res.Events
		order(orderMsg{what: takes, token: w.rng.Uint64() | 1}, func(a any) {
			if m, ok := a.(ordered); ok {
				t.took(cv, m.at, start)
			}
			end(a)
		})
		return
	}
	known := t.taken[cv.vol]
	if len(known) == 0 {
		cv.busy--
		return
	}
	at := known[w.rng.IntN(len(known))]
	switch {
	case p < 47 && len(known) > 2:
		t.taken[cv.vol] = slices.DeleteFunc(slices.Clone(known), func(g meta.Generation) bool { return g == at })
		t.deleted[shotID{cv.vol, at}] = true
		order(orderMsg{what: drops, at: at}, end)
	case p < 49:
		order(orderMsg{what: rolls, at: at}, end)
	default:
		cv.readAt(at, someNames[w.rng.IntN(len(someNames))])
	}
}

// readAt reads a file in a snapshot.
func (cv *clientVolume) readAt(at meta.Generation, name string) {
	w, id := cv.w, shotID{cv.vol, at}
	want, there := w.truth.shots[id].tree[name]
	ask := func(op meta.Op, done func(*reply)) {
		cv.ask(func(req uint64) any { return &call{req: req, op: op, at: at} }, func(a any) {
			r, _ := a.(*reply)
			switch {
			case r == nil:
			case errors.Is(r.err, meta.NoSuchSnapshot) && w.truth.deleted[id]:
			case r.err != nil && there || r.err == nil && !there || r.err == nil && r.res.Attr.Ino != want.ino:
				w.fail("%s reads %s in snapshot %d: inode %d, %v; want %d", cv.name(), name, at, r.res.Attr.Ino, r.err, want.ino)
			case r.err == nil:
				done(r)
				return
			}
			cv.busy--
		})
	}
	ask(&meta.Lookup{Parent: meta.RootIno, Name: name}, func(*reply) {
		ask(&meta.Open{Ino: want.ino}, func(r *reply) {
			defer func() { cv.busy-- }()
			w.res.Shown++
			if n := len(r.res.Extents); n > 1 || n == 0 != (want.wrote == meta.OpID{}) {
				w.fail("%s reads %s in snapshot %d: %d extents, written by %v", cv.name(), name, at, n, want.wrote)
			}
		})
	})
}

// took notes that a client got the answer about a snapshot. The snapshot has every change
// that was finished before start, the moment of the request.
func (t *truth) took(cv *clientVolume, at meta.Generation, start int) {
	t.w.res.Snapshots++
	sh, ok := t.shots[shotID{cv.vol, at}]
	if !ok {
		t.w.fail("%s was told of snapshot %d, which nobody took", cv.name(), at)
	}
	for p := range t.done {
		if p.vol == cv.vol {
			c := sh.names[p]
			c.at = p
			t.saw(cv, "a snapshot", c, start)
		}
	}
	if !slices.Contains(t.taken[cv.vol], at) {
		t.taken[cv.vol] = append(t.taken[cv.vol], at)
	}
}

// snapshots checks every snapshot of a volume.
func (t *truth) snapshots(l *volumeLog, st *store) {
	all, err := namespace.Snapshots(st)
	if err != nil {
		t.w.fail("volume %d: %v", l.vol, err)
		return
	}
	for _, at := range t.taken[l.vol] {
		if !slices.ContainsFunc(all, func(s meta.Snapshot) bool { return s.At == at && !s.Deleting }) {
			t.w.fail("volume %d: snapshot %d is gone", l.vol, at)
			return
		}
	}
	for _, s := range all {
		sh := t.shots[shotID{l.vol, s.At}]
		if s.Deleting {
			continue
		}
		n := t.files(l, st, s.At, func(name string, ino meta.Ino) meta.OpID {
			if sh.tree[name].ino != ino {
				t.w.fail("volume %d: %s in snapshot %d is inode %d, was %d", l.vol, name, s.At, ino, sh.tree[name].ino)
			}
			return sh.tree[name].wrote
		})
		if n != len(sh.tree) {
			t.w.fail("volume %d: %d names in snapshot %d, which had %d", l.vol, n, s.At, len(sh.tree))
		}
	}
}
