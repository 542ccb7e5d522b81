// Package journaltest owns the test suite that every form of the journal passes: the
// promises of journal.Log, each tested by the story that would break the promise.
package journaltest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

// Volume is the log's volume in every story.
const Volume meta.VolumeID = 7

// Form makes an empty log of Volume, and gives the stories access to it.
type Form struct {
	// Take makes a new owner. From then on the previous owner is fenced, whether or not
	// it noticed. lost is the ownership's Lost channel.
	Take func(t *testing.T) (s journal.Store, term meta.Term, lost <-chan struct{})
	// Reader returns a store without ownership.
	Reader func(t *testing.T) journal.Store
	// Damage overwrites a record without the log's knowledge; nil removes the record.
	Damage func(t *testing.T, seq meta.Seq, value []byte)
}

// Run runs the suite; make makes a fresh form for each story.
func Run(t *testing.T, make func(t *testing.T) Form) {
	for _, story := range []struct {
		name string
		run  func(t *testing.T, f Form)
	}{
		{"AppendReadBack", appendReadBack},
		{"EmptyLog", emptyLog},
		{"StoreCommits", storeCommits},
		{"OldOwnerIsFenced", oldOwnerIsFenced},
		{"LostOwnerIsFenced", lostOwnerIsFenced},
		{"EntryMustFollow", entryMustFollow},
		{"PayloadBounds", payloadBounds},
		{"ReplyLost", replyLost},
		{"RequestLost", requestLost},
		{"GhostCommitsLate", ghostCommitsLate},
		{"GhostAfterTakeover", ghostAfterTakeover},
		{"UnsettledStaysBroken", unsettledStaysBroken},
		{"TrimKeepsLast", trimKeepsLast},
		{"TrimRefusesWrongCheckpoint", trimRefusesWrongCheckpoint},
		{"TrimByOldOwner", trimByOldOwner},
		{"CheckpointReplyLost", checkpointReplyLost},
		{"GhostCheckpoint", ghostCheckpoint},
		{"ReadTrimmedIsStale", readTrimmedIsStale},
		{"PinHoldsTrim", pinHoldsTrim},
		{"FollowSeesAll", followSeesAll},
		{"FollowerTrimmedAway", followerTrimmedAway},
		{"FlippedBit", flippedBit},
		{"GapIsCorrupt", gapIsCorrupt},
		{"GapBehindCheckpoint", gapBehindCheckpoint},
		{"OlderCheckpoint", olderCheckpoint},
		{"TermGoesBack", termGoesBack},
		{"DivergedReader", divergedReader},
		{"SizeCounts", sizeCounts},
		{"RandomHistory", randomHistory},
	} {
		t.Run(story.name, func(t *testing.T) { story.run(t, make(t)) })
	}
}

// writer is an owner with its position in the log.
type writer struct {
	t    *testing.T
	log  *journal.Journal
	term meta.Term
	at   journal.Position
}

func (f Form) writer(t *testing.T, wrap ...journal.Interceptor) *writer {
	t.Helper()
	s, term, lost := f.Take(t)
	for _, w := range wrap {
		s = journal.Intercept(s, w)
	}
	w := &writer{t: t, log: journal.New(Volume, s, lost), term: term}
	w.catchUp()
	return w
}

// catchUp reads to the end, from the checkpoint if the log has one.
func (w *writer) catchUp() {
	w.t.Helper()
	if cp, ok, err := w.log.Checkpoint(w.t.Context()); err != nil {
		w.t.Fatal(err)
	} else if ok && w.at.Seq < cp.Seq {
		w.at = cp.Position
	}
	if err := w.log.Read(w.t.Context(), w.at, func(e journal.Entry) error { w.at = e.Position(); return nil }); err != nil {
		w.t.Fatal(err)
	}
}

func (w *writer) try(ctx context.Context, payload []byte) (journal.Entry, error) {
	e := journal.Next(Volume, w.at, w.term, payload)
	err := w.log.Append(ctx, e)
	if err == nil {
		w.at = e.Position()
	}
	return e, err
}

