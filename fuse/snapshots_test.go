package fuse

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

func init() {
	parts["snapshots"], parts["ownName"], parts["noOpen"] = partSnapshots, partOwnName, partNoOpen
	parts["stay"], parts["watch"], parts["twice"] = partStay, partWatch, partTwice
}

// prepareSnapshots makes a tree, takes a snapshot, and changes the tree: "f" was "then", "d" has
// two names of one file; the second volume has a snapshot of its own.
func prepareSnapshots(tree *memTree) {
	v := tree.volumes[1]
	file := func(text string) *memInode {
		return &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: []byte(text), xattrs: map[string][]byte{"user.a": []byte("b")}}
	}
	f := v.add(meta.RootIno, "f", file("then"))
	d := v.add(meta.RootIno, "d", &memInode{attr: meta.Attr{Mode: meta.TypeDir | 0o755}})
	a := v.add(d, "a", file("twice"))
	v.inodes[a].attr.Nlink = 2
	v.inodes[d].cookie++
	v.inodes[d].names = append(v.inodes[d].names, memName{"b", a, v.inodes[d].cookie})
	v.snapshot("one")
	v.snapshot("another")
	v.inodes[f].data = []byte("now")
	second := tree.volumes[2]
	second.add(meta.RootIno, "g", file("second"))
	second.snapshot("two")
}

func TestSnapshots(t *testing.T) {
	m := mount(t, Options{}, prepareSnapshots)
	run(t, "snapshots", m.Dir())
	if n := m.tree.volumes[1].count("copyrange"); n != 1 {
		t.Errorf("%d copies shared what they copied", n)
	}
}

