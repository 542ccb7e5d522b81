// Package quota proves that a quota of bytes is exact: real processes, real mounts that race to
// fill the quota, a metadata server that is killed meanwhile.
package quota

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// rig is one metadata server, one chunk server, and mounts of the volume q, each a process.
type rig struct {
	*program.Rig
	meta *spawn.Process
}

func newRig(t *testing.T, env ...string) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t, env...)}
	r.startMeta()
	r.Until("the metadata server listens", func() error { _, err := os.Stat(filepath.Join(r.metaDir(), "meta.sock")); return err })
	r.Run("chunkserver", "--data", filepath.Join(r.Dir, "c"), "--cluster", r.Addr, "--topology", "/dc/r/n")
	return r
}

func (r *rig) metaDir() string { return filepath.Join(r.Dir, "m") }
func (r *rig) startMeta()      { r.meta = r.Run("meta", "--dir", r.metaDir()) }

func (r *rig) volume(args ...string) {
	r.T.Helper()
	r.Until(args[0], func() error { _, err := r.Ctl(append([]string{"volume"}, args...)...); return err })
}

// mount mounts the volume in a process of its own.
func (r *rig) mount(name string) (at string, p *spawn.Process) {
	r.T.Helper()
	at = filepath.Join(r.Dir, name)
	if err := os.MkdirAll(at, 0o755); err != nil {
		r.T.Fatal(err)
	}
	p = r.Run("mount", "--cluster", r.Addr, "/q", at)
	r.T.Cleanup(func() { p.Kill(); spawn.Unmount(at) })
	r.Until("mounted", func() error {
		if !spawn.Mounted(at) {
			return errors.New("not yet")
		}
		return nil
	})
	return at, p
}

type usage struct {
	Used  uint64 `json:"used_bytes"`
	Files uint64 `json:"used_inodes"`
}

// used is the owner's count of committed bytes.
func (r *rig) used() (u usage) {
	r.T.Helper()
	r.Until("volume show", func() error {
		out, err := r.Ctl("volume", "show", "q", "--output", "json")
		if err != nil {
			return err
		}
		return json.Unmarshal(out, &u)
	})
	return u
}

func (r *rig) fsck() {
	r.T.Helper()
	r.Until("fsck", func() error { _, err := r.Ctl("fsck"); return err })
}

// fill returns bytes that tell their file and place.
func fill(p []byte, file uint64, off int64) {
	var w [8]byte
	for i := range p {
		at := off + int64(i)
		if i == 0 || at%8 == 0 {
			binary.LittleEndian.PutUint64(w[:], (file+1)*0x9e3779b97f4a7c15^uint64(at/8))
		}
		p[i] = w[at%8]
	}
}

// writer fills a file until the quota is used up.
type writer struct {
	path   string
	file   uint64
	taken  int64 // write(2) took the bytes
	denied bool  // EDQUOT
}