func (w *writer) append(payload string) journal.Entry {
	w.t.Helper()
	e, err := w.try(w.t.Context(), []byte(payload))
	if err != nil {
		w.t.Fatal(err)
	}
	return e
}

func (w *writer) trim(at journal.Position) {
	w.t.Helper()
	if err := w.log.Trim(w.t.Context(), checkpointAt(at, w.term)); err != nil {
		w.t.Fatal(err)
	}
}

func checkpointAt(at journal.Position, term meta.Term) journal.Checkpoint {
	return journal.Checkpoint{Volume: Volume, Position: at, Term: term, Files: []journal.File{{Name: "000001.sst", Size: 9, Ref: meta.BlobRef{Name: "b", Length: 9}}}}
}

// all returns the entries that a fresh reader sees after a position.
func (f Form) all(t *testing.T, after journal.Position) ([]journal.Entry, error) {
	t.Helper()
	var es []journal.Entry
	err := journal.New(Volume, f.Reader(t), nil).Read(t.Context(), after, func(e journal.Entry) error {
		e.Payload = bytes.Clone(e.Payload)
		es = append(es, e)
		return nil
	})
	return es, err
}

// expect fails the test unless the log has exactly these payloads after a position.
func (f Form) expect(t *testing.T, after journal.Position, payloads ...string) {
	t.Helper()
	es, err := f.all(t, after)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range es {
		got = append(got, string(e.Payload))
	}
	if fmt.Sprint(got) != fmt.Sprint(payloads) {
		t.Fatalf("log holds %q, want %q", got, payloads)
	}
}

func want(t *testing.T, err error, kind meta.Kind) {
	t.Helper()
	if meta.KindOf(err) != kind {
		t.Fatalf("error %v, want kind %v", err, kind)
	}
}

