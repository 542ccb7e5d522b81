package cluster

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"penstock.io/penstock/test/load"
)

// snapper takes snapshots of a volume under load, makes clones, and deletes, changes, promotes
// and rolls back its copies, one operation after the other by chance. It knows the contents of
// each copy, as far as commands succeeded: after a failed command, snapper does not know the
// copy's contents, and gives the copy up.
type snapper struct {
	s     *Soak
	of    *copied // the volume that the load writes; all other copies hang below this volume
	all   []*copied
	lost  []*copied // of failed commands: the copies may exist or not
	rand  *rand.Rand
	made  int
	times map[string]int
}

// copied is a copy of the folders of the load's workers, by client and worker: the volume that
// the workers write, a snapshot, or a clone.
type copied struct {
	volume, snapshot string                // of a clone and a volume: without snapshot
	from             *copied               // a snapshot's volume, or a clone's origin; nil for a promoted clone
	checks           map[string]load.Check // of folders as their workers left each folder
	sums             map[string]string     // of folders already read
	unknown          bool                  // a change of the copy failed
}

// wild is the sum of a folder after a failed change.
const wild = "unknown"

// held bounds the bytes that the snapshots of one volume keep on the disks, and the time to
// delete the snapshots at the end.
const held = 6

func (c *copied) String() string {
	if c.snapshot != "" {
		return c.volume + "@" + c.snapshot
	}
	return c.volume
}

// dir is the copy's path of a folder below a mount.
func (c *copied) dir(folder string) string {
	if c.snapshot != "" {
		return filepath.Join(c.volume, ".snapshot", c.snapshot, folder)
	}
	return filepath.Join(c.volume, folder)
}

func newSnapper(s *Soak, volume string, r *rand.Rand) *snapper {
	return &snapper{s: s, of: &copied{volume: volume}, rand: r, times: map[string]int{}}
}

// workers are the workers that write the volume, by their folders.
func (k *snapper) workers() map[string]*driven {
	all := map[string]*driven{}
	for _, w := range k.s.workers {
		if folder, ok := strings.CutPrefix(w.name, k.of.volume+"/"); ok {
			all[folder] = w
		}
	}
	return all
}

// run goes on until ctx ends.
func (k *snapper) run(ctx context.Context) {
	for ctx.Err() == nil {
		what, err := k.one(ctx)
		if what == "" {
			continue // no copy of that kind exists
		}
		if err == nil {
			k.times[what]++
		} else if ctx.Err() == nil {
			k.s.told.Add(1)
			k.times[what+", failed"]++
			k.s.Logf("%s %s of %s: %v", time.Now().Format("15:04:05.000"), what, k.of, err)
		}
		sleep(ctx, time.Duration(k.rand.IntN(1500))*time.Millisecond)
	}
}

// one does one operation.
func (k *snapper) one(ctx context.Context) (what string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	pick := func(ok func(*copied) bool) *copied {
		var fit []*copied
		for _, c := range k.all {
			if ok(c) {
				fit = append(fit, c)
			}
		}
		if len(fit) == 0 {
			return nil
		}
		return some(k.rand, fit)
	}
	isClone := func(c *copied) bool { return c.snapshot == "" }
	switch n := k.rand.IntN(100); {
	case len(k.all) < 2 || n < 20 && len(k.all) < held:
		of := k.of
		if c := pick(isClone); c != nil && k.rand.IntN(2) == 0 {
			of = c
		}
		return "snapshot", k.take(ctx, of)
	case n < 30 && len(k.all) < held:
		of := k.of
		if c := pick(func(*copied) bool { return true }); c != nil && k.rand.IntN(4) > 0 {
			of = c
		}
		return "clone", k.clone(ctx, of)
	case n < 35 && len(k.lost) > 0:
		return "deletion of what may be there", k.s.Cluster.remove(ctx, some(k.rand, k.lost))
	case n < 50:
		if c := pick(func(*copied) bool { return true }); c != nil {
			return k.remove(ctx, c)
		}
	case n < 60:
		if c := pick(func(c *copied) bool { return isClone(c) && !c.unknown }); c != nil {
			return "change of a clone", k.change(c)
		}
	case n < 67:
		if c := pick(func(c *copied) bool { return isClone(c) && c.from != nil && !k.needed(c) }); c != nil {
			_, err := k.s.Cluster.Penstock(ctx, "volume", "promote", c.volume)
			if err == nil {
				c.from = nil
			}
			return "promotion", err
		}
	case n < 74:
		if c := pick(func(c *copied) bool { return c.snapshot != "" && c.from != k.of && !c.unknown }); c != nil {
			return "rollback", k.roll(ctx, c)
		}
	default:
		if c := pick(func(*copied) bool { return true }); c != nil {
			w, m := some(k.rand, k.s.workers), some(k.rand, k.s.Cluster.Mounts)
			return "look", k.lookAll(ctx, c, m, func(of *driven) bool { return of.mount == w.mount })
		}
	}
	return "", nil
}

