package server

import (
	"fmt"
	"time"

	"penstock.io/penstock/meta"
)

// A disk is never used up to its last block: etcd ends the process when it
// can't write, and what was answered early must still reach the journal. So
// changes are refused while there is room left for those before them.
const (
	// roomSoft is the free space below which only changes that free something
	// are taken, an eighth of a small disk; at a quarter of it none is.
	roomSoft  = 64 << 20
	roomEvery = 50 * time.Millisecond
)

// shortage is why changes are refused.
type shortage struct {
	err  error
	hard bool // even those that free something
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
		return // whoever writes there finds out
	}
	soft := min(roomSoft, total/8)
	s.roomless.look(free, soft)
	was := s.tight.Load()
	if was != nil {
		soft += soft / 8 // not to and fro
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

// full is why an operation can't be taken for want of space, nil if it can.
// Caller holds mu.
func (o *owner) full(op meta.Op) error {
	if o.noSpace != nil {
		return o.noSpace
	}
	t := o.srv.tight.Load()
	if t == nil || !t.hard && frees(op) {
		return nil
	}
	return t.err
}

// frees reports whether an operation gives space back, on this disk or on
// those of the chunks.
func frees(op meta.Op) bool {
	switch m := op.(type) {
	case *meta.Unlink, *meta.ReleaseOrphans, *meta.RemoveXattr, *meta.UnpinSnapshot:
		return true
	case *meta.SetAttr:
		return m.Mask&meta.SetSize != 0
	}
	return false
}
