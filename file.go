package penstock

import (
	"context"
	"errors"
	"os"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// file is the state of a regular file that was opened, read or written. The inode's mu guards
// it.
//
// Operations that span several requests take turns: turnPush (appending buffered bytes to
// chunks) and turnCommit (telling the volume). A flush takes turnCommit, takes turnPush while
// it appends, and leaves turnPush to streams while it syncs. truncate and similar operations
// take both. The holder of a turn waits for servers only, never for the turn of another file,
// so the turns of many files may be held together.
type file struct {
	in *inode
	// m maps the file's bytes while mapOK; then size is the file's size. INVARIANT: blobs that
	// are not clean exist only under an exclusive lease.
	m      extmap
	mapOK  bool
	mapGen uint32 // counts own changes of the map by requests
	size   uint64
	mtime  meta.Time // of uncommitted writes; zero: none
	ctime  meta.Time
	// metaDirty: mtime or size is not committed though all bytes are.
	metaDirty  bool
	atimeDirty bool
	orphaned   bool      // the file has no name: its last name was removed, or it never had a name
	sealWant   bool      // seal-on-close: to be sealed with the next commit
	pushing    bool      // a goroutine streams
	ahead      bool      // the map was fetched ahead of its use
	listed     bool      // in the volume's list of dirty files
	tellClosed bool      // the owner asked for a message when no session writes the file any more
	failed     *failures // nil: nothing failed

	turns fileTurns
	users fileUsers

	uncommitted int64 // bytes of blobs that are not clean
	unpushed    int64 // of these, bytes not appended yet
	puts        uint32
	barred      uint32 // puts when a barrier took the lease back last
	epoch       uint64 // the volume's epoch in which the buffered bytes were written
	appends     uint8  // consecutive fsyncs that found only bytes added at the end
	// lo and hi bound the offsets of blobs that are not clean.
	lo, hi uint64

	own ownChunk

	promised promise // quota promised for uncommitted bytes
	notes    fileNotes
}

// ownChunk is a file's own open chunk: byte off of the file is byte off-base of the chunk.
type ownChunk struct {
	chunk *chunk // nil: the file has none
	base  uint64
	ended bool // the journal has an open-ended extent in chunk
	// upTo: so many bytes of chunk are synced and belong to the file.
	upTo uint64
}

// fileUsers counts the operations and openers that need a file.
type fileUsers struct {
	opens   int32
	writers int32 // of opens, for writing
	reads   int32 // in flight
	linking int32 // unanswered Links that may give the file its first name
}

// fileNotes are a file's notes for a successor. Notes that successors no longer need are
// collected in erased and erased in order.
type fileNotes struct {
	erasing bool
	erased  []keep.Slot
}

// fileTurns order the operations on a file that span several requests, and the writers that wait
// for such an operation.
type fileTurns struct {
	busy    uint8         // turns that are taken
	gate    int32         // writers wait while not zero
	gates   uint32        // number of times that the gate was shut
	want    int32         // writers waiting for the exclusive lease
	pushers int32         // waiting for the push turn, the stream apart
	wake    chan struct{} // closed at the next change; nil: nobody waits
}

// shut has writers wait until gate is lowered again. The inode's mu is held.
func (t *fileTurns) shut() {
	t.gate++
	t.gates++
}

const (
	turnPush uint8 = 1 << iota
	turnCommit
)

func (in *inode) fileLocked() *file {
	if in.file == nil {
		in.file = &file{in: in, epoch: in.vol.owner.epoch.Load()}
	}
	return in.file
}

// changed wakes every goroutine that waits for the file.
func (t *fileTurns) changed() {
	if t.wake != nil {
		close(t.wake)
		t.wake = nil
	}
}

// wait releases mu until the file changes or ctx ends.
func (in *inode) wait(ctx context.Context, f *file) error {
	if f.turns.wake == nil {
		f.turns.wake = make(chan struct{})
	}
	ch := f.turns.wake
	in.mu.Unlock()
	defer in.mu.Lock()
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		return meta.E("wait", meta.Interrupted, "", context.Cause(ctx))
	}
}

