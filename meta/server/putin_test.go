package server

import (
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// holding has the peer answer recalls later.
func (p *peer) holding() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = true
}

// asked waits until at least the given number of recalls came since holding, all of which wait: a
// new connection gets unanswered recalls again.
func (p *peer) asked(t *testing.T, name string, n int) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		held := len(p.held)
		p.mu.Unlock()
		if held >= n {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s was not asked for the file", name)
		}
	}
}

// answer answers the waiting recalls.
func (p *peer) answer() {
	p.mu.Lock()
	held := p.held
	p.held, p.hold = nil, false
	p.mu.Unlock()
	for _, drop := range held {
		drop()
	}
}

// TestWhoGivesUpPutsIn: a session that is asked to give a file up puts in the pages that its
// kernel still had of the file, though other sessions that cache the file have not answered, and
// the asking session caches the file, too. No session's cache outlives the recall: all are asked
// in the same round, and the lease is granted when all have answered. Control: meta-noputin.
func TestWhoGivesUpPutsIn(t *testing.T) {
	t.Parallel()
	for _, exclusive := range []bool{false, true} {
		s := newSite(t)
		a, b, c := s.dial("a"), s.dial("b"), s.dial("c")
		ino := a.create(t, "x").Attr.Ino
		want := meta.LeaseExclusive
		if !exclusive {
			want = meta.LeaseShared
			for _, p := range []*peer{b, c} {
				p.do(t, &meta.Open{Ino: ino}, meta.LeaseShared)
			}
		}
		if a.mode(ino) != want {
			t.Fatalf("a has lease %v, not %v", a.mode(ino), want)
		}
		for _, p := range []*peer{a, b, c} {
			p.holding()
		}
		granted := make(chan error, 1)
		go func() {
			_, err := c.Do(t.Context(), 1, meta.OpID{}, &meta.Open{Ino: ino}, meta.LeaseExclusive)
			granted <- err
		}()
		a.asked(t, "a", 1)
		if !exclusive {
			b.asked(t, "b", 1)
		}
		const text = "a page of a mapping"
		if _, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.Write{Ino: ino, Inline: true, Data: []byte(text), Size: uint64(len(text)), Synced: true}, meta.LeaseNone); err != nil {
			t.Fatalf("DATA: what a still had of the file is lost: %v", err)
		}
		if !exclusive {
			c.asked(t, "c, which caches what was there before,", 1)
		}
		askedAll := []*peer{a}
		if !exclusive {
			askedAll = []*peer{a, b, c}
		}
		for _, p := range askedAll {
			select {
			case err := <-granted:
				t.Fatalf("c was granted the file (%v) while a session that was asked for it had not answered", err)
			default:
			}
			p.answer()
		}
		c.answer() // nothing is held back any more
		if err := <-granted; err != nil {
			t.Fatal(err)
		}
		if r := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone); r.Attr.Size != uint64(len(text)) {
			t.Fatalf("DATA: the file has %d bytes, not the %d that a put in", r.Attr.Size, len(text))
		}
		if a.mode(ino) != meta.LeaseNone {
			t.Fatalf("a has lease %v of what it gave up", a.mode(ino))
		}
	}
}
