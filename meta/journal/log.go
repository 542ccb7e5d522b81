package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// New returns the log of a volume in the store s. lost is closed when the process must no
// longer own the volume (the lease ran out, or was released); nil for a reader.
func New(v meta.VolumeID, s Store, lost <-chan struct{}) *Journal {
	return &Journal{volume: v, store: s, lost: lost}
}

// Journal is the Log over any Store.
type Journal struct {
	volume meta.VolumeID
	store  Store
	lost   <-chan struct{}

	// appending is held by the single running Append or Trim, also during calls of the store:
	// nothing else may happen meanwhile.
	appending sync.Mutex
	head      Position // the end of the log as the owner knows the end; under appending
	known     bool     // head was read
	broken    error    // an outcome stayed unknown: no Append succeeds any more

	mu      sync.Mutex
	sizes   []int64  // bytes of entries first, first+1, ...; nil until scanned
	first   meta.Seq // number of sizes[0]
	total   int64
	scanned bool
}

var _ Log = (*Journal)(nil)

// Pauses between proposals of an entry of unknown outcome, and between reads of a follower
// without a hint.
const (
	minPause      = 5 * time.Millisecond
	maxPause      = 500 * time.Millisecond
	followPoll    = time.Second
	maxFollowPoll = 8 * time.Second
	// The first and the longest time to wait for a proposal before it is repeated.
	minPatience = 300 * time.Millisecond
	maxPatience = 8 * time.Second
)

func (j *Journal) subject(seq meta.Seq) string {
	return fmt.Sprintf("volume %d entry %d", j.volume, seq)
}

func (j *Journal) isLost() bool {
	select {
	case <-j.lost: // a nil channel never is
		return true
	default:
		return false
	}
}

// Append is documented at Log.
func (j *Journal) Append(ctx context.Context, e Entry) error {
	const op = "append to journal"
	j.appending.Lock()
	defer j.appending.Unlock()
	switch {
	case j.broken != nil:
		return meta.E(op, meta.Unavailable, j.subject(e.Seq), j.broken)
	case j.isLost():
		return meta.E(op, meta.Fenced, j.subject(e.Seq), errors.New("ownership was lost"))
	case e.Volume != j.volume:
		panic(fmt.Sprintf("journal: entry of volume %d appended to volume %d", e.Volume, j.volume))
	}
	value, err := Encode(e)
	if err != nil {
		return err
	}
	if err := j.findHead(ctx); err != nil {
		return err
	}
	if e.Seq != j.head.Seq+1 || e.Prev != j.head.Hash {
		return meta.E(op, meta.Again, j.subject(e.Seq), fmt.Errorf("the log ends at %s", j.head))
	}
	if err := j.commit(ctx, e.Seq, value); err != nil {
		return err
	}
	j.head = e.Position()
	j.grew(e.Seq, int64(len(value)))
	return nil
}

// findHead reads the end of the log once; afterwards only the owner moves the end.
func (j *Journal) findHead(ctx context.Context) error {
	if j.known {
		return nil
	}
	last, err := j.store.Last(ctx)
	if err != nil {
		return err
	}
	if last.Value != nil {
		e, err := j.decode(last)
		if err != nil {
			return err
		}
		j.head = e.Position()
	}
	j.known = true
	return nil
}

