package penstock

import (
	"errors"
	"testing"

	"penstock.io/penstock/meta"
)

// TestLostChangesAreTold: answered changes that are lost with the session are reported
// once to the callers that sync: for a directory and the volume by fsync and syncfs, for
// an open file by its own fsync.
func TestLostChangesAreTold(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{})
	ino := create(t, v, "f")
	gone := errors.New("the session expired")
	c.Lost(v.id, []meta.Ino{meta.RootIno, ino}, gone)
	for _, sync := range []struct {
		what string
		do   func() error
	}{
		{"fsync of the directory", func() error { return v.FsyncDir(t.Context(), meta.RootIno) }},
		{"fsync of the file", func() error { return v.Fsync(t.Context(), ino, false) }},
		{"syncfs", func() error { return v.SyncAll(t.Context()) }},
	} {
		if err := sync.do(); !errors.Is(err, meta.IO) || !errors.Is(err, gone) {
			t.Errorf("%s after a loss: %v", sync.what, err)
		}
		if err := sync.do(); err != nil {
			t.Errorf("%s once more: %v", sync.what, err)
		}
	}
}