// take waits for turns; mu is held, and released meanwhile.
func (in *inode) take(ctx context.Context, turns uint8) (*file, error) {
	for {
		f := in.fileLocked()
		if f.turns.busy&turns == 0 {
			f.turns.busy |= turns
			return f, nil
		}
		// A stream, which takes the push turn again and again, lets others in.
		if turns&turnPush != 0 {
			f.turns.pushers++
		}
		err := in.wait(ctx, f)
		if turns&turnPush != 0 {
			f.turns.pushers--
		}
		if err != nil {
			return nil, err
		}
	}
}

func (t *fileTurns) leave(turns uint8) {
	t.busy &^= turns
	t.changed()
}

func (f *file) forgetMap() {
	if f.uncommitted > 0 || f.own.ended {
		return // only a file of an expired session gets here; Expired drops its blobs
	}
	f.m, f.mapOK = extmap{}, false
	f.mapGen++
	if f.ahead {
		f.ahead = false
		f.in.vol.opens.unused.Add(1)
	}
}

const (
	accessMask = 3 // O_ACCMODE
	flagTrunc  = 0o1000
)

func forWriting(flags uint32) bool { return flags&accessMask != uint32(os.O_RDONLY) }

// grantTries bounds the attempts to get a lease on a contended inode before an answer without
// a lease is used. heldTries bounds the attempts while the lease is held but the session's
// clock has run out. One attempt takes up to 20 ms.
const (
	grantTries = 100
	heldTries  = 3000
)

// snapshot is Open's answer about a file, for one use without a lease.
type snapshot struct {
	m       extmap
	size    uint64
	granted bool // the answer came with a lease
	// followed: another client appends to the file; there is no lease for this answer.
	followed bool
	attr     meta.Attr
}