// commit proposes value as entry seq until the outcome is certain.
//
// Reading after a timeout, and taking absence for failure, would be wrong: the proposal may
// still be under way and be committed later. So while this owner's key exists, commit proposes
// the same bytes again; whichever proposal wins, the log has the entry once. A deleted key
// never returns with the same revision, so after the deletion an absent entry stays absent.
func (j *Journal) commit(ctx context.Context, seq meta.Seq, value []byte) error {
	const op = "append to journal"
	pause := minPause
	tries := 0
	for uncertain := false; ; tries++ {
		// A proposal may be lost with etcd's leader, or hang with a stopped member. The next
		// proposal takes another way; usually etcd has three members.
		try, cancel := context.WithTimeout(ctx, min(minPatience<<min(tries/3, 8), maxPatience))
		done, err := j.store.Commit(try, seq, value)
		cancel()
		if err == nil && done {
			return nil
		}
		if k := meta.KindOf(err); err != nil && !uncertain && (k == meta.NoSpace || k == meta.ResourceExceeded) {
			// etcd applies the proposal that fills the quota, but answers with the same error.
			in, rerr := j.store.Inspect(ctx, seq)
			switch {
			case rerr == nil && bytes.Equal(in.Value, value):
				return nil
			case rerr == nil:
				return err
			}
		}
		refused := err == nil
		uncertain = uncertain || !refused
		in, rerr := j.store.Inspect(ctx, seq)
		switch {
		case rerr != nil:
			err = errors.Join(err, rerr)
		case in.Value != nil && bytes.Equal(in.Value, value):
			return nil
		case !in.Owned:
			return meta.E(op, meta.Fenced, j.subject(seq), errors.New("another owner took the volume"))
		case in.Value != nil:
			return meta.E(op, meta.Corrupt, j.subject(seq), errors.New("it exists with other bytes under this owner"))
		case refused && !in.Prev:
			return meta.E(op, meta.Corrupt, j.subject(seq), errors.New("the entry before it is gone"))
		}
		if err := j.sleep(ctx, &pause, err); err != nil {
			j.broken = fmt.Errorf("the outcome of entry %d is unknown: %w", seq, err)
			return meta.E(op, meta.Unavailable, j.subject(seq), j.broken)
		}
	}
}

// sleep waits before another attempt; it fails when ctx has ended or ownership was lost.
func (j *Journal) sleep(ctx context.Context, pause *time.Duration, cause error) error {
	t := time.NewTimer(*pause)
	defer t.Stop()
	*pause = min(2**pause, maxPause)
	select {
	case <-t.C:
		return nil
	case <-j.lost:
		return errors.Join(errors.New("ownership was lost"), cause)
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), cause)
	}
}

func (j *Journal) decode(r Record) (Entry, error) {
	e, err := Decode(r.Value)
	if err == nil && (e.Volume != j.volume || e.Seq != r.Seq) {
		err = meta.E("decode journal entry", meta.Corrupt, "", fmt.Errorf("it says volume %d entry %d", e.Volume, e.Seq))
	}
	if err != nil {
		return Entry{}, meta.E("read journal", meta.KindOf(err), j.subject(r.Seq), err)
	}
	return e, nil
}

// Pages of a read: entries at most, and the bytes below which pages grow.
const (
	minPage  = 4
	maxPage  = 32
	pageGoal = 512 << 10
)

// pages calls fn for every record from a number on, up to the end.
func (j *Journal) pages(ctx context.Context, from meta.Seq, fn func(Record) error) error {
	for limit := minPage; ; {
		recs, err := j.store.Range(ctx, from, limit)
		if err != nil {
			return err
		}
		var n int
		for _, r := range recs {
			if err := fn(r); err != nil {
				return err
			}
			n += len(r.Value)
			from = r.Seq + 1
		}
		if len(recs) < limit {
			return nil
		}
		if n < pageGoal {
			limit = min(2*limit, maxPage)
		} else {
			limit = minPage
		}
	}
}

// Read is documented at Log.
func (j *Journal) Read(ctx context.Context, after Position, fn func(Entry) error) error {
	_, err := j.read(ctx, Chain{Volume: j.volume, At: after}, false, fn)
	return err
}

// read is Read. With onward, read does not read the entry at the position again. The next entry
// has the hash of the skipped entry, but a log that was set back goes unnoticed.
func (j *Journal) read(ctx context.Context, chain Chain, onward bool, fn func(Entry) error) (Chain, error) {
	after := chain.At
	from := after.Seq
	if onward {
		from++
	}
	seen := onward // something at or after the position
	err := j.pages(ctx, max(from, 1), func(r Record) error {
		seen = true
		if r.Seq > chain.At.Seq+1 {
			return j.missing(ctx, chain.At.Seq+1, r.Seq)
		}
		e, err := j.decode(r)
		if err != nil {
			return err
		}
		if r.Seq == after.Seq { // the reader's last entry
			if e.Hash != after.Hash {
				return meta.E("read journal", meta.Corrupt, j.subject(r.Seq), fmt.Errorf("its hash is %s, the reader has %s", e.Hash, after.Hash))
			}
			return nil
		}
		if err := chain.Step(e); err != nil {
			return err
		}
		return fn(e)
	})
	if err == nil && !seen {
		// After the first entry a log is never empty: the last entry is kept.
		if after.Seq > 0 {
			return chain, meta.E("read journal", meta.Ahead, j.subject(after.Seq), errors.New("the log ends before it: etcd was set back to an older copy. Give it its newest data back, or let 'penstock cluster restore' decide (docs/operations.md, etcd is lost)"))
		}
		if _, ok, cerr := j.Checkpoint(ctx); cerr != nil || ok {
			return chain, errors.Join(cerr, meta.E("read journal", meta.Corrupt, j.subject(1), errors.New("a checkpoint without a log")))
		}
	}
	return chain, err
}

