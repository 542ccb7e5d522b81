package fuse

import (
	"log/slog"
	"sync"

	"penstock.io/penstock/meta"
)

// The inode number shown to programs, st_ino and d_ino, is not the node id. A node id takes
// all 64 bits, and many programs store inode numbers as floating-point numbers (all of
// JavaScript does), with 53 bits. If two numbers differ only in the lost bits, such a program
// takes two files for names of one file.
//
//	st_ino       52 51           32 31                          0
//	            +-+----------------+-----------------------------+
//	            |0|     volume     |            inode            |    inode below 2^32
//	            +-+----------------+-----------------------------+
//	            |1|      slot      |   low 32 bits of the inode  |    all others
//	            +-+----------------+-----------------------------+
//
// A number of the first form is a pure function of volume and inode, the same on every mount,
// for ever. A number of the second form needs a slot. The mount gives a slot to a pair of
// volume and upper 12 bits of the inode when the first such inode is shown. A volume has
// inodes of the second form after four billion new inodes; so has every view of a snapshot
// with a junction (inode numbers from the top). A hash chooses the slot, so that mounts agree
// on the slot unless two pairs have the same hash.
const (
	lowBits  = 32
	slotBits = 20
)

// inumbers gives inode numbers. The zero value is ready.
type inumbers struct {
	log *slog.Logger

	mu    sync.RWMutex
	slots map[uint32]uint32 // by volume<<12 | upper bits of the inode
	taken map[uint32]bool   // the values of slots
	said  bool              // the lack of a free slot was logged
}

// of returns the inode number shown to programs.
func (n *inumbers) of(v meta.VolumeID, ino meta.Ino) uint64 {
	if ino>>lowBits == 0 {
		return uint64(v)<<lowBits | uint64(ino)
	}
	low := uint64(ino) & (1<<lowBits - 1)
	return 1<<(slotBits+lowBits) | uint64(n.slot(uint32(v)<<(meta.InoBits-lowBits)|uint32(ino>>lowBits)))<<lowBits | low
}

func (n *inumbers) slot(pair uint32) uint32 {
	n.mu.RLock()
	s, ok := n.slots[pair]
	n.mu.RUnlock()
	if ok {
		return s
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if s, ok := n.slots[pair]; ok {
		return s
	}
	if n.slots == nil {
		n.slots, n.taken = make(map[uint32]uint32), make(map[uint32]bool)
	}
	s = firstSlot(pair)
	if len(n.slots) == 1<<slotBits {
		if !n.said && n.log != nil {
			n.said = true
			n.log.Error("the mount has used up its inode numbers, and some of its files now share a number: mount volumes separately", "slots", len(n.slots))
		}
		return s
	}
	for n.taken[s] {
		s = (s + 1) % (1 << slotBits)
	}
	n.slots[pair], n.taken[s] = s, true
	return s
}

// firstSlot returns the slot where the search for a free slot begins. Inode numbers depend on
// firstSlot, so the function must never change.
func firstSlot(pair uint32) uint32 {
	x := uint64(pair) * 0x9e3779b97f4a7c15
	return uint32(x >> (64 - slotBits))
}
