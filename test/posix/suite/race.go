package suite

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// raceCases let several threads call the same operation at the same time. If only one
// call can succeed, exactly one must.
func raceCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"race/" + name, run}) }

	// Each round, all threads run do(path, i); exactly `winners` of them must
	// succeed and the rest must fail with the errno.
	const threads, rounds = 8, 25
	contest := func(t *T, winners int, lose error, before func(round int), do func(round, i int) error) {
		for round := range rounds {
			before(round)
			var won atomic.Int32
			errs := make(chan error, threads)
			var wg sync.WaitGroup
			start := make(chan struct{})
			for i := range threads {
				wg.Go(func() {
					<-start
					switch err := do(round, i); {
					case err == nil:
						won.Add(1)
					case !errors.Is(err, lose):
						errs <- err
					}
				})
			}
			close(start)
			wg.Wait()
			select {
			case err := <-errs:
				t.Fatalf("round %d: a loser got %s, expected %s", round, errText(err), errText(lose))
			default:
			}
			Equal(t, fmt.Sprintf("winners in round %d", round), int(won.Load()), winners)
		}
	}
	path := func(t *T, round int, rest ...any) string { return fmt.Sprint(t.Dir, "/r", round, fmt.Sprint(rest...)) }
	nothing := func(int) {}

	add("mkdir/one-winner", func(t *T) {
		contest(t, 1, unix.EEXIST, nothing, func(r, _ int) error { return unix.Mkdir(path(t, r), 0o755) })
	})
	add("create-exclusively/one-winner", func(t *T) {
		contest(t, 1, unix.EEXIST, nothing, func(r, _ int) error {
			fd, err := unix.Open(path(t, r), unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
			if err == nil {
				unix.Close(fd)
			}
			return err
		})
	})
	add("symlink/one-winner", func(t *T) {
		contest(t, 1, unix.EEXIST, nothing, func(r, i int) error { return unix.Symlink(fmt.Sprint(i), path(t, r)) })
	})
	add("mkfifo/one-winner", func(t *T) {
		contest(t, 1, unix.EEXIST, nothing, func(r, _ int) error { return unix.Mkfifo(path(t, r), 0o644) })
	})
	add("link/one-winner", func(t *T) {
		t.File("src", "")
		contest(t, 1, unix.EEXIST, nothing, func(r, _ int) error { return unix.Link(t.Dir+"/src", path(t, r)) })
		t.Nlink("src", rounds+1)
	})
	add("unlink/one-winner", func(t *T) {
		contest(t, 1, unix.ENOENT, func(r int) { t.File(path(t, r), "") }, func(r, _ int) error { return unix.Unlink(path(t, r)) })
	})
	add("rmdir/one-winner", func(t *T) {
		contest(t, 1, unix.ENOENT, func(r int) { t.Mkdir(path(t, r)) }, func(r, _ int) error { return unix.Rmdir(path(t, r)) })
	})
	add("rename-away/one-winner", func(t *T) {
		contest(t, 1, unix.ENOENT, func(r int) { t.File(path(t, r), "") }, func(r, i int) error { return unix.Rename(path(t, r), path(t, r, "-", i)) })
	})
	add("rename-noreplace/one-winner", func(t *T) {
		contest(t, 1, unix.EEXIST, func(r int) {
			for i := range threads {
				t.File(path(t, r, "-", i), "")
			}
		}, func(r, i int) error {
			return unix.Renameat2(here, path(t, r, "-", i), here, path(t, r), unix.RENAME_NOREPLACE)
		})
	})
	add("rename-over/all-win-one-is-left", func(t *T) {
		contest(t, threads, nil, func(r int) {
			for i := range threads {
				t.File(path(t, r, "-", i), fmt.Sprint(i))
			}
		}, func(r, i int) error { return unix.Rename(path(t, r, "-", i), path(t, r)) })
		Equal(t, "entries", len(names(t, ".")), rounds)
	})
	add("removexattr/one-winner", func(t *T) {
		t.File("f", "")
		contest(t, 1, unix.ENODATA, func(int) { t.OK("setxattr", unix.Setxattr("f", "user.x", []byte("v"), 0)) },
			func(int, int) error { return unix.Removexattr(t.Dir+"/f", "user.x") })
	})
	add("setxattr-create/one-winner", func(t *T) {
		t.File("f", "")
		contest(t, 1, unix.EEXIST, nothing, func(r, _ int) error {
			return unix.Setxattr(t.Dir+"/f", fmt.Sprint("user.", r), []byte("v"), unix.XATTR_CREATE)
		})
	})
	add("rmdir-against-create/never-both", func(t *T) {
		for round := range rounds * 4 {
			d := path(t, round)
			t.Mkdir(d)
			var removed, created error
			var wg sync.WaitGroup
			wg.Go(func() { removed = unix.Rmdir(d) })
			wg.Go(func() { created = unix.Mkdir(d+"/x", 0o755) })
			wg.Wait()
			if removed == nil {
				t.Want("mkdir in the removed directory", created, unix.ENOENT)
				t.Missing(d)
			} else {
				t.Want("rmdir", removed, unix.ENOTEMPTY)
				t.OK("mkdir", created)
				t.Exists(d+"/x", dir)
			}
		}
	})
	add("rename-against-unlink/file-is-in-one-place-or-gone", func(t *T) {
		for round := range rounds * 4 {
			f, g := path(t, round), path(t, round, "-moved")
			t.File(f, "")
			var moved, removed error
			var wg sync.WaitGroup
			wg.Go(func() { moved = unix.Rename(f, g) })
			wg.Go(func() { removed = unix.Unlink(f) })
			wg.Wait()
			if (moved == nil) == (removed == nil) {
				t.Fatalf("rename: %s, unlink: %s; exactly one of them can find the file", errText(moved), errText(removed))
			}
			t.Missing(f)
		}
	})
	add("crossing-directory-renames/no-loop-no-deadlock", func(t *T) {
		for round := range rounds * 2 {
			a, b := path(t, round, "a"), path(t, round, "b")
			t.Mkdir(a)
			t.Mkdir(b)
			var first, second error
			var wg sync.WaitGroup
			wg.Go(func() { first = unix.Rename(a, b+"/a") })
			wg.Go(func() { second = unix.Rename(b, a+"/b") })
			wg.Wait()
			if first == nil && second == nil {
				t.Fatalf("both crossing renames succeeded: the directories are in each other")
			}
			if first != nil && second != nil {
				t.Fatalf("both crossing renames failed: %s, %s", errText(first), errText(second))
			}
		}
	})
	add("exchange/both-names-always-there", func(t *T) {
		t.File("a", "1")
		t.File("b", "2")
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					unix.Renameat2(here, t.Dir+"/a", here, t.Dir+"/b", unix.RENAME_EXCHANGE)
				}
			}
		})
		missing := 0
		for range 2000 {
			var st unix.Stat_t
			if unix.Lstat("a", &st) != nil || unix.Lstat("b", &st) != nil {
				missing++
			}
		}
		close(stop)
		wg.Wait()
		Equal(t, "lookups that missed a name", missing, 0)
	})
	add("replace-by-rename/readers-see-old-or-new-whole", func(t *T) {
		t.File("f", strings.Repeat("0", 5000))
		stop := make(chan struct{})
		var writerErr error
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				if err := os.WriteFile(t.Dir+"/new", []byte(strings.Repeat(fmt.Sprint(i%10), 5000)), 0o644); err != nil {
					writerErr = err
					return
				}
				if err := unix.Rename(t.Dir+"/new", t.Dir+"/f"); err != nil {
					writerErr = err
					return
				}
			}
		})
		var bad string
		for range 300 {
			b, err := os.ReadFile("f")
			if err != nil {
				bad = err.Error()
				break
			}
			if len(b) != 5000 || strings.Trim(string(b), string(b[:1])) != "" {
				bad = fmt.Sprintf("%d bytes, from %.5q to %.5q", len(b), b, b[max(0, len(b)-5):])
				break
			}
		}
		close(stop)
		wg.Wait()
		Equal(t, "what a reader saw", bad, "")
		t.OK("the writer", writerErr)
	})
	add("append/eight-threads-lose-nothing", func(t *T) {
		t.File("log", "")
		var wg sync.WaitGroup
		errs := make(chan error, threads)
		for i := range threads {
			wg.Go(func() {
				fd, err := unix.Open(t.Dir+"/log", unix.O_WRONLY|unix.O_APPEND|unix.O_CLOEXEC, 0)
				if err != nil {
					errs <- err
					return
				}
				defer unix.Close(fd)
				for j := range 100 {
					if _, err := unix.Write(fd, []byte(fmt.Sprintf("%d-%03d\n", i, j))); err != nil {
						errs <- err
						return
					}
				}
			})
		}
		wg.Wait()
		select {
		case err := <-errs:
			t.Fatalf("append: %s", errText(err))
		default:
		}
		seen := map[string]int{}
		for _, l := range strings.Split(t.Read("log"), "\n") {
			seen[l]++
		}
		for i := range threads {
			for j := range 100 {
				Equal(t, "occurrences of a line", seen[fmt.Sprintf("%d-%03d", i, j)], 1)
			}
		}
		Equal(t, "size", t.Lstat("log").Size, threads*100*6)
	})
	add("write-of-one-block/readers-never-see-two-versions-mixed-by-offset", func(t *T) {
		// Writers fill separate blocks of one file; the bytes of a writer must not get
		// into another block.
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.OK("ftruncate", unix.Ftruncate(fd, threads*4096))
		var wg sync.WaitGroup
		errs := make(chan error, threads)
		for i := range threads {
			wg.Go(func() {
				for v := range 50 {
					if _, err := unix.Pwrite(fd, []byte(strings.Repeat(string(rune('a'+(i+v)%26)), 4096)), int64(i)*4096); err != nil {
						errs <- err
						return
					}
				}
			})
		}
		wg.Wait()
		select {
		case err := <-errs:
			t.Fatalf("pwrite: %s", errText(err))
		default:
		}
		for i := range threads {
			sameBytes(t, fmt.Sprint("block ", i), []byte(t.Pread(fd, 4096, int64(i)*4096)), []byte(strings.Repeat(string(rune('a'+(i+49)%26)), 4096)))
		}
	})
	add("create-and-remove/directory-is-empty-afterwards", func(t *T) {
		t.Mkdir("d")
		var wg sync.WaitGroup
		errs := make(chan error, threads)
		for i := range threads {
			wg.Go(func() {
				for j := range 50 {
					p := fmt.Sprintf("%s/d/%d-%d", t.Dir, i, j)
					if err := create([]Type{regular, dir, fifo, symlink}[j%4], p, 0o755); err != nil {
						errs <- err
						return
					}
					if err := remove([]Type{regular, dir, fifo, symlink}[j%4], p); err != nil {
						errs <- err
						return
					}
				}
			})
		}
		wg.Wait()
		select {
		case err := <-errs:
			t.Fatalf("%s", errText(err))
		default:
		}
		Equal(t, "entries", len(names(t, "d")), 0)
		t.Nlink("d", 2)
	})
	add("mkdir-deep-tree-by-all/everybody-finds-it", func(t *T) {
		var wg sync.WaitGroup
		errs := make(chan error, threads)
		for range threads {
			wg.Go(func() {
				if err := os.MkdirAll(t.Dir+"/a/b/c/d/e/f/g/h", 0o755); err != nil {
					errs <- err
				}
			})
		}
		wg.Wait()
		select {
		case err := <-errs:
			t.Fatalf("%s", errText(err))
		default:
		}
		t.Exists("a/b/c/d/e/f/g/h", dir)
	})
	return cs
}

