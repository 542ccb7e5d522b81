package penstock

import (
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// In a volume with events, the owner asks in the answer to a commit (Result.Existed) for a
// message at the close of the file: consumers of the events should look at a file only then.

// closedWait is how long closed files are gathered.
const closedWait = 10 * time.Millisecond

// maxClosed bounds the files of one message.
const maxClosed = 4096

// closedList collects closed files that the owner asked for.
type closedList struct {
	v *Volume

	mu   sync.Mutex
	inos []meta.Ino
	runs bool
}

// askedLocked notes that the answer to a commit asks for the close. The caller holds in.mu.
func (l *closedList) askedLocked(f *file, r *meta.Result) {
	f.tellClosed = f.tellClosed || r.Existed
}

// closedLocked reports the close to the owner, if the owner asked and no opener here writes
// the file any more. The caller holds in.mu.
func (l *closedList) closedLocked(in *inode) {
	f := in.file
	if f == nil || !f.tellClosed || f.users.writers > 0 || f.uncommitted > 0 || f.own.ended {
		return
	}
	f.tellClosed = false
	l.mu.Lock()
	defer l.mu.Unlock()
	l.inos = append(l.inos, in.ino)
	if !l.runs {
		l.runs = true
		l.v.c.spawn(l.send)
	}
}

func (l *closedList) send() {
	v := l.v
	for {
		select {
		case <-time.After(closedWait):
		case <-v.c.ctx.Done():
			return // the end of the session says the same
		}
		l.mu.Lock()
		inos := l.inos
		l.inos = nil
		if len(inos) == 0 {
			l.runs = false
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		for len(inos) > 0 {
			n := min(len(inos), maxClosed)
			if _, _, err := v.owner.do(v.c.ctx, nil, &meta.Closed{Inos: inos[:n]}, meta.LeaseNone); err != nil && v.c.ctx.Err() == nil {
				v.c.log.Warn("the owner was not told that files were closed: their events come when this session ends", "volume", v.name, "files", n, "err", err)
			}
			inos = inos[n:]
		}
	}
}
