package namespace

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
)

// Diff lists the changes from one snapshot to a later one, or to the live volume (to is zero),
// sorted by path. Time and memory are proportional to the number of changes. Errors:
// NoSuchSnapshot, Invalid (from is not the earlier snapshot).
func Diff(r Reader, from, to meta.Generation) ([]meta.Change, error) {
	return compare(r, from, to, false)
}

// DiffExact is Diff for exact copies: DiffExact also lists inodes of which only the time of
// modification differs and, for a new name, the former path of the inode (Change.From).
func DiffExact(r Reader, from, to meta.Generation) ([]meta.Change, error) {
	return compare(r, from, to, true)
}

func compare(r Reader, from, to meta.Generation, exact bool) ([]meta.Change, error) {
	d := &differ{exact: exact, changed: map[meta.Ino]bool{}, names: map[place]bool{}, gone: map[whom][]place{}, come: map[whom][]place{}}
	for i, gen := range []meta.Generation{from, to} {
		s := &d.sides[i]
		s.tx = tx{view: view{r: r}}
		s.paths = map[meta.Ino]string{meta.RootIno: ""}
		if err := s.begin(); err != nil {
			return nil, err
		}
		if gen == 0 && i == 1 {
			continue
		}
		if _, err := s.snaps().snapshotAt(uint32(gen)); err != nil {
			return nil, err
		}
		s.gen = uint32(gen)
	}
	if d.sides[0].gen >= d.sides[1].gen {
		return nil, fail("diff", meta.Invalid, fmt.Sprintf("generation %d is not before %d", d.sides[0].gen, d.sides[1].gen))
	}
	for _, step := range []func() error{d.readNotes, d.compareNames, d.tellNames, d.tellInodes} {
		if err := step(); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(d.out, func(a, b meta.Change) int {
		return cmp.Or(cmp.Compare(a.Path, b.Path), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.From, b.From))
	})
	return d.out, nil
}

// place is an entry's name.
type place struct {
	dir  meta.Ino
	name string
}

// whom is the inode behind an entry.
type whom struct {
	ino meta.Ino
	vol meta.VolumeID
	typ uint32
}

// side is the volume at either of the two moments.
type side struct {
	tx
	paths map[meta.Ino]string // paths of directories that were needed so far
}

type differ struct {
	exact      bool
	sides      [2]side
	changed    map[meta.Ino]bool
	names      map[place]bool
	gone, come map[whom][]place
	out        []meta.Change
}

// readNotes collects the notes of changes in the generations between.
func (d *differ) readNotes() error {
	for _, prefix := range []byte{prefixInoGen, prefixNameGen} {
		lo := binary.BigEndian.AppendUint32([]byte{prefix}, d.sides[0].gen+1)
		hi := binary.BigEndian.AppendUint32([]byte{prefix}, d.sides[1].gen)
		var bad error
		err := d.sides[0].r.Scan(lo, after(hi), func(k, _ []byte) bool {
			switch {
			case len(k) < 13:
				bad = fail("diff", meta.Corrupt, fmt.Sprintf("key %x", k))
			case prefix == prefixInoGen:
				d.changed[meta.Ino(binary.BigEndian.Uint64(k[5:]))] = true
			default:
				d.names[place{meta.Ino(binary.BigEndian.Uint64(k[5:])), string(k[13:])}] = true
			}
			return bad == nil
		})
		if err = cmp.Or(err, bad); err != nil {
			return err
		}
	}
	return nil
}

// compareNames finds the entries with different inodes.
func (d *differ) compareNames() error {
	for _, p := range slices.SortedFunc(maps.Keys(d.names), func(a, b place) int {
		return cmp.Or(cmp.Compare(a.dir, b.dir), cmp.Compare(a.name, b.name))
	}) {
		var at [2]whom
		for i := range d.sides {
			e, ok, err := d.sides[i].findEntry(p.dir, p.name)
			if err != nil {
				return err
			}
			if ok {
				at[i] = whom{e.ino, e.vol, e.typ}
			}
		}
		if at[0] == at[1] {
			continue
		}
		if at[0] != (whom{}) {
			d.gone[at[0]] = append(d.gone[at[0]], p)
		}
		if at[1] != (whom{}) {
			d.come[at[1]] = append(d.come[at[1]], p)
		}
	}
	return nil
}

