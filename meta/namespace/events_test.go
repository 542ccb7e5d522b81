package namespace

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// follower keeps a copy of a volume by its events alone: names from the events' contents,
// contents and attributes by reading the events' inodes.
type follower struct {
	s     *sim
	since uint64
	dirs  map[meta.Ino]map[string]string // name -> inode or volume
	files map[meta.Ino]string            // contents read at an inode's last event
}

func newFollower(s *sim) *follower {
	return &follower{s: s, dirs: map[meta.Ino]map[string]string{}, files: map[meta.Ino]string{}}
}

func (f *follower) poll() {
	f.s.t.Helper()
	for {
		log, err := EventLog(f.s.s)
		if err != nil {
			f.s.t.Fatal(err)
		}
		if f.since+1 < log.First || f.since > log.Last {
			f.s.t.Fatalf("after event %d comes a rescan: %+v", f.since, log)
		}
		l, err := Events(f.s.s, f.since, 3)
		if err != nil {
			f.s.t.Fatal(err)
		}
		if len(l) == 0 {
			if f.since != log.Last {
				f.s.t.Fatalf("nothing after event %d of %d", f.since, log.Last)
			}
			return
		}
		for _, e := range l {
			if e.Seq != f.since+1 {
				f.s.t.Fatalf("event %d after %d", e.Seq, f.since)
			}
			f.since = e.Seq
			f.take(e)
		}
	}
}

func (f *follower) take(e meta.Event) {
	f.s.t.Helper()
	id := fmt.Sprint(e.Ino)
	names := func(dir meta.Ino) map[string]string {
		if f.dirs[dir] == nil {
			f.dirs[dir] = map[string]string{}
		}
		return f.dirs[dir]
	}
	// Each event must fit the copy: an additional event does not fit.
	must := func(dir meta.Ino, name, want string) {
		f.s.t.Helper()
		if got := names(dir)[name]; got != want {
			f.s.t.Fatalf("%+v: %q in %d is %q here", e, name, dir, got)
		}
	}
	switch e.Kind {
	case meta.EventCreated, meta.EventLinked:
		must(e.Parent, e.Name, "")
		names(e.Parent)[e.Name] = id
	case meta.EventRemoved:
		must(e.Parent, e.Name, id)
		delete(names(e.Parent), e.Name)
	case meta.EventRenamed:
		must(e.FromParent, e.From, id)
		was := ""
		if e.Replaced != 0 {
			was = fmt.Sprint(e.Replaced)
		}
		must(e.Parent, e.Name, was)
		delete(names(e.FromParent), e.From)
		names(e.Parent)[e.Name] = id
	case meta.EventExchanged:
		must(e.FromParent, e.From, id)
		must(e.Parent, e.Name, fmt.Sprint(e.Replaced))
		names(e.FromParent)[e.From], names(e.Parent)[e.Name] = fmt.Sprint(e.Replaced), id
	case meta.EventAttached:
		must(e.Parent, e.Name, "")
		names(e.Parent)[e.Name] = fmt.Sprint("volume ", e.Volume)
		return
	case meta.EventDetached:
		must(e.Parent, e.Name, fmt.Sprint("volume ", e.Volume))
		delete(names(e.Parent), e.Name)
		return
	case meta.EventChanged, meta.EventAttributes:
		if e.Name != "" {
			must(e.Parent, e.Name, id)
		}
	case meta.EventSnapshotTaken, meta.EventSnapshotDeleted:
		return
	default:
		f.s.t.Fatalf("%+v", e)
	}
	f.files[e.Ino] = f.s.describe(e.Ino)
}

// describe reads the properties that events report beside names.
func (s *sim) describe(ino meta.Ino) string {
	n := s.m.nodes[ino]
	if n == nil || n.nlink == 0 {
		return ""
	}
	d := fmt.Sprintf("%o %d:%d %v", n.mode, n.uid, n.gid, n.xattrs)
	if n.isReg() {
		n.grow(n.size)
		d += fmt.Sprintf(" %d %x", n.size, n.data[:n.size])
	}
	return d
}

