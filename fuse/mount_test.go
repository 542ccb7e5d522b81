package fuse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/test/program"
)

// Another process uses the mount: a page fault or a poll that waits for its own process's answer
// could stop the process for ever. So each test has parts that run in a child, this binary again
// with partEnv set.
const partEnv = "PENSTOCK_FUSE_TEST_PART"

// parts are the bodies of the children, by name.
var parts = map[string]func(dir string) error{
	"tree": partTree, "links": partLinks, "rights": partRights, "bytes": partBytes, "mapped": partMapped,
	"list": partList, "xattrs": partXattrs, "through": partThrough, "locks": partLocks, "holes": partHoles, "tmpfile": partTmpfile,
	"hold": partHold, "syncfs": partSyncfs, "closeError": partCloseError, "append": partAppend, "stuck": partStuck, "opens": partOpens, "refused": partRefused,
	"lone": partLone, "loneHolder": partLoneHolder, "loneHeld": partLoneHeld,
}

func TestMain(m *testing.M) {
	if os.Args[0] == WatchdogName {
		if err := Watch(os.Args[1:], os.Stdin, slog.Default()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if name := os.Getenv(partEnv); name != "" {
		if err := parts[name](os.Args[1]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(program.InOwnMounts(m.Run))
}

// child prepares a part; the caller ends the part with Run, or Start and Wait.
func child(t *testing.T, name, dir string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], dir)
	cmd.Env = append(os.Environ(), partEnv+"="+name)
	cmd.WaitDelay = time.Second
	return cmd
}

func run(t *testing.T, name, dir string) {
	t.Helper()
	cmd := child(t, name, dir)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	timer := time.AfterFunc(2*time.Minute, func() { cmd.Process.Kill() })
	defer timer.Stop()
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out.String())
	}
}

type mounted struct {
	*Mount
	tree     *memTree
	notifier *Notifier
}

// mount mounts a tree in memory; the test's end removes the mount.
func mount(t *testing.T, opts Options, prepare func(*memTree)) *mounted {
	t.Helper()
	tree := newMemTree()
	if prepare != nil {
		prepare(tree)
	}
	return mountTree(t, tree, Config{Options: opts})
}

// mountTree mounts a tree by cfg.
func mountTree(t *testing.T, tree *memTree, cfg Config) *mounted {
	t.Helper()
	if os.Geteuid() != 0 {
		cfg.Options.NoBlock = true
	}
	m := &mounted{tree: tree, notifier: NewNotifier()}
	if cfg.Tree == nil {
		cfg.Tree = m.tree
	}
	cfg.Notifier, cfg.Dir = m.notifier, t.TempDir()
	cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	var err error
	if m.Mount, err = New(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := m.Unmount(ctx); err != nil {
			t.Error(err)
			m.Abort()
		}
		<-m.Done()
	})
	return m
}

func expect[T comparable](what string, got, want T) error {
	if got != want {
		return fmt.Errorf("%s is %v, want %v", what, got, want)
	}
	return nil
}

func TestTree(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "tree", m.Dir())
	v := m.tree.volumes[1]
	// Each mutation carries an id of its own.
	if got, want := v.opCount("createopen"), v.count("createopen"); got != want {
		t.Errorf("%d ids for %d creates", got, want)
	}
}