// tellNames turns removed and new names into changes: an inode that lost a name and got
// another was renamed.
func (d *differ) tellNames() error {
	for _, w := range slices.SortedFunc(maps.Keys(d.gone), compareWhom) {
		old, err := d.pathsOf(0, d.gone[w])
		if err != nil {
			return err
		}
		fresh, err := d.pathsOf(1, d.come[w])
		if err != nil {
			return err
		}
		delete(d.come, w)
		had := old[0]
		for len(old) > 0 || len(fresh) > 0 {
			c := meta.Change{Ino: w.ino, Type: w.typ}
			switch {
			case len(old) == 0:
				c.Kind, c.Path, fresh = meta.PathAdded, fresh[0], fresh[1:]
				if d.exact && w.vol == 0 {
					c.From = had
				}
			case len(fresh) == 0:
				c.Kind, c.Path, old = meta.PathRemoved, old[0], old[1:]
			default:
				c.Kind, c.Path, c.From = meta.PathRenamed, fresh[0], old[0]
				old, fresh = old[1:], fresh[1:]
			}
			d.out = append(d.out, c)
		}
	}
	var had map[meta.Ino]string
	if d.exact {
		var err error
		if had, err = d.pathsBefore(); err != nil {
			return err
		}
	}
	for _, w := range slices.SortedFunc(maps.Keys(d.come), compareWhom) {
		fresh, err := d.pathsOf(1, d.come[w])
		if err != nil {
			return err
		}
		for _, p := range fresh {
			c := meta.Change{Kind: meta.PathAdded, Path: p, Ino: w.ino, Type: w.typ}
			if w.vol == 0 {
				c.From = had[w.ino]
			}
			d.out = append(d.out, c)
		}
	}
	return nil
}

// pathsBefore returns, for each inode with new names, a path at the earlier moment, if the
// inode had a name then.
func (d *differ) pathsBefore() (map[meta.Ino]string, error) {
	s := &d.sides[0]
	paths, lost := map[meta.Ino]string{}, map[meta.Ino]int{}
	for _, w := range slices.SortedFunc(maps.Keys(d.come), compareWhom) {
		if w.vol != 0 {
			continue
		}
		in, err := s.read(w.ino)
		if meta.KindOf(err) == meta.Stale {
			continue
		} else if err != nil {
			return nil, err
		}
		if in.Nlink == 0 || in.IsDir() {
			continue // a directory has no name besides the kept name
		}
		name, err := s.nameIn(in, in.home)
		if err != nil {
			return nil, err
		}
		if name == "" {
			lost[w.ino] = 0
			continue
		}
		up, err := s.dirPath(in.home)
		if err != nil {
			return nil, err
		}
		paths[w.ino] = join(up, name)
	}
	return paths, s.find(lost, func(ino meta.Ino, path string) { paths[ino] = path })
}

func compareWhom(a, b whom) int {
	return cmp.Or(cmp.Compare(a.ino, b.ino), cmp.Compare(a.vol, b.vol), cmp.Compare(a.typ, b.typ))
}

// pathsOf returns the paths of entries on one side, in order.
func (d *differ) pathsOf(i int, places []place) ([]string, error) {
	var out []string
	for _, p := range places {
		dir, err := d.sides[i].dirPath(p.dir)
		if err != nil {
			return nil, err
		}
		out = append(out, join(dir, p.name))
	}
	slices.Sort(out)
	return out, nil
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// dirPath is a directory's path.
func (s *side) dirPath(dir meta.Ino) (string, error) {
	if p, ok := s.paths[dir]; ok {
		return p, nil
	}
	if len(s.paths) > 1<<20 {
		s.paths = map[meta.Ino]string{meta.RootIno: ""}
	}
	in, err := s.read(dir)
	if err != nil {
		return "", err
	}
	name, ok, err := s.nameAt(in, in.Parent)
	if err == nil && !ok {
		err = fail("diff", meta.Corrupt, fmt.Sprintf("directory %d is not in its parent %d", dir, in.Parent))
	}
	if err != nil {
		return "", err
	}
	up, err := s.dirPath(in.Parent)
	if err != nil {
		return "", err
	}
	p := join(up, name)
	s.paths[dir] = p
	return p, nil
}

// read reads an inode without caching it.
func (s *side) read(ino meta.Ino) (*inode, error) {
	b, _, ok, err := s.get(appendInodeBase(s.scratch[:0], ino))
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, stale(ino)
	}
	in := &inode{}
	return in, decodeInode(b, ino, in)
}

// nameAt finds a directory's name in its parent: at the position in the inode's record or,
// without a position, by reading the parent.
func (s *side) nameAt(in *inode, dir meta.Ino) (string, bool, error) {
	found, err := s.nameIn(in, dir)
	if err != nil || found != "" {
		return found, found != "", err
	}
	lo := appendCookieBase(nil, dir, 0)
	err = s.scan(lo, after(lo[:9]), func(_, val []byte, _ uint32) (bool, error) {
		e, name, err := decodeCookie(val)
		if err == nil && e.ino == in.Ino && e.vol == 0 {
			found = string(name)
		}
		return found == "", err
	})
	return found, found != "", err
}

