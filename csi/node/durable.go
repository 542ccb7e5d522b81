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

// NodeUnstageVolume unstages a volume only after all written data is durable. While servers
// are only away, the call fails with Unavailable and names the data waited for, and the
// orchestrator calls again. The call keeps all of the volume's state meanwhile, so a kill of
// the mount's process, of its holder or of this driver makes no difference. Only an operator
// abandons bytes (penstock client abandon).

const (
	// durableWait bounds how long one call waits for durability: orchestrators call again at
	// growing intervals, and log the error.
	durableWait = 15 * time.Second
	durableLook = 250 * time.Millisecond
	// answerWait bounds how long the driver waits for a mount's process to answer on its
	// socket.
	answerWait = 5 * time.Second
)

// patience returns how long a step of a call may take if the caller is to get an answer: at
// most most, and at most the time until a second before ctx's deadline.
func patience(ctx context.Context, most time.Duration) time.Duration {
	if until, ok := ctx.Deadline(); ok {
		return max(min(most, time.Until(until)-time.Second), 0)
	}
	return most
}

// unsynced is the data of a volume that a mount's process, or a holder, has and that is not
// durable; see penstock.Unsynced.
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

// waitsFor returns the error of a call waiting for data to become durable.
func waitsFor(path string, what []unsynced) error {
	var l []string
	for _, u := range what {
		l = append(l, u.String())
	}
	return meta.E("unstage", meta.Unavailable, path, fmt.Errorf("not durable yet: %s; it is tried again, and 'penstock client abandon' on this node would give it up", strings.Join(l, "; ")))
}

// syncs runs syncfs(2), at most once at a time for each path: syncfs blocks as long as servers
// are away, and can't be interrupted.
type syncs struct {
	mu sync.Mutex
	on map[string]*syncing
}

type syncing struct {
	done chan struct{}
	err  error
}

// of returns the running call for a path, or starts a call.
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
		go func() { // ends when all is durable, or the mount's connection ends
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

// durable waits until all data written to a served mount is durable. Errors: Unavailable (not
// yet durable).
func (s *Server) durable(ctx context.Context, f folder, path string) error {
	ctx, cancel := context.WithTimeout(ctx, patience(ctx, durableWait))
	defer cancel()
	begun := time.Now()
	kernel := s.syncs.of(path) // first, pages stored through mappings
	look := time.NewTicker(durableLook)
	defer look.Stop()
	var last []unsynced
	for answered := false; ; {
		synced := false
		select {
		case <-kernel.done:
			synced = kernel.err == nil
			if errors.Is(kernel.err, unix.ENOTCONN) || errors.Is(kernel.err, unix.ECONNABORTED) {
				return nil // the process has ended, and no holder has the mount
			}
			if !synced {
				kernel = s.syncs.of(path)
			}
		default:
		}
		left, err := s.unsynced(ctx, f)
		switch {
		case err == nil && len(left) == 0 && (synced || time.Since(begun) > probeWait):
			return nil // all is durable, even if the mount does not answer
		case err == nil:
			last, answered = left, true
		case synced && meta.KindOf(err) == meta.NotFound:
			return nil // the process does not answer /unsynced
		}
		select {
		case <-look.C:
			continue
		case <-ctx.Done():
		}
		switch {
		case !answered:
			return meta.E("unstage", meta.Unavailable, path, errors.New("the mount's process does not answer, so the driver can't tell which bytes are not durable yet; to give them up, kill the process"))
		case len(last) == 0:
			return meta.E("unstage", meta.Unavailable, path, errors.New("written bytes are still being made durable"))
		}
		return waitsFor(path, last)
	}
}

// unsynced asks a mount's process for its data that is not durable. Errors: NotFound (no
// process listens on the socket, or the process refuses the request), IO.
func (s *Server) unsynced(ctx context.Context, f folder) (l []unsynced, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	return l, question(ctx, f.socket(), http.MethodGet, "/unsynced", &l)
}

// giveUp makes a mount's process abandon its data that is not durable, because the driver is
// about to delete the volume. The process may have ended already.
func (s *Server) giveUp(ctx context.Context, f folder) {
	ctx, cancel := context.WithTimeout(ctx, answerWait)
	defer cancel()
	var l []unsynced
	if err := question(ctx, f.socket(), http.MethodPost, "/abandon", &l); err != nil && meta.KindOf(err) != meta.NotFound {
		s.Logger.Warn("a mount whose volume is to be deleted may wait until all is durable", "folder", f, "err", err)
	}
}

// question sends a request to a mount's process on its socket.
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

// left returns an error naming the data that is not durable and that the holder has of an
// unserved mount; nil: all is durable, or without a holder. Errors: Unavailable.
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