func partTree(dir string) error {
	if err := os.WriteFile(dir+"/a", []byte("hello"), 0o640); err != nil {
		return err
	}
	b, err := os.ReadFile(dir + "/a")
	if err != nil {
		return err
	}
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, dir+"/a", 0, unix.STATX_BASIC_STATS|unix.STATX_BTIME, &st); err != nil {
		return err
	}
	_, missing := os.Stat(dir + "/none")
	return errors.Join(
		expect("content", string(b), "hello"),
		expect("inode number", st.Ino, 1<<lowBits|3),
		expect("birth time told", st.Mask&unix.STATX_BTIME != 0 && st.Btime.Sec > 0, true),
		expect("absent", errors.Is(missing, os.ErrNotExist), true),
		os.Mkdir(dir+"/d", 0o755),
		expect("mkdir again", os.Mkdir(dir+"/d", 0o755).(*os.PathError).Err, error(syscall.EEXIST)),
		os.Rename(dir+"/a", dir+"/d/b"),
		expect("noreplace", unix.Renameat2(unix.AT_FDCWD, dir+"/d/b", unix.AT_FDCWD, dir+"/d/b", 8), error(syscall.EINVAL)),
		expect("rmdir", os.Remove(dir+"/d").(*os.PathError).Err, error(syscall.ENOTEMPTY)),
		os.Remove(dir+"/d/b"),
		os.Remove(dir+"/d"),
		unix.Mknod(dir+"/fifo", unix.S_IFIFO|0o600, 0),
		expect("ioctl", ioctl(dir), error(syscall.ENOTTY)),
	)
}

func ioctl(dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.IoctlGetInt(fd, 0x80086601)
	return err
}

func TestJunction(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "links", m.Dir())
}

func partLinks(dir string) error {
	if err := os.WriteFile(dir+"/junction/x", []byte("there"), 0o644); err != nil {
		return err
	}
	var st, in unix.Stat_t
	v, err := unix.Getxattr(dir+"/junction/x", "penstock.volume", make([]byte, 64))
	return errors.Join(err,
		unix.Stat(dir+"/junction/x", &st), unix.Stat(dir+"/junction", &in),
		expect("inode of a junction", in.Ino, 2<<lowBits|1),
		expect("inode behind a junction", st.Ino, 2<<lowBits|2),
		expect("volume's name", v, len("second")),
		expect("rename across", os.Rename(dir+"/junction/x", dir+"/x").(*os.LinkError).Err, error(syscall.EXDEV)),
		expect("link across", os.Link(dir+"/junction/x", dir+"/x").(*os.LinkError).Err, error(syscall.EXDEV)),
		os.Symlink("junction/x", dir+"/sym"),
		os.Link(dir+"/junction/x", dir+"/junction/y"),
		func() error {
			b, err := os.ReadFile(dir + "/sym")
			return errors.Join(err, expect("through a link", string(b), "there"))
		}(),
	)
}

func TestRights(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "rights", m.Dir())
}

func partRights(dir string) error {
	f := dir + "/s"
	if err := os.WriteFile(f, []byte("x"), 0o644); err != nil {
		return err
	}
	when := time.Unix(-5, 123456789)
	err := errors.Join(unix.Chmod(f, 0o6755), os.Chown(f, 0, 0))
	st, serr := os.Stat(f)
	err = errors.Join(err, serr, expect("mode after chown", st.Mode(), 0o755),
		os.Chtimes(f, when, when))
	st, serr = os.Stat(f)
	return errors.Join(err, serr, expect("mtime", st.ModTime().UnixNano(), when.UnixNano()))
}

func TestBytes(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "bytes", m.Dir())
}

func partBytes(dir string) error {
	f := dir + "/f"
	want := bytes.Repeat([]byte("0123456789abcdef"), 3<<16) // 3 MiB
	err := os.WriteFile(f, want, 0o644)
	got, rerr := os.ReadFile(f)
	err = errors.Join(err, rerr, expect("same bytes", bytes.Equal(got, want), true), os.Truncate(f, 10))
	got, rerr = os.ReadFile(f)
	err = errors.Join(err, rerr, expect("after truncate", string(got), string(want[:10])))
	// A cached reader sees the writes of a writer around the cache.
	r, oerr := os.Open(f)
	if oerr != nil {
		return oerr
	}
	defer r.Close()
	w, oerr := os.OpenFile(f, os.O_RDWR, 0)
	if oerr != nil {
		return oerr
	}
	defer w.Close()
	p := make([]byte, 3)
	for i := range 50 {
		s := fmt.Sprintf("%03d", i)
		if _, err := w.WriteAt([]byte(s), 0); err != nil {
			return err
		}
		if _, err := r.ReadAt(p, 0); err != nil {
			return err
		}
		err = errors.Join(err, expect("cached read after write", string(p), s))
	}
	n, cerr := unix.CopyFileRange(int(r.Fd()), nil, int(w.Fd()), ptr(int64(100)), 5, 0)
	return errors.Join(err, cerr, expect("copied", n, 5))
}

