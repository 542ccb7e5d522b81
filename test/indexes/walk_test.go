package indexes

import (
	"bufio"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// requests counts the kernel's requests to a mount, by operation.
func (m *mounted) requests() map[string]int {
	m.r.T.Helper()
	f, err := os.Open(filepath.Join(m.at, ".penstock", "requests"))
	m.r.must(err)
	defer f.Close()
	all := map[string]int{}
	for s := bufio.NewScanner(f); s.Scan(); {
		op, n, _ := strings.Cut(s.Text(), " ")
		if all[op], err = strconv.Atoi(n); err != nil {
			m.r.T.Fatalf("%q: %v", s.Text(), err)
		}
	}
	return all
}

// TestSecondWalk: what was seen once below .snapshot/NAME of a mount of the live
// volume is not asked for again, neither of the mount nor of a server, although the
// name of the snapshot itself is looked at anew each second, and the volume changes.
func TestSecondWalk(t *testing.T) {
	r := newRig(t)
	r.Must("volume", "create", "data")
	m := r.mount("data:/", "live")
	const dirs, each = 4, 25
	for d := range dirs {
		r.must(os.Mkdir(filepath.Join(m.at, fmt.Sprint("d", d)), 0o755))
		for f := range each {
			r.must(os.WriteFile(filepath.Join(m.at, fmt.Sprint("d", d), fmt.Sprint("f", f)), []byte("then"), 0o644))
		}
	}
	r.Must("snapshot", "create", "data", "one")
	// walk looks at each name and reads each file.
	walk := func() (seen int) {
		t.Helper()
		r.must(filepath.WalkDir(filepath.Join(m.at, ".snapshot", "one"), func(p string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Lstat(p, &st); err != nil {
				return err
			}
			if !e.IsDir() {
				seen++
				b, err := os.ReadFile(p)
				if err == nil && string(b) != "then" {
					err = fmt.Errorf("DATA: %s is %q", p, b)
				}
				return err
			}
			return nil
		}))
		return seen
	}
	if n := walk(); n != dirs*each {
		t.Fatal(n)
	}
	time.Sleep(1100 * time.Millisecond) // so long the snapshot's name is believed
	r.must(os.WriteFile(filepath.Join(m.at, "d0", "f0"), []byte("now"), 0o644))
	was, calls, began := m.requests(), r.calls(), time.Now()
	walk()
	now, more, seconds := m.requests(), r.calls()-calls, int(time.Since(began)/time.Second)
	t.Logf("%v, then %v; %v calls to the metadata server", was, now, more)
	// Each second the kernel asks for .snapshot and its entry.
	for _, op := range []string{"lookup", "getattr", "statx", "read", "readdir", "readdirplus"} {
		most := 4 + 4*seconds
		if strings.HasPrefix(op, "readdir") { // of each directory, until its end
			most += 3 * (dirs + 1)
		}
		if n := now[op] - was[op]; n > most {
			t.Errorf("the second walk over %d files took %d %s", dirs*each, n, op)
		}
	}
	// The session's own, and the list of snapshots.
	if more > float64(20+4*seconds) {
		t.Errorf("the second walk over %d files took %v calls to the metadata server", dirs*each, more)
	}
}
