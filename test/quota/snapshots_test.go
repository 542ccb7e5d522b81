package quota

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// counted is the size of a volume's snapshots in the quota.
type counted struct {
	Used      uint64 `json:"used_bytes"`
	Snapshots struct {
		Quota *struct {
			InForce bool   `json:"in_force"`
			Bytes   uint64 `json:"bytes"`
			Falls   bool   `json:"falls"`
		} `json:"quota"`
	} `json:"snapshots"`
}

func (r *rig) counted() (c counted, err error) {
	out, err := r.Ctl("volume", "show", "q", "--output", "json")
	if err == nil {
		err = json.Unmarshal(out, &c)
	}
	return c, err
}

// counts waits until the used bytes are exact, and have the given size and the given share of
// snapshots alone.
func (r *rig) counts(what string, used, alone uint64) {
	r.T.Helper()
	r.Until(what, func() error {
		c, err := r.counted()
		if err != nil {
			return err
		}
		if q := c.Snapshots.Quota; q == nil || !q.InForce || q.Falls || q.Bytes != alone || c.Used != used {
			return fmt.Errorf("%d bytes are used, of snapshots %+v; want %d, of those %d", c.Used, q, used, alone)
		}
		return nil
	})
}

// asUsage requires that the quota's count equals a count of all bytes. No byte came back after a
// time in snapshots alone, so the two are equal.
func (r *rig) asUsage() {
	r.T.Helper()
	r.Until("the quota has what snapshot usage finds", func() error {
		out, err := r.Ctl("snapshot", "usage", "q", "--output", "json")
		if err != nil {
			return err
		}
		var u struct {
			Live  uint64 `json:"live_bytes"`
			Alone uint64 `json:"snapshots_alone_bytes"`
			Going uint64 `json:"deleting_bytes"`
		}
		if err := json.Unmarshal(out, &u); err != nil {
			return err
		}
		c, err := r.counted()
		if err != nil {
			return err
		}
		if q := c.Snapshots.Quota; q == nil || q.Falls || q.Bytes != u.Alone || c.Used != u.Live+u.Alone || u.Going != 0 {
			return fmt.Errorf("the quota has %d bytes, of snapshots %+v; usage tells %+v", c.Used, q, u)
		}
		return nil
	})
}

