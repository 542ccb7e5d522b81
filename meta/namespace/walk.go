package namespace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
)

// Extents visits the live extents of every inode until fn returns false.
func Extents(r Reader, fn func(ino meta.Ino, e meta.Extent) bool) error {
	return LiveExtents(r, func(ino meta.Ino, e meta.Extent, _ bool) bool { return fn(ino, e) })
}

// LiveExtents is Extents for compaction. kept reports whether a snapshot sees the version of
// the extent; if such an extent were moved, the bytes would lie in both places.
func LiveExtents(r Reader, fn func(ino meta.Ino, e meta.Extent, kept bool) bool) error {
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return err
	}
	return t.scan([]byte{prefixExtent}, []byte{prefixExtent + 1}, func(base, val []byte, gen uint32) (bool, error) {
		if len(base) != 17 {
			return false, fail("scan", meta.Corrupt, fmt.Sprintf("key %x", base))
		}
		e, err := decodeExtent(val, binary.BigEndian.Uint64(base[9:]))
		if err != nil {
			return false, err
		}
		return fn(meta.Ino(binary.BigEndian.Uint64(base[1:])), e, gen <= t.vol.lastSnap), nil
	})
}

// FileExtents visits the live extents of a file that overlap [off, end), in order, without
// extents waiting to be reaped after a truncation. kept is as in LiveExtents. Errors: Stale (no
// such inode).
func FileExtents(r Reader, ino meta.Ino, off, end uint64, fn func(e meta.Extent, kept bool) bool) error {
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return err
	}
	in, err := t.inode(ino)
	if err != nil {
		return err
	}
	return t.extents().scanLive(in, off, func(e extent) bool {
		return e.Off < end && fn(e.Extent, e.gen <= t.vol.lastSnap)
	})
}

// AllExtents is Extents for every generation: AllExtents also visits extents seen only by
// snapshots.
func AllExtents(r Reader, fn func(ino meta.Ino, e meta.Extent) bool) error {
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return err
	}
	return allExtents(&t, func(ino meta.Ino, _ uint32, e meta.Extent) bool { return fn(ino, e) })
}

