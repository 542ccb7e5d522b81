package penstock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"

	"penstock.io/penstock/meta"
)

// How a mirror's target becomes equal to a snapshot of the source.
//
// The target's live tree is equal to base, the previous snapshot, or is somewhere between base
// and the new snapshot: an earlier copying process may have been killed at any point. So each
// step looks at the target before it changes anything, and skips what is done already:
//
// 1. Names. The comparison of base and the new snapshot in the source lists the entries that
//     differ. The copy finds an inode of base in the target by the inode's path in the target's
//     own base snapshot, which does not change. First, renamed entries go into a staging
//     directory; then removed entries are unlinked; then new entries are made, those nearer to the
//     root first, and entries of equal depth several at a time, but never two of one inode. An
//     entry of the target that is neither base's entry nor absent was made here earlier, for this
//     snapshot.
// 2. Contents, several files at a time: of files in base, the ranges whose place in chunks
//     differs; of new files, all. Large contents bypass the client's write buffer, since the
//     source still has the bytes if a chunk fails (bulk.go).
// 3. Attributes; times last, when the file's bytes are committed. So a file with the right
// size
//     and time is complete.
// 4. Attributes of directories, when nothing in them changes any more.
//
// A first copy has no base: every entry is new.

const (
	mirrorFiles   = 16               // files copied at a time
	mirrorReads   = 8                // most reads ahead of the writing of one file
	mirrorSegment = 1 << 20          // bytes of one read
	mirrorBatch   = 2000             // files whose times are set after one sync
	mirrorLate    = time.Millisecond // if a read takes this much longer than a write, more reads run ahead
	mirrorResume  = 8 << 20          // files of so many bytes are not copied from the beginning again
)

// mirrorCopy is the copy of the difference between base and a snapshot.
type mirrorCopy struct {
	to                    *Volume // the source's snapshot
	from                  *Volume // the source's base, nil for a first copy
	base                  *Volume // the target's
	dst                   *Volume // the target, live
	pace                  *pace
	planned, sent, inodes atomic.Uint64

	files  chan mirrorFile
	synced chan mirrorFile
	late   sync.WaitGroup      // commits of files that were copied in bulk
	room   *semaphore.Weighted // for the uncommitted bytes of these
	most   uint64              // most uncommitted bytes of one file; 0: bulkCommit
	again  sync.Mutex          // held while a file is copied once more
	fail   func(error)         // ends all with an error
	stage  string              // name of the staging directory

	mu   sync.Mutex            // guards the fields below
	ids  map[meta.Ino]meta.Ino // in the source -> in the target
	dirs map[meta.Ino]meta.Ino // directories whose attributes are set at the end
}

// known returns the target's inode of a source inode, if it was found or made.
func (m *mirrorCopy) known(src meta.Ino) (dst meta.Ino, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	dst, ok = m.ids[src]
	return dst, ok
}

func (m *mirrorCopy) know(src, dst meta.Ino) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ids[src] = dst
}

// touched notes that an entry of a source directory differs.
func (m *mirrorCopy) touched(src, dst meta.Ino) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.dirs[src] = dst
}

// mirrorFile is an inode that needs contents and attributes.
type mirrorFile struct {
	src, dst meta.Ino
	fresh    bool // not in base
	content  bool
	a        meta.Attr // of the source
}

// run makes the target equal to the snapshot, durably.
func (m *mirrorCopy) run(ctx context.Context, changes []meta.Change) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m.files, m.synced = make(chan mirrorFile, 4*mirrorFiles), make(chan mirrorFile, mirrorBatch)
	m.room, m.fail = semaphore.NewWeighted(bulkUnready), cancel
	m.ids, m.dirs = map[meta.Ino]meta.Ino{}, map[meta.Ino]meta.Ino{meta.RootIno: meta.RootIno}
	var copying, setting sync.WaitGroup
	for range mirrorFiles {
		copying.Go(func() {
			for f := range m.files {
				if ctx.Err() != nil {
					continue
				}
				if err := m.fill(ctx, f); err != nil {
					cancel(err)
				}
			}
		})
	}
	setting.Go(func() {
		if err := m.setTimes(ctx); err != nil {
			cancel(err)
			for range m.synced {
			}
		}
	})
	var err error
	if m.from == nil {
		err = m.copyTree(ctx, meta.RootIno, meta.RootIno)
	} else {
		err = m.apply(ctx, changes)
	}
	if err != nil {
		cancel(err)
	}
	close(m.files)
	copying.Wait()
	m.late.Wait()
	close(m.synced)
	setting.Wait()
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := each(ctx, slices.Collect(maps.Keys(m.dirs)), func(ctx context.Context, _ int, src meta.Ino) error {
		return m.finishDir(ctx, src, m.dirs[src])
	}); err != nil {
		return err
	}
	return m.dst.SyncAll(ctx)
}

