// Package clones tests clones of volumes in a whole system: the program, a
// mount, and kill -9 while clones are made and deleted.
package clones

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/test/program"
)

var kills = flag.Int("kills", 3, "how often the system is killed while a clone is made, and while one is deleted")

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// rig is a machine: the whole system in one process, with a mount.
type rig struct {
	*program.Rig
	at string // where the tree is mounted
	up *spawn.Process
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t)}
	r.Addr, r.at = "unix:"+filepath.Join(r.Dir, "d", "meta.sock"), filepath.Join(r.Dir, "mnt")
	if err := os.Mkdir(r.at, 0o755); err != nil {
		t.Fatal(err)
	}
	r.start()
	return r
}

func (r *rig) start() {
	r.T.Helper()
	p := r.Run("up", "--dir", filepath.Join(r.Dir, "d"), "--mount", r.at)
	r.up = p
	r.T.Cleanup(func() { p.Kill(); spawn.Unmount(r.at) })
	r.Until("mounted", func() error {
		if !spawn.Mounted(r.at) {
			return errors.New("not yet")
		}
		_, err := os.ReadDir(r.at)
		return err
	})
}

// kill is kill -9.
func (r *rig) kill() {
	r.up.Kill()
	spawn.Unmount(r.at)
}

// refused runs a command that must fail with a message that contains the words.
func (r *rig) refused(words []string, args ...string) {
	r.T.Helper()
	_, err := r.Ctl(args...)
	if err == nil {
		r.T.Fatalf("%v was not refused", args)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			r.T.Fatalf("%v says nothing of %s", err, w)
		}
	}
}

func (r *rig) path(p ...string) string { return filepath.Join(append([]string{r.at}, p...)...) }

func (r *rig) write(p string, b []byte) {
	r.T.Helper()
	f, err := os.Create(r.path(p))
	if err == nil {
		_, err = f.Write(b)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		r.T.Fatal(err)
	}
}

// tree returns every file below a directory with a sum of its content.
func (r *rig) tree(dir string) map[string]string {
	r.T.Helper()
	got := map[string]string{}
	root := r.path(dir)
	err := filepath.WalkDir(root, func(p string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, p)
		got[name] = fmt.Sprintf("%d %x", len(b), sha256.Sum256(b))
		return err
	})
	if err != nil {
		r.T.Fatal(err)
	}
	return got
}

func (r *rig) same(dir string, want map[string]string) {
	r.T.Helper()
	got := r.tree(dir)
	for name, sum := range want {
		if got[name] != sum {
			r.T.Fatalf("%s/%s is %s, not %s", dir, name, got[name], sum)
		}
	}
	if len(got) != len(want) {
		r.T.Fatalf("%s has %d files, not %d", dir, len(got), len(want))
	}
}

// fill makes files of all kinds: inline, packed, with separate chunks.
func (r *rig) fill(dir string) {
	r.T.Helper()
	rng := rand.NewChaCha8([32]byte{1})
	for i, size := range []int{0, 10, 3000, 4096, 5000, 70_000, 700_000, 3 << 20, 9<<20 + 17} {
		b := make([]byte, size)
		rng.Read(b)
		r.write(filepath.Join(dir, fmt.Sprint("f", i)), b)
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{2, byte(n)})
	rng.Read(b)
	return b
}

// patch writes in the middle of a file.
func (r *rig) patch(p string, off int64, b []byte) {
	r.T.Helper()
	f, err := os.OpenFile(r.path(p), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(b, off)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		r.T.Fatal(err)
	}
}

