package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// A volume is unstaged when what was written to it is durable, not before: as long as
// servers are only away, NodeUnstageVolume fails with Unavailable, says what it waits for,
// and is called again; nothing of the volume's state goes, so that it makes no difference
// whether the mount's process, its holder or this driver are killed in between. Only an
// operator gives bytes up (penstock client abandon).

const (
	// durableWait is how long one call waits for what is not durable: orchestrators call
	// again, ever less often, and log what they are told.
	durableWait = 15 * time.Second
	durableLook = 250 * time.Millisecond
	// answerWait is how long a mount's process may take to answer at its socket.
	answerWait = 5 * time.Second
)

// patience is how long a step of a call may take that gives its caller an answer: at most
// so long, and a second less than the caller waits.
func patience(ctx context.Context, most time.Duration) time.Duration {
	if until, ok := ctx.Deadline(); ok {
		return max(min(most, time.Until(until)-time.Second), 0)
	}
	return most
}

// unsynced is what a mount's process, or a holder, has of a volume that is not durable;
// see penstock.Unsynced.
type unsynced struct {
	Name    string `json:"name"`
	Files   int    `json:"files"`
	Bytes   int64  `json:"bytes"`
	Changes bool   `json:"changes"`
	Why     string `json:"why"`
}

func (u unsynced) String() string {
	s := fmt.Sprintf("%d files with %d bytes of volume %s", u.Files, u.Bytes, u.Name)
	if u.Files == 0 {
		s = "changes of names or attributes of volume " + u.Name
	}
	if u.Why != "" {
		s += " (" + u.Why + ")"
	}
	return s
}

// waitsFor is the error of a call that waits until something is durable.
func waitsFor(path string, what []unsynced) error {
	var l []string
	for _, u := range what {
		l = append(l, u.String())
	}
	return meta.E("unstage", meta.Unavailable, path, fmt.Errorf("not durable yet: %s; it is tried again, and 'penstock client abandon' on this node would give it up", strings.Join(l, "; ")))
}

// syncs has syncfs(2) called, for one path once at a time: it waits for as long as
// servers are away, and nobody can end it.
type syncs struct {
	mu sync.Mutex
	on map[string]*syncing
}

type syncing struct {
	done chan struct{}
	err  error
}

// of gives the call that is under way at a path, or begins one.
func (y *syncs) of(path string) *syncing {
	y.mu.Lock()
	defer y.mu.Unlock()
	if y.on == nil {
		y.on = map[string]*syncing{}
	}
	s := y.on[path]
	if s == nil {
		s = &syncing{done: make(chan struct{})}
		y.on[path] = s
		go func() { // ends when it is durable, or the mount's connection ends
			s.err = syncfs(path)
			y.mu.Lock()
			delete(y.on, path)
			y.mu.Unlock()
			close(s.done)
		}()
	}
	return s
}

func syncfs(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Syncfs(fd)
}

// durable waits until what was written to a mount that is served is durable. Errors:
// Unavailable (not yet).
func (s *Server) durable(ctx context.Context, f folder, path string) error {
	ctx, cancel := context.WithTimeout(ctx, patience(ctx, durableWait))
	defer cancel()
	begun := time.Now()
	kernel := s.syncs.of(path) // pages that were stored through mappings, first of all
	look := time.NewTicker(durableLook)
	defer look.Stop()
	var last []unsynced
	for answered := false; ; {
		synced := false
		select {
		case <-kernel.done:
			synced = kernel.err == nil
			if errors.Is(kernel.err, unix.ENOTCONN) || errors.Is(kernel.err, unix.ECONNABORTED) {
				return nil // its process is gone, and nobody has it
			}
			if !synced {
				kernel = s.syncs.of(path)
			}
		default:
		}
		left, err := s.unsynced(ctx, f)
		switch {
		case err == nil && len(left) == 0 && (synced || time.Since(begun) > probeWait):
			return nil // a mount that does not answer, of which all is durable, may go
		case err == nil:
			last, answered = left, true
		case synced && meta.KindOf(err) == meta.NotFound:
			return nil // it tells nothing
		}
		select {
		case <-look.C:
			continue
		case <-ctx.Done():
		}
		switch {
		case !answered:
			return meta.E("unstage", meta.Unavailable, path, errors.New("the process that serves the mount does not answer, so nobody knows what is not durable yet; to give that up, kill it"))
		case len(last) == 0:
			return meta.E("unstage", meta.Unavailable, path, errors.New("what was written is being made durable"))
		}
		return waitsFor(path, last)
	}
}

// unsynced asks the process of a mount what is not durable. Errors: NotFound (nobody
// listens there), IO.
func (s *Server) unsynced(ctx context.Context, f folder) (l []unsynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	return l, question(ctx, f.socket(), http.MethodGet, "/unsynced", &l)
}

// giveUp has the process of a mount give up what is not durable: its volume is about to
// be deleted. It may not be there.
func (s *Server) giveUp(ctx context.Context, f folder) {
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	var l []unsynced
	if err := question(ctx, f.socket(), http.MethodPost, "/abandon", &l); err != nil && meta.KindOf(err) != meta.NotFound {
		s.Logger.Warn("a mount whose volume is to be deleted may wait until all is durable", "folder", f, "err", err)
	}
}

// question asks a mount's process at its socket.
func question(ctx context.Context, socket, method, what string, into any) error {
	const op = "ask mount"
	q, err := http.NewRequestWithContext(ctx, method, "http://mount"+what, nil)
	if err != nil {
		return meta.E(op, meta.Invalid, socket, err)
	}
	a, err := at(socket).RoundTrip(q)
	if err != nil {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
			return meta.E(op, meta.NotFound, socket, err)
		}
		return meta.E(op, meta.IO, socket, err)
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return meta.E(op, meta.NotFound, socket, errors.New(a.Status))
	}
	if err := json.NewDecoder(http.MaxBytesReader(nil, a.Body, maxTold)).Decode(into); err != nil {
		return meta.E(op, meta.IO, socket, err)
	}
	return nil
}

// left tells what the holder has of a mount that nobody serves and is not durable; nil:
// nothing.
func (s *Server) left(path string) error {
	if s.Holder == nil {
		return nil
	}
	files, bytes, err := s.Holder.Unsynced(path)
	if err != nil {
		return meta.E("unstage", meta.Unavailable, path, fmt.Errorf("whether everything is durable can't be told: %w", err))
	}
	if bytes == 0 {
		return nil
	}
	return meta.E("unstage", meta.Unavailable, path, fmt.Errorf("not durable yet: %d files with %d bytes, which the holder has; a process that goes on with them is started again and again, and 'penstock client abandon' on this node would give them up", files, bytes))
}
