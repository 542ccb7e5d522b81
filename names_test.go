package penstock

import (
	"errors"
	"fmt"
	"math/rand"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// kernel is a kernel's cache above a client: the kernel uses names and attributes for the granted
// time, unless the client invalidates the cache.
type kernel struct {
	mu    sync.Mutex
	names map[nameKey]meta.Ino // zero: absent
	attrs map[meta.Ino]meta.Attr
}

type nameKey struct {
	dir  meta.Ino
	name string
}

func newKernel() *kernel {
	return &kernel{names: map[nameKey]meta.Ino{}, attrs: map[meta.Ino]meta.Attr{}}
}

func (k *kernel) InvalAttr(_ meta.VolumeID, ino meta.Ino) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.attrs, ino)
}
func (k *kernel) InvalData(v meta.VolumeID, ino meta.Ino, _, _ int64) { k.InvalAttr(v, ino) }
func (k *kernel) InvalEntries(_ meta.VolumeID, dir meta.Ino) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for n := range k.names {
		if n.dir == dir {
			delete(k.names, n)
		}
	}
}

// lookup asks the kernel's own cache first.
func (k *kernel) lookup(t testing.TB, v *Volume, dir meta.Ino, name string) meta.Ino {
	t.Helper()
	k.mu.Lock()
	ino, ok := k.names[nameKey{dir, name}]
	k.mu.Unlock()
	if ok {
		return ino
	}
	e, err := v.Lookup(t.Context(), dir, name)
	if err != nil {
		t.Fatalf("lookup %s: %v", name, err)
	}
	if !e.Negative {
		ino = e.Attr.Ino
	}
	k.mu.Lock()
	if e.Valid > 0 {
		k.names[nameKey{dir, name}] = ino
	}
	k.mu.Unlock()
	return ino
}

// forget drops a name that the kernel itself changes.
func (k *kernel) forget(dir meta.Ino, name string) {
	k.mu.Lock()
	delete(k.names, nameKey{dir, name})
	k.mu.Unlock()
}

