package penstock

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/index"
)

// A volume that shows a snapshot can have all names, attributes and extents at hand: the index
// of the snapshot (package meta/index), which the volume's owner makes once and keeps in
// chunks of the volume. The client fetches the index in the background, keeps it as a file of
// Config.IndexDir, shared by all processes of the machine, and maps it into memory. From then
// on the client answers lookups, attributes, listings and extents from the index. Until then,
// and if the index turns out to be damaged, the owner answers.

// indexSession finds indexes.
type indexSession interface {
	SnapshotIndex(ctx context.Context, v meta.VolumeID, snapshot string) (*admin.SnapshotIndex, error)
}

const (
	// indexPoll and indexPollMost bound the interval of requests for an index that is being
	// made; indexRetry and indexRetryMost bound the pause after a failure.
	indexPoll      = 200 * time.Millisecond
	indexPollMost  = 5 * time.Second
	indexRetry     = 30 * time.Second
	indexRetryMost = 10 * time.Minute
	// indexPiece is the size of one read of an index; indexReaders reads run in parallel.
	indexPiece   = 4 << 20
	indexReaders = 4
	// indexKeep is the default bound of IndexDir, in bytes.
	indexKeep = 16 << 30
	// indexTemp is the prefix of incomplete files, which are removed once no process can be
	// filling them any more.
	indexTemp    = "part-"
	indexTempAge = 24 * time.Hour
	indexEnd     = ".index"
)

// IndexStatus is the state of the index of a volume that shows a snapshot.
type IndexStatus struct {
	// State is "off", "asked" (the owner has not answered yet), "building", "fetching",
	// "ready", "none" (the owner makes no index, or none of this snapshot: Detail says why) or
	// "refused" (the index was damaged, of a later version, could not be stored here, or may
	// not be read).
	State  string
	Detail string // of an error: why
	Inodes uint64 // in the index
	Bytes  uint64 // length of the index
}

// viewIndex is the index of a view; of a live volume it is never in use.
type viewIndex struct {
	v *Volume

	begun  sync.Once
	ready  atomic.Pointer[mapped]
	status atomic.Pointer[IndexStatus]
}

// mapped is an index in memory.
type mapped struct {
	x    *index.Index
	path string
}

// ask runs fn on the index. An unreadable page of the disk counts as damage. Errors: fn's,
// Corrupt.
func (m *mapped) ask(fn func(x *index.Index) error) (err error) {
	defer runtime.KeepAlive(m)
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		fault, ok := r.(interface{ Addr() uintptr })
		if !ok {
			panic(r)
		}
		err = meta.E("read index", meta.Corrupt, m.path, fmt.Errorf("no memory at %x: %v", fault.Addr(), r))
	}()
	return fn(m.x)
}

// UseIndex fetches the index of the snapshot shown here in the background (the owner makes it
// if there is none), and then uses it. UseIndex does not wait, and does nothing without
// Config.IndexDir. Index tells the progress. Errors: NotSupported (a live volume).
func (v *Volume) UseIndex() error {
	if v.view == nil {
		return meta.E("use index", meta.NotSupported, v.name, errors.New("only snapshots have an index"))
	}
	if s, ok := v.c.sess.(indexSession); ok && v.c.cfg.IndexDir != "" {
		v.index.begun.Do(func() {
			v.index.note(IndexStatus{State: "asked"})
			v.c.spawn(func() { v.index.keep(s) })
		})
	}
	return nil
}

// Index tells how the volume is answered for.
func (v *Volume) Index() IndexStatus {
	if v.view == nil {
		return IndexStatus{State: "off"}
	}
	if s := v.index.status.Load(); s != nil {
		return *s
	}
	return IndexStatus{State: "off"}
}

func (vi *viewIndex) note(s IndexStatus) { vi.status.Store(&s) }

