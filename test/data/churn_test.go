package data

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/test/slow"
)

// churn creates and deletes empty files through the metadata protocol, many in
// a request.
type churn struct {
	sess  *client.Session
	dirs  int
	each  int // files a directory
	inos  []meta.Ino
	times struct{ create, remove time.Duration }
}

func (c *churn) name(i int) string { return fmt.Sprintf("file-%06d", i) }

func (c *churn) batch(ctx context.Context, n int, op func(i int) meta.Op) ([]meta.Result, error) {
	ops := make([]client.BatchOp, n)
	for i := range ops {
		ops[i].Op = op(i)
	}
	res, errs, err := c.sess.DoBatch(ctx, meta.RootVolume, client.AnyEpoch, ops)
	return res, errors.Join(err, errors.Join(errs...))
}

func (c *churn) create(ctx context.Context) error {
	began := time.Now()
	for d := range c.dirs {
		r, err := c.sess.Do(ctx, meta.RootVolume, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: fmt.Sprintf("churn-%04d", d), Mode: meta.TypeDir | 0o755, Excl: true}, meta.LeaseNone)
		if err != nil {
			return err
		}
		dir := r.Attr.Ino
		c.inos = append(c.inos, dir)
		if _, err := c.batch(ctx, c.each, func(i int) meta.Op {
			return &meta.Create{Parent: dir, Name: c.name(i), Mode: meta.TypeRegular | 0o644, Excl: true}
		}); err != nil {
			return err
		}
	}
	c.times.create = time.Since(began)
	return c.sess.Sync(ctx, meta.RootVolume)
}

// kept are the files of each directory that are not deleted.
func (c *churn) kept() int { return c.each / 10 }

func (c *churn) remove(ctx context.Context) error {
	began := time.Now()
	for _, dir := range c.inos {
		gone, err := c.batch(ctx, c.each-c.kept(), func(i int) meta.Op {
			return &meta.Unlink{Parent: dir, Name: c.name(c.kept() + i)}
		})
		if err != nil {
			return err
		}
		// No client has the files open.
		release := &meta.ReleaseOrphans{}
		for i := range gone {
			release.Inos = append(release.Inos, gone[i].Attr.Ino)
		}
		if _, err := c.sess.Do(ctx, meta.RootVolume, meta.OpID{}, release, meta.LeaseNone); err != nil {
			return err
		}
	}
	c.times.remove = time.Since(began)
	return c.sess.Sync(ctx, meta.RootVolume)
}

// verify lists every directory through the mount.
func (c *churn) verify(mount string) error {
	var want []string
	for i := range c.kept() {
		want = append(want, c.name(i))
	}
	for d := range c.dirs {
		dir := filepath.Join(mount, fmt.Sprintf("churn-%04d", d))
		all, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		var have []string
		for _, e := range all {
			have = append(have, e.Name())
		}
		if !slices.Equal(have, want) {
			return fmt.Errorf("DATA: %s has %d names, want the first %d", dir, len(have), len(want))
		}
	}
	return nil
}

// TestEtcdStaysSmall: etcd's database stays small through many creates and deletes, since
// journal entries are checkpointed and trimmed. The state survives SIGKILL, and can be made
// again from checkpoint and journal when the local copy is gone.
func TestEtcdStaysSmall(t *testing.T) {
	s := newSystem(t)
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{"unix:" + filepath.Join(s.dir, "meta.sock")}, Name: "churn"})
	if err != nil {
		t.Fatal(err)
	}
	c := &churn{sess: sess, dirs: amount(100, 1000), each: 1000}
	report := func(when string) {
		t.Helper()
		db, err := os.Stat(filepath.Join(s.dir, "etcd", "member", "snap", "db"))
		if err != nil {
			t.Fatal(err)
		}
		state, err := diskUse(filepath.Join(s.dir, "meta"), nil)
		if err != nil {
			t.Fatal(err)
		}
		n, err := s.counters(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: etcd's database %d MB, journaled so far %.0f MB in %.0f entries, %.0f checkpoints, state store %d MB, resident %d MB",
			when, db.Size()>>20, n["journal_bytes"].(float64)/1e6, n["journal_entries"], n["checkpoints"], state>>20, s.resident()>>20)
		if db.Size() > 200<<20 {
			t.Errorf("etcd's database has %d bytes", db.Size())
		}
	}
	if err := c.create(t.Context()); err != nil {
		t.Fatal(err)
	}
	report(fmt.Sprintf("%d files created in %v", c.dirs*c.each, c.times.create.Round(time.Millisecond)))
	if err := c.remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	report(fmt.Sprintf("%d of them deleted in %v", c.dirs*(c.each-c.kept()), c.times.remove.Round(time.Millisecond)))
	n, err := s.counters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n["checkpoints"].(float64) == 0 {
		t.Error("there was no checkpoint")
	}
	if err := sess.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, how := range []string{"with the local state", "from checkpoint and journal"} {
		s.kill()
		if how != "with the local state" {
			stores, err := filepath.Glob(filepath.Join(s.dir, "meta", "volume-*"))
			if err != nil || len(stores) == 0 {
				t.Fatalf("no local state to remove: %v", err)
			}
			for _, dir := range stores {
				if strings.Contains(filepath.Base(dir), ".") {
					t.Errorf("%s was put aside", dir)
				}
				if err := os.RemoveAll(dir); err != nil {
					t.Fatal(err)
				}
			}
		}
		speed, err := slow.StartOn(s.dir)
		if err != nil {
			t.Fatal(err)
		}
		err = s.start(t.Context())
		factor := speed.Factor()
		speed.Close()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("after SIGKILL, %s: serving in %v; work takes %.1f times as long as on a quiet machine", how, s.process.StartedIn.Round(time.Millisecond), factor)
		if s.process.StartedIn > 5*time.Second {
			t.Log(s.process.Output()) // the slow step
		}
		if s.process.StartedIn > slow.Bound(20*time.Second, factor) {
			t.Errorf("it took %v to serve again", s.process.StartedIn)
		}
		if err := c.verify(s.mount); err != nil {
			t.Fatal(how, ": ", err)
		}
		if err := s.fsck(t.Context()); err != nil {
			t.Fatal(how, ": ", err)
		}
	}
	report("at the end")
}
