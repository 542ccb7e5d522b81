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
	NoLate    bool // a commit on a former connection of a member moves committed offsets back
	// Before is called before each change of a name in a led directory ("rename", "create", "remove")
	// and before each write to a file there ("write"); may be nil. Only tests set Before: they stop the
	// process there.
	Before func(change, name string)
}

// before calls Before.
func (u *Unsafe) before(change, name string) {
	if u.Before != nil {
		u.Before(change, name)
	}
}

// watched is a file whose writes Unsafe.Before hears of.
type watched struct {
	partition.File
	unsafe *Unsafe
	name   string
}

func (f *watched) WriteAt(p []byte, off int64) (int, error) {
	f.unsafe.before("write", f.name)
	return f.File.WriteAt(p, off)
}

// watch returns the file, so that Before hears of its writes.
func (u *Unsafe) watch(f partition.File, name string) partition.File {
	if u.Before == nil {
		return f
	}
	return &watched{f, u, name}
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