func ptr[T any](v T) *T { return &v }

func TestAppend(t *testing.T) {
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	// Another client makes the file longer behind the kernel's back.
	v.hook("write", func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		if _, n := v.find(meta.RootIno, "log"); v.calls["write"] == 2 {
			n.data = append(n.data, "other\n"...)
		}
	})
	run(t, "append", m.Dir())
}

func partAppend(dir string) error {
	w, err := os.OpenFile(dir+"/log", os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	r, err := os.Open(dir + "/log")
	if err != nil {
		return err
	}
	for _, s := range []string{"one\n", "two\n", "three\n"} {
		if _, err := io.WriteString(w, s); err != nil {
			return err
		}
		if _, err := r.Stat(); err != nil {
			return err
		}
	}
	b, err := io.ReadAll(r)
	return errors.Join(err, expect("log", string(b), "one\nother\ntwo\nthree\n"), w.Close())
}

// A recall's invalidation finds a dirty mapping; the resulting write-back waits, in the library,
// for a lease that comes only after the answer to the recall. The recall must not hang, and msync
// must wait for the bytes.
func TestInvalidateWhileMappingIsWrittenBack(t *testing.T) {
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	granted := make(chan struct{})
	cmd := child(t, "mapped", m.Dir())
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 64)
	n, _ := out.Read(line)
	if string(line[:n]) != "dirty\n" {
		rest, _ := io.ReadAll(out)
		t.Fatalf("child said %q%s", line[:n], rest)
	}
	_, inode := func() (int, *memInode) { v.mu.Lock(); defer v.mu.Unlock(); return v.find(meta.RootIno, "m") }()
	v.hook("write", func() { <-granted })
	done := make(chan struct{})
	go func() {
		m.notifier.InvalData(1, inode.attr.Ino, 0, 0)
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("the invalidation waits for a write that waits for it")
	}
	// A read of the bytes before the library has the bytes gets the bytes.
	io.WriteString(in, "read\n")
	n, _ = out.Read(line)
	if string(line[:n]) != "MAPPED\n" {
		t.Errorf("read while queued: %q", line[:n])
	}
	io.WriteString(in, "sync\n")
	time.Sleep(50 * time.Millisecond)
	if v.count("fsync") != 0 {
		t.Error("msync went ahead of the mapping's bytes")
	}
	close(granted)
	if rest, _ := io.ReadAll(out); len(rest) > 0 {
		t.Errorf("child: %s", rest)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if !bytes.HasPrefix(inode.data, []byte("MAPPED")) {
		t.Errorf("file holds %q", inode.data[:6])
	}
	if v.calls["fsync"] == 0 {
		t.Error("msync did not reach the library")
	}
}

func partMapped(dir string) error {
	f, err := os.OpenFile(dir+"/m", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	if _, err := f.Write(make([]byte, 8192)); err != nil {
		return err
	}
	m, err := unix.Mmap(int(f.Fd()), 0, 8192, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	copy(m, "MAPPED")
	os.Stdout.WriteString("dirty\n")
	line := make([]byte, 64)
	os.Stdin.Read(line)
	os.Stdout.WriteString(string(m[:6]) + "\n")
	os.Stdin.Read(line)
	return unix.Msync(m, unix.MS_SYNC)
}

// An answer that a recall has overtaken must not be believed.
func TestAnswerOvertakenByRecall(t *testing.T) {
	m := mount(t, Options{}, func(tree *memTree) {
		tree.volumes[1].add(meta.RootIno, "late", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
	})
	v := m.tree.volumes[1]
	v.hook("lookup answered", func() {
		v.mu.Lock()
		_, n := v.find(meta.RootIno, "late")
		n.data = []byte("longer")
		delete(v.hooks, "lookup answered")
		v.mu.Unlock()
		m.notifier.InvalAttr(1, n.attr.Ino)
	})
	for range 2 {
		out, err := exec.CommandContext(t.Context(), "stat", "-c", "%s", m.Dir()+"/late").CombinedOutput()
		if err != nil {
			t.Fatalf("%v %s", err, out)
		}
		if strings.TrimSpace(string(out)) == "6" {
			return
		}
	}
	t.Error("the second stat believes an answer from before the recall")
}

func TestNamesAreDroppedWhileACreateWaits(t *testing.T) {
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	stat := func(name string) error { return exec.CommandContext(t.Context(), "stat", m.Dir()+"/"+name).Run() }
	if stat("new") == nil {
		t.Fatal("new exists")
	}
	before := v.count("lookup")
	if stat("new") == nil || v.count("lookup") != before {
		t.Fatal("an absent name is not remembered")
	}
	release := make(chan struct{})
	v.hook("createopen", func() { <-release })
	cmd := exec.CommandContext(t.Context(), "touch", m.Dir()+"/slow")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for v.count("createopen") == 0 {
		time.Sleep(time.Millisecond)
	}
	v.mu.Lock()
	v.add(meta.RootIno, "new", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
	v.mu.Unlock()
	done := make(chan struct{})
	go func() { m.notifier.InvalEntries(1, meta.RootIno); close(done) }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("InvalEntries waits for a create")
	}
	close(release)
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if err := stat("new"); err != nil && !m.fs.noEpoch {
		t.Error("a name that came to be is still absent")
	}
}

func TestList(t *testing.T) {
	const files = 20_000
	m := mount(t, Options{}, func(tree *memTree) {
		v := tree.volumes[1]
		ino := v.add(meta.RootIno, "many", &memInode{attr: meta.Attr{Mode: meta.TypeDir | 0o755, Nlink: 2}})
		for i := range files {
			v.add(ino, fmt.Sprintf("file %05d", i), &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
		}
	})
	run(t, "list", m.Dir())
}

func partList(dir string) error {
	d, err := os.Open(dir + "/many")
	if err != nil {
		return err
	}
	seen := 0
	for {
		names, err := d.Readdirnames(500)
		for i, name := range names {
			if want := fmt.Sprintf("file %05d", seen+i); name != want {
				return fmt.Errorf("entry %d is %q, want %q", seen+i, name, want)
			}
		}
		seen += len(names)
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	list, err := os.ReadDir(dir)
	var names []string
	for _, e := range list {
		names = append(names, e.Name())
	}
	return errors.Join(err, expect("entries", seen, 20_000), expect("root", strings.Join(names, " "), "junction many"))
}

func TestXattrs(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "xattrs", m.Dir())
}

func partXattrs(dir string) error {
	f := dir + "/x"
	if err := os.WriteFile(f, nil, 0o644); err != nil {
		return err
	}
	buf := make([]byte, 100)
	err := errors.Join(unix.Setxattr(f, "user.a", []byte("one"), 0), unix.Setxattr(f, "trusted.b", nil, 0))
	n, gerr := unix.Getxattr(f, "user.a", buf)
	err = errors.Join(err, gerr, expect("value", string(buf[:n]), "one"))
	n, gerr = unix.Getxattr(f, "user.a", nil)
	err = errors.Join(err, gerr, expect("length", n, 3))
	_, gerr = unix.Getxattr(f, "user.a", buf[:1])
	err = errors.Join(err, expect("short buffer", gerr, error(syscall.ERANGE)))
	_, gerr = unix.Getxattr(f, "user.none", buf)
	err = errors.Join(err, expect("absent", gerr, error(syscall.ENODATA)))
	n, gerr = unix.Listxattr(f, buf)
	return errors.Join(err, gerr, expect("list", string(buf[:n]), "trusted.b\x00user.a\x00"),
		unix.Removexattr(f, "user.a"),
		expect("remove again", unix.Removexattr(f, "user.a"), error(syscall.ENODATA)),
		expect("of ours", unix.Setxattr(f, "penstock.volume", nil, 0), error(syscall.EPERM)),
	)
}

// The kernel reads a sealed file from the backing file.
func TestPassthrough(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("passthrough needs root")
	}
	path := filepath.Join(t.TempDir(), "backing")
	if err := os.WriteFile(path, []byte("from the backing file"), 0o600); err != nil {
		t.Fatal(err)
	}
	m := mount(t, Options{}, func(tree *memTree) {
		tree.volumes[1].add(meta.RootIno, "sealed", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: []byte("from the backing file"), backing: path})
	})
	run(t, "through", m.Dir())
	if n := m.tree.volumes[1].count("read"); n != 0 {
		t.Errorf("%d reads reached the daemon", n)
	}
}

func partThrough(dir string) error {
	var err error
	var files []*os.File
	for range 3 {
		f, oerr := os.Open(dir + "/sealed")
		if oerr != nil {
			return oerr
		}
		files = append(files, f)
		b, rerr := io.ReadAll(f)
		err = errors.Join(err, rerr, expect("content", string(b), "from the backing file"))
	}
	for _, f := range files {
		f.Close()
	}
	b, rerr := os.ReadFile(dir + "/sealed")
	return errors.Join(err, rerr, expect("opened anew", string(b), "from the backing file"))
}

func TestLocks(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "locks", m.Dir())
	v := m.tree.volumes[1]
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // RELEASE comes after close
		v.mu.Lock()
		left := slices.Clone(v.locks)
		v.mu.Unlock()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("locks outlive their owner: %v", left)
		}
	}
}

