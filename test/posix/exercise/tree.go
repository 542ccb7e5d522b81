package exercise

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// node is a file, directory or symbolic link in the model.
type node struct {
	children map[string]*node // of a directory
	link     bool
	data     string // content, or target
	mode     uint32
	nlink    int // of a file or link
	xattr    string
}

func (n *node) dir() bool { return n.children != nil }

// tree is the state of a run.
type tree struct {
	base string
	root *node
	r    *rand.Rand
	log  []string
}

// Tree does ops random operations of the namespace below base, an empty
// directory, and compares each result with a model: the errno, and every so
// often the whole tree. Nobody else may change anything below base.
func Tree(base string, seed uint64, ops int) error {
	t := &tree{base: base, root: &node{children: map[string]*node{}}, r: rand.New(rand.NewPCG(seed, 2))}
	for i := range ops {
		err := t.step()
		if err == nil && (i%500 == 499 || i == ops-1) {
			err = t.compare(base, t.root)
		}
		if err != nil {
			return fmt.Errorf("seed %d, operation %d: %w; the last operations:\n%s", seed, i, err, strings.Join(t.log, "\n"))
		}
	}
	return nil
}

// pick chooses a path of one to three of a few names, so that operations meet.
func (t *tree) pick() string {
	p := ""
	for i, depth := 0, 1+t.r.IntN(3); i < depth; i++ {
		p = path.Join(p, string(rune('a'+t.r.IntN(6))))
	}
	return p
}

// find returns the parent of a path and the node itself, or the errno of the lookup.
// Links are never followed, because no target exists.
func (t *tree) find(p string) (parent, n *node, name string, errno error) {
	parent = t.root
	parts := strings.Split(p, "/")
	for _, d := range parts[:len(parts)-1] {
		next := parent.children[d]
		switch {
		case next == nil:
			return nil, nil, "", unix.ENOENT
		case next.link:
			return nil, nil, "", unix.ENOENT
		case !next.dir():
			return nil, nil, "", unix.ENOTDIR
		}
		parent = next
	}
	name = parts[len(parts)-1]
	return parent, parent.children[name], name, nil
}

// expect compares an errno with the model's and notes the operation.
func (t *tree) expect(got, want error, format string, args ...any) error {
	t.log = append(t.log, fmt.Sprintf(format, args...)+": "+fmt.Sprint(got))
	if len(t.log) > 25 {
		t.log = t.log[1:]
	}
	if want == nil && got == nil || want != nil && errors.Is(got, want) {
		return nil
	}
	return fmt.Errorf("%s: expected %v, got %v", fmt.Sprintf(format, args...), want, got)
}

