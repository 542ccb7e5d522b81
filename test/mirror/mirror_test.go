// Package mirror tests mirrors of volumes between running programs: in one
// cluster and between two, with kill -9 of both sides.
package mirror

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/operator"
	"penstock.io/penstock/test/program"
)

var (
	kills = flag.Int("kills", 4, "how often a side is killed while mirrors copy")
	size  = flag.Int("size", 32, "MiB of the volume of which 1 % is changed")
	seed  = flag.Uint64("seed", 1, "of the random changes")
	pairs = flag.Int("pairs", 1, "first copies of TestBytes, each beside a plain one")
	prof  = flag.String("profile", "", "directory for profiles of both sides while TestBytes copies")
)

func TestMain(m *testing.M) {
	flag.Parse()
	// Parallel tests mostly wait: for polls, rates, leases.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	os.Exit(program.Main(m))
}

// machine is a 'penstock up' and a client of that cluster.
type machine struct {
	*program.Rig
	dir   string
	up    *spawn.Process
	c     *penstock.Client
	creds *peer.Credentials // nil: the cluster is reached by a Unix socket
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	r := program.NewRig(t)
	m := &machine{Rig: r, dir: filepath.Join(r.Dir, "d")}
	r.Addr = "unix:" + filepath.Join(m.dir, "meta.sock")
	m.start()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		m.c.Close(ctx)
	})
	return m
}

func (m *machine) start() {
	m.T.Helper()
	m.up = m.Run("up", "--dir", m.dir)
	m.Until("up", func() error { _, err := m.Ctl("volume", "list"); return err })
	if m.c == nil {
		m.c = m.dial()
	}
}

func (m *machine) dial() *penstock.Client {
	m.T.Helper()
	c, err := penstock.Dial(m.T.Context(), penstock.Config{Meta: []string{m.Addr}, Creds: m.creds, Name: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		m.T.Fatal(err)
	}
	return c
}

func (m *machine) operator() *operator.Operator {
	m.T.Helper()
	return operator.New(m.T, m.Addr, m.creds)
}

func (m *machine) volume(name string) *penstock.Volume {
	m.T.Helper()
	v, err := m.c.Volume(m.T.Context(), name)
	if err != nil {
		m.T.Fatal(err)
	}
	return v
}

func (m *machine) mirror(target string) (r struct {
	penstock.Mirror
	LagSeconds int64  `json:"lag_seconds"`
	Target     string `json:"target"` // its name
}) {
	m.T.Helper()
	if err := json.Unmarshal(m.Must("mirror", "status", target, "--output", "json"), &r); err != nil {
		m.T.Fatal(err)
	}
	return r
}

// ---- the parts of a tree

// walk describes everything visible in a tree, times included.
func walk(t testing.TB, v *penstock.Volume) map[string]string {
	t.Helper()
	ctx := t.Context()
	all, names := map[string]string{}, map[meta.Ino][]string{}
	var dir func(path string, ino meta.Ino)
	one := func(path string, e penstock.Entry) {
		a := e.Attr
		sec, nsec := a.Mtime.Unix()
		d := fmt.Sprintf("%o %d:%d %d rdev %d mtime %d.%09d", a.Mode, a.UID, a.GID, a.Nlink, a.Rdev, sec, nsec)
		switch a.Mode & meta.TypeMask {
		case meta.TypeRegular:
			d += fmt.Sprintf(" size %d %x", a.Size, content(t, v, a))
			for off, what := int64(0), penstock.SeekData; ; what ^= penstock.SeekData ^ penstock.SeekHole {
				next, err := v.Seek(ctx, a.Ino, off, what)
				if meta.KindOf(err) == meta.NoSuchOffset {
					break
				} else if err != nil {
					t.Fatal(err)
				}
				d += fmt.Sprintf(" %d", next)
				if off = next; off >= int64(a.Size) {
					break
				}
			}
		case meta.TypeSymlink:
			to, err := v.ReadLink(ctx, a.Ino)
			if err != nil {
				t.Fatal(err)
			}
			d += fmt.Sprintf(" to %q", to)
		}
		xattrs, err := v.ListXattr(ctx, a.Ino)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(xattrs)
		for _, x := range xattrs {
			b, err := v.GetXattr(ctx, a.Ino, x)
			if err != nil {
				t.Fatal(err)
			}
			d += fmt.Sprintf(" %s=%x", x, b)
		}
		all[path] = d
		names[a.Ino] = append(names[a.Ino], path)
	}
	dir = func(path string, ino meta.Ino) {
		for at, eof := (penstock.DirCursor{}), false; !eof; {
			var l []penstock.DirEntry
			var err error
			if l, eof, err = v.ReadDir(ctx, ino, &at, 0, false); err != nil {
				t.Fatal(err)
			}
			for _, x := range l {
				e, err := v.GetAttr(ctx, x.Ino)
				if err != nil {
					t.Fatal(err)
				}
				one(path+"/"+x.Name, e)
				if e.Attr.IsDir() {
					dir(path+"/"+x.Name, x.Ino)
				}
			}
		}
	}
	root, err := v.GetAttr(ctx, meta.RootIno)
	if err != nil {
		t.Fatal(err)
	}
	one("", root)
	dir("", meta.RootIno)
	for _, l := range names { // the names of the same inode
		slices.Sort(l)
		for _, path := range l {
			all[path] += fmt.Sprintf(" names %q", l)
		}
	}
	return all
}

func content(t testing.TB, v *penstock.Volume, a meta.Attr) []byte {
	t.Helper()
	h, p := sha256.New(), make([]byte, 1<<20)
	for off := int64(0); off < int64(a.Size); {
		n, err := v.Read(t.Context(), a.Ino, p, off)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			t.Fatal(io.ErrUnexpectedEOF)
		}
		h.Write(p[:n])
		off += int64(n)
	}
	return h.Sum(nil)
}

