package suite

import (
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// specialCases use fifos and sockets of the file system for real.
func specialCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{name, run}) }

	add("fifo/ok/bytes-go-through", func(t *T) {
		t.Make(fifo, "p", 0o644)
		r := t.Open("p", unix.O_RDONLY|unix.O_NONBLOCK, 0)
		w := t.Open("p", unix.O_WRONLY, 0)
		t.Write(w, "through the pipe")
		b := make([]byte, 100)
		n, err := unix.Read(r, b)
		t.OK("read", err)
		Equal(t, "bytes", string(b[:n]), "through the pipe")
	})
	add("fifo/ENXIO/writer-without-reader-non-blocking", func(t *T) {
		t.Make(fifo, "p", 0o644)
		t.Want("open", tryOpen("p", unix.O_WRONLY|unix.O_NONBLOCK), unix.ENXIO)
	})
	add("fifo/ok/reader-without-writer-non-blocking", func(t *T) {
		t.Make(fifo, "p", 0o644)
		t.OK("open", tryOpen("p", unix.O_RDONLY|unix.O_NONBLOCK))
	})
	add("fifo/ok/O_RDWR-never-blocks", func(t *T) {
		t.Make(fifo, "p", 0o644)
		fd := t.Open("p", unix.O_RDWR, 0)
		t.Write(fd, "x")
		n, err := unix.Read(fd, make([]byte, 10))
		t.OK("read", err)
		Equal(t, "bytes", n, 1)
	})
	add("fifo/ok/end-of-file-when-last-writer-closes", func(t *T) {
		t.Make(fifo, "p", 0o644)
		r := t.Open("p", unix.O_RDONLY|unix.O_NONBLOCK, 0)
		w, err := unix.Open("p", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		t.OK("open", err)
		_, err = unix.Read(r, make([]byte, 10))
		t.Want("read while it is empty", err, unix.EAGAIN)
		unix.Close(w)
		n, err := unix.Read(r, make([]byte, 10))
		t.OK("read", err)
		Equal(t, "bytes", n, 0)
	})
	add("fifo/EPIPE/write-after-last-reader-closed", func(t *T) {
		t.Make(fifo, "p", 0o644)
		r, err := unix.Open("p", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		t.OK("open", err)
		w := t.Open("p", unix.O_WRONLY, 0)
		unix.Close(r)
		_, err = unix.Write(w, []byte("x"))
		t.Want("write", err, unix.EPIPE)
	})
	add("fifo/ok/two-processes", func(t *T) {
		t.Make(fifo, "p", 0o644)
		h := t.Helper()
		h.Start(t, "read p")
		w, err := unix.Open("p", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		t.OK("open", err)
		t.Write(w, "from the other process")
		unix.Close(w)
		Equal(t, "what the reader got", h.Wait(t), "from the other process")
	})
	add("fifo/ok/unlinked-while-open", func(t *T) {
		t.Make(fifo, "p", 0o644)
		fd := t.Open("p", unix.O_RDWR, 0)
		t.OK("unlink", unix.Unlink("p"))
		t.Write(fd, "x")
		n, err := unix.Read(fd, make([]byte, 10))
		t.OK("read", err)
		Equal(t, "bytes", n, 1)
	})
	add("fifo/ok/same-fifo-by-hard-link", func(t *T) {
		t.Make(fifo, "p", 0o644)
		t.OK("link", unix.Link("p", "q"))
		a, b := t.Open("p", unix.O_RDWR, 0), t.Open("q", unix.O_RDONLY|unix.O_NONBLOCK, 0)
		t.Write(a, "x")
		n, err := unix.Read(b, make([]byte, 10))
		t.OK("read", err)
		Equal(t, "bytes", n, 1)
	})
	add("fifo/EACCES/permission", func(t *T) {
		t.Make(fifo, "p", 0o600)
		t.As(alice, func() { t.Want("open", tryOpen("p", unix.O_RDWR), unix.EACCES) })
	})
	add("fifo/ok/size-stays-0", func(t *T) {
		t.Make(fifo, "p", 0o644)
		fd := t.Open("p", unix.O_RDWR, 0)
		t.Write(fd, "content")
		Equal(t, "size", t.Lstat("p").Size, 0)
	})
	add("fifo/ok/O_TRUNC-is-ignored", func(t *T) {
		t.Make(fifo, "p", 0o644)
		fd := t.Open("p", unix.O_RDWR, 0)
		t.Write(fd, "x")
		t.OK("open(O_TRUNC)", tryOpen("p", unix.O_RDWR|unix.O_TRUNC))
		n, err := unix.Read(fd, make([]byte, 10))
		t.OK("read", err)
		Equal(t, "bytes", n, 1)
	})

	listen := func(t *T, kind string) *net.UnixListener {
		// The address is a relative path: the path of a socket has at most 107 bytes.
		l, err := net.ListenUnix(kind, &net.UnixAddr{Name: "s", Net: kind})
		t.OK("bind and listen", err)
		t.Cleanup(func() { l.Close() })
		return l
	}
	for _, kind := range []string{"unix", "unixpacket"} {
		add("socket/ok/"+kind+"-connect-and-talk", func(t *T) {
			l := listen(t, kind)
			t.Exists("s", socket)
			c, err := net.DialUnix(kind, nil, &net.UnixAddr{Name: "s", Net: kind})
			t.OK("connect", err)
			defer c.Close()
			s, err := l.Accept()
			t.OK("accept", err)
			defer s.Close()
			_, err = c.Write([]byte("hello"))
			t.OK("write", err)
			b := make([]byte, 100)
			n, err := s.Read(b)
			t.OK("read", err)
			Equal(t, "bytes", string(b[:n]), "hello")
		})
		add("socket/ok/"+kind+"-connect-by-hard-link-and-after-rename", func(t *T) {
			listen(t, kind)
			t.OK("link", unix.Link("s", "t"))
			t.OK("rename", unix.Rename("s", "u"))
			for _, name := range []string{"t", "u"} {
				c, err := net.DialUnix(kind, nil, &net.UnixAddr{Name: name, Net: kind})
				t.OK("connect by "+name, err)
				c.Close()
			}
		})
		add("socket/EACCES/"+kind+"-connect-without-write-permission", func(t *T) {
			listen(t, kind)
			t.Chmod("s", 0o755)
			t.As(alice, func() {
				_, err := net.DialUnix(kind, nil, &net.UnixAddr{Name: "s", Net: kind})
				t.Want("connect", err, unix.EACCES)
			})
		})
	}
	add("socket/EADDRINUSE/bind-to-existing-name", func(t *T) {
		for _, typ := range allTypes {
			name := "x-" + string(typ)
			t.Make(typ, name, 0o644)
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			t.OK("socket", err)
			t.Want("bind over "+string(typ), unix.Bind(fd, &unix.SockaddrUnix{Name: name}), unix.EADDRINUSE)
			unix.Close(fd)
		}
	})
	for _, typ := range plainTypes {
		add("socket/ECONNREFUSED/connect-to-"+string(typ), func(t *T) {
			t.Make(typ, "x", 0o644)
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			t.OK("socket", err)
			defer unix.Close(fd)
			t.Want("connect", unix.Connect(fd, &unix.SockaddrUnix{Name: "x"}), unix.ECONNREFUSED)
		})
	}
	add("socket/ENOENT/connect-to-missing", func(t *T) {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		t.OK("socket", err)
		defer unix.Close(fd)
		t.Want("connect", unix.Connect(fd, &unix.SockaddrUnix{Name: "x"}), unix.ENOENT)
	})
	add("socket/ok/bind-obeys-umask", func(t *T) {
		t.Umask(0o077)
		listen(t, "unix")
		t.Mode("s", 0o700)
	})
	add("socket/EACCES/bind-in-directory-that-is-not-writable", func(t *T) {
		t.OK("mkdir", unix.Mkdir("d", 0o755))
		t.As(alice, func() {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			t.OK("socket", err)
			defer unix.Close(fd)
			t.Want("bind", unix.Bind(fd, &unix.SockaddrUnix{Name: "d/s"}), unix.EACCES)
		})
	})
	add("socket/ok/datagrams", func(t *T) {
		s, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: "s", Net: "unixgram"})
		t.OK("bind", err)
		defer s.Close()
		c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: "s", Net: "unixgram"})
		t.OK("connect", err)
		defer c.Close()
		_, err = c.Write([]byte("datagram"))
		t.OK("write", err)
		b := make([]byte, 100)
		n, err := s.Read(b)
		t.OK("read", err)
		Equal(t, "bytes", string(b[:n]), "datagram")
	})
	return cs
}

