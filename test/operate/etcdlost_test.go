package operate

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/test/etcd"
	"penstock.io/penstock/test/port"
	"penstock.io/penstock/test/program"
)

// covered: the checkpoint of each volume has all of its journal.
func covered(t *testing.T, cli *clientv3.Client) error {
	t.Helper()
	r, err := cli.Get(t.Context(), "/penstock/default/volumes/", clientv3.WithPrefix())
	if err != nil {
		return err
	}
	last, at := map[string]meta.Seq{}, map[string]meta.Seq{}
	for _, kv := range r.Kvs {
		key := strings.Split(strings.TrimPrefix(string(kv.Key), "/penstock/default/volumes/"), "/")
		switch key[1] {
		case "journal":
			e, err := journal.Decode(kv.Value)
			if err != nil {
				return err
			}
			last[key[0]] = e.Seq
		case "checkpoint":
			cp, err := journal.DecodeCheckpoint(kv.Value)
			if err != nil {
				return err
			}
			at[key[0]] = cp.Seq
		}
	}
	if len(last) < 2 || !maps.Equal(last, at) {
		return fmt.Errorf("the journals end at %v, the checkpoints are at %v", last, at)
	}
	return nil
}

// TestEtcdIsLost follows docs/operations.md after the loss of all of etcd, as an operator does
// who has only the page: first with a backup, then once more without a backup. Two metadata
// servers serve again; the disk of one server has copies of volumes that are newer than the
// restored state. The data of the backup, or of the checkpoints, is complete.
func TestEtcdIsLost(t *testing.T) {
	t.Parallel() // beside tests that wait
	r := &rig{Rig: program.NewRig(t), secure: true}
	if err := os.Mkdir(filepath.Join(r.Dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(program.Path, filepath.Join(r.Dir, "bin", "penstock")); err != nil {
		t.Fatal(err)
	}
	store := etcd.Start(t, 0)
	r.Addr = port.Free(t)
	others := port.Free(t)
	run := func(args ...string) {
		t.Helper()
		if out, err := exec.Command(program.Path, args...).CombinedOutput(); err != nil {
			t.Fatalf("penstock %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	run("cluster", "init", "--etcd", strings.Join(store.Endpoints(), ","), "--credentials", filepath.Join(r.Dir, "cred"))
	r.Env = append(r.Env, "PENSTOCK_CREDENTIALS="+r.Credentials("admin"))
	servers := []*spawn.Process{nil, nil}
	start := func() {
		t.Helper()
		for i, at := range []struct{ dir, addr, name string }{{"m", r.Addr, "meta"}, {"m2", others, "m2"}} {
			if _, err := os.Stat(r.Credentials(at.name)); err != nil {
				r.Join("meta", at.name)
			}
			servers[i] = r.Run("meta", "--dir", filepath.Join(r.Dir, at.dir), "--listen", at.addr, "--etcd", strings.Join(store.Endpoints(), ","),
				"--credentials", r.Credentials(at.name), "--checkpoint-every", "3s")
			r.Until("the metadata server answers", func() error { _, err := r.Ctl("volume", "show", "root"); return err })
		}
	}
	start()
	for i := range 2 {
		r.Join("chunkserver", fmt.Sprint("c", i))
		r.chunks = append(r.chunks, r.chunkServer(i))
	}
	r.Until("the chunk servers are known", func() error {
		out, err := r.Ctl("node", "list", "-o", "json")
		if err == nil && !containsAll(string(out), `"id": 1,`, `"id": 2,`) {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
	r.Must("volume", "create", "results", "--attach", "/results", "--replicas", "2")
	r.Join("client", "lab")
	r.Must("grant", "add", "lab", "results", "--rights", "write")
	files := map[string][]byte{}
	mounts := 0
	write := func(step string) {
		t.Helper()
		mounts++
		at, p := r.mountBy("results:/", fmt.Sprint("w", mounts), "--credentials", r.Credentials("lab"))
		for i := range 5 {
			name := fmt.Sprint(step, i)
			b := bytes.Repeat([]byte(name), 10_000)
			if err := os.WriteFile(filepath.Join(at, name), b, 0o644); err != nil {
				t.Fatal(err)
			}
			files[name] = b
		}
		spawn.Unmount(at)
		<-p.Done()
	}
	check := func() {
		t.Helper()
		mounts++
		at, p := r.mountBy("results:/", fmt.Sprint("r", mounts), "--credentials", r.Credentials("lab"))
		for name, want := range files {
			if b, err := os.ReadFile(filepath.Join(at, name)); err != nil || !bytes.Equal(b, want) {
				t.Errorf("DATA: %s: %d of %d bytes, %v", name, len(b), len(want), err)
			}
		}
		spawn.Unmount(at)
		<-p.Done()
		if out, err := r.Ctl("fsck"); err != nil {
			t.Errorf("DATA: fsck: %v\n%s", err, out)
		}
	}

	backup := filepath.Join(r.Dir, "cluster.backup")
	names := func() []string {
		return []string{
			"/var/lib/penstock-meta/cluster.backup", backup,
			"--dir /var/lib/penstock-meta", "--dir " + filepath.Join(r.Dir, "m"),
			"chown -R penstock: /var/lib/penstock-meta /etc/penstock/credentials/meta", "true",
			"/etc/penstock/credentials/meta", r.Credentials("meta"),
			"10.0.0.4:7400", r.Addr,
			"https://10.0.0.1:2379", strings.Join(store.Endpoints(), ","),
			"--etcd-ca /etc/penstock/etcd-ca.pem --etcd-cert /etc/penstock/etcd.pem --etcd-key /etc/penstock/etcd.key", "--log-level info",
			"--chunkservers 12", "--chunkservers 2",
		}
	}
	systemctl := func(verb, unit string) {
		t.Helper()
		switch unit + ": " + verb {
		case "penstock-meta: stop":
			// The servers would give their volumes back to an etcd that is gone: a service
			// manager has less patience than the servers, and kills.
			var stopping sync.WaitGroup
			for _, s := range servers {
				stopping.Go(func() { s.Stop(5 * time.Second) })
			}
			stopping.Wait()
		case "penstock-meta: start":
			start()
		default:
			t.Fatalf("systemctl %s %s", verb, unit)
		}
	}
	// lose follows the page from a loss on; without leaves the backup out, as the page says.
	lose := func(without bool) {
		t.Helper()
		for _, m := range store.Members {
			m.Kill()
		}
		store = etcd.Start(t, 0) // another etcd, empty
		page := manual(t, "operations.md", "etcd is lost")
		if len(page) != 4 {
			t.Fatalf("the section has %d blocks of commands, this test knows 4", len(page))
		}
		show, do := page[2], page[3]
		if without {
			for _, block := range [][]string{show, do} {
				for i := range block {
					block[i] = strings.Replace(block[i], "--from /var/lib/penstock-meta/cluster.backup ", "", 1)
				}
			}
		}
		if len(show) != 1 || do[0] != show[0]+" --yes" {
			t.Fatalf("what is shown is not what is done:\n%s\n%s", show, do[0])
		}
		r.follow(page[1], systemctl, names()...)
		// The command prints the differences, and exits with status 1.
		show = slices.Clone(show)
		show[0] += "; [ $? = 1 ]"
		show[0] = "set +e; " + show[0]
		r.follow(show, systemctl, names()...)
		r.follow(do, systemctl, names()...)
	}

	write("early")
	r.follow(manual(t, "operations.md", "etcd is lost")[0], systemctl, names()...)
	lose(false)
	check()
	write("later")
	r.Join("client", "another") // the authority came back
	r.Until("checkpoints have it all", func() error { return covered(t, store.Client()) })
	lose(true)
	check()
	if aside, _ := filepath.Glob(filepath.Join(r.Dir, "m*", "meta", "before-*")); len(aside) == 0 {
		t.Error("no copies were set aside")
	}
	if out := r.Must("grant", "list"); !bytes.Contains(out, []byte("lab")) {
		t.Errorf("DATA: the grant is gone: %s", out)
	}
}
