package suite

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// CoherenceCases are the promises between two mounts of one tree: a change on one mount
// is visible on the other as soon as the call has returned, whatever is cached. With
// T.Other on the same mount as T.Dir these are plain POSIX cases.
//
// In each case, a relative path goes by the first mount and t.there(path) by the second.
func CoherenceCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"coherence/" + name, run}) }

	// Changes of the namespace and of attributes, each from either side. The
	// side that looks has looked before, so that its caches hold the old state.
	type change struct {
		name   string
		before func(t *T)
		do     func(t *T, side func(string) string) error
		check  func(t *T, side func(string) string)
	}
	exists := func(t *T, path string, typ Type) { t.Exists(path, typ) }
	file := func(t *T) { t.File("f", "content") }
	changes := []change{
		{"create", nil, func(_ *T, p func(string) string) error { return create(regular, p("new"), 0o644) }, func(t *T, p func(string) string) { exists(t, p("new"), regular) }},
		{"mkdir", nil, func(_ *T, p func(string) string) error { return create(dir, p("new"), 0o755) }, func(t *T, p func(string) string) { exists(t, p("new"), dir) }},
		{"mkfifo", nil, func(_ *T, p func(string) string) error { return create(fifo, p("new"), 0o644) }, func(t *T, p func(string) string) { exists(t, p("new"), fifo) }},
		{"symlink", nil, func(_ *T, p func(string) string) error { return create(symlink, p("new"), 0) }, func(t *T, p func(string) string) { exists(t, p("new"), symlink) }},
		{"unlink", file, func(_ *T, p func(string) string) error { return unix.Unlink(p("f")) }, func(t *T, p func(string) string) { t.Missing(p("f")) }},
		{"rmdir", func(t *T) { t.Mkdir("f") }, func(_ *T, p func(string) string) error { return unix.Rmdir(p("f")) }, func(t *T, p func(string) string) { t.Missing(p("f")) }},
		{"rename", file, func(_ *T, p func(string) string) error { return unix.Rename(p("f"), p("new")) }, func(t *T, p func(string) string) {
			t.Missing(p("f"))
			t.Content(p("new"), "content")
		}},
		{"rename-over", func(t *T) { file(t); t.File("g", "other") }, func(_ *T, p func(string) string) error { return unix.Rename(p("g"), p("f")) }, func(t *T, p func(string) string) {
			t.Missing(p("g"))
			t.Content(p("f"), "other")
		}},
		{"exchange", func(t *T) { file(t); t.File("g", "other") }, func(_ *T, p func(string) string) error {
			return unix.Renameat2(here, p("f"), here, p("g"), unix.RENAME_EXCHANGE)
		}, func(t *T, p func(string) string) {
			t.Content(p("f"), "other")
			t.Content(p("g"), "content")
		}},
		{"rename-directory", func(t *T) { t.Mkdir("d"); t.File("d/f", "x") }, func(_ *T, p func(string) string) error { return unix.Rename(p("d"), p("e")) }, func(t *T, p func(string) string) {
			t.Missing(p("d/f"))
			t.Content(p("e/f"), "x")
		}},
		{"link", file, func(_ *T, p func(string) string) error { return unix.Link(p("f"), p("new")) }, func(t *T, p func(string) string) {
			t.Nlink(p("f"), 2)
			t.Nlink(p("new"), 2)
		}},
		{"chmod", file, func(_ *T, p func(string) string) error { return unix.Chmod(p("f"), 0o741) }, func(t *T, p func(string) string) { t.Mode(p("f"), 0o741) }},
		{"chown", file, func(_ *T, p func(string) string) error { return unix.Chown(p("f"), 5, 6) }, func(t *T, p func(string) string) { t.Owner(p("f"), 5, 6) }},
		{"utimensat", file, func(t *T, p func(string) string) error { setTimes(t, p("f"), 111, 222); return nil }, func(t *T, p func(string) string) {
			Equal(t, "mtime", t.Lstat(p("f")).Mtim.Sec, 222)
		}},
		{"truncate", file, func(_ *T, p func(string) string) error { return unix.Truncate(p("f"), 3) }, func(t *T, p func(string) string) {
			Equal(t, "size", t.Lstat(p("f")).Size, 3)
			t.Content(p("f"), "con")
		}},
		{"extend", file, func(_ *T, p func(string) string) error { return unix.Truncate(p("f"), 9) }, func(t *T, p func(string) string) { t.Content(p("f"), "content\x00\x00") }},
		{"write", file, func(t *T, p func(string) string) error {
			t.Pwrite(t.Open(p("f"), unix.O_WRONLY, 0), "CON", 0)
			return nil
		}, func(t *T, p func(string) string) { t.Content(p("f"), "CONtent") }},
		{"append", file, func(t *T, p func(string) string) error {
			t.Write(t.Open(p("f"), unix.O_WRONLY|unix.O_APPEND, 0), "+")
			return nil
		}, func(t *T, p func(string) string) {
			Equal(t, "size", t.Lstat(p("f")).Size, 8)
			t.Content(p("f"), "content+")
		}},
		{"setxattr", file, func(_ *T, p func(string) string) error { return unix.Setxattr(p("f"), "user.x", []byte("v"), 0) }, func(t *T, p func(string) string) {
			n, err := unix.Getxattr(p("f"), "user.x", make([]byte, 10))
			t.OK("getxattr", err)
			Equal(t, "bytes", n, 1)
		}},
		{"set-acl", file, func(_ *T, p func(string) string) error {
			return unix.Setxattr(p("f"), aclAccess, acl{{aclUserObj, 6, 0}, {aclUser, 4, 77}, {aclGroupObj, 4, 0}, {aclMask, 4, 0}, {aclOther, 0, 0}}.encode(), 0)
		}, func(t *T, p func(string) string) {
			t.Mode(p("f"), 0o640)
			t.ACL(p("f"), aclAccess, acl{{aclUserObj, 6, 0}, {aclUser, 4, 77}, {aclGroupObj, 4, 0}, {aclMask, 4, 0}, {aclOther, 0, 0}})
		}},
		{"replace-file-by-directory", file, func(_ *T, p func(string) string) error {
			return errors.Join(unix.Unlink(p("f")), unix.Mkdir(p("f"), 0o755))
		}, func(t *T, p func(string) string) { exists(t, p("f"), dir) }},
		{"replace-symlink", func(t *T) { t.OK("symlink", unix.Symlink("one", "f")) }, func(_ *T, p func(string) string) error {
			return errors.Join(unix.Unlink(p("f")), unix.Symlink("two", p("f")))
		}, func(t *T, p func(string) string) {
			b := make([]byte, 10)
			n, err := unix.Readlink(p("f"), b)
			t.OK("readlink", err)
			Equal(t, "target", string(b[:n]), "two")
		}},
		{"hundred-creates", nil, func(_ *T, p func(string) string) error {
			var errs []error
			for i := range 100 {
				errs = append(errs, create(regular, p(fmt.Sprint("n", i)), 0o644))
			}
			return errors.Join(errs...)
		}, func(t *T, p func(string) string) { Equal(t, "entries", len(names(t, p("."))), 100) }},
		{"punch-hole", func(t *T) { t.File("f", strings.Repeat("x", 12288)) }, func(t *T, p func(string) string) error {
			return unix.Fallocate(t.Open(p("f"), unix.O_RDWR, 0), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 4096, 4096)
		}, func(t *T, p func(string) string) {
			t.Content(p("f"), strings.Repeat("x", 4096)+strings.Repeat("\x00", 4096)+strings.Repeat("x", 4096))
		}},
		{"copy_file_range", func(t *T) { file(t); t.File("g", "other12") }, func(t *T, p func(string) string) error {
			_, err := unix.CopyFileRange(t.Open(p("g"), unix.O_RDONLY, 0), nil, t.Open(p("f"), unix.O_RDWR, 0), nil, 7, 0)
			return err
		}, func(t *T, p func(string) string) { t.Content(p("f"), "other12") }},
	}
	first := func(*T) func(string) string { return func(p string) string { return p } }
	second := func(t *T) func(string) string { return t.there }
	for _, c := range changes {
		for _, from := range []string{"first", "second"} {
			add(fmt.Sprintf("change-on-%s/%s-is-seen-at-once", from, c.name), func(t *T) {
				here, there := first(t), second(t)
				if from == "second" {
					here, there = there, here
				}
				if c.before != nil {
					c.before(t)
				}
				// All names, existing and missing, go into the caches of both sides.
				for _, side := range []func(string) string{here, there} {
					for _, n := range names(t, side(".")) {
						if st := t.Lstat(side(n)); st.Mode&unix.S_IFMT == unix.S_IFREG {
							t.Read(side(n))
						}
						_, _ = unix.Getxattr(side(n), "user.x", nil) // only to be cached
					}
					t.Missing(side("new"))
					t.Missing(side("n50"))
				}
				t.OK(c.name, c.do(t, here))
				c.check(t, there)
				c.check(t, here)
			})
			add(fmt.Sprintf("change-on-%s/%s-listing-is-seen-at-once", from, c.name), func(t *T) {
				here, there := first(t), second(t)
				if from == "second" {
					here, there = there, here
				}
				if c.before != nil {
					c.before(t)
				}
				names(t, there("."))
				t.OK(c.name, c.do(t, here))
				a, b := names(t, here(".")), names(t, there("."))
				Equal(t, "listing on the other side", strings.Join(b, " "), strings.Join(a, " "))
			})
		}
	}

	// Data of one open file.
	add("data/reader-with-open-file-sees-every-completed-write", func(t *T) {
		w := t.Open("f", unix.O_CREAT|unix.O_WRONLY, 0o644)
		r := t.Open(t.there("f"), unix.O_RDONLY, 0)
		for i := range 100 {
			t.Pwrite(w, fmt.Sprintf("version %03d", i), 0)
			Equal(t, "what the other side reads", t.Pread(r, 100, 0), fmt.Sprintf("version %03d", i))
		}
	})
	add("data/both-write-in-turn", func(t *T) {
		a, b := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644), t.Open(t.there("f"), unix.O_RDWR, 0)
		for i := range 50 {
			t.Pwrite(a, fmt.Sprintf("a%03d", i), 0)
			Equal(t, "what b reads", t.Pread(b, 4, 0), fmt.Sprintf("a%03d", i))
			t.Pwrite(b, fmt.Sprintf("b%03d", i), 4)
			Equal(t, "what a reads", t.Pread(a, 8, 0), fmt.Sprintf("a%03db%03d", i, i))
		}
	})
	add("data/both-append-nothing-is-lost", func(t *T) {
		t.File("log", "")
		a, b := t.Open("log", unix.O_WRONLY|unix.O_APPEND, 0), t.Open(t.there("log"), unix.O_WRONLY|unix.O_APPEND, 0)
		var wg sync.WaitGroup
		errs := make(chan error, 2)
		for i, fd := range []int{a, b} {
			wg.Go(func() {
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
		for _, p := range []string{"log", t.there("log")} {
			seen := map[string]int{}
			for _, l := range strings.Split(t.Read(p), "\n") {
				seen[l]++
			}
			for i := range 2 {
				for j := range 100 {
					Equal(t, fmt.Sprintf("occurrences of line %d-%03d", i, j), seen[fmt.Sprintf("%d-%03d", i, j)], 1)
				}
			}
		}
	})
	add("data/close-to-open", func(t *T) {
		for i := range 30 {
			content := strings.Repeat(fmt.Sprintf("generation %d ", i), 1+i*50)
			t.File("f", content)
			t.Content(t.there("f"), content)
			t.File(t.there("f"), "back "+content)
			t.Content("f", "back "+content)
		}
	})
	add("data/size-of-open-file-follows", func(t *T) {
		w, r := t.Open("f", unix.O_CREAT|unix.O_WRONLY|unix.O_APPEND, 0o644), t.Open(t.there("f"), unix.O_RDONLY, 0)
		for i := range 30 {
			t.Write(w, "0123456789")
			Equal(t, "size by fstat on the other side", t.Fstat(r).Size, int64(10*(i+1)))
		}
	})
	add("data/pages-that-the-other-side-has-cached-are-renewed", func(t *T) {
		big := strings.Repeat("0123456789abcdef", 1<<14)
		t.File("f", big)
		r := t.Open(t.there("f"), unix.O_RDONLY, 0)
		sameBytes(t, "first read", []byte(t.Pread(r, len(big), 0)), []byte(big))
		w := t.Open("f", unix.O_WRONLY, 0)
		t.Pwrite(w, "CHANGED", 100000)
		Equal(t, "bytes", t.Pread(r, 7, 100000), "CHANGED")
		Equal(t, "bytes after it", t.Pread(r, 16, 100016), big[100016:100032])
	})
	add("data/mapping-on-the-other-side-sees-writes", func(t *T) {
		t.File("f", strings.Repeat("-", 8192))
		m := mapFile(t, t.Open(t.there("f"), unix.O_RDONLY, 0), 8192, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[0], '-')
		w := t.Open("f", unix.O_WRONLY, 0)
		t.Pwrite(w, "new", 0)
		within(t, "the mapping shows the new byte", func() bool { return touch(m, 0) == 'n' })
	})
	add("data/truncate-succeeds-while-other-side-maps", func(t *T) {
		t.File("f", strings.Repeat("-", 16384))
		m := mapFile(t, t.Open(t.there("f"), unix.O_RDONLY, 0), 16384, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[10000], '-')
		t.OK("truncate", unix.Truncate("f", 100))
		Equal(t, "size on the other side", t.Lstat(t.there("f")).Size, 100)
		faults(func() { touch(m, 10000) }) // may be SIGBUS or not; must not hang
	})
	add("data/replace-succeeds-while-other-side-maps", func(t *T) {
		t.File("f", strings.Repeat("-", 16384))
		m := mapFile(t, t.Open(t.there("f"), unix.O_RDONLY, 0), 16384, unix.PROT_READ, unix.MAP_SHARED)
		Equal(t, "before", m[10000], '-')
		t.File("g", "new")
		t.OK("rename", unix.Rename("g", "f"))
		t.Content(t.there("f"), "new")
		Equal(t, "the mapping of the old file", m[12000], '-')
	})
	add("data/write-open-succeeds-while-other-side-maps-and-reads", func(t *T) {
		t.File("f", strings.Repeat("-", 16384))
		r := t.Open(t.there("f"), unix.O_RDONLY, 0)
		m := mapFile(t, r, 16384, unix.PROT_READ, unix.MAP_SHARED)
		var stop atomic.Bool
		done := make(chan struct{})
		go func() {
			defer close(done)
			b := make([]byte, 16384)
			for !stop.Load() {
				_, _ = unix.Pread(r, b, 0) // the case tests the writer
				touch(m, 5000)
			}
		}()
		for i := range 30 {
			fd, err := unix.Open("f", unix.O_RDWR|unix.O_CLOEXEC, 0)
			if err == nil {
				_, err = unix.Pwrite(fd, []byte{byte('a' + i%26)}, 5000)
				unix.Close(fd)
			}
			if err != nil {
				stop.Store(true)
				<-done
				t.OK("write while the other side reads", err)
			}
		}
		stop.Store(true)
		<-done
		Equal(t, "last byte written", t.Pread(r, 1, 5000), string(rune('a'+29%26)))
	})
	add("data/O_TRUNC-on-one-side-while-other-reads", func(t *T) {
		t.File("f", "old content")
		r := t.Open(t.there("f"), unix.O_RDONLY, 0)
		Equal(t, "before", t.Pread(r, 100, 0), "old content")
		w := t.Open("f", unix.O_WRONLY|unix.O_TRUNC, 0)
		Equal(t, "after O_TRUNC", t.Pread(r, 100, 0), "")
		t.Write(w, "new")
		Equal(t, "after the write", t.Pread(r, 100, 0), "new")
	})
	add("data/unlinked-on-one-side-open-on-the-other", func(t *T) {
		t.File("f", "content")
		fd := t.Open(t.there("f"), unix.O_RDWR, 0)
		t.OK("unlink", unix.Unlink("f"))
		t.Missing(t.there("f"))
		Equal(t, "content", t.Pread(fd, 100, 0), "content")
		t.Pwrite(fd, "still", 7)
		Equal(t, "content", t.Pread(fd, 100, 0), "contentstill")
		Equal(t, "links", t.Fstat(fd).Nlink, 0)
	})
	add("data/replaced-on-one-side-open-on-the-other", func(t *T) {
		t.File("f", "old")
		t.File("g", "new")
		fd := t.Open(t.there("f"), unix.O_RDONLY, 0)
		t.OK("rename", unix.Rename("g", "f"))
		Equal(t, "content of the open file", t.Pread(fd, 100, 0), "old")
		t.Content(t.there("f"), "new")
	})
	add("data/fsync-on-one-side-after-write-on-the-other", func(t *T) {
		a, b := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644), t.Open(t.there("f"), unix.O_RDWR, 0)
		t.Write(a, "data")
		t.OK("fsync", unix.Fsync(b))
		t.OK("fsync", unix.Fsync(a))
		Equal(t, "content", t.Pread(b, 10, 0), "data")
	})
	add("data/large-file-written-on-one-side-read-on-the-other", func(t *T) {
		b := make([]byte, 8<<20)
		fill(b, 8)
		t.File("f", string(b))
		sameBytes(t, "content", []byte(t.Read(t.there("f"))), b)
	})
	add("data/blocks-of-one-file-written-from-both-sides", func(t *T) {
		a, b := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644), t.Open(t.there("f"), unix.O_RDWR, 0)
		var wg sync.WaitGroup
		errs := make(chan error, 2)
		for i, fd := range []int{a, b} {
			wg.Go(func() {
				for j := range 40 {
					if _, err := unix.Pwrite(fd, []byte(strings.Repeat(string(rune('a'+i)), 1000)), int64(2*j+i)*1000); err != nil {
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
		want := strings.Repeat(strings.Repeat("a", 1000)+strings.Repeat("b", 1000), 40)
		t.Content("f", want)
		t.Content(t.there("f"), want)
	})

	// Races with one winner.
	for name, do := range map[string]func(path string) error{
		"mkdir":   func(p string) error { return unix.Mkdir(p, 0o755) },
		"create":  func(p string) error { return create(regular, p, 0o644) },
		"symlink": func(p string) error { return unix.Symlink("x", p) },
	} {
		add("race/"+name+"-has-one-winner", func(t *T) {
			for i := range 50 {
				errs := make([]error, 2)
				var wg sync.WaitGroup
				for side, p := range []string{fmt.Sprint(t.Dir, "/n", i), t.there(fmt.Sprint("n", i))} {
					wg.Go(func() { errs[side] = do(p) })
				}
				wg.Wait()
				if (errs[0] == nil) == (errs[1] == nil) {
					t.Fatalf("round %d: first %s, second %s; exactly one must succeed", i, errText(errs[0]), errText(errs[1]))
				}
				t.Want("the loser", errors.Join(errs...), unix.EEXIST)
			}
		})
	}
	add("race/unlink-has-one-winner", func(t *T) {
		for i := range 50 {
			n := fmt.Sprint("n", i)
			t.File(n, "")
			errs := make([]error, 2)
			var wg sync.WaitGroup
			for side, p := range []string{t.Dir + "/" + n, t.there(n)} {
				wg.Go(func() { errs[side] = unix.Unlink(p) })
			}
			wg.Wait()
			if (errs[0] == nil) == (errs[1] == nil) {
				t.Fatalf("round %d: first %s, second %s; exactly one must succeed", i, errText(errs[0]), errText(errs[1]))
			}
		}
	})
	add("race/rmdir-against-create-never-both", func(t *T) {
		for i := range 50 {
			d := fmt.Sprint("d", i)
			t.Mkdir(d)
			var removed, created error
			var wg sync.WaitGroup
			wg.Go(func() { removed = unix.Rmdir(t.Dir + "/" + d) })
			wg.Go(func() { created = create(regular, t.there(d+"/f"), 0o644) })
			wg.Wait()
			if (removed == nil) == (created == nil) {
				t.Fatalf("round %d: rmdir %s, create inside %s; exactly one must succeed", i, errText(removed), errText(created))
			}
		}
	})

	// Locks.
	for _, kind := range []string{"setlk", "ofdsetlk", "flock"} {
		lock, wait, unlock := kind+" f write 0 0", kind+"w f write 0 0", kind+" f un 0 0"
		if kind == "flock" {
			lock, wait, unlock = "flock f exnb", "flock f ex", "flock f un"
		}
		pair := func(t *T) (a, b *Helper) {
			t.File("f", "")
			a, b = t.Helper(), t.HelperIn(t.Other)
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			return a, b
		}
		add("lock/"+kind+"-excludes-the-other-mount", func(t *T) {
			a, b := pair(t)
			for range 10 {
				a.Do(t, lock)
				t.WantOneOf("lock on the other mount", b.Try(t, lock), unix.EAGAIN, unix.EACCES)
				a.Do(t, unlock)
				b.Do(t, lock)
				t.WantOneOf("lock on the first mount", a.Try(t, lock), unix.EAGAIN, unix.EACCES)
				b.Do(t, unlock)
			}
		})
		for name, release := range map[string]func(t *T, h *Helper){
			"unlock": func(t *T, h *Helper) { h.Do(t, unlock) }, "close": func(t *T, h *Helper) { h.Do(t, "close f") }, "SIGKILL": func(_ *T, h *Helper) { h.Kill() },
		} {
			add("lock/"+kind+"-waiter-on-the-other-mount-is-woken-by-"+name, func(t *T) {
				a, b := pair(t)
				a.Do(t, lock)
				b.Start(t, wait)
				time.Sleep(50 * time.Millisecond)
				release(t, a)
				b.Wait(t)
			})
		}
		add("lock/"+kind+"-protects-a-counter", func(t *T) {
			// A counter in a file, read and written back under the lock from both
			// mounts: lost updates show broken locks or stale reads.
			a, b := pair(t)
			t.File("counter", "000")
			a.Do(t, "open c counter rdwr")
			b.Do(t, "open c counter rdwr")
			for i := range 40 {
				h := []*Helper{a, b}[i%2]
				h.Do(t, wait)
				Equal(t, "counter", h.Do(t, "pread c 0 3"), fmt.Sprintf("%03d", i))
				h.Do(t, fmt.Sprintf("pwrite c 0 %03d", i+1))
				h.Do(t, unlock)
			}
		})
	}
	add("lock/fcntl-ranges-across-mounts", func(t *T) {
		t.File("f", "")
		a, b := t.Helper(), t.HelperIn(t.Other)
		a.Do(t, "open f f rdwr")
		b.Do(t, "open f f rdwr")
		a.Do(t, "setlk f write 0 100")
		b.Do(t, "setlk f write 100 100")
		t.WantOneOf("overlapping lock", b.Try(t, "setlk f read 99 1"), unix.EAGAIN, unix.EACCES)
		got := b.Do(t, "getlk f write 0 200")
		t.True(strings.HasPrefix(got, "write 0 100"), "getlk says %q", got)
		a.Do(t, "setlk f un 50 50")
		b.Do(t, "setlk f read 50 50")
	})
	return cs
}

// there names the path on the other mount.
func (t *T) there(path string) string { return t.Other + "/" + path }

// within waits up to two seconds for the condition.
func within(t *T, what string, ok func() bool) {
	for range 200 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("after 2 s still not true: %s", what)
}