func allExtents(t *tx, fn func(ino meta.Ino, gen uint32, e meta.Extent) bool) error {
	var inner error
	var last []byte // the base of the last key,
	under := false  // the version of the clone's base was seen
	err := t.r.Scan([]byte{prefixExtent}, []byte{prefixExtent + 1}, func(k, v []byte) bool {
		if len(k) != 17+genLen {
			inner = fail("scan", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		gen := ^binary.BigEndian.Uint32(k[17:])
		if t.base != nil {
			if !bytes.Equal(last, k[:17]) {
				last, under = append(last[:0], k[:17]...), false
			}
			if under || t.base.hides(gen) {
				return true
			}
			under = t.base.below(gen)
		}
		if isTombstone(v) {
			return true
		}
		var e meta.Extent
		if e, inner = decodeExtent(v, binary.BigEndian.Uint64(k[9:])); inner != nil {
			return false
		}
		return fn(meta.Ino(binary.BigEndian.Uint64(k[1:])), gen, e)
	})
	if inner != nil {
		return inner
	}
	return err
}

// Paths finds the paths of directories and caches them. A Paths is valid as long as the state
// does not change.
type Paths struct {
	t    tx
	dirs map[meta.Ino]string
	long map[meta.Ino]bool // directories with too long paths
}

// pathsKept bounds the cached directories.
const pathsKept = 1 << 16

// NewPaths begins with nothing known.
func NewPaths(r Reader) *Paths {
	return &Paths{tx{view: view{r: r}}, map[meta.Ino]string{}, map[meta.Ino]bool{}}
}

// Of returns the path of a directory from the volume's root, which is "". Of costs two reads
// for each uncached directory above. Errors: Stale (the directory is gone), NotDir, NameTooLong
// (a path of meta.MaxPath bytes or more: directories can be nested deeper than a path reaches).
func (p *Paths) Of(dir meta.Ino) (string, error) {
	if p.t.vol.gen == 0 {
		if err := p.t.begin(); err != nil {
			return "", err
		}
	}
	if len(p.dirs)+len(p.long) > pathsKept {
		clear(p.dirs)
		clear(p.long)
	}
	var chain []meta.Ino // from dir up
	var names []string   // theirs
	path, length := "", 0
	for at := dir; at != meta.RootIno; {
		if known, ok := p.dirs[at]; ok {
			path = known
			break
		}
		in, name, err := p.step(at)
		if err != nil {
			return "", err
		}
		if name == "" { // the record is older than the records that have the name's position
			above, err := PathOf(p.t.r, at)
			if err != nil {
				return "", err
			}
			chain, names = append(chain, at), append(names, strings.Join(above, "/"))
			break
		}
		chain, names = append(chain, at), append(names, name)
		if length += len(name) + 1; length > meta.MaxPath || p.long[at] {
			return "", p.tooLong(dir)
		}
		at = in.Parent
	}
	down := slices.Clone(names)
	if path != "" {
		down = append(down, path)
	}
	slices.Reverse(down)
	if path = strings.Join(down, "/"); len(path) >= meta.MaxPath {
		return "", p.tooLong(dir)
	}
	// The paths of the directories above are prefixes of the path, and share the path's memory.
	for i, end := 0, len(path); i < len(chain); i++ {
		p.dirs[chain[i]] = path[:end]
		end -= len(names[i]) + 1
	}
	return path, nil
}

func (p *Paths) tooLong(dir meta.Ino) error {
	p.long[dir] = true
	return fail("path", meta.NameTooLong, fmt.Sprintf("inode %d", dir))
}

// step reads a directory and the directory's name in the parent; "" if the record has no
// position.
func (p *Paths) step(dir meta.Ino) (*inode, string, error) {
	p.t.inodes = p.t.inodes[:0]
	in, err := p.t.inode(dir)
	switch {
	case err != nil:
		return nil, "", err
	case !in.IsDir():
		return nil, "", fail("path", meta.NotDir, fmt.Sprintf("inode %d", dir))
	case in.Nlink == 0:
		return nil, "", stale(dir)
	}
	name, err := p.t.nameIn(in, in.Parent)
	return in, name, err
}

// nameIn returns the name of an inode in a directory, if the inode's record has the position;
// else "".
func (v *view) nameIn(in *inode, dir meta.Ino) (string, error) {
	if in.home == 0 || in.home != dir {
		return "", nil
	}
	b, _, ok, err := v.get(appendCookieBase(v.scratch[:0], in.home, in.homeAt))
	if err != nil || !ok {
		return "", err
	}
	d, name, err := decodeCookie(b)
	if err != nil || d.ino != in.Ino || d.vol != 0 {
		return "", err
	}
	return string(name), nil
}

// PathOf returns the path of a directory: the names from the volume's root down, none for the
// root itself. PathOf reads the entries of each parent until the child is found. Errors: Stale,
// NotDir.
func PathOf(r Reader, dir meta.Ino) ([]string, error) {
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return nil, err
	}
	var names []string
	for dir != meta.RootIno {
		in, err := t.inode(dir)
		if err != nil {
			return nil, err
		}
		if !in.IsDir() {
			return nil, fail("path", meta.NotDir, fmt.Sprintf("inode %d", dir))
		}
		found := ""
		lo := appendCookieBase(nil, in.Parent, 0)
		hi := after(lo[:9])
		err = t.scan(lo, hi, func(_, val []byte, _ uint32) (bool, error) {
			e, name, err := decodeCookie(val)
			if err != nil {
				return false, err
			}
			if e.ino == dir && e.vol == 0 {
				found = string(name)
			}
			return found == "", nil
		})
		if err != nil {
			return nil, err
		}
		if found == "" || len(names) > meta.MaxPath {
			return nil, fail("path", meta.Stale, fmt.Sprintf("inode %d", dir))
		}
		names = append(names, found)
		dir = in.Parent
	}
	slices.Reverse(names)
	return names, nil
}

// NamesOf returns a path, from the volume's root and without a leading slash, of each of the
// inodes with a name in the live generation, unless the path of the inode's directory is too
// long (Paths). NamesOf reads all directories.
func NamesOf(r Reader, inos map[meta.Ino]bool) (map[meta.Ino]string, error) {
	type at struct {
		dir  meta.Ino
		name string
	}
	found := map[meta.Ino]at{}
	if len(inos) == 0 {
		return nil, nil
	}
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return nil, err
	}
	err := t.scan([]byte{prefixCookie}, []byte{prefixCookie + 1}, func(base, val []byte, _ uint32) (bool, error) {
		e, name, err := decodeCookie(val)
		if err == nil && inos[e.ino] && e.vol == 0 && len(base) == 17 {
			found[e.ino] = at{meta.Ino(binary.BigEndian.Uint64(base[1:])), string(name)}
		}
		return len(found) < len(inos), err
	})
	if err != nil {
		return nil, err
	}
	paths := make(map[meta.Ino]string, len(found))
	dirs := NewPaths(r)
	for ino, p := range found { // in any order: the paths are independent
		dir, err := dirs.Of(p.dir)
		switch {
		case errors.Is(err, meta.NameTooLong):
			continue
		case err != nil:
			return nil, err
		}
		paths[ino] = strings.TrimPrefix(dir+"/"+p.name, "/")
	}
	return paths, nil
}