func differ(a, b map[string]string) error {
	var bad []string
	for _, path := range slices.Sorted(maps.Keys(a)) {
		if a[path] != b[path] {
			bad = append(bad, fmt.Sprintf("%q:\n  %s\n  %s", path, a[path], b[path]))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[path]; !ok {
			bad = append(bad, fmt.Sprintf("%q is too much: %s", path, b[path]))
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return errors.New(strings.Join(bad[:min(len(bad), 10)], "\n"))
}

// same compares the snapshot that readers of a target see with the source's.
func same(t testing.TB, src *penstock.Volume, dst *penstock.Volume, r *penstock.Mirror) {
	t.Helper()
	s, err := src.Snapshot(t.Context(), r.Last.Snapshot)
	if err != nil {
		t.Fatal(err)
	}
	if err := differ(walk(t, s), walk(t, dst)); err != nil {
		t.Fatalf("DATA: the target is not what the source was:\n%v", err)
	}
}

// ---- random trees

// writer changes a volume at random.
type writer struct {
	t     testing.TB
	v     *penstock.Volume
	r     *rand.Rand
	dirs  []meta.Ino
	files []meta.Ino
	names []name
	n     int
}

type name struct {
	dir, ino meta.Ino
	name     string
	isDir    bool
}

func newWriter(t testing.TB, v *penstock.Volume, seed uint64) *writer {
	return &writer{t: t, v: v, r: rand.New(rand.NewPCG(seed, 7)), dirs: []meta.Ino{meta.RootIno}}
}

func (w *writer) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func pick[T any](r *rand.Rand, l []T) T { return l[r.IntN(len(l))] }

// newName is any bytes except those forbidden in names.
func (w *writer) newName() string {
	w.n++
	b := []byte(fmt.Sprintf("%x", w.n))
	for range w.r.IntN(12) {
		if c := byte(1 + w.r.IntN(255)); c != '/' {
			b = append(b, c)
		}
	}
	return string(b)
}

func (w *writer) time() meta.Time {
	return meta.TimeOf(w.r.Int64N(2e9), uint32(w.r.IntN(1e9)))
}

// acl is system.posix_acl_access of a user beside the three.
func acl(r *rand.Rand) []byte {
	b := []byte{2, 0, 0, 0}
	for _, e := range [][3]uint32{{1, 7, 1<<32 - 1}, {2, uint32(r.IntN(8)), 1000 + uint32(r.IntN(9))}, {4, 5, 1<<32 - 1}, {16, 7, 1<<32 - 1}, {32, 1, 1<<32 - 1}} {
		b = append(b, byte(e[0]), 0, byte(e[1]), 0, byte(e[2]), byte(e[2]>>8), byte(e[2]>>16), byte(e[2]>>24))
	}
	return b
}

func (w *writer) bytes(n int) []byte {
	b := make([]byte, n)
	for i := 0; i < n; i += 8 {
		x := w.r.Uint64()
		for j := i; j < min(i+8, n); j++ {
			b[j] = byte(x >> (8 * (j - i)))
		}
	}
	return b
}

// step does one operation.
func (w *writer) step() {
	w.t.Helper()
	ctx, r := w.t.Context(), w.r
	dir := pick(r, w.dirs)
	create := func(c meta.Create) meta.Ino {
		c.Parent, c.Name, c.UID, c.GID, c.Excl = dir, w.newName(), uint32(r.IntN(3)), uint32(r.IntN(3)), true
		e, err := w.v.Create(ctx, nil, c)
		w.must(err)
		w.names = append(w.names, name{dir, e.Attr.Ino, c.Name, e.Attr.IsDir()})
		return e.Attr.Ino
	}
	file := func() (meta.Ino, bool) {
		if len(w.files) == 0 {
			return 0, false
		}
		return pick(r, w.files), true
	}
	switch k := r.IntN(20); k {
	case 0, 1, 2:
		ino := create(meta.Create{Mode: meta.TypeRegular | uint32(r.IntN(0o10000))})
		w.files = append(w.files, ino)
		for range r.IntN(3) {
			w.write(ino)
		}
	case 3:
		w.dirs = append(w.dirs, create(meta.Create{Mode: meta.TypeDir | 0o700 | uint32(r.IntN(0o10000))}))
	case 4:
		create(meta.Create{Mode: meta.TypeSymlink | 0o777, Target: w.newName()})
	case 5:
		create(meta.Create{Mode: pick(r, []uint32{meta.TypeFIFO, meta.TypeSocket, meta.TypeChar, meta.TypeBlock}) | 0o640, Rdev: uint32(r.IntN(1000))})
	case 6, 7, 8:
		if ino, ok := file(); ok {
			w.write(ino)
		}
	case 9:
		if ino, ok := file(); ok {
			n := w.newName()
			_, err := w.v.Link(ctx, nil, ino, dir, n)
			w.must(err)
			w.names = append(w.names, name{dir, ino, n, false})
		}
	case 10, 11, 12:
		w.rename(dir)
	case 13, 14:
		w.remove()
	case 15, 16:
		ino := pick(r, w.dirs)
		if f, ok := file(); ok && r.IntN(2) == 0 {
			ino = f
		}
		w.must(w.v.SetXattr(ctx, nil, meta.SetXattr{Ino: ino, Name: "user." + string('a'+rune(r.IntN(3))), Value: w.bytes(r.IntN(100))}))
		if r.IntN(3) == 0 {
			w.must(w.v.SetXattr(ctx, nil, meta.SetXattr{Ino: ino, Name: "system.posix_acl_access", Value: acl(r)}))
		}
		if r.IntN(4) == 0 {
			if err := w.v.RemoveXattr(ctx, nil, ino, "user.a"); meta.KindOf(err) != meta.NoAttribute {
				w.must(err)
			}
		}
	case 17:
		ino := pick(r, w.dirs)
		if r.IntN(2) == 0 && len(w.names) > 0 {
			ino = pick(r, w.names).ino
		}
		_, err := w.v.SetAttr(ctx, nil, meta.SetAttr{Ino: ino, Mask: meta.SetMtime | meta.SetAtime, Mtime: w.time(), Atime: w.time()})
		w.must(err)
	case 18:
		_, err := w.v.SetAttr(ctx, nil, meta.SetAttr{Ino: pick(r, w.dirs), Mask: meta.SetUID | meta.SetGID, UID: uint32(r.IntN(5)), GID: uint32(r.IntN(5))})
		w.must(err)
	case 19: // other bytes, the same size and time
		if ino, ok := file(); ok {
			e, err := w.v.GetAttr(ctx, ino)
			w.must(err)
			if e.Attr.Size > 0 {
				_, err = w.v.Write(ctx, nil, ino, w.bytes(1), r.Int64N(int64(e.Attr.Size)), false, false)
				w.must(err)
				w.must(w.v.Fsync(ctx, ino, false))
				_, err = w.v.SetAttr(ctx, nil, meta.SetAttr{Ino: ino, Mask: meta.SetMtime, Mtime: e.Attr.Mtime})
				w.must(err)
			}
		}
	}
}

func (w *writer) write(ino meta.Ino) {
	w.t.Helper()
	ctx, r := w.t.Context(), w.r
	switch r.IntN(6) {
	case 0:
		_, err := w.v.SetAttr(ctx, nil, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: r.Uint64N(300 << 10)})
		w.must(err)
	case 1:
		w.must(w.v.Fallocate(ctx, nil, meta.Fallocate{Ino: ino, Mode: meta.FallocPunchHole | meta.FallocKeepSize, Off: r.Uint64N(200 << 10), Len: 1 + r.Uint64N(50<<10)}))
	default:
		_, err := w.v.Write(ctx, nil, ino, w.bytes(1+r.IntN(pick(r, []int{10, 5000, 100 << 10}))), r.Int64N(200<<10), false, false)
		w.must(err)
	}
}

// below tells whether a directory is, or lies in, another.
func (w *writer) below(dir, of meta.Ino) bool {
	for dir != meta.RootIno {
		if dir == of {
			return true
		}
		i := slices.IndexFunc(w.names, func(n name) bool { return n.ino == dir })
		dir = w.names[i].dir
	}
	return false
}

func (w *writer) rename(to meta.Ino) {
	w.t.Helper()
	if len(w.names) < 2 {
		return
	}
	i, j := w.r.IntN(len(w.names)), w.r.IntN(len(w.names))
	a, b := &w.names[i], &w.names[j]
	if w.r.IntN(2) == 0 && i != j && !(a.isDir && w.below(b.dir, a.ino)) && !(b.isDir && w.below(a.dir, b.ino)) && a.ino != b.ino {
		w.must(w.v.Rename(w.t.Context(), nil, a.dir, a.name, b.dir, b.name, meta.RenameExchange))
		a.ino, b.ino, a.isDir, b.isDir = b.ino, a.ino, b.isDir, a.isDir
		return
	}
	if a.isDir && w.below(to, a.ino) {
		return
	}
	n := w.newName()
	w.must(w.v.Rename(w.t.Context(), nil, a.dir, a.name, to, n, 0))
	a.dir, a.name = to, n
}

func (w *writer) remove() {
	w.t.Helper()
	if len(w.names) < 10 {
		return
	}
	i := w.r.IntN(len(w.names))
	n := w.names[i]
	err := w.v.Unlink(w.t.Context(), nil, n.dir, n.name, n.isDir)
	if meta.KindOf(err) == meta.NotEmpty {
		return
	}
	w.must(err)
	w.names = slices.Delete(w.names, i, i+1)
	if !slices.ContainsFunc(w.names, func(o name) bool { return o.ino == n.ino }) {
		gone := func(ino meta.Ino) bool { return ino == n.ino }
		w.dirs, w.files = slices.DeleteFunc(w.dirs, gone), slices.DeleteFunc(w.files, gone)
	}
}

func (w *writer) steps(n int) {
	w.t.Helper()
	for range n {
		w.step()
	}
}

// ---- tests

// TestMirror copies random trees to another volume, round after round. Each time the target has
// exactly the source's contents, and no other session can change the target.
func TestMirror(t *testing.T) {
	m := newMachine(t)
	m.Must("volume", "create", "src")
	src := m.volume("src")
	w := newWriter(t, src, *seed)
	w.steps(150)
	m.Must("mirror", "create", "src", "dst", "--attach", "/dst")
	for round := range 4 {
		m.Must("mirror", "sync", "dst", "--wait")
		r := m.mirror("dst")
		same(t, src, m.volume("dst"), &r.Mirror)
		if d, err := src.Snapshot(t.Context(), r.Last.Snapshot); err != nil {
			t.Fatal(err)
		} else if sum, err := d.RecordedDigest(t.Context()); err != nil || sum.String() != r.Last.Digest {
			t.Fatal(sum, err)
		}
		t.Logf("round %d: %d bytes, %d inodes", round, r.Last.Sent, r.Last.Inodes)
		w.steps(60)
	}
	dst := m.volume("dst")
	if _, err := dst.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: "x", Mode: meta.TypeRegular}); meta.KindOf(err) != meta.ReadOnly {
		t.Fatalf("a mirror's target was written: %v", err)
	}
	if _, err := m.operator().TakeSnapshot(t.Context(), dst.ID(), "x"); meta.KindOf(err) != meta.ReadOnly {
		t.Fatalf("a snapshot of a tree that is being filled: %v", err)
	}
	if _, err := m.operator().DeleteSnapshot(t.Context(), src.ID(), m.mirror("dst").Last.Snapshot); meta.KindOf(err) != meta.Busy {
		t.Fatalf("what the next round begins with was deleted: %v", err)
	}
	if _, err := m.Ctl("volume", "delete", "dst", "--yes"); err == nil {
		t.Fatal("a mirror's target was deleted")
	}
	m.Must("fsck", "--volume", "src,dst")
	m.Must("mirror", "delete", "dst", "--yes")
	if _, err := dst.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: "x", Mode: meta.TypeRegular}); err != nil {
		t.Fatalf("what was a target can't be written: %v", err)
	}
	if l, err := m.operator().Snapshots(t.Context(), src.ID()); err != nil || len(l.Snapshots) != 0 {
		t.Fatalf("snapshots of a mirror that is no more: %v %v", l, err)
	}
}

