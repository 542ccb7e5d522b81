package penstock

import (
	"sync"

	"penstock.io/penstock/meta"
)

// lostNames are inodes of a volume with possibly lost changes and without an open descriptor
// that could receive the error: mostly directories, whose opens the client does not see. Their
// next fsync returns the error.
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

// takenAll returns, once, the error of lost changes of any inode. The fsync of each inode
// still returns the inode's own error.
func (l *lostNames) takenAll() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	err := l.all
	l.all = nil
	return err
}

// Lost notes that answered, unsynced changes of inos may be gone: the session expired before
// the owner journaled the changes. A call of Expired follows. Descriptors of the inodes get
// the error at the next write, fsync or close; without a descriptor, fsync of a directory
// returns the error (rule 3). A goroutine of the session calls Lost.
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
			open := in.file != nil && in.file.users.opens > 0
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