func partLocks(dir string) error {
	f, err := os.OpenFile(dir+"/l", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	g, err := os.Open(dir + "/l")
	if err != nil {
		return err
	}
	err = errors.Join(
		unix.Flock(int(f.Fd()), unix.LOCK_EX),
		expect("second flock", unix.Flock(int(g.Fd()), unix.LOCK_EX|unix.LOCK_NB), error(syscall.EAGAIN)),
	)
	// A signal ends the waiting.
	cmd := exec.Command("timeout", "-s", "INT", "0.2", "flock", dir+"/l", "true")
	werr := cmd.Run()
	err = errors.Join(err, expect("waiting for a lock was interrupted", werr != nil, true))
	// Open for reading without FLUSH, then lock through the descriptor.
	return errors.Join(err, unix.FcntlFlock(g.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_RDLCK}),
		unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 100, Len: 10}))
}

func TestHoles(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "holes", m.Dir())
}

func partHoles(dir string) error {
	f, err := os.OpenFile(dir+"/h", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, 10000)
	st, serr := f.Stat()
	if serr != nil {
		return serr
	}
	hole, herr := unix.Seek(int(f.Fd()), 0, unix.SEEK_HOLE)
	_, derr := unix.Seek(int(f.Fd()), 10000, unix.SEEK_DATA)
	var fs unix.Statfs_t
	return errors.Join(err, herr, expect("size", st.Size(), 10000), expect("hole", hole, 10000),
		expect("data past the end", derr, error(syscall.ENXIO)),
		unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 100),
		unix.Statfs(dir, &fs), expect("blocks are the quota", fs.Blocks*uint64(fs.Bsize), 1<<30))
}

