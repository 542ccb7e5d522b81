package stream

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Names in the directory of a stream.
const (
	SpecFile  = "stream.json"
	goneFile  = "stream.json.gone" // the name of SpecFile while Delete removes the other files
	logDir    = "log"
	groupsDir = "groups"
)

// groupSuffix ends the name of the file with a group's offsets.
const groupSuffix = ".offsets"

// ownDirs are the directories of a stream: those above, and those of the published table.
var ownDirs = []string{logDir, groupsDir, "data", "rejected", "_delta_log"}

// Create makes a stream, with the directories above it. An interrupted Create can be repeated.
// Errors: Invalid (the path or the spec), NameTooLong, Exists (the stream exists), NotEmpty
// (a directory with other files), and errors of the tree.
func Create(ctx context.Context, t *penstock.Tree, p string, s Spec) error {
	const op = "create stream"
	if err := s.Check(); err != nil {
		return err
	}
	if _, err := Topic(p); err != nil {
		return err
	}
	if err := t.MkdirAll(ctx, p, dirMode); err != nil {
		return err
	}
	list, err := t.ReadDirAll(ctx, p)
	if err != nil {
		return err
	}
	for _, e := range list {
		switch {
		case e.Name == SpecFile:
			return meta.E(op, meta.Exists, p, nil)
		case e.Name == SpecFile+replaceSuffix || slices.Contains(ownDirs, e.Name): // of an interrupted Create
		default:
			return meta.E(op, meta.NotEmpty, p, fmt.Errorf("it has %q: choose an empty directory", e.Name))
		}
	}
	dirs := ownDirs
	if s.Lag == 0 {
		dirs = []string{logDir, groupsDir} // without a table
	}
	for _, name := range dirs {
		if err := t.MkdirAll(ctx, path.Join(p, name), dirMode); err != nil {
			return err
		}
		if err := t.MarkStream(ctx, path.Join(p, name)); err != nil {
			return err
		}
	}
	for n := range s.Partitions {
		if err := t.MkdirAll(ctx, path.Join(p, logDir, strconv.Itoa(n)), dirMode); err != nil {
			return err
		}
	}
	if err := t.WriteFile(ctx, path.Join(p, SpecFile+replaceSuffix), s.Encode(), fileMode); err != nil {
		return err
	}
	if err := t.MarkStream(ctx, path.Join(p, SpecFile+replaceSuffix)); err != nil {
		return err
	}
	if err := t.Rename(ctx, path.Join(p, SpecFile+replaceSuffix), path.Join(p, SpecFile)); err != nil {
		return err
	}
	return syncDir(ctx, t, p)
}