// TestNamesAgainstModel runs random namespace operations from three clients in turn, each
// below a kernel that caches as long as it may; every answer must be that of a plain
// model.
func TestNamesAgainstModel(t *testing.T) {
	for seed := range int64(30) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewSource(seed))
			w := newWorld(t, meta.Policy{Replicas: 1})
			if seed%3 == 1 {
				w.delay = 200 * time.Microsecond
			}
			var vs []*Volume
			var ks []*kernel
			for range 3 {
				k := newKernel()
				cfg := Config{Notify: k}
				if seed%2 == 1 {
					cfg.MetaCache = 20
				}
				_, v := open(t, w, cfg)
				vs, ks = append(vs, v), append(ks, k)
			}
			type dirModel map[string]meta.Ino
			tree := map[meta.Ino]dirModel{meta.RootIno: {}}
			dirs := []meta.Ino{meta.RootIno}
			ctx := t.Context()
			for step := range 600 {
				i := rng.Intn(3)
				v, k := vs[i], ks[i]
				dir := dirs[rng.Intn(len(dirs))]
				m := tree[dir]
				name := fmt.Sprintf("n%d", rng.Intn(12))
				have := m[name]
				switch op := rng.Intn(20); {
				case op < 8:
					if got := k.lookup(t, v, dir, name); got != have {
						t.Fatalf("step %d: client %d: %d/%s is %d, not %d", step, i, dir, name, got, have)
					}
				case op < 11:
					e, err := v.Create(ctx, &Call{}, meta.Create{Parent: dir, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true})
					if have != 0 {
						if !errors.Is(err, meta.Exists) {
							t.Fatalf("step %d: create over %d: %v", step, have, err)
						}
						break
					}
					if err != nil {
						t.Fatal(err)
					}
					k.forget(dir, name)
					m[name] = e.Attr.Ino
				case op < 12 && len(dirs) < 6:
					e, err := v.Create(ctx, &Call{}, meta.Create{Parent: dir, Name: name, Mode: meta.TypeDir | 0o755})
					if have != 0 {
						break
					}
					if err != nil {
						t.Fatal(err)
					}
					k.forget(dir, name)
					m[name] = e.Attr.Ino
					tree[e.Attr.Ino] = dirModel{}
					dirs = append(dirs, e.Attr.Ino)
				case op < 14:
					if _, isDir := tree[have]; isDir {
						break
					}
					err := v.Unlink(ctx, &Call{}, dir, name, false)
					if (err == nil) != (have != 0) {
						t.Fatalf("step %d: unlink of %d: %v", step, have, err)
					}
					k.forget(dir, name)
					delete(m, name)
				case op < 16:
					to := dirs[rng.Intn(len(dirs))]
					newName := fmt.Sprintf("n%d", rng.Intn(12))
					_, srcDir := tree[have]
					_, dstDir := tree[tree[to][newName]]
					if srcDir || dstDir {
						break
					}
					err := v.Rename(ctx, &Call{}, dir, name, to, newName, 0)
					if (err == nil) != (have != 0) {
						t.Fatalf("step %d: rename of %d: %v", step, have, err)
					}
					k.forget(dir, name)
					k.forget(to, newName)
					if err == nil && !(dir == to && name == newName) && tree[to][newName] != have {
						delete(m, name)
						tree[to][newName] = have
					}
				case op < 17:
					if _, isDir := tree[have]; have == 0 || isDir {
						break
					}
					newName := fmt.Sprintf("n%d", rng.Intn(12))
					_, err := v.Link(ctx, &Call{}, have, dir, newName)
					if (err == nil) != (m[newName] == 0) {
						t.Fatalf("step %d: link: %v", step, err)
					}
					k.forget(dir, newName)
					if err == nil {
						m[newName] = have
					}
				default:
					var got, want []string
					for at := (DirCursor{}); ; {
						l, eof, err := v.ReadDir(ctx, dir, &at, 1+rng.Intn(5), rng.Intn(2) == 0)
						if err != nil {
							t.Fatalf("step %d: readdir: %v", step, err)
						}
						for _, e := range l {
							got = append(got, fmt.Sprintf("%s=%d", e.Name, e.Ino))
						}
						if eof {
							break
						}
						if len(l) == 0 {
							t.Fatalf("step %d: an empty page before the end", step)
						}
					}
					for n, ino := range m {
						want = append(want, fmt.Sprintf("%s=%d", n, ino))
					}
					slices.Sort(got)
					slices.Sort(want)
					if !slices.Equal(got, want) {
						t.Fatalf("step %d: client %d lists %v, not %v", step, i, got, want)
					}
				}
			}
			w.check()
		})
	}
}

// TestCrossing: many goroutines of two clients create, rename and unlink in
// the same directories; nothing hangs, and in the end all agree.
func TestCrossing(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	w.delay = 300 * time.Microsecond
	_, a := open(t, w, Config{Notify: newKernel()})
	_, b := open(t, w, Config{Notify: newKernel(), MetaCache: 50})
	e, err := a.Create(t.Context(), &Call{}, meta.Create{Parent: meta.RootIno, Name: "d", Mode: meta.TypeDir | 0o755})
	if err != nil {
		t.Fatal(err)
	}
	dirs := []meta.Ino{meta.RootIno, e.Attr.Ino}
	var wg sync.WaitGroup
	for g := range 6 {
		v := []*Volume{a, b}[g%2]
		rng := rand.New(rand.NewSource(int64(g)))
		wg.Go(func() {
			ctx := t.Context()
			for range 300 {
				dir, name := dirs[rng.Intn(2)], fmt.Sprintf("n%d", rng.Intn(8))
				switch rng.Intn(6) {
				case 0, 1:
					v.CreateOpen(ctx, &Call{}, meta.Create{Parent: dir, Name: name, Mode: 0o644}, 0)
				case 2:
					v.Unlink(ctx, &Call{}, dir, name, false)
				case 3:
					v.Rename(ctx, &Call{}, dir, name, dirs[rng.Intn(2)], fmt.Sprintf("n%d", rng.Intn(8)), 0)
				case 4:
					if e, err := v.Lookup(ctx, dir, name); err == nil && !e.Negative {
						v.Write(ctx, &Call{}, e.Attr.Ino, []byte("bytes"), int64(rng.Intn(100)), false, false)
					}
				case 5:
					v.ReadDir(ctx, dir, &DirCursor{}, 0, true)
				}
			}
		})
	}
	wg.Wait()
	_, fresh := open(t, w, Config{})
	for _, dir := range dirs {
		for i := range 8 {
			name := fmt.Sprintf("n%d", i)
			want, err := fresh.Lookup(t.Context(), dir, name)
			if err != nil {
				t.Fatal(err)
			}
			for who, v := range map[string]*Volume{"a": a, "b": b} {
				got, err := v.Lookup(t.Context(), dir, name)
				if err != nil || got.Negative != want.Negative || got.Attr.Ino != want.Attr.Ino {
					t.Errorf("%s: %d/%s: %v, inode %d, not %d", who, dir, name, err, got.Attr.Ino, want.Attr.Ino)
				}
			}
		}
	}
	w.check()
}