func (t *tree) step() error {
	p := t.pick()
	full := path.Join(t.base, p)
	parent, n, name, errno := t.find(p)
	missing := errno
	if errno == nil && n == nil {
		missing = unix.ENOENT
	}
	exists := errno
	if errno == nil && n != nil {
		exists = unix.EEXIST
	}
	switch k := t.r.IntN(100); {
	case k < 18:
		fd, err := unix.Open(full, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
		if err == nil {
			unix.Close(fd)
			if exists == nil {
				parent.children[name] = &node{mode: 0o644, nlink: 1}
			}
		}
		return t.expect(err, exists, "create %s", p)
	case k < 33:
		err := unix.Mkdir(full, 0o755)
		if err == nil && exists == nil {
			parent.children[name] = &node{mode: 0o755, children: map[string]*node{}}
		}
		return t.expect(err, exists, "mkdir %s", p)
	case k < 38:
		target := fmt.Sprint("nothing/", t.r.IntN(100))
		err := unix.Symlink(target, full)
		if err == nil && exists == nil {
			parent.children[name] = &node{mode: 0o777, link: true, data: target, nlink: 1}
		}
		return t.expect(err, exists, "symlink %s", p)
	case k < 50:
		want := missing
		if want == nil && n.dir() {
			want = unix.EISDIR
		}
		err := unix.Unlink(full)
		if want == nil {
			n.nlink--
			delete(parent.children, name)
		}
		return t.expect(err, want, "unlink %s", p)
	case k < 56:
		want := missing
		switch {
		case want != nil:
		case !n.dir():
			want = unix.ENOTDIR
		case len(n.children) > 0:
			want = unix.ENOTEMPTY
		}
		err := unix.Rmdir(full)
		if want == nil {
			delete(parent.children, name)
		}
		return t.expect(err, want, "rmdir %s", p)
	case k < 72:
		return t.rename(p, t.pick(), []uint{0, 0, 0, unix.RENAME_NOREPLACE, unix.RENAME_EXCHANGE}[t.r.IntN(5)])
	case k < 78:
		return t.link(p, t.pick())
	case k < 90:
		if missing != nil || n.dir() || n.link {
			return nil
		}
		data := fmt.Sprint("content ", t.r.Uint64())
		n.data = data
		return t.expect(os.WriteFile(full, []byte(data), 0o644), nil, "write %s", p)
	case k < 94:
		if missing != nil || n.link {
			return nil
		}
		n.mode = uint32(t.r.IntN(0o1000)) | 0o700
		return t.expect(unix.Chmod(full, n.mode), nil, "chmod %s %o", p, n.mode)
	case k < 97:
		if missing != nil || n.link {
			return nil
		}
		n.xattr = fmt.Sprint("value ", t.r.IntN(1000))
		return t.expect(unix.Setxattr(full, "user.exercise", []byte(n.xattr), 0), nil, "setxattr %s", p)
	default:
		if errno != nil || n == nil || !n.dir() {
			return nil
		}
		return t.list(full, n)
	}
}

func (t *tree) link(p, q string) error {
	_, n, _, errno := t.find(p)
	parent, target, name, toErrno := t.find(q)
	if errno == nil && n == nil {
		errno = unix.ENOENT
	}
	err := unix.Link(path.Join(t.base, p), path.Join(t.base, q))
	want := errno
	switch {
	case want != nil:
	case toErrno != nil:
		want = toErrno
	case target != nil:
		want = unix.EEXIST
	case n.dir():
		want = unix.EPERM
	default:
		n.nlink++
		parent.children[name] = n
	}
	return t.expect(err, want, "link %s %s", p, q)
}

// rename predicts renameat2 in the order in which Linux checks.
func (t *tree) rename(p, q string, flags uint) error {
	fromParent, n, from, errno := t.find(p)
	toParent, target, to, toErrno := t.find(q)
	err := unix.Renameat2(unix.AT_FDCWD, path.Join(t.base, p), unix.AT_FDCWD, path.Join(t.base, q), flags)
	inside := func(a, b string) bool { return strings.HasPrefix(b, a+"/") }
	var want error
	switch {
	case errno != nil:
		want = errno
	case toErrno != nil:
		want = toErrno
	case n == nil:
		want = unix.ENOENT
	case flags == unix.RENAME_NOREPLACE && target != nil:
		want = unix.EEXIST
	case flags == unix.RENAME_EXCHANGE && target == nil:
		want = unix.ENOENT
	case n.dir() && inside(p, q):
		want = unix.EINVAL
	case target != nil && target.dir() && inside(q, p):
		want = unix.ENOTEMPTY
		if flags == unix.RENAME_EXCHANGE {
			want = unix.EINVAL
		}
	case n == target:
	case flags == unix.RENAME_EXCHANGE:
		fromParent.children[from], toParent.children[to] = target, n
	case target != nil && target.dir() && !n.dir():
		want = unix.EISDIR
	case target != nil && !target.dir() && n.dir():
		want = unix.ENOTDIR
	case target != nil && target.dir() && len(target.children) > 0:
		want = unix.ENOTEMPTY
	default:
		if target != nil {
			target.nlink--
		}
		delete(fromParent.children, from)
		toParent.children[to] = n
	}
	return t.expect(err, want, "rename %s %s flags %d", p, q, flags)
}

// list compares the names of a directory with the model.
func (t *tree) list(full string, n *node) error {
	es, err := os.ReadDir(full)
	if err != nil {
		return err
	}
	var got []string
	for _, e := range es {
		got = append(got, e.Name())
	}
	if want := slices.Sorted(maps.Keys(n.children)); !slices.Equal(got, want) {
		return fmt.Errorf("%s lists %q, expected %q", full, got, want)
	}
	return nil
}

// compare checks the whole tree below a directory.
func (t *tree) compare(full string, n *node) error {
	if err := t.list(full, n); err != nil {
		return err
	}
	subdirs := 0
	for _, name := range slices.Sorted(maps.Keys(n.children)) {
		c, p := n.children[name], path.Join(full, name)
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return fmt.Errorf("lstat %s: %w", p, err)
		}
		if got := st.Mode & 0o7777; got != c.mode {
			return fmt.Errorf("%s has mode %o, expected %o", p, got, c.mode)
		}
		if c.xattr != "" {
			b := make([]byte, 100)
			m, err := unix.Lgetxattr(p, "user.exercise", b)
			if err != nil || string(b[:m]) != c.xattr {
				return fmt.Errorf("DATA: %s has the attribute %q (%w), expected %q", p, b[:max(m, 0)], err, c.xattr)
			}
		}
		switch {
		case c.dir():
			subdirs++
			if err := t.compare(p, c); err != nil {
				return err
			}
			continue
		case c.link:
			if got, err := os.Readlink(p); err != nil || got != c.data {
				return fmt.Errorf("%s points to %q (%w), expected %q", p, got, err, c.data)
			}
		default:
			if got, err := os.ReadFile(p); err != nil || string(got) != c.data {
				return fmt.Errorf("DATA: %s holds %q (%w), expected %q", p, got, err, c.data)
			}
		}
		if int(st.Nlink) != c.nlink {
			return fmt.Errorf("%s has %d links, expected %d", p, st.Nlink, c.nlink)
		}
	}
	var st unix.Stat_t
	if err := unix.Lstat(full, &st); err != nil {
		return err
	}
	if int(st.Nlink) != 2+subdirs {
		return fmt.Errorf("directory %s has %d links, expected %d", full, st.Nlink, 2+subdirs)
	}
	return nil
}