// chunks lists which chunks a file's bytes lie in.
func (r *rig) chunks(volume, name string) (ids []meta.ChunkID) {
	r.T.Helper()
	s, err := client.Dial(r.T.Context(), client.Config{Addrs: []string{r.Addr}, Name: "look", Handler: quiet{}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		r.T.Fatal(err)
	}
	defer s.Close(r.T.Context())
	found, err := s.LookUpVolume(r.T.Context(), 0, volume)
	if err != nil {
		r.T.Fatal(err)
	}
	v := found.ID
	e, err := s.Do(r.T.Context(), v, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseNone)
	if err != nil {
		r.T.Fatal(err)
	}
	res, err := s.Do(r.T.Context(), v, meta.OpID{}, &meta.Open{Ino: e.Attr.Ino}, meta.LeaseNone)
	if err != nil {
		r.T.Fatal(err)
	}
	for _, x := range res.Extents {
		ids = append(ids, x.Chunk)
	}
	return ids
}

type quiet struct{}

func (quiet) Granted(meta.VolumeID, meta.Grant) {}
func (quiet) Recall(_ meta.Recall, done func()) { done() }
func (quiet) Expired([]meta.VolumeID, error)    {}

func TestClones(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data", "--attach", "/data", "--trash", "0s") // its clones have no trash either: deleted clones are gone
	r.fill("data")
	r.Must("snapshot", "create", "data", "v1")
	v1 := r.tree("data")
	r.write("data/f1", []byte("changed"))
	r.patch("data/f8", 5<<20, random(1000))
	if err := os.Remove(r.path("data/f5")); err != nil {
		t.Fatal(err)
	}
	live := r.tree("data")

	r.Must("clone", "create", "data@v1", "exp", "--attach", "/exp")
	r.Must("clone", "create", "data", "now", "--attach", "/now")
	r.same("exp", v1)
	r.same("now", live)
	if a, b := r.chunks("data", "f7"), r.chunks("exp", "f7"); !slices.Equal(a, b) || len(a) == 0 {
		t.Fatalf("the clone's file lies in %v, the origin's in %v", b, a)
	}

	// Each side is written, and the other does not notice.
	r.write("exp/new", random(2<<20))
	r.patch("exp/f7", 1<<20, random(500_000))
	r.write("exp/f2", []byte("mine"))
	if err := os.Rename(r.path("exp/f6"), r.path("exp/moved")); err != nil {
		t.Fatal(err)
	}
	r.patch("data/f7", 2<<20, random(600_000))
	r.write("data/f3", []byte("theirs"))
	exp, data := r.tree("exp"), r.tree("data")
	r.same("now", live)

	// Copies within a volume share extents, also extents that the clone shares with its
	// origin.
	if out, err := exec.Command("cp", "--reflink=auto", r.path("exp/f8"), r.path("exp/copy")).CombinedOutput(); err != nil {
		t.Fatal(err, string(out))
	}
	copyRange(t, r.path("exp/new"), r.path("exp/copy2"))
	for of, to := range map[string]string{"f8": "copy", "new": "copy2"} {
		exp[to] = exp[of]
		if a, b := r.chunks("exp", of), r.chunks("exp", to); !slices.Equal(a, b) {
			t.Errorf("%s lies in %v, its copy in %v", of, a, b)
		}
	}
	r.same("exp", exp)

	// A clone can have its own snapshots and clones.
	r.Must("snapshot", "create", "exp", "e1")
	r.write("exp/f2", []byte("later"))
	var changes []struct{ Change, Path string }
	if err := json.Unmarshal(r.Must("snapshot", "diff", "exp", "e1", "--output", "json"), &changes); err != nil {
		t.Fatal(err)
	}
	if len(changes) != 1 || changes[0].Path != "f2" || changes[0].Change != "changed" {
		t.Fatal(changes)
	}
	r.Must("snapshot", "rollback", "exp", "e1", "--yes", "--force")
	r.Until("the mount is back", func() error { _, err := os.ReadDir(r.path("exp")); return err })
	r.same("exp", exp)
	r.Must("clone", "create", "exp@e1", "exp2", "--attach", "/exp2")
	r.same("exp2", exp)

	// Snapshots and volumes that clones need can't be deleted.
	r.refused([]string{"busy", "exp"}, "snapshot", "delete", "data", "v1", "--yes")
	r.Must("volume", "detach", "data")
	r.refused([]string{"busy", "exp", "now"}, "volume", "delete", "data", "--yes")
	r.Must("volume", "attach", "data", "/data")
	r.Must("fsck")

	r.kill()
	r.start()
	r.same("exp", exp)
	r.same("exp2", exp)
	r.same("now", live)
	r.same("data", data)
	r.Must("fsck")

	// The clones are deleted in an allowed order; then the origin can be deleted.
	for _, v := range []string{"exp2", "now"} {
		r.gone(v)
	}
	r.refused([]string{"busy", "exp"}, "snapshot", "delete", "data", "v1", "--yes")
	r.Must("snapshot", "delete", "exp", "e1", "--yes", "--wait")
	r.gone("exp")
	r.Must("snapshot", "delete", "data", "v1", "--yes", "--wait")
	r.same("data", data)
	r.Must("fsck")
	if l := r.snapshots("data"); len(l) != 0 {
		t.Fatal(l)
	}
	r.gone("data")
}

// TestBackFromSnapshot: files copied out of .snapshot share the snapshot's bytes, and
// keep these bytes when the snapshot is deleted; each count stays exact.
func TestBackFromSnapshot(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data", "--attach", "/data", "--trash", "0s") // its clones have no trash either: deleted clones are gone
	r.fill("data")
	r.Must("snapshot", "create", "data", "v1")
	then := r.tree("data")
	was := map[string][]meta.ChunkID{}
	for _, name := range []string{"f5", "f6", "f7", "f8"} {
		was[name] = r.chunks("data", name)
	}
	r.patch("data/f8", 5<<20, random(1<<20)) // damaged
	r.patch("data/f6", 0, random(700_000))
	if err := os.Remove(r.path("data", "f7")); err != nil {
		t.Fatal(err)
	}
	// cp writes over existing files and removes none.
	for name := range then {
		if name == "f5" {
			continue
		}
		if out, err := exec.Command("cp", "--reflink=auto", r.path("data", ".snapshot", "v1", name), r.path("data", name)).CombinedOutput(); err != nil {
			t.Fatal(name, err, string(out))
		}
	}
	copyRange(t, r.path("data", ".snapshot", "v1", "f5"), r.path("data", "again"))
	then["again"], was["again"] = then["f5"], was["f5"]
	same := func() {
		t.Helper()
		r.same("data", then)
		for name, ids := range was {
			if now := r.chunks("data", name); !slices.Equal(now, ids) || len(ids) == 0 {
				t.Errorf("%s lies in %v, and did in %v", name, now, ids)
			}
		}
		r.Must("fsck")
	}
	same()

	// Bytes that only the copies have stay.
	if err := os.Remove(r.path("data", "f5")); err != nil {
		t.Fatal(err)
	}
	delete(then, "f5")
	delete(was, "f5")
	r.Must("snapshot", "delete", "data", "v1", "--yes", "--wait")
	if out, err := exec.Command("sync", "-f", r.path("data")).CombinedOutput(); err != nil { // small files were copied by the kernel
		t.Fatal(err, string(out))
	}
	r.kill() // nothing is cached
	r.start()
	same()
}

func copyRange(t *testing.T, from, to string) {
	t.Helper()
	a, err := os.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := os.Create(to)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for {
		n, err := unix.CopyFileRange(int(a.Fd()), nil, int(b.Fd()), nil, 1<<30, 0)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return
		}
	}
}

