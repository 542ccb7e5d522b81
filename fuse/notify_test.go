package fuse

import (
	"bufio"
	"os/exec"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// The kernel forgets unused remembered inodes on request; inodes in use stay.
func TestPrune(t *testing.T) {
	m := mount(t, Options{}, func(tree *memTree) {
		for _, name := range []string{"idle", "open"} {
			tree.volumes[1].add(meta.RootIno, name, &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
		}
	})
	v := m.tree.volumes[1]
	_, idle := v.find(meta.RootIno, "idle")
	_, open := v.find(meta.RootIno, "open")
	inos := []meta.Ino{idle.attr.Ino, open.attr.Ino}
	user := exec.CommandContext(t.Context(), "sh", "-c", `exec 3<open; stat idle >/dev/null; echo ready; read end`)
	user.Dir = m.Dir()
	in, err := user.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := user.StdoutPipe()
	if err == nil {
		err = user.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		in.Close()
		_ = user.Wait()
	}()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q, %v", line, err)
	}
	holds := func(ino meta.Ino) bool { return m.notifier.Holds(1, ino) }
	if !holds(idle.attr.Ino) || !holds(open.attr.Ino) {
		t.Fatal("the kernel does not know what it was told of: nothing is tested")
	}
	if m.fs.conn.minor < minorPrune {
		m.notifier.Prune(1, inos)
		if !holds(idle.attr.Ino) {
			t.Error("a kernel that can't be told to forget did so")
		}
		return
	}
	for began := time.Now(); holds(idle.attr.Ino) || v.count("forget") == 0; time.Sleep(10 * time.Millisecond) {
		m.notifier.Prune(1, inos)
		if time.Since(began) > time.Minute {
			t.Fatal("the kernel remembers what it was told to forget")
		}
	}
	if !holds(open.attr.Ino) {
		t.Error("the kernel forgot what is open")
	}
}