func TestTmpfile(t *testing.T) {
	m := mount(t, Options{}, nil)
	run(t, "tmpfile", m.Dir())
}

func partTmpfile(dir string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if _, err := unix.Write(fd, []byte("unnamed")); err != nil {
		return err
	}
	err = unix.Linkat(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), unix.AT_FDCWD, dir+"/named", unix.AT_SYMLINK_FOLLOW)
	b, rerr := os.ReadFile(dir + "/named")
	return errors.Join(err, rerr, expect("content", string(b), "unnamed"))
}

// syncfs(2) and umount(2) reach the library on a block mount.
func TestSyncfsAndUnmountReachTheLibrary(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("a block mount needs root")
	}
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	run(t, "syncfs", m.Dir())
	if v.count("syncall") == 0 {
		t.Error("syncfs did not reach the library")
	}
	info, err := kernel.MountAt(m.Dir())
	if err != nil || info == nil || info.Source != "root:" || info.FSType != "fuseblk.penstock" {
		t.Errorf("mountinfo: %+v %v", info, err)
	}
	before := v.count("syncall")
	if out, err := exec.Command("umount", m.Dir()).CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	if v.count("syncall") == before {
		t.Error("umount(8) came back before the library was synced")
	}
	<-m.Done()
}

func partSyncfs(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return unix.Syncfs(int(f.Fd()))
}

