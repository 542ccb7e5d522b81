// Package formats owns a data directory of each version of the formats, made by the last
// program with that version, and the test that today's program opens each directory.
// Before the first release, version 1 is the only version, and a change of a format makes
// v1.tar.gz anew:
//
//	go test ./test/formats -run TestDataDirectories -make
package formats

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// unpack makes a copy of the data directory of a format.
func unpack(t *testing.T, version string) (data, mount string) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "pf-") // short: the paths of sockets are bounded
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if out, err := exec.Command("tar", "-C", dir, "-xzf", "testdata/"+version+".tar.gz").CombinedOutput(); err != nil {
		t.Fatalf("unpacking: %v\n%s", err, out)
	}
	mount = filepath.Join(dir, "mnt")
	if err := os.Mkdir(mount, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "data"), mount
}

// lines returns the output of seq(1) from first on, cut to n bytes.
func lines(first, n int) string {
	var b bytes.Buffer
	for i := first; b.Len() < n; i++ {
		fmt.Fprintln(&b, i)
	}
	return b.String()[:n]
}

// check compares the tree with the files that build wrote.
func check(t *testing.T, root string) {
	sparse := make([]byte, 1<<20)
	copy(sparse[1000000:], "end")
	for name, want := range map[string]string{
		"dir/small": "inline\n", "dir/sub/hard": "inline\n", "dir/sub/soft": "inline\n",
		"dir/packed": lines(500000, 300000), "dir/own": lines(1, 1200000), "vol/file": "sealed\n",
	} {
		got, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || string(got) != want {
			t.Errorf("DATA: %s: %d bytes, %v; want %d bytes that differ", name, len(got), err, len(want))
		}
	}
	f, err := os.Open(filepath.Join(root, "dir/sparse"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := make([]byte, len(sparse))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, sparse) {
		t.Errorf("DATA: dir/sparse: %v, or other bytes", err)
	}
	stat := func(name string) (st unix.Stat_t) {
		if err := unix.Lstat(filepath.Join(root, name), &st); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		return st
	}
	if st := stat("dir/sparse"); st.Size != 1<<30 {
		t.Errorf("dir/sparse has %d bytes", st.Size)
	}
	if st := stat("dir/small"); st.Nlink != 2 || st.Ino != stat("dir/sub/hard").Ino {
		t.Errorf("dir/small has %d links", st.Nlink)
	}
	if st := stat("dir/own"); st.Mode&0o7777 != 0o4755 {
		t.Errorf("dir/own has mode %o", st.Mode)
	}
	if st := stat("dir/fifo"); st.Mode&unix.S_IFMT != unix.S_IFIFO {
		t.Errorf("dir/fifo has mode %o", st.Mode)
	}
	if st := stat("dir/sub"); st.Uid != 12 || st.Gid != 34 || st.Mtim.Sec != 13569465600 {
		t.Errorf("dir/sub belongs to %d:%d, is from %d", st.Uid, st.Gid, st.Mtim.Sec)
	}
	buf := make([]byte, 100)
	if n, err := unix.Getxattr(filepath.Join(root, "dir/small"), "user.key", buf); err != nil || string(buf[:n]) != "value" {
		t.Errorf("DATA: user.key: %q, %v", buf[:max(n, 0)], err)
	}
	if n, err := unix.Getxattr(filepath.Join(root, "dir/packed"), "system.posix_acl_access", buf); err != nil || n != 44 {
		t.Errorf("the ACL has %d bytes, %v", n, err)
	}
	if err := os.WriteFile(filepath.Join(root, "vol/file"), []byte("x"), 0o644); err == nil {
		t.Error("a sealed file was written")
	}
}

var makeNew = flag.Bool("make", false, "make testdata/v1.tar.gz anew")

// build writes the tree that check compares, and a volume with a snapshot and a clone.
// Volume and clone have changed since the snapshot.
func build(t *testing.T, root string, penstock func(args ...string) string) {
	t.Helper()
	ok := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	at := func(name string) string { return filepath.Join(root, name) }
	write := func(name, text string) { t.Helper(); ok(os.WriteFile(at(name), []byte(text), 0o644)) }
	ok(os.MkdirAll(at("dir/sub"), 0o755))
	write("dir/small", "inline\n")
	ok(os.Link(at("dir/small"), at("dir/sub/hard")))
	ok(os.Symlink("../small", at("dir/sub/soft")))
	write("dir/packed", lines(500000, 300000))
	write("dir/own", lines(1, 1200000))
	ok(unix.Chmod(at("dir/own"), 0o4755))
	f, err := os.Create(at("dir/sparse"))
	ok(err)
	_, err = f.WriteAt([]byte("end"), 1000000)
	ok(err)
	ok(f.Truncate(1 << 30))
	ok(f.Close())
	ok(unix.Mkfifo(at("dir/fifo"), 0o600))
	ok(unix.Setxattr(at("dir/small"), "user.key", []byte("value"), 0))
	// user::rw-, user:12:r--, group::r--, mask::r--, other::r--
	entries := [][3]uint32{{1, 6, ^uint32(0)}, {2, 4, 12}, {4, 4, ^uint32(0)}, {16, 4, ^uint32(0)}, {32, 4, ^uint32(0)}}
	list := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range entries {
		list = binary.LittleEndian.AppendUint16(list, uint16(e[0]))
		list = binary.LittleEndian.AppendUint16(list, uint16(e[1]))
		list = binary.LittleEndian.AppendUint32(list, e[2])
	}
	ok(unix.Setxattr(at("dir/packed"), "system.posix_acl_access", list, 0))
	ok(os.Chown(at("dir/sub"), 12, 34))
	year2400 := unix.Timespec{Sec: 13569465600} // beyond the range of nanoseconds in 64 bits
	ok(unix.UtimesNanoAt(unix.AT_FDCWD, at("dir/sub"), []unix.Timespec{year2400, year2400}, 0))

	penstock("volume", "create", "vol", "--attach", "/vol")
	write("vol/file", "sealed\n")
	penstock("volume", "set", "vol", "--immutable")

	penstock("volume", "create", "origin", "--attach", "/origin")
	ok(os.Mkdir(at("origin/dir"), 0o755))
	write("origin/a", "one\n")
	write("origin/gone", "gone\n")
	write("origin/dir/packed", lines(500000, 300000))
	penstock("snapshot", "create", "origin", "base")
	penstock("clone", "create", "origin@base", "copy", "--attach", "/copy")
	write("origin/a", "later\n")
	write("copy/a", "two\n")
	ok(os.Remove(at("copy/gone")))
	ok(os.Link(at("copy/dir/packed"), at("copy/hard")))
	penstock("snapshot", "create", "copy", "mine")
	write("copy/a", "three\n")
	write("copy/new", lines(1, 100000))
	penstock("volume", "set", "copy", "--events", "on")
}

// checkClone compares a clone and its origin with the files that build wrote; a is the
// contents of copy/a.
func checkClone(t *testing.T, root, a string) {
	t.Helper()
	for name, want := range map[string]string{
		"origin/a": "later\n", "origin/.snapshot/base/a": "one\n", "origin/gone": "gone\n", "origin/dir/packed": lines(500000, 300000),
		"copy/.snapshot/mine/a": "two\n", "copy/hard": lines(500000, 300000), "copy/.snapshot/mine/dir/packed": lines(500000, 300000),
		"copy/new": lines(1, 100000), "copy/a": a,
	} {
		if got, err := os.ReadFile(filepath.Join(root, name)); err != nil || string(got) != want {
			t.Errorf("DATA: %s: %d bytes, %v; want %d bytes that differ", name, len(got), err, len(want))
		}
	}
	if _, err := os.Lstat(filepath.Join(root, "copy/gone")); !os.IsNotExist(err) {
		t.Errorf("copy/gone: %v", err)
	}
}

// TestDataDirectories opens the data directory of each version, checks the contents,
// makes changes, and opens the directory again.
func TestDataDirectories(t *testing.T) {
	if *makeNew {
		makeDirectory(t)
	}
	data, mount := unpack(t, "v1")
	for _, a := range []string{"three\n", "four\n"} {
		p, penstock := serve(t, data, mount)
		check(t, mount)
		checkClone(t, mount, a)
		if a == "three\n" {
			if err := os.WriteFile(filepath.Join(mount, "copy/a"), []byte("four\n"), 0o644); err != nil {
				t.Error(err)
			}
		} else if out := penstock("events", "copy"); !strings.Contains(out, "changed") {
			t.Errorf("events: %s", out)
		}
		penstock("fsck")
		if err := os.WriteFile(filepath.Join(mount, "new"), []byte("new"), 0o644); err != nil {
			t.Error(err)
		}
		if err := p.Stop(time.Minute); err != nil {
			t.Error(err)
		}
		if err := p.End(); err != nil {
			t.Error(err)
		}
	}
}

// serve runs today's program on a data directory; penstock runs a command of the program.
func serve(t *testing.T, data, mount string) (p *spawn.Process, penstock func(args ...string) string) {
	t.Helper()
	p, err := spawn.Start(t.Context(), spawn.Config{Binary: program.Path, Dir: data, Mount: mount})
	if err != nil {
		t.Fatal(err)
	}
	return p, func(args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, program.Path, append(args, "--dir", data)...).CombinedOutput()
		if err != nil {
			t.Errorf("%v: %v\n%s", args, err, out)
		}
		return string(out)
	}
}