// gone detaches and deletes a volume.
func (r *rig) gone(v string) {
	r.T.Helper()
	if _, err := r.Ctl("volume", "detach", v); err != nil && !strings.Contains(err.Error(), "not attached") {
		r.T.Fatal(err)
	}
	r.Must("volume", "delete", v, "--yes")
}

func (r *rig) snapshots(v string) (names []string) {
	r.T.Helper()
	var l meta.SnapshotList
	if err := json.Unmarshal(r.Must("snapshot", "list", v, "--output", "json"), &l); err != nil {
		r.T.Fatal(err)
	}
	for _, s := range l.Snapshots {
		names = append(names, s.Name)
	}
	return names
}

func (r *rig) clones() (names []string) {
	r.T.Helper()
	var l []meta.CloneInfo
	if err := json.Unmarshal(r.Must("clone", "list", "--output", "json"), &l); err != nil {
		r.T.Fatal(err)
	}
	for _, c := range l {
		names = append(names, c.Name)
	}
	return names
}

// TestKilled kills the system at any moment while a clone is made or deleted. Afterwards the
// clone is complete or absent, and the origin can be deleted exactly if no clone needs the
// origin.
func TestKilled(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data", "--attach", "/data", "--trash", "0s") // its clones have no trash either: deleted clones are gone
	r.fill("data")
	data := r.tree("data")
	at := func(n int, fn func()) {
		done := make(chan struct{})
		go func() { defer close(done); fn() }()
		time.Sleep(time.Duration(n*60/max(1, *kills))*time.Millisecond + rand.N(20*time.Millisecond))
		r.kill()
		r.start()
		<-done // the command asks again, until somebody answers
	}
	for n := range *kills {
		name := fmt.Sprint("c", n)
		at(n, func() { r.Ctl("clone", "create", "data", name) })
		if !slices.Contains(r.clones(), name) {
			t.Logf("%s is not there", name)
			r.Must("clone", "create", "data", name)
		}
		r.Must("volume", "attach", name, "/"+name)
		r.same(name, data)
		r.write(name+"/mine", []byte(name))
		r.Must("fsck")
	}
	for n := range *kills {
		name := fmt.Sprint("c", n)
		r.Must("volume", "detach", name)
		at(n, func() { r.Ctl("volume", "delete", name, "--yes") })
		if slices.Contains(r.clones(), name) {
			t.Logf("%s is still there", name)
			r.Must("volume", "delete", name, "--yes")
		}
		r.Must("fsck")
	}
	r.Until("the snapshots that were taken for the clones are gone", func() error {
		if l := r.snapshots("data"); len(l) > 0 {
			return fmt.Errorf("%v", l)
		}
		return nil
	})
	r.same("data", data)
	r.Must("fsck")
	r.gone("data")
}

