package penstock

import (
	"sync"

	"penstock.io/penstock/meta"
)

// lostNames are inodes of a volume whose changes may be gone, and whom nobody
// has open who could be told by the descriptor: directories most of all, which
// are opened without a word to us. Their next fsync tells.
type lostNames struct {
	mu   sync.Mutex
	inos map[meta.Ino]error
	all  error // for the next sync of the whole volume
}

func (l *lostNames) add(inos []meta.Ino, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.inos == nil {
		l.inos = make(map[meta.Ino]error, len(inos))
	}
	for _, ino := range inos {
		l.inos[ino] = err
	}
	l.all = err
}

// any notes a loss for the next sync of the whole volume alone.
func (l *lostNames) any(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = err
}

// taken tells of a loss once.
func (l *lostNames) taken(ino meta.Ino) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.inos[ino]
	delete(l.inos, ino)
	return err
}

// takenAll tells once that anything was lost. What each inode lost is still told
// to who syncs it.
func (l *lostNames) takenAll() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.all
	l.all = nil
	return err
}

// Lost tells that changes of these inodes which were answered, and not synced,
// may be gone: the session expired before their owner wrote them down. Expired
// follows. Whoever has one of them open hears of it at the next write, fsync or
// close; fsync of a directory tells the others (rule 3). It is called by one of
// the session's goroutines.
func (c *Client) Lost(id meta.VolumeID, inos []meta.Ino, cause error) {
	v := c.lookVolume(id)
	if v == nil {
		return
	}
	var closed []meta.Ino
	for _, ino := range inos {
		err := meta.E("sync", meta.IO, v.subject(ino), cause)
		if in := c.table.peek(id, ino); in != nil {
			in.mu.Lock()
			open := in.file != nil && in.file.opens > 0
			if open {
				in.file.fail(err, true)
			}
			in.mu.Unlock()
			in.put()
			if open {
				continue
			}
		}
		closed = append(closed, ino)
	}
	v.lost.add(closed, meta.E("sync", meta.IO, v.name, cause))
}
