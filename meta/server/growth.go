package server

import (
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// How a session reads a file to which another session appends.
//
// The writer has the exclusive lease, and the journal has an open-ended extent in a chunk to
// which the writer alone appends. A recall would close the extent, and the writer's next syncs
// would go through the journal. So the owner does not recall the lease, but asks the writer how
// long the file is. The writer first syncs every byte whose write has returned, so that no
// reader sees bytes that could still vanish: the seal of the chunk keeps synced bytes. The
// owner answers the reader with the journaled attributes and extents, as far as the writer
// told. The reader gets no lease on the file.
//
// An answer is right only for requests that came before the question: the writer may have
// appended since. So requests that come while a question is under way share the next question,
// and any number of readers cost a writer one question at a time.
//
// If the writer can't answer, or does not append any more, the lease is recalled.

const (
	// growthWaits bounds the time for an answer; then the lease is recalled.
	growthWaits = 5 * time.Second
	// growthTries bounds the questions for one request. A question is repeated if the file's
	// attributes changed meanwhile.
	growthTries = 5
)

// growthQuestion is one question to a writer. The owner's mu guards all fields but over.
type growthQuestion struct {
	to     *session // nil: not sent yet
	number uint64
	answer meta.Growth
	over   chan struct{} // closed at the end: answered, or given up
	once   sync.Once
	timer  *time.Timer
	next   *growthQuestion // of the requests that came since; nil: none came
}

// end ends the question. Without an answer before, the lease will be recalled.
func (q *growthQuestion) end() {
	q.once.Do(func() { close(q.over) })
}

func (q *growthQuestion) ended() bool {
	select {
	case <-q.over:
		return true
	default:
		return false
	}
}

// growthWait is the state of a request that waits for a question.
type growthWait struct {
	question *growthQuestion // whose answer the request needs; nil: not chosen yet
	tries    int
}

// follow completes the reply to a read of a file to which another session appends. It returns
// the channel to wait for, or whether the reply is complete. If both are unset, the lease must
// be recalled, or no other session has an exclusive lease. The caller holds the owner's mu.
func (l *leases) follow(s *session, k *ticket, vol meta.VolumeID, c *wire.Call, re *wire.Reply) (done bool, wait <-chan struct{}) {
	a, w := &re.Result.Attr, &k.growth
	if w.tries >= growthTries || a.Flags&meta.FlagOpenEnded == 0 || re.Result.Volume != 0 || !mayFollow(c) {
		return false, nil
	}
	writer := l.writer(s, a.Ino)
	if writer == nil || isAway(writer) {
		return false, nil
	}
	if q := w.question; q != nil && q.to != nil && q.ended() {
		if !q.answer.OK {
			w.tries = growthTries
			return false, nil
		}
		if q.to == writer && q.answer.Change == a.Change && q.answer.Size >= a.Size {
			grow(&re.Result, &q.answer)
			return true, nil
		}
		w.question = nil
		w.tries++
	}
	return false, l.question(w, vol, a.Ino, writer)
}

// question chooses the question that a request needs, and sends the question if it is due. It
// returns the channel to wait for.
func (l *leases) question(w *growthWait, vol meta.VolumeID, ino meta.Ino, writer *session) <-chan struct{} {
	last := l.questions[ino]
	if w.question == nil {
		if last != nil && !last.ended() {
			// The writer may have looked at the file before this request came.
			if last.next == nil {
				last.next = &growthQuestion{over: make(chan struct{})}
			}
			w.question = last.next
			return last.over
		}
		if last != nil && last.next != nil && last.next.to == nil {
			w.question = last.next // its requests have not sent it yet: only one may be under way
		} else {
			w.question = &growthQuestion{over: make(chan struct{})}
		}
	}
	q := w.question
	if q.to == nil {
		l.asked++
		q.to, q.number = writer, l.asked
		q.timer = time.AfterFunc(growthWaits, q.end)
		l.questions[ino] = q
		if !writer.enqueue(q.number, &wire.Growth{Volume: vol, Ino: ino}) {
			q.end()
		}
	}
	return q.over
}

// answerGrowth takes a writer's answer to a question. The caller holds the owner's mu.
func (l *leases) answerGrowth(s *session, number uint64, m *wire.GrowthRe) {
	q := l.questions[m.Ino]
	if q == nil || q.number != number || q.to != s || q.ended() {
		return
	}
	q.answer = m.Growth
	q.timer.Stop()
	q.end()
	if q.next == nil {
		delete(l.questions, m.Ino)
	}
}

// writer returns the session other than s with the exclusive lease on an inode; nil: none.
func (l *leases) writer(s *session, ino meta.Ino) *session {
	if !l.ExclusiveElsewhere(s, ino) {
		return nil
	}
	for _, h := range l.Holders(ino) {
		if h != s && l.Mode(h, ino) == meta.LeaseExclusive {
			return h
		}
	}
	return nil
}

// mayFollow reports whether the caller can use an answer without a lease.
func mayFollow(c *wire.Call) bool {
	switch m := c.Op.(type) {
	case *meta.GetAttr, *meta.Lookup:
		return true
	case *meta.Open:
		return c.Want <= meta.LeaseShared && !m.Cached
	}
	return false
}

// readsXattr reports whether an operation reads extended attributes only.
func readsXattr(op meta.Op) bool {
	switch op.(type) {
	case *meta.GetXattr, *meta.ListXattr:
		return true
	}
	return false
}

// grow extends a result about a file to what the writer told.
func grow(res *meta.Result, g *meta.Growth) {
	a := &res.Attr
	a.Blocks += g.Size - a.Size
	a.Size = g.Size
	a.Mtime, a.Ctime = g.Mtime, max(a.Ctime, g.Ctime)
	a.Flags |= meta.FlagFollowed
	if n := len(res.Extents); n > 0 && res.Extents[n-1].OpenEnded {
		e := &res.Extents[n-1]
		e.Len = max(e.Len, g.Size-e.Off)
	}
}
