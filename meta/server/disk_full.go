package server

import (
	"fmt"
	"time"

	"penstock.io/penstock/meta"
)

// The server never uses a disk up to the last block: etcd exits when it can't write, and
// operations answered early must still reach the journal. So the server refuses changes while
// room is left for earlier changes.
const (
	// roomSoft is the free space below which the server takes only changes that free space; an
	// eighth of a small disk. Below a quarter of it, the server takes none.
	roomSoft  = 64 << 20
	roomEvery = 50 * time.Millisecond
)

// shortage says why changes are refused.
type shortage struct {
	err  error
	hard bool // refuse also changes that free space
}

// roomLoop watches the disks of the journal and the state.
func (s *Server) roomLoop() {
	t := time.NewTicker(roomEvery)
	defer t.Stop()
	for {
		s.lookForRoom()
		select {
		case <-s.ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (s *Server) lookForRoom() {
	free, total, err := s.cfg.Room()
	if err != nil {
		return // the next write shows the error
	}
	soft := min(roomSoft, total/8)
	s.roomless.look(free, soft)
	was := s.tight.Load()
	if was != nil {
		soft += soft / 8 // hysteresis
	}
	if free >= soft {
		if was != nil {
			s.tight.Store(nil)
			s.log.Info("the metadata disk has room again: changes are taken", "free", free)
		}
		return
	}
	hard := free < soft/4
	if was != nil && was.hard == hard {
		return
	}
	s.log.Error("the metadata disk is nearly full: changes are refused until there is room", "free", free, "wanted", soft, "frees", !hard)
	s.tight.Store(&shortage{hard: hard, err: meta.E("journal", meta.NoSpace, s.cfg.Name, fmt.Errorf("%d bytes are free on the metadata disk, changes need %d", free, soft))})
}

// frees reports whether an operation frees space, on the metadata disk or on chunk servers.
func frees(op meta.Op) bool {
	switch m := op.(type) {
	case *meta.Unlink, *meta.ReleaseOrphans, *meta.RemoveXattr, *meta.UnpinSnapshot:
		return true
	case *meta.SetAttr:
		return m.Mask&meta.SetSize != 0
	}
	return false
}