// keep keeps an index in use until the view ends.
func (vi *viewIndex) keep(s indexSession) {
	v := vi.v
	poll, retry := indexPoll, indexRetry
	for v.c.ctx.Err() == nil && !v.view.gone.Load() {
		wait := indexRetry // interval of checks whether the index is still in use
		if vi.ready.Load() == nil {
			a, err := s.SnapshotIndex(v.c.ctx, v.view.of.id, v.view.snap.Name)
			v.c.stats.rpcs.Add(1)
			if err == nil && a.Generation != uint64(v.view.snap.At) {
				err = meta.E("find index", meta.NoSuchSnapshot, v.name, nil)
			}
			switch {
			case meta.KindOf(err) == meta.NotSupported || err == nil && a.State == admin.IndexState_INDEX_NONE:
				vi.note(IndexStatus{State: "none", Detail: a.GetDetail()})
			case meta.KindOf(err) == meta.AccessDenied:
				vi.note(IndexStatus{State: "refused", Detail: err.Error()})
			case err != nil:
				vi.note(IndexStatus{State: "asked", Detail: err.Error()})
			case a.State == admin.IndexState_INDEX_READY:
				vi.note(IndexStatus{State: "fetching", Inodes: a.Inodes, Bytes: a.Length})
				err := vi.take(v.c.ctx, a)
				if err == nil {
					poll, retry = indexPoll, indexRetry // a later failure starts with the short pauses again
				} else {
					if v.c.ctx.Err() != nil {
						return
					}
					if meta.KindOf(err) == meta.Unavailable { // the chunk servers may come back
						vi.note(IndexStatus{State: "fetching", Detail: err.Error()})
						v.c.log.Info("the index of a snapshot can't be fetched now", "snapshot", v.name, "in", poll, "err", err)
						wait, poll = poll, min(2*poll, indexPollMost)
						break
					}
					if k := meta.KindOf(err); k == meta.Corrupt {
						v.c.stats.refused.Add(1)
					}
					vi.note(IndexStatus{State: "refused", Detail: err.Error()})
					v.c.log.Error("the index of a snapshot can't be used: the client asks metadata servers instead, and tries again", "snapshot", v.name, "in", retry, "err", err)
					wait, retry = retry, min(2*retry, indexRetryMost)
				}
			default:
				vi.note(IndexStatus{State: "building", Detail: a.Detail})
				wait, poll = poll, min(2*poll, indexPollMost)
			}
		}
		select {
		case <-time.After(wait):
		case <-v.c.ctx.Done():
		}
	}
}

// take takes an index into use, from IndexDir or else from its chunks.
func (vi *viewIndex) take(ctx context.Context, a *admin.SnapshotIndex) error {
	v := vi.v
	if a.Version != index.Version {
		return meta.E("open index", meta.Version, fmt.Sprint(a.Version), fmt.Errorf("this program reads version %d", index.Version))
	}
	sum, err := checkIndexAnswer(a)
	if err != nil {
		return err
	}
	dir := v.c.cfg.IndexDir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return meta.E("keep index", meta.IO, dir, err)
	}
	path := filepath.Join(dir, hex.EncodeToString(sum[:])+indexEnd)
	m, err := openIndex(path, sum)
	if err != nil {
		// Another process may be fetching the index.
		part, perr := beginIndex(ctx, filepath.Join(dir, indexTemp+hex.EncodeToString(sum[:])))
		if perr != nil {
			return perr
		}
		defer part.Close()
		if m, err = openIndex(path, sum); err == nil {
			os.Remove(part.Name())
		} else {
			if !errors.Is(err, fs.ErrNotExist) {
				v.c.stats.refused.Add(1)
				v.c.log.Error("the index of a snapshot on this machine's disk is damaged: the client fetches the index again", "file", path, "err", err)
				if err := os.Remove(path); err != nil {
					v.c.log.Warn("a damaged index stays on the disk", "file", path, "err", err)
				}
			}
			if m, err = vi.fetch(ctx, a, sum, part, path); err != nil {
				return err
			}
		}
	}
	if h := m.x.Head; h.Volume != v.view.of.id || h.At != v.view.snap.At {
		return meta.E("open index", meta.Corrupt, path, fmt.Errorf("it is of volume %d, generation %d", h.Volume, h.At))
	}
	now := time.Now()
	if err := os.Chtimes(path, now, now); err != nil {
		v.c.log.Debug("index not marked as used", "file", path, "err", err)
	}
	keepIndexes(dir, cmp.Or(v.c.cfg.IndexKeep, indexKeep), filepath.Base(path))
	vi.ready.Store(m)
	vi.note(IndexStatus{State: "ready", Inodes: m.x.Inodes(), Bytes: m.x.Size()})
	v.c.log.Info("the client answers for a snapshot from its index", "snapshot", v.name, "inodes", m.x.Inodes(), "bytes", m.x.Size())
	return nil
}