func partSnapshots(dir string) error {
	in := func(parts ...string) string { return filepath.Join(append([]string{dir}, parts...)...) }
	names := func(dir string) (l []string) {
		es, err := os.ReadDir(dir)
		if err != nil {
			return []string{err.Error()}
		}
		for _, e := range es {
			l = append(l, e.Name())
		}
		return l
	}
	ino := func(path string) (uint64, uint64) {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return 0, 0
		}
		return st.Ino, uint64(st.Dev)
	}
	read := func(path string) string {
		b, err := os.ReadFile(path)
		return string(b) + errText(err)
	}
	snap := in(".snapshot", "one")
	if l := names(dir); slices.Contains(l, ".snapshot") {
		return fmt.Errorf("the root lists %q", l)
	}
	es, err := os.ReadDir(in(".snapshot")) // sorted
	if err != nil || len(es) != 2 || es[0].Name() != "another" || es[1].Name() != "one" {
		return fmt.Errorf("snapshots: %v, %v", es, err)
	}
	for _, c := range [][2]string{
		{read(in("f")), "now"}, {read(filepath.Join(snap, "f")), "then"}, {read(in("junction", ".snapshot", "two", "g")), "second"},
		{read(filepath.Join(snap, "d", "b")), "twice"},
	} {
		if err := expect("content", c[0], c[1]); err != nil {
			return err
		}
	}
	for _, gone := range []string{in(".snapshot", "none"), in(".snapshot", "one", ".snapshot"), in("d", ".snapshot"), in(".snapshot", ".snapshot")} {
		if _, err := os.Lstat(gone); !errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("%s: %v", gone, err)
		}
	}

	// Identity: the same within a view, another in each.
	live, dev := ino(in("f"))
	one, dev1 := ino(filepath.Join(snap, "f"))
	two, _ := ino(in(".snapshot", "another", "f"))
	if live == one || live == two || one == two || dev != dev1 || one&(1<<lowBits-1) != live&(1<<lowBits-1) {
		return fmt.Errorf("inode numbers %#x, %#x, %#x, devices %d, %d", live, one, two, dev, dev1)
	}
	a, _ := ino(filepath.Join(snap, "d", "a"))
	if b, _ := ino(filepath.Join(snap, "d", "b")); a != b || a == 0 {
		return fmt.Errorf("two names of one file: %#x, %#x", a, b)
	}
	var st, of unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, in(".snapshot"), 0, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st); err != nil || st.Mode != syscall.S_IFDIR|0o555 || st.Nlink != 1 || st.Ino != 1<<lowBits {
		return fmt.Errorf("statx of .snapshot: %+v, %v", st, err)
	}
	if err := unix.Statx(unix.AT_FDCWD, filepath.Join(snap, "f"), 0, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &of); err != nil || of.Mask&unix.STATX_BTIME == 0 || of.Ino != one {
		return fmt.Errorf("statx in a snapshot: %+v, %v", of, err)
	}
	for name, want := range map[string]string{
		"penstock.volume": "root@one", "penstock.inode": fmt.Sprintf("1:%d", one&(1<<lowBits-1)), XattrSnapshot: "1", "user.a": "b",
	} {
		b := make([]byte, 100)
		n, err := unix.Getxattr(filepath.Join(snap, "f"), name, b)
		if err != nil || string(b[:n]) != want {
			return fmt.Errorf("DATA: attribute %s: %q, %v", name, b[:max(n, 0)], err)
		}
	}
	if _, err := unix.Getxattr(in("f"), XattrSnapshot, nil); err != syscall.ENODATA {
		return fmt.Errorf("a live file has a snapshot: %v", err)
	}
	var usage unix.Statfs_t
	if err := unix.Statfs(snap, &usage); err != nil || usage.Bfree != 0 || usage.Blocks != (1<<20)/meta.BlockSize || usage.Files != 3 {
		return fmt.Errorf("statfs: %+v, %v", usage, err)
	}

	// Nothing changes in a snapshot, nothing goes in or out.
	inside := filepath.Join(snap, "f")
	open := func(path string, flags int) error {
		f, err := os.OpenFile(path, flags, 0o644)
		if err == nil {
			f.Close()
		}
		return err
	}
	for _, c := range []struct {
		what string
		err  error
		want syscall.Errno
	}{
		{"open for writing", open(inside, os.O_RDWR), syscall.EROFS},
		{"truncating open", open(inside, os.O_RDONLY|os.O_TRUNC), syscall.EROFS},
		{"create", open(filepath.Join(snap, "new"), os.O_CREATE|os.O_WRONLY), syscall.EROFS},
		{"create beside snapshots", open(in(".snapshot", "new"), os.O_CREATE|os.O_WRONLY), syscall.EROFS},
		{"mkdir", os.Mkdir(filepath.Join(snap, "new"), 0o755), syscall.EROFS},
		{"mkdir beside snapshots", os.Mkdir(in(".snapshot", "new"), 0o755), syscall.EROFS},
		{"mkdir .snapshot", os.Mkdir(in(".snapshot"), 0o755), syscall.EEXIST},
		{"rmdir .snapshot", syscall.Rmdir(in(".snapshot")), syscall.EROFS},
		{"rmdir a snapshot", syscall.Rmdir(snap), syscall.EROFS},
		{"unlink", syscall.Unlink(inside), syscall.EROFS},
		{"chmod", os.Chmod(inside, 0o600), syscall.EROFS},
		{"chmod .snapshot", os.Chmod(in(".snapshot"), 0o700), syscall.EROFS},
		{"truncate", os.Truncate(inside, 0), syscall.EROFS},
		{"setxattr", unix.Setxattr(inside, "user.b", []byte("c"), 0), syscall.EROFS},
		{"setxattr .snapshot", unix.Setxattr(in(".snapshot"), "user.b", []byte("c"), 0), syscall.EROFS},
		{"symlink", os.Symlink("x", filepath.Join(snap, "l")), syscall.EROFS},
		{"rename", os.Rename(inside, filepath.Join(snap, "g")), syscall.EROFS},
		{"rename a snapshot", os.Rename(snap, in(".snapshot", "other")), syscall.EROFS},
		{"rename out", os.Rename(inside, in("g")), syscall.EXDEV},
		{"rename in", os.Rename(in("f"), filepath.Join(snap, "g")), syscall.EXDEV},
		{"rename over .snapshot", unix.Renameat2(unix.AT_FDCWD, in("d"), unix.AT_FDCWD, in(".snapshot"), unix.RENAME_NOREPLACE), syscall.EEXIST},
		{"link out", os.Link(inside, in("g")), syscall.EXDEV},
		{"link in", os.Link(in("f"), filepath.Join(snap, "g")), syscall.EXDEV},
		{"link beside snapshots", os.Link(in("f"), in(".snapshot", "g")), syscall.EROFS},
	} {
		if !errors.Is(c.err, c.want) {
			return fmt.Errorf("%s: %v, want %v", c.what, c.err, c.want)
		}
	}
	// A copy works, without a READ; between volumes by the kernel's own means.
	from, err := os.Open(inside)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.Create(in("copy"))
	if err != nil {
		return err
	}
	defer to.Close()
	if n, err := unix.CopyFileRange(int(from.Fd()), nil, int(to.Fd()), nil, 100, 0); n != 4 || err != nil {
		return fmt.Errorf("copy_file_range: %d, %v", n, err)
	}
	beyond, err := os.Open(in("junction", ".snapshot", "two", "g"))
	if err != nil {
		return err
	}
	defer beyond.Close()
	if n, err := unix.CopyFileRange(int(beyond.Fd()), nil, int(to.Fd()), nil, 100, 0); n != 6 || err != nil {
		return fmt.Errorf("copy_file_range between volumes: %d, %v", n, err)
	}
	if err := expect("copied", read(in("copy")), "thensecond"); err != nil {
		return err
	}
	// Locks hold, and a second look gives the same.
	if err := unix.Flock(int(from.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	if again, _ := ino(inside); again != one {
		return fmt.Errorf("inode number %#x became %#x", one, again)
	}
	return nil
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// A file with the name in the volume itself hides the snapshots until the file is renamed.
func TestOwnNameOfSnapshots(t *testing.T) {
	m := mount(t, Options{}, func(tree *memTree) {
		prepareSnapshots(tree)
		tree.volumes[1].add(meta.RootIno, ".snapshot", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: []byte("mine")})
	})
	run(t, "ownName", m.Dir())
}

func partOwnName(dir string) error {
	path := filepath.Join(dir, ".snapshot")
	if b, err := os.ReadFile(path); string(b) != "mine" || err != nil {
		return fmt.Errorf("DATA: %q, %v", b, err)
	}
	if err := os.Rename(path, filepath.Join(dir, "mine")); err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(path, "one", "f"))
	if string(b) != "then" || err != nil {
		return fmt.Errorf("DATA: after the rename: %q, %v", b, err)
	}
	return nil
}