// loadMap fetches the file's map under at least the wanted lease. If the owner grants no lease
// (the inode is contended), loadMap returns a snapshot for one use.
// With cached, the bytes will be cached, so that an answer must come with a lease.
func (in *inode) loadMap(ctx context.Context, want meta.LeaseMode, cached bool) (*snapshot, error) {
	in.mu.Lock()
	held := in.lease
	gen := uint32(0)
	if in.file != nil {
		gen = in.file.mapGen
	}
	in.mu.Unlock()
	ask := want
	if held >= want {
		// A reader under a held lease must not queue for another lease: the owner may be
		// recalling this client's lease, and the recall waits for the page that the reader has
		// locked.
		ask = meta.LeaseNone
	}
	sn, attr, first, err := in.fetchMap(ctx, ask, cached)
	if err != nil {
		return nil, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	sn.granted = sn.granted && in.since > first.tick // and not void, see drop.go
	in.installLocked(&sn, &attr, first, gen)
	return &sn, nil
}

// fetchMap fetches a file's map and returns the stamp under which it may be cached.
func (in *inode) fetchMap(ctx context.Context, ask meta.LeaseMode, cached bool) (sn snapshot, attr meta.Attr, first stamp, err error) {
	v := in.vol
	for off := uint64(0); ; {
		op := &meta.Open{Ino: in.ino, Off: off, Cached: cached}
		if ask == meta.LeaseExclusive && off == 0 {
			op.Also = v.barred.others(v, in.ino)
		}
		res, stamp, err := v.owner.do(ctx, nil, op, ask)
		if err != nil {
			return snapshot{}, attr, first, err
		}
		if off == 0 {
			attr, first = res.Attr, stamp
			sn.attr, sn.followed = res.Attr, res.Attr.Flags&meta.FlagFollowed != 0
		} else if res.Attr.Change != attr.Change {
			// Someone wrote between two pages of extents: from the start.
			sn, off = snapshot{}, 0
			continue
		}
		sn.add(v, res, off)
		if res.EOF || len(res.Extents) == 0 {
			break
		}
		off = res.Extents[len(res.Extents)-1].End()
	}
	sn.granted = first.granted(in.ino)
	return sn, attr, first, nil
}

// add adds one answer of Open to the snapshot.
func (sn *snapshot) add(v *Volume, res *meta.Result, off uint64) {
	v.chunks.addPlaces(res.Places)
	if off == 0 {
		sn.size = res.Attr.Size
		if res.Attr.Flags&meta.FlagInline != 0 && len(res.Data) > 0 {
			// Extents may follow the inline bytes (preallocated space).
			sn.m.append(segment{n: uint64(len(res.Data)), b: &blob{data: res.Data, clean: true, frozen: true}})
		}
	}
	for _, e := range res.Extents {
		sn.m.append(v.chunks.committed(e))
	}
}

// installLocked makes a complete snapshot the file's map if a lease covers it and this client
// has not changed the map since gen.
func (in *inode) installLocked(sn *snapshot, attr *meta.Attr, stamp stamp, gen uint32) bool {
	f := in.fileLocked()
	if !in.learnLocked(attr, stamp) || f.mapOK || f.mapGen != gen || in.attr.Change != attr.Change {
		return false
	}
	f.m, f.mapOK, f.size = sn.m, true, sn.size
	f.turns.changed()
	return true
}

// withMap waits until the map may be used under at least the wanted lease, and returns with mu
// held. After many refusals it returns a snapshot instead or, for an exclusive lease, fails
// with Busy.
func (in *inode) withMap(ctx context.Context, want meta.LeaseMode) (*file, *snapshot, error) {
	return in.withMapFor(ctx, want, nil)
}

// withMapFor is withMap for a read of the range rng; rng is nil if the caller reads no bytes.
func (in *inode) withMapFor(ctx context.Context, want meta.LeaseMode, rng *byteRange) (*file, *snapshot, error) {
	in.mu.Lock()
	for try := 0; ; try++ {
		f := in.fileLocked()
		if f.ahead {
			f.ahead = false
			in.vol.opens.used.Add(1)
		}
		if want == meta.LeaseShared && in.recall != nil {
			if err := in.awaitTurn(ctx, rng); err != nil {
				in.mu.Unlock()
				return nil, nil, err
			}
			f = in.fileLocked()
		}
		if f.mapOK && in.lease >= want && in.liveLocked() {
			return f, nil, nil
		}
		if try == 0 && want == meta.LeaseShared {
			if done := in.vol.opens.fetch(in.ino); done != nil && in.aheadLocked() {
				in.mu.Unlock()
				select {
				case <-done:
				case <-time.After(aheadWait): // a neighbour in the same request may be blocked
				case <-ctx.Done():
					return nil, nil, meta.E("open", meta.Interrupted, in.vol.subject(in.ino), context.Cause(ctx))
				}
				in.mu.Lock()
				continue
			}
		}
		f.turns.want++
		cached := rng != nil && in.cachesPagesLocked(f)
		in.mu.Unlock()
		sn, err := in.loadMap(ctx, want, cached)
		in.mu.Lock()
		if f = in.fileLocked(); f.turns.want > 0 {
			f.turns.want--
		}
		if err != nil {
			f.turns.changed()
			in.mu.Unlock()
			return nil, nil, err
		}
		if f.mapOK && in.lease >= want && in.liveLocked() {
			continue
		}
		// This reply granted the lease, and the owner recalled the lease before this goroutine
		// ran. The reply is good for one read, because a kernel that keeps the page is asked
		// to drop the page after the read. If another reply had granted the lease, nobody
		// would ask the kernel, and the reply must not be used.
		if want == meta.LeaseShared && (sn.granted || sn.followed || in.vol.frozen()) {
			return f, sn, nil
		}
		// While the session's clock has run out, a held lease can't be trusted but must be
		// waited for: it may cover buffered bytes that the owner doesn't know.
		held := f.mapOK && in.lease >= want
		if want == meta.LeaseShared && try >= grantTries && !held {
			return f, sn, nil
		}
		if try >= grantTries && !held || try >= heldTries {
			in.mu.Unlock()
			return nil, nil, meta.E("open", meta.Busy, in.vol.subject(in.ino), nil)
		}
		if try > 2 {
			in.mu.Unlock()
			select {
			case <-time.After(time.Duration(min(try, 20)) * time.Millisecond):
			case <-ctx.Done():
				return nil, nil, meta.E("open", meta.Interrupted, in.vol.subject(in.ino), context.Cause(ctx))
			}
			in.mu.Lock()
		}
	}
}

// cachesPagesLocked reports that the kernel may keep the bytes of a read in its cache. The caller
// holds mu.
func (in *inode) cachesPagesLocked(f *file) bool {
	return in.vol.c.cfg.Notify != nil && !(in.direct && f.users.opens > 0)
}

// keptByStreamLocked reports that the file is known to be a stream's, and that this client does
// not serve streams. The caller holds mu.
func (in *inode) keptByStreamLocked() bool {
	return in.attr.Flags&meta.FlagStream != 0 && !in.vol.c.cfg.Streams
}

func (in *inode) keptByStream() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.keptByStreamLocked()
}

