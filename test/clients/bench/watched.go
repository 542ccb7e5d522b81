package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// watched is a process of the program penstock, whose admin port lies at a socket.
type watched struct {
	*running
	name   string
	socket string
}

// startWatched starts the program penstock; the socket and the log lie in a directory.
func startWatched(dir, name string, args ...string) (*watched, error) {
	w := &watched{running: &running{dir: dir}, name: name, socket: filepath.Join(dir, name+".sock")}
	w.cmd = exec.Command(*penstock, append(args, "--admin", "unix:"+w.socket)...)
	log, err := os.OpenFile(filepath.Join(dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	w.cmd.Stdout, w.cmd.Stderr = log, log
	dieWithParent(w.cmd)
	return w, w.cmd.Start()
}

// get asks the admin port.
func (w *watched) get(ctx context.Context, path string) (*http.Response, error) {
	c := http.Client{Timeout: 2 * time.Minute, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", w.socket)
	}}}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://admin"+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	return c.Do(q)
}

// metric returns the sum of the metrics with a name.
func (w *watched) metric(ctx context.Context, name string) (sum float64, err error) {
	r, err := w.get(ctx, "/metrics")
	if err != nil {
		return 0, err
	}
	defer r.Body.Close()
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), " ")
		if base, _, _ := strings.Cut(key, "{"); base != name {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, err
		}
		sum += v
	}
	return sum, nil
}

// footprint is the memory of a process, in bytes.
type footprint struct {
	heap     int64 // after a collection of garbage
	resident int64 // private
}

func (w *watched) footprint(ctx context.Context, when string) (now footprint, err error) {
	if now.heap, err = w.heap(ctx); err != nil {
		return now, err
	}
	if *profiles != "" {
		if err := w.profile(ctx, filepath.Join(*profiles, w.name+"-"+when+".pb.gz")); err != nil {
			return now, err
		}
	}
	kib, err := w.memory()
	now.resident = kib << 10
	return now, err
}

func (w *watched) heap(ctx context.Context) (bytes int64, err error) {
	r, err := w.get(ctx, "/debug/pprof/heap?gc=1&debug=1")
	if err != nil {
		return 0, err
	}
	defer r.Body.Close()
	for lines := bufio.NewScanner(r.Body); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "# HeapAlloc = "); ok {
			return strconv.ParseInt(v, 10, 64)
		}
	}
	return 0, errors.New("the profile of the heap has no line HeapAlloc")
}

// profile writes the profile of the heap to a file.
func (w *watched) profile(ctx context.Context, file string) error {
	r, err := w.get(ctx, "/debug/pprof/heap")
	if err != nil {
		return err
	}
	defer r.Body.Close()
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r.Body)
	return errors.Join(err, f.Close())
}

// written returns the bytes that the process has written to files and sockets.
func (w *watched) written() (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", w.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if v, ok := strings.CutPrefix(line, "wchar: "); ok {
			return strconv.ParseInt(v, 10, 64)
		}
	}
	return 0, errors.New("the kernel tells no wchar")
}