// TestReadMeanwhile reads a target while a slow round fills it: readers see the whole snapshot
// of the round before, and then the next snapshot.
func TestReadMeanwhile(t *testing.T) {
	m := newMachine(t)
	m.Must("volume", "create", "src")
	src := m.volume("src")
	w := newWriter(t, src, *seed+100)
	w.steps(60)
	m.Must("mirror", "create", "src", "dst", "--rate", "4M")
	m.Must("mirror", "sync", "dst", "--wait")
	dst := m.volume("dst")
	first := m.mirror("dst")
	same(t, src, dst, &first.Mirror)
	w.steps(60)
	seen := 0
	// Where looking takes its time, a round may be over before the first look.
	for size := 8 << 20; seen == 0; size *= 2 {
		if size > 128<<20 {
			t.Fatal("each round was over before anybody looked")
		}
		old := walk(t, dst)
		e, err := src.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("big", size), Mode: meta.TypeRegular})
		w.must(err)
		_, err = src.Write(t.Context(), nil, e.Attr.Ino, w.bytes(size), 0, false, false)
		w.must(err)
		m.Must("mirror", "sync", "dst")
		for moved := false; !moved; {
			now := walk(t, dst)
			r := m.mirror("dst")
			switch err := differ(old, now); {
			case err == nil:
				if r.Round != nil && r.Round.Sent > 0 && r.Round.Copied.IsZero() {
					seen++
				}
			case r.Round != nil && r.Round.Copied.IsZero():
				t.Fatalf("readers saw what was being filled:\n%v", err)
			case r.Round == nil:
				moved = true
			}
		}
		r := m.mirror("dst")
		same(t, src, dst, &r.Mirror)
		if took := r.Last.Copied.Sub(r.Last.Began); took < time.Duration(size>>23)*time.Second {
			t.Errorf("%d bytes at 4 MiB a second took %v", size, took)
		}
	}
	m.Must("mirror", "pause", "dst")
	if _, err := m.Ctl("mirror", "sync", "dst"); err == nil {
		t.Error("a mirror that is paused was asked for a round")
	}
}