// tellInodes adds the changes of inodes that exist on both sides and differ.
func (d *differ) tellInodes() error {
	lost := map[meta.Ino]int{} // inodes without a recorded name -> their change
	for _, ino := range slices.Sorted(maps.Keys(d.changed)) {
		a, err := d.sides[0].read(ino)
		if meta.KindOf(err) == meta.Stale {
			continue
		} else if err != nil {
			return err
		}
		b, err := d.sides[1].read(ino)
		if meta.KindOf(err) == meta.Stale {
			continue
		} else if err != nil {
			return err
		}
		if a.Nlink == 0 || b.Nlink == 0 {
			continue
		}
		c := meta.Change{Kind: meta.PathChanged, Ino: ino, Type: b.Mode & meta.TypeMask}
		if !b.IsDir() {
			if c.Content, err = d.contentDiffers(a, b); err != nil {
				return err
			}
		}
		differs := c.Content || d.exact && a.Mtime != b.Mtime || a.Mode != b.Mode || a.UID != b.UID || a.GID != b.GID
		if !differs {
			if differs, err = d.xattrsDiffer(a, b); err != nil {
				return err
			}
		}
		if !differs {
			continue
		}
		switch {
		case ino == meta.RootIno:
		case b.IsDir():
			c.Path, err = d.sides[1].dirPath(ino)
		default:
			var name, up string
			if name, err = d.sides[1].nameIn(b, b.home); err == nil && name == "" {
				lost[ino] = len(d.out)
			} else if err == nil {
				up, err = d.sides[1].dirPath(b.home)
				c.Path = join(up, name)
			}
		}
		if err != nil {
			return err
		}
		d.out = append(d.out, c)
	}
	return d.sides[1].find(lost, func(ino meta.Ino, path string) { d.out[lost[ino]].Path = path })
}

// find reads all directories, once, for names of inodes whose records have no valid position,
// for example because an inode with several names has lost the recorded one.
func (s *side) find(lost map[meta.Ino]int, tell func(ino meta.Ino, path string)) error {
	if len(lost) == 0 {
		return nil
	}
	found, err := s.findNames(lost)
	if err != nil {
		return err
	}
	for _, ino := range slices.Sorted(maps.Keys(lost)) {
		p, ok := found[ino]
		if !ok {
			return fail("diff", meta.Corrupt, fmt.Sprintf("inode %d has links and no name", ino))
		}
		up, err := s.dirPath(p.dir)
		if err != nil {
			return err
		}
		tell(ino, join(up, p.name))
	}
	return nil
}

// findNames looks through all directories for a name of each inode.
func (s *side) findNames(lost map[meta.Ino]int) (map[meta.Ino]place, error) {
	found := map[meta.Ino]place{}
	err := s.scan([]byte{prefixCookie}, []byte{prefixCookie + 1}, func(base, val []byte, _ uint32) (bool, error) {
		e, name, err := decodeCookie(val)
		if _, want := lost[e.ino]; err == nil && want && e.vol == 0 && len(base) == 17 {
			found[e.ino] = place{meta.Ino(binary.BigEndian.Uint64(base[1:])), string(name)}
		}
		return len(found) < len(lost), err
	})
	return found, err
}

// contentDiffers tells whether a file may hold other bytes. The same bytes in
// other places count as others.
func (d *differ) contentDiffers(a, b *inode) (bool, error) {
	if a.Size != b.Size || a.Mtime != b.Mtime || !bytes.Equal(a.data, b.data) || a.Rdev != b.Rdev || a.Mode&meta.TypeMask != b.Mode&meta.TypeMask {
		return true, nil
	}
	if a.Change == b.Change || !a.IsRegular() {
		return false, nil
	}
	// Times may have been set back: compare where the bytes lie.
	var l [2][]meta.Extent
	for i, in := range []*inode{a, b} {
		if err := d.sides[i].extents().scanLive(in, 0, func(e extent) bool {
			l[i] = append(l[i], e.Extent)
			return true
		}); err != nil {
			return false, err
		}
	}
	return !slices.Equal(l[0], l[1]), nil
}

func (d *differ) xattrsDiffer(a, b *inode) (bool, error) {
	var l [2][]byte
	for i, in := range []*inode{a, b} {
		if err := d.sides[i].xattrs().eachXattr(in, func(name string, val []byte) bool {
			l[i] = appendBytes(appendBytes(l[i], name), val)
			return true
		}); err != nil {
			return false, err
		}
	}
	return !bytes.Equal(l[0], l[1]), nil
}