func checkIndexAnswer(a *admin.SnapshotIndex) (sum index.Sum, err error) {
	total := uint64(0)
	for _, p := range a.Parts {
		if len(p.Chunk) != 16 || p.Length > index.MaxSize {
			return sum, meta.E("find index", meta.Protocol, "", fmt.Errorf("a part of %d bytes in chunk %x", p.Length, p.Chunk))
		}
		total += p.Length
	}
	if len(a.Digest) != len(sum) || total != a.Length || total > index.MaxSize || total == 0 || len(a.Parts) > meta.MaxIndexParts {
		return sum, meta.E("find index", meta.Protocol, "", fmt.Errorf("%d bytes in %d parts of %d", a.Length, len(a.Parts), total))
	}
	return index.Sum(a.Digest), nil
}

// beginIndex opens and locks the file into which an index is fetched, and waits while another
// process holds the lock. That process may have renamed or removed the file before it unlocked
// it; then beginIndex starts again.
func beginIndex(ctx context.Context, path string) (*os.File, error) {
	fail := func(f *os.File, err error) (*os.File, error) {
		return nil, errors.Join(meta.E("keep index", meta.IO, path, err), f.Close())
	}
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, meta.E("keep index", meta.IO, path, err)
		}
		for {
			err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
			if err == nil {
				break
			}
			if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
				return fail(f, err)
			}
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
				f.Close()
				return nil, meta.E("keep index", meta.Canceled, path, context.Cause(ctx))
			}
		}
		have, err := f.Stat()
		if err != nil {
			return fail(f, err)
		}
		switch named, err := os.Stat(path); {
		case err == nil && os.SameFile(have, named):
			return f, nil
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return fail(f, err)
		}
		f.Close()
	}
}

// openIndex maps an index into memory.
func openIndex(path string, sum index.Sum) (*mapped, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, meta.E("open index", meta.IO, path, err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, meta.E("open index", meta.IO, path, err)
	}
	if st.Size() == 0 || st.Size() > index.MaxSize {
		return nil, meta.E("open index", meta.Corrupt, path, fmt.Errorf("%d bytes", st.Size()))
	}
	data, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, meta.E("open index", meta.IO, path, err)
	}
	m := &mapped{path: path}
	err = m.ask(func(*index.Index) (err error) {
		m.x, err = index.Open(data, sum)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, unix.Munmap(data))
	}
	runtime.AddCleanup(m, func(data []byte) { unix.Munmap(data) }, data)
	return m, nil
}

// fetch reads an index from its chunks into a file. When every block is right, it renames
// the file and takes the index into use.
func (vi *viewIndex) fetch(ctx context.Context, a *admin.SnapshotIndex, sum index.Sum, f *os.File, path string) (_ *mapped, err error) {
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	if err := f.Truncate(0); err != nil { // a killed process may have left part of the index
		return nil, meta.E("fetch index", meta.IO, f.Name(), err)
	}
	if err := vi.copy(ctx, a, f); err != nil {
		return nil, err
	}
	m, err := openIndex(f.Name(), sum)
	if err != nil {
		return nil, err
	}
	if err := m.ask((*index.Index).Check); err != nil {
		return nil, err
	}
	// A crash may leave a damaged file; the next opener notices.
	if err := os.Rename(f.Name(), path); err != nil {
		return nil, meta.E("fetch index", meta.IO, path, err)
	}
	m.path = path
	return m, nil
}