// ---- a first copy

// copyTree makes the entries of a directory.
func (m *mirrorCopy) copyTree(ctx context.Context, src, dst meta.Ino) error {
	for at, eof := (DirCursor{}), false; !eof; {
		var list []DirEntry
		var err error
		if list, eof, err = m.to.ReadDir(ctx, src, &at, 0, true); err != nil {
			return err
		}
		made := make([]meta.Ino, len(list))
		if err := each(ctx, list, func(ctx context.Context, i int, e DirEntry) (err error) {
			if m.to.view.isStub(e.Ino) {
				return errJunction(e.Name)
			}
			a := e.Entry.Attr
			if a.Ino != 0 && (a.IsDir() || a.Nlink <= 1) { // others one by one
				made[i], err = m.make(ctx, dst, e.Name, &a)
			}
			return err
		}); err != nil {
			return err
		}
		for i, e := range list {
			a := e.Entry.Attr
			if made[i] == 0 {
				got, err := m.to.GetAttr(ctx, e.Ino)
				if err != nil {
					return err
				}
				a = got.Attr
				if made[i], err = m.enter(ctx, dst, e.Name, &a); err != nil {
					return err
				}
				if made[i] == 0 {
					continue // another name of an inode that is being copied
				}
			}
			if !a.IsDir() {
				if err := m.queue(ctx, mirrorFile{src: a.Ino, dst: made[i], fresh: true, content: true, a: a}); err != nil {
					return err
				}
				continue
			}
			m.touched(a.Ino, made[i])
			if err := m.copyTree(ctx, a.Ino, made[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

func errJunction(path string) error {
	return meta.E("mirror", meta.NotSupported, path, errors.New("another volume is attached there: mirror that by itself, and attach it elsewhere"))
}

// enter gives a name to a new inode, which may have several names. It returns zero if an
// earlier name made the inode: then it is being copied already.
func (m *mirrorCopy) enter(ctx context.Context, dir meta.Ino, name string, a *meta.Attr) (meta.Ino, error) {
	if !a.IsDir() && a.Nlink > 1 {
		if ino, ok := m.known(a.Ino); ok {
			return 0, m.link(ctx, ino, dir, name)
		}
	}
	ino, err := m.make(ctx, dir, name, a)
	if err == nil && !a.IsDir() && a.Nlink > 1 {
		m.know(a.Ino, ino)
	}
	return ino, err
}

// make makes a new inode, or finds it.
func (m *mirrorCopy) make(ctx context.Context, dir meta.Ino, name string, a *meta.Attr) (meta.Ino, error) {
	e, err := m.dst.Lookup(ctx, dir, name)
	if err != nil {
		return 0, err
	}
	if !e.Negative {
		if e.Attr.Mode&meta.TypeMask != a.Mode&meta.TypeMask {
			return 0, meta.E("mirror", meta.Corrupt, name, fmt.Errorf("the target has type %o there, the source %o", e.Attr.Mode&meta.TypeMask, a.Mode&meta.TypeMask))
		}
		return e.Attr.Ino, nil
	}
	req := meta.Create{Parent: dir, Name: name, Mode: a.Mode, UID: a.UID, GID: a.GID, Rdev: a.Rdev, Excl: true}
	if a.Mode&meta.TypeMask == meta.TypeSymlink {
		if req.Target, err = m.to.ReadLink(ctx, a.Ino); err != nil {
			return 0, err
		}
	}
	e, err = m.dst.Create(ctx, nil, req)
	return e.Attr.Ino, err
}

// link adds a name to an inode of the target, unless the name exists.
func (m *mirrorCopy) link(ctx context.Context, ino, dir meta.Ino, name string) error {
	if there, err := m.at(ctx, dir, name); err != nil || there == ino {
		return err
	}
	_, err := m.dst.Link(ctx, nil, ino, dir, name)
	return err
}

// at returns the inode of a name in the target; zero: the name does not exist, or the
// directory is gone (an earlier copying process removed it with its entries).
func (m *mirrorCopy) at(ctx context.Context, dir meta.Ino, name string) (meta.Ino, error) {
	e, err := m.dst.Lookup(ctx, dir, name)
	if meta.KindOf(err) == meta.Stale {
		return 0, nil
	}
	if err != nil || e.Negative {
		return 0, err
	}
	return e.Attr.Ino, nil
}

func (m *mirrorCopy) queue(ctx context.Context, f mirrorFile) error {
	select {
	case m.files <- f:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// ---- from one snapshot to the next

// mirrorPaths finds inodes by path, without following anything.
type mirrorPaths struct {
	v    *Volume
	mu   sync.Mutex
	dirs map[string]meta.Ino
}

func newMirrorPaths(v *Volume) *mirrorPaths {
	return &mirrorPaths{v: v, dirs: map[string]meta.Ino{}}
}

// find returns the inode of a path. Errors: NotFound.
func (p *mirrorPaths) find(ctx context.Context, path string) (meta.Ino, error) {
	if path == "" {
		return meta.RootIno, nil
	}
	dir, name, err := p.parent(ctx, path)
	if err != nil {
		return 0, err
	}
	e, err := p.v.Lookup(ctx, dir, name)
	if err == nil && e.Negative {
		err = meta.E("mirror", meta.NotFound, fmt.Sprintf("%s: %q", p.v.name, path), nil)
	}
	return e.Attr.Ino, err
}

// parent gives the directory in which a path ends, and the last name.
func (p *mirrorPaths) parent(ctx context.Context, path string) (meta.Ino, string, error) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return meta.RootIno, path, nil
	}
	p.mu.Lock()
	dir, ok := p.dirs[path[:i]]
	p.mu.Unlock()
	if !ok {
		var err error
		if dir, err = p.find(ctx, path[:i]); err != nil {
			return 0, "", err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.dirs) > 1<<18 {
			clear(p.dirs)
		}
		p.dirs[path[:i]] = dir
	}
	return dir, path[i+1:], nil
}

// mirrorName is an entry of the target's base.
type mirrorName struct {
	dir  meta.Ino
	name string
	ino  meta.Ino
	typ  uint32
	deep int // how far from the root
}

// turns splits all into groups that run one after the other. No group has two items of the
// same inode.
func turns[T any](all []T, ino func(T) meta.Ino) (out [][]T) {
	seen := map[meta.Ino]int{}
	for _, x := range all {
		i := seen[ino(x)]
		seen[ino(x)]++
		if i == len(out) {
			out = append(out, nil)
		}
		out[i] = append(out[i], x)
	}
	return out
}

// byDepth puts the items n levels below the root into out[n].
func byDepth[T any](all []T, depth func(T) int) (out [][]T) {
	for _, x := range all {
		n := depth(x)
		for len(out) <= n {
			out = append(out, nil)
		}
		out[n] = append(out[n], x)
	}
	return out
}

func (m *mirrorCopy) apply(ctx context.Context, changes []meta.Change) error {
	var arriving, changed []meta.Change
	for _, c := range changes {
		switch {
		case c.Kind == meta.PathAdded && c.Ino == 0:
			return errJunction(c.Path)
		case c.Kind == meta.PathAdded || c.Kind == meta.PathRenamed:
			arriving = append(arriving, c)
		case c.Kind == meta.PathChanged:
			changed = append(changed, c)
		}
	}
	if err := m.findStage(ctx); err != nil {
		return err
	}
	moved, removed, err := m.leaving(ctx, changes)
	if err != nil {
		return err
	}
	if err := m.setAside(ctx, moved); err != nil {
		return err
	}
	if err := m.remove(ctx, removed); err != nil {
		return err
	}
	if err := m.arrive(ctx, arriving); err != nil {
		return err
	}
	if err := m.dropStage(ctx); err != nil {
		return err
	}
	there := newMirrorPaths(m.dst)
	return each(ctx, changed, func(ctx context.Context, _ int, c meta.Change) error {
		dst, err := there.find(ctx, c.Path)
		if err != nil {
			return err
		}
		if c.Type == meta.TypeDir {
			m.touched(c.Ino, dst)
			return nil
		}
		e, err := m.to.GetAttr(ctx, c.Ino)
		if err != nil {
			return err
		}
		return m.queue(ctx, mirrorFile{src: c.Ino, dst: dst, content: c.Content, a: e.Attr})
	})
}

// findStage chooses a name that no entry of either root has.
func (m *mirrorCopy) findStage(ctx context.Context) error {
	for m.stage = ".penstock-mirror"; ; m.stage += "-" {
		free := true
		for _, v := range []*Volume{m.from, m.to} {
			e, err := v.Lookup(ctx, meta.RootIno, m.stage)
			if err != nil {
				return err
			}
			free = free && e.Negative
		}
		if free {
			return nil
		}
	}
}

// leaving finds the entries of the bases that are renamed or removed.
func (m *mirrorCopy) leaving(ctx context.Context, changes []meta.Change) (moved, removed []mirrorName, err error) {
	src, dst := newMirrorPaths(m.from), newMirrorPaths(m.base)
	found := make([]mirrorName, len(changes))
	if err := each(ctx, changes, func(ctx context.Context, i int, c meta.Change) (err error) {
		n, path := &found[i], c.Path
		switch {
		case c.Kind == meta.PathAdded && c.From != "":
			n.ino, err = dst.find(ctx, c.From)
			return err
		case c.Kind == meta.PathRenamed:
			path = c.From
		case c.Kind != meta.PathRemoved:
			return nil
		}
		n.typ, n.deep = c.Type, strings.Count(path, "/")
		if n.dir, n.name, err = dst.parent(ctx, path); err != nil {
			return err
		}
		if n.ino, err = dst.find(ctx, path); err != nil {
			return err
		}
		// The old directory changes, if it still exists in the new snapshot.
		up, _, err := src.parent(ctx, path)
		if err != nil {
			return err
		}
		m.mu.Lock()
		_, have := m.dirs[up]
		m.mu.Unlock()
		if have {
			return nil
		}
		e, err := m.to.GetAttr(ctx, up)
		if meta.KindOf(err) == meta.Stale {
			return nil
		}
		if err == nil && e.Attr.Nlink > 0 { // else only somebody's working directory still
			m.touched(up, n.dir)
		}
		return err
	}); err != nil {
		return nil, nil, err
	}
	for i, c := range changes {
		switch {
		case c.Kind == meta.PathRenamed:
			m.know(c.Ino, found[i].ino)
			moved = append(moved, found[i])
		case c.Kind == meta.PathAdded && c.From != "":
			m.know(c.Ino, found[i].ino)
		case c.Kind == meta.PathRemoved:
			removed = append(removed, found[i])
		}
	}
	return moved, removed, nil
}

// remove unlinks the entries that still exist, directories after their contents.
func (m *mirrorCopy) remove(ctx context.Context, all []mirrorName) error {
	unlink := func(ctx context.Context, _ int, n mirrorName) error {
		if there, err := m.at(ctx, n.dir, n.name); err != nil || there != n.ino {
			return err
		}
		return m.dst.Unlink(ctx, nil, n.dir, n.name, n.typ == meta.TypeDir)
	}
	var dirs, others []mirrorName
	for _, n := range all {
		if n.typ == meta.TypeDir {
			dirs = append(dirs, n)
		} else {
			others = append(others, n)
		}
	}
	if err := each(ctx, others, unlink); err != nil {
		return err
	}
	for _, level := range slices.Backward(byDepth(dirs, func(n mirrorName) int { return n.deep })) {
		if err := each(ctx, level, unlink); err != nil {
			return err
		}
	}
	return nil
}

func stageName(ino meta.Ino) string { return fmt.Sprintf("%x", uint64(ino)) }

// setAside moves renamed entries into the staging directory.
func (m *mirrorCopy) setAside(ctx context.Context, moved []mirrorName) error {
	if len(moved) == 0 {
		return nil
	}
	stage, err := m.at(ctx, meta.RootIno, m.stage)
	if err == nil && stage == 0 {
		var e Entry
		e, err = m.dst.Create(ctx, nil, meta.Create{Parent: meta.RootIno, Name: m.stage, Mode: meta.TypeDir | 0o700, Excl: true})
		stage = e.Attr.Ino
	}
	if err != nil {
		return err
	}
	for _, turn := range turns(moved, func(n mirrorName) meta.Ino { return n.ino }) {
		if err := each(ctx, turn, func(ctx context.Context, _ int, n mirrorName) error {
			if there, err := m.at(ctx, n.dir, n.name); err != nil || there != n.ino {
				return err
			}
			if n.typ == meta.TypeDir {
				return m.dst.Rename(ctx, nil, n.dir, n.name, stage, stageName(n.ino), meta.RenameNoReplace)
			}
			if err := m.link(ctx, n.ino, stage, stageName(n.ino)); err != nil {
				return err
			}
			return m.dst.Unlink(ctx, nil, n.dir, n.name, false)
		}); err != nil {
			return err
		}
	}
	return nil
}

// arrive makes the new entries, level by level, so that parents come first.
func (m *mirrorCopy) arrive(ctx context.Context, all []meta.Change) error {
	src, dst := newMirrorPaths(m.to), newMirrorPaths(m.dst)
	stage, err := m.at(ctx, meta.RootIno, m.stage)
	if err != nil {
		return err
	}
	one := func(ctx context.Context, _ int, c meta.Change) error {
		dir, name, err := dst.parent(ctx, c.Path)
		if err != nil {
			return err
		}
		up, _, err := src.parent(ctx, c.Path)
		if err != nil {
			return err
		}
		m.touched(up, dir)
		ino, known := m.known(c.Ino)
		switch {
		case known && c.Type == meta.TypeDir:
			if there, err := m.at(ctx, dir, name); err != nil || there == ino {
				return err
			}
			return m.dst.Rename(ctx, nil, stage, stageName(ino), dir, name, meta.RenameNoReplace)
		case known:
			return m.link(ctx, ino, dir, name)
		}
		return m.create(ctx, c.Ino, dir, name)
	}
	for _, level := range byDepth(all, func(c meta.Change) int { return strings.Count(c.Path, "/") }) {
		for _, turn := range turns(level, func(c meta.Change) meta.Ino { return c.Ino }) {
			if err := each(ctx, turn, one); err != nil {
				return err
			}
		}
	}
	return nil
}

// create makes a new inode and schedules its contents.
func (m *mirrorCopy) create(ctx context.Context, src, dir meta.Ino, name string) error {
	e, err := m.to.GetAttr(ctx, src)
	if err != nil {
		return err
	}
	ino, err := m.make(ctx, dir, name, &e.Attr)
	if err != nil {
		return err
	}
	m.know(src, ino)
	if e.Attr.IsDir() {
		m.touched(src, ino)
		return nil
	}
	return m.queue(ctx, mirrorFile{src: src, dst: ino, fresh: true, content: true, a: e.Attr})
}

// dropStage removes the staging directory, which holds second names of files
// only by now.
func (m *mirrorCopy) dropStage(ctx context.Context) error {
	stage, err := m.at(ctx, meta.RootIno, m.stage)
	if err != nil || stage == 0 {
		return err
	}
	for at, eof := (DirCursor{}), false; !eof; {
		var list []DirEntry
		if list, eof, err = m.dst.ReadDir(ctx, stage, &at, 0, false); err != nil {
			return err
		}
		for _, e := range list {
			if err := m.dst.Unlink(ctx, nil, stage, e.Name, false); err != nil {
				return err
			}
		}
	}
	return m.dst.Unlink(ctx, nil, meta.RootIno, m.stage, true)
}

// ---- contents and attributes

// fill writes a file's contents and sets all attributes but times.
func (m *mirrorCopy) fill(ctx context.Context, f mirrorFile) error {
	e, err := m.dst.GetAttr(ctx, f.dst)
	if err != nil {
		return err
	}
	a, t := &f.a, &e.Attr
	m.inodes.Add(1)
	var rest func() error // of its contents
	if a.IsRegular() && f.content {
		known := f.fresh
		if !f.fresh {
			was, err := m.from.GetAttr(ctx, f.src)
			if err != nil {
				return err
			}
			known = was.Attr.Mtime != a.Mtime // else the time does not tell whether it is whole
		}
		if known && t.Mtime == a.Mtime && t.Size == a.Size && a.Mtime != 0 {
			f.content = false // it was copied before
		} else if rest, err = m.fillData(ctx, &f, t); err != nil {
			return err
		}
	}
	if rest != nil {
		// rest runs beside the next files, because it mostly waits for disks.
		whole := f
		m.late.Go(func() {
			err := rest()
			if err == nil {
				err = m.written(ctx, whole)
			}
			if err != nil {
				m.fail(err)
			}
		})
	}
	if err := m.setOwner(ctx, f.src, f.dst, a, t); err != nil {
		return err
	}
	if rest != nil || t.Mtime == a.Mtime && t.Atime == a.Atime && !f.content {
		return nil
	}
	return m.written(ctx, f)
}

// written has the times of a file set.
func (m *mirrorCopy) written(ctx context.Context, f mirrorFile) error {
	select {
	case m.synced <- f:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// fillData copies the differing ranges. If rest is not nil, the contents are complete only
// after a call of rest without an error.
func (m *mirrorCopy) fillData(ctx context.Context, f *mirrorFile, t *meta.Attr) (rest func() error, _ error) {
	data, holes, err := m.ranges(ctx, f, t)
	if err != nil {
		return nil, err
	}
	if t.Size != f.a.Size {
		if _, err := m.dst.SetAttr(ctx, nil, meta.SetAttr{Ino: f.dst, Mask: meta.SetSize, Size: f.a.Size}); err != nil {
			return nil, err
		}
	}
	for _, r := range holes {
		if err := m.dst.Fallocate(ctx, nil, meta.Fallocate{Ino: f.dst, Mode: meta.FallocPunchHole | meta.FallocKeepSize, Off: r.lo, Len: r.hi - r.lo}); err != nil {
			return nil, err
		}
	}
	var bytes uint64
	for _, r := range data {
		bytes += r.hi - r.lo
	}
	m.planned.Add(bytes)
	write := func(ctx context.Context, p []byte, off uint64) error {
		_, err := m.dst.Write(ctx, nil, f.dst, p, int64(off), false, false)
		return err
	}
	if !m.dst.back.bulkFits(len(data), bytes) {
		return nil, m.copyRanges(ctx, f.src, data, write)
	}
	room := int64(min(bytes, bulkCommit))
	if err := m.room.Acquire(ctx, room); err != nil {
		return nil, context.Cause(ctx)
	}
	b := m.dst.back.newBulk(f.dst)
	b.most = cmp.Or(m.most, b.most)
	failed := m.copyRanges(ctx, f.src, data, b.write)
	src := f.src
	return func() error {
		defer m.room.Release(room)
		err := failed
		if err == nil {
			err = b.commit(ctx)
			b.failed = err
		}
		b.end()
		if err == nil || ctx.Err() != nil || b.failed == nil || !bulkAgain(err) {
			return err // the source's own error is no better the second time
		}
		// A chunk failed: Write copies the rest, which tries other chunks, with pauses.
		m.again.Lock() // one file at a time: there may be hundreds
		defer m.again.Unlock()
		m.dst.c.log.Info("a file of a mirror is written once more", "file", m.dst.subject(b.in.ino), "from", b.until, "error", err)
		m.planned.Add(b.fresh)
		return m.copyRanges(ctx, src, without(data, []span{{0, b.until}}), write)
	}, nil
}

// bulkAgain reports whether another write of the same bytes may succeed.
func bulkAgain(err error) bool {
	switch meta.KindOf(err) {
	case meta.NoSpace, meta.QuotaExceeded, meta.SessionExpired, meta.ReadOnly, meta.AccessDenied, meta.Stale:
		return false
	}
	return true
}

// setOwner sets everything but times and contents.
func (m *mirrorCopy) setOwner(ctx context.Context, src, dst meta.Ino, a, t *meta.Attr) error {
	if a.UID != t.UID || a.GID != t.GID { // before capabilities: a change of owner drops them
		e, err := m.dst.SetAttr(ctx, nil, meta.SetAttr{Ino: dst, Mask: meta.SetUID | meta.SetGID, UID: a.UID, GID: a.GID})
		if err != nil {
			return err
		}
		t = &e.Attr
	}
	if a.Flags&^t.Flags&meta.FlagStream != 0 {
		if _, err := m.dst.SetAttr(ctx, nil, meta.SetAttr{Ino: dst, Mask: meta.SetStream}); err != nil {
			return err
		}
	}
	if (a.Flags|t.Flags)&meta.FlagHasXattrs != 0 {
		if err := m.copyXattrs(ctx, src, dst); err != nil {
			return err
		}
		e, err := m.dst.GetAttr(ctx, dst)
		if err != nil {
			return err
		}
		t = &e.Attr
	}
	if a.Mode != t.Mode && a.Mode&meta.TypeMask != meta.TypeSymlink {
		if _, err := m.dst.SetAttr(ctx, nil, meta.SetAttr{Ino: dst, Mask: meta.SetMode, Mode: a.Mode}); err != nil {
			return err
		}
	}
	return nil
}

func (m *mirrorCopy) copyXattrs(ctx context.Context, src, dst meta.Ino) error {
	want, err := m.to.ListXattr(ctx, src)
	if err != nil {
		return err
	}
	have, err := m.dst.ListXattr(ctx, dst)
	if err != nil {
		return err
	}
	for _, name := range have {
		if !slices.Contains(want, name) {
			if err := m.dst.RemoveXattr(ctx, nil, dst, name); err != nil && meta.KindOf(err) != meta.NoAttribute {
				return err
			}
		}
	}
	for _, name := range want {
		v, err := m.to.GetXattr(ctx, src, name)
		if err == nil {
			err = m.dst.SetXattr(ctx, nil, meta.SetXattr{Ino: dst, Name: name, Value: v})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func timesOf(ino meta.Ino, a *meta.Attr) meta.SetAttr {
	return meta.SetAttr{Ino: ino, Mask: meta.SetMtime | meta.SetAtime, Mtime: a.Mtime, Atime: a.Atime}
}

// setTimes sets the times of many files with committed contents at once, and skips files that
// are still being written.
func (m *mirrorCopy) setTimes(ctx context.Context) error {
	for {
		f, more := <-m.synced
		if !more {
			return nil
		}
		batch := []mirrorFile{f}
		for wait := time.After(100 * time.Millisecond); len(batch) < mirrorBatch && more; {
			select {
			case f, ok := <-m.synced:
				if more = ok; ok {
					batch = append(batch, f)
				}
				continue
			case <-wait:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			break
		}
		inos := make([]meta.Ino, len(batch))
		for i, f := range batch {
			inos[i] = f.dst
		}
		if err := m.dst.back.flushFiles(ctx, inos); err != nil {
			return err
		}
		if err := each(ctx, batch, func(ctx context.Context, _ int, f mirrorFile) error {
			_, err := m.dst.SetAttr(ctx, nil, timesOf(f.dst, &f.a))
			return err
		}); err != nil {
			return err
		}
	}
}

// each calls fn for all items, mirrorFiles at a time, until a call fails.
func each[T any](ctx context.Context, all []T, fn func(ctx context.Context, i int, x T) error) error {
	g, until := errgroup.WithContext(ctx)
	g.SetLimit(mirrorFiles)
	for i, x := range all {
		if until.Err() != nil {
			break
		}
		g.Go(func() error { return fn(until, i, x) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return context.Cause(ctx)
}

func (m *mirrorCopy) finishDir(ctx context.Context, src, dst meta.Ino) error {
	s, err := m.to.GetAttr(ctx, src)
	if err != nil {
		return err
	}
	t, err := m.dst.GetAttr(ctx, dst)
	if err != nil {
		return err
	}
	m.inodes.Add(1)
	if err := m.setOwner(ctx, src, dst, &s.Attr, &t.Attr); err != nil {
		return err
	}
	_, err = m.dst.SetAttr(ctx, nil, timesOf(dst, &s.Attr))
	return err
}