// makeDirectory makes testdata/v1.tar.gz.
func makeDirectory(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "pf-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	data, mount := filepath.Join(dir, "data"), filepath.Join(dir, "mnt")
	if err := os.Mkdir(mount, 0o700); err != nil {
		t.Fatal(err)
	}
	p, penstock := serve(t, data, mount)
	build(t, mount, penstock)
	if err := p.Stop(time.Minute); err != nil {
		t.Fatal(err)
	}
	if err := p.End(); err != nil {
		t.Fatal(err)
	}
	tar := "find data -type s -delete && tar -S -czf - data"
	out, err := os.Create("testdata/v1.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command("sh", "-c", tar)
	c.Dir, c.Stdout, c.Stderr = dir, out, os.Stderr
	if err := c.Run(); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestOldMirrorRecord reads a mirror's record in etcd, as drawn in docs/formats.md.
func TestOldMirrorRecord(t *testing.T) {
	kept, err := os.ReadFile("testdata/mirror-v1.json")
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(kept))
	d.DisallowUnknownFields()
	var got meta.Mirror
	if err := d.Decode(&got); err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 11, 22, 7, 16, 21, 609000000, time.UTC)
	want := meta.Mirror{
		Name: "mirror-9f0c52a81b3d", Version: 1, Target: 3,
		Source: meta.MirrorSource{Meta: []string{"meta.east:7000"}, Credentials: "/etc/penstock/east", Volume: "datasets", ID: 2},
		State:  meta.MirrorRunning, Every: 15 * time.Minute, Rate: 1 << 20, Keep: 2, Asked: 2, Heard: 1, Rounds: 7, Error: "refused", Since: at, Behind: 5, Looked: at,
		Last: &meta.MirrorRound{Snapshot: "mirror-9f0c52a81b3d-20261122T071621.609Z", Base: "mirror-9f0c52a81b3d-20261122T070121.600Z",
			Taken: at, Began: at, Copied: at, Ended: at, Digest: "sha256-tree-1:00", Planned: 4096, Sent: 4096, Inodes: 3},
		Round: &meta.MirrorRound{Snapshot: "mirror-9f0c52a81b3d-20261122T073121.601Z", Began: at},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if again, err := json.Marshal(got); err != nil || string(again) != strings.TrimSpace(string(kept)) {
		t.Errorf("DATA: it would be written as %s, %v", again, err)
	}
}

// TestOldGroupRecord reads the record of a group of snapshots in etcd.
func TestOldGroupRecord(t *testing.T) {
	kept, err := os.ReadFile("testdata/group-v1.json")
	if err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(bytes.NewReader(kept))
	d.DisallowUnknownFields()
	var got meta.Group
	if err := d.Decode(&got); err != nil {
		t.Fatal(err)
	}
	want := meta.Group{
		Version: 1, Name: "nightly", ID: 5577006791947779410, State: meta.GroupReady, Began: 1763856000000000000,
		Members: []meta.GroupMember{
			{Volume: 1, At: 7, Created: 1763856000100000000, Inodes: 12, Bytes: 4096, Unanswered: 1, UnansweredBy: []string{"node-1"}},
			{Volume: 3, At: 2, Created: 1763856000101000000, Inodes: 3},
		},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if again, err := json.Marshal(got); err != nil || string(again) != strings.TrimSpace(string(kept)) {
		t.Errorf("DATA: it would be written as %s, %v", again, err)
	}
	if !meta.IsGroupID(got.ID) || meta.IsGroupID(0) || meta.IsGroupID(got.ID|1) {
		t.Error("tokens of groups are even")
	}
}

// sum digests names and bytes of a directory.
func sum(t *testing.T, dir string) string {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || d.Name() == "LOCK" {
			return err
		}
		b, err := os.ReadFile(path)
		fmt.Fprintf(h, "%s %d ", path, len(b))
		h.Write(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

// A newer format is refused before anything is written.
func TestNewerDataDirectoryIsRefused(t *testing.T) {
	data, mount := unpack(t, "v1")
	path := filepath.Join(data, "penstock.json")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	newer := strings.Replace(string(b), `"version": 1`, `"version": 2`, 1)
	if newer == string(b) {
		t.Fatalf("no version in %s", b)
	}
	if err := os.WriteFile(path, []byte(newer), 0o600); err != nil {
		t.Fatal(err)
	}
	before := sum(t, data)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	out, err := exec.CommandContext(ctx, program.Path, "up", "--dir", data, "--mount", mount).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "format 2") {
		t.Errorf("%v: %s", err, out)
	}
	if after := sum(t, data); after != before {
		t.Error("the directory was changed")
	}
}
