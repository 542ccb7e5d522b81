package suite

import (
	"fmt"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// handleCases are cases of file handles, which NFS servers and backup programs keep while
// the kernel forgets the inodes, and of mounts with mapped ids, as in pods with a
// separate user namespace.
func handleCases() []Case {
	cs := []Case{
		{"handle/ESTALE/removed", func(t *T) {
			t.File("f", "content")
			h := handleOf(t, "f")
			t.OK("unlink", unix.Unlink("f"))
			forgetInodes(t)
			_, err := openHandle(t, h)
			t.Want("open_by_handle_at", err, unix.ESTALE)
		}},
		{"handle/ok/renamed", func(t *T) {
			t.Mkdir("d")
			t.File("f", "content")
			h := handleOf(t, "f")
			t.OK("rename", unix.Rename("f", "d/g"))
			forgetInodes(t)
			fd, err := openHandle(t, h)
			t.OK("open_by_handle_at", err)
			Equal(t, "content", t.Pread(fd, 100, 0), "content")
			unix.Close(fd)
		}},
		{"handle/ok/dotdot-of-a-listed-directory", func(t *T) {
			t.Mkdir("d")
			t.Mkdir("d/e")
			_, err := os.ReadDir("d")
			t.OK("readdir", err)
			h := handleOf(t, "d/e")
			forgetInodes(t)
			fd, err := openHandle(t, h)
			t.OK("open_by_handle_at", err)
			up, err := unix.Openat(fd, "..", unix.O_RDONLY|unix.O_DIRECTORY, 0)
			t.OK("openat ..", err)
			Equal(t, "inode of ..", t.Fstat(up).Ino, t.Lstat("d").Ino)
			unix.Close(up)
			unix.Close(fd)
		}},
	}
	for _, typ := range []Type{regular, dir} {
		cs = append(cs, Case{fmt.Sprintf("handle/ok/%s-that-the-kernel-forgot", typ), func(t *T) {
			t.Mkdir("d")
			t.Make(typ, "d/x", 0o755)
			want := t.Lstat("d/x").Ino
			h := handleOf(t, "d/x")
			forgetInodes(t)
			fd, err := openHandle(t, h)
			t.OK("open_by_handle_at", err)
			Equal(t, "inode", t.Fstat(fd).Ino, want)
			unix.Close(fd)
		}})
	}
	return append(cs,
		Case{"idmap/ok/owner-of-a-file", func(t *T) {
			t.File("f", "x")
			t.Give("f", alice)
			mapped := mappedMount(t)
			var st unix.Stat_t
			t.OK("fstatat", unix.Fstatat(mapped, "f", &st, 0))
			Equal(t, "user", int(st.Uid), firstMapped+alice.UID)
			Equal(t, "group", int(st.Gid), firstMapped+alice.GID)
		}},
		Case{"idmap/ok/owner-of-what-a-mapped-user-makes", func(t *T) {
			t.Chmod(".", 0o777)
			mapped := mappedMount(t)
			there := User{"mapped alice", firstMapped + alice.UID, firstMapped + alice.GID, nil}
			t.As(there, func() {
				fd, err := unix.Openat(mapped, "f", unix.O_CREAT|unix.O_WRONLY, 0o644)
				t.OK("openat", err)
				t.Write(fd, "x")
				t.OK("fchmod", unix.Fchmod(fd, 0o600))
				unix.Close(fd)
				t.OK("mkdirat", unix.Mkdirat(mapped, "d", 0o755))
				t.OK("symlinkat", unix.Symlinkat("f", mapped, "l"))
			})
			for _, name := range []string{"f", "d", "l"} {
				t.Owner(name, alice.UID, alice.GID)
			}
			t.Mode("f", 0o600)
		}},
		Case{"idmap/EOVERFLOW/user-without-mapping-makes-a-file", func(t *T) {
			t.Chmod(".", 0o777)
			mapped := mappedMount(t)
			_, err := unix.Openat(mapped, "f", unix.O_CREAT|unix.O_WRONLY, 0o644)
			t.Want("openat", err, unix.EOVERFLOW)
		}},
		Case{"idmap/ok/chown", func(t *T) {
			t.File("f", "x")
			mapped := mappedMount(t)
			t.OK("fchownat", unix.Fchownat(mapped, "f", firstMapped+bob.UID, firstMapped+bob.GID, 0))
			t.Owner("f", bob.UID, bob.GID)
		}},
	)
}

func handleOf(t *T, path string) unix.FileHandle {
	h, _, err := unix.NameToHandleAt(unix.AT_FDCWD, path, 0)
	t.OK("name_to_handle_at", err)
	return h
}

func openHandle(t *T, h unix.FileHandle) (int, error) {
	here := t.Open(".", unix.O_RDONLY, 0)
	return unix.OpenByHandleAt(here, h, unix.O_RDONLY)
}

// forgetInodes makes the kernel drop all unused inodes and names.
func forgetInodes(t *T) {
	here := t.Open(".", unix.O_RDONLY, 0)
	t.OK("syncfs", unix.Syncfs(here))
	t.OK("drop_caches", os.WriteFile("/proc/sys/vm/drop_caches", []byte("2"), 0))
}

// firstMapped is the user and group that mappedMount shows for id 0 of the file system.
const firstMapped = 100000

// mappedMount returns a descriptor of the case's directory in a separate mount, whose ids
// are shifted by firstMapped.
func mappedMount(t *T) int {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: firstMapped, Size: 65536}}
	holder := exec.Command("sleep", "600")
	holder.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Pdeathsig: syscall.SIGKILL,
	}
	t.OK("start in a user namespace", holder.Start())
	defer func() {
		_ = holder.Process.Kill()
		_ = holder.Wait()
	}()
	space, err := unix.Open(fmt.Sprintf("/proc/%d/ns/user", holder.Process.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	t.OK("open the user namespace", err)
	defer unix.Close(space)
	tree, err := unix.OpenTree(unix.AT_FDCWD, ".", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	t.OK("open_tree", err)
	t.Cleanup(func() { unix.Close(tree) })
	t.OK("mount_setattr", unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &unix.MountAttr{
		Attr_set: unix.MOUNT_ATTR_IDMAP, Userns_fd: uint64(space),
	}))
	return tree
}
