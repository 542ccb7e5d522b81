package server

import (
	"fmt"
	"sync/atomic"
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

// diskRoom watches the disks of journal and state.
type diskRoom struct {
	*process
	hosted   *hosted
	peers    *peers
	roomless roomless
	tight    atomic.Pointer[shortage] // nil: the disks have room
}

// roomLoop watches the disks of the journal and the state.
func (dr *diskRoom) roomLoop() {
	t := time.NewTicker(roomEvery)
	defer t.Stop()
	for {
		dr.lookForRoom()
		select {
		case <-dr.ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (dr *diskRoom) lookForRoom() {
	free, total, err := dr.cfg.Room()
	if err != nil {
		return // the next write shows the error
	}
	soft := min(roomSoft, total/8)
	dr.roomless.look(free, soft)
	was := dr.tight.Load()
	if was != nil {
		soft += soft / 8 // hysteresis
	}
	if free >= soft {
		if was != nil {
			dr.tight.Store(nil)
			dr.log.Info("the metadata disk has room again: changes are taken", "free", free)
		}
		return
	}
	hard := free < soft/4
	if was != nil && was.hard == hard {
		return
	}
	dr.log.Error("the metadata disk is nearly full: changes are refused until there is room", "free", free, "wanted", soft, "frees", !hard)
	dr.tight.Store(&shortage{hard: hard, err: meta.E("journal", meta.NoSpace, dr.cfg.Name, fmt.Errorf("%d bytes are free on the metadata disk, changes need %d", free, soft))})
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
