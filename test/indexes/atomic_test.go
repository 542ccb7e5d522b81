package indexes

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var snapshots = flag.Int("snapshots", 4, "how many snapshots are taken while two mounts write; after half of them the metadata server is killed")

// linked is a kind of counter: set sets the counter to n in a directory, get reads the counter.
type linked struct {
	name  string
	begin func(dir string) error
	set   func(dir string, n int) error
	get   func(dir string) (int, error)
}

// only finds the number of the single name in a directory that begins with a prefix.
func only(dir, prefix string) (int, error) {
	l, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	n, found := 0, 0
	for _, e := range l {
		if strings.HasPrefix(e.Name(), prefix) {
			if _, err := fmt.Sscanf(e.Name()[len(prefix):], "%d", &n); err != nil {
				return 0, err
			}
			found++
		}
	}
	if found != 1 {
		return 0, fmt.Errorf("DATA: %d names %s in %s", found, prefix, dir)
	}
	return n, nil
}

var linkedKinds = []linked{
	{"written", func(dir string) error { return os.WriteFile(filepath.Join(dir, "w"), make([]byte, 8), 0o644) },
		func(dir string, n int) error {
			f, err := os.OpenFile(filepath.Join(dir, "w"), os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt(binary.BigEndian.AppendUint64(nil, uint64(n)), 0)
			return err
		}, func(dir string) (int, error) {
			b, err := os.ReadFile(filepath.Join(dir, "w"))
			if err != nil || len(b) != 8 {
				return 0, fmt.Errorf("DATA: %d bytes of a counter, %v", len(b), err)
			}
			return int(binary.BigEndian.Uint64(b)), nil
		}},
	{"renamed", func(dir string) error { return os.WriteFile(filepath.Join(dir, "r0"), nil, 0o644) },
		func(dir string, n int) error {
			return os.Rename(filepath.Join(dir, fmt.Sprint("r", n-1)), filepath.Join(dir, fmt.Sprint("r", n)))
		}, func(dir string) (int, error) { return only(dir, "r") }},
	{"truncated", func(dir string) error { return os.WriteFile(filepath.Join(dir, "t"), nil, 0o644) },
		func(dir string, n int) error { return os.Truncate(filepath.Join(dir, "t"), int64(n)) },
		func(dir string) (int, error) {
			st, err := os.Stat(filepath.Join(dir, "t"))
			if err != nil {
				return 0, err
			}
			return int(st.Size()), nil
		}},
	{"linked", func(dir string) error { return os.WriteFile(filepath.Join(dir, "base"), nil, 0o644) },
		func(dir string, n int) error {
			return os.Link(filepath.Join(dir, "base"), filepath.Join(dir, fmt.Sprint("l", n)))
		}, func(dir string) (int, error) {
			l, err := os.ReadDir(dir)
			n := 0
			for _, e := range l {
				if strings.HasPrefix(e.Name(), "l") {
					n++
				}
			}
			return n, err
		}},
}

// TestAtomicOverMounts: a process writes through a mount, then a process on another mount writes
// that the first write was done: counters in files, chains of renames, lengths, links. Each
// snapshot taken meanwhile is a state that existed: a snapshot has every change that had
// returned, and never the second change without the first; also when the metadata server is
// killed during the writes.
func TestAtomicOverMounts(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data")
	sides := [2]*mounted{r.mount("data:/", "a"), r.mount("data:/", "b")}
	type pair struct {
		of   [2]linked
		dir  [2]string // below a mount
		done atomic.Int64
	}
	var pairs []*pair
	for i, a := range linkedKinds {
		for _, b := range []linked{a, linkedKinds[(i+1)%len(linkedKinds)]} {
			p := &pair{of: [2]linked{a, b}}
			for side := range 2 {
				p.dir[side] = fmt.Sprintf("%s-%s-%d", a.name, b.name, side)
				dir := filepath.Join(sides[side].at, p.dir[side])
				r.must(os.Mkdir(dir, 0o755))
				r.must(p.of[side].begin(dir))
			}
			pairs = append(pairs, p)
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	for _, p := range pairs {
		wg.Go(func() {
			for n := 1; ctx.Err() == nil; n++ {
				for side := range 2 {
					if err := p.of[side].set(filepath.Join(sides[side].at, p.dir[side]), n); err != nil {
						t.Errorf("%s to %d: %v", p.dir[side], n, err)
						return
					}
				}
				p.done.Store(int64(n))
				time.Sleep(5 * time.Millisecond)
			}
		})
	}
	for i := range *snapshots {
		var name string
		before := make([]int, len(pairs))
		for try := 0; ; try++ {
			name = fmt.Sprint("s", i, "-", try)
			for j, p := range pairs {
				before[j] = int(p.done.Load())
			}
			taken := make(chan error, 1)
			go func() {
				_, err := r.Ctl("snapshot", "create", "data", name, "--strict")
				taken <- err
			}()
			if i == *snapshots/2 && try == 0 {
				r.meta.Kill()
				r.startMeta()
			}
			err := <-taken
			if err == nil {
				break
			}
			// A machine may be too busy for clients to answer within a second.
			if t.Log(err); try == 50 {
				t.Fatal(err)
			}
		}
		for j, p := range pairs {
			var n [2]int
			for side := range 2 {
				dir := filepath.Join(sides[(i+side)%2].at, ".snapshot", name, p.dir[side])
				var err error
				if n[side], err = p.of[side].get(dir); err != nil {
					t.Fatalf("%s: %v", dir, err)
				}
			}
			if n[1] > n[0] || n[0] > n[1]+1 {
				t.Errorf("DATA: snapshot %d: %s is %d, %s is %d: no such moment was", i, p.dir[0], n[0], p.dir[1], n[1])
			}
			if n[1] < before[j] {
				t.Errorf("DATA: snapshot %d: %s is %d, and was %d before the call", i, p.dir[1], n[1], before[j])
			}
		}
		if t.Failed() {
			return
		}
	}
	stop()
	wg.Wait()
	for _, p := range pairs {
		if n := p.done.Load(); n < int64(*snapshots) {
			t.Errorf("%v was written %d times: little is tested", p.dir, n)
		}
	}
	r.Must("fsck")
}