// run writes until the writer has enough or is refused. Any error but EDQUOT from write or open
// is a failure: no byte that a write took may be refused later.
func (w *writer) run(r *rand.Rand) error {
	f, err := os.OpenFile(w.path, os.O_CREATE|os.O_WRONLY, 0o644)
	if errors.Is(err, syscall.EDQUOT) {
		w.denied = true
		return nil
	}
	if err != nil {
		return err
	}
	size := 1 + r.IntN(200_000)
	switch r.IntN(4) {
	case 0:
		size = 1 + r.IntN(5000)
	case 1:
		size = 1 << 20
	}
	often := r.IntN(3) == 0
	limit := int64(1 + r.IntN(8<<20))
	for w.taken < limit {
		p := make([]byte, size)
		fill(p, w.file, w.taken)
		n, err := f.Write(p)
		w.taken += int64(n)
		if errors.Is(err, syscall.EDQUOT) {
			w.denied = true
			break
		}
		if err != nil {
			f.Close()
			return fmt.Errorf("write: %w", err)
		}
		if often {
			if err := f.Sync(); err != nil {
				f.Close()
				return fmt.Errorf("fsync after a write was taken: %w", err)
			}
		}
	}
	if r.IntN(2) == 0 {
		if err := f.Sync(); err != nil {
			f.Close()
			return fmt.Errorf("fsync after a write was taken: %w", err)
		}
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

// verify compares a file with its writer's answers: every byte that a write took is in the file,
// since nothing failed afterwards.
func (w *writer) verify(root string) error {
	b, err := os.ReadFile(filepath.Join(root, filepath.Base(w.path)))
	if err != nil {
		if w.denied && w.taken == 0 && errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	}
	if int64(len(b)) != w.taken {
		return fmt.Errorf("DATA: %s: write took %d bytes, %d are there", w.path, w.taken, len(b))
	}
	want := make([]byte, len(b))
	fill(want, w.file, 0)
	if !bytes.Equal(b, want) {
		return fmt.Errorf("DATA: %s: wrong bytes", w.path)
	}
	return nil
}

// raceEnough is the number of bytes of the writers of a race without refusals: more than any
// quota here.
const raceEnough = 96 << 20

// raceTime is long for a race in which everybody is refused in the end.
const raceTime = 90 * time.Second

// race lets the mounts fill the volume until each was refused several times, or
// took far too much.
func race(mounts []string, seed uint64, files int) ([]*writer, error) {
	var mu sync.Mutex
	var all []*writer
	var errs []error
	var took atomic.Int64
	var wg sync.WaitGroup
	for i, at := range mounts {
		for k := range 2 {
			r := rand.New(rand.NewPCG(seed, uint64(10*i+k)))
			wg.Go(func() {
				refused := 0
				for n := 0; n < files && refused < 3 && took.Load() < raceEnough; n++ {
					w := &writer{path: filepath.Join(at, fmt.Sprintf("f%d-%d-%d", i, k, n)), file: uint64(i*10000 + k*1000 + n)}
					err := w.run(r)
					mu.Lock()
					all = append(all, w)
					took.Add(w.taken)
					if err != nil {
						errs = append(errs, fmt.Errorf("%s: %w", w.path, err))
					}
					mu.Unlock()
					if err != nil {
						return
					}
					if w.denied {
						refused++
					}
				}
			})
		}
	}
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
		return all, errors.Join(errs...)
	case <-time.After(raceTime):
		return nil, errors.New("writers wait and wait: of what write took more can't be committed than the quota has left")
	}
}

// syncAll flushes the mounts.
func syncAll(mounts []string) error {
	for _, at := range mounts {
		d, err := os.Open(at)
		if err != nil {
			return err
		}
		err = unix.Syncfs(int(d.Fd()))
		d.Close()
		if err != nil {
			return fmt.Errorf("syncfs after every write was taken: %w", err)
		}
	}
	return nil
}

// TestRace: three mounts fill a volume. The committed bytes never exceed the limit, all bytes
// that a write took are in the files, and a refused program gets the error from write.
func TestRace(t *testing.T) {
	const limit = 24 << 20
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q", "--quota", fmt.Sprint(limit))
	var mounts []string
	for i := range 3 {
		at, _ := r.mount(fmt.Sprint("a", i))
		mounts = append(mounts, at)
	}
	all, err := race(mounts, 1, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if err := syncAll(mounts); err != nil {
		t.Fatal(err)
	}
	var taken int64
	denied := 0
	for _, w := range all {
		taken += w.taken
		if w.denied {
			denied++
		}
	}
	u := r.used()
	t.Logf("%d files, %d refused, %d of %d bytes taken, %d committed", len(all), denied, taken, limit, u.Used)
	if u.Used > limit || uint64(taken) != u.Used {
		t.Errorf("DATA: %d bytes are committed of %d taken, the limit is %d", u.Used, taken, limit)
	}
	if denied == 0 {
		t.Error("nobody was refused")
	}
	// A refusal is for want of space: the rest is less than a write.
	if u.Used+(1<<20) < limit {
		t.Errorf("%d bytes are left, though all were refused", limit-u.Used)
	}
	at, _ := r.mount("b")
	for _, w := range all {
		if err := w.verify(at); err != nil {
			t.Error(err)
		}
	}
	r.fsck()
}

// TestRaceWithOwnerKilled: the metadata server is killed and comes back while two mounts fill
// and empty the volume.
func TestRaceWithOwnerKilled(t *testing.T) {
	const limit = 24 << 20
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q", "--quota", fmt.Sprint(limit))
	var mounts []string
	for i := range 2 {
		at, _ := r.mount(fmt.Sprint("a", i))
		mounts = append(mounts, at)
	}
	// So slow that the kills come in the middle.
	stop := make(chan struct{})
	var all []*writer
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		for round := uint64(0); ; round++ {
			select {
			case <-stop:
				return
			default:
			}
			var ws []*writer
			if ws, err = race(mounts, round, 4); err != nil {
				all = append(all, ws...)
				return
			}
			// Half of the bytes go again, by either mount.
			for i, w := range ws {
				if i%2 == 0 && w.taken > 0 {
					if err = os.Remove(filepath.Join(mounts[i/2%2], filepath.Base(w.path))); err != nil {
						return
					}
				} else if w.taken > 0 {
					name := filepath.Join(filepath.Dir(w.path), fmt.Sprintf("kept-%d-%s", round, filepath.Base(w.path)))
					if err = os.Rename(w.path, name); err != nil {
						return
					}
					w.path = name
					all = append(all, w)
				}
			}
			if len(all) > 12 {
				for _, w := range all[:8] {
					if err = os.Remove(w.path); err != nil {
						return
					}
				}
				all = all[8:]
			}
		}
	}()
	for range 3 {
		time.Sleep(700 * time.Millisecond)
		r.meta.Kill()
		r.startMeta()
		if u := r.used(); u.Used > limit {
			t.Errorf("DATA: %d bytes are committed, the limit is %d", u.Used, limit)
		}
	}
	close(stop)
	<-done
	if err != nil {
		t.Fatal(err)
	}
	if err := syncAll(mounts); err != nil {
		t.Fatal(err)
	}
	for _, w := range all {
		if err := w.verify(mounts[0]); err != nil {
			t.Error(err)
		}
	}
	if u := r.used(); u.Used > limit {
		t.Errorf("DATA: %d bytes are committed, the limit is %d", u.Used, limit)
	}
	r.fsck()
}

// TestIdleIsRecalled: bytes promised to a mount that leaves the promise idle are recalled before
// any mount is refused, and bytes promised to a killed mount become free again.
func TestIdleIsRecalled(t *testing.T) {
	const limit = 400 << 20 // at most 1 % of the limit is idle: 4 MiB
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q", "--quota", fmt.Sprint(limit))
	a, pa := r.mount("a")
	b, _ := r.mount("b")
	if err := os.WriteFile(filepath.Join(a, "small"), make([]byte, 100), 0o644); err != nil {
		t.Fatal(err)
	}
	// All of the rest, to the last byte, by fallocate and then by write(2).
	f, err := os.Create(filepath.Join(b, "large"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const tail = 6000
	first := int64(limit-100-tail) / 4096 * 4096
	if err := syscall.Fallocate(int(f.Fd()), 0, 0, first); err != nil {
		t.Fatalf("fallocate of all but %d bytes: %v", limit-100-first, err)
	}
	left := int(limit - 100 - first)
	if n, err := f.WriteAt(make([]byte, left), first); err != nil || n != left {
		t.Fatalf("write of the last %d bytes: %d, %v", left, n, err)
	}
	if _, err := f.WriteAt([]byte("x"), int64(limit-100)); !errors.Is(err, syscall.EDQUOT) {
		t.Fatalf("one byte more: %v", err)
	}
	if err := syncAll([]string{a, b}); err != nil {
		t.Fatal(err)
	}
	if u := r.used(); u.Used != limit {
		t.Errorf("DATA: %d bytes are committed, not %d", u.Used, limit)
	}
	// Overwriting, punching and writing again need nothing.
	over := bytes.Repeat([]byte("o"), 1<<20)
	for i := range int64(8) {
		if _, err := f.WriteAt(over, i<<20); err != nil {
			t.Fatalf("overwrite in a full volume: %v", err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatalf("fsync of overwrites in a full volume: %v", err)
	}
	if err := os.WriteFile(filepath.Join(a, "small"), make([]byte, 100), 0o644); err != nil {
		t.Fatalf("a small file written anew in a full volume: %v", err)
	}
	const punched = 64 << 10
	if err := syscall.Fallocate(int(f.Fd()), 3, 1<<20, punched); err != nil {
		t.Fatal(err)
	}
	g, err := os.Create(filepath.Join(a, "g"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Write(over[:punched]); err != nil {
		t.Fatalf("write of what was punched elsewhere: %v", err)
	}
	if _, err := f.WriteAt([]byte("x"), 1<<20); !errors.Is(err, syscall.EDQUOT) {
		t.Fatalf("into the hole again: %v", err)
	}
	// The mount with the buffered bytes is killed: no program was told of an error.
	pa.Kill()
	g.Close()
	spawn.Unmount(a)
	r.Until("the promise of a killed mount is free", func() error {
		_, err := f.WriteAt(over[:4096], 1<<20)
		if st, serr := os.Stat(filepath.Join(b, "g")); err != nil && serr == nil && st.Size() > 0 {
			t.Log("it was so slow to be killed that it had committed what it had")
			return cmp.Or(os.Remove(filepath.Join(b, "g")), err)
		}
		return err
	})
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if u := r.used(); u.Used > limit {
		t.Errorf("DATA: %d bytes are committed, the limit is %d", u.Used, limit)
	}
	// A file that is unlinked while open counts until the close.
	if err := os.Remove(filepath.Join(b, "large")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(b, "more"), over, 0o644); !errors.Is(err, syscall.EDQUOT) {
		t.Fatalf("while the deleted file is open: %v", err)
	}
	f.Close()
	r.Until("room of a deleted file", func() error { return os.WriteFile(filepath.Join(b, "more"), over, 0o644) })
	r.fsck()
}

// TestChangedOnline: while files are being written, a quota is set, lowered below the present
// use, raised and removed.
func TestChangedOnline(t *testing.T) {
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q")
	at, _ := r.mount("a")
	f, err := os.Create(filepath.Join(at, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	block := make([]byte, 1<<20)
	write := func() error { _, err := f.Write(block); return err }
	for range 8 {
		if err := write(); err != nil {
			t.Fatal(err)
		}
	}
	r.volume("set", "q", "--quota", fmt.Sprint(4<<20)) // below
	if err := write(); !errors.Is(err, syscall.EDQUOT) {
		t.Fatalf("a write beyond the new limit: %v", err)
	}
	if err := f.Sync(); err != nil {
		t.Fatalf("what was taken before the quota came: %v", err)
	}
	if u := r.used(); u.Used != 8<<20 {
		t.Errorf("%d bytes are committed", u.Used)
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(at, &st); err != nil || st.Blocks*uint64(st.Bsize) != 4<<20 || st.Bavail != 0 {
		t.Errorf("statfs: %v, %d blocks of %d, %d free", err, st.Blocks, st.Bsize, st.Bavail)
	}
	if _, err := f.WriteAt(block, 0); err != nil {
		t.Fatalf("an overwrite beyond the limit: %v", err)
	}
	r.volume("set", "q", "--quota", fmt.Sprint(10<<20))
	for i := range 3 {
		if err := write(); (i < 2) != (err == nil) || i == 2 && !errors.Is(err, syscall.EDQUOT) {
			t.Fatalf("write %d after raising: %v", i, err)
		}
	}
	r.volume("set", "q", "--quota", "0")
	for range 4 {
		if err := write(); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	r.volume("set", "q", "--quota", fmt.Sprint(15<<20), "--quota-inodes", "4")
	for i := range 2 {
		if err := write(); (i == 0) != (err == nil) {
			t.Fatalf("write %d after the quota came back: %v", i, err)
		}
	}
	for i := range 4 {
		err := os.Mkdir(filepath.Join(at, fmt.Sprint("d", i)), 0o755)
		if (i < 2) != (err == nil) || i >= 2 && !errors.Is(err, syscall.EDQUOT) {
			t.Fatalf("directory %d: %v", i, err)
		}
	}
	// Appending with fsync, of which the journal hears little.
	r.volume("set", "q", "--quota", fmt.Sprint(15<<20+100_000))
	g, err := os.OpenFile(filepath.Join(at, "f"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for ; ; n++ {
		if _, err := g.Write(block[:1000]); errors.Is(err, syscall.EDQUOT) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if err := g.Sync(); err != nil {
			t.Fatal(err)
		}
	}
	if n != 100 {
		t.Errorf("%d appends of 1000 bytes fit into 100,000", n)
	}
	// With the last writer the journal hears where the file ends.
	if err := errors.Join(f.Close(), g.Close()); err != nil {
		t.Fatal(err)
	}
	if err := syncAll([]string{at}); err != nil {
		t.Fatal(err)
	}
	r.Until("all is committed", func() error {
		if u := r.used(); u.Used != 15<<20+100_000 {
			return fmt.Errorf("%d bytes", u.Used)
		}
		return nil
	})
	r.fsck()
}
