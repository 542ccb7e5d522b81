package suite

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// lockCases are the three kinds of advisory locks: flock(2), POSIX record locks
// and open file description locks of fcntl(2), between processes and within
// one.
func lockCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }

	// Record locks. One process holds [100, 200); the other asks for a range
	// in every relation to it.
	relations := []struct {
		name       string
		start, len int64
		overlaps   bool
	}{
		{"before", 0, 50, false}, {"touching-before", 50, 50, false}, {"overlapping-the-start", 50, 51, true}, {"same", 100, 100, true}, {"inside", 120, 10, true},
		{"inside-at-the-start", 100, 10, true}, {"inside-at-the-end", 190, 10, true}, {"around", 50, 300, true}, {"overlapping-the-end", 199, 50, true}, {"touching-after", 200, 50, false},
		{"after", 300, 50, false}, {"everything", 0, 0, true}, {"from-inside-to-infinity", 150, 0, true}, {"from-the-end-to-infinity", 200, 0, false}, {"last-byte", 199, 1, true}, {"first-byte", 100, 1, true},
	}
	for _, kind := range []string{"posix", "ofd"} {
		verb := map[string]string{"posix": "", "ofd": "ofd"}[kind]
		for _, held := range []string{"read", "write"} {
			for _, asked := range []string{"read", "write"} {
				for _, r := range relations {
					conflict := r.overlaps && (held == "write" || asked == "write")
					word := "ok"
					if conflict {
						word = "EAGAIN"
					}
					add(fmt.Sprintf("fcntl-%s/%s/%s-while-other-process-holds-%s-%s", kind, word, asked, held, r.name), func(t *T) {
						t.File("f", "content")
						a, b := t.Helper(), t.Helper()
						a.Do(t, "open f f rdwr")
						b.Do(t, "open f f rdwr")
						a.Do(t, fmt.Sprintf("%ssetlk f %s 100 100", verb, held))
						got := b.Do(t, fmt.Sprintf("%sgetlk f %s %d %d", verb, asked, r.start, r.len))
						err := b.Try(t, fmt.Sprintf("%ssetlk f %s %d %d", verb, asked, r.start, r.len))
						if !conflict {
							t.OK("setlk in the second process", err)
							Equal(t, "getlk says", got[:2], "un")
							return
						}
						t.WantOneOf("setlk in the second process", err, unix.EAGAIN, unix.EACCES)
						pid := a.Do(t, "pid x")
						if kind == "ofd" {
							pid = "-1"
						}
						Equal(t, "getlk says", got, fmt.Sprintf("%s 100 100 %s", held, pid))
						a.Do(t, fmt.Sprintf("%ssetlk f un 100 100", verb))
						b.Do(t, fmt.Sprintf("%ssetlk f %s %d %d", verb, asked, r.start, r.len))
					})
				}
			}
		}
		// The rest of a lock after part of it was unlocked or changed.
		for _, c := range []struct {
			name    string
			do      []string // commands of the holder after it write-locked [100, 200)
			free    [][2]int64
			blocked [][2]int64
		}{
			{"unlock-of-the-middle-splits", []string{"un 140 20"}, [][2]int64{{140, 20}, {0, 100}, {200, 0}}, [][2]int64{{100, 1}, {139, 1}, {160, 1}, {199, 1}}},
			{"unlock-of-the-start-shrinks", []string{"un 100 50"}, [][2]int64{{0, 150}}, [][2]int64{{150, 1}, {199, 1}}},
			{"unlock-of-the-end-shrinks", []string{"un 150 50"}, [][2]int64{{150, 0}}, [][2]int64{{100, 1}, {149, 1}}},
			{"unlock-of-all", []string{"un 0 0"}, [][2]int64{{0, 0}}, nil},
			{"unlock-of-nothing-held", []string{"un 300 50"}, [][2]int64{{200, 0}}, [][2]int64{{100, 100}}},
			{"adjacent-locks-merge", []string{"write 200 100", "un 150 100"}, [][2]int64{{150, 100}}, [][2]int64{{149, 1}, {250, 1}, {299, 1}}},
			{"overlapping-locks-merge", []string{"write 150 200"}, [][2]int64{{350, 0}, {0, 100}}, [][2]int64{{100, 1}, {349, 1}}},
			{"lock-inside-changes-nothing", []string{"write 120 10"}, [][2]int64{{0, 100}, {200, 0}}, [][2]int64{{100, 1}, {125, 1}, {199, 1}}},
			{"lock-around-grows", []string{"write 0 0"}, nil, [][2]int64{{0, 1}, {1 << 40, 1}}},
			{"many-pieces-then-unlock-all", []string{"write 300 1", "write 302 1", "write 304 1", "write 306 1", "un 0 0"}, [][2]int64{{0, 0}}, nil},
		} {
			add(fmt.Sprintf("fcntl-%s/ok/%s", kind, c.name), func(t *T) {
				t.File("f", "content")
				a, b := t.Helper(), t.Helper()
				a.Do(t, "open f f rdwr")
				b.Do(t, "open f f rdwr")
				a.Do(t, verb+"setlk f write 100 100")
				for _, cmd := range c.do {
					a.Do(t, verb+"setlk f "+cmd)
				}
				for _, r := range c.blocked {
					t.WantOneOf(fmt.Sprintf("write lock of [%d, +%d)", r[0], r[1]), b.Try(t, fmt.Sprintf("%ssetlk f write %d %d", verb, r[0], r[1])), unix.EAGAIN, unix.EACCES)
				}
				for _, r := range c.free {
					t.OK(fmt.Sprintf("write lock of [%d, +%d)", r[0], r[1]), b.Try(t, fmt.Sprintf("%ssetlk f write %d %d", verb, r[0], r[1])))
				}
			})
		}
		add("fcntl-"+kind+"/ok/write-lock-weakened-to-read-lets-readers-in", func(t *T) {
			t.File("f", "content")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			a.Do(t, verb+"setlk f write 100 100")
			a.Do(t, verb+"setlk f read 150 10")
			b.Do(t, verb+"setlk f read 150 10")
			t.WantOneOf("read lock beside it", b.Try(t, verb+"setlk f read 149 1"), unix.EAGAIN, unix.EACCES)
			t.WantOneOf("write lock of it", b.Try(t, verb+"setlk f write 150 10"), unix.EAGAIN, unix.EACCES)
		})
		add("fcntl-"+kind+"/ok/three-readers-then-writer-when-all-are-gone", func(t *T) {
			t.File("f", "content")
			w := t.Helper()
			w.Do(t, "open f f rdwr")
			var rs []*Helper
			for range 3 {
				h := t.Helper()
				h.Do(t, "open f f rdwr")
				h.Do(t, verb+"setlk f read 0 0")
				rs = append(rs, h)
			}
			for _, h := range rs {
				t.WantOneOf("write lock", w.Try(t, verb+"setlk f write 0 0"), unix.EAGAIN, unix.EACCES)
				h.Do(t, verb+"setlk f un 0 0")
			}
			w.Do(t, verb+"setlk f write 0 0")
		})
		add("fcntl-"+kind+"/ok/upgrade-fails-while-other-reads-and-keeps-the-read-lock", func(t *T) {
			t.File("f", "content")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			a.Do(t, verb+"setlk f read 0 10")
			b.Do(t, verb+"setlk f read 0 10")
			t.WantOneOf("upgrade", a.Try(t, verb+"setlk f write 0 10"), unix.EAGAIN, unix.EACCES)
			b.Do(t, verb+"setlk f un 0 0")
			t.WantOneOf("write lock while the read lock is still held", b.Try(t, verb+"setlk f write 0 10"), unix.EAGAIN, unix.EACCES)
		})
		add("fcntl-"+kind+"/ok/waiter-is-woken-by-unlock", func(t *T) { waiter(t, verb, func(h *Helper) { h.Do(t, verb+"setlk f un 0 0") }) })
		add("fcntl-"+kind+"/ok/waiter-is-woken-by-close", func(t *T) { waiter(t, verb, func(h *Helper) { h.Do(t, "close f") }) })
		add("fcntl-"+kind+"/ok/waiter-is-woken-by-SIGKILL-of-the-holder", func(t *T) { waiter(t, verb, func(h *Helper) { h.Kill() }) })
		add("fcntl-"+kind+"/ok/killed-waiter-leaves-nothing", func(t *T) {
			t.File("f", "content")
			a, b, c := t.Helper(), t.Helper(), t.Helper()
			for _, h := range []*Helper{a, b, c} {
				h.Do(t, "open f f rdwr")
			}
			a.Do(t, verb+"setlk f write 0 0")
			b.Start(t, verb+"setlkw f write 0 0")
			time.Sleep(50 * time.Millisecond)
			b.Kill()
			a.Do(t, verb+"setlk f un 0 0")
			c.Do(t, verb+"setlk f write 0 0")
		})
		add("fcntl-"+kind+"/EBADF/write-lock-on-read-only-descriptor", func(t *T) {
			t.File("f", "content")
			h := t.Helper()
			h.Do(t, "open f f rdonly")
			t.Want("setlk", h.Try(t, verb+"setlk f write 0 0"), unix.EBADF)
			h.Do(t, verb+"setlk f read 0 0")
		})
		add("fcntl-"+kind+"/EBADF/read-lock-on-write-only-descriptor", func(t *T) {
			t.File("f", "content")
			h := t.Helper()
			h.Do(t, "open f f wronly")
			t.Want("setlk", h.Try(t, verb+"setlk f read 0 0"), unix.EBADF)
			h.Do(t, verb+"setlk f write 0 0")
		})
		add("fcntl-"+kind+"/ok/locks-of-different-files-are-independent", func(t *T) {
			t.File("f", "")
			t.File("g", "")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f g rdwr")
			a.Do(t, verb+"setlk f write 0 0")
			b.Do(t, verb+"setlk f write 0 0")
		})
		add("fcntl-"+kind+"/ok/by-hard-link-it-is-the-same-file", func(t *T) {
			t.File("f", "")
			t.OK("link", unix.Link("f", "g"))
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f g rdwr")
			a.Do(t, verb+"setlk f write 0 0")
			t.WantOneOf("setlk", b.Try(t, verb+"setlk f write 0 0"), unix.EAGAIN, unix.EACCES)
		})
		add("fcntl-"+kind+"/ok/on-unlinked-file", func(t *T) {
			t.File("f", "")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			t.OK("unlink", unix.Unlink("f"))
			a.Do(t, verb+"setlk f write 0 0")
			t.WantOneOf("setlk", b.Try(t, verb+"setlk f write 0 0"), unix.EAGAIN, unix.EACCES)
		})
		add("fcntl-"+kind+"/ok/data-can-be-written-by-who-has-no-lock", func(t *T) {
			t.File("f", "content")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			a.Do(t, verb+"setlk f write 0 0")
			b.Do(t, "pwrite f 0 CONTENT")
			Equal(t, "content", a.Do(t, "pread f 0 10"), "CONTENT")
		})
		add("fcntl-"+kind+"/ok/ranges-at-the-largest-offsets", func(t *T) {
			t.File("f", "")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			a.Do(t, verb+"setlk f write 9223372036854775806 1")
			b.Do(t, verb+"setlk f write 0 9223372036854775806")
			t.WantOneOf("setlk of the last byte", b.Try(t, verb+"setlk f write 9223372036854775806 0"), unix.EAGAIN, unix.EACCES)
		})
	}
	add("fcntl-posix/ok/closing-any-descriptor-drops-the-locks-of-the-process", func(t *T) {
		t.File("f", "content")
		a, b := t.Helper(), t.Helper()
		a.Do(t, "open f f rdwr")
		a.Do(t, "open second f rdonly")
		b.Do(t, "open f f rdwr")
		a.Do(t, "setlk f write 0 0")
		a.Do(t, "close second")
		b.Do(t, "setlk f write 0 0")
	})
	add("fcntl-ofd/ok/closing-another-description-keeps-the-lock", func(t *T) {
		t.File("f", "content")
		a, b := t.Helper(), t.Helper()
		a.Do(t, "open f f rdwr")
		a.Do(t, "open second f rdonly")
		b.Do(t, "open f f rdwr")
		a.Do(t, "ofdsetlk f write 0 0")
		a.Do(t, "close second")
		t.Want("ofdsetlk", b.Try(t, "ofdsetlk f write 0 0"), unix.EAGAIN)
	})
	add("fcntl-posix/ok/one-process-never-conflicts-with-itself", func(t *T) {
		t.File("f", "content")
		a := t.Helper()
		a.Do(t, "open f f rdwr")
		a.Do(t, "open g f rdwr")
		a.Do(t, "setlk f write 0 0")
		a.Do(t, "setlk g write 0 0")
	})
	add("fcntl-ofd/EAGAIN/two-descriptions-of-one-process-conflict", func(t *T) {
		t.File("f", "content")
		a := t.Helper()
		a.Do(t, "open f f rdwr")
		a.Do(t, "open g f rdwr")
		a.Do(t, "ofdsetlk f write 0 0")
		t.Want("ofdsetlk", a.Try(t, "ofdsetlk g write 0 0"), unix.EAGAIN)
	})
	add("fcntl-ofd/EAGAIN/conflicts-with-posix-lock-of-other-process", func(t *T) {
		t.File("f", "content")
		a, b := t.Helper(), t.Helper()
		a.Do(t, "open f f rdwr")
		b.Do(t, "open f f rdwr")
		a.Do(t, "setlk f write 0 0")
		t.Want("ofdsetlk", b.Try(t, "ofdsetlk f write 0 0"), unix.EAGAIN)
	})
	add("fcntl-posix/EDEADLK/two-processes-wait-for-each-other", func(t *T) {
		t.File("f", "content")
		a, b := t.Helper(), t.Helper()
		a.Do(t, "open f f rdwr")
		b.Do(t, "open f f rdwr")
		a.Do(t, "setlk f write 0 1")
		b.Do(t, "setlk f write 1 1")
		a.Start(t, "setlkw f write 1 1")
		time.Sleep(100 * time.Millisecond)
		t.Want("setlkw that closes the circle", b.Try(t, "setlkw f write 0 1"), unix.EDEADLK)
		b.Do(t, "setlk f un 0 0")
		a.Wait(t)
	})
	add("fcntl-posix/EINVAL/negative-start", func(t *T) {
		fd := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		t.Want("setlk", unix.FcntlFlock(uintptr(fd), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: -1, Len: 1}), unix.EINVAL)
	})
	add("fcntl-posix/ok/negative-length-locks-what-lies-before", func(t *T) {
		t.File("f", "")
		a := t.Helper()
		a.Do(t, "open f f rdwr")
		fd := t.Open("f", unix.O_RDWR, 0)
		t.OK("setlk", unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 100, Len: -50}))
		t.Want("lock of byte 99", a.Try(t, "ofdsetlk f write 99 1"), unix.EAGAIN)
		a.Do(t, "ofdsetlk f write 100 1")
		a.Do(t, "ofdsetlk f write 49 1")
	})
	add("fcntl-posix/ok/whence-current-and-end", func(t *T) {
		t.File("f", "0123456789")
		h := t.Helper()
		h.Do(t, "open f f rdwr")
		fd := t.Open("f", unix.O_RDWR, 0)
		unix.Seek(fd, 5, unix.SEEK_SET)
		t.OK("setlk from the offset", unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_CUR, Start: -1, Len: 2}))
		Equal(t, "getlk", h.Do(t, "ofdgetlk f write 0 0"), "write 4 2 -1")
		t.OK("unlock", unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK}))
		t.OK("setlk from the end", unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_END, Start: -2, Len: 0}))
		Equal(t, "getlk", h.Do(t, "ofdgetlk f write 0 0"), "write 8 0 -1")
	})
	for _, c := range []struct {
		held, asked string
		conflict    bool
	}{{"sh", "shnb", false}, {"sh", "exnb", true}, {"ex", "shnb", true}, {"ex", "exnb", true}} {
		word := map[bool]string{false: "ok", true: "EAGAIN"}[c.conflict]
		want := map[bool]error{true: unix.EAGAIN}[c.conflict]
		add(fmt.Sprintf("flock/%s/%s-while-other-process-holds-%s", word, c.asked[:2], c.held), func(t *T) {
			t.File("f", "")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			a.Do(t, "flock f "+c.held)
			t.Want("flock", b.Try(t, "flock f "+c.asked), want)
			a.Do(t, "flock f un")
			b.Do(t, "flock f "+c.asked)
		})
		add(fmt.Sprintf("flock/%s/%s-while-other-descriptor-holds-%s", word, c.asked[:2], c.held), func(t *T) {
			t.File("f", "")
			a := t.Helper()
			a.Do(t, "open f f rdwr")
			a.Do(t, "open g f rdwr")
			a.Do(t, "flock f "+c.held)
			t.Want("flock", a.Try(t, "flock g "+c.asked), want)
		})
		for _, mode := range []string{"rdonly", "wronly"} {
			add(fmt.Sprintf("flock/ok/%s-on-%s-descriptor-after-%s", c.asked[:2], mode, c.held), func(t *T) {
				t.File("f", "")
				a := t.Helper()
				a.Do(t, "open f f "+mode)
				a.Do(t, "flock f "+c.held)
				a.Do(t, "flock f "+c.asked)
			})
		}
	}
	for name, release := range map[string]func(t *T, h *Helper){
		"unlock": func(t *T, h *Helper) { h.Do(t, "flock f un") }, "close": func(t *T, h *Helper) { h.Do(t, "close f") },
		"SIGKILL-of-the-holder": func(_ *T, h *Helper) { h.Kill() }, "downgrade-for-reader": func(t *T, h *Helper) { h.Do(t, "flock f sh") },
	} {
		add("flock/ok/waiter-is-woken-by-"+name, func(t *T) {
			t.File("f", "")
			a, b := t.Helper(), t.Helper()
			a.Do(t, "open f f rdwr")
			b.Do(t, "open f f rdwr")
			a.Do(t, "flock f ex")
			b.Start(t, "flock f sh")
			time.Sleep(50 * time.Millisecond)
			release(t, a)
			b.Wait(t)
		})
	}
	add("flock/ok/dup-shares-the-lock", func(t *T) {
		t.File("f", "")
		a, b := t.Open("f", unix.O_RDWR, 0), t.Open("f", unix.O_RDWR, 0)
		d, err := unix.Dup(a)
		t.OK("dup", err)
		t.OK("flock", unix.Flock(a, unix.LOCK_EX))
		t.OK("flock by the duplicate", unix.Flock(d, unix.LOCK_EX|unix.LOCK_NB))
		unix.Close(d)
		t.Want("flock by another description", unix.Flock(b, unix.LOCK_EX|unix.LOCK_NB), unix.EAGAIN)
	})
	add("flock/ok/duplicate-unlocks-for-both", func(t *T) {
		t.File("f", "")
		a, b := t.Open("f", unix.O_RDWR, 0), t.Open("f", unix.O_RDWR, 0)
		d, err := unix.Dup(a)
		t.OK("dup", err)
		defer unix.Close(d)
		t.OK("flock", unix.Flock(a, unix.LOCK_EX))
		t.OK("unlock by the duplicate", unix.Flock(d, unix.LOCK_UN))
		t.OK("flock by another description", unix.Flock(b, unix.LOCK_EX|unix.LOCK_NB))
	})
	add("flock/ok/independent-of-record-locks", func(t *T) {
		t.File("f", "")
		a, b := t.Helper(), t.Helper()
		a.Do(t, "open f f rdwr")
		b.Do(t, "open f f rdwr")
		a.Do(t, "flock f ex")
		b.Do(t, "setlk f write 0 0")
	})
	add("flock/ok/closing-another-description-keeps-the-lock", func(t *T) {
		t.File("f", "")
		a, b := t.Helper(), t.Helper()
		a.Do(t, "open f f rdwr")
		a.Do(t, "open g f rdwr")
		b.Do(t, "open f f rdwr")
		a.Do(t, "flock f ex")
		a.Do(t, "close g")
		t.Want("flock", b.Try(t, "flock f exnb"), unix.EAGAIN)
	})
	add("flock/ok/on-directory", func(t *T) {
		t.Mkdir("d")
		a, b := t.Helper(), t.Helper()
		a.Do(t, "open f d dir")
		b.Do(t, "open f d dir")
		a.Do(t, "flock f ex")
		t.Want("flock", b.Try(t, "flock f exnb"), unix.EAGAIN)
	})
	add("flock/ok/on-unlinked-file", func(t *T) {
		a := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		b := t.Open("f", unix.O_RDWR, 0)
		t.OK("unlink", unix.Unlink("f"))
		t.OK("flock", unix.Flock(a, unix.LOCK_EX))
		t.Want("flock", unix.Flock(b, unix.LOCK_EX|unix.LOCK_NB), unix.EAGAIN)
	})
	add("flock/ok/follows-the-file-through-rename", func(t *T) {
		t.File("f", "")
		a := t.Open("f", unix.O_RDWR, 0)
		t.OK("flock", unix.Flock(a, unix.LOCK_EX))
		t.OK("rename", unix.Rename("f", "g"))
		t.Want("flock", unix.Flock(t.Open("g", unix.O_RDWR, 0), unix.LOCK_EX|unix.LOCK_NB), unix.EAGAIN)
	})
	add("flock/EINVAL/no-operation", func(t *T) {
		t.Want("flock(0)", unix.Flock(t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644), 0), unix.EINVAL)
	})
	add("flock/ok/thousand-times", func(t *T) {
		a := t.Open("f", unix.O_CREAT|unix.O_RDWR, 0o644)
		for range 500 {
			t.OK("flock", unix.Flock(a, unix.LOCK_EX))
			t.OK("flock", unix.Flock(a, unix.LOCK_UN))
		}
	})
	return cs
}

// waiter lets one process wait for the lock of another process, which then gives the lock
// up by release.
func waiter(t *T, verb string, release func(holder *Helper)) {
	t.File("f", "content")
	a, b := t.Helper(), t.Helper()
	a.Do(t, "open f f rdwr")
	b.Do(t, "open f f rdwr")
	a.Do(t, verb+"setlk f write 0 0")
	b.Start(t, verb+"setlkw f write 0 0")
	time.Sleep(50 * time.Millisecond)
	release(a)
	b.Wait(t)
}