// TestTwoClusters mirrors between two clusters, kills both sides while rounds are
// under way, fails over to the mirror, and turns the direction.
func TestTwoClusters(t *testing.T) {
	a, b := newMachine(t), newMachine(t)
	a.Must("volume", "create", "src")
	src := a.volume("src")
	w := newWriter(t, src, *seed+200)
	w.steps(100)
	b.Must("mirror", "create", "src", "dst", "--source-dir", a.dir, "--rate", "96K")
	r := rand.New(rand.NewPCG(*seed, 3))
	within, k := 0, 0
	for ; k < *kills || within == 0 && k < 5**kills; k++ { // where commands take long a round may be over before the kill
		w.steps(40)
		w.must(src.SyncAll(t.Context()))
		b.Until("asked", func() error { _, err := b.Ctl("mirror", "sync", "dst"); return err })
		b.Until("begun", func() error {
			if m := b.mirror("dst"); m.Round == nil && m.Heard != m.Asked {
				return errors.New("not yet")
			}
			return nil
		})
		time.Sleep(time.Duration(r.IntN(1500)) * time.Millisecond)
		if m := b.mirror("dst"); m.Round != nil && m.Round.Copied.IsZero() {
			within++
		}
		side := []*machine{a, b}[k%2]
		side.up.Kill()
		side.start()
		b.Until("synced", func() error { _, err := b.Ctl("mirror", "sync", "dst", "--wait"); return err })
		m := b.mirror("dst")
		same(t, src, b.volume("dst"), &m.Mirror)
		t.Logf("kill %d: %d bytes, %d inodes, %d rounds", k, m.Last.Sent, m.Last.Inodes, m.Rounds)
	}
	t.Logf("%d of %d kills while something was being copied", within, k)
	if within == 0 {
		t.Error("no side was killed while something was being copied")
	}
	// The mirror takes over, and is written.
	b.Must("mirror", "promote", "dst", "--yes")
	dst := b.volume("dst")
	last := b.mirror("dst").Last
	w.steps(20) // which will be lost
	there := newWriter(t, dst, *seed+300)
	there.steps(30)
	b.Must("mirror", "resync", "dst", "--reverse", "--discard", "--back-dir", b.dir)
	a.Until("a round of the way back", func() error {
		if now := a.mirror("src").Last; now == nil || now.Snapshot == last.Snapshot {
			return errors.New("not yet")
		}
		return nil
	})
	if base := a.mirror("src").Last.Base; base != last.Snapshot {
		t.Errorf("the way back began with %q, both had %q", base, last.Snapshot)
	}
	a.Must("mirror", "sync", "src", "--wait")
	m := a.mirror("src")
	same(t, dst, src, &m.Mirror)
	if _, err := src.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: "x", Mode: meta.TypeRegular}); meta.KindOf(err) != meta.ReadOnly {
		t.Fatalf("what is a target now was written: %v", err)
	}
	a.Must("fsck", "--volume", "src")
	b.Must("fsck", "--volume", "dst")
}