// O_DSYNC around the page cache is the daemon's to do.
func TestSynchronousWrites(t *testing.T) {
	m := mount(t, Options{}, nil)
	out, err := exec.CommandContext(t.Context(), "dd", "if=/dev/zero", "of="+m.Dir()+"/d", "bs=4k", "count=5", "oflag=dsync").CombinedOutput()
	if err != nil {
		t.Fatalf("%v %s", err, out)
	}
	if n := m.tree.volumes[1].count("fsync"); n != 5 {
		t.Errorf("%d syncs of 5 synchronous writes", n)
	}
}

func TestCloseTellsAnError(t *testing.T) {
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	v.mu.Lock()
	v.fail["flush"] = meta.E("write", meta.QuotaExceeded, "", nil)
	v.mu.Unlock()
	run(t, "closeError", m.Dir())
}

func partCloseError(dir string) error {
	f, err := os.Create(dir + "/q")
	if err != nil {
		return err
	}
	return expect("close", errors.Is(f.Close(), syscall.EDQUOT), true)
}

// The kernel tells whether the kernel knows an inode, and when the kernel forgets the inode.
func TestHoldsAndForget(t *testing.T) {
	m := mount(t, Options{}, func(tree *memTree) {
		tree.volumes[1].add(meta.RootIno, "f", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
	})
	v := m.tree.volumes[1]
	_, n := v.find(meta.RootIno, "f")
	if m.notifier.Holds(1, n.attr.Ino) {
		t.Error("held before anybody looked")
	}
	if err := exec.CommandContext(t.Context(), "stat", m.Dir()+"/f").Run(); err != nil {
		t.Fatal(err)
	}
	if !m.notifier.Holds(1, n.attr.Ino) {
		t.Error("not held though it was looked up")
	}
	if err := exec.CommandContext(t.Context(), "rm", m.Dir()+"/f").Run(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); v.count("forget") == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not forgotten though it was removed")
		}
	}
	if m.notifier.Holds(1, n.attr.Ino) {
		t.Error("held though it was forgotten")
	}
}

// A busy mount is not unmounted, and the error names the users.
func TestBusy(t *testing.T) {
	m := mount(t, Options{}, nil)
	cmd := child(t, "hold", m.Dir())
	out, _ := cmd.StdoutPipe()
	in, _ := cmd.StdinPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	out.Read(make([]byte, 8))
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err := m.Unmount(ctx)
	if !errors.Is(err, meta.Busy) || !strings.Contains(err.Error(), fmt.Sprint(cmd.Process.Pid)) {
		t.Errorf("unmount of a busy mount: %v", err)
	}
	in.Close()
	cmd.Wait()
}

