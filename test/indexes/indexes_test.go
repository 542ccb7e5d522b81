// Package indexes proves that mounts of snapshots answer from indexes, with real processes: the
// answers, the requests to servers, and the effect of damage and dead servers; and that snapshots
// taken while mounts write are states that existed.
package indexes

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/load"
	"penstock.io/penstock/test/program"
)

var (
	files  = flag.Int("files", 1000, "measure mounts of a snapshot of this many files")
	mounts = flag.Int("mounts", 2, "how many mounts at most are measured side by side")
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// rig is a metadata server, a chunk server and mounts, each a process.
type rig struct {
	*program.Rig
	meta  *spawn.Process
	index string // --index-dir
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t)}
	r.index = filepath.Join(r.Dir, "indexes")
	r.startMeta()
	r.Run("chunkserver", "--data", filepath.Join(r.Dir, "c"), "--cluster", r.Addr)
	return r
}

func (r *rig) startMeta() {
	r.T.Helper()
	r.meta = r.Run("meta", "--dir", filepath.Join(r.Dir, "m"), "--admin", r.socket("meta"))
	r.Until("the metadata server answers", func() error { _, err := r.Ctl("volume", "show", "root"); return err })
}

func (r *rig) socket(name string) string { return "unix:" + filepath.Join(r.Dir, name+".sock") }

// mounted is a mount in a process of its own.
type mounted struct {
	*spawn.Process
	r    *rig
	name string
	at   string
}

func (r *rig) mount(source, name string, more ...string) *mounted {
	r.T.Helper()
	m := &mounted{r: r, name: name, at: filepath.Join(r.Dir, name)}
	if err := os.MkdirAll(m.at, 0o755); err != nil {
		r.T.Fatal(err)
	}
	m.Process = r.Run(append([]string{"mount", "--cluster", r.Addr, "--admin", r.socket(name), "--index-dir", r.index, source, m.at}, more...)...)
	r.T.Cleanup(m.end)
	r.Until(name+" is mounted", func() error {
		if !spawn.Mounted(m.at) {
			return errors.New("not yet")
		}
		_, err := r.metrics(name)
		return err
	})
	return m
}

func (m *mounted) end() { m.Kill(); spawn.Unmount(m.at) }

// state is the state of the snapshot's index by the mount.
func (m *mounted) state() string {
	b := make([]byte, 4096)
	n, err := unix.Getxattr(m.at, "penstock.index", b)
	if err != nil {
		return err.Error()
	}
	return string(b[:n])
}

func (m *mounted) await(state string) {
	m.r.T.Helper()
	m.r.Until(m.name+" says "+state, func() error {
		if s := m.state(); !strings.HasPrefix(s, state) {
			return errors.New(s)
		}
		return nil
	})
}

// metrics reads a process's metrics.
func (r *rig) metrics(name string) (map[string]float64, error) {
	return program.Metrics(strings.TrimPrefix(r.socket(name), "unix:"))
}

func (r *rig) count(process, metric string) float64 {
	r.T.Helper()
	all, err := r.metrics(process)
	v, ok := all[metric]
	if err != nil || !ok {
		r.T.Fatalf("%s does not count %s: %v", process, metric, err)
	}
	return v
}

func (r *rig) calls() float64 { r.T.Helper(); return r.count("meta", "penstock_meta_calls_total") }

// must fails the test with the error.
func (r *rig) must(err error) {
	r.T.Helper()
	if err != nil {
		r.T.Fatal(err)
	}
}

// name draws the bytes of a valid name.
func name(rng *rand.Rand) string {
	b := make([]byte, 1+rng.IntN(30))
	for i := range b {
		for b[i] = byte(rng.Uint32()); b[i] == 0 || b[i] == '/'; {
			b[i]++
		}
	}
	return "n" + string(b)
}

