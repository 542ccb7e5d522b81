package penstock

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync/atomic"

	"penstock.io/penstock/meta"
)

// Unsynced describes what programs wrote to a volume and is not durable yet.
type Unsynced struct {
	Volume meta.VolumeID `json:"volume"`
	Name   string        `json:"name"`
	Files  int           `json:"files"` // files with uncommitted bytes, size or times
	Bytes  int64         `json:"bytes"`
	// Changes: names or attributes were changed, and this client does not know whether the
	// changes are journaled.
	Changes bool `json:"changes,omitempty"`
	// Why is the error of the last attempt to make the bytes durable; "": no attempt failed.
	Why string `json:"why,omitempty"`
}

// Empty reports that no bytes are waiting; Changes may still be set.
func (u *Unsynced) Empty() bool { return u.Files == 0 && u.Bytes == 0 }

// UnsyncedFile is a file with bytes that are not durable.
type UnsyncedFile struct {
	Ino   meta.Ino `json:"ino"`
	Bytes int64    `json:"bytes"`
}

// lastFailure is the error of the last attempt of a volume's write-back.
type lastFailure struct{ text atomic.Pointer[string] }

// note takes in how a try ended.
func (l *lastFailure) note(err error) {
	if err == nil {
		l.text.Store(nil)
		return
	}
	s := strings.Join(strings.Fields(err.Error()), " ")
	l.text.Store(&s)
}

func (l *lastFailure) String() string {
	if s := l.text.Load(); s != nil {
		return *s
	}
	return ""
}

// Unsynced returns what is not durable in the volume.
func (v *Volume) Unsynced() Unsynced {
	u := Unsynced{Volume: v.id, Name: v.name, Why: v.back.failure.String()}
	if v.frozen() {
		return u
	}
	u.Bytes = v.back.dirtyBytes.Load()
	v.back.mu.Lock()
	u.Files = len(v.back.dirty)
	v.back.mu.Unlock()
	if v.owner.durable.Load() < v.owner.mutations.Load() {
		s, ok := v.c.sess.(interface{ Durable(meta.VolumeID) bool })
		u.Changes = !ok || !s.Durable(v.id)
	}
	return u
}

// UnsyncedFiles lists at most most files with bytes that are not durable, the files with the
// most bytes first.
func (v *Volume) UnsyncedFiles(most int) []UnsyncedFile {
	var l []UnsyncedFile
	for _, in := range v.back.dirtyInodes() {
		in.mu.Lock()
		if f := in.file; f != nil {
			l = append(l, UnsyncedFile{in.ino, f.uncommitted})
		}
		in.mu.Unlock()
		in.put()
	}
	slices.SortFunc(l, func(a, b UnsyncedFile) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Ino, b.Ino))
	})
	return l[:min(len(l), most)]
}

// OpenVolumes returns the open volumes and views of the client.
func (c *Client) OpenVolumes() []*Volume { return c.openVolumes() }

// Unsynced lists the volumes of which something is not durable.
func (c *Client) Unsynced() []Unsynced {
	var l []Unsynced
	for _, v := range c.openVolumes() {
		if u := v.Unsynced(); !u.Empty() || u.Changes {
			l = append(l, u)
		}
	}
	slices.SortFunc(l, func(a, b Unsynced) int { return cmp.Compare(a.Volume, b.Volume) })
	return l
}

// errAbandoned is the cause of a loss of bytes that an operator gave up.
var errAbandoned = errors.New("an operator gave it up before it was durable")

// Abandon discards all bytes of the volume that are not durable, and returns their number.
// Only an operator requests it. Programs with a discarded file open get EIO from the next
// write, fsync and close.
func (v *Volume) Abandon() Unsynced {
	var lost Unsynced
	for _, in := range v.back.dirtyInodes() {
		if n, ok := v.back.loseDirty(in, meta.E("write back", meta.IO, v.subject(in.ino), errAbandoned)); ok {
			lost.Files++
			lost.Bytes += n
		}
		in.put()
	}
	lost.Volume, lost.Name = v.id, v.name
	if s, ok := v.c.sess.(interface {
		GaveUp(v meta.VolumeID, files, bytes uint64)
	}); ok && !lost.Empty() {
		s.GaveUp(v.id, uint64(lost.Files), uint64(lost.Bytes))
	}
	lost.Changes = v.owner.durable.Swap(v.owner.mutations.Load()) < v.owner.mutations.Load()
	return lost
}

// dirtyInodes returns the inodes that wait to be flushed, each pinned.
func (wb *writeBack) dirtyInodes() []*inode {
	wb.mu.Lock()
	defer wb.mu.Unlock()
	l := make([]*inode, 0, len(wb.dirty))
	for in := range wb.dirty {
		in.pins.Add(1)
		l = append(l, in)
	}
	return l
}