// needed tells whether a clone, or a snapshot of the clone, has clones that need the origin.
func (k *snapper) needed(c *copied) bool {
	return slices.ContainsFunc(k.all, func(x *copied) bool {
		return x.snapshot == "" && x.from != nil && (x.from == c || c.snapshot == "" && x.from.snapshot != "" && x.from.volume == c.volume)
	})
}

// shows makes the contents of a copy of c; freeze is taken before the copy, if workers write c.
func (k *snapper) shows(c *copied, volume, snapshot string, frozen map[string]func(bool) load.Check, whole bool) *copied {
	n := &copied{volume: volume, snapshot: snapshot, from: c, checks: maps.Clone(c.checks), sums: maps.Clone(c.sums)}
	if c == k.of {
		n.checks, n.sums = map[string]load.Check{}, map[string]string{}
	}
	for folder, taken := range frozen {
		if check := taken(whole); check != nil {
			n.checks[folder] = check
		}
	}
	return n
}

// frozen calls Freeze of the workers that write a copy.
func (k *snapper) frozen(c *copied) map[string]func(bool) load.Check {
	all := map[string]func(bool) load.Check{}
	if c == k.of {
		for folder, w := range k.workers() {
			all[folder] = w.worker.(load.Frozen).Freeze()
		}
	}
	return all
}

// give takes the result of a command, made or failed, into the lists.
func (k *snapper) give(c *copied, err error) error {
	if err != nil {
		k.lost = append(k.lost, c)
		return err
	}
	k.all = append(k.all, c)
	return nil
}

func (k *snapper) take(ctx context.Context, of *copied) error {
	k.made++
	args := []string{"snapshot", "create", of.volume, fmt.Sprint("s", k.made), "--output", "json"}
	strict := k.rand.IntN(3) > 0
	if strict {
		args = append(args, "--strict")
	}
	frozen := k.frozen(of)
	_, err := k.s.Cluster.Penstock(ctx, args...)
	c := k.shows(of, of.volume, args[3], frozen, strict && err == nil)
	if strict && err == nil {
		k.times["strict snapshot"]++
	}
	c.unknown = of.unknown
	return k.give(c, err)
}

func (k *snapper) clone(ctx context.Context, of *copied) error {
	k.made++
	name := fmt.Sprint(k.of.volume, "-", k.made)
	frozen := k.frozen(of)
	_, err := k.s.Cluster.Penstock(ctx, "clone", "create", of.String(), name, "--attach", "/"+name)
	c := k.shows(of, name, "", frozen, false)
	c.unknown = of.unknown
	return k.give(c, err)
}

// remove deletes a snapshot or a clone, or is refused since clones need the copy.
func (k *snapper) remove(ctx context.Context, c *copied) (what string, err error) {
	needed := k.needed(c)
	err = k.s.Cluster.remove(ctx, c)
	switch {
	case needed && err == nil:
		k.s.fail(fmt.Errorf("DATA: %v was deleted, though clones need it", c))
		return "wrong deletion", nil
	case needed && strings.Contains(err.Error(), "busy"):
		if c.snapshot == "" { // the clone was detached
			if _, err := k.s.Cluster.Penstock(ctx, "volume", "attach", c.volume, "/"+c.volume); err != nil {
				c.unknown = true
				return "refused deletion", err
			}
		}
		return "refused deletion", nil
	case err != nil:
		c.unknown = true // no reader follows
		return "deletion", err
	}
	k.all = slices.DeleteFunc(k.all, func(x *copied) bool { return x == c || x.snapshot != "" && x.from == c })
	return "deletion", nil
}

