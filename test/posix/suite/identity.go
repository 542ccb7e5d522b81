package suite

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// User is the identity under which a case acts: no capabilities unless UID is 0.
type User struct {
	Name   string
	UID    int
	GID    int
	Groups []int // supplementary
}

// The users of the cases need no entry in /etc/passwd. Team is a group that
// Alice and Carol have as a supplementary group and Bob has not.
const team = 30001

var (
	root  = User{Name: "root"}
	alice = User{"alice", 10001, 20001, []int{team}}
	bob   = User{"bob", 10002, 20002, nil}
	carol = User{"carol", 10003, 20003, []int{team, 20001}}
)

// As runs f with the credentials of u and restores the case's own credentials afterwards.
// The saved user id stays 0, which permits the way back; the effective capabilities are
// gone while u isn't root.
func (t *T) As(u User, f func()) {
	become(t, u)
	defer become(t, root)
	f()
}

// become uses raw system calls: those of the syscall package would change all
// threads of the process.
func become(t *T, u User) {
	const keep = ^uintptr(0)
	set := func(what string, e unix.Errno) {
		if e != 0 {
			t.Fatalf("%s as %s: %s", what, u.Name, errText(e))
		}
	}
	_, _, e := unix.RawSyscall(unix.SYS_SETRESUID, keep, 0, 0)
	set("setresuid back to root", e)
	var groups unsafe.Pointer
	list := make([]uint32, len(u.Groups))
	for i, g := range u.Groups {
		list[i] = uint32(g)
	}
	if len(list) > 0 {
		groups = unsafe.Pointer(&list[0])
	}
	_, _, e = unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(list)), uintptr(groups), 0)
	set("setgroups", e)
	_, _, e = unix.RawSyscall(unix.SYS_SETRESGID, uintptr(u.GID), uintptr(u.GID), 0)
	set("setresgid", e)
	_, _, e = unix.RawSyscall(unix.SYS_SETRESUID, uintptr(u.UID), uintptr(u.UID), 0)
	set("setresuid", e)
}

// Umask sets the umask of the case's thread.
func (t *T) Umask(mask int) { unix.Umask(mask) }

func (u User) String() string { return fmt.Sprintf("%s(%d:%d)", u.Name, u.UID, u.GID) }
