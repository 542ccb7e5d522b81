// Package restore tests that a cluster whose etcd is lost comes back from the data of its
// chunk servers: with real processes and real files.
package restore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// rig is a metadata server with an embedded etcd, and some chunk servers.
type rig struct {
	t      *testing.T
	dir    string
	meta   *spawn.Process
	chunks []*spawn.Process
}

func (r *rig) run(args ...string) *spawn.Process {
	r.t.Helper()
	cmd := exec.Command(program.Path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	log, err := os.OpenFile(filepath.Join(r.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	p, err := spawn.Begin(cmd, args[0], log, (*exec.Cmd).Start)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { p.Kill(); log.Close() })
	return p
}

func (r *rig) metaDir() string { return filepath.Join(r.dir, "m") }
func (r *rig) addr() string    { return "unix:" + filepath.Join(r.metaDir(), "meta.sock") }

func (r *rig) startMeta() { r.meta = r.run("meta", "--dir", r.metaDir()) }

func (r *rig) startChunks(n int) {
	for i := range n {
		r.chunks = append(r.chunks, r.run("chunkserver", "--data", filepath.Join(r.dir, fmt.Sprint("c", i)), "--cluster", r.addr(), "--topology", fmt.Sprintf("/dc/r%d/n%d", i, i)))
	}
}

func newRig(t *testing.T, n int) *rig {
	r := newBareRig(t)
	r.startMeta()
	r.until("the metadata server listens", func() error { _, err := os.Stat(filepath.Join(r.metaDir(), "meta.sock")); return err })
	r.startChunks(n)
	return r
}

// newBareRig has nothing running.
func newBareRig(t *testing.T) *rig {
	dir, err := os.MkdirTemp("", "rs")
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir}
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("%s", b[max(0, len(b)-8000):])
		}
		os.RemoveAll(dir)
	})
	return r
}

func (r *rig) until(what string, try func() error) {
	r.t.Helper()
	var err error
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	r.t.Fatalf("%s: %v", what, err)
}

func (r *rig) client() *penstock.Client {
	r.t.Helper()
	var c *penstock.Client
	r.until("a client connects", func() (err error) {
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
		defer cancel()
		c, err = penstock.Dial(ctx, penstock.Config{Meta: []string{r.addr()}, Name: "test"})
		return err
	})
	return c
}

// volume makes a volume, and attaches it in the root.
func (r *rig) volume(name string) {
	r.t.Helper()
	r.api(func(ctx context.Context, c *admin.Client) error {
		v, err := c.CreateVolume(ctx, name, meta.Policy{Replicas: 2}, meta.VolumeWords{Force: true})
		if err == nil {
			_, err = c.Volumes.AttachVolume(ctx, &admin.AttachVolumeRequest{Volume: admin.Numbered(v.ID), Parent: admin.Numbered(meta.RootVolume), Directory: uint64(meta.RootIno), Name: []byte(name)})
		}
		return err
	})
}

// api runs work with a client of the administrative API.
func (r *rig) api(work func(context.Context, *admin.Client) error) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 90*time.Second)
	defer cancel()
	c, err := admin.New(admin.Config{Addrs: []string{r.addr()}})
	if err != nil {
		r.t.Fatal(err)
	}
	defer c.Close()
	if err := work(ctx, c); err != nil {
		r.t.Fatal(err)
	}
}

// checkpoint has a volume's state written.
func (r *rig) checkpoint(volume string) {
	r.t.Helper()
	r.api(func(ctx context.Context, c *admin.Client) error {
		_, err := c.Volumes.CheckpointVolume(ctx, &admin.CheckpointVolumeRequest{Volume: admin.Named(volume)})
		return err
	})
}

// problems checks a volume.
func (r *rig) problems(volume string) (l []string) {
	r.t.Helper()
	r.api(func(ctx context.Context, c *admin.Client) error {
		report, err := c.Volumes.CheckVolume(ctx, &admin.CheckVolumeRequest{Volume: admin.Named(volume)})
		l = report.GetProblems()
		return err
	})
	return l
}

// connected counts the connected chunk servers.
func (r *rig) connected() (n int) {
	r.t.Helper()
	r.api(func(ctx context.Context, c *admin.Client) error {
		l, err := c.Nodes.ListNodes(ctx, &admin.ListNodesRequest{})
		for _, x := range l.GetNodes() {
			if x.Connected {
				n++
			}
		}
		return err
	})
	return n
}

// content returns the contents of the file of a name.
func content(name string) []byte {
	rng := rand.New(rand.NewPCG(uint64(len(name)), uint64(name[len(name)-1])))
	b := make([]byte, 1000+rng.IntN(200_000))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return append(b, name...)
}

