package mirror

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/test/program"
)

// newCluster is a metadata server and a chunk server, with a mirrored volume;
// nobody copies until the test starts a process that does.
func newCluster(t *testing.T) *machine {
	t.Helper()
	m := &machine{Rig: program.NewRig(t)}
	m.up = m.Run("meta", "--dir", filepath.Join(m.Dir, "m"))
	m.Until("the metadata server answers", func() error { _, err := m.Ctl("volume", "show", "root"); return err })
	m.Run("chunkserver", "--data", filepath.Join(m.Dir, "c"), "--cluster", m.Addr, "--topology", "/dc/r1/n1")
	m.c = m.dial()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		m.c.Close(ctx)
	})
	m.Must("volume", "create", "src")
	return m
}

// copier is a process that runs the mirrors.
func (m *machine) copier() *spawn.Process {
	m.T.Helper()
	return m.Run("mirror", "run", "--cluster", m.Addr)
}

// file makes a file of n random bytes.
func (w *writer) file(name string, n int) {
	w.t.Helper()
	e, err := w.v.Create(w.t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true})
	w.must(err)
	_, err = w.v.Write(w.t.Context(), nil, e.Attr.Ino, w.bytes(n), 0, false, false)
	w.must(err)
}

// copying waits until a round has sent some bytes of contents.
func (m *machine) copying(target string) {
	m.T.Helper()
	m.Until("something is copied", func() error {
		if r := m.mirror(target); r.Round == nil || r.Round.Sent == 0 {
			return fmt.Errorf("%+v", r.Mirror)
		}
		return nil
	})
}

// rate changes how fast a mirror copies from the next try on.
func (m *machine) rate(target, to string) {
	m.T.Helper()
	m.Must("mirror", "set", target, "--rate", to)
}

// TestPromoteDuringCopy promotes a target while a round fills the target. The target has the
// contents that its readers saw, can be written, and keeps its contents; then the target is made
// a mirror again.
func TestPromoteDuringCopy(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	src := m.volume("src")
	w := newWriter(t, src, *seed+500)
	w.steps(40)
	m.Must("mirror", "create", "src", "dst")
	m.copier()
	m.Must("mirror", "sync", "dst", "--wait")
	dst := m.volume("dst")
	old := walk(t, dst)
	w.steps(40)
	w.file("big", 12<<20)
	m.rate("dst", "512K")
	m.Must("mirror", "sync", "dst")
	m.copying("dst")
	if _, err := m.Ctl("mirror", "resync", "dst", "--discard"); err == nil {
		t.Error("a mirror that was not promoted was resynced")
	}
	m.Must("mirror", "promote", "dst", "--yes")
	if err := differ(old, walk(t, dst)); err != nil {
		t.Fatalf("DATA: promoted, it is not what its readers saw:\n%v", err)
	}
	newWriter(t, dst, *seed+501).file("mine", 10<<10)
	mine := walk(t, dst)
	if _, err := m.Ctl("mirror", "promote", "dst", "--yes"); err == nil || !strings.Contains(err.Error(), "promoted before") {
		t.Errorf("promoted twice: %v", err)
	}
	if _, err := m.Ctl("mirror", "resume", "dst"); err == nil {
		t.Error("a promoted mirror was resumed")
	}
	time.Sleep(3 * time.Second) // time enough for a process that would still fill the target
	if err := differ(mine, walk(t, dst)); err != nil {
		t.Fatalf("a promoted volume changed by itself:\n%v", err)
	}
	m.rate("dst", "0")
	m.Must("mirror", "resync", "dst", "--discard")
	m.Must("mirror", "sync", "dst", "--wait")
	r := m.mirror("dst")
	same(t, src, dst, &r.Mirror)
	if r.Last.Base == "" {
		t.Error("after the resync everything was copied again")
	}
}

