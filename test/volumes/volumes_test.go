// Package volumes proves the tree of volumes with real processes and mounts:
// junctions as POSIX programs see them, the trash, and kills while the tree is
// being changed.
package volumes

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) {
	program.Beside(3)
	os.Exit(program.Main(m))
}

// rig is a metadata server, a chunk server and mounts, each a process.
type rig struct {
	*program.Rig
	meta *spawn.Process
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t)}
	r.startMeta()
	r.Run("chunkserver", "--data", filepath.Join(r.Dir, "c"), "--cluster", r.Addr, "--topology", "/dc/r/n")
	return r
}

// startMeta starts the metadata server and waits until the server answers.
func (r *rig) startMeta() {
	r.T.Helper()
	r.meta = r.Run("meta", "--dir", filepath.Join(r.Dir, "m"))
	r.Until("the metadata server answers", func() error { _, err := r.Ctl("volume", "show", "root"); return err })
}

// mount mounts a directory of the tree in a process of its own.
func (r *rig) mount(source, name string) string {
	r.T.Helper()
	at := filepath.Join(r.Dir, name)
	if err := os.MkdirAll(at, 0o755); err != nil {
		r.T.Fatal(err)
	}
	p := r.Run("mount", "--cluster", r.Addr, source, at)
	r.T.Cleanup(func() { p.Kill(); spawn.Unmount(at) })
	r.Until("mounted", func() error {
		if !spawn.Mounted(at) {
			return errors.New("not yet")
		}
		return nil
	})
	return at
}

// volumeRow is a volume's row in `volume list`.
type volumeRow struct {
	Name, Path, State string
}

func (r *rig) list(more ...string) map[string]volumeRow {
	r.T.Helper()
	var rows []volumeRow
	if err := json.Unmarshal(r.Must(append([]string{"volume", "list", "--output", "json"}, more...)...), &rows); err != nil {
		r.T.Fatal(err)
	}
	m := map[string]volumeRow{}
	for _, v := range rows {
		m[v.Name] = v
	}
	return m
}

func (r *rig) write(name, text string) {
	r.T.Helper()
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		r.T.Fatal(err)
	}
}

func (r *rig) reads(name, want string) {
	r.T.Helper()
	if b, err := os.ReadFile(name); err != nil || string(b) != want {
		r.T.Errorf("DATA: %s: %q, %v; want %q", name, b, err, want)
	}
}

func (r *rig) fails(what string, err, want error) {
	r.T.Helper()
	if !errors.Is(err, want) {
		r.T.Errorf("%s: %v, want %v", what, err, want)
	}
}