// remove deletes a snapshot or a clone.
func (c *Cluster) remove(ctx context.Context, x *copied) error {
	if x.snapshot != "" {
		_, err := c.Penstock(ctx, "snapshot", "delete", x.volume, x.snapshot, "--yes")
		return err
	}
	if _, err := c.Penstock(ctx, "volume", "detach", x.volume); err != nil && !strings.Contains(err.Error(), "not attached") {
		return err
	}
	_, err := c.Penstock(ctx, "volume", "delete", x.volume, "--yes", "--now")
	return err
}

// change writes to a clone: the contents of other copies must not change.
func (k *snapper) change(c *copied) error {
	m := some(k.rand, k.s.Cluster.Mounts)
	folder := some(k.rand, slices.Sorted(maps.Keys(k.workers())))
	dir := filepath.Join(m.Path, c.dir(folder))
	delete(c.checks, folder)
	was := c.sums[folder]
	c.sums[folder] = wild
	b := make([]byte, 4096+k.rand.IntN(100_000))
	load.Pattern(b, k.rand.Uint64(), 0)
	write := func(f *os.File, err error) error {
		if err != nil {
			return err
		}
		_, err = f.WriteAt(b, int64(k.rand.IntN(len(b))))
		return errors.Join(err, f.Sync(), f.Close())
	}
	err := write(os.Create(filepath.Join(dir, fmt.Sprint("new", k.rand.IntN(3)))))
	for _, name := range []string{"blocks", "current"} {
		if _, serr := os.Stat(filepath.Join(dir, name)); serr == nil {
			err = errors.Join(err, write(os.OpenFile(filepath.Join(dir, name), os.O_WRONLY, 0)))
		}
	}
	if err == nil {
		err = load.SyncDir(dir)
	}
	if err != nil || was == wild {
		return err
	}
	is, err := sum(dir)
	if err == nil {
		c.sums[folder] = is
	}
	return err
}

// roll makes a clone equal to a snapshot of the clone.
func (k *snapper) roll(ctx context.Context, sn *copied) error {
	c := sn.from
	_, err := k.s.Cluster.Penstock(ctx, "snapshot", "rollback", sn.volume, sn.snapshot, "--yes", "--force")
	if err != nil {
		c.unknown = true
		return err
	}
	c.unknown = false // also after an earlier failure
	c.checks, c.sums = maps.Clone(sn.checks), maps.Clone(sn.sums)
	return nil
}

// look reads a folder through a mount: the contents must be the worker's, and equal to the last
// read.
func (k *snapper) look(_ context.Context, c *copied, folder string, m *Mount) error {
	if c.unknown || c.sums[folder] == wild {
		return nil
	}
	era := m.era.Load()
	dir := filepath.Join(m.Path, c.dir(folder))
	check := func() error {
		if check := c.checks[folder]; check != nil {
			if err := check(dir); err != nil {
				return err
			}
		}
		is, err := sum(dir)
		if err != nil {
			return err
		}
		if was := c.sums[folder]; was != "" && was != is {
			return &load.Violation{Text: fmt.Sprintf("its sum is %s, and was %s", is, was)}
		}
		c.sums[folder] = is
		return nil
	}
	err := check()
	if err != nil {
		k.s.judge(m, era, fmt.Sprintf("%s of %v as %s sees it", folder, c, m.Name), err)
	}
	return err
}

// lookAll looks at the folders of some workers.
func (k *snapper) lookAll(ctx context.Context, c *copied, m *Mount, of func(*driven) bool) error {
	for folder, w := range k.workers() {
		if of(w) {
			if err := k.look(ctx, c, folder, m); err != nil {
				return fmt.Errorf("%s of %v: %w", folder, c, err)
			}
		}
	}
	return nil
}