// TestPromoteAgain repeats a promotion whose last step was lost: bytes written since the volume
// became writable are kept, and no process fills the volume any more.
func TestPromoteAgain(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	src := m.volume("src")
	w := newWriter(t, src, *seed+600)
	w.steps(30)
	m.Must("mirror", "create", "src", "dst")
	m.copier()
	m.Must("mirror", "sync", "dst", "--wait")
	w.file("big", 12<<20)
	m.rate("dst", "512K")
	m.Must("mirror", "sync", "dst")
	m.copying("dst")
	m.Must("mirror", "pause", "dst")
	before := m.mirror("dst")
	if before.Round == nil {
		t.Fatal("the round was over")
	}
	m.Must("mirror", "promote", "dst", "--yes")
	dst := m.volume("dst")
	newWriter(t, dst, *seed+601).file("mine", 10<<10)
	if err := dst.SyncAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	mine := walk(t, dst)
	// The record after an interrupted promotion, whose parts were done and not reported.
	mirrors, err := m.c.Mirrors()
	if err != nil {
		t.Fatal(err)
	}
	for _, state := range []meta.MirrorState{meta.MirrorPromoting, meta.MirrorPaused, meta.MirrorRunning} {
		if _, err := mirrors.Change(t.Context(), "dst", func(r *penstock.Mirror) error {
			r.State, r.Round = state, before.Round
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if _, err := m.Ctl("mirror", "resume", "dst"); err == nil {
			t.Errorf("%s: a volume that is no target was resumed", state)
		}
		if state == meta.MirrorRunning { // the copier finds by itself the targets that it must not fill
			m.Until("refused", func() error {
				if r := m.mirror("dst"); r.Error == "" {
					return errors.New("no error")
				}
				return nil
			})
		}
		m.Must("mirror", "promote", "dst", "--yes")
		if r := m.mirror("dst"); r.State != meta.MirrorPromoted || r.Round != nil {
			t.Fatalf("%s: %+v", state, r.Mirror)
		}
		if err := differ(mine, walk(t, dst)); err != nil {
			t.Fatalf("%s: promoting again changed a volume that is in use:\n%v", state, err)
		}
	}
	// A round was shown by a process that died before the record said so.
	m.rate("dst", "0")
	m.Must("mirror", "resync", "dst", "--discard")
	m.Must("mirror", "sync", "dst", "--wait")
	m.Must("mirror", "pause", "dst")
	shown := walk(t, dst)
	last := m.mirror("dst").Last
	if _, err := mirrors.Change(t.Context(), "dst", func(r *penstock.Mirror) error {
		r.Round, r.Last = r.Last, &penstock.MirrorRound{Snapshot: before.Last.Snapshot}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	m.Must("mirror", "promote", "dst", "--yes")
	if r := m.mirror("dst"); r.Last.Snapshot != last.Snapshot || r.Last.Digest != last.Digest {
		t.Errorf("promoted with %+v, readers saw %+v", r.Last, last)
	}
	if err := differ(shown, walk(t, dst)); err != nil {
		t.Fatalf("DATA: readers lost what they had seen:\n%v", err)
	}
	m.Must("mirror", "delete", "dst", "--yes")
}

// TestSourceDead promotes while the source's cluster stands still: while a round copies, and
// when a round begins.
func TestSourceDead(t *testing.T) {
	t.Parallel()
	m, far := newCluster(t), newCluster(t)
	w := newWriter(t, far.volume("src"), *seed+700)
	w.steps(30)
	m.copier()
	m.Must("mirror", "create", "src", "dst", "--source-cluster", far.Addr)
	m.Must("mirror", "sync", "dst", "--wait")
	old := walk(t, m.volume("dst"))
	stop := func(sig syscall.Signal) {
		t.Helper()
		w.must(syscall.Kill(far.up.PID(), sig))
	}
	t.Cleanup(func() { syscall.Kill(far.up.PID(), syscall.SIGCONT) })

	w.file("big", 12<<20)
	w.must(far.volume("src").SyncAll(t.Context()))
	m.rate("dst", "512K")
	m.Must("mirror", "sync", "dst")
	m.copying("dst")
	// A process that stands still keeps its connections: no peer learns anything.
	stop(syscall.SIGSTOP)
	began := time.Now()
	m.Must("mirror", "promote", "dst", "--yes")
	t.Logf("promoted in %v with a source that stands still", time.Since(began).Round(time.Millisecond))
	dst := m.volume("dst")
	if err := differ(old, walk(t, dst)); err != nil {
		t.Fatalf("DATA: promoted, it is not what its readers saw:\n%v", err)
	}
	newWriter(t, dst, *seed+701).file("mine", 1000)
	// Again a target, whose first round waits for the source from the beginning.
	m.Must("mirror", "resync", "dst", "--discard")
	if _, err := m.Ctl("mirror", "sync", "dst", "--wait", "--timeout", "1s"); err == nil || !strings.Contains(err.Error(), "no round was complete after 1s") {
		t.Errorf("who waited for a source that stands still: %v", err)
	}
	began = time.Now()
	m.Must("mirror", "promote", "dst", "--yes")
	t.Logf("promoted in %v with a source that can't be opened", time.Since(began).Round(time.Millisecond))
	if err := differ(old, walk(t, dst)); err != nil {
		t.Fatalf("DATA: promoted again, it is not what its readers saw:\n%v", err)
	}
	m.Must("mirror", "delete", "dst", "--yes", "--leave-source")
}

// held delays an operation after the operation's beginning.
type held struct{ begun, over chan struct{} }

// TestPromoteWhileWaiting promotes while a round waits: for the connection to the source,
// before the record has the round; and for the digest of a source that stands still.
func TestPromoteWhileWaiting(t *testing.T) {
	t.Parallel()
	m, far := newCluster(t), newCluster(t)
	w := newWriter(t, far.volume("src"), *seed+1100)
	w.steps(10)
	far.Must("volume", "create", "busy")
	busy := newWriter(t, far.volume("busy"), 1)
	// The copier runs in this process: it looks more often than the program does.
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	var hold atomic.Pointer[held] // the next connection
	go func() {
		ended <- penstock.RunMirrors(ctx, penstock.MirrorConfig{Client: m.dial(), Poll: 20 * time.Millisecond,
			Dial: func(ctx context.Context, at meta.MirrorSource) (*penstock.Client, error) {
				if h := hold.Swap(nil); h != nil {
					close(h.begun)
					<-h.over
				}
				return penstock.Dial(context.WithoutCancel(ctx), penstock.Config{Meta: at.Meta})
			}})
	}()
	m.Must("mirror", "create", "src", "dst", "--source-cluster", far.Addr)
	m.Must("mirror", "sync", "dst", "--wait")
	mirrors, err := m.c.Mirrors()
	w.must(err)
	m.Until("how far it is behind is known", func() error { // which connects, too
		if r, err := mirrors.Find(ctx, "dst"); err != nil || r.Looked.IsZero() {
			return errors.Join(err, errors.New("not yet"))
		}
		return nil
	})
	old := walk(t, m.volume("dst"))
	w.file("big", 4<<20)
	m.rate("dst", "1M")
	h := &held{make(chan struct{}), make(chan struct{})}
	hold.Store(h)
	m.Must("mirror", "sync", "dst")
	<-h.begun
	promoted := make(chan error, 1)
	go func() { _, err := m.Ctl("mirror", "promote", "dst", "--yes"); promoted <- err }()
	m.Until("the mirror is paused", func() error {
		if r, err := mirrors.Find(ctx, "dst"); err != nil || r.State == meta.MirrorRunning {
			return errors.Join(err, errors.New("not yet"))
		}
		return nil
	})
	close(h.over)
	w.must(<-promoted)
	if err := differ(old, walk(t, m.volume("dst"))); err != nil {
		t.Fatalf("DATA: promoted, it is not what its readers saw:\n%v", err)
	}
	m.rate("dst", "1G") // with any, the target's digests wait for their turn
	m.Must("mirror", "resync", "dst", "--discard")
	m.Must("mirror", "sync", "dst", "--wait")

	t.Cleanup(func() { syscall.Kill(far.up.PID(), syscall.SIGCONT) })
	for try := 0; ; try++ {
		if try == 5 {
			t.Fatal("each time the digest was there too soon")
		}
		old := walk(t, m.volume("dst"))
		// A server computes one digest at a time, at 64 MiB a second: another volume's digest
		// comes first.
		busy.file(fmt.Sprint(try), 96<<20)
		w.must(busy.v.SyncAll(ctx))
		w.file(fmt.Sprint("a", try), 10<<10)
		_, err := far.operator().TakeSnapshot(ctx, busy.v.ID(), fmt.Sprint(try))
		w.must(err)
		m.Must("mirror", "sync", "dst")
		var r penstock.Mirror
		m.Until("it is checked", func() error {
			if r, err = mirrors.Find(ctx, "dst"); err == nil && r.Heard != r.Asked || r.Round != nil && r.Round.Copied.IsZero() {
				err = errors.New("not yet")
			}
			return err
		})
		w.must(syscall.Kill(far.up.PID(), syscall.SIGSTOP))
		began := time.Now()
		if r, err = mirrors.Find(ctx, "dst"); err != nil {
			t.Fatal(err)
		} else if r.Round == nil { // complete
			w.must(syscall.Kill(far.up.PID(), syscall.SIGCONT))
			continue
		}
		m.Must("mirror", "promote", "dst", "--yes")
		t.Logf("try %d: promoted in %v", try, time.Since(began).Round(time.Millisecond))
		err = differ(old, walk(t, m.volume("dst")))
		if now := m.mirror("dst"); err != nil && now.Last.Snapshot != r.Last.Snapshot {
			// The digest was on its way already, and the round completed.
			w.must(syscall.Kill(far.up.PID(), syscall.SIGCONT))
			m.Must("mirror", "resync", "dst", "--discard")
			m.Must("mirror", "sync", "dst", "--wait")
			continue
		}
		if err != nil {
			t.Fatalf("DATA: promoted, it is not what its readers saw:\n%v", err)
		}
		break
	}
	w.must(syscall.Kill(far.up.PID(), syscall.SIGCONT))
	cancel()
	w.must(<-ended)
}

// TestStoppedCopier stops the copying process for longer than its session lasts. Meanwhile
// another process goes on, or the target is promoted. The first process wakes and changes
// nothing.
func TestStoppedCopier(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	src := m.volume("src")
	w := newWriter(t, src, *seed+800)
	w.steps(30)
	for i := range 40 {
		w.file(fmt.Sprint("big", i), 100<<10)
	}
	for _, target := range []string{"one", "two"} {
		m.Must("mirror", "create", "src", target)
	}
	first := m.copier()
	for _, target := range []string{"one", "two"} {
		m.Must("mirror", "sync", target, "--wait")
		m.rate(target, "256K")
	}
	old := walk(t, m.volume("two"))
	w.steps(30)
	for i := range 40 { // which a rollback leaves
		e, err := src.Lookup(t.Context(), meta.RootIno, fmt.Sprint("big", i))
		w.must(err)
		_, err = src.Write(t.Context(), nil, e.Attr.Ino, w.bytes(100<<10), 0, false, false)
		w.must(err)
	}
	for _, target := range []string{"one", "two"} {
		m.Must("mirror", "sync", target)
	}
	for _, target := range []string{"one", "two"} {
		m.copying(target)
	}
	if err := syscall.Kill(first.PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := m.mirror("one").Round.Snapshot
	m.rate("one", "0")
	m.Must("mirror", "promote", "two", "--yes") // once the session is over
	two := m.volume("two")
	if err := differ(old, walk(t, two)); err != nil {
		t.Fatalf("DATA: promoted, it is not what its readers saw:\n%v", err)
	}
	newWriter(t, two, *seed+801).file("mine", 10<<10)
	mine := walk(t, two)
	m.copier()
	m.Until("the round is completed by another", func() error {
		if r := m.mirror("one"); r.Last.Snapshot != stopped {
			return fmt.Errorf("%+v", r.Mirror)
		}
		return nil
	})
	m.Must("mirror", "sync", "one", "--wait")
	if err := syscall.Kill(first.PID(), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	for range 2 { // more rounds, beside the awakened process
		w.steps(10)
		m.Must("mirror", "sync", "one", "--wait")
		r := m.mirror("one")
		same(t, src, m.volume("one"), &r.Mirror)
		time.Sleep(1500 * time.Millisecond)
	}
	if r := m.mirror("one"); r.Round != nil || r.Error != "" {
		t.Errorf("who woke wrote its own round into the record: %+v", r.Mirror)
	}
	if err := differ(mine, walk(t, two)); err != nil {
		t.Fatalf("who woke changed a volume that was promoted meanwhile:\n%v", err)
	}
}

// TestPausedRound changes a byte that a round copied, while the round is paused: the digests
// show the change, and the byte is copied again. Rounds begin by themselves.
func TestPausedRound(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	m.Run("chunkserver", "--data", filepath.Join(m.Dir, "c2"), "--cluster", m.Addr, "--topology", "/dc/r2/n2")
	src := m.volume("src")
	w := newWriter(t, src, *seed+900)
	w.file("a", 64<<10)
	m.Until("a second rack", func() error {
		_, err := m.Ctl("mirror", "create", "src", "dst", "--topology", "/dc/r2", "--rate", "512K")
		return err
	})
	m.copier()
	m.Must("mirror", "sync", "dst", "--wait")
	w.file("b", 64<<10)
	w.file("big", 16<<20) // for longer than any command takes
	m.Must("mirror", "sync", "dst")
	m.Until("b is copied, and more", func() error {
		if r := m.mirror("dst"); r.Round == nil || r.Round.Sent < 256<<10 {
			return fmt.Errorf("%+v", r.Mirror)
		}
		return nil
	})
	m.Must("mirror", "pause", "dst")
	time.Sleep(3 * time.Second)
	if r := m.mirror("dst"); r.State != meta.MirrorPaused || r.Round == nil {
		t.Fatalf("%+v", r.Mirror)
	}
	// A session with the right to fill sees the live tree, and may change the tree.
	dst, ctx := m.volume("dst"), t.Context()
	lock := meta.Lock{Ino: meta.MirrorLock, Owner: 1, Type: meta.LockWrite, Flock: true, End: 1<<63 - 1}
	m.Until("the copier let go", func() error { return dst.SetLock(ctx, lock, false) })
	e, err := dst.Lookup(ctx, meta.RootIno, "b")
	w.must(err)
	if e.Negative || e.Attr.Size != 64<<10 {
		t.Fatalf("%+v", e)
	}
	p := make([]byte, 1)
	_, err = dst.Read(ctx, e.Attr.Ino, p, 1000)
	w.must(err)
	p[0] ^= 1
	_, err = dst.Write(ctx, nil, e.Attr.Ino, p, 1000, false, false)
	w.must(err)
	w.must(dst.Fsync(ctx, e.Attr.Ino, false))
	// A file with its source's time is not copied again. The pause may have come before the time
	// was set.
	theirs, err := src.Lookup(ctx, meta.RootIno, "b")
	w.must(err)
	_, err = dst.SetAttr(ctx, nil, meta.SetAttr{Ino: e.Attr.Ino, Mask: meta.SetMtime, Mtime: theirs.Attr.Mtime})
	w.must(err)
	w.must(dst.SyncAll(ctx))
	lock.Type = meta.LockUnlock
	w.must(dst.SetLock(ctx, lock, false))
	m.rate("dst", "0")
	m.Must("mirror", "resume", "dst")
	m.Must("mirror", "sync", "dst", "--wait")
	r := m.mirror("dst")
	same(t, src, dst, &r.Mirror)
	m.Must("mirror", "set", "dst", "--every", "1s")
	w.file("c", 1000)
	w.must(src.SyncAll(ctx))
	taken := time.Now()
	m.Until("a round begins by itself", func() error {
		if r := m.mirror("dst"); !r.Last.Taken.After(taken) {
			return errors.New("not yet")
		}
		return nil
	})
	m.Must("mirror", "pause", "dst")
	r = m.mirror("dst")
	same(t, src, dst, &r.Mirror)
}

// TestFlippedBeforeShown changes a byte on the disk after a round copied the byte and computed
// its digest, and before the round was paused: readers see nothing of this round, and the
// mirror's status gives the reason.
func TestFlippedBeforeShown(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	m.Run("chunkserver", "--data", filepath.Join(m.Dir, "c2"), "--cluster", m.Addr, "--topology", "/dc/r2/n2")
	src := m.volume("src")
	m.Must("volume", "set", "src", "--topology", "/dc/r1")
	w := newWriter(t, src, *seed+950)
	m.Until("a second rack", func() error {
		_, err := m.Ctl("mirror", "create", "src", "dst", "--topology", "/dc/r2", "--rate", "512K")
		return err
	})
	m.copier()
	m.Must("mirror", "sync", "dst", "--wait")
	shown := m.mirror("dst").Last.Snapshot
	secret := w.bytes(64 << 10)
	e, err := src.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: "b", Mode: meta.TypeRegular | 0o644})
	w.must(err)
	_, err = src.Write(t.Context(), nil, e.Attr.Ino, secret, 0, false, false)
	w.must(err)
	w.file("big", 16<<20) // for longer than any command takes
	m.Must("mirror", "sync", "dst")
	// The chunk servers' data files have the plain bytes.
	at := map[string]int64{}
	m.Until("b is on the target's disk", func() error {
		err := filepath.WalkDir(filepath.Join(m.Dir, "c2"), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || filepath.Ext(path) != ".data" {
				return nil // gone since, or the log, which readers do not see
			}
			p, err := os.ReadFile(path)
			if i := bytes.Index(p, secret[:1000]); err == nil && i >= 0 {
				at[path] = int64(i) + 100
			}
			return nil
		})
		if len(at) == 0 {
			err = errors.Join(err, errors.New("not yet"))
		}
		return err
	})
	time.Sleep(2 * time.Second) // so that its time is set, and its sum computed; a round without both is as good
	m.Must("mirror", "pause", "dst")
	if r := m.mirror("dst"); r.Round == nil || !r.Round.Copied.IsZero() {
		t.Fatalf("it is over before it was paused: %+v", r.Mirror)
	}
	for path, off := range at {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		w.must(err)
		_, err = f.WriteAt([]byte{secret[100] ^ 1}, off)
		w.must(errors.Join(err, f.Close()))
		t.Log(path, off, m.mirror("dst").Round.Sent)
	}
	m.rate("dst", "0")
	m.Must("mirror", "resume", "dst")
	m.Until("the round fails", func() error {
		r := m.mirror("dst")
		if r.Last.Snapshot != shown {
			t.Fatalf("readers see what was changed on the disk: %+v", r.Mirror)
		}
		if r.Error == "" {
			return fmt.Errorf("%+v", r.Mirror)
		}
		return nil
	})
	if r := m.mirror("dst"); r.Last.Snapshot != shown || !strings.Contains(r.Error, "digest can't be computed") {
		t.Errorf("%+v", r.Mirror)
	}
}

// TestWrongTurns: a refused command leaves nothing behind, and a command is refused if it would
// lead to another volume than the user means.
func TestWrongTurns(t *testing.T) {
	t.Parallel()
	m := newCluster(t)
	src := m.volume("src")
	w := newWriter(t, src, *seed+1000)
	w.steps(20)
	m.copier()
	// src -> b, promoted; b is written; b -> c, promoted. c can't become the source
	// of b by the record that b has from src.
	m.Must("mirror", "create", "src", "b")
	m.Must("mirror", "sync", "b", "--wait")
	m.Must("mirror", "promote", "b", "--yes")
	b := m.volume("b")
	newWriter(t, b, *seed+1001).file("mine", 10<<10)
	m.Must("mirror", "create", "b", "c")
	m.Must("mirror", "sync", "c", "--wait")
	m.Must("mirror", "promote", "c", "--yes")
	mine := walk(t, b)
	if _, err := m.Ctl("mirror", "resync", "c", "--reverse", "--discard"); err == nil || !strings.Contains(err.Error(), "mirror of its own") {
		t.Errorf("the record of another mirror was taken: %v", err)
	}
	if err := differ(mine, walk(t, b)); err != nil {
		t.Fatalf("what was refused changed a volume:\n%v", err)
	}
	m.Must("mirror", "delete", "b", "--yes")
	m.Must("mirror", "resync", "c", "--reverse", "--discard")
	m.Must("mirror", "sync", "b", "--wait")
	r := m.mirror("b")
	same(t, m.volume("c"), b, &r.Mirror)

	// Readers of a target learn nothing of the tree under the fill.
	if _, err := m.Ctl("volume", "set", "b", "--events", "on"); err == nil {
		t.Error("events of a target were switched on")
	}
	if err := m.operator().DiffSnapshots(t.Context(), b.ID(), r.Last.Snapshot, "", func(meta.Change) error { return nil }); meta.KindOf(err) != meta.ReadOnly {
		t.Errorf("a snapshot was compared with the tree that is being filled: %v", err)
	}
	events := &admin.ReadEventsRequest{Volume: admin.Numbered(b.ID())}
	if err := m.operator().API.Follow(t.Context(), events, false, func(admin.VolumeEvent) error { return nil }); meta.KindOf(err) != meta.ReadOnly {
		t.Errorf("events of a target: %v", err)
	}
	m.Must("volume", "show", "b")

	// A target that was shown, and whose record was never made to run.
	m.Must("mirror", "create", "src", "d")
	mirrors, err := m.c.Mirrors()
	w.must(err)
	_, err = mirrors.Change(t.Context(), "d", func(r *penstock.Mirror) error { r.State = meta.MirrorPaused; return nil })
	w.must(err)
	m.Must("mirror", "delete", "d", "--yes")
	m.Until("deleted", func() error { _, err := m.Ctl("volume", "delete", "d", "--yes"); return err })

	// A promoted target: its record goes before the volume, whatever is pinned.
	m.Must("mirror", "create", "src", "e")
	m.Must("mirror", "promote", "e", "--yes")
	e, err := m.operator().Snapshots(t.Context(), m.volume("e").ID())
	w.must(err)
	for _, s := range e.Snapshots {
		for _, p := range s.Pins {
			m.Must("unpin", "e@"+s.Name, "--holder", p.Holder)
		}
	}
	if _, err := m.Ctl("volume", "delete", "e", "--yes"); err == nil || !strings.Contains(err.Error(), "penstock mirror delete e") {
		t.Errorf("a volume was deleted whose mirror is still known: %v", err)
	}
	m.Must("mirror", "delete", "e", "--yes")
	m.Must("volume", "delete", "e", "--yes")
	var l []json.RawMessage
	w.must(json.Unmarshal(m.Must("mirror", "list", "--output", "json"), &l))
	if len(l) != 1 {
		t.Errorf("mirrors: %s", l)
	}
}