// TestPromoted promotes a clone while it is written and the system is killed: then the
// origin can be deleted, and no data of the clone or of its snapshots is missing.
func TestPromoted(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data", "--attach", "/data", "--trash", "0s") // its clones have no trash either: deleted clones are gone
	r.fill("data")
	r.Must("snapshot", "create", "data", "v1")
	r.Must("clone", "create", "data@v1", "exp", "--attach", "/exp")
	r.Must("snapshot", "create", "exp", "e1")
	e1 := r.tree("exp")
	r.patch("exp/f8", 3<<20, random(200_000))
	copyRange(t, r.path("exp/f7"), r.path("exp/copy"))
	if err := os.Remove(r.path("exp/f6")); err != nil {
		t.Fatal(err)
	}
	r.Must("clone", "create", "exp", "child")
	r.refused([]string{"busy", "child"}, "volume", "promote", "exp")
	r.gone("child")
	exp := r.tree("exp")

	r.Must("volume", "promote", "exp", "--detach")
	time.Sleep(rand.N(60 * time.Millisecond))
	r.kill()
	r.start()
	r.write("exp/new", random(3<<20))
	exp["new"] = r.tree("exp")["new"]
	r.Must("volume", "promote", "exp")
	if l := r.clones(); len(l) != 0 {
		t.Fatal(l)
	}
	for _, name := range []string{"f5", "f7", "f8", "copy"} {
		for _, id := range r.chunks("exp", name) {
			for _, other := range r.chunks("data", "f7") {
				if id.Volume == other.Volume {
					t.Errorf("%s still lies in %v", name, id)
				}
			}
		}
	}
	r.Must("fsck")
	r.Must("snapshot", "delete", "data", "v1", "--yes", "--wait")
	r.gone("data")
	r.same("exp", exp)
	r.same("exp/.snapshot/e1", e1)
	r.Must("snapshot", "rollback", "exp", "e1", "--yes", "--force")
	r.Until("the mount is back", func() error { _, err := os.ReadDir(r.path("exp")); return err })
	r.same("exp", e1)
	r.kill()
	r.start()
	r.same("exp", e1)
	r.Must("fsck")
}