// deadLocked reports that the file has no name and will not get one.
func (in *inode) deadLocked(f *file) bool {
	return !in.vol.frozen() && f.users.linking == 0 && (f.orphaned || in.attrOK && in.liveLocked() && in.attr.Nlink == 0)
}

// pageTry is how long a page waits for the exclusive lease before WritePage checks whether the
// present lease is being recalled: the page must go in before the recall ends.
const pageTry = 5 * time.Millisecond

// toWritePage waits until a page may be put in, and returns with mu held.
func (in *inode) toWritePage(ctx context.Context, epoch uint64) (*file, error) {
	v := in.vol
	var gated time.Time
	for {
		in.mu.Lock()
		if v.owner.epoch.Load() != epoch || in.inval > 0 {
			in.mu.Unlock()
			return nil, meta.E("write a page of a mapping", meta.SessionExpired, v.subject(in.ino), errors.New("the session in which the page was stored into has ended"))
		}
		f := in.fileLocked()
		if r := in.recall; r != nil && r.pages {
			gates := int32(0)
			if r.gated {
				gates = 1
			}
			switch {
			case f.turns.gate > gates: // a truncation or a similar operation
				if gated.IsZero() {
					gated = time.Now()
				}
				if time.Since(gated) > pageFlushMax {
					in.mu.Unlock()
					return nil, meta.E("write a page of a mapping", meta.IO, v.subject(in.ino), errors.New("the lease is being taken back, and another operation on the file waits for that"))
				}
				in.mu.Unlock()
				time.Sleep(pageTry)
				continue
			case in.lease == meta.LeaseNone:
				in.mu.Unlock()
				return nil, meta.E("write a page of a mapping", meta.IO, v.subject(in.ino), errors.New("the lease is gone"))
			case f.mapOK:
				return f, nil
			}
			in.mu.Unlock()
			if _, err := in.loadMap(ctx, in.held(), true); err != nil {
				return nil, err
			}
			continue
		}
		if f.mapOK && in.lease == meta.LeaseExclusive && in.liveLocked() && f.turns.gate == 0 {
			return f, nil
		}
		in.mu.Unlock()
		if err := in.awaitPageTurn(ctx); err != nil {
			return nil, err
		}
	}
}

// held returns the present lease.
func (in *inode) held() meta.LeaseMode {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.lease
}

