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

// openedLocked notes how a new opener, which f counts already, reads. The caller holds mu.
func (in *inode) openedLocked(f *file, info OpenInfo) {
	in.direct = info.DirectIO && (in.direct || f.users.opens == 1)
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

// Open counts an opener of a regular file and takes the lease for the flags of open(2);
// O_TRUNC truncates. Errors: IsDir, and NotPermitted (a sealed file, or a stream's, opened for
// writing).
func (v *Volume) Open(ctx context.Context, call *Call, ino meta.Ino, flags uint32) (OpenInfo, error) {
	in := v.node(ino)
	defer in.put()
	write := forWriting(flags)
	want := meta.LeaseShared
	if write {
		if err := v.readOnly("open"); err != nil {
			return OpenInfo{}, err
		}
		if in.keptByStream() { // before the file is taken from the gateway that writes it
			return OpenInfo{}, meta.E("open", meta.NotPermitted, v.subject(ino), nil)
		}
		v.settings.refresh(ctx)
		want = meta.LeaseExclusive
	}
	if err := v.back.sealNow(ctx, in); err != nil {
		return OpenInfo{}, err
	}
	f, sn, err := in.withMap(ctx, want)
	if err != nil {
		if !write || !errors.Is(err, meta.Busy) {
			return OpenInfo{}, err
		}
		in.mu.Lock() // contended: each write asks again
		f = in.fileLocked()
	}
	if a := &in.attr; in.attrOK {
		var bad meta.Kind
		switch {
		case a.IsDir():
			bad = meta.IsDir
		case write && (a.Flags&meta.FlagSealed != 0 || f.sealWant || in.keptByStreamLocked()):
			bad = meta.NotPermitted
		}
		if bad != 0 {
			in.mu.Unlock()
			return OpenInfo{}, meta.E("open", bad, v.subject(ino), nil)
		}
	}
	f.users.opens++
	if write {
		f.users.writers++
	}
	size := f.size
	info := in.openInfoLocked()
	in.openedLocked(f, info)
	if sn != nil && sn.followed {
		info.Entry.Attr = sn.attr
	}
	var head segment
	if sn == nil && !write {
		head = f.head()
	}
	in.mu.Unlock()
	v.reads.readAhead(head)
	if write && flags&flagTrunc != 0 {
		e, err := v.SetAttr(ctx, call, meta.SetAttr{Ino: ino, Mask: meta.SetSize | meta.SetMtimeNow, Size: 0})
		if err != nil {
			v.Release(ctx, ino, flags)
			return OpenInfo{}, err
		}
		info.Entry = e
		if size > 0 {
			info.KeepCache = false
		}
	}
	return info, nil
}

func (in *inode) openInfoLocked() OpenInfo {
	live := in.liveLocked() && in.attrOK
	info := OpenInfo{
		Entry:     in.entryLocked(nil, true),
		KeepCache: live && in.inval == 0 && !in.distrusted() && !in.loose,
		DirectIO:  !live,
		Sealed:    in.attr.Flags&meta.FlagSealed != 0 || in.vol.frozen(),
	}
	if live {
		in.loose = false // this open has the kernel drop the pages
	}
	if in.file != nil {
		info.Failures = in.file.toldBefore()
	}
	if !live {
		info.Entry = Entry{Volume: in.vol.id}
		info.Entry.Attr = in.attr
	}
	return info
}

// CreateOpen makes a regular file, or opens an existing file unless req.Excl, as Open does
// with these flags of open(2).
func (v *Volume) CreateOpen(ctx context.Context, call *Call, req meta.Create, flags uint32) (OpenInfo, error) {
	if req.Mode&meta.TypeMask == 0 {
		req.Mode |= meta.TypeRegular
	}
	return through(ctx, v, call, func(call *Call) (OpenInfo, error) { return v.dirs.createOpen(ctx, call, req, flags) }, func(info OpenInfo) {
		v.Release(v.c.ctx, info.Entry.Attr.Ino, flags)
	})
}

func (ds *directories) createOpen(ctx context.Context, call *Call, req meta.Create, flags uint32) (OpenInfo, error) {
	v := ds.v
	v.settings.refresh(ctx)
	res, stamp, steady, err := ds.create(ctx, call, &req, meta.LeaseExclusive)
	if err != nil {
		return OpenInfo{}, err
	}
	var info OpenInfo
	if res.Existed {
		v.learn(&res.Attr, stamp)
		info, err = v.Open(ctx, call, res.Attr.Ino, flags)
	} else {
		info = ds.opened(res, stamp, flags)
	}
	info.Entry = info.Entry.named(steady)
	return info, err
}

// opened counts the opener of a new file.
func (ds *directories) opened(res *meta.Result, stamp stamp, flags uint32) OpenInfo {
	in := ds.v.node(res.Attr.Ino)
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	f := in.fileLocked()
	f.users.opens++
	if forWriting(flags) {
		f.users.writers++
	}
	if in.learnLocked(&res.Attr, stamp) && !f.mapOK && f.mapGen == 0 {
		f.m, f.mapOK, f.size = extmap{}, true, 0
	}
	info := in.openInfoLocked()
	in.openedLocked(f, info)
	if info.DirectIO {
		info.Entry.Attr = res.Attr
	}
	return info
}

// Tmpfile makes and opens a regular file without a name (O_TMPFILE).
func (v *Volume) Tmpfile(ctx context.Context, call *Call, req meta.Tmpfile, flags uint32) (OpenInfo, error) {
	if err := v.readOnly("tmpfile"); err != nil {
		return OpenInfo{}, err
	}
	return through(ctx, v, call, func(call *Call) (OpenInfo, error) {
		res, stamp, err := v.owner.do(ctx, call, &req, meta.LeaseExclusive)
		if err != nil {
			return OpenInfo{}, err
		}
		info := v.dirs.opened(res, stamp, flags)
		in := v.node(res.Attr.Ino)
		defer in.put()
		in.mu.Lock()
		in.fileLocked().orphaned = true
		in.mu.Unlock()
		return info, nil
	}, func(info OpenInfo) {
		v.Release(v.c.ctx, info.Entry.Attr.Ino, flags)
	})
}

// Release undoes one successful Open, CreateOpen or Tmpfile with the same flags. Release does
// not fail: Flush and Fsync return errors of writes.
func (v *Volume) Release(ctx context.Context, ino meta.Ino, flags uint32) {
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	f := in.fileLocked()
	if f.users.opens == 0 {
		in.mu.Unlock()
		return // opened by a previous process of the mount
	}
	lastWriter := false
	if forWriting(flags) {
		f.users.writers--
		lastWriter = f.users.writers == 0
	}
	known, dead := in.attrOK && in.liveLocked(), in.deadLocked(f)
	last := in.releaseLocked(f, handleOf(ctx))
	settle := lastWriter && !dead && (f.own.chunk != nil || f.own.ended)
	if lastWriter && v.settings.policy.Load().SealOnClose && known && in.attr.Flags&meta.FlagSealed == 0 && !dead {
		f.sealWant, f.metaDirty = true, true
		settle = settle || f.own.chunk != nil
		v.back.listDirtyLocked(in)
	}
	if !dead {
		v.closed.closedLocked(in)
	}
	in.mu.Unlock()
	switch {
	case last && dead:
		v.back.bury(in)
		return
	}
	if settle {
		if v.settings.policy.Load().SealOnClose {
			v.back.settle(in)
		} else {
			in.pins.Add(1)
			v.c.spawn(func() {
				defer in.put()
				v.back.settle(in)
			})
		}
	}
}

// deadLocked reports that the file has no name and will not get one.
func (in *inode) deadLocked(f *file) bool {
	return !in.vol.frozen() && f.users.linking == 0 && (f.orphaned || in.attrOK && in.liveLocked() && in.attr.Nlink == 0)
}

// releaseLocked counts an opener less.
func (in *inode) releaseLocked(f *file, h Handle) (last bool) {
	f.users.opens--
	f.releaseHandle(h)
	return f.users.opens == 0
}

// settle commits a file without writers and seals its own chunk.
func (wb *writeBack) settle(in *inode) {
	v := wb.v
	if err := wb.flushOne(v.c.ctx, in, flushClose); err != nil {
		v.c.log.Warn("write back failed, will be tried again", "inode", v.subject(in.ino), "err", err)
		in.mu.Lock()
		if in.file != nil {
			in.file.fail(err, false)
		}
		in.mu.Unlock()
	}
}

// sealNow finishes a pending seal-on-close before a reader comes.
func (wb *writeBack) sealNow(ctx context.Context, in *inode) error {
	in.mu.Lock()
	want := in.file != nil && in.file.sealWant
	in.mu.Unlock()
	if !want {
		return nil
	}
	return wb.flushOne(ctx, in, flushClose)
}

// Backing returns a descriptor for passthrough: a regular file of the local file system with
// exactly the sealed file's bytes at the same offsets. The caller closes it. Errors:
// NotSupported when there is none.
func (v *Volume) Backing(ctx context.Context, ino meta.Ino) (*os.File, error) {
	in := v.node(ino)
	defer in.put()
	none := meta.E("passthrough", meta.NotSupported, v.subject(ino), nil)
	f, sn, err := in.withMap(ctx, meta.LeaseShared)
	if err != nil {
		return nil, err
	}
	fixed := in.attr.Flags&meta.FlagSealed != 0 || v.settings.policy.Load().Immutable
	if sn != nil || !fixed || f.size == 0 || f.m.count() != 1 {
		in.mu.Unlock()
		return nil, none
	}
	s, size := f.m.pages[0][0], f.size
	in.mu.Unlock()
	if s.ref == nil || s.off != 0 || s.pos != 0 || s.n != size {
		return nil, none
	}
	pl := *s.ref.place.Load()
	if !pl.Sealed || pl.Length != size {
		return nil, none
	}
	return v.c.chunks.Backing(ctx, pl)
}