// fill makes a tree with something of everything.
func (r *rig) fill(root string, rng *rand.Rand) {
	r.T.Helper()
	dirs := []string{root}
	in := func() string {
		for {
			p := filepath.Join(dirs[rng.IntN(len(dirs))], name(rng))
			if _, err := os.Lstat(p); err != nil { // short names come again
				return p
			}
		}
	}
	for range 12 {
		d := in()
		r.must(os.Mkdir(d, 0o700|os.FileMode(rng.IntN(0o100))))
		dirs = append(dirs, d)
	}
	acl := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range [][3]uint32{{1, 6, 0xffffffff}, {2, 4, 77}, {4, 4, 0xffffffff}, {16, 6, 0xffffffff}, {32, 0, 0xffffffff}} {
		acl = binary.LittleEndian.AppendUint16(acl, uint16(e[0]))
		acl = binary.LittleEndian.AppendUint16(acl, uint16(e[1]))
		acl = binary.LittleEndian.AppendUint32(acl, e[2])
	}
	for i := range 150 {
		p := in()
		switch i % 15 {
		case 0:
			r.must(os.Symlink(name(rng), p))
		case 1:
			r.must(unix.Mknod(p, unix.S_IFIFO|0o640, 0))
		case 2:
			r.must(unix.Mknod(p, unix.S_IFCHR|0o600, int(unix.Mkdev(4, 300))))
		case 3:
			r.must(unix.Mknod(p, unix.S_IFSOCK|0o600, 0))
		case 4: // sparse
			f, err := os.Create(p)
			r.must(err)
			_, err = f.WriteAt([]byte("far away"), 1<<35+int64(rng.Uint32()))
			r.must(err)
			r.must(f.Close())
		default:
			b := make([]byte, []int{0, 5, 3000, 20_000, 300_000}[rng.IntN(5)])
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			r.must(os.WriteFile(p, b, os.FileMode(0o400|rng.IntN(0o400))))
			r.must(os.Lchown(p, rng.IntN(99), rng.IntN(99)))
		}
		switch {
		case i%7 == 0 && i%15 != 0:
			r.must(os.Link(p, in()))
		case i%15 > 4 && i%3 == 0:
			r.must(unix.Setxattr(p, "user."+strconv.Itoa(i), bytes.Repeat([]byte{byte(i)}, rng.IntN(3000)), 0))
			r.must(unix.Setxattr(p, "trusted.t", nil, 0))
		case i%15 > 4 && i%3 == 1:
			r.must(unix.Setxattr(p, "system.posix_acl_access", acl, 0))
		}
	}
}

// look collects all that can be asked about a tree: of every name in any directory the results of
// stat, readlink, the extended attributes and, with bytes, reading.
func look(root string, contents bool) (map[string]string, error) {
	all := map[string]string{}
	err := filepath.WalkDir(root, func(p string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return fmt.Errorf("%q: %w", p, err)
		}
		if p == root {
			st.Ino = 0 // each mount's root has a number of its own
		}
		says := fmt.Sprintf("%o %d %d:%d rdev %d size %d blocks %d ino %d times %v %v %v", st.Mode, st.Nlink, st.Uid, st.Gid, st.Rdev, st.Size, st.Blocks, uint32(st.Ino), st.Atim, st.Mtim, st.Ctim)
		buf := make([]byte, 1<<16)
		n, err := unix.Llistxattr(p, buf)
		if err != nil {
			return fmt.Errorf("%q: listxattr: %w", p, err)
		}
		names := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
		slices.Sort(names)
		for _, name := range names {
			if name == "" || strings.HasPrefix(name, "penstock.") {
				continue
			}
			n, err := unix.Lgetxattr(p, name, buf)
			if err != nil {
				return fmt.Errorf("%q: %s: %w", p, name, err)
			}
			says += fmt.Sprintf(" %s=%x", name, buf[:n])
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			says += " to " + to
		case unix.S_IFREG:
			if !contents {
				break
			}
			f, err := os.Open(p)
			if err != nil {
				return err
			}
			defer f.Close()
			h := sha256.New()
			for off := int64(0); off < st.Size; { // holes are skipped as lseek reports holes
				at, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
				if errors.Is(err, unix.ENXIO) {
					break
				}
				if err != nil {
					return fmt.Errorf("%q: %w", p, err)
				}
				n, err := f.ReadAt(buf[:min(int64(len(buf)), st.Size-at)], at)
				if err != nil {
					return fmt.Errorf("%q: %w", p, err)
				}
				fmt.Fprint(h, at, " ")
				h.Write(buf[:n])
				off = at + int64(n)
			}
			says += fmt.Sprintf(" %x", h.Sum(nil))
		}
		all[strings.TrimPrefix(p, root)] = says
		return nil
	})
	return all, err
}

func (r *rig) look(m *mounted, contents bool) map[string]string {
	r.T.Helper()
	all, err := look(m.at, contents)
	if err != nil {
		r.T.Fatalf("%s: %v", m.name, err)
	}
	return all
}

func (r *rig) same(what string, got, want map[string]string) {
	r.T.Helper()
	for name, says := range want {
		if got[name] != says {
			r.T.Fatalf("%s: %q is\n%s, not\n%s", what, name, got[name], says)
		}
	}
	if len(got) != len(want) {
		r.T.Fatalf("%s: %d names, not %d", what, len(got), len(want))
	}
}

func (r *rig) fsck(volume string) {
	r.T.Helper()
	if out, err := r.Ctl("fsck", "--volume", volume); err != nil {
		r.T.Fatalf("%v\n%s", err, out)
	}
}