// missing returns why the entries from want up to before found are absent.
func (j *Journal) missing(ctx context.Context, want, found meta.Seq) error {
	cp, ok, err := j.Checkpoint(ctx)
	if err != nil {
		return err
	}
	if ok && found <= cp.Seq {
		return meta.E("read journal", meta.Stale, j.subject(want), fmt.Errorf("trimmed: a checkpoint stands at %d", cp.Seq))
	}
	return meta.E("read journal", meta.Corrupt, j.subject(want), fmt.Errorf("a gap: the next entry is %d", found))
}

// Follow is documented at Log.
func (j *Journal) Follow(ctx context.Context, after Position, fn func(Entry) error, caughtUp func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hint := j.store.Hint(ctx)
	wait := followPoll
	poll := time.NewTimer(wait)
	defer poll.Stop()
	chain := Chain{Volume: j.volume, At: after}
	for onward := false; ; {
		before := chain.At
		var err error
		chain, err = j.read(ctx, chain, onward, fn)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && meta.KindOf(err) != meta.Unavailable:
			return err
		case err == nil && caughtUp != nil:
			caughtUp()
		}
		// A log without new entries is polled less often. Hints make a follower quick, polling
		// makes a follower reliable.
		if wait = min(2*wait, maxFollowPoll); chain.At != before || err != nil {
			wait = followPoll
		}
		poll.Reset(wait)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case _, ok := <-hint:
			if !ok {
				hint = nil // the poll goes on
			}
			onward = true
		case <-poll.C:
			onward = false
		}
	}
}

// Entry is documented at Log.
func (j *Journal) Entry(ctx context.Context, seq meta.Seq) (Entry, error) {
	recs, err := j.store.Range(ctx, seq, 1)
	if err != nil {
		return Entry{}, err
	}
	if len(recs) == 0 || recs[0].Seq != seq {
		return Entry{}, meta.E("read journal", meta.NotFound, j.subject(seq), nil)
	}
	return j.decode(recs[0])
}

// Checkpoint is documented at Log.
func (j *Journal) Checkpoint(ctx context.Context) (Checkpoint, bool, error) {
	cp, _, err := j.checkpoint(ctx)
	return cp, cp.Seq > 0, err
}

// checkpoint returns the record and the record's revision; a zero Seq means: no record.
func (j *Journal) checkpoint(ctx context.Context) (Checkpoint, int64, error) {
	b, rev, err := j.store.Checkpoint(ctx)
	if err != nil || b == nil {
		return Checkpoint{}, rev, err
	}
	cp, err := DecodeCheckpoint(b)
	if err == nil && (cp.Volume != j.volume || cp.Seq == 0) {
		err = meta.E("read checkpoint", meta.Corrupt, "", fmt.Errorf("it says volume %d entry %d", cp.Volume, cp.Seq))
	}
	return cp, rev, err
}

// Trim is documented at Log.
func (j *Journal) Trim(ctx context.Context, cp Checkpoint) error {
	const op = "trim journal"
	if cp.Volume != j.volume || cp.Seq == 0 {
		panic(fmt.Sprintf("journal: checkpoint of volume %d at entry %d given to volume %d", cp.Volume, cp.Seq, j.volume))
	}
	at, err := j.store.Range(ctx, cp.Seq, 1)
	if err != nil {
		return err
	}
	if len(at) == 0 || at[0].Seq != cp.Seq {
		return meta.E(op, meta.Corrupt, j.subject(cp.Seq), errors.New("the checkpoint's entry is not there"))
	}
	if e, err := j.decode(at[0]); err != nil {
		return err
	} else if e.Hash != cp.Hash {
		return meta.E(op, meta.Corrupt, j.subject(cp.Seq), fmt.Errorf("its hash is %s, the checkpoint's is %s", e.Hash, cp.Hash))
	}
	if err := j.record(ctx, cp); err != nil {
		return err
	}
	before := cp.Seq
	// Pins are read after the checkpoint was put: see Pin.
	if pin, ok, err := j.store.OldestPin(ctx); err != nil {
		return err
	} else if ok {
		before = min(before, pin)
	}
	if err := j.store.DeleteBefore(ctx, before); err != nil {
		return err
	}
	j.shrank(before)
	return nil
}