// syncDir makes the names in a directory durable. A file's sync makes all names durable.
func syncDir(ctx context.Context, t *penstock.Tree, p string) error {
	f, err := t.OpenFile(ctx, path.Join(p, SpecFile), 0, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Load reads what stream.json says of a stream. Errors: NotFound (no stream), and errors of
// DecodeSpec.
func Load(ctx context.Context, t *penstock.Tree, p string) (Spec, error) {
	b, err := t.ReadFile(ctx, path.Join(p, SpecFile))
	if k := meta.KindOf(err); k == meta.NotFound || k == meta.NotDir {
		return Spec{}, meta.E("open stream", meta.NotFound, p, errors.New("no stream is there"))
	}
	if err != nil {
		return Spec{}, err
	}
	return DecodeSpec(b)
}

// Delete ends a stream and removes its files. An interrupted Delete can be repeated. Errors:
// NotFound, NotEmpty (the directory has other files; the stream is gone).
func Delete(ctx context.Context, t *penstock.Tree, p string) error {
	gone := path.Join(p, goneFile)
	err := t.Rename(ctx, path.Join(p, SpecFile), gone)
	if k := meta.KindOf(err); k == meta.NotFound || k == meta.NotDir {
		if _, serr := t.Stat(ctx, gone); serr != nil {
			return meta.E("delete stream", meta.NotFound, p, errors.New("no stream is there"))
		}
		err = nil // an earlier Delete was interrupted
	}
	if err != nil {
		return err
	}
	for _, name := range ownDirs {
		err := removeAll(ctx, t, path.Join(p, name))
		for try := 0; try < 3 && errors.Is(err, meta.NotEmpty); try++ {
			err = removeAll(ctx, t, path.Join(p, name)) // a gateway has published meanwhile
		}
		if err != nil {
			return err
		}
	}
	if err := t.Remove(ctx, path.Join(p, SpecFile+replaceSuffix)); err != nil && !errors.Is(err, meta.NotFound) { // of an interrupted Change
		return err
	}
	if err := t.Remove(ctx, gone); err != nil {
		return err
	}
	return t.Remove(ctx, p)
}

func removeAll(ctx context.Context, t *penstock.Tree, p string) error {
	list, err := t.ReadDirAll(ctx, p)
	if errors.Is(err, meta.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range list {
		below := path.Join(p, e.Name)
		if e.Type == meta.TypeDir {
			err = removeAll(ctx, t, below)
		} else {
			err = t.Remove(ctx, below)
		}
		if err != nil && !errors.Is(err, meta.NotFound) {
			return err
		}
	}
	return t.Remove(ctx, p)
}

// Bounds of List: a tree of training data has many directories beside streams.
const (
	listDepth = 8
	listDirs  = 20000
)

// List finds streams by a walk, breadth first, from the root of the tree: streams at most
// listDepth directories deep, among the first listDirs directories. whole is false if there
// are more directories. Streams within a stream are not found.
func List(ctx context.Context, t *penstock.Tree) (paths []string, whole bool, err error) {
	level, seen, whole := []string{"/"}, 0, true
	for depth := 0; len(level) > 0 && depth <= listDepth; depth++ {
		var next []string
		for _, p := range level {
			if seen++; seen > listDirs {
				return paths, false, nil
			}
			list, err := t.ReadDirAll(ctx, p)
			if k := meta.KindOf(err); k == meta.NotFound || k == meta.NotDir || k == meta.Stale {
				continue // the directory was removed meanwhile
			}
			if err != nil {
				return nil, false, err
			}
			if slices.ContainsFunc(list, func(e penstock.DirEntry) bool { return e.Name == SpecFile && e.Type == meta.TypeRegular }) {
				paths = append(paths, p)
				continue
			}
			for _, e := range list {
				if e.Type == meta.TypeDir {
					next = append(next, path.Join(p, e.Name))
				}
			}
		}
		level = next
	}
	slices.Sort(paths)
	return paths, whole && len(level) == 0, nil
}

// Groups returns the names of the consumer groups that have committed offsets in a stream, in order.
func Groups(ctx context.Context, t *penstock.Tree, p string) (names []string, err error) {
	list, err := t.ReadDirAll(ctx, path.Join(p, groupsDir))
	if err != nil && !errors.Is(err, meta.NotFound) {
		return nil, err
	}
	for _, e := range list {
		text, ok := strings.CutSuffix(e.Name, groupSuffix)
		if name, whole := unescape(text); ok && whole {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Usage counts the files of a stream's partitions and their bytes.
func Usage(ctx context.Context, t *penstock.Tree, p string) (files int, bytes uint64, err error) {
	partitions, err := t.ReadDirAll(ctx, path.Join(p, logDir))
	if err != nil && !errors.Is(err, meta.NotFound) {
		return 0, 0, err
	}
	for _, d := range partitions {
		if d.Type != meta.TypeDir {
			continue
		}
		list, err := t.ReadDirAll(ctx, path.Join(p, logDir, d.Name))
		if err != nil && !errors.Is(err, meta.NotFound) {
			return 0, 0, err
		}
		for _, e := range list {
			if path.Ext(e.Name) != ".seg" {
				continue
			}
			info, err := t.Stat(ctx, path.Join(p, logDir, d.Name, e.Name))
			if errors.Is(err, meta.NotFound) {
				continue // retention removed the segment
			}
			if err != nil {
				return 0, 0, err
			}
			files++
			bytes += info.Attr.Size
		}
	}
	return files, bytes, nil
}
