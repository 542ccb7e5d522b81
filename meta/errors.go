package meta

import (
	"errors"
	"fmt"
)

// Kind is the number of a way to fail. The numbers are part of the wire protocol and never
// change their meaning; fuse, csi and kafka each map kinds in one table. The zero Kind is no
// error.
type Kind uint16

const (
	KindOK           Kind = 0
	NotFound         Kind = 1  // ENOENT
	Exists           Kind = 2  // EEXIST
	NotDir           Kind = 3  // ENOTDIR
	IsDir            Kind = 4  // EISDIR
	NotEmpty         Kind = 5  // ENOTEMPTY
	NotPermitted     Kind = 6  // EPERM
	AccessDenied     Kind = 7  // EACCES
	Invalid          Kind = 8  // EINVAL
	NameTooLong      Kind = 9  // ENAMETOOLONG
	TooManyLinks     Kind = 10 // EMLINK
	CrossVolume      Kind = 11 // EXDEV
	NoSpace          Kind = 12 // ENOSPC
	QuotaExceeded    Kind = 13 // EDQUOT
	FileTooBig       Kind = 14 // EFBIG
	NoAttribute      Kind = 15 // ENODATA
	Range            Kind = 16 // ERANGE
	ReadOnly         Kind = 17 // EROFS
	Stale            Kind = 18 // ESTALE: the inode is gone
	Busy             Kind = 19 // EBUSY
	WouldBlock       Kind = 20 // EAGAIN
	Deadlock         Kind = 21 // EDEADLK
	NotSupported     Kind = 22 // EOPNOTSUPP
	NoSuchOffset     Kind = 23 // ENXIO: SEEK_DATA or SEEK_HOLE past the end
	TextBusy         Kind = 24 // ETXTBSY
	TooBig           Kind = 25 // E2BIG
	Loop             Kind = 26 // ELOOP
	Interrupted      Kind = 27 // EINTR
	IO               Kind = 40 // EIO: the hardware or a replica failed
	Corrupt          Kind = 41 // EIO: bytes do not match their checksum
	Fenced           Kind = 42 // an older term, fence or lease spoke
	NotOwner         Kind = 43 // ask the owner named in the subject
	SessionExpired   Kind = 44 // the session's lease expired; unsynced bytes are lost
	Unavailable      Kind = 45 // nobody can answer now; retry
	Version          Kind = 46 // this program does not implement a format or protocol version
	Protocol         Kind = 47 // a malformed frame or record
	NotSynced        Kind = 48 // the new bytes must be synced first (rule 11)
	WrongOffset      Kind = 49 // an append at an offset other than the chunk's end
	Sealed           Kind = 50 // the chunk is sealed
	NoSuchChunk      Kind = 51
	BadCapability    Kind = 52 // EACCES: missing, forged, expired or for something else
	Canceled         Kind = 53
	Again            Kind = 54 // internal: state changed underneath, run the operation again
	DirectoryInUse   Kind = 55 // another process holds the data directory
	NoSuchVolume     Kind = 56
	VolumeExists     Kind = 57
	NotAttached      Kind = 58
	ResourceExceeded Kind = 59 // a bound on sizes, counts or rates was exceeded
	Ahead            Kind = 60 // a journal ends before entries that were seen earlier: the journal was set back
	NoSuchSnapshot   Kind = 61
)

var kindText = map[Kind]string{
	NotFound: "no such file or directory", Exists: "file exists", NotDir: "not a directory", IsDir: "is a directory",
	NotEmpty: "directory not empty", NotPermitted: "operation not permitted", AccessDenied: "permission denied",
	Invalid: "invalid argument", NameTooLong: "name too long", TooManyLinks: "too many links",
	CrossVolume: "crosses a volume", NoSpace: "no space left", QuotaExceeded: "quota exceeded",
	FileTooBig: "file too large", NoAttribute: "no such attribute", Range: "result too large", ReadOnly: "read-only",
	Stale: "stale file handle", Busy: "resource busy", WouldBlock: "would block", Deadlock: "deadlock avoided",
	NotSupported: "not supported", NoSuchOffset: "no such offset", TextBusy: "text file busy", TooBig: "argument too big",
	Loop: "too many symbolic links", Interrupted: "interrupted", IO: "input/output error", Corrupt: "checksum mismatch",
	Fenced: "fenced", NotOwner: "not the owner", SessionExpired: "session expired", Unavailable: "unavailable",
	Version: "unknown version", Protocol: "protocol error", NotSynced: "not synced", WrongOffset: "wrong offset",
	Sealed: "chunk is sealed", NoSuchChunk: "no such chunk", BadCapability: "capability refused", Canceled: "canceled",
	Again: "try again", DirectoryInUse: "data directory in use", NoSuchVolume: "no such volume",
	VolumeExists: "volume exists", NotAttached: "volume not attached", ResourceExceeded: "limit exceeded", Ahead: "the journal was set back",
	NoSuchSnapshot: "no such snapshot",
}

// String is the kind in words.
func (k Kind) String() string {
	if s, ok := kindText[k]; ok {
		return s
	}
	return fmt.Sprintf("error kind %d", uint16(k))
}

// Error makes a bare Kind an error, for errors.Is(err, meta.NotFound).
func (k Kind) Error() string { return k.String() }

// Error names the operation that failed, the kind of failure, the object and the cause. The
// text is for people; programs use errors.Is(err, kind) or KindOf.
type Error struct {
	Op      string // "create", "append", "journal commit"
	Kind    Kind
	Subject string // a path, an inode, a chunk, a file of the data directory
	Err     error  // the cause, or nil
}

// E makes an *Error. Cause may be nil.
func E(op string, kind Kind, subject string, cause error) *Error {
	return &Error{Op: op, Kind: kind, Subject: subject, Err: cause}
}

func (e *Error) Error() string {
	s := e.Op
	if e.Subject != "" {
		s += " " + e.Subject
	}
	if s != "" {
		s += ": "
	}
	s += e.Kind.String()
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap gives the cause.
func (e *Error) Unwrap() error { return e.Err }

// Is matches a Kind.
func (e *Error) Is(target error) bool {
	k, ok := target.(Kind)
	return ok && e.Kind == k
}

// KindOf returns the outermost kind in err's chain: KindOK for nil, IO for an error without a
// kind.
func KindOf(err error) Kind {
	if err == nil {
		return KindOK
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	var k Kind
	if errors.As(err, &k) {
		return k
	}
	return IO
}
