package namespace

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// TestAgainstKernel does the same random operations on names in the machine and in a
// directory of the test's file system: the errors, the trees and the link counts must be
// equal. The kernel is a model that this project did not write.
func TestAgainstKernel(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			t.Parallel()
			k := &kernelSim{fixture: newFixture(t), rng: rand.New(rand.NewPCG(seed, 9)), root: t.TempDir()}
			for step := range 300 {
				k.step(fmt.Sprintf("seed %d step %d", seed, step))
				if step%20 == 19 {
					k.sameTree(fmt.Sprintf("seed %d step %d", seed, step))
				}
			}
		})
	}
}

type kernelSim struct {
	*fixture
	rng  *rand.Rand
	root string
}

type kernelEntry struct {
	path string
	ino  meta.Ino
	typ  uint32
}

func (k *kernelSim) list(ino meta.Ino, path string) (l []kernelEntry) {
	for _, e := range k.do(&meta.ReadDir{Ino: ino}).Entries {
		l = append(l, kernelEntry{path + "/" + e.Name, e.Ino, e.Type})
		if e.Type == dir {
			l = append(l, k.list(e.Ino, path+"/"+e.Name)...)
		}
	}
	return l
}

var kernelErrno = map[meta.Kind]syscall.Errno{
	0: 0, meta.NotFound: syscall.ENOENT, meta.Exists: syscall.EEXIST, meta.NotDir: syscall.ENOTDIR, meta.IsDir: syscall.EISDIR,
	meta.NotEmpty: syscall.ENOTEMPTY, meta.NotPermitted: syscall.EPERM, meta.Invalid: syscall.EINVAL, meta.Busy: syscall.EBUSY,
}

func (k *kernelSim) step(when string) {
	k.t.Helper()
	rng := k.rng
	all := k.list(meta.RootIno, k.root)
	parents := []kernelEntry{{k.root, meta.RootIno, dir}}
	for _, e := range all {
		if e.typ == dir || rng.IntN(20) == 0 {
			parents = append(parents, e)
		}
	}
	names := []string{"a", "b", "c", "d"}
	if rng.IntN(30) == 0 {
		names = []string{".", "..", "a"}
	}
	pick := func() (meta.Ino, string, string) {
		d, n := parents[rng.IntN(len(parents))], names[rng.IntN(len(names))]
		return d.ino, n, d.path + "/" + n
	}
	d, name, path := pick()
	var want error
	var op meta.Op
	switch rng.IntN(7) {
	case 0:
		want, op = unix.Mkdir(path, 0o755), &meta.Create{Parent: d, Name: name, Mode: dir | 0o755, Excl: true}
	case 1:
		want, op = unix.Mknod(path, syscall.S_IFREG|0o644, 0), &meta.Create{Parent: d, Name: name, Mode: reg | 0o644, Excl: true}
	case 2:
		want, op = unix.Unlink(path), &meta.Unlink{Parent: d, Name: name}
	case 3:
		want, op = unix.Rmdir(path), &meta.Unlink{Parent: d, Name: name, Dir: true}
	case 4:
		if len(all) == 0 {
			return
		}
		src := all[rng.IntN(len(all))]
		want, op = unix.Link(src.path, path), &meta.Link{Ino: src.ino, Parent: d, Name: name}
	default:
		d2, name2, path2 := pick()
		flags := []uint32{0, 0, 0, 1, 2, 2, 3}[rng.IntN(7)]
		want = unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, path2, uint(flags))
		op = &meta.Rename{Parent: d, Name: name, NewParent: d2, NewName: name2, Flags: flags}
	}
	_, got := k.try(op)
	var errno syscall.Errno
	errors.As(want, &errno)
	if e, ok := kernelErrno[meta.KindOf(got)]; !ok || e != errno {
		k.t.Fatalf("%s: %T %+v at %s: %v, the kernel says %v", when, op, op, path, got, want)
	}
}

func (k *kernelSim) sameTree(when string) {
	k.t.Helper()
	var want, got []string
	err := filepath.WalkDir(k.root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		want = append(want, fmt.Sprintf("%s %d %o", path, st.Nlink, st.Mode&meta.TypeMask))
		return nil
	})
	if err != nil {
		k.t.Fatal(err)
	}
	for _, e := range append(k.list(meta.RootIno, k.root), kernelEntry{path: k.root, ino: meta.RootIno}) {
		a := k.attr(e.ino)
		got = append(got, fmt.Sprintf("%s %d %o", e.path, a.Nlink, a.Mode&meta.TypeMask))
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		k.t.Fatalf("%s:\n got %v\nwant %v", when, got, want)
	}
}
