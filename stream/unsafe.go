package stream

import (
	penstock "penstock.io/penstock"
	"penstock.io/penstock/stream/partition"
)

// Unsafe switches safety mechanisms of streams off. Only 'make controls' sets Unsafe, to prove
// that the tests detect the loss of each mechanism.
type Unsafe struct {
	NoSync    bool // records are acknowledged before they are synced
	NoEpoch   bool // a leader whose leadership has ended goes on
	NoSeal    bool // a former leader can still append to the last segment
	NoFence   bool // a former leader still changes names in its directories
	NoOffsets bool // committed offsets are in memory only
	NoRights  bool // every user may do everything with every stream
	NoEnd     bool // a login outlives the user's password
}

// leadership returns the leadership that a log is told of.
func (u Unsafe) leadership(l *penstock.Leadership) partition.Leadership {
	if u.NoEpoch {
		return endless{l}
	}
	return l
}

// endless is a leadership that never learns of its end.
type endless struct{ *penstock.Leadership }

// Done returns a channel that is never closed.
func (endless) Done() <-chan struct{} { return nil }

// Valid returns true.
func (endless) Valid() bool { return true }