// A mount of a snapshot with an index answers exactly as metadata servers do, asks the servers
// nothing, goes on without servers, and does not believe damage.
func TestIndexedMount(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "d", "--attach", "/d")
	live := r.mount("d:/", "live")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	r.must(os.Mkdir(filepath.Join(live.at, "below"), 0o755))
	r.fill(live.at, rng)
	r.must(os.WriteFile(filepath.Join(live.at, "below", "file"), []byte("text"), 0o644))
	r.Must("snapshot", "create", "d", "s")
	r.fill(live.at, rng)          // later changes are in no index
	r.must(load.SyncAll(live.at)) // none is told of while calls are counted

	plain := r.mount("d@s:/", "plain", "--no-index")
	began := r.calls()
	want := r.look(plain, true)
	if asked := r.calls() - began; asked < 10 {
		t.Fatalf("a mount without an index asked %v questions: nothing would be seen below", asked)
	}
	first := r.mount("d@s:/", "first")
	first.await("ready")
	r.same("the first mount with an index", r.look(first, true), want)
	r.fsck("d")

	// From the start, with nothing in the kernel's cache.
	second, below := r.mount("d@s:/", "second"), r.mount("d@s:/below", "third")
	second.await("ready")
	below.await("ready")
	began = r.calls()
	asked := r.count("second", "penstock_client_rpcs_total")
	r.same("the second mount", r.look(second, true), want)
	if n, own := r.calls()-began, r.count("second", "penstock_client_rpcs_total")-asked; n != 0 || own > 2 {
		t.Errorf("a walk through the index and all bytes asked the metadata server %v questions, by the mount's count %v", n, own)
	}
	if n := r.count("second", "penstock_client_indexed_total"); n < float64(len(want)) {
		t.Errorf("%v questions were answered from the index, for %d names", n, len(want))
	}
	if b, err := os.ReadFile(filepath.Join(below.at, "file")); err != nil || string(b) != "text" {
		t.Errorf("DATA: through a mount of a directory: %q, %v", b, err)
	}

	// Without a metadata server: a mount without an earlier look.
	third := r.mount("d@s:/", "alone")
	third.await("ready")
	r.meta.Kill()
	withoutBytes, err := look(first.at, false)
	r.must(err)
	r.same("without a metadata server", r.look(third, false), withoutBytes)
	if _, err := os.Lstat(filepath.Join(third.at, "no such name")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent name without a metadata server: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(third.at, &st); err != nil || st.Files == 0 {
		t.Errorf("statfs without a metadata server: %+v, %v", st, err)
	}
	r.startMeta()
	for _, m := range []*mounted{first, second, below, third} {
		m.end()
	}

	// Damage found at the opening of the index makes the mount fetch the index again.
	r.flip(4096 - 1)
	head := r.mount("d@s:/", "head")
	head.await("ready")
	if n := r.count("head", "penstock_client_bad_indexes_total"); n != 1 {
		t.Errorf("a damaged header: %v refused", n)
	}
	r.same("after a damaged header", r.look(head, true), want)
	head.end()
	// Damage in the middle is found when the record is read, and metadata servers answer.
	r.flip(4096 + 96*3)
	body := r.mount("d@s:/", "body")
	r.same("with a damaged index", r.look(body, true), want)
	r.Until("the damage is told", func() error {
		if s := body.state(); !strings.HasPrefix(s, "refused") || !strings.Contains(s, "block 0 is not what it was") {
			return errors.New(s)
		}
		return nil
	})
	if n := r.count("body", "penstock_client_bad_indexes_total"); n != 1 {
		t.Errorf("a damaged block: %v refused", n)
	}
	body.end()

	r.fsck("d")
	plain.end()
	r.Must("snapshot", "delete", "d", "s", "--yes")
	r.Until("the snapshot's chunks are gone", func() error {
		out, err := r.Ctl("fsck", "--volume", "d")
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		var l []string
		if out := r.Must("snapshot", "list", "d", "--output", "json"); bytes.Contains(out, []byte(`"deleting"`)) {
			l = append(l, string(out))
		}
		if len(l) > 0 {
			return errors.New(l[0])
		}
		return nil
	})
	r.fsck("d")
}

// flip changes a byte of the only index on the disk.
func (r *rig) flip(off int64) {
	r.T.Helper()
	l, err := filepath.Glob(filepath.Join(r.index, "*.index"))
	if err != nil || len(l) != 1 {
		r.T.Fatal(l, err)
	}
	f, err := os.OpenFile(l[0], os.O_RDWR, 0)
	r.must(err)
	defer f.Close()
	var b [1]byte
	_, err = f.ReadAt(b[:], off)
	r.must(err)
	b[0] ^= 1
	_, err = f.WriteAt(b[:], off)
	r.must(err)
}