// TestKilledInBulk kills either side while a large file is copied. This kill has the same
// outcome as any other: the next attempt finishes the round, and the target equals the source.
func TestKilledInBulk(t *testing.T) {
	t.Parallel()
	a, b := newMachine(t), newMachine(t)
	a.Must("volume", "create", "src")
	src := a.volume("src")
	w := newWriter(t, src, *seed+500)
	b.Must("mirror", "create", "src", "dst", "--source-dir", a.dir, "--rate", "16M")
	b.Until("a first round", func() error { _, err := b.Ctl("mirror", "sync", "dst", "--wait"); return err })
	for k, side := range []*machine{b, a} {
		e, err := src.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint(k), Mode: meta.TypeRegular | 0o644})
		w.must(err)
		_, err = src.Write(t.Context(), nil, e.Attr.Ino, w.bytes(12<<20+k), 0, false, false)
		w.must(err)
		_, err = src.Write(t.Context(), nil, e.Attr.Ino, w.bytes(8<<20), 16<<20, false, false)
		w.must(err)
		w.must(src.SyncAll(t.Context()))
		b.Until("asked", func() error { _, err := b.Ctl("mirror", "sync", "dst"); return err })
		within := false
		b.Until("copying", func() error {
			m := b.mirror("dst")
			if within = m.Round != nil && m.Round.Sent > 4<<20 && m.Round.Copied.IsZero(); within || m.Round == nil && m.Heard == m.Asked {
				return nil
			}
			return errors.New("not yet")
		})
		side.up.Kill()
		side.start()
		b.Until("synced", func() error { _, err := b.Ctl("mirror", "sync", "dst", "--wait"); return err })
		m := b.mirror("dst")
		same(t, src, b.volume("dst"), &m.Mirror)
		t.Logf("kill %d, in the midst of it: %v", k, within)
	}
	a.Must("fsck", "--volume", "src")
	b.Must("fsck", "--volume", "dst")
}