// TestPromoteRate: a promotion keeps its rate, also at another owner of the clone, until
// the rate is changed.
func TestPromoteRate(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data", "--attach", "/data", "--trash", "0s") // its clones have no trash either: deleted clones are gone
	r.fill("data")
	want := r.tree("data")
	r.Must("clone", "create", "data", "slow", "--attach", "/slow")
	r.Must("clone", "create", "data", "turned", "--attach", "/turned")

	// 12.7 MiB, of which a second's worth may go at once.
	began := time.Now()
	r.Must("volume", "promote", "slow", "--rate", "4M")
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("it took %v", took)
	}
	r.same("slow", want)

	r.refused([]string{"--rate"}, "volume", "promote", "turned", "--rate", "1K")
	r.Must("volume", "promote", "turned", "--rate", "64K", "--detach")
	r.kill()
	r.start()
	c, err := penstock.Dial(t.Context(), penstock.Config{Meta: []string{r.Addr}, Name: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	v, err := c.Volume(t.Context(), "turned")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.PromoteAt(t.Context(), 1); meta.KindOf(err) != meta.Invalid {
		t.Errorf("at a byte a second: %v", err)
	}
	if p, err := v.Promote(t.Context()); err != nil || p.Done || p.Rate != 64<<10 {
		t.Errorf("after a restart: %+v, %v", p, err)
	}
	began = time.Now()
	r.Must("volume", "promote", "turned", "--rate", "0")
	if took := time.Since(began); took > 100*time.Second { // at the rate of before: 200 s
		t.Errorf("it took %v", took)
	}
	r.same("turned", want)
	if l := r.clones(); len(l) != 0 {
		t.Error(l)
	}
	r.Must("fsck")
	r.gone("data")
	r.same("turned", want)
}

// TestNested: a volume attached inside another volume is an empty directory in the outer
// volume's snapshots. A snapshot that shows such a directory can't be cloned, not even
// when the inner volume is attached elsewhere; an earlier snapshot can. A rollback that
// would have to move a volume is refused.
func TestNested(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "v", "--attach", "/v")
	r.write("v/old", []byte("old"))
	r.Must("snapshot", "create", "v", "before")
	r.Must("volume", "create", "w", "--attach", "/v/w")
	r.write("v/w/inside", []byte("inside"))
	r.Must("snapshot", "create", "v", "with")
	r.Must("snapshot", "create", "w", "own")
	r.write("v/new", []byte("new"))
	has := func(dir string, want ...string) {
		t.Helper()
		l, err := os.ReadDir(r.path(dir))
		var got []string
		for _, e := range l {
			got = append(got, e.Name())
		}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("DATA: %s holds %q, %v; want %q", dir, got, err, want)
		}
	}
	has("v/.snapshot/before", "old")
	has("v/.snapshot/with", "old", "w")
	has("v/.snapshot/with/w")
	has("v/w/.snapshot/own", "inside")
	if err := os.WriteFile(r.path("v/.snapshot/with/w/x"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing below a junction of a snapshot: %v", err)
	}

	attached := []string{"volume w is attached inside", "penstock volume detach w", "a snapshot from before"}
	r.refused(attached, "clone", "create", "v", "c")
	r.refused(attached, "clone", "create", "v@with", "c")
	r.Must("clone", "create", "v@before", "c", "--attach", "/c")
	has("c", "old")
	r.refused([]string{"attached since the snapshot", `"w"`}, "snapshot", "rollback", "v", "before", "--force", "--yes")
	has("v", "new", "old", "w")

	r.Must("volume", "detach", "w")
	was := []string{"when the snapshot was taken, volume w was attached inside", "clone the volume as it is now"}
	r.refused(was, "clone", "create", "v@with", "d")
	r.refused([]string{"detached since the snapshot", `"w"`}, "snapshot", "rollback", "v", "with", "--force", "--yes")
	r.Must("clone", "create", "v", "d", "--attach", "/d")
	has("d", "new", "old")
	r.Must("volume", "attach", "w", "/d/w") // into a clone: attached only there
	r.refused(was, "clone", "create", "v@with", "e")
	has("d/w", "inside")
	r.Must("volume", "detach", "w")

	r.Must("volume", "attach", "w", "/v/w")
	r.Must("snapshot", "rollback", "v", "with", "--force", "--yes")
	r.Until("rolled back", func() error {
		l, err := os.ReadDir(r.path("v"))
		if err == nil && len(l) != 2 {
			err = fmt.Errorf("%v", l)
		}
		return err
	})
	has("v/w", "inside")
	r.Must("volume", "detach", "w")
	r.Must("snapshot", "rollback", "v", "before", "--force", "--yes")
	r.Must("fsck")
	for _, s := range r.snapshots("v") {
		if strings.HasPrefix(s, "clone-e-") || strings.HasPrefix(s, "clone-c-") {
			t.Errorf("snapshot %s of a clone that was refused", s)
		}
	}
}