// execCases run programs from the file system.
func execCases() []Case {
	var cs []Case
	add := func(name string, run func(*T)) { cs = append(cs, Case{"exec/" + name, run}) }
	program := func(t *T, path string) {
		b, err := os.ReadFile("/bin/true")
		t.OK("reading /bin/true", err)
		fd, err := unix.Open(path, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o755)
		t.OK("open", err)
		_, err = unix.Write(fd, b)
		t.OK("write", err)
		t.OK("close", unix.Close(fd))
	}
	add("ok/binary", func(t *T) {
		program(t, "prog")
		t.OK("exec", execPath("prog"))
	})
	add("ok/script", func(t *T) {
		t.File("script", "#!/bin/sh\nexit 0\n")
		t.Chmod("script", 0o755)
		t.OK("exec", execPath("./script"))
	})
	add("ok/script-with-interpreter-from-the-file-system", func(t *T) {
		program(t, "interpreter")
		t.File("script", "#!"+t.Dir+"/interpreter\n")
		t.Chmod("script", 0o755)
		t.OK("exec", execPath("script"))
	})
	add("ok/by-symlink", func(t *T) {
		program(t, "target")
		t.Make(symlink, "l", 0)
		t.OK("exec", execPath("l"))
	})
	add("ok/by-user-with-execute-only-permission", func(t *T) {
		program(t, "prog")
		t.Chmod("prog", 0o711)
		t.As(alice, func() { t.OK("exec", execPath("prog")) })
	})
	add("ok/after-rename", func(t *T) {
		program(t, "prog")
		t.OK("rename", unix.Rename("prog", "renamed"))
		t.OK("exec", execPath("renamed"))
	})
	add("ok/by-descriptor", func(t *T) {
		program(t, "prog")
		fd := t.Open("prog", unix.O_RDONLY, 0)
		t.OK("unlink", unix.Unlink("prog"))
		t.OK("exec", execPath(fmt.Sprintf("/proc/self/fd/%d", fd)))
	})
	add("ok/replaced-while-it-runs", func(t *T) {
		running(t, "sleeper")
		program(t, "new")
		t.OK("rename over the running program", unix.Rename("new", "sleeper"))
		t.OK("exec of the new one", execPath("sleeper"))
	})
	add("ok/unlinked-while-it-runs", func(t *T) {
		running(t, "sleeper")
		t.OK("unlink", unix.Unlink("sleeper"))
	})
	add("ETXTBSY/open-for-writing-while-it-runs", func(t *T) {
		running(t, "sleeper")
		t.Want("open for writing", tryOpen("sleeper", unix.O_WRONLY), unix.ETXTBSY)
		t.OK("open for reading", tryOpen("sleeper", unix.O_RDONLY))
	})
	add("ETXTBSY/truncate-while-it-runs", func(t *T) {
		running(t, "sleeper")
		t.Want("truncate", unix.Truncate("sleeper", 0), unix.ETXTBSY)
	})
	add("ETXTBSY/exec-while-open-for-writing", func(t *T) {
		program(t, "prog")
		t.Open("prog", unix.O_WRONLY, 0)
		t.Want("exec", execOnce("prog"), unix.ETXTBSY)
	})
	add("EACCES/without-permission", func(t *T) {
		program(t, "prog")
		t.Chmod("prog", 0o644)
		t.Want("exec", execOnce("prog"), unix.EACCES)
	})
	add("ENOEXEC/empty-file", func(t *T) {
		t.Make(regular, "prog", 0o755)
		t.Want("exec", execPath("prog"), unix.ENOEXEC)
	})
	add("ENOEXEC/text-without-interpreter", func(t *T) {
		t.File("prog", "just text, no program")
		t.Chmod("prog", 0o755)
		t.Want("exec", execPath("prog"), unix.ENOEXEC)
	})
	add("ENOENT/missing-interpreter", func(t *T) {
		t.File("prog", "#!/nonexistent/interpreter\n")
		t.Chmod("prog", 0o755)
		t.Want("exec", execPath("prog"), unix.ENOENT)
	})
	for _, typ := range []Type{dir, fifo, socket, char, block} {
		add("EACCES/"+string(typ), func(t *T) {
			t.Make(typ, "f", 0o755)
			t.Want("exec", execOnce("f"), unix.EACCES)
		})
	}
	// A set-user-id copy of this program prints its identity.
	for name, c := range map[string]struct {
		mode     uint32
		uid, gid int
	}{"set-user-id": {0o4755, bob.UID, alice.GID}, "set-group-id": {0o2755, alice.UID, bob.GID}, "both": {0o6755, bob.UID, bob.GID}, "neither": {0o755, alice.UID, alice.GID}} {
		add("ok/"+name+"-gives-the-identity-of-the-file", func(t *T) {
			b, err := os.ReadFile("/usr/bin/id")
			t.OK("reading /usr/bin/id", err)
			t.OK("writing", os.WriteFile("id", b, 0o755))
			t.OK("chown", unix.Chown("id", bob.UID, bob.GID))
			t.Chmod("id", c.mode)
			t.As(alice, func() {
				for arg, want := range map[string]int{"-u": c.uid, "-g": c.gid} {
					out := output(t, "./id", arg)
					Equal(t, "id "+arg, strings.TrimSpace(out), fmt.Sprint(want))
				}
			})
		})
	}
	return cs
}

// running starts a copy of sleep under the path.
func running(t *T, path string) {
	b, err := os.ReadFile("/bin/sleep")
	t.OK("reading /bin/sleep", err)
	t.OK("writing", os.WriteFile(path, b, 0o755))
	var p *os.Process
	for range 200 {
		p, err = os.StartProcess("./"+path, []string{"sleep", "60"}, &os.ProcAttr{})
		if err == nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.OK("starting the program", err)
	t.Cleanup(func() {
		p.Kill()
		p.Wait()
	})
}

// output runs a program and returns its output. It tries again while another fork of this
// process causes ETXTBSY.
func output(t *T, path string, args ...string) string {
	r, w, err := os.Pipe()
	t.OK("pipe", err)
	defer r.Close()
	var p *os.Process
	for range 200 {
		p, err = os.StartProcess(path, append([]string{path}, args...), &os.ProcAttr{Files: []*os.File{nil, w, nil}})
		if err == nil {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	w.Close()
	t.OK("starting "+path, err)
	b := make([]byte, 1000)
	n, _ := r.Read(b)
	_, err = p.Wait()
	t.OK("waiting for "+path, err)
	return string(b[:n])
}