// TestSnapshotsCount: bytes that only snapshots hold count if the policy says so, over a real
// mount: bytes from before the policy, and bytes overwritten since, also when the owner is
// killed. In a full volume no request is refused that needs no room.
func TestSnapshotsCount(t *testing.T) {
	const mb, limit = 1 << 20, 32 << 20
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q", "--quota", fmt.Sprint(limit))
	at, _ := r.mount("a")
	f, err := os.Create(filepath.Join(at, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	write := func(off int64, n int, c byte) error {
		t.Helper()
		for ; n > 0; off, n = off+mb, n-mb {
			if _, err := f.WriteAt(bytes.Repeat([]byte{c}, min(n, mb)), off); err != nil {
				return err
			}
		}
		return f.Sync()
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	small := func(name string, c byte) error {
		f, err := os.OpenFile(filepath.Join(at, name), os.O_RDWR|os.O_CREATE, 0o644) // not cut off
		if err != nil {
			return err
		}
		_, err = f.Write(bytes.Repeat([]byte{c}, 1000))
		return errors.Join(err, f.Sync(), f.Close())
	}
	must(write(0, 8*mb, 'a'))
	must(small("old", 'a'))
	r.Must("snapshot", "create", "q", "one")
	must(write(0, 2*mb, 'b'))
	must(write(8*mb, 1*mb, 'b'))
	r.volume("set", "q", "--quota-snapshots")
	r.counts("what was there before the policy", 11*mb+1000, 2*mb)
	must(write(1*mb, 2*mb, 'c')) // one of the two blocks is in the snapshot
	r.counts("overwritten since", 12*mb+1000, 3*mb)
	must(small("old", 'b'))
	must(small("new", 'b'))
	r.counts("small files", 12*mb+3000, 3*mb+1000)
	r.meta.Kill()
	r.startMeta()
	r.counts("the next owner", 12*mb+3000, 3*mb+1000)
	r.fsck()
	r.asUsage()
	var st syscall.Statfs_t
	if err := syscall.Statfs(at, &st); err != nil || st.Blocks*uint64(st.Bsize) != limit || (st.Bavail+1)*uint64(st.Bsize) < limit-12*mb-3000 || st.Bavail*uint64(st.Bsize) > limit-12*mb-3000 {
		t.Errorf("statfs: %v, %d blocks of %d, %d free", err, st.Blocks, st.Bsize, st.Bavail)
	}

	// Full, but for less than a block.
	g, err := os.Create(filepath.Join(at, "g"))
	must(err)
	defer g.Close()
	must(syscall.Fallocate(int(g.Fd()), 0, 0, (limit-12*mb-3000)/4096*4096))
	if err := write(3*mb, mb, 'd'); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("overwriting what the snapshot has, in a full volume: %v", err)
	}
	if err := small("old", 'c'); err != nil { // the snapshot has other bytes by now
		t.Errorf("overwriting a small file that was overwritten since the snapshot: %v", err)
	}
	if err := small("new", 'c'); err != nil {
		t.Errorf("overwriting a small file that no snapshot has: %v", err)
	}
	if err := write(0, 3*mb, 'e'); err != nil {
		t.Errorf("overwriting what no snapshot has: %v", err)
	}
	if err := write(8*mb, mb, 'e'); err != nil {
		t.Errorf("overwriting what came after the snapshot: %v", err)
	}
	r.Must("snapshot", "create", "q", "two")
	if err := write(0, mb, 'f'); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("the same, which a snapshot has now: %v", err)
	}
	if err := small("new", 'd'); err != nil && !errors.Is(err, syscall.EDQUOT) {
		t.Error(err)
	}
	// Cutting off bytes of a snapshot gives no room, and takes none.
	must(f.Truncate(8 * mb))
	if err := write(8*mb, mb, 'f'); !errors.Is(err, syscall.EDQUOT) {
		t.Errorf("writing again what was cut off and a snapshot has: %v", err)
	}
	r.asUsage()
	r.fsck()

	r.Must("snapshot", "delete", "--yes", "q", "two")
	r.Until("room of a deleted snapshot", func() error { return write(8*mb, mb, 'f') })
	if err := write(0, 3*mb, 'f'); err != nil {
		t.Errorf("overwriting what no snapshot has any more: %v", err)
	}
	r.asUsage()
	c, err := r.counted()
	must(err)
	r.volume("set", "q", "--quota-snapshots=false")
	if u := r.used(); u.Used != c.Used-c.Snapshots.Quota.Bytes {
		t.Errorf("switched off, %d bytes are used; with %d of snapshots it was %d", u.Used, c.Snapshots.Quota.Bytes, c.Used)
	}
	must(write(3*mb, mb, 'g'))
	r.volume("set", "q", "--quota-snapshots")
	r.counts("switched on again", c.Used+mb, c.Snapshots.Quota.Bytes+mb)
	r.Must("snapshot", "delete", "--yes", "q", "one")
	r.counts("no snapshot is left", c.Used-c.Snapshots.Quota.Bytes, 0)
	r.fsck()
}

// block is a block that a writer overwrites again and again.
const block = 64 << 10

// changer overwrites a file at random, and knows the right contents.
type changer struct {
	path   string
	blocks [][]byte // nil: nothing was written
	denied int
	failed error // fsync was refused: the bytes taken since the last fsync are gone
}

func (c *changer) run(seed uint64, until time.Time) error {
	rng := rand.New(rand.NewPCG(seed, 5))
	f, err := os.OpenFile(c.path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	for n := uint64(0); time.Now().Before(until) && c.failed == nil; n++ {
		i := rng.IntN(len(c.blocks))
		p := make([]byte, block)
		fill(p, seed<<32|n, 0)
		switch _, err := f.WriteAt(p, int64(i)*block); {
		case errors.Is(err, syscall.EDQUOT):
			c.denied++
			time.Sleep(5 * time.Millisecond)
		case err != nil:
			return fmt.Errorf("write: %w", err)
		default:
			c.blocks[i] = p
		}
		if rng.IntN(20) == 0 {
			if err := f.Sync(); errors.Is(err, syscall.EDQUOT) {
				c.failed = err
			} else if err != nil {
				return fmt.Errorf("fsync: %w", err)
			}
		}
	}
	if c.failed != nil {
		return nil
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("the last fsync: %w", err)
	}
	return nil
}

// TestRaceWithSnapshots: two mounts overwrite their files at random while snapshots are taken and
// deleted and the metadata server is killed. The bytes of the files and of the snapshots together
// never exceed the quota by a byte, and all bytes that a write took are in the files.
func TestRaceWithSnapshots(t *testing.T) {
	const limit = 24 << 20
	r := newRig(t)
	r.volume("create", "q", "--attach", "/q", "--quota", fmt.Sprint(limit), "--quota-snapshots")
	until := time.Now().Add(12 * time.Second)
	var wg sync.WaitGroup
	var all []*changer
	var mounts []string
	errs := make(chan error, 8)
	for i := range 2 {
		at, _ := r.mount(fmt.Sprint("m", i))
		mounts = append(mounts, at)
		for k := range 2 {
			c := &changer{path: filepath.Join(at, fmt.Sprint("f", i, k)), blocks: make([][]byte, 40)}
			all = append(all, c)
			wg.Go(func() {
				if err := c.run(uint64(10*i+k+1), until); err != nil {
					errs <- fmt.Errorf("%s: %w", c.path, err)
				}
			})
		}
	}
	rng := rand.New(rand.NewPCG(7, 7))
	var names []string
	most := uint64(0)
	for n := 0; time.Now().Before(until); n++ {
		switch {
		case len(names) < 3 || rng.IntN(2) == 0 && len(names) < 8:
			name := fmt.Sprint("s", n)
			r.Until("a snapshot", func() error { _, err := r.Ctl("snapshot", "create", "q", name); return err })
			names = append(names, name)
		default:
			k := rng.IntN(len(names))
			r.Until("no snapshot", func() error { _, err := r.Ctl("snapshot", "delete", "--yes", "q", names[k]); return err })
			names = append(names[:k], names[k+1:]...)
		}
		if n == 12 || n == 25 {
			r.meta.Kill()
			r.startMeta()
		}
		u := r.used()
		if most = max(most, u.Used); u.Used > limit {
			t.Errorf("%d bytes are held, the limit is %d", u.Used, limit)
		}
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	if err := syncAll(mounts); err != nil {
		t.Fatal(err)
	}
	r.asUsage()
	r.fsck()
	denied, failed := 0, 0
	for i, c := range all {
		denied += c.denied
		if c.failed != nil {
			failed++
			continue
		}
		b, err := os.ReadFile(filepath.Join(mounts[1-i/2], filepath.Base(c.path)))
		if err != nil {
			t.Error(err)
			continue
		}
		for k, want := range c.blocks {
			if want != nil && !bytes.Equal(b[min(len(b), k*block):min(len(b), (k+1)*block)], want) {
				t.Errorf("DATA: %s: block %d is not what was written", c.path, k)
			}
		}
	}
	t.Logf("%d writes and %d fsyncs were refused; %d bytes were held at most", denied, failed, most)
	if denied == 0 {
		t.Error("nobody was refused: this tests nothing")
	}
	for _, name := range names {
		r.Must("snapshot", "delete", "--yes", "q", name)
	}
	r.Until("all that snapshots held is free", func() error {
		c, err := r.counted()
		if err == nil && (c.Snapshots.Quota == nil || c.Snapshots.Quota.Bytes != 0 || c.Snapshots.Quota.Falls) {
			err = fmt.Errorf("%+v", c.Snapshots.Quota)
		}
		return err
	})
	r.fsck()
}