// awaitPageTurn asks for the exclusive lease, and gives up when the present lease is being
// recalled: the owner grants no other before this page is in the file.
func (in *inode) awaitPageTurn(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	got := make(chan error, 1)
	in.pins.Add(1)
	in.vol.c.spawn(func() {
		defer in.put()
		f, _, err := in.withMap(ctx, meta.LeaseExclusive)
		if err == nil {
			if f.turns.gate != 0 && (in.recall == nil || !in.recall.pages) {
				err = in.wait(ctx, f)
			}
			in.mu.Unlock()
		}
		got <- err
	})
	tick := time.NewTicker(pageTry)
	defer tick.Stop()
	for {
		select {
		case err := <-got:
			if errors.Is(err, meta.Busy) {
				return nil // no other operation can write the page: ask again
			}
			return err
		case <-tick.C:
		}
		in.mu.Lock()
		recalled := in.recall != nil && in.recall.pages
		in.mu.Unlock()
		if recalled {
			cancel()
			<-got
			return nil
		}
	}
}

// beginRead counts a read in flight, so that a recall waits for it.
func (in *inode) beginRead(f *file, off int64, n int) {
	f.users.reads++
	if r := in.recall; r != nil && r.track {
		r.read = append(r.read, byteRange{off, int64(n)})
	}
}

func (in *inode) endRead() {
	in.mu.Lock()
	if f := in.file; f.users.reads > 0 {
		f.users.reads--
		if f.users.reads == 0 {
			f.turns.changed()
		}
	}
	in.mu.Unlock()
}

// reload fetches the places of a file's committed bytes again, and keeps the buffered bytes on
// top. The old map stays until the answer arrives: writers continue with it, and readers read
// only what is buffered.
func (rd *fileReads) reload(ctx context.Context, in *inode) error {
	ctx = context.WithValue(ctx, pastIndex{}, true)
	in.mu.Lock()
	f, err := in.take(ctx, turnCommit|turnPush)
	if err != nil {
		in.mu.Unlock()
		return err
	}
	ended := f.own.ended
	in.mu.Unlock()
	if ended {
		err = rd.v.back.flushHeld(in, flushClose)
	}
	var sn snapshot
	var attr meta.Attr
	var st stamp
	if err == nil {
		sn, attr, st, err = in.fetchMap(ctx, meta.LeaseNone, false)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	f = in.fileLocked()
	if err == nil && f.mapOK {
		in.rebaseLocked(&sn, &attr, st)
	}
	f.turns.leave(turnCommit | turnPush)
	return err
}

// toWrite waits until the file may be written, and returns with mu held.
func (in *inode) toWrite(ctx context.Context) (*file, error) {
	for {
		f, _, err := in.withMap(ctx, meta.LeaseExclusive)
		if err != nil || f.turns.gate == 0 {
			return f, err
		}
		err = in.wait(ctx, f)
		in.mu.Unlock()
		if err != nil {
			return nil, err
		}
	}
}

// rebaseLocked puts the owner's answer about a file below the file's buffered bytes. The
// caller has held both turns since before the request, so that no buffered byte was committed
// meanwhile.
func (in *inode) rebaseLocked(sn *snapshot, attr *meta.Attr, stamp stamp) {
	f := in.file
	keep := func(*blob) {} // blobs move from map to map
	valid := in.learnLocked(attr, stamp)
	switch {
	case f.uncommitted > 0:
		if !valid {
			return // the cached map is as good
		}
		f.m.each(0, 1<<63, func(s *segment) bool {
			if s.b != nil && !s.b.clean {
				sn.m.replace(s.off, s.end(), []segment{*s}, keep)
			}
			return true
		})
		f.m.replace(0, 1<<63, nil, keep)
		f.m = sn.m
	case valid && in.attr.Change == attr.Change:
		f.m, f.size = sn.m, sn.size
	default:
		f.m, f.mapOK = extmap{}, false
	}
	f.mapGen++
	f.turns.changed()
}