// sameNames compares the copy's names with the model's.
func (f *follower) sameNames() {
	f.s.t.Helper()
	f.poll()
	for _, ino := range slices.Sorted(maps.Keys(f.s.m.nodes)) {
		n := f.s.m.nodes[ino]
		if !n.isDir() || n.nlink == 0 {
			continue
		}
		want := map[string]string{}
		for name, kid := range n.kids {
			want[name] = fmt.Sprint(kid.ino)
			if kid.vol != 0 {
				want[name] = fmt.Sprint("volume ", kid.vol)
			}
		}
		if got := f.dirs[ino]; !maps.Equal(got, want) {
			f.s.t.Fatalf("directory %d: the copy has\n%v\nthe volume\n%v", ino, got, want)
		}
	}
}

// sameFiles compares everything else; nobody has a file open.
func (f *follower) sameFiles() {
	f.s.t.Helper()
	f.sameNames()
	for _, ino := range slices.Sorted(maps.Keys(f.s.m.nodes)) {
		want := f.s.describe(ino)
		if got, ok := f.files[ino]; got != want && (ok || ino != meta.RootIno) {
			f.s.t.Fatalf("inode %d: the copy has\n%s\nthe volume\n%s", ino, got, want)
		}
	}
}

func eventKinds(l []meta.Event) (kinds []string) {
	for _, e := range l {
		kinds = append(kinds, fmt.Sprintf("%d %v %d/%s", e.Seq, e.Kind, e.Parent, e.Name))
	}
	return kinds
}

// TestEventsOfWriting: contents are reported once, when the writer has closed the file,
// whatever the number of commits; at the last close of several, and at the end of a
// session that never reported the close.
func TestEventsOfWriting(t *testing.T) {
	f := newFixture(t)
	f.do(&meta.SetEvents{Keep: meta.MinEvents})
	ino := f.file("a")
	c := f.chunks(1, false)[0]
	write := func(off uint64) *meta.Result {
		return f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: off, Len: 10, Chunk: c, ChunkOff: off}}})
	}
	since := uint64(1)
	expect := func(want ...string) {
		t.Helper()
		l, err := Events(f.s, since, 100)
		if err != nil {
			t.Fatal(err)
		}
		if got := eventKinds(l); !slices.Equal(got, want) {
			t.Fatalf("events %q, want %q", got, want)
		}
		since += uint64(len(l))
	}
	expect()
	for i := range uint64(3) {
		if !write(i * 10).Existed {
			t.Fatal("the owner does not ask to be told")
		}
	}
	expect()
	f.do(&meta.Closed{Inos: []meta.Ino{ino, ino}})
	f.do(&meta.Closed{Inos: []meta.Ino{ino}}) // a repeated request
	expect("2 changed 1/a")

	// Two sessions: each reports its own writes.
	write(100)
	f.session = otherSess
	write(200)
	f.do(&meta.Closed{Inos: []meta.Ino{ino}})
	expect("3 changed 1/a")
	f.do(&meta.Rename{Parent: 1, Name: "a", NewParent: 1, NewName: "b"})
	write(300)
	for eof := false; !eof; {
		eof = f.do(&meta.SessionEnd{Session: otherSess}).EOF
	}
	expect("4 renamed 1/b", "5 changed 1/b")
	f.session = testSession
	f.do(&meta.Closed{Inos: []meta.Ino{ino}})
	expect("6 changed 1/b")
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 5})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMtime, Mtime: 7}) // times alone are none
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600})
	expect("7 attributes 1/b")
	f.do(&meta.Closed{Inos: []meta.Ino{ino}})
	expect("8 changed 1/b")

	// Unlinked during the writing: no further event about the file.
	write(400)
	f.do(&meta.Unlink{Parent: 1, Name: "b", Holders: []meta.SessionID{testSession}})
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
	f.do(&meta.Closed{Inos: []meta.Ino{ino}})
	expect("9 removed 1/b")
	if keys, err := (&tx{view: view{r: f.s}}).snaps().keysFrom([]byte{prefixChanger}, 1); err != nil || len(keys) != 0 {
		t.Errorf("%x is left, %v", keys, err)
	}
}