// TestBytes changes 1 % of a volume: at most 1.5 % of the volume's bytes are sent. The test
// prints the speed of the first round beside plain TCP to a file.
func TestBytes(t *testing.T) {
	a, b := newMachine(t), newMachine(t)
	a.Must("volume", "create", "src")
	src := a.volume("src")
	w := newWriter(t, src, *seed+400)
	const file = 8 << 20
	block := w.bytes(1 << 20)
	var inos []meta.Ino
	for i := range *size << 20 / file {
		e, err := src.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint(i), Mode: meta.TypeRegular | 0o644})
		w.must(err)
		for off := 0; off < file; off += len(block) {
			block[0], block[1] = byte(i), byte(off>>20)
			_, err := src.Write(t.Context(), nil, e.Attr.Ino, block, int64(off), false, false)
			w.must(err)
		}
		inos = append(inos, e.Attr.Ino)
	}
	w.must(src.SyncAll(t.Context()))
	m, err := b.c.Mirrors()
	w.must(err)
	find := func(target string) *penstock.Mirror {
		r, err := m.Find(t.Context(), target)
		w.must(err)
		return &r
	}
	// In turn with plain TCP, so that other work of the machine hits both alike. The wait is a
	// call in this process: commands would take a part of the processors.
	var ratios, costs []float64
	targets := []string{"dst"}
	for i := 1; i < *pairs; i++ {
		targets = append(targets, fmt.Sprint("dst", i))
	}
	for _, target := range targets {
		profiled := profile(t, target, a, b)
		cpu := func() time.Duration { return cpuOf(t, a.up.PID()) + cpuOf(t, b.up.PID()) }
		free := memory(t, int64(*size)<<20)
		used := cpu()
		b.Must("mirror", "create", "src", target, "--source-dir", a.dir)
		b.Until("the round begun", func() error {
			if m := find(target); m.Last == nil && m.Round == nil {
				return errors.New("not yet")
			}
			return nil
		})
		free()
		b.Until("the bytes copied", func() error {
			if m := find(target); m.Last == nil && (m.Round == nil || m.Round.Copied.IsZero()) {
				return errors.New("not yet")
			}
			return nil
		})
		used = cpu() - used
		profiled()
		b.Until("the first round", func() error {
			if find(target).Last == nil {
				return errors.New("not yet")
			}
			return nil
		})
		first := find(target).Last
		took := first.Copied.Sub(first.Began)
		memory(t, int64(*size)<<20)()
		plain := plainCopy(t, uint64(*size)<<20, block)
		cost := used.Seconds() / float64(first.Sent) * 1e9
		ratios, costs = append(ratios, float64(plain)/float64(took)), append(costs, cost)
		t.Logf("first round: %d bytes copied in %v, shown after %v; plain TCP to a file and fsync: %v; %.2f of its throughput until copied, %.2f until shown",
			first.Sent, took, first.Ended.Sub(first.Began), plain, float64(plain)/float64(took), float64(plain)/float64(first.Ended.Sub(first.Began)))
		t.Logf("both sides together: %.2f s of processor time a GB, until they were copied and a part of the digests was computed", cost)
		if target != "dst" {
			b.Must("mirror", "delete", target, "--yes")
			b.Must("volume", "delete", target, "--yes")
		}
	}
	if *pairs > 1 {
		slices.Sort(ratios)
		slices.Sort(costs)
		t.Logf("medians of %d, in turn: %.2f of plain TCP's throughput, %.2f s a GB; all: %.2f %.2f", *pairs, ratios[len(ratios)/2], costs[len(costs)/2], ratios, costs)
	}
	total := uint64(*size) << 20
	for range total / 100 / 4096 {
		_, err := src.Write(t.Context(), nil, pick(w.r, inos), w.bytes(4096), w.r.Int64N(file/4096)*4096, false, false)
		w.must(err)
	}
	w.must(src.SyncAll(t.Context()))
	b.Must("mirror", "sync", "dst", "--wait")
	last := b.mirror("dst").Last
	t.Logf("1 %% changed: %d bytes sent, %.2f %% of %d, in %v", last.Sent, float64(last.Sent)/float64(total)*100, total, last.Copied.Sub(last.Began))
	if last.Sent == 0 || last.Sent*1000 > total*15 {
		t.Errorf("%d bytes were sent of %d", last.Sent, total)
	}
	for i := range inos[:min(len(inos), 3)] {
		name := fmt.Sprint(i)
		x, err := src.Lookup(t.Context(), meta.RootIno, name)
		w.must(err)
		y, err := b.volume("dst").Lookup(t.Context(), meta.RootIno, name)
		w.must(err)
		if !bytes.Equal(content(t, src, x.Attr), content(t, b.volume("dst"), y.Attr)) {
			t.Errorf("DATA: file %s differs", name)
		}
	}
}