// copy reads the parts of an index side by side.
func (vi *viewIndex) copy(ctx context.Context, a *admin.SnapshotIndex, f *os.File) error {
	type piece struct {
		place   meta.ChunkPlace
		off, at uint64 // in the chunk, in the file
		n       uint64
	}
	var pieces []piece
	at := uint64(0)
	for _, p := range a.Parts {
		pl := meta.ChunkPlace{ID: meta.ChunkIDFromBytes(p.Chunk), Sealed: p.Sealed, Length: p.ChunkLength}
		for _, server := range p.Servers {
			pl.Servers = append(pl.Servers, meta.ServerID(server))
		}
		for off := uint64(0); off < p.Length; off += indexPiece {
			pieces = append(pieces, piece{pl, off, at + off, min(indexPiece, p.Length-off)})
		}
		at += p.Length
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(indexReaders, len(pieces)) {
		wg.Go(func() {
			buf := make([]byte, indexPiece)
			for {
				i := int(next.Add(1)) - 1
				if i >= len(pieces) || ctx.Err() != nil {
					return
				}
				p := &pieces[i]
				err := vi.v.c.chunks.ReadAt(ctx, p.place, buf[:p.n], p.off)
				if err == nil {
					if _, werr := f.WriteAt(buf[:p.n], int64(p.at)); werr != nil {
						err = meta.E("fetch index", meta.IO, f.Name(), werr)
					}
				}
				if err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// keepIndexes removes the least recently used indexes until the others take at most max bytes,
// and incomplete files that no process fills. A process using a removed index keeps the index
// mapped.
func keepIndexes(dir string, max int64, newest string) {
	list, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	type file struct {
		name string
		used time.Time
		size int64
	}
	var all []file
	total := int64(0)
	for _, e := range list {
		st, err := e.Info()
		if err != nil {
			continue
		}
		switch {
		case strings.HasPrefix(e.Name(), indexTemp) && time.Since(st.ModTime()) > indexTempAge:
			os.Remove(filepath.Join(dir, e.Name()))
		case strings.HasSuffix(e.Name(), indexEnd):
			total += st.Size()
			if e.Name() != newest {
				all = append(all, file{e.Name(), st.ModTime(), st.Size()})
			}
		}
	}
	slices.SortFunc(all, func(a, b file) int { return a.used.Compare(b.used) })
	for _, f := range all {
		if total <= max {
			return
		}
		if os.Remove(filepath.Join(dir, f.name)) == nil {
			total -= f.size
		}
	}
}

// ---- answers

// pastIndex is a context key whose value makes an operation ask the owner, because the index's
// answer was wrong.
type pastIndex struct{}

// inUse returns the index in use, or nil.
func (vi *viewIndex) inUse() *mapped {
	if vi.v.view == nil || vi.v.view.gone.Load() {
		return nil
	}
	return vi.ready.Load()
}

// looked handles the result of ask. It returns false if the index is damaged, and then the
// index is no longer used.
func (vi *viewIndex) looked(m *mapped, err error) (ok bool) {
	v := vi.v
	if meta.KindOf(err) != meta.Corrupt {
		v.c.stats.indexed.Add(1)
		return true
	}
	if vi.ready.CompareAndSwap(m, nil) {
		v.c.stats.refused.Add(1)
		vi.note(IndexStatus{State: "refused", Detail: err.Error()})
		v.c.log.Error("the index of a snapshot is damaged: the client asks metadata servers until it has fetched the index again", "snapshot", v.name, "err", err)
		if rerr := os.Remove(m.path); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
			v.c.log.Warn("a damaged index stays on the disk", "file", m.path, "err", rerr)
		}
	}
	return false
}

// query answers an operation; ok false: the owner is to be asked.
func (vi *viewIndex) query(ctx context.Context, op meta.Op) (res *meta.Result, ok bool, err error) {
	m := vi.inUse()
	if m == nil || op.Code() == meta.OpSeek || ctx.Value(pastIndex{}) != nil {
		return nil, false, nil
	}
	err = m.ask(func(x *index.Index) (err error) {
		res, err = x.Query(op)
		return err
	})
	if !vi.looked(m, err) {
		return nil, false, nil
	}
	if err != nil {
		return nil, true, err
	}
	// Repair may have moved chunks since the index was made: places heard of later are better.
	if len(res.Places) > 0 {
		h := vi.v.home()
		h.chunks.mu.Lock()
		res.Places = slices.DeleteFunc(res.Places, func(pl meta.ChunkPlace) bool { return h.chunks.places[pl.ID] != nil })
		h.chunks.mu.Unlock()
	}
	return res, true, nil
}

// lookup answers Lookup.
func (vi *viewIndex) lookup(parent meta.Ino, name string) (e Entry, ok bool, err error) {
	v := vi.v
	m := vi.inUse()
	if m == nil {
		return e, false, nil
	}
	var volume meta.VolumeID
	err = m.ask(func(x *index.Index) (err error) {
		e.Attr, volume, err = x.Lookup(parent, name)
		return err
	})
	if !vi.looked(m, err) {
		return Entry{}, false, nil
	}
	switch {
	case errors.Is(err, meta.NotFound):
		return Entry{Volume: v.id, Negative: true, Valid: v.valid()}, true, nil
	case err != nil:
		return Entry{}, true, err
	case volume != 0:
		return v.view.stub(stubIno(volume)), true, nil
	}
	v.c.stats.hits.Add(1)
	e.Volume, e.Valid = v.id, v.valid()
	return e, true, nil
}

// attr answers GetAttr.
func (vi *viewIndex) attr(ino meta.Ino) (e Entry, ok bool, err error) {
	m := vi.inUse()
	if m == nil {
		return e, false, nil
	}
	err = m.ask(func(x *index.Index) (err error) {
		e.Attr, err = x.Attr(ino)
		return err
	})
	if !vi.looked(m, err) {
		return Entry{}, false, nil
	}
	if err != nil {
		return Entry{}, true, err
	}
	e.Volume, e.Valid = vi.v.id, vi.v.valid()
	return e, true, nil
}

// list answers ReadDir.
func (vi *viewIndex) list(ctx context.Context, ino meta.Ino, cookie uint64, max int, plus bool) (list []DirEntry, eof, ok bool, err error) {
	v := vi.v
	op := &meta.ReadDir{Ino: ino, Cookie: cookie, Max: uint32(min(max, 1<<16)), Plus: plus}
	res, ok, err := vi.query(ctx, op)
	if !ok || err != nil {
		return nil, false, ok, err
	}
	list = make([]DirEntry, len(res.Entries))
	valid := v.valid()
	for i, e := range res.Entries {
		d := &list[i]
		*d = DirEntry{Name: e.Name, Ino: e.Ino, Volume: v.id, Type: e.Type, Cookie: e.Cookie}
		switch {
		case e.Volume != 0:
			if d.Ino = stubIno(e.Volume); plus {
				d.Entry = v.view.stub(d.Ino)
			}
		case e.Attr != nil:
			d.Entry = Entry{Attr: *e.Attr, Volume: v.id, Valid: valid}
		}
	}
	return list, res.EOF, true, nil
}

// forbid gives the index up because the client may no longer read the volume.
func (vi *viewIndex) forbid(err error) {
	if vi.ready.Swap(nil) != nil {
		vi.note(IndexStatus{State: "refused", Detail: err.Error()})
		vi.v.c.log.Warn("the index of a snapshot is used no more: the volume may not be read", "snapshot", vi.v.name, "err", err)
	}
}