// TestCacheSavesRequests: a create in a directory of this client, a lookup of an absent
// name there, and a lookup of a prefetched name send no request.
func TestCacheSavesRequests(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: time.Hour})
	e, err := v.Create(t.Context(), &Call{}, meta.Create{Parent: meta.RootIno, Name: "d", Mode: meta.TypeDir | 0o755})
	if err != nil {
		t.Fatal(err)
	}
	dir := e.Attr.Ino
	before := c.Stats().RPCs
	const files = 500
	for i := range files {
		name := fmt.Sprintf("f%d", i)
		if e, err := v.Lookup(t.Context(), dir, name); err != nil || !e.Negative {
			t.Fatalf("%+v, %v", e, err)
		}
		info, err := v.CreateOpen(t.Context(), &Call{}, meta.Create{Parent: dir, Name: name, Mode: 0o644}, rdwr)
		if err != nil {
			t.Fatal(err)
		}
		v.Release(t.Context(), info.Entry.Attr.Ino, rdwr)
	}
	if n := c.Stats().RPCs - before; n != files {
		t.Errorf("%d creates took %d requests", files, n)
	}
	if err := c.Close(t.Context()); err != nil { // its exclusive leases end
		t.Fatal(err)
	}
	c2, v2 := open(t, w, Config{})
	for i := range files {
		if i == 10 {
			time.Sleep(50 * time.Millisecond) // for the prefetch
		}
		if e, err := v2.Lookup(t.Context(), dir, fmt.Sprintf("f%d", files-1-i)); err != nil || e.Negative {
			t.Fatalf("%+v, %v", e, err)
		}
	}
	if n := c2.Stats().RPCs; n > 30 {
		t.Errorf("looking up %d files took %d requests", files, n)
	}
	n := c2.Stats().RPCs
	for i := range 100 {
		if e, err := v2.Lookup(t.Context(), dir, fmt.Sprintf("absent%d", i)); err != nil || !e.Negative || e.Valid == 0 {
			t.Fatalf("%+v, %v", e, err)
		}
	}
	if n := c2.Stats().RPCs - n; n != 0 {
		t.Errorf("100 absent names in a listed directory took %d requests", n)
	}
}

// TestOrphans: an unlinked file exists while it is open and goes afterwards.
func TestOrphans(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "f")
	write(t, v, ino, make([]byte, 100000), 0)
	if err := v.Unlink(t.Context(), &Call{}, meta.RootIno, "f", false); err != nil {
		t.Fatal(err)
	}
	write(t, v, ino, []byte("still here"), 0)
	if got := contents(t, v, ino); string(got[:10]) != "still here" {
		t.Fatalf("DATA: %q", got[:10])
	}
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	write(t, v, ino, []byte("dirty"), 0)
	v.Release(t.Context(), ino, rdwr)
	for range 1000 {
		if _, err := v.GetAttr(t.Context(), ino); errors.Is(err, meta.Stale) {
			if n := v.c.buf.inUse(); n != 0 {
				t.Fatalf("%d bytes of a removed file are kept", n)
			}
			w.check()
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("the file never went away")
}

// TestRenameSyncsFirst: bytes that replace a file are durable before the rename.
func TestRenameSyncsFirst(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{FlushEvery: time.Hour})
	old := create(t, v, "f")
	write(t, v, old, []byte("old"), 0)
	if err := v.Fsync(t.Context(), old, false); err != nil {
		t.Fatal(err)
	}
	ino := create(t, v, "tmp")
	data := make([]byte, 200000)
	write(t, v, ino, data, 0)
	if err := v.Rename(t.Context(), &Call{}, meta.RootIno, "tmp", meta.RootIno, "f", 0); err != nil {
		t.Fatal(err)
	}
	in := v.node(ino)
	in.mu.Lock()
	if in.file.uncommitted != 0 {
		t.Error("the name is there, the bytes are not")
	}
	in.mu.Unlock()
	in.put()
	w.check()
}