// In the end a mount in use is ended by force, and nothing of the mount stays.
func TestStopEndsABusyMount(t *testing.T) {
	m := mount(t, Options{}, nil)
	cmd := child(t, "hold", m.Dir())
	out, _ := cmd.StdoutPipe()
	in, _ := cmd.StdinPipe()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer in.Close()
	out.Read(make([]byte, 8))
	began := time.Now()
	if err := m.Stop(t.Context(), 300*time.Millisecond, nil); !errors.Is(err, meta.Busy) {
		t.Errorf("stop of a busy mount: %v", err)
	}
	if time.Since(began) > 30*time.Second {
		t.Errorf("it took %v", time.Since(began))
	}
	if info, err := kernel.MountAt(m.Dir()); info != nil || err != nil {
		t.Errorf("still mounted: %+v %v", info, err)
	}
	select {
	case <-m.Done():
	default:
		t.Error("the mount has not ended")
	}
}

func partHold(dir string) error {
	if err := os.Chdir(dir); err != nil {
		return err
	}
	os.Stdout.WriteString("here\n")
	io.ReadAll(os.Stdin)
	return nil
}

// A caller that is killed while its request hangs goes away.
func TestKilledCallerGoesAway(t *testing.T) {
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	v.mu.Lock()
	ino := v.add(meta.RootIno, "held", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
	v.locks = append(v.locks, meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: lockEnd, Flock: true})
	v.mu.Unlock()
	cmd := exec.Command("flock", m.Dir()+"/held", "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for v.count("setlock") == 0 {
		time.Sleep(time.Millisecond)
	}
	cmd.Process.Kill()
	done := make(chan struct{})
	go func() { cmd.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("a killed process still waits")
	}
	v.mu.Lock()
	v.unlock(func(meta.Lock) bool { return true })
	v.mu.Unlock()
}

// A killed caller whose request is no lock goes away, too; other signals don't end the request.
func TestOnlyKillingEndsACreate(t *testing.T) {
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	ended := make(chan struct{})
	v.mu.Lock()
	v.hang = func(ctx context.Context) { <-ctx.Done(); close(ended) }
	v.mu.Unlock()
	cmd := exec.Command("sh", "-c", "trap : USR1; : > "+m.Dir()+"/f")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for v.count("createopen") == 0 {
		time.Sleep(time.Millisecond)
	}
	cmd.Process.Signal(syscall.SIGUSR1)
	select {
	case <-ended:
		t.Error("a signal with a handler ended the create")
	case <-time.After(3 * watchEvery):
	}
	cmd.Process.Kill()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("the create of a killed process goes on")
	}
	cmd.Wait()
}

// On a mount of an immutable volume nothing is opened.
func TestNoOpen(t *testing.T) {
	m := mount(t, Options{}, func(tree *memTree) {
		tree.volumes[1].policy.Immutable = true
		tree.volumes[1].add(meta.RootIno, "f", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: []byte("fixed")})
	})
	for range 2 {
		out, err := exec.CommandContext(t.Context(), "cat", m.Dir()+"/f").CombinedOutput()
		if err != nil || string(out) != "fixed" {
			t.Fatalf("%q %v", out, err)
		}
	}
	// No open is sent from here on; reads of .penstock still give the whole present text.
	said := map[string]bool{}
	for range 3 {
		out, err := exec.CommandContext(t.Context(), "cat", m.Dir()+"/.penstock/mount").CombinedOutput()
		if err != nil || !bytes.HasSuffix(out, []byte("no-open true\n")) {
			t.Errorf(".penstock/mount: %q %v", out, err)
		}
		if out, err = exec.CommandContext(t.Context(), "cat", m.Dir()+"/.penstock/requests").CombinedOutput(); err != nil {
			t.Error(err)
		}
		said[string(out)] = true
	}
	if len(said) != 3 {
		t.Errorf(".penstock/requests said the same again: %v", said)
	}
	var st unix.Stat_t
	if err := unix.Stat(m.Dir()+"/.penstock/volumes", &st); err != nil || st.Size == 0 {
		t.Errorf(".penstock/volumes has %d bytes: %v", st.Size, err)
	}
	m.fs.texts.mu.Lock()
	n := len(m.fs.texts.texts)
	m.fs.texts.mu.Unlock()
	if n > 2*len(textFiles) {
		t.Errorf("%d texts are kept of what the kernel forgot", n)
	}
	v := m.tree.volumes[1]
	if v.count("open") != 0 || v.count("read") != 1 {
		t.Errorf("%d opens and %d reads for two readers", v.count("open"), v.count("read"))
	}
	out, err := exec.CommandContext(t.Context(), "touch", m.Dir()+"/g").CombinedOutput()
	if err == nil || !bytes.Contains(out, []byte("Read-only")) {
		t.Errorf("a write to an immutable volume: %s", out)
	}
	out, err = exec.CommandContext(t.Context(), "ls", m.Dir()+"/junction/").CombinedOutput()
	if err == nil {
		t.Errorf("a junction into a live volume was followed: %s", out)
	}
}