// TestFigures measures walks of a snapshot with and without its index and of the
// live volume: operations, the metadata server's work, memory. However many
// mounts walk with an index, the metadata server is asked nothing.
func TestFigures(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "d", "--attach", "/d")
	live := r.mount("d:/", "live")
	const each = 500
	var wg sync.WaitGroup
	var made sync.Map
	for w := range 4 {
		wg.Go(func() {
			for i := w; i < *files/each; i += 4 {
				d := filepath.Join(live.at, fmt.Sprintf("class-%05d", i))
				err := os.Mkdir(d, 0o755)
				for k := 0; k < each && err == nil; k++ {
					err = os.WriteFile(filepath.Join(d, fmt.Sprintf("sample-%05d.jpg", k)), make([]byte, 5000), 0o644)
				}
				if err != nil {
					made.Store(w, err)
					return
				}
			}
		})
	}
	wg.Wait()
	made.Range(func(_, err any) bool { t.Fatal(err); return false })
	r.must(load.SyncAll(live.at))
	began := time.Now()
	r.Must("snapshot", "create", "d", "s")
	t.Logf("snapshot of %d files: %v", *files, time.Since(began))
	cpu := cpuOf(t, r.meta.PID())
	one := r.mount("d@s:/", "build")
	began = time.Now()
	one.await("ready")
	t.Logf("index made and fetched after %v, %v of the metadata server's CPU: %s", time.Since(began).Round(time.Millisecond), cpuOf(t, r.meta.PID())-cpu, one.state())
	one.end()
	live.end()
	t.Logf("%-24s %9s %9s %12s %12s %12s %12s %12s", "", "ops", "ops/s", "meta calls", "meta CPU", "mounts' CPU", "RSS+/mount", "B/inode")
	for _, n := range []int{1, *mounts} {
		r.figure("live volume", n, "d:/")
		if asked := r.figure("snapshot, no index", n, "d@s:/", "--no-index"); asked < float64(*files/100) {
			t.Errorf("%d mounts without an index asked %v questions: nothing would be seen with one", n, asked)
		}
		if asked := r.figure("snapshot, index", n, "d@s:/"); asked != 0 {
			t.Errorf("%d mounts with an index asked %v questions", n, asked)
		}
	}
}

// figure walks n fresh mounts side by side: a stat of every file, and an open, a
// read of its first byte, and a close of each tenth.
func (r *rig) figure(what string, n int, source string, more ...string) (asked float64) {
	r.T.Helper()
	var all []*mounted
	for i := range n {
		m := r.mount(source, fmt.Sprintf("m%d", i), more...)
		if len(more) == 0 && strings.Contains(source, "@") {
			m.await("ready")
		}
		all = append(all, m)
	}
	cpu := func() (d time.Duration) {
		for _, m := range all {
			d += cpuOf(r.T, m.PID())
		}
		return d
	}
	rss := func() (b int64) {
		for _, m := range all {
			b += rssOf(r.T, m.PID())
		}
		return b
	}
	calls, metaCPU, mountCPU, mem, began := r.calls(), cpuOf(r.T, r.meta.PID()), cpu(), rss(), time.Now()
	var wg sync.WaitGroup
	ops := make([]int, n)
	errs := make([]error, n)
	for i, m := range all {
		wg.Go(func() {
			errs[i] = filepath.WalkDir(m.at, func(p string, e fs.DirEntry, err error) error {
				if err != nil {
					return err
				}
				ops[i]++
				var st unix.Stat_t
				if err := unix.Lstat(p, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || ops[i]%10 != 0 {
					return err
				}
				ops[i]++
				f, err := os.Open(p)
				if err != nil {
					return err
				}
				_, err = f.ReadAt(make([]byte, 1), 0)
				return errors.Join(err, f.Close())
			})
		})
	}
	wg.Wait()
	took := time.Since(began)
	r.must(errors.Join(errs...))
	total := 0
	for _, k := range ops {
		total += k
	}
	grew := rss() - mem
	asked = r.calls() - calls
	r.T.Logf("%-24s %9d %9.0f %12.0f %12v %12v %9.1f MB %12.0f", fmt.Sprintf("%s, %d", what, n), total, float64(total)/took.Seconds(), asked,
		(cpuOf(r.T, r.meta.PID()) - metaCPU).Round(time.Millisecond), (cpu() - mountCPU).Round(time.Millisecond), float64(grew)/float64(n)/1e6, float64(grew)/float64(n)/float64(*files))
	for _, m := range all {
		m.end()
	}
	return asked
}

// cpuOf is the processor time of a process.
func cpuOf(t testing.TB, pid int) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * time.Second / 100
}

// rssOf is the memory of a process, with mapped files.
func rssOf(t testing.TB, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	pages, _ := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	return pages * int64(syscall.Getpagesize())
}