// profile has each side's processor time profiled, if the command line asks, until the returned
// function is called.
func profile(t *testing.T, name string, sides ...*machine) (done func()) {
	if *prof == "" {
		return func() {}
	}
	var wg sync.WaitGroup
	for i, m := range sides {
		wg.Go(func() {
			c := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(m.dir, "admin.sock"))
			}}}
			// Longer than a round takes: the profile's functions tell the round's part apart.
			r, err := c.Get("http://admin/debug/pprof/profile?seconds=8")
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Body.Close()
			all, err := io.ReadAll(r.Body)
			if err == nil {
				err = os.WriteFile(filepath.Join(*prof, fmt.Sprintf("%s-%d.pprof", name, i)), all, 0o600)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	return wg.Wait
}

// cpuOf is the processor time of a process.
func cpuOf(t *testing.T, pid int) time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+2:]))
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * time.Second / 100
}

// memory takes n bytes and more of the machine's memory for files, and frees the memory when the
// returned function is called. The host of a virtual machine may first have to find memory that
// the virtual machine has not used for seconds, which can cost more than all the rest of a copy.
// Where n is small, and no figures are wanted, memory does nothing.
func memory(t *testing.T, n int64) (free func()) {
	if n < 256<<20 {
		return func() {}
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for block := make([]byte, 1<<20); n > -256<<20; n -= int64(len(block)) {
		if _, err := f.Write(block); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		if err := os.Remove(f.Name()); err != nil {
			t.Fatal(err)
		}
	}
}

// plainCopy sends n bytes through a TCP connection into a file, and syncs the file.
func plainCopy(t *testing.T, n uint64, block []byte) time.Duration {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	began, before := time.Now(), cpuOf(t, os.Getpid())
	go func() {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return // the reader sees too few bytes
		}
		defer c.Close()
		for sent := uint64(0); sent < n; sent += uint64(len(block)) {
			if _, err := c.Write(block); err != nil {
				return
			}
		}
	}()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	f, err := os.Create(filepath.Join(t.TempDir(), "copy"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.Copy(f, c)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil || uint64(got) != n {
		t.Fatal(got, err)
	}
	took, used := time.Since(began), cpuOf(t, os.Getpid())-before
	t.Logf("plain TCP to a file: %.2f s of processor time a GB", used.Seconds()/float64(n)*1e9)
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	return took
}
