package streams

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/offsets"
	"penstock.io/penstock/stream/placement"
	"penstock.io/penstock/test/child"
)

// late is a process with a host of streams that comes to a step in the middle of a change, and goes on
// later: when the process has a new session, and another process leads what this process led.
type late struct {
	Addr, Stream, Dir string
	Change, Name      string // the step: see stream.Unsafe.Before; Name is the end of a name
	Appends           int    // the process appends so many records; 0: the process commits offsets
}

// lateCommits is how many commits of largest metadata a file of offsets takes until the gateway writes the
// file anew.
const lateCommits = 16

// Run is ready at the step, and goes on when the file "go" is in Dir. The file "done" has the result.
func (l late) Run() error {
	ctx := context.Background()
	h, err := newHost(ctx, l.Addr, "late")
	if err != nil {
		return err
	}
	at := false
	h.Unsafe.Before = func(change, name string) {
		if at || change != l.Change || !strings.HasSuffix(name, l.Name) || l.turn() {
			return
		}
		at = true
		child.Ready("at " + name)
		for !exists(filepath.Join(l.Dir, "go")) {
			time.Sleep(10 * time.Millisecond)
		}
		// The session of before has ended: the rest runs in the next session.
		for h.tree.WriteFile(ctx, "/awake", nil, 0o644) != nil {
			time.Sleep(10 * time.Millisecond)
		}
	}
	if l.Appends > 0 {
		err = h.appendAll(ctx, l.Stream, "late", l.Appends)
	} else {
		err = h.commits(ctx, l.Stream, 1, lateCommits)
	}
	if !at {
		return fmt.Errorf("the step %s %s never came: %w", l.Change, l.Name, err)
	}
	if err := os.WriteFile(filepath.Join(l.Dir, "result"), fmt.Appendf(nil, "%v", err), 0o600); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(l.Dir, "result"), filepath.Join(l.Dir, "done")); err != nil {
		return err
	}
	child.Orphaned()
	return nil
}

// turn reports that the step has come too early: the last append is the late one.
func (l *late) turn() bool {
	l.Appends--
	return l.Appends > 0
}

func exists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// lateHost is a host of streams.
type lateHost struct {
	*stream.Host
	tree *penstock.Tree
	c    *penstock.Client
}