func write(t *testing.T, c *penstock.Client, volume string, names ...string) {
	t.Helper()
	v, err := c.Volume(t.Context(), volume)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := v.Tree().WriteFile(t.Context(), name, content(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := v.SyncAll(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func check(t *testing.T, c *penstock.Client, volume string, names ...string) {
	t.Helper()
	v, err := c.Volume(t.Context(), volume)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		b, err := v.Tree().ReadFile(t.Context(), name)
		if err != nil || !bytes.Equal(b, content(name)) {
			t.Fatalf("DATA: %s: %d bytes, %v", name, len(b), err)
		}
	}
}

func names(prefix string, n int) (all []string) {
	for i := range n {
		all = append(all, fmt.Sprint("/", prefix, i))
	}
	return all
}

// restore runs the command and returns the state that it found.
func (r *rig) restore(args ...string) (map[string]any, string, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program.Path, append([]string{"cluster", "restore", "--dir", r.metaDir(), "--chunkservers", "3", "--output", "json"}, args...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	var v map[string]any
	if err == nil {
		err = json.Unmarshal(out.Bytes(), &v)
	}
	return v, errs.String() + out.String(), err
}

// TestEtcdLostWhole: files are written before and after the last checkpoint; then etcd is
// lost with all its data.
func TestEtcdLostWhole(t *testing.T) {
	r := newRig(t, 3)
	r.until("three chunk servers", func() error {
		if n := r.connected(); n < 3 {
			return fmt.Errorf("%d chunk servers", n)
		}
		return nil
	})
	r.volume("data")
	c := r.client()
	kept, rootKept := names("kept", 20), names("root", 5)
	write(t, c, "data", kept...)
	write(t, c, "root", rootKept...)
	for _, v := range []string{"data", "root"} {
		r.checkpoint(v)
	}
	// After the checkpoint: new files, and the removal of an earlier file.
	lost := names("lost", 10)
	write(t, c, "data", lost...)
	data, err := c.Volume(t.Context(), "data")
	if err != nil {
		t.Fatal(err)
	}
	if err := data.Tree().Remove(t.Context(), kept[0]); err != nil {
		t.Fatal(err)
	}
	if err := data.SyncAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Second) // by now the removed file's chunk could be deleted

	// restore refuses an existing cluster. The server stops in order, so its copies of
	// the volumes have all entries, ahead of the checkpoints.
	if err := r.meta.Stop(60 * time.Second); err != nil {
		t.Fatal(err)
	}
	if _, text, err := r.restore("--yes"); err == nil || !strings.Contains(text, "etcd holds a cluster") {
		t.Fatal(text, err)
	}
	if err := os.RemoveAll(filepath.Join(r.metaDir(), "etcd")); err != nil {
		t.Fatal(err)
	}
	// A server of the lost cluster makes no new cluster.
	m := r.run("meta", "--dir", r.metaDir())
	select {
	case <-m.Done():
	case <-time.After(90 * time.Second):
		t.Fatal("a metadata server runs on an etcd that lost its cluster")
	}
	if b, _ := os.ReadFile(filepath.Join(r.dir, "log")); !bytes.Contains(b, []byte("cluster restore")) {
		t.Fatal("it does not say what to do")
	}
	if err := os.RemoveAll(filepath.Join(r.metaDir(), "etcd")); err != nil {
		t.Fatal(err)
	}
	// The server's own copies stay: they are ahead of the restored state, and the output
	// says so.
	if _, text, err := r.restore(); err == nil || !strings.Contains(text, "nothing was written") || !strings.Contains(text, "is newer; nothing is taken from it") {
		t.Fatal(text, err)
	}
	began := time.Now()
	found, text, err := r.restore("--yes")
	if err != nil {
		t.Fatal(text, err)
	}
	t.Logf("restored in %v", time.Since(began))
	volumes := found["volumes"].([]any)
	if len(volumes) != 2 {
		t.Fatal(text)
	}
	for _, v := range volumes {
		v := v.(map[string]any)
		if v["seq"].(float64) == 0 || v["missing_chunks"].(float64) != 0 {
			t.Fatal(text)
		}
		if v["name"] == "data" && v["unknown_bytes"].(float64) < 100_000 {
			t.Fatalf("DATA: the bytes of files written after the checkpoint are not seen: %s", text)
		}
	}
	r.startMeta()
	fresh := r.client()
	if aside, err := filepath.Glob(filepath.Join(r.metaDir(), "meta", "before-*", "volume-*", "FORMAT")); err != nil || len(aside) != 2 {
		t.Errorf("DATA: the copies of before are not set aside: %q, %v", aside, err)
	}
	check(t, fresh, "data", kept...)
	check(t, fresh, "root", rootKept...)
	again, err := fresh.Volume(t.Context(), "data")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.Tree().ReadFile(t.Context(), lost[0]); !errors.Is(err, meta.NotFound) {
		t.Fatalf("DATA: a file that was lost: %v", err)
	}
	write(t, fresh, "data", names("new", 10)...)
	check(t, fresh, "data", names("new", 10)...)
	e, err := again.Tree().Stat(t.Context(), "/new0")
	if err != nil || uint64(e.Attr.Ino) < 1<<32 {
		t.Fatalf("inode %d may have been given out before: %v", e.Attr.Ino, err)
	}
	if l := r.problems("data"); len(l) > 0 {
		t.Fatal(l)
	}
	// An earlier client learns that its session is unknown.
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err = data.Tree().WriteFile(ctx, "/old", content("old"), 0o644)
	t.Logf("the client of before writes: %v", err)
	closing, stop := context.WithTimeout(context.Background(), 5*time.Second)
	defer stop()
	c.Close(closing)
	fresh.Close(closing)
}

// TestBackup: a backup is made of a cluster in use, and etcd is lost. All data of the
// moment of the backup comes back, although no checkpoint has it. A changed backup, or a
// backup of a newer program, changes nothing.
func TestBackup(t *testing.T) {
	r := newRig(t, 3)
	r.until("three chunk servers", func() error {
		if n := r.connected(); n < 3 {
			return fmt.Errorf("%d chunk servers", n)
		}
		return nil
	})
	create := r.volume
	create("old")
	c := r.client()
	before, behind := names("before", 5), names("behind", 20)
	write(t, c, "old", before...)
	for _, v := range []string{"old", "root"} {
		r.checkpoint(v)
	}
	// Data in no checkpoint: files of a volume with a checkpoint, a volume without a
	// checkpoint, and the place where this volume is attached.
	write(t, c, "old", behind...)
	create("new")
	write(t, c, "new", behind...)
	file := filepath.Join(r.dir, "backup")
	backup := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(program.Path, append([]string{"cluster", "backup", file}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if out := backup("--dir", r.metaDir()); !strings.Contains(out, "it holds secrets") {
		t.Errorf("it does not say that it holds secrets: %s", out)
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("the backup: %v, %v", st.Mode(), err)
	}
	write(t, c, "old", names("after", 3)...)
	closing, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	c.Close(closing)
	r.meta.Kill()
	backup2 := file + "2"
	if out, err := exec.Command(program.Path, "cluster", "backup", backup2, "--dir", r.metaDir()).CombinedOutput(); err != nil {
		t.Errorf("of an etcd whose server does not run: %v: %s", err, out)
	}

	// etcd has the cluster: nothing is written over it without --overwrite.
	if _, text, err := r.restore("--from", file, "--yes"); err == nil || !strings.Contains(text, "--overwrite") {
		t.Fatal(text, err)
	}
	if err := os.RemoveAll(filepath.Join(r.metaDir(), "etcd")); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(b []byte) []byte{
		"checksum":            func(b []byte) []byte { b[len(b)/2] ^= 1; return b },
		"use a newer program": func(b []byte) []byte { b[2]++; return b },
	} {
		bad := filepath.Join(r.dir, "bad")
		if err := os.WriteFile(bad, change(bytes.Clone(whole)), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, text, err := r.restore("--from", bad, "--yes"); err == nil || !strings.Contains(text, what) {
			t.Errorf("a bad backup: %v: %s", err, text)
		}
	}
	if _, err := os.Stat(filepath.Join(r.metaDir(), "etcd")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a bad backup was noticed when an etcd had been begun: %v", err)
	}
	look := func() {
		t.Helper()
		r.startMeta()
		fresh := r.client()
		check(t, fresh, "old", append(before, behind...)...)
		check(t, fresh, "new", behind...)
		for _, name := range []string{"old", "new"} {
			tree, err := fresh.Volume(t.Context(), "root")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tree.Tree().Stat(t.Context(), "/"+name); err != nil {
				t.Errorf("DATA: volume %s is not attached any more: %v", name, err)
			}
			if l := r.problems(name); len(l) > 0 {
				t.Errorf("DATA: %v", l)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		fresh.Close(ctx)
		r.meta.Kill()
	}
	found, text, err := r.restore("--from", file, "--yes")
	if err != nil {
		t.Fatal(text, err)
	}
	entries := 0.0
	for _, v := range found["volumes"].([]any) {
		entries += v.(map[string]any)["entries_from_backup"].(float64)
	}
	if entries == 0 {
		t.Error("nothing came from the backup: this test proves nothing")
	}
	look()

	// With --overwrite an existing cluster is replaced, and kept in a file; but not
	// before the killed server's lease has ended.
	r.until("the cluster is written over", func() error {
		_, text, err := r.restore("--from", file, "--overwrite", "--yes")
		if err != nil && !strings.Contains(text, "this metadata server runs") {
			t.Fatal(text, err)
		}
		return err
	})
	kept, err := filepath.Glob(filepath.Join(r.metaDir(), "etcd-before-*.backup"))
	if err != nil || len(kept) != 1 {
		t.Fatalf("DATA: what etcd held is not kept: %q, %v", kept, err)
	}
	look()
}