// record writes the checkpoint, and reads the record to verify the bytes. The write compares
// the record's revision, so that a late duplicate of an older write changes nothing.
func (j *Journal) record(ctx context.Context, cp Checkpoint) error {
	const op = "record checkpoint"
	value, err := EncodeCheckpoint(cp)
	if err != nil {
		return err
	}
	for pause := minPause; ; {
		old, rev, err := j.checkpoint(ctx)
		if err == nil && old.Seq > cp.Seq {
			return meta.E(op, meta.Invalid, j.subject(cp.Seq), fmt.Errorf("one at %d is recorded", old.Seq))
		}
		if err != nil {
			return err
		}
		done, err := j.store.PutCheckpoint(ctx, rev, value)
		if k := meta.KindOf(err); err != nil && (k == meta.NoSpace || k == meta.ResourceExceeded) {
			return err
		}
		got, _, rerr := j.store.Checkpoint(ctx)
		if rerr == nil && bytes.Equal(got, value) {
			return nil
		}
		if err == nil && rerr == nil && !done {
			in, err := j.store.Inspect(ctx, cp.Seq)
			if err == nil && !in.Owned {
				return meta.E(op, meta.Fenced, j.subject(cp.Seq), errors.New("another owner took the volume"))
			}
		}
		if err := j.sleep(ctx, &pause, errors.Join(err, rerr)); err != nil {
			return meta.E(op, meta.Unavailable, j.subject(cp.Seq), err)
		}
	}
}

// Pin is documented at Log.
func (j *Journal) Pin(ctx context.Context) (Checkpoint, func(context.Context) error, error) {
	// Trim writes the checkpoint, then reads the pins, then deletes. So if the checkpoint is
	// unchanged after the pin was written, a later Trim sees the pin.
	for {
		cp, _, err := j.checkpoint(ctx)
		if err != nil {
			return Checkpoint{}, nil, err
		}
		if cp.Seq == 0 {
			return Checkpoint{}, nil, meta.E("pin checkpoint", meta.NotFound, fmt.Sprintf("volume %d", j.volume), nil)
		}
		release, err := j.store.Pin(ctx, cp.Seq)
		if err != nil {
			return Checkpoint{}, nil, err
		}
		again, _, err := j.checkpoint(ctx)
		if err == nil && again.Position == cp.Position {
			return again, release, nil
		}
		if rerr := release(ctx); err != nil || rerr != nil {
			return Checkpoint{}, nil, errors.Join(err, rerr)
		}
	}
}

// OldestPin is documented at Log.
func (j *Journal) OldestPin(ctx context.Context) (meta.Seq, bool, error) {
	return j.store.OldestPin(ctx)
}

// Size is documented at Log. The first call reads the whole log.
func (j *Journal) Size(ctx context.Context) (int64, error) {
	j.appending.Lock()
	defer j.appending.Unlock()
	j.mu.Lock()
	done, total := j.scanned, j.total
	j.mu.Unlock()
	if done {
		return total, nil
	}
	var sizes []int64
	var first meta.Seq
	total = 0
	err := j.pages(ctx, 1, func(r Record) error {
		if first == 0 {
			first = r.Seq
		}
		sizes = append(sizes, int64(len(r.Value)))
		total += int64(len(r.Value))
		return nil
	})
	if err != nil || j.lost == nil {
		return total, err // a reader can't count the entries of other writers
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.sizes, j.first, j.total, j.scanned = sizes, first, total, true
	return total, nil
}

func (j *Journal) grew(seq meta.Seq, n int64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.scanned {
		return
	}
	if len(j.sizes) == 0 {
		j.first = seq
	}
	j.sizes = append(j.sizes, n)
	j.total += n
}

func (j *Journal) shrank(before meta.Seq) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for len(j.sizes) > 0 && j.first < before {
		j.total -= j.sizes[0]
		j.sizes = j.sizes[1:]
		j.first++
	}
}