// descriptorCases are cases of the open files and working directories in /proc.
func descriptorCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"descriptor/" + name, run}) }
	link := func(t *T, fd int) string {
		s, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
		t.OK("readlink of /proc/self/fd", err)
		return s
	}
	for _, typ := range allTypes {
		add("ok/proc-link-names-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			Equal(t, "link", link(t, t.Open("f", unix.O_PATH|unix.O_NOFOLLOW, 0)), t.Dir+"/f")
		})
		add("ok/proc-link-of-removed-"+string(typ)+"-says-deleted", func(t *T) {
			t.Make(typ, "f", 0o644)
			fd := t.Open("f", unix.O_PATH|unix.O_NOFOLLOW, 0)
			t.OK("removing", remove(typ, "f"))
			Equal(t, "link", link(t, fd), t.Dir+"/f (deleted)")
		})
		add("ok/proc-link-follows-rename-of-"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o644)
			t.Mkdir("d")
			fd := t.Open("f", unix.O_PATH|unix.O_NOFOLLOW, 0)
			t.OK("rename", unix.Rename("f", "d/g"))
			Equal(t, "link", link(t, fd), t.Dir+"/d/g")
		})
	}
	add("ok/getcwd-in-deep-directory", func(t *T) {
		want := t.Dir
		for range 30 {
			t.Mkdir("directory")
			t.OK("chdir", unix.Chdir("directory"))
			want += "/directory"
		}
		b := make([]byte, 4096)
		n, err := unix.Getcwd(b)
		t.OK("getcwd", err)
		Equal(t, "working directory", string(b[:n-1]), want)
	})
	add("ok/getcwd-after-parent-was-renamed", func(t *T) {
		t.Mkdir("a")
		t.Mkdir("a/b")
		t.OK("chdir", unix.Chdir("a/b"))
		t.OK("rename", unix.Rename(t.Dir+"/a", t.Dir+"/z"))
		b := make([]byte, 4096)
		n, err := unix.Getcwd(b)
		t.OK("getcwd", err)
		Equal(t, "working directory", string(b[:n-1]), t.Dir+"/z/b")
	})
	add("ok/fchdir", func(t *T) {
		t.Mkdir("d")
		t.File("d/f", "")
		t.OK("fchdir", unix.Fchdir(t.Open("d", unix.O_RDONLY, 0)))
		t.Exists("f", regular)
	})
	add("ENOTDIR/fchdir-to-file", func(t *T) {
		t.File("f", "")
		t.Want("fchdir", unix.Fchdir(t.Open("f", unix.O_RDONLY, 0)), unix.ENOTDIR)
	})
	add("EACCES/fchdir-without-search-permission", func(t *T) {
		t.OK("mkdir", unix.Mkdir("d", 0o744))
		t.As(alice, func() { t.Want("fchdir", unix.Fchdir(t.Open("d", unix.O_RDONLY, 0)), unix.EACCES) })
	})
	add("ok/path-deeper-than-4096-by-steps", func(t *T) {
		name := strings.Repeat("d", 200)
		for range 30 {
			t.Mkdir(name)
			t.OK("chdir", unix.Chdir(name))
		}
		t.File("f", "deep")
		t.Content("f", "deep")
		_, err := unix.Getcwd(make([]byte, 8192))
		t.WantOneOf("getcwd", err, nil, unix.ENAMETOOLONG, unix.ERANGE)
		for range 30 {
			unix.Unlink("f")
			t.OK("chdir ..", unix.Chdir(".."))
			t.OK("rmdir", unix.Rmdir(name))
		}
	})
	add("ok/dotdot-from-every-level", func(t *T) {
		inos := []uint64{t.Lstat(".").Ino}
		for range 20 {
			t.Mkdir("d")
			t.OK("chdir", unix.Chdir("d"))
			inos = append(inos, t.Lstat(".").Ino)
		}
		for i := len(inos) - 2; i >= 0; i-- {
			t.OK("chdir ..", unix.Chdir(".."))
			Equal(t, fmt.Sprint("inode number at level ", i), t.Lstat(".").Ino, inos[i])
		}
	})
	add("ok/thousand-open-descriptors", func(t *T) {
		t.File("f", "content")
		for range 1000 {
			t.Open("f", unix.O_RDONLY, 0)
		}
		t.OK("unlink", unix.Unlink("f"))
	})
	add("ok/hundred-open-unlinked-files-keep-their-own-content", func(t *T) {
		var fds []int
		for i := range 100 {
			fd := t.Open("f", unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, 0o644)
			t.Write(fd, fmt.Sprint("content ", i))
			t.OK("unlink", unix.Unlink("f"))
			fds = append(fds, fd)
		}
		for i, fd := range fds {
			Equal(t, "content", t.Pread(fd, 100, 0), fmt.Sprint("content ", i))
		}
	})
	add("ok/passed-over-a-socket", func(t *T) {
		t.File("f", "content")
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		t.OK("socketpair", err)
		defer unix.Close(pair[0])
		defer unix.Close(pair[1])
		fd, err := unix.Open("f", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		t.OK("open", err)
		t.OK("sendmsg", unix.Sendmsg(pair[0], []byte("x"), unix.UnixRights(fd), nil, 0))
		unix.Close(fd)
		oob := make([]byte, 100)
		_, n, _, _, err := unix.Recvmsg(pair[1], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
		t.OK("recvmsg", err)
		msgs, err := unix.ParseSocketControlMessage(oob[:n])
		t.OK("control message", err)
		got, err := unix.ParseUnixRights(&msgs[0])
		t.OK("descriptors", err)
		defer unix.Close(got[0])
		Equal(t, "content", t.Pread(got[0], 100, 0), "content")
	})
	add("ok/inherited-by-other-process", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		p, err := os.StartProcess("/bin/sh", []string{"sh", "-c", "echo from the child >&3"}, &os.ProcAttr{Files: []*os.File{nil, nil, nil, os.NewFile(uintptr(mustDup(t, fd)), "f")}})
		t.OK("starting sh", err)
		_, err = p.Wait()
		t.OK("wait", err)
		t.Content("f", "from the child\n")
		off, _ := unix.Seek(fd, 0, unix.SEEK_CUR)
		Equal(t, "the shared offset", off, 15)
	})
	return cs
}

func mustDup(t *T, fd int) int {
	d, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	t.OK("dup", err)
	return d
}