func TestParallelCalls(t *testing.T) {
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	release := make(chan struct{})
	v.hook("createopen", func() { <-release })
	const calls = 12
	var wg sync.WaitGroup
	for i := range calls {
		wg.Go(func() {
			dir := fmt.Sprintf("%s/d%d", m.Dir(), i) // a directory each: the kernel locks directories
			if out, err := exec.Command("sh", "-c", "mkdir "+dir+" && touch "+dir+"/f").CombinedOutput(); err != nil {
				t.Errorf("%v %s", err, out)
			}
		})
	}
	deadline := time.Now().Add(time.Minute)
	for v.count("createopen") < calls && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if n := v.count("createopen"); n < calls {
		t.Errorf("%d of %d requests that wait were begun", n, calls)
	}
	close(release)
	wg.Wait()
}

func TestMountPoint(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		dir      string
		nonEmpty bool
		want     meta.Kind
	}{
		{filepath.Join(dir, "none"), false, meta.NotFound},
		{file, false, meta.NotDir},
		{dir, false, meta.NotEmpty},
		{dir, true, meta.KindOK},
		{"/proc", true, meta.Busy},
	} {
		if _, err := mountPoint(c.dir, c.nonEmpty, log); meta.KindOf(err) != c.want {
			t.Errorf("%s: %v, want %v", c.dir, err, c.want)
		}
	}
}

// A dead mount of ours is cleared by the next mount.
func TestDeadMountIsCleared(t *testing.T) {
	m := mount(t, Options{NoBlock: true}, nil)
	// Abort without detaching: the state after SIGKILL.
	if err := unix.Unmount(m.Dir(), unix.MNT_FORCE); err != nil && !errors.Is(err, syscall.EBUSY) {
		// The first call may end the connection and detach at once.
		t.Fatal(err)
	}
	<-m.Done()
	n, err := New(t.Context(), Config{Tree: newMemTree(), Notifier: NewNotifier(), Dir: m.Dir(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Unmount(t.Context()); err != nil {
		t.Error(err)
	}
}

// A kernel that refuses a malformed answer without a look at the request leaves its caller
// waiting: the server answers EIO.
func TestRefusedAnswer(t *testing.T) {
	const strange = meta.Kind(250)
	errnos[strange] = 600 // beyond the kernel's range
	t.Cleanup(func() { delete(errnos, strange) })
	m := mount(t, Options{}, nil)
	v := m.tree.volumes[1]
	v.mu.Lock()
	v.fail["flush"] = meta.E("flush", strange, "", nil)
	v.mu.Unlock()
	cmd := child(t, "refused", m.Dir())
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("%v: %s", err, out.String())
		}
	case <-time.After(time.Minute):
		t.Errorf("who asked has no answer; unmounted by force: %v", m.Abort())
		<-ended
	}
	v.mu.Lock()
	delete(v.fail, "flush")
	v.mu.Unlock()
}

func partRefused(dir string) error {
	f, err := os.Create(dir + "/q")
	if err != nil {
		return err
	}
	return expect("close", errors.Is(f.Close(), syscall.EIO), true)
}