// Volumes hang in each other, and programs see one tree: directories that can be listed and
// walked through, in every mount at once. A call across a border returns the right error, and
// users of the tree can't take a junction away.
func TestTree(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Must("volume", "create", "a", "--attach", "/teams/vision/a", "--parents", "--quota", "64M")
	r.Must("volume", "create", "b", "--attach", "/teams/vision/a/b", "--quota", "32M")
	root, teams := r.mount("/", "root"), r.mount("/teams", "teams")
	alone := r.mount("a:/", "alone")
	in := func(name string) string { return filepath.Join(root, "teams/vision", name) }

	r.write(in("top"), "in the root volume")
	r.write(in("a/f"), "in a")
	r.write(in("a/b/g"), "in b")
	r.reads(filepath.Join(teams, "vision/a/b/g"), "in b")
	r.reads(filepath.Join(alone, "b/g"), "in b")
	r.reads(in("a/b/../f"), "in a")

	// A directory like others.
	var dir, file, below unix.Stat_t
	for name, st := range map[string]*unix.Stat_t{"a": &dir, "a/f": &file, "a/b": &below} {
		if err := unix.Stat(in(name), st); err != nil {
			t.Fatal(err)
		}
	}
	if dir.Mode&unix.S_IFMT != unix.S_IFDIR || dir.Ino == below.Ino || dir.Dev != file.Dev || dir.Dev != below.Dev {
		t.Errorf("a: %+v; a/f: %+v; a/b: %+v", dir, file, below)
	}
	out, err := exec.Command("find", root, "-xdev", "-type", "f", "-printf", "%P %s\n").Output()
	if want := "teams/vision/a/b/g 4\nteams/vision/a/f 4\nteams/vision/top 18\n"; err != nil || sorted(string(out)) != want {
		t.Errorf("found %q, %v; want %q", sorted(string(out)), err, want)
	}

	// Borders.
	r.fails("rename out of a volume", os.Rename(in("a/f"), in("f")), unix.EXDEV)
	r.fails("rename into a volume", os.Rename(in("top"), in("a/top")), unix.EXDEV)
	r.fails("rename between nested volumes", os.Rename(in("a/b/g"), in("a/g")), unix.EXDEV)
	r.fails("link out of a volume", os.Link(in("a/f"), in("f")), unix.EXDEV)
	r.fails("rmdir of a junction", unix.Rmdir(in("a")), unix.EBUSY)
	r.fails("unlink of a junction", unix.Unlink(in("a")), unix.EISDIR)
	r.fails("rename of a junction", os.Rename(in("a"), in("c")), unix.EBUSY)
	if err := os.Mkdir(in("d"), 0o755); err != nil {
		t.Fatal(err)
	}
	r.fails("rename over a junction", unix.Rename(in("d"), in("a")), unix.EBUSY)
	r.fails("exchange with a junction", unix.Renameat2(unix.AT_FDCWD, in("d"), unix.AT_FDCWD, in("a"), unix.RENAME_EXCHANGE), unix.EBUSY)
	r.fails("rmdir of a junction's parent", unix.Rmdir(filepath.Join(root, "teams/vision")), unix.ENOTEMPTY)
	// The directory that holds a junction moves with the junction.
	if err := os.Rename(filepath.Join(root, "teams/vision"), filepath.Join(root, "teams/sight")); err != nil {
		t.Fatal(err)
	}
	r.reads(filepath.Join(teams, "sight/a/b/g"), "in b")
	if at := r.list()["b"].Path; at != "/teams/sight/a/b" {
		t.Errorf("b is said to hang at %s", at)
	}
	if err := os.Rename(filepath.Join(root, "teams/sight"), filepath.Join(root, "teams/vision")); err != nil {
		t.Fatal(err)
	}

	// Each volume has its own size.
	for name, want := range map[string]uint64{"a": 64 << 20, "a/f": 64 << 20, "a/b": 32 << 20} {
		var st unix.Statfs_t
		if err := unix.Statfs(in(name), &st); err != nil || st.Blocks*uint64(st.Bsize) != want {
			t.Errorf("statfs of %s: %d bytes, %v; want %d", name, st.Blocks*uint64(st.Bsize), err, want)
		}
	}

	// A snapshot is of one volume: another volume is an empty directory in the snapshot.
	r.Must("snapshot", "create", "a", "s")
	if list, err := os.ReadDir(in("a/.snapshot/s/b")); err != nil || len(list) != 0 {
		t.Errorf("a junction in a snapshot: %v, %v", list, err)
	}
	r.reads(in("a/.snapshot/s/f"), "in a")

	// A detached volume is gone from every mount, and whole by its name and elsewhere. A program
	// inside goes on.
	f, err := os.Open(in("a/b/g"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r.Must("volume", "detach", "b")
	for _, at := range []string{in("a/b"), filepath.Join(teams, "vision/a/b"), filepath.Join(alone, "b")} {
		_, err := os.Lstat(at)
		r.fails(at, err, unix.ENOENT)
	}
	if b := make([]byte, 4); must(t, f.Read, b) != 4 || string(b) != "in b" {
		t.Errorf("DATA: the file that is open reads %q", b)
	}
	r.Must("volume", "rename", "b", "bb")
	r.Must("volume", "attach", "bb", "/teams/other/deep/b", "--parents")
	r.Must("volume", "attach", "bb", "/teams/other/deep/b") // twice is once
	r.reads(filepath.Join(teams, "other/deep/b/g"), "in b")
	if _, err := r.Ctl("volume", "attach", "bb", "/elsewhere"); err == nil {
		t.Error("a volume hangs at two places")
	}
	if _, err := r.Ctl("volume", "attach", "a", "/teams/other/deep/b/a"); err == nil {
		t.Error("a was attached although it hangs elsewhere")
	}
	r.Must("volume", "detach", "a")
	if _, err := r.Ctl("volume", "attach", "a", "/teams/vision/top"); err == nil {
		t.Error("a junction was put over a file")
	}
	r.Must("volume", "attach", "a", "/teams/other/deep/b/a")
	r.Must("volume", "detach", "bb")
	if out, err := r.Ctl("volume", "delete", "bb", "--yes"); err == nil {
		t.Errorf("deleted although a hangs in it: %s", out)
	}
	r.Must("volume", "detach", "a")

	// The trash.
	r.Must("volume", "delete", "bb", "--yes")
	if v := r.list("--trash")["bb"]; v.State != "trash" {
		t.Errorf("in the trash: %+v", r.list("--trash"))
	}
	if _, err := r.Ctl("volume", "attach", "bb", "/bb"); err == nil {
		t.Error("a volume in the trash was attached")
	}
	r.Must("volume", "create", "bb", "--trash", "0s")
	if _, err := r.Ctl("volume", "undelete", "bb"); err == nil {
		t.Error("two volumes have one name")
	}
	r.Must("volume", "undelete", "bb", "--as", "back")
	r.Must("volume", "attach", "back", "/back")
	r.reads(filepath.Join(root, "back/g"), "in b")
	r.Must("volume", "delete", "bb", "--yes") // has no trash time
	if _, left := r.list("--trash")["bb"]; left || len(r.list()) != 3 {
		t.Errorf("left: %v, %v", r.list(), r.list("--trash"))
	}
	if out := r.Must("fsck"); !bytes.Contains(out, []byte("clean")) {
		t.Errorf("DATA: fsck: %s", out)
	}
}

func must(t *testing.T, f func([]byte) (int, error), b []byte) int {
	t.Helper()
	n, err := f(b)
	if err != nil {
		t.Error(err)
	}
	return n
}

func sorted(lines string) string {
	l := strings.SplitAfter(lines, "\n")
	l = l[:len(l)-1]
	for i := range l {
		for j := i; j > 0 && l[j] < l[j-1]; j-- {
			l[j], l[j-1] = l[j-1], l[j]
		}
	}
	return strings.Join(l, "")
}

// The metadata server is killed at any moment while volumes are attached, detached, renamed,
// deleted and taken out of the trash. The next server settles the leftovers, and each volume
// hangs where its row says.
func TestKillsWhileTheTreeChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	const n, rounds = 4, 3
	for i := range n {
		r.Must("volume", "create", fmt.Sprint("v", i), "--attach", fmt.Sprint("/v", i))
	}
	root := r.mount("/", "root")
	for i := range n {
		r.write(filepath.Join(root, fmt.Sprint("v", i), "f"), fmt.Sprint(i))
	}
	if err := exec.Command("sync", "-f", root).Run(); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, uint64(time.Now().UnixNano())))
	for round := range rounds {
		stop, done := make(chan struct{}), make(chan int)
		go func() {
			steps := 0
			defer func() { done <- steps }()
			for {
				for i := range n {
					name, at := fmt.Sprint("v", i), fmt.Sprint("/v", i)
					// Each may fail: the server is killed meanwhile.
					for _, c := range [][]string{{"volume", "detach", name}, {"volume", "delete", name, "--yes"}, {"volume", "undelete", name}, {"volume", "attach", name, at}} {
						select {
						case <-stop:
							return
						default:
						}
						if _, err := r.Ctl(c...); err == nil {
							steps++
						}
					}
				}
			}
		}()
		time.Sleep(time.Duration(300+rng.IntN(1200)) * time.Millisecond)
		r.meta.Kill()
		r.startMeta()
		close(stop)
		t.Logf("round %d: %d steps done", round, <-done)
		r.Until("every step is settled", func() error {
			for name, v := range r.list() {
				if v.State != "ready" {
					return fmt.Errorf("%s is %s", name, v.State)
				}
			}
			return nil
		})
		for name := range r.list("--trash") {
			r.Must("volume", "undelete", name)
		}
		for name, v := range r.list() {
			if name != "root" && v.Path == "" {
				r.Must("volume", "attach", name, "/"+name)
			}
		}
		for i := range n {
			r.Until("the file is where it was", func() error {
				b, err := os.ReadFile(filepath.Join(root, fmt.Sprint("v", i), "f"))
				if err == nil && string(b) != fmt.Sprint(i) {
					t.Fatalf("DATA: v%d holds %q", i, b)
				}
				return err
			})
		}
		if out := r.Must("fsck"); !bytes.Contains(out, []byte("clean")) {
			t.Errorf("DATA: fsck: %s", out)
		}
	}
}
