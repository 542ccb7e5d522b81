package penstock

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync/atomic"

	"penstock.io/penstock/meta"
)

// Unsynced is what programs were told is written to a volume and is not durable yet.
type Unsynced struct {
	Volume meta.VolumeID `json:"volume"`
	Name   string        `json:"name"`
	Files  int           `json:"files"` // with bytes, a size or times that are not committed
	Bytes  int64         `json:"bytes"`
	// Changes: names or attributes were changed of which it is not known here that the
	// journal has them.
	Changes bool `json:"changes,omitempty"`
	// Why is what the last try to make it durable failed with; "": none failed.
	Why string `json:"why,omitempty"`
}

// Empty reports that no bytes are waiting. There may be Changes.
func (u *Unsynced) Empty() bool { return u.Files == 0 && u.Bytes == 0 }

// UnsyncedFile is a file with bytes that are not durable.
type UnsyncedFile struct {
	Ino   meta.Ino `json:"ino"`
	Bytes int64    `json:"bytes"`
}

// lastFailure is what the last try of a volume's write-back failed with.
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

// Unsynced tells what of the volume is not durable.
func (v *Volume) Unsynced() Unsynced {
	u := Unsynced{Volume: v.id, Name: v.name, Why: v.failure.String()}
	if v.frozen() {
		return u
	}
	u.Bytes = v.dirtyBytes.Load()
	v.dirtyMu.Lock()
	u.Files = len(v.dirty)
	v.dirtyMu.Unlock()
	if v.durable.Load() < v.mutations.Load() {
		s, ok := v.c.sess.(interface{ Durable(meta.VolumeID) bool })
		u.Changes = !ok || !s.Durable(v.id)
	}
	return u
}

// UnsyncedFiles lists files with bytes that are not durable, those with the most first.
func (v *Volume) UnsyncedFiles(most int) []UnsyncedFile {
	var l []UnsyncedFile
	for _, in := range v.dirtyInodes() {
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

// OpenVolumes are the volumes that the client has open, and the views.
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

// errAbandoned is why bytes are lost that an operator gave up.
var errAbandoned = errors.New("an operator gave it up before it was durable")

// Abandon gives up what is not durable of the volume, and tells how much that was.
// Only an operator asks for it. Whoever has one of the files open gets EIO at the next
// write, fsync and close.
func (v *Volume) Abandon() Unsynced {
	var lost Unsynced
	for _, in := range v.dirtyInodes() {
		if n, ok := v.loseDirty(in, meta.E("write back", meta.IO, v.subject(in.ino), errAbandoned)); ok {
			lost.Files++
			lost.Bytes += n
		}
		in.put()
	}
	lost.Volume, lost.Name = v.id, v.name
	lost.Changes = v.durable.Swap(v.mutations.Load()) < v.mutations.Load()
	return lost
}

// dirtyInodes are the inodes that wait to be flushed, each pinned.
func (v *Volume) dirtyInodes() []*inode {
	v.dirtyMu.Lock()
	defer v.dirtyMu.Unlock()
	l := make([]*inode, 0, len(v.dirty))
	for in := range v.dirty {
		in.pins.Add(1)
		l = append(l, in)
	}
	return l
}
