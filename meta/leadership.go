package meta

// A session may lead a file: while a session leads, the owner accepts content of the file from
// that session alone. A leadership ends when the leader gives it up, and with the session.

// Lead makes the calling session the leader of a regular file without an open end. Result.Off
// is the epoch of the leadership: greater than the epoch of every earlier leadership in the
// volume, also after a rollback. The owner ends an open end first, and answers when the
// journal has the epoch. A session that leads the file already leads it anew, in a later epoch:
// the session may have lost the answer to an earlier Lead. Errors: Busy (another session leads
// the file), Invalid (Address is longer than MaxLeaderAddress, or the inode is no regular file).
type Lead struct {
	Ino Ino
	// Address is told to everybody who asks for the leader.
	Address string
}

// MaxLeaderAddress bounds Lead.Address in bytes.
const MaxLeaderAddress = 255

// EndLead ends the leadership of an epoch, if the calling session still has it. A zero Epoch
// means the calling session's leadership of the file, whatever its epoch.
type EndLead struct {
	Ino   Ino
	Epoch uint64
}

// Leader reads the epoch of a file's leader (Result.Off) and the address (Result.Data). Errors:
// NotFound (no session leads the file).
type Leader struct{ Ino Ino }

// Led is a condition of a change of names or of a size: the calling session leads the file Ino,
// and the leadership's epoch is Epoch. The owner checks the condition where the owner makes the
// change, and refuses the change otherwise. So a leader whose leadership has ended changes
// nothing, however late its request arrives. The zero Led is no condition. Errors: Fenced.
type Led struct {
	Ino   Ino
	Epoch uint64
}

func (*Lead) Code() OpCode    { return OpLead }
func (*EndLead) Code() OpCode { return OpEndLead }
func (*Leader) Code() OpCode  { return OpLeader }