// TestSealOnClose: a file of a seal-on-close volume can't be written after its writer
// closed it, and the kernel may read a large file itself.
func TestSealOnClose(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, SealOnClose: true})
	_, v := open(t, w, Config{FlushEvery: time.Hour})
	for _, size := range []int{0, 10, 100000, 3 << 20} {
		ino := create(t, v, fmt.Sprint(size))
		if size > 0 {
			write(t, v, ino, make([]byte, size), 0)
		}
		v.Release(t.Context(), ino, rdwr)
		info, err := v.Open(t.Context(), &Call{}, ino, 0)
		if err != nil {
			t.Fatal(err)
		}
		if !info.Sealed {
			t.Errorf("a file of %d bytes is not sealed", size)
		}
		if _, err := v.Open(t.Context(), &Call{}, ino, rdwr); !errors.Is(err, meta.NotPermitted) {
			t.Errorf("opened for writing: %v", err)
		}
		f, err := v.Backing(t.Context(), ino)
		if (err == nil) != (size >= 1<<20) {
			t.Errorf("descriptor of a file of %d bytes: %v", size, err)
		}
		if err == nil {
			f.Close()
		}
	}
	w.check()
}

func TestTree(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{})
	tr, ctx := v.Tree(), t.Context()
	if err := tr.MkdirAll(ctx, "/a/b/c", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := tr.WriteFile(ctx, "a/b/c/f", []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	ab, err := tr.Stat(ctx, "a/b")
	if err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{"up": "../b/c/f", "abs": "/a/b/c", "loop": "loop", "dangling": "nowhere"} {
		if _, err := v.Create(ctx, nil, meta.Create{Parent: ab.Attr.Ino, Name: name, Mode: meta.TypeSymlink, Target: to}); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []string{"a/b/c/f", "/a/b/up", "a/b/abs/f", "a/b/c/../c/./f", "//a//b/c/f"} {
		if b, err := tr.ReadFile(ctx, p); err != nil || string(b) != "hello" {
			t.Errorf("DATA: %s: %q, %v", p, b, err)
		}
	}
	for p, want := range map[string]meta.Kind{"a/b/loop": meta.Loop, "a/b/dangling": meta.NotFound, "a/x/y": meta.NotFound, "a/b/c/f/g": meta.NotDir, "a/b": meta.IsDir} {
		if _, err := tr.ReadFile(ctx, p); !errors.Is(err, want) {
			t.Errorf("%s: %v, not %v", p, err, want)
		}
	}
	if err := tr.Rename(ctx, "a/b/c/f", "a/g"); err != nil {
		t.Fatal(err)
	}
	if err := tr.Remove(ctx, "a/b/c"); err != nil {
		t.Fatal(err)
	}
	if err := tr.Remove(ctx, "a/b"); !errors.Is(err, meta.NotEmpty) {
		t.Fatal(err)
	}
	l, err := tr.ReadDirAll(ctx, "a")
	if err != nil || len(l) != 2 {
		t.Fatalf("%v, %v", l, err)
	}
	w.check()
}

// TestDotDotOfListedDirectory: ".." of a directory is its parent, also if the whole
// listing is cached: listings do not contain "..".
func TestDotDotOfListedDirectory(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{})
	e, err := v.Create(t.Context(), &Call{}, meta.Create{Parent: meta.RootIno, Name: "d", Mode: meta.TypeDir | 0o755})
	if err != nil {
		t.Fatal(err)
	}
	for _, listed := range []bool{false, true} {
		if listed {
			if _, _, err := v.ReadDir(t.Context(), e.Attr.Ino, &DirCursor{}, 100, true); err != nil {
				t.Fatal(err)
			}
		}
		up, err := v.Lookup(t.Context(), e.Attr.Ino, "..")
		if err != nil || up.Negative || up.Attr.Ino != meta.RootIno {
			t.Errorf("DATA: listed %t: .. is %+v, %v; want inode %d", listed, up, err, meta.RootIno)
		}
	}
}