func appendReadBack(t *testing.T, f Form) {
	w := f.writer(t)
	var payloads []string
	for i := range 50 {
		p := fmt.Sprint("p", i)
		payloads = append(payloads, p)
		w.append(p)
	}
	f.expect(t, journal.Position{}, payloads...)
	es, err := f.all(t, journal.Position{})
	if err != nil {
		t.Fatal(err)
	}
	f.expect(t, es[29].Position(), payloads[30:]...)
	f.expect(t, es[49].Position())
	// fn's error ends the reading and is handed on.
	stop := errors.New("stop")
	n := 0
	err = w.log.Read(t.Context(), journal.Position{}, func(journal.Entry) error {
		if n++; n == 3 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || n != 3 {
		t.Fatal(n, err)
	}
}

func emptyLog(t *testing.T, f Form) {
	f.expect(t, journal.Position{})
	w := f.writer(t)
	if _, ok, err := w.log.Checkpoint(t.Context()); ok || err != nil {
		t.Fatal(ok, err)
	}
	if n, err := w.log.Size(t.Context()); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	_, _, err := w.log.Pin(t.Context())
	want(t, err, meta.NotFound)
	err = w.log.Read(t.Context(), journal.Position{Seq: 3}, func(journal.Entry) error { return nil })
	want(t, err, meta.Ahead)
}

// The store's conditions of a commit, on which the log relies, tested on the store alone.
func storeCommits(t *testing.T, f Form) {
	s, _, _ := f.Take(t)
	commit := func(s journal.Store, seq meta.Seq, want bool) {
		t.Helper()
		if done, err := s.Commit(t.Context(), seq, fmt.Appendf(nil, "%d", seq)); err != nil || done != want {
			t.Fatalf("commit %d: %v %v", seq, done, err)
		}
	}
	commit(s, 2, false) // entry 1 does not exist
	commit(s, 1, true)
	commit(s, 1, false) // entry 1 exists
	commit(s, 2, true)
	commit(f.Reader(t), 3, false) // not the owner
	if done, err := s.PutCheckpoint(t.Context(), 9, nil); done || err != nil {
		t.Fatal(done, err)
	}
	if done, err := s.PutCheckpoint(t.Context(), 0, []byte("cp")); !done || err != nil {
		t.Fatal(done, err)
	}
	f.Damage(t, 2, nil)
	f.Damage(t, 1, nil)
	commit(s, 1, false) // a log with a checkpoint does not begin again
	commit(s, 2, false)
	s2, _, _ := f.Take(t)
	commit(s, 1, false)
	in, err := s2.Inspect(t.Context(), 1)
	if err != nil || !in.Owned || in.Value != nil || in.Prev {
		t.Fatal(in, err)
	}
	if in, err = s.Inspect(t.Context(), 1); err != nil || in.Owned {
		t.Fatal(in, err)
	}
}

// Owner O1 writes, O2 takes over and writes; then O1, which noticed nothing, writes
// again.
func oldOwnerIsFenced(t *testing.T, f Form) {
	o1 := f.writer(t)
	o1.append("one")
	o2 := f.writer(t)
	if o2.term <= o1.term {
		t.Fatalf("term %d after %d", o2.term, o1.term)
	}
	_, err := o1.try(t.Context(), []byte("ghost"))
	want(t, err, meta.Fenced)
	o2.append("two")
	_, err = o1.try(t.Context(), []byte("ghost"))
	want(t, err, meta.Fenced)
	f.expect(t, journal.Position{}, "one", "two")
}

func lostOwnerIsFenced(t *testing.T, f Form) {
	s, term, _ := f.Take(t)
	lost := make(chan struct{})
	log := journal.New(Volume, s, lost)
	close(lost)
	want(t, log.Append(t.Context(), journal.Next(Volume, journal.Position{}, term, nil)), meta.Fenced)
	f.expect(t, journal.Position{})
}

func entryMustFollow(t *testing.T, f Form) {
	w := f.writer(t)
	e := w.append("one")
	want(t, w.log.Append(t.Context(), e), meta.Again)
	gap := journal.Next(Volume, journal.Position{Seq: 5, Hash: e.Hash}, w.term, nil)
	want(t, w.log.Append(t.Context(), gap), meta.Again)
	other := journal.Next(Volume, journal.Position{Seq: 1, Hash: journal.Hash{1}}, w.term, nil)
	want(t, w.log.Append(t.Context(), other), meta.Again)
	w.append("two")
	f.expect(t, journal.Position{}, "one", "two")
}

func payloadBounds(t *testing.T, f Form) {
	w := f.writer(t)
	w.append("")
	big := bytes.Repeat([]byte("x"), journal.MaxPayload)
	for range 5 { // more than a page
		w.append(string(big))
	}
	_, err := w.try(t.Context(), append(big, 'y'))
	want(t, err, meta.ResourceExceeded)
	w.append("after")
	es, err := f.all(t, journal.Position{})
	if err != nil || len(es) != 7 || !bytes.Equal(es[3].Payload, big) {
		t.Fatal(len(es), err)
	}
}

// times returns an interceptor that applies f to the first n calls of op.
func times(op string, n int, f func(ctx context.Context, do func(context.Context) error) error) journal.Interceptor {
	var mu sync.Mutex
	return func(ctx context.Context, o string, do func(context.Context) error) error {
		mu.Lock()
		hit := o == op && n > 0
		if hit {
			n--
		}
		mu.Unlock()
		if hit {
			return f(ctx, do)
		}
		return do(ctx)
	}
}

var errCut = meta.E("test", meta.Unavailable, "", errors.New("the connection was cut"))

// The commit happens, its reply is lost, and so are some of the reads that follow.
func replyLost(t *testing.T, f Form) {
	cut := func(ctx context.Context, do func(context.Context) error) error {
		if err := do(ctx); err != nil {
			return err
		}
		return errCut
	}
	w := f.writer(t, times("Commit", 3, cut), times("Inspect", 2, cut))
	w.append("one")
	w.append("two")
	f.expect(t, journal.Position{}, "one", "two")
}

func requestLost(t *testing.T, f Form) {
	cut := func(context.Context, func(context.Context) error) error { return errCut }
	w := f.writer(t, times("Commit", 3, cut), times("Inspect", 2, cut))
	w.append("one")
	w.append("two")
	f.expect(t, journal.Position{}, "one", "two")
}

// The proposal hangs in the network: the read finds no entry, and then the proposal is
// committed after all.
func ghostCommitsLate(t *testing.T, f Form) {
	var ghosts []func()
	hang := func(ctx context.Context, do func(context.Context) error) error {
		ghosts = append(ghosts, func() {
			if err := do(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		})
		return errCut
	}
	release := func(ctx context.Context, do func(context.Context) error) error {
		err := do(ctx)
		for _, g := range ghosts {
			g()
		}
		ghosts = nil
		return err
	}
	w := f.writer(t, times("Commit", 1, hang), times("Inspect", 1, release))
	w.append("one")
	w.append("two")
	for _, g := range ghosts {
		g()
	}
	w.append("three")
	f.expect(t, journal.Position{}, "one", "two", "three")
}

// The old owner's proposal hangs while another takes over and reads to the end.
func ghostAfterTakeover(t *testing.T, f Form) {
	var ghost func()
	took := false
	var o2 *writer
	hang := func(ctx context.Context, do func(context.Context) error) error {
		ghost = func() {
			if err := do(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		}
		if !took {
			took = true
			o2 = f.writer(t)
		}
		return errCut
	}
	o1 := f.writer(t)
	o1.append("one")
	o1 = f.writer(t, times("Commit", 1, hang))
	_, err := o1.try(t.Context(), []byte("ghost"))
	want(t, err, meta.Fenced)
	ghost()
	o2.append("two")
	ghost()
	f.expect(t, journal.Position{}, "one", "two")
}

// The caller gives up while the outcome is unknown: no entry may follow.
func unsettledStaysBroken(t *testing.T, f Form) {
	cut := func(context.Context, func(context.Context) error) error { return errCut }
	w := f.writer(t, times("Commit", 1<<30, cut))
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	e, err := w.try(ctx, []byte("maybe"))
	want(t, err, meta.Unavailable)
	want(t, w.log.Append(t.Context(), e), meta.Unavailable)
	o2 := f.writer(t)
	o2.append("certain")
	f.expect(t, journal.Position{}, "certain")
}

func trimKeepsLast(t *testing.T, f Form) {
	w := f.writer(t)
	var at []journal.Position
	for i := range 20 {
		at = append(at, w.append(fmt.Sprint(i)).Position())
	}
	w.trim(at[9])
	f.expect(t, at[9], "10", "11", "12", "13", "14", "15", "16", "17", "18", "19")
	w.trim(at[19])
	cp, ok, err := w.log.Checkpoint(t.Context())
	if err != nil || !ok || cp.Position != at[19] || len(cp.Files) != 1 || cp.Files[0].Name != "000001.sst" {
		t.Fatal(cp, ok, err)
	}
	f.expect(t, at[18], "19") // the last entry stays
	w.trim(at[19])            // idempotent
	w.append("20")
	o2 := f.writer(t)
	o2.append("21")
	f.expect(t, at[19], "20", "21")
}

func trimRefusesWrongCheckpoint(t *testing.T, f Form) {
	w := f.writer(t)
	a, b := w.append("a").Position(), w.append("b").Position()
	want(t, w.log.Trim(t.Context(), checkpointAt(journal.Position{Seq: 2, Hash: a.Hash}, w.term)), meta.Corrupt)
	want(t, w.log.Trim(t.Context(), checkpointAt(journal.Position{Seq: 3, Hash: a.Hash}, w.term)), meta.Corrupt)
	w.trim(b)
	want(t, w.log.Trim(t.Context(), checkpointAt(a, w.term)), meta.Corrupt) // entry 1 is gone
	f.expect(t, a, "b")
}

func trimByOldOwner(t *testing.T, f Form) {
	o1 := f.writer(t)
	a := o1.append("a").Position()
	o1.append("b")
	f.writer(t)
	want(t, o1.log.Trim(t.Context(), checkpointAt(a, o1.term)), meta.Fenced)
	f.expect(t, journal.Position{}, "a", "b")
}

func checkpointReplyLost(t *testing.T, f Form) {
	cut := func(ctx context.Context, do func(context.Context) error) error {
		if err := do(ctx); err != nil {
			return err
		}
		return errCut
	}
	w := f.writer(t, times("PutCheckpoint", 2, cut))
	w.append("a")
	w.trim(w.append("b").Position())
	f.expect(t, w.at)
}

// The put of an older checkpoint hangs, a newer checkpoint is recorded and the log is
// trimmed; then the old put arrives.
func ghostCheckpoint(t *testing.T, f Form) {
	var ghost func()
	hang := func(ctx context.Context, do func(context.Context) error) error {
		ghost = func() {
			if err := do(context.WithoutCancel(ctx)); err != nil {
				t.Error(err)
			}
		}
		return errCut
	}
	w := f.writer(t, times("PutCheckpoint", 1, hang))
	w.trim(w.append("a").Position())
	newer := w.append("b").Position()
	w.trim(newer)
	ghost()
	cp, _, err := w.log.Checkpoint(t.Context())
	if err != nil || cp.Position != newer {
		t.Fatal(cp, err)
	}
}

func readTrimmedIsStale(t *testing.T, f Form) {
	w := f.writer(t)
	var at []journal.Position
	for i := range 10 {
		at = append(at, w.append(fmt.Sprint(i)).Position())
	}
	w.trim(at[6])
	_, err := f.all(t, journal.Position{})
	want(t, err, meta.Stale)
	_, err = f.all(t, at[3])
	want(t, err, meta.Stale)
	f.expect(t, at[5], "6", "7", "8", "9") // the checkpoint's entry is gone, the next entry is there
	f.expect(t, at[6], "7", "8", "9")
	// A reader whose position differs from the log's gets an error, and no entries.
	_, err = f.all(t, journal.Position{Seq: 6, Hash: journal.Hash{9}})
	want(t, err, meta.Corrupt)
}

func pinHoldsTrim(t *testing.T, f Form) {
	w := f.writer(t)
	var at []journal.Position
	for i := range 10 {
		at = append(at, w.append(fmt.Sprint(i)).Position())
	}
	w.trim(at[2])
	r := journal.New(Volume, f.Reader(t), nil)
	cp, release, err := r.Pin(t.Context())
	if err != nil || cp.Position != at[2] {
		t.Fatal(cp, err)
	}
	if seq, ok, err := w.log.OldestPin(t.Context()); seq != 3 || !ok || err != nil {
		t.Fatal(seq, ok, err)
	}
	w.trim(at[8])
	f.expect(t, cp.Position, "3", "4", "5", "6", "7", "8", "9")
	if err := release(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.trim(at[8])
	_, err = f.all(t, cp.Position)
	want(t, err, meta.Stale)
}

func followSeesAll(t *testing.T, f Form) {
	w := f.writer(t)
	w.append("0")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	got := make(chan string, 100)
	ended := make(chan error, 1)
	go func() {
		ended <- journal.New(Volume, f.Reader(t), nil).Follow(ctx, journal.Position{}, func(e journal.Entry) error {
			got <- string(e.Payload)
			return nil
		}, nil)
	}()
	for i := range 50 {
		if s := <-got; s != fmt.Sprint(i) {
			t.Fatalf("follower saw %q, want %d", s, i)
		}
		w.append(fmt.Sprint(i + 1))
	}
	why := errors.New("enough")
	cancel(why)
	if err := <-ended; !errors.Is(err, why) {
		t.Fatal(err)
	}
}

func followerTrimmedAway(t *testing.T, f Form) {
	w := f.writer(t)
	w.append("0")
	ended := make(chan error, 1)
	seen, goOn := make(chan struct{}), make(chan struct{})
	go func() {
		ended <- journal.New(Volume, f.Reader(t), nil).Follow(t.Context(), journal.Position{}, func(e journal.Entry) error {
			if e.Seq == 1 {
				close(seen)
				<-goOn
			}
			return nil
		}, nil)
	}()
	<-seen
	w.append("1")
	w.append("2")
	w.trim(w.append("3").Position())
	close(goOn)
	want(t, <-ended, meta.Stale)
}

func flippedBit(t *testing.T, f Form) {
	w := f.writer(t)
	w.append("one")
	e := w.append("two")
	w.append("three")
	b, err := journal.Encode(e)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b {
		bad := bytes.Clone(b)
		bad[i] ^= 1 << (i % 8)
		f.Damage(t, 2, bad)
		_, err := f.all(t, journal.Position{})
		if k := meta.KindOf(err); k != meta.Corrupt && (k != meta.Version || i != 2) {
			t.Fatalf("byte %d flipped: %v", i, err)
		}
	}
	// A whole, valid entry that is not the entry of this log.
	other := journal.Next(Volume, journal.Position{Seq: 1, Hash: journal.Hash{1}}, w.term, []byte("two"))
	if b, err = journal.Encode(other); err != nil {
		t.Fatal(err)
	}
	f.Damage(t, 2, b)
	_, err = f.all(t, journal.Position{})
	want(t, err, meta.Corrupt)
}

func gapIsCorrupt(t *testing.T, f Form) {
	w := f.writer(t)
	first := w.append("one").Position()
	w.append("two")
	w.append("three")
	f.Damage(t, 2, nil)
	_, err := f.all(t, journal.Position{})
	want(t, err, meta.Corrupt)
	_, err = f.all(t, first)
	want(t, err, meta.Corrupt)
	f.Damage(t, 3, nil)
	f.Damage(t, 1, nil)
	_, err = f.all(t, first)
	want(t, err, meta.Ahead)
	_, err = w.try(t.Context(), nil)
	want(t, err, meta.Corrupt) // the entry before is gone
}

// An entry is missing, and no checkpoint explains it.
func gapBehindCheckpoint(t *testing.T, f Form) {
	w := f.writer(t)
	first := w.append("one").Position()
	w.trim(first)
	w.append("two")
	w.append("three")
	f.Damage(t, 2, nil)
	_, err := f.all(t, first)
	want(t, err, meta.Corrupt)
}

// A checkpoint older than the recorded checkpoint would name entries that are gone.
func olderCheckpoint(t *testing.T, f Form) {
	w := f.writer(t)
	var at []journal.Position
	for i := range 6 {
		at = append(at, w.append(fmt.Sprint(i)).Position())
	}
	w.trim(at[1])
	_, release, err := journal.New(Volume, f.Reader(t), nil).Pin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.trim(at[4]) // the pin keeps entry 3
	want(t, w.log.Trim(t.Context(), checkpointAt(at[2], w.term)), meta.Invalid)
	if err := release(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func termGoesBack(t *testing.T, f Form) {
	w := f.writer(t)
	w.append("one")
	w = f.writer(t)
	two := w.append("two").Position()
	w.append("three")
	b, err := journal.Encode(journal.Next(Volume, two, w.term-1, []byte("three")))
	if err != nil {
		t.Fatal(err)
	}
	f.Damage(t, 3, b)
	_, err = f.all(t, journal.Position{})
	want(t, err, meta.Corrupt)
}

func divergedReader(t *testing.T, f Form) {
	w := f.writer(t)
	w.append("one")
	w.append("two")
	_, err := f.all(t, journal.Position{Seq: 2, Hash: journal.Hash{7}})
	want(t, err, meta.Corrupt)
	_, err = f.all(t, journal.Position{Seq: 9, Hash: journal.Hash{7}})
	want(t, err, meta.Ahead)
}

func sizeCounts(t *testing.T, f Form) {
	w := f.writer(t)
	size := func(l *journal.Journal) int64 {
		t.Helper()
		n, err := l.Size(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	var at []journal.Position
	for range 10 {
		at = append(at, w.append("0123456789").Position())
	}
	const one = journal.HeaderSize + 10
	if n := size(w.log); n != 10*one {
		t.Fatal(n)
	}
	w.append("0123456789")
	w.trim(at[7])
	if n := size(w.log); n != 4*one {
		t.Fatal(n)
	}
	if n := size(journal.New(Volume, f.Reader(t), nil)); n != 4*one {
		t.Fatal(n)
	}
}

// randomHistory lets owners come and go under random faults while a follower reads. Every
// acknowledged entry must be in the log once and in order, and no fenced entry may be
// there.
func randomHistory(t *testing.T, f Form) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	var mu sync.Mutex // of rng and ghosts: calls may come from anywhere
	var ghosts []func()
	chance := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return rng.IntN(n)
	}
	faults := func(ctx context.Context, op string, do func(context.Context) error) error {
		if op != "Commit" && op != "Inspect" && op != "PutCheckpoint" {
			return do(ctx)
		}
		switch chance(12) {
		case 0: // request lost
			return errCut
		case 1: // reply lost
			if err := do(ctx); err != nil {
				return err
			}
			return errCut
		case 2: // delayed: comes later, perhaps twice
			mu.Lock()
			ghosts = append(ghosts, func() {
				if err := do(context.WithoutCancel(ctx)); err != nil {
					t.Error(err)
				}
			})
			mu.Unlock()
			return errCut
		case 3:
			time.Sleep(time.Duration(chance(3)) * time.Millisecond)
		}
		return do(ctx)
	}
	haunt := func() {
		mu.Lock()
		var g func()
		if len(ghosts) > 0 {
			g = ghosts[rng.IntN(len(ghosts))]
		}
		mu.Unlock()
		if g != nil {
			g()
		}
	}
	acked, refused := map[string]meta.Seq{}, map[string]bool{}
	var owners []*writer
	owners = append(owners, f.writer(t, faults))
	for i := range 120 {
		haunt()
		w := owners[len(owners)-1]
		if chance(4) == 0 { // an owner deposed long ago still tries
			w = owners[chance(len(owners))]
		}
		p := fmt.Sprintf("%d by term %d", i, w.term)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		e, err := w.try(ctx, []byte(p))
		cancel()
		switch meta.KindOf(err) {
		case meta.KindOK:
			acked[p] = e.Seq
		case meta.Fenced, meta.Again:
			refused[p] = true
		case meta.Unavailable:
		default:
			t.Fatalf("seed %d: append: %v", seed, err)
		}
		if w == owners[len(owners)-1] && (err != nil || chance(15) == 0) {
			owners = append(owners, f.writer(t, faults))
		} else if chance(20) == 0 && w.at.Seq > 0 {
			err := w.log.Trim(t.Context(), checkpointAt(w.at, w.term))
			if k := meta.KindOf(err); k != meta.KindOK && k != meta.Fenced && k != meta.Corrupt && k != meta.Invalid {
				t.Fatalf("seed %d: trim: %v", seed, err)
			}
		}
	}
	for range 50 {
		haunt()
	}
	last := owners[len(owners)-1]
	after := journal.Position{}
	if cp, ok, err := last.log.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	} else if ok {
		after = cp.Position
	}
	es, err := f.all(t, after)
	if err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	there := map[string]meta.Seq{}
	for _, e := range es {
		there[string(e.Payload)] = e.Seq
		if refused[string(e.Payload)] {
			t.Errorf("seed %d: %q was refused and is there", seed, e.Payload)
		}
	}
	for p, seq := range acked {
		if seq > after.Seq && there[p] != seq {
			t.Errorf("seed %d: %q was acknowledged at %d and is at %d", seed, p, seq, there[p])
		}
	}
	if len(acked) == 0 {
		t.Errorf("seed %d: nothing was acknowledged", seed)
	}
}