func newHost(ctx context.Context, addr, name string) (*lateHost, error) {
	c, err := penstock.Dial(ctx, penstock.Config{Meta: []string{addr}, Name: name, Streams: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, err
	}
	root, err := c.VolumeByID(ctx, meta.RootVolume)
	if err != nil {
		return nil, err
	}
	h := stream.NewHost(c, root, slog.New(slog.DiscardHandler))
	h.Address = "1@127.0.0.1:1"
	for control := range strings.SplitSeq(os.Getenv("PENSTOCK_CONTROL"), ",") {
		switch control {
		case "stream-nofence":
			h.Unsafe.NoFence = true
		case "stream-noseal":
			h.Unsafe.NoSeal = true
		}
	}
	return &lateHost{h, root.Tree(), c}, nil
}

const lateGroup = "readers"

// offsets returns the offsets of the group.
func (h *lateHost) offsets(ctx context.Context, path string) (*offsets.Offsets, error) {
	epoch, err := h.Coordinate(ctx, lateGroup)
	if err != nil {
		return nil, err
	}
	s, err := h.Stream(ctx, nil, path, stream.MayRead)
	if err != nil {
		return nil, err
	}
	return s.Offsets(ctx, stream.Coordination{Group: lateGroup, Epoch: epoch}, true)
}

// commits commits n offsets of partition 0 from first on. others are partitions that get an offset, too.
func (h *lateHost) commits(ctx context.Context, path string, first, n int, others ...int32) error {
	for i := range n {
		o, err := h.offsets(ctx, path)
		if err != nil {
			return err
		}
		var all []offsets.Commit
		for _, of := range append(others, 0) {
			all = append(all, offsets.Commit{Partition: of, Offset: int64(first + i), Epoch: -1, Metadata: strings.Repeat("m", offsets.MaxMetadata)})
		}
		if err := o.Commit(all); err != nil {
			return err
		}
	}
	return nil
}

// appendAll appends records, one after the other.
func (h *lateHost) appendAll(ctx context.Context, path, text string, n int) error {
	s, err := h.Stream(ctx, nil, path, stream.MayRead)
	if err != nil {
		return err
	}
	for i := range n {
		l, err := s.Partition(ctx, 0)
		if err != nil {
			return err
		}
		b := log.Batch{Producer: log.NoProducer, Epoch: -1, Sequence: -1, BaseTime: 1, MaxTime: 1, Records: 1}
		a, err := l.Append(b.Encode(log.AppendRecord(nil, 0, 0, nil, fmt.Appendf(nil, "%s-%d", text, i), nil)))
		if err != nil {
			return err
		}
		if err := a.Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// end ends the leaderships and the session.
func (h *lateHost) end(ctx context.Context) error {
	return errors.Join(h.Close(), h.c.Close(ctx))
}

// goOn lets a stopped process go on, and returns the result of its change.
func (m *machine) goOn(l late, p *child.Process) string {
	m.T.Helper()
	if err := os.WriteFile(filepath.Join(l.Dir, "go"), nil, 0o600); err != nil {
		m.T.Fatal(err)
	}
	if err := p.Signal(syscall.SIGCONT); err != nil {
		m.T.Fatal(err)
	}
	m.Until("the late process ends its change", func() error { _, err := os.Stat(filepath.Join(l.Dir, "done")); return err })
	b, err := os.ReadFile(filepath.Join(l.Dir, "done"))
	if err != nil {
		m.T.Fatal(err)
	}
	return string(b)
}

// stopped starts a late process and stops the process at its step.
func (m *machine) stopped(l late) *child.Process {
	m.T.Helper()
	p := child.Start(m.T, l)
	m.T.Log(p.Addr)
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		m.T.Fatal(err)
	}
	m.T.Cleanup(func() { _ = p.Signal(syscall.SIGCONT) }) // so that the process can be ended
	return p
}

func (m *machine) host(name string) *lateHost {
	m.T.Helper()
	h, err := newHost(m.T.Context(), m.Addr, name)
	if err != nil {
		m.T.Fatal(err)
	}
	return h
}

// TestLateCompaction: a gateway is stopped while it writes the file with a group's offsets anew. Another
// gateway takes over the group and commits. The first gateway goes on in a new session: it puts no older
// file into the place of the file with the later commits (rule 25).
func TestLateCompaction(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	for i, step := range []string{"create", "rename"} {
		path := fmt.Sprint("/s", i)
		m.Must("stream", "create", path, "--partitions", "1")
		l := late{Addr: m.Addr, Stream: path, Dir: t.TempDir(), Change: step, Name: ".new"}
		p := m.stopped(l)
		next := m.host("next")
		// With so many partitions the next gateway does not write the file anew.
		others := []int32{1, 2, 3, 4, 5, 6, 7, 8, 9}
		m.Until("another gateway coordinates the group", func() error { return next.commits(ctx, path, 1000, 1, others...) })
		t.Logf("%s: %s", step, m.goOn(l, p))
		const last = 1003
		if err := next.commits(ctx, path, 1001, last-1000); err != nil {
			t.Fatal(err)
		}
		if err := next.end(ctx); err != nil {
			t.Fatal(err)
		}
		p.Kill()
		reader := m.host("reader")
		var have []offsets.Commit
		m.Until("a third gateway coordinates the group", func() error {
			o, err := reader.offsets(ctx, path)
			if err == nil {
				have = o.All()
			}
			return err
		})
		if len(have) != 1+len(others) || have[0].Offset != last {
			t.Errorf("DATA: late %s: the group has committed %d, and the file says %d, of %d partitions", step, last, have[0].Offset, len(have))
		}
		if err := reader.end(ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLateAppend: a gateway is stopped before a write to a partition. Another gateway becomes the leader of the
// partition and appends. The first gateway writes later, in a new session: the write changes nothing
// (rule 25).
func TestLateAppend(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	const path, appends = "/s", 3
	m.Must("stream", "create", path, "--partitions", "1")
	l := late{Addr: m.Addr, Stream: path, Dir: t.TempDir(), Change: "write", Name: ".seg", Appends: appends}
	p := m.stopped(l)
	next := m.host("next")
	m.Until("another gateway leads the partition", func() error { return next.appendAll(ctx, path, "next", 1) })
	if got := m.goOn(l, p); got == "<nil>" {
		t.Error("DATA: an append of a former leader is acknowledged")
	} else {
		t.Log(got)
	}
	if err := next.end(ctx); err != nil {
		t.Fatal(err)
	}
	var values []string
	reader := m.host("reader")
	m.Until("a third gateway leads the partition", func() error {
		s, err := reader.Stream(ctx, nil, path, stream.MayRead)
		if err != nil {
			return err
		}
		part, err := s.Partition(ctx, 0)
		if err != nil {
			return err
		}
		values = nil
		for at := int64(0); ; {
			b, err := part.Read(at, 1<<20)
			if err != nil || len(b) == 0 {
				return err
			}
			for len(b) > 0 {
				batch, err := log.Parse(b, len(b))
				if err != nil {
					return err
				}
				if err := batch.Each(b[log.HeaderSize:batch.Size], func(r log.Record) error {
					values = append(values, string(r.Value))
					return nil
				}); err != nil {
					return err
				}
				b, at = b[batch.Size:], batch.Next()
			}
		}
	})
	if got := strings.Join(values, " "); got != "late-0 late-1 next-0" {
		t.Errorf("DATA: the partition has the records %s", got)
	}
	if err := reader.end(ctx); err != nil {
		t.Fatal(err)
	}
}

// TestLateCommit: the coordination of a group moves to another gateway and back. What a request of the first
// epoch has in its hands, and what the request asks for later, commits nothing: the group's later offsets
// stay.
func TestLateCommit(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	const path = "/s"
	m.Must("stream", "create", path, "--partitions", "1")
	var turn atomic.Int32 // the gateway that is to coordinate
	turn.Store(1)
	var wg sync.WaitGroup
	running, stop := context.WithCancel(ctx)
	defer wg.Wait()
	defer stop()
	hosts := map[int32]*lateHost{}
	for n := int32(1); n <= 2; n++ {
		h := m.host(fmt.Sprint("gateway", n))
		h.Address = fmt.Sprintf("%d@127.0.0.1:%d", n, n)
		h.Gateways = func() (placement.Gateway, []placement.Gateway) {
			return placement.Gateway{Number: n}, []placement.Gateway{{Number: turn.Load()}}
		}
		wg.Go(func() { h.Run(running) })
		hosts[n] = h
	}
	commit := func(by int32, offset int) {
		t.Helper()
		turn.Store(by)
		m.Until(fmt.Sprint("gateway ", by, " commits"), func() error { return hosts[by].commits(ctx, path, offset, 1) })
	}
	commit(1, 100)
	epoch, err := hosts[1].Coordinate(ctx, lateGroup)
	if err != nil {
		t.Fatal(err)
	}
	first := stream.Coordination{Group: lateGroup, Epoch: epoch}
	s, err := hosts[1].Stream(ctx, nil, path, stream.MayRead)
	if err != nil {
		t.Fatal(err)
	}
	early, err := s.Offsets(ctx, first, true)
	if err != nil {
		t.Fatal(err)
	}
	commit(2, 200)
	commit(1, 300)
	late := []offsets.Commit{{Offset: 101, Epoch: -1}}
	if err := early.Commit(late); err == nil {
		t.Error("DATA: the offsets of a coordination that has ended take a commit")
	}
	if o, err := s.Offsets(ctx, first, true); !errors.Is(err, meta.NotOwner) {
		t.Errorf("DATA: a request of an epoch that is over gets the offsets: %v", err)
		if o != nil {
			t.Logf("a late commit: %v", o.Commit(late))
		}
	}
	turn.Store(2)
	m.Until("gateway 2 coordinates the group", func() error {
		o, err := hosts[2].offsets(ctx, path)
		if err != nil {
			return err
		}
		if all := o.All(); len(all) != 1 || all[0].Offset != 300 {
			t.Errorf("DATA: the group has committed 300, and the file says %d", all[0].Offset)
		}
		return nil
	})
	stop()
	for _, h := range hosts {
		if err := h.end(ctx); err != nil {
			t.Error(err)
		}
	}
}