// TestEventsAreTrimmed: at least the requested number of events is kept, and not many
// more; a reader that comes too late notices.
func TestEventsAreTrimmed(t *testing.T) {
	f := newFixture(t)
	f.fails(meta.Invalid, &meta.SetEvents{Keep: meta.MinEvents - 1})
	f.fails(meta.Invalid, &meta.SetEvents{Keep: meta.MaxEvents + 1})
	log := func() meta.EventLog {
		t.Helper()
		l, err := EventLog(f.s)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	f.file("before")
	if l := log(); l != (meta.EventLog{}) {
		t.Fatalf("%+v", l)
	}
	f.do(&meta.SetEvents{Keep: meta.MinEvents})
	if l := log(); l != (meta.EventLog{Keep: meta.MinEvents, First: 1}) {
		t.Fatalf("%+v", l)
	}
	const n = 3*meta.MinEvents + 17
	for i := range n {
		f.file(fmt.Sprint(i))
		if l := log(); l.Last != uint64(i+1) || l.Last+1-l.First > meta.MinEvents+meta.MinEvents/trimPart || i >= meta.MinEvents && l.Last+1-l.First < meta.MinEvents {
			t.Fatalf("%+v", l)
		}
	}
	l := log()
	all, err := Events(f.s, 0, n)
	if err != nil || uint64(len(all)) != l.Last+1-l.First || all[0].Seq != l.First || all[len(all)-1].Name != fmt.Sprint(n-1) {
		t.Fatalf("%d events, %v; %+v", len(all), err, l)
	}
	f.check()

	// Switched off and on again: a reader must notice the gap.
	f.do(&meta.SetEvents{})
	f.check()
	f.file("untold")
	if off := log(); off != (meta.EventLog{First: l.Last + 1, Last: l.Last}) {
		t.Fatalf("%+v", off)
	}
	f.do(&meta.SetEvents{Keep: 2 * meta.MinEvents})
	on := log()
	if on.First <= l.Last+1 || on.Last+1 != on.First {
		t.Fatalf("%+v after %+v", on, l)
	}
	// The same after a state that may have lost the end of the journal.
	f.file("told")
	effects, err := SkipInodes(f.s, 1<<32)
	if err != nil {
		t.Fatal(err)
	}
	f.commit(effects)
	if l := log(); l.First <= on.Last+1<<31 || l.Last+1 != l.First {
		t.Fatalf("%+v", l)
	}
	f.check()
}

// TestEventsOfSnapshots: a snapshot shows exactly the result of the events before its own
// event. After a rollback a follower must read everything again. A clone begins without
// events.
func TestEventsOfSnapshots(t *testing.T) {
	f := newFixture(t)
	f.do(&meta.SetEvents{Keep: meta.MinEvents})
	f.file("a")
	gen := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	f.file("b")
	f.do(&meta.TakeSnapshot{Name: "s2"})
	shots, err := Snapshots(f.s)
	if err != nil {
		t.Fatal(err)
	}
	for !f.do(&meta.DropSnapshot{At: shots[1].At}).EOF {
	}
	l, err := Events(f.s, 0, 100)
	if got, want := eventKinds(l), []string{"1 created 1/a", "2 snapshot-taken 0/s", "3 created 1/b", "4 snapshot-taken 0/s2", "5 snapshot-deleted 0/s2"}; err != nil || !slices.Equal(got, want) {
		t.Fatalf("%q, %v", got, err)
	}
	clone := newMemStore()
	for _, it := range f.s.items() {
		clone.t.ReplaceOrInsert(it)
	}
	effects, err := CloneEffects(clone, gen, testVolume+1, meta.Policy{Replicas: 1}, f.now)
	if err != nil {
		t.Fatal(err)
	}
	clone.apply(effects)
	if rep, err := Check(clone); err != nil || !rep.OK() {
		t.Fatal(rep, err)
	}
	if log, err := EventLog(clone); err != nil || log != (meta.EventLog{}) {
		t.Fatal(log, err)
	}
	for op := (&meta.Rollback{To: gen}); ; {
		res := f.do(op)
		if res.EOF {
			break
		}
		op.From = res.Data
	}
	if log, err := EventLog(f.s); err != nil || log.First != 7 || log.Last != 6 {
		t.Fatal(log, err)
	}
	f.check()
}

// TestEventsOfQuota: a crossing is one event, however often it is reported, and a crossing while
// events are off counts as reported. A program that does not know the kind can still read the record.
func TestEventsOfQuota(t *testing.T) {
	f := newFixture(t)
	told := func(wantBytes, wantInodes bool) {
		t.Helper()
		if bytes, inodes, err := QuotaTold(f.s); err != nil || bytes != wantBytes || inodes != wantInodes {
			t.Fatal(bytes, inodes, err)
		}
	}
	var after uint64
	expect := func(want ...meta.Event) {
		t.Helper()
		all, err := Events(f.s, after, 100)
		if err != nil || len(all) != len(want) {
			t.Fatalf("%+v %v, want %+v", all, err, want)
		}
		for i, e := range all {
			after, want[i].Kind = e.Seq, meta.EventQuota
			if e.Time != f.now {
				t.Errorf("%+v is not of %d", e, f.now)
			}
			if e.Seq, e.Time = 0, 0; e != want[i] {
				t.Fatalf("%+v, want %+v", e, want[i])
			}
		}
		f.check()
	}
	told(false, false)
	f.do(&meta.TellQuota{})
	f.do(&meta.TellQuota{Bytes: 5, BytesOver: true}) // events are off
	told(true, false)
	f.do(&meta.SetEvents{Keep: meta.MinEvents})
	f.do(&meta.TellQuota{Bytes: 5, BytesOver: true})
	expect()
	f.do(&meta.TellQuota{Bytes: 5, BytesOver: true, Inodes: 1, InodesOver: true})
	told(true, true)
	expect(meta.Event{Name: "inodes", Over: true, Used: 1, Limit: 1})
	f.do(&meta.Write{Ino: f.create(1, "f", meta.TypeRegular|0o644).Ino, Data: []byte("abc"), Inline: true, Size: 3})
	after++ // the file
	f.do(&meta.TellQuota{Bytes: 5, BytesOver: true, Inodes: 1, InodesOver: true})
	f.do(&meta.TellQuota{Bytes: 9})
	told(false, false)
	expect(meta.Event{Name: "bytes", Used: 3, Limit: 9}, meta.Event{Name: "inodes", Used: 2})
	if _, have, err := f.s.Get(overKey); have || err != nil {
		t.Error("a record is left", err)
	}

	rec := appendEvent(nil, &meta.Event{Kind: meta.EventQuota, Name: "bytes", Over: true, Used: 12, Limit: 10})
	rec[1] = 200 // an unknown kind, as quota is for an older program
	if e, err := decodeEvent(rec); err != nil || e.Name != "bytes" || e.Parent != 0 || e.FromParent != 0 {
		t.Errorf("%+v %v", e, err)
	}
	for _, bad := range [][]byte{{}, {overV1}, {overV1, 0}, {overV1, 4}, {overV1, 1, 0}, {2, 1}} {
		if _, err := decodeOver(bad); err == nil {
			t.Errorf("%x is read", bad)
		}
		f.s.t.ReplaceOrInsert(memItem{overKey, bad})
		if r, err := Check(f.s); err != nil || len(r.Problems) == 0 {
			t.Errorf("%x: fsck sees nothing: %v", bad, err)
		}
	}
	f.s.t.Delete(memItem{k: overKey})
}

func FuzzOver(f *testing.F) {
	f.Add([]byte{overV1, 1})
	f.Add([]byte{overV1, 4})
	f.Add([]byte{9})
	f.Fuzz(func(t *testing.T, b []byte) {
		if bits, err := decodeOver(b); err == nil {
			if again := []byte{overV1, bits}; string(again) != string(b) {
				t.Fatalf("%x became %x", b, again)
			}
		} else if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
			t.Fatal(err)
		}
	})
}

// FuzzEvent: any bytes are an event or an error, and an event is encoded to the same bytes.
func FuzzEvent(f *testing.F) {
	for _, e := range []meta.Event{
		{Kind: meta.EventCreated, Time: 1, Ino: 2, Type: meta.TypeRegular, Parent: 1, Name: "a"},
		{Kind: meta.EventRenamed, Ino: 2, Type: meta.TypeDir, Parent: 1, Name: "a", FromParent: 3, From: "b", Replaced: 9, Last: true},
		{Kind: meta.EventAttached, Parent: 1, Name: "v", Volume: 7},
		{Kind: 200, Name: "of a newer program"},
		{Kind: meta.EventQuota, Name: "bytes", Over: true, Used: 12, Limit: 10},
		{Kind: meta.EventQuota, Name: "inodes"},
	} {
		f.Add(appendEvent(nil, &e))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decodeEvent(b)
		if err != nil {
			if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
				t.Fatal(err)
			}
			return
		}
		again, err := decodeEvent(appendEvent(nil, &e))
		if err != nil || again != e {
			t.Fatalf("%+v became %+v, %v", e, again, err)
		}
	})
}
