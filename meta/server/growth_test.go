package server

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
	"penstock.io/penstock/test/operator"
)

// grower is a peer that answers the question for its file's length when the test allows.
type grower struct {
	*peer
	asked chan func(meta.Growth)
}

func (g *grower) Growth(_ meta.VolumeID, _ meta.Ino, done func(meta.Growth)) { g.asked <- done }

func (s *site) grower(name string) *grower {
	g := &grower{&peer{leases: map[meta.Ino]meta.LeaseMode{}, Operator: operator.New(s.t, "unix:"+s.addr, nil)}, make(chan func(meta.Growth), 100)}
	g.Session = s.session(name, g)
	return g
}

// question waits for a question of the owner.
func (g *grower) question(t *testing.T) func(meta.Growth) {
	t.Helper()
	select {
	case done := <-g.asked:
		return done
	case <-time.After(60 * time.Second):
		t.Fatal("nobody asked the writer")
		return nil
	}
}

// Other sessions read a file to which a session appends without a recall. Requests that come
// while the owner asks the writer share the next question, and may use only the answer to the
// next question.
func TestReadersShareQuestions(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	chunks := s.chunkServer(1)
	w, r := s.grower("writer"), s.dial("reader")
	ino, _ := w.openEnd(t, chunks)
	change := r.stateOf(t, w, ino)

	sizes := make(chan uint64, 100)
	ask := func(n int) *sync.WaitGroup {
		var wg sync.WaitGroup
		for range n {
			wg.Go(func() {
				res, err := r.Do(t.Context(), 1, meta.OpID{}, &meta.Open{Ino: ino}, meta.LeaseShared)
				if err != nil {
					t.Error(err)
					return
				}
				if e := res.Extents; len(e) != 1 || e[0].End() != res.Attr.Size || res.Attr.Flags&meta.FlagFollowed == 0 {
					t.Errorf("%+v, %+v", res.Attr, e)
				}
				sizes <- res.Attr.Size
			})
		}
		return &wg
	}
	first := ask(1)
	done := w.question(t)
	others := ask(20)
	time.Sleep(200 * time.Millisecond) // the requests arrive; late requests make the test weaker, not wrong
	done(meta.Growth{OK: true, Size: 600, Change: change})
	first.Wait()
	if n := <-sizes; n != 600 {
		t.Errorf("%d bytes", n)
	}
	questions := 0
	go func() { others.Wait(); close(sizes) }()
	for open := true; open; {
		select {
		case done := <-w.asked:
			questions++
			done(meta.Growth{OK: true, Size: 700, Change: change})
		case n, more := <-sizes:
			if open = more; more && n != 700 {
				t.Errorf("DATA: %d bytes were told to a reader, of an answer that was given before it asked", n)
			}
		}
	}
	if questions > 10 {
		t.Errorf("%d questions for 20 readers", questions)
	}
	w.mu.Lock()
	recalls := w.recalls
	w.mu.Unlock()
	if recalls > 0 || w.mode(ino) != meta.LeaseExclusive || r.mode(ino) != meta.LeaseNone {
		t.Errorf("%d recalls; the writer has %v, the reader %v", recalls, w.mode(ino), r.mode(ino))
	}
}

// A writer's answer about an older state of the file counts no more, and a writer that can't
// answer gives its lease back.
func TestOldGrowthIsNotTold(t *testing.T) {
	for _, g := range []meta.Growth{{}, {OK: true, Size: 900, Change: 1 << 40}, {OK: true, Size: 100}} {
		t.Run(fmt.Sprintf("%+v", g), func(t *testing.T) {
			s := newSite(t)
			chunks := s.chunkServer(1)
			w, r := s.grower("writer"), s.dial("reader")
			ino, _ := w.openEnd(t, chunks)
			if g.Change == 0 {
				g.Change = r.stateOf(t, w, ino)
			}
			stop := make(chan struct{})
			defer close(stop)
			go func() {
				for {
					select {
					case done := <-w.asked:
						done(g)
					case <-stop:
						return
					}
				}
			}()
			a := r.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseShared).Attr
			if a.Size != 500 || a.Flags&meta.FlagFollowed != 0 {
				t.Errorf("DATA: %+v", a)
			}
			if w.mode(ino) > meta.LeaseShared {
				t.Errorf("the writer has %v still", w.mode(ino))
			}
		})
	}
}

// stateOf returns the change counter of an inode, as its writer sees the inode.
func (p *peer) stateOf(t *testing.T, w *grower, ino meta.Ino) uint64 {
	t.Helper()
	return w.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone).Attr.Change
}

// A request that comes after the answer to a question and before the next question shares the
// next question: of two questions under way, the owner would take an answer for unknown.
func TestOneQuestionAtATime(t *testing.T) {
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	go io.Copy(io.Discard, far)
	const ino = meta.Ino(7)
	writer := &session{send: wire.NewSender(near, wire.Version, nil)}
	l := &leases{questions: map[meta.Ino]*growthQuestion{}}
	var first, waits, late growthWait
	l.question(&first, 1, ino, writer)
	l.question(&waits, 1, ino, writer)
	l.answerGrowth(writer, first.question.number, &wire.GrowthRe{Volume: 1, Ino: ino})
	l.question(&late, 1, ino, writer) // before the waiting request goes on
	l.question(&waits, 1, ino, writer)
	if late.question != waits.question {
		t.Error("two questions about a file are under way")
	}
	for _, w := range []*growthWait{&late, &waits} {
		l.answerGrowth(writer, w.question.number, &wire.GrowthRe{Volume: 1, Ino: ino, Growth: meta.Growth{OK: true}})
		if !w.question.ended() || !w.question.answer.OK {
			t.Error("the answer to a question was not taken: the request waits until the lease is recalled")
		}
		w.question.timer.Stop()
	}
}
