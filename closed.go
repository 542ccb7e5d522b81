package penstock

import (
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// An owner whose volume has events switched on asks, with the answer to a commit
// (Result.Existed), to be told when the file is closed: only then is it worth
// looking at for those who follow the events.

// closedWait is how long closed files are gathered.
const closedWait = 10 * time.Millisecond

// maxClosed bounds the files in one message.
const maxClosed = 4096

// closedList gathers files that the owner wants to hear of.
type closedList struct {
	mu   sync.Mutex
	inos []meta.Ino
	runs bool
}

// askedLocked notes what an answer asked for. in.mu is held.
func (v *Volume) askedLocked(f *file, r *meta.Result) {
	f.tellClosed = f.tellClosed || r.Existed
}

// closedLocked tells the owner, if it wants to hear and nobody here writes the
// file any more. in.mu is held.
func (v *Volume) closedLocked(in *inode) {
	f := in.file
	if f == nil || !f.tellClosed || f.writers > 0 || f.uncommitted > 0 || f.ended {
		return
	}
	f.tellClosed = false
	c := &v.closed
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inos = append(c.inos, in.ino)
	if !c.runs {
		c.runs = true
		v.c.spawn(v.sendClosed)
	}
}

func (v *Volume) sendClosed() {
	c := &v.closed
	for {
		select {
		case <-time.After(closedWait):
		case <-v.c.ctx.Done():
			return // the session's end says it
		}
		c.mu.Lock()
		inos := c.inos
		c.inos = nil
		if len(inos) == 0 {
			c.runs = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		for len(inos) > 0 {
			n := min(len(inos), maxClosed)
			if _, _, err := v.do(v.c.ctx, nil, &meta.Closed{Inos: inos[:n]}, meta.LeaseNone); err != nil && v.c.ctx.Err() == nil {
				v.c.log.Warn("events of closed files come when this session ends", "volume", v.name, "files", n, "err", err)
			}
			inos = inos[n:]
		}
	}
}