// sum is of every name in a folder, and of the bytes of its files.
func sum(dir string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		var b []byte
		if e.Type().IsRegular() {
			b, err = os.ReadFile(path)
		} else {
			var to string
			to, err = os.Readlink(path)
			b = []byte(to)
		}
		fmt.Fprintf(h, "%q %d\n", e.Name(), len(b))
		h.Write(b)
		return err
	})
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), err
}

// final checks the remaining copies, deletes all of the copies in any order, and demands that no
// leftovers stay and that the volume's bytes are counted exactly.
func (k *snapper) final(ctx context.Context) error {
	c := k.s.Cluster
	verified := false
	for _, x := range k.all {
		m := some(k.rand, c.Mounts)
		if err := eventually(ctx, time.Minute, func(ctx context.Context) error { return k.lookAll(ctx, x, m, func(*driven) bool { return true }) }); err != nil {
			return err
		}
		if x.snapshot != "" && !x.unknown && !verified {
			verified = true
			if err := eventually(ctx, 2*time.Minute, func(ctx context.Context) error {
				_, err := c.Penstock(ctx, "verify", x.String())
				return err
			}); err != nil {
				return err
			}
		}
	}
	if k.s.For >= time.Minute && (k.times["snapshot"] == 0 || k.times["look"] == 0) {
		return fmt.Errorf("nothing was snapshotted, or looked at, of %v: %v", k.of, k.times)
	}
	// Copies of failed commands may exist, and need other copies.
	k.all = append(k.all, k.lost...)
	k.rand.Shuffle(len(k.all), func(i, j int) { k.all[i], k.all[j] = k.all[j], k.all[i] })
	err := eventually(ctx, 2*time.Minute, func(ctx context.Context) error {
		var left []*copied
		var errs []error
		for _, x := range k.all {
			err := c.remove(ctx, x)
			if err != nil && !strings.Contains(err.Error(), "no such snapshot") && !strings.Contains(err.Error(), "no such volume") {
				left, errs = append(left, x), append(errs, err)
			}
		}
		k.all = left
		return errors.Join(errs...)
	})
	if err != nil {
		return err
	}
	return eventually(ctx, time.Minute, k.settled)
}

// settled demands that no snapshot and no clone of the volume is left, and that the volume's
// count equals its files.
func (k *snapper) settled(ctx context.Context) error {
	c := k.s.Cluster
	out, err := c.Penstock(ctx, "snapshot", "list", k.of.volume, "--output", "json")
	if err != nil {
		return err
	}
	var l struct {
		Snapshots []struct {
			Name string `json:"name"`
		} `json:"snapshots"`
		Held uint64 `json:"held_bytes"`
	}
	if err := json.Unmarshal(out, &l); err != nil {
		return fmt.Errorf("penstock snapshot list: %w\n%s", err, out)
	}
	if len(l.Snapshots) > 0 || l.Held > 0 {
		return fmt.Errorf("DATA: all snapshots of %v were deleted, and there are %v, which hold %d bytes", k.of, l.Snapshots, l.Held)
	}
	status, err := c.Status(ctx)
	if err != nil {
		return err
	}
	for _, v := range status.Volumes {
		if strings.HasPrefix(v.Name, k.of.volume+"-") {
			return fmt.Errorf("DATA: clone %s was deleted, and is there", v.Name)
		}
		if v.Name != k.of.volume {
			continue
		}
		var bytes uint64
		err := filepath.WalkDir(filepath.Join(c.Mounts[0].Path, v.Path), func(path string, e fs.DirEntry, err error) error {
			if err != nil || !e.Type().IsRegular() {
				return err
			}
			i, err := e.Info()
			if err == nil {
				bytes += uint64(i.Size())
			}
			return err
		})
		if err != nil {
			return err
		}
		if bytes != v.UsedBytes {
			return fmt.Errorf("DATA: volume %s counts %d bytes, and its files have %d", v.Name, v.UsedBytes, bytes)
		}
	}
	return nil
}