// A snapshot mounted alone is read without opens, or with them where files are
// to be passed through; anything live refuses the former.
func TestMountSnapshotAlone(t *testing.T) {
	for _, through := range []bool{false, true} {
		tree := newMemTree()
		prepareSnapshots(tree)
		m := mountTree(t, tree, Config{Volume: viewOf(1, 1), Options: Options{Passthrough: through}})
		run(t, "noOpen", m.Dir())
		opens := m.fs.conn.requests[opOpen].Load()
		if through != (opens > 1) {
			t.Errorf("passthrough %v: %d opens", through, opens)
		}
		if !m.fs.noOpen == !through {
			t.Errorf("passthrough %v, no-open %v", through, m.fs.noOpen)
		}
	}
	tree := newMemTree()
	if _, err := newFileSystem(t.Context(), &Config{Tree: tree, Options: Options{NoOpen: true}}); !errors.Is(err, meta.Invalid) {
		t.Errorf("a live volume without opens: %v", err)
	}
}

func partNoOpen(dir string) error {
	for range 3 {
		b, err := os.ReadFile(filepath.Join(dir, "f"))
		if string(b) != "then" || err != nil {
			return fmt.Errorf("DATA: %q, %v", b, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(dir, ".snapshot")); !errors.Is(err, syscall.ENOENT) {
		return fmt.Errorf("snapshots of a snapshot: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0); !errors.Is(err, syscall.EROFS) {
		return fmt.Errorf("writing: %v", err)
	}
	// Locks of closed files are gone, though nobody tells of closing.
	for range 2 {
		f, err := os.Open(filepath.Join(dir, "d", "a"))
		if err != nil {
			return err
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			return fmt.Errorf("flock: %w", err)
		}
		f.Close()
	}
	return nil
}

// staying is a child that uses the mount until goOn.
type staying struct {
	*exec.Cmd
	out *bufio.Reader
	in  io.WriteCloser
}

func stay(t *testing.T, name, dir string) *staying {
	t.Helper()
	s := &staying{Cmd: child(t, name, dir)}
	out, err := s.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.out = bufio.NewReader(out)
	if s.in, err = s.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	if line, _ := s.out.ReadString('\n'); line != "here\n" {
		t.Fatalf("%s: %q", name, line)
	}
	return s
}

// goOn lets the child end, and fails if the child fails.
func (s *staying) goOn(t *testing.T) {
	t.Helper()
	s.in.Close()
	text, _ := io.ReadAll(s.out)
	if err := s.Wait(); err != nil {
		t.Errorf("%v: %s", err, text)
	}
}

// partStay is in a directory of a snapshot.
func partStay(dir string) error {
	if err := os.Chdir(filepath.Join(dir, ".snapshot", "one", "d")); err != nil {
		return err
	}
	os.Stdout.WriteString("here\n")
	io.ReadAll(os.Stdin)
	if _, err := os.Stat("a"); !errors.Is(err, syscall.ESTALE) {
		return fmt.Errorf("in a snapshot that is gone: %v", err)
	}
	return nil
}

// partTwice looks at a file of a snapshot before and after.
func partTwice(dir string) error {
	f := filepath.Join(dir, ".snapshot", "one", "f")
	if _, err := os.Lstat(f); err != nil {
		return err
	}
	os.Stdout.WriteString("here\n")
	io.ReadAll(os.Stdin)
	_, err := os.Lstat(f)
	return err
}

// partWatch watches a file of a snapshot, of which the kernel then keeps the inode and
// pages, without a path; and reads one of the same numbers later.
func partWatch(dir string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	old := filepath.Join(dir, ".snapshot", "another", "f")
	if b, err := os.ReadFile(old); string(b) != "then" || err != nil {
		return fmt.Errorf("DATA: %q, %v", b, err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(old, &st); err != nil {
		return err
	}
	if _, err := unix.InotifyAddWatch(fd, old, unix.IN_ATTRIB); err != nil {
		return err
	}
	os.Stdout.WriteString("here\n")
	io.ReadAll(os.Stdin)
	fresh := filepath.Join(dir, ".snapshot", "later", "f")
	var now unix.Stat_t
	if err := unix.Lstat(fresh, &now); err != nil || now.Ino != st.Ino {
		return fmt.Errorf("inode number %#x, not %#x, %v: nothing is tested", now.Ino, st.Ino, err)
	}
	if b, err := os.ReadFile(fresh); string(b) != "late" || err != nil {
		return fmt.Errorf("DATA: with the number of a file that is watched: %q, %v", b, err)
	}
	return nil
}

// A mount keeps nothing of an ended view once the kernel, on request, has forgotten the view's
// inodes; until then, the mount says so. When the number means another snapshot then, the mount
// shows nothing of the earlier snapshot.
func TestViewsThatEnd(t *testing.T) {
	m := mount(t, Options{}, prepareSnapshots)
	v := m.tree.volumes[1]
	one, another := v.snaps[0], v.snaps[1]
	stays, watches := stay(t, "stay", m.Dir()), stay(t, "watch", m.Dir())
	if !m.notifier.HoldsView(one.id) || !m.notifier.HoldsView(another.id) {
		t.Fatal("the kernel knows nothing of what was looked at: nothing is tested")
	}
	v.mu.Lock()
	v.snaps = nil
	v.mu.Unlock()
	for _, s := range []*memVolume{one, another} {
		m.tree.mu.Lock()
		delete(m.tree.volumes, s.id)
		m.tree.mu.Unlock()
		s.mu.Lock()
		s.fail["getattr"] = meta.E("mem", meta.Stale, "", nil)
		s.fail["lookup"] = s.fail["getattr"]
		s.mu.Unlock()
		s.ended.Store(true)
		m.notifier.InvalEntries(1, 0)
	}
	// forgotten waits until the kernel knows nothing of a view.
	forgotten := func(s *memVolume) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); m.notifier.HoldsView(s.id); time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("the kernel keeps %s, which nobody uses", s.name)
			}
		}
		m.fs.mu.RLock()
		defer m.fs.mu.RUnlock()
		if m.fs.volumes[s.id] != nil {
			t.Errorf("the mount keeps %s", s.name)
		}
	}
	forgotten(another)
	if !m.notifier.HoldsView(one.id) {
		t.Error("a view is forgotten that a process is in")
	}
	// The name means another snapshot now, whose names stay cached.
	anew := newMemVolume(m.tree, viewOf(1, 4))
	anew.name, anew.of = "root@one anew", 1
	anew.snap = meta.Snapshot{Name: one.snap.Name, At: 4, Created: meta.Time(time.Now().UnixNano())}
	anew.inodes = another.inodes
	v.mu.Lock()
	v.snaps = []*memVolume{anew}
	v.mu.Unlock()
	m.tree.mu.Lock()
	m.tree.volumes[anew.id] = anew
	m.tree.mu.Unlock()
	time.Sleep(1100 * time.Millisecond) // for so long a snapshot's name is believed
	twice := stay(t, "twice", m.Dir())
	lookups := anew.count("lookup")
	if lookups == 0 {
		t.Error("the name means what it meant")
	}
	m.notifier.HoldsView(one.id)
	if twice.goOn(t); anew.count("lookup") != lookups {
		t.Error("the names of another snapshot are forgotten with those of one that had its name")
	}
	stays.goOn(t)

	v.mu.Lock()
	later := newMemVolume(m.tree, another.id)
	later.name, later.of, later.turn = "root@later", 1, 1
	later.snap = meta.Snapshot{Name: "later", At: 3, Created: meta.Time(time.Now().UnixNano())}
	later.inodes = another.inodes
	_, f := later.find(meta.RootIno, "f")
	f.data = []byte("late")
	v.snaps = append(v.snaps, later)
	v.mu.Unlock()
	m.tree.mu.Lock()
	m.tree.volumes[later.id] = later
	m.tree.mu.Unlock()
	watches.goOn(t)
}

// A mount of a snapshot, or of a directory in a snapshot, keeps its number for ever.
func TestViewOfTheMount(t *testing.T) {
	tree := newMemTree()
	prepareSnapshots(tree)
	s := tree.volumes[1].snaps[0]
	_, d := s.find(meta.RootIno, "d")
	m := mountTree(t, tree, Config{Volume: s.id, Root: d.attr.Ino})
	s.ended.Store(true)
	if !m.notifier.HoldsView(s.id) {
		t.Error("the view of a mount is held by nobody")
	}
}
