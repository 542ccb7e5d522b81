package stream

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// aclBytes makes an ACL in Linux's format.
func aclBytes(entries ...[3]uint32) []byte {
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		b = binary.LittleEndian.AppendUint16(b, uint16(e[0]))
		b = binary.LittleEndian.AppendUint16(b, uint16(e[1]))
		b = binary.LittleEndian.AppendUint32(b, e[2])
	}
	return b
}

const aclNobody = 0xffffffff // id of an entry without a name

func TestPermits(t *testing.T) {
	named := aclBytes([3]uint32{1, 7, aclNobody}, [3]uint32{aclUser, 4, 1001}, [3]uint32{aclGroupObj, 0, aclNobody}, [3]uint32{aclGroup, 2, 30}, [3]uint32{aclMask, 6, aclNobody}, [3]uint32{aclOther, 1, aclNobody})
	for _, c := range []struct {
		name     string
		uid, gid uint32
		mode     uint32
		acl      []byte
		want     Permission
		ok       bool
	}{
		{"owner", 1000, 1, 0o700, nil, MayRead | MayWrite, true},
		{"owner without bits, group and others with", 1000, 20, 0o077, nil, MayRead, false},
		{"group", 1, 20, 0o750, nil, MayRead | MaySearch, true},
		{"group without bits, others with", 1, 20, 0o707, nil, MayRead, false},
		{"others", 1, 1, 0o755, nil, MayRead | MaySearch, true},
		{"others write", 1, 1, 0o755, nil, MayWrite, false},
		{"root", 0, 0, 0, nil, MayRead | MayWrite | MaySearch, true},
		{"a named user reads", 1001, 1, 0o761, named, MayRead, true},
		{"a named user writes", 1001, 1, 0o761, named, MayWrite, false},
		{"a named group writes", 5, 30, 0o761, named, MayWrite, true},
		{"a named group searches, as others may", 5, 30, 0o761, named, MaySearch, false},
		{"others with an ACL", 5, 5, 0o761, named, MaySearch, true},
		{"a cut ACL", 1001, 1, 0o761, named[:7], MayRead, false},
	} {
		u := &User{UID: c.uid, GIDs: []uint32{c.gid}}
		if got := u.permits(&meta.Attr{UID: 1000, GID: 20, Mode: meta.TypeDir | c.mode}, c.acl, c.want); got != c.ok {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

// TestPermitsAsLinux: for random directories and users, permits says what the kernel says to a
// thread with the ids of the user.
func TestPermitsAsLinux(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can ask as other users")
	}
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	ids := []uint32{1000, 1001, 1002}
	pick := func() uint32 { return ids[rnd.IntN(len(ids))] }
	bits := func() uint32 { return rnd.Uint32N(8) }
	top := t.TempDir()
	for at := top; at != "/"; at = filepath.Dir(at) {
		if info, err := os.Stat(at); err != nil || info.Mode().Perm()&1 == 0 {
			if err := os.Chmod(at, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if filepath.Dir(at) == filepath.Clean(os.TempDir()) {
			break
		}
	}
	type dir struct {
		path string
		attr meta.Attr
		acl  []byte
	}
	var dirs []dir
	for i := range 150 {
		d := dir{path: filepath.Join(top, fmt.Sprint(i))}
		if err := os.Mkdir(d.path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(d.path, int(pick()), int(pick())); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(d.path, os.FileMode(rnd.Uint32N(0o1000))); err != nil {
			t.Fatal(err)
		}
		if i%3 > 0 {
			entries := [][3]uint32{{1, bits(), aclNobody}}
			for _, id := range ids {
				if rnd.IntN(2) == 0 {
					entries = append(entries, [3]uint32{aclUser, bits(), id})
				}
			}
			entries = append(entries, [3]uint32{aclGroupObj, bits(), aclNobody})
			for _, id := range ids {
				if rnd.IntN(2) == 0 {
					entries = append(entries, [3]uint32{aclGroup, bits(), id})
				}
			}
			entries = append(entries, [3]uint32{aclMask, bits(), aclNobody}, [3]uint32{aclOther, bits(), aclNobody})
			d.acl = aclBytes(entries...)
			if err := unix.Setxattr(d.path, aclXattr, d.acl, 0); err != nil {
				t.Fatalf("%s takes no ACL: %v", top, err)
			}
		}
		var st unix.Stat_t
		if err := unix.Stat(d.path, &st); err != nil {
			t.Fatal(err)
		}
		d.attr = meta.Attr{Mode: st.Mode, UID: st.Uid, GID: st.Gid}
		dirs = append(dirs, d)
	}
	for range 6 {
		u := &User{UID: pick(), GIDs: []uint32{pick()}}
		for range rnd.IntN(3) {
			u.GIDs = append(u.GIDs, pick())
		}
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // the thread ends with the goroutine, and its ids with it
			if err := becomeUser(u); err != nil {
				done <- err
				return
			}
			for _, d := range dirs {
				for want := MaySearch; want <= MaySearch|MayWrite|MayRead; want++ {
					err := unix.Faccessat(unix.AT_FDCWD, d.path, uint32(want), unix.AT_EACCESS)
					if got := u.permits(&d.attr, d.acl, want); got != (err == nil) {
						done <- fmt.Errorf("seed %d: user %+v wants %03b of mode %04o, owner %d:%d, ACL %x: %v, the kernel says %v", seed, *u, want, d.attr.Mode, d.attr.UID, d.attr.GID, d.acl, got, err)
						return
					}
				}
			}
			done <- nil
		}()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// becomeUser gives the thread the ids of a user, for good.
func becomeUser(u *User) error {
	groups := slices.Clone(u.GIDs)
	for _, set := range []func() error{
		func() error { return setGroups(groups) },
		func() error { return threadIDs(unix.SYS_SETRESGID, u.GIDs[0]) },
		func() error { return threadIDs(unix.SYS_SETRESUID, u.UID) },
	} {
		if err := set(); err != nil {
			return err
		}
	}
	return nil
}

// threadIDs sets the three user ids or group ids of the thread, and of no other thread.
func threadIDs(call uintptr, id uint32) error {
	if _, _, no := unix.RawSyscall(call, uintptr(id), uintptr(id), uintptr(id)); no != 0 {
		return no
	}
	return nil
}

// setGroups sets the groups of the thread, and of no other thread.
func setGroups(gids []uint32) error {
	if _, _, no := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(gids)), uintptr(unsafe.Pointer(&gids[0])), 0); no != 0 {
		return no
	}
	return nil
}
