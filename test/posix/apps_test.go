package posix

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// debianPackage names the Debian package of each program that the tests run.
var debianPackage = map[string]string{
	"git": "git", "tar": "tar", "rsync": "rsync", "sqlite3": "sqlite3", "initdb": "postgresql", "pg_ctl": "postgresql", "pgbench": "postgresql-contrib",
	"psql": "postgresql-client", "pg_checksums": "postgresql", "go": "golang", "sh": "dash", "find": "findutils",
}

// find returns the path of a program. Debian keeps PostgreSQL's programs out of PATH.
func find(t *testing.T, name string) string {
	t.Helper()
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err == nil && len(found) > 0 {
		return slices.Max(found)
	}
	t.Fatalf("%s is missing: install the Debian package %s", name, debianPackage[name])
	return ""
}

// app runs a program and returns its output. The test fails unless the program succeeds.
type app struct {
	t   *testing.T
	dir string
	env []string
	as  *syscall.Credential
}

func (p app) run(name string, args ...string) string {
	p.t.Helper()
	out, err := p.try(name, args...)
	if err != nil {
		p.t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return out
}

func (p app) try(name string, args ...string) (string, error) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(p.t.Context()), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, find(p.t, name), args...)
	cmd.Dir, cmd.Env = p.dir, append(os.Environ(), p.env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.as}
	// A server that the program leaves behind (pg_ctl) keeps the output pipe open.
	cmd.WaitDelay = 2 * time.Second
	out, err := cmd.CombinedOutput()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil
	}
	return string(out), err
}

// TestGit makes a repository with a history, clones and packs it, and checks that no
// content changed.
func TestGit(t *testing.T) {
	dir := subject(t)
	p := app{t: t, dir: dir, env: []string{"HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.org"}}
	p.run("git", "init", "-q", "-b", "main", "origin")
	in := p
	in.dir = filepath.Join(dir, "origin")
	for c := range 20 {
		for i := range 15 {
			path := filepath.Join(in.dir, fmt.Sprintf("d%d", i%4), fmt.Sprintf("file%d-%d", c%7, i))
			must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path, []byte(strings.Repeat(fmt.Sprintf("commit %d file %d\n", c, i), 20*(i+1))), 0o644))
		}
		if c == 5 {
			must(t, os.Symlink("d0", filepath.Join(in.dir, "link")))
		}
		in.run("git", "add", "-A")
		in.run("git", "commit", "-q", "-m", fmt.Sprint("commit ", c))
	}
	head := in.run("git", "rev-parse", "HEAD")
	for _, args := range [][]string{{"clone", "-q", "origin", "linked"}, {"clone", "-q", "--no-hardlinks", "origin", "copied"}, {"clone", "-q", "file://" + in.dir, "packed"}} {
		p.run("git", args...)
		clone := p
		clone.dir = filepath.Join(dir, args[len(args)-1])
		if got := clone.run("git", "rev-parse", "HEAD"); got != head {
			t.Errorf("%q: HEAD is %s, expected %s", args, got, head)
		}
		clone.run("git", "gc", "-q", "--aggressive", "--prune=now")
		clone.run("git", "fsck", "--full", "--strict")
		if got := clone.run("git", "status", "--porcelain"); got != "" {
			t.Errorf("%q: the tree differs after gc:\n%s", args, got)
		}
		clone.run("git", "checkout", "-q", "HEAD~10")
		clone.run("git", "checkout", "-q", "main")
	}
	in.run("git", "gc", "-q")
	in.run("git", "fsck", "--full", "--strict")
	in.run("git", "branch", "side", "HEAD~5")
	in.run("git", "worktree", "add", "-q", filepath.Join(dir, "worktree"), "side")
	in.run("git", "repack", "-q", "-a", "-d", "-f")
	if got := in.run("git", "log", "--oneline"); strings.Count(got, "\n") != 20 {
		t.Errorf("the log has %d commits, expected 20", strings.Count(got, "\n"))
	}
}

// TestGoBuild compiles a real module whose sources, build cache and temporary
// files all lie on the file system, and builds it again from the cache.
func TestGoBuild(t *testing.T) {
	dir := subject(t)
	const module = "github.com/google/btree"
	src := strings.TrimSpace(app{t: t}.run("go", "list", "-m", "-f", "{{.Dir}}", module))
	must(t, os.CopyFS(filepath.Join(dir, "src"), os.DirFS(src)))
	for _, d := range []string{"cache", "tmp"} {
		must(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	p := app{t: t, dir: filepath.Join(dir, "src"), env: []string{
		"GOCACHE=" + filepath.Join(dir, "cache"), "GOTMPDIR=" + filepath.Join(dir, "tmp"), "CGO_ENABLED=0", "GOFLAGS=-mod=mod -trimpath", "GOWORK=off",
	}}
	must(t, os.WriteFile(filepath.Join(dir, "src", "go.mod"), []byte("module "+module+"\n\ngo 1.24\n"), 0o644))
	must(t, os.Mkdir(filepath.Join(dir, "src", "cmd"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "src", "cmd", "main.go"), []byte(`package main

import "github.com/google/btree"

func main() {
	t := btree.NewOrderedG[int](4)
	for i := range 1000 {
		t.ReplaceOrInsert(i)
	}
	print(t.Len())
}
`), 0o644))
	p.run("go", "build", "-o", "../first", "./cmd")
	if got := p.run("go", "list", "-f", "{{.ImportPath}} {{.Stale}}", "-deps", "."); strings.Contains(got, "true") {
		t.Errorf("libraries are stale right after the build: the cache lost something\n%s", got)
	}
	p.run("go", "build", "-a", "-o", "../second", "./cmd")
	first, err := os.ReadFile(filepath.Join(dir, "first"))
	must(t, err)
	second, err := os.ReadFile(filepath.Join(dir, "second"))
	must(t, err)
	if sha256.Sum256(first) != sha256.Sum256(second) {
		t.Error("two builds of the same sources differ")
	}
	out, err := exec.Command(filepath.Join(dir, "first")).CombinedOutput()
	if err != nil || string(out) != "1000" {
		t.Errorf("the program prints %q, %v; expected 1000", out, err)
	}
}

// TestTar packs a tree with every kind of object into an archive, unpacks the archive and
// compares.
func TestTar(t *testing.T) {
	dir := subject(t)
	p := app{t: t, dir: dir}
	plant(t, filepath.Join(dir, "tree"))
	p.run("tar", "--format=posix", "--xattrs", "--xattrs-include=*", "--acls", "--sparse", "-cf", "tree.tar", "tree")
	must(t, os.Mkdir(filepath.Join(dir, "out"), 0o755))
	p.run("tar", "--xattrs", "--xattrs-include=*", "--acls", "--same-owner", "-xpf", "tree.tar", "-C", "out")
	compareTrees(t, filepath.Join(dir, "tree"), filepath.Join(dir, "out", "tree"))
	p.run("tar", "--xattrs", "--xattrs-include=*", "--acls", "-df", "tree.tar")
}

// TestRsync copies a tree from the native file system and back with all that rsync can
// preserve, changes the tree, and copies the changes.
func TestRsync(t *testing.T) {
	dir := subject(t)
	native, err := os.MkdirTemp(scratchDir, "rsync-")
	must(t, err)
	plant(t, filepath.Join(native, "tree"))
	p := app{t: t, dir: dir}
	flags := []string{"-aHAXS", "--modify-window=-1", // compare nanoseconds, too
		"--numeric-ids", "--devices", "--specials", "--delete"}
	sync := func(from, to string) {
		t.Helper()
		p.run("rsync", append(flags, from+"/", to+"/")...)
		if out := p.run("rsync", append(flags, "-c", "-n", "-i", from+"/", to+"/")...); out != "" {
			t.Errorf("rsync from %s to %s left differences:\n%s", from, to, out)
		}
		compareTrees(t, from, to)
	}
	sync(filepath.Join(native, "tree"), filepath.Join(dir, "copy"))
	sync(filepath.Join(dir, "copy"), filepath.Join(native, "back"))
	must(t, os.WriteFile(filepath.Join(native, "tree", "file3"), []byte("changed"), 0o600))
	must(t, os.Remove(filepath.Join(native, "tree", "file4")))
	must(t, os.Rename(filepath.Join(native, "tree", "dir1"), filepath.Join(native, "tree", "dir9")))
	sync(filepath.Join(native, "tree"), filepath.Join(dir, "copy"))
	p.run("rsync", append(flags, "--inplace", "--no-whole-file", "--ignore-times", filepath.Join(native, "tree")+"/", filepath.Join(dir, "copy")+"/")...)
	compareTrees(t, filepath.Join(native, "tree"), filepath.Join(dir, "copy"))
}

// TestSQLite lets several processes write to a database in both journal modes.
func TestSQLite(t *testing.T) {
	dir := subject(t)
	for _, mode := range []string{"delete", "truncate", "persist", "wal"} {
		db := filepath.Join(dir, mode+".db")
		p := app{t: t, dir: dir}
		if got := strings.TrimSpace(p.run("sqlite3", db, "PRAGMA journal_mode="+mode+"; CREATE TABLE t (writer INT, n INT, text TEXT); CREATE INDEX i ON t (text);")); got != mode {
			t.Errorf("journal mode is %s, asked for %s", got, mode)
		}
		const writers, each = 4, 60
		parallel(t, writers, func(w int) error {
			var script strings.Builder
			script.WriteString(".timeout 60000\nPRAGMA synchronous=NORMAL;\n")
			for n := range each {
				fmt.Fprintf(&script, "BEGIN IMMEDIATE; INSERT INTO t VALUES (%d, %d, hex(randomblob(200))); COMMIT;\n", w, n)
			}
			cmd := exec.CommandContext(t.Context(), find(t, "sqlite3"), "-bail", db)
			cmd.Stdin = strings.NewReader(script.String())
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("writer %d in mode %s: %w\n%s", w, mode, err, out)
			}
			return nil
		})
		if got := strings.TrimSpace(p.run("sqlite3", db, "SELECT count(*), count(DISTINCT writer * 1000 + n) FROM t; PRAGMA integrity_check;")); got != fmt.Sprintf("%d|%d\nok", writers*each, writers*each) {
			t.Errorf("in mode %s: %q", mode, got)
		}
		p.run("sqlite3", db, "DELETE FROM t WHERE n % 2; VACUUM; PRAGMA integrity_check;")
	}
}

// TestPostgreSQL makes a cluster with checksums, runs pgbench, kills the server, lets the
// server recover, and checks the sums of the accounts.
func TestPostgreSQL(t *testing.T) {
	dir := subject(t)
	u, err := user.Lookup("postgres")
	if err != nil {
		t.Fatal("the user postgres is missing: install the Debian package postgresql")
	}
	uid, err := strconv.Atoi(u.Uid)
	must(t, err)
	gid, err := strconv.Atoi(u.Gid)
	must(t, err)
	base := filepath.Join(dir, "pg")
	must(t, os.Mkdir(base, 0o700))
	must(t, os.Chown(base, uid, gid))
	data, logFile := filepath.Join(base, "data"), filepath.Join(base, "log")
	sockets, err := os.MkdirTemp(scratchDir, "pg") // the path of a socket has 107 bytes
	must(t, err)
	must(t, os.Chown(sockets, uid, gid))
	p := app{t: t, dir: base, as: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, env: []string{"PGHOST=" + sockets, "PGUSER=postgres", "LC_ALL=C", "HOME=" + base}}
	p.run("initdb", "-D", data, "--data-checksums", "-A", "trust", "-U", "postgres")
	options := fmt.Sprintf("-c listen_addresses= -c unix_socket_directories=%s -c shared_buffers=16MB", sockets)
	start := func() { p.run("pg_ctl", "-D", data, "-l", logFile, "-o", options, "-w", "-t", "120", "start") }
	start()
	t.Cleanup(func() {
		if out, err := p.try("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"); err != nil && !strings.Contains(out, "not running") && !strings.Contains(out, "does not exist") {
			t.Errorf("stopping PostgreSQL: %v\n%s", err, out)
		}
	})
	p.run("pgbench", "-i", "-s", "1", "-q", "postgres")
	p.run("pgbench", "-c", "4", "-j", "2", "-t", "100", "postgres")
	books := func() string {
		return p.run("psql", "-At", "-c", "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(bbalance) FROM pgbench_branches) AND (SELECT sum(tbalance) FROM pgbench_tellers) = (SELECT sum(delta) FROM pgbench_history), count(*) FROM pgbench_history", "postgres")
	}
	if got := strings.TrimSpace(books()); got != "t|400" {
		t.Errorf("after 400 transactions the books say %q", got)
	}
	p.run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop") // as a crash: no checkpoint
	start()
	if got := strings.TrimSpace(books()); got != "t|400" {
		t.Errorf("after the crash the books say %q", got)
	}
	p.run("psql", "-c", "VACUUM FULL; REINDEX DATABASE postgres", "-c", "CHECKPOINT", "postgres")
	p.run("pg_ctl", "-D", data, "-m", "fast", "-w", "stop")
	p.run("pg_checksums", "-D", data, "--check")
}

// TestShell runs common small tools in their everyday use.
func TestShell(t *testing.T) {
	dir := subject(t)
	app{t: t, dir: dir}.run("sh", "-ex", "-c", `
mkdir -p a/b/c
i=0; while [ $i -lt 200 ]; do echo "line $i" >> a/log; echo $i > a/b/$i; i=$((i+1)); done
[ $(wc -l < a/log) = 200 ]
[ $(find a -type f | wc -l) = 201 ]
cp -a a z
diff -r a z
mv z/b z/moved
rmdir z/moved/c; [ $(cat z/moved/* | sort -n | tail -1) = 199 ]
grep -rl 'line 150' . | grep -q a/log
ln -s a/log link; ln a/log hard
[ "$(stat -c %h a/log)" = 2 ]
sed -i s/150/changed/ hard
[ "$(stat -c %h a/log)" = 1 ]
grep -q changed hard && ! grep -q changed a/log
dd if=/dev/zero of=big bs=1M count=8 conv=fsync 2>/dev/null
truncate -s 100M sparse
[ $(du -k sparse | cut -f1) -lt 100 ]
mkfifo pipe; (echo through > pipe) & [ "$(cat pipe)" = through ]; wait
chmod 0 a/b/1; [ "$(stat -c %a a/b/1)" = 0 ]
touch -d '2001-02-03 04:05:06.789' big; [ "$(stat -c %y big | cut -c1-23)" = '2001-02-03 04:05:06.789' ]
install -m 755 /bin/true t; ./t
rm -rf a z
[ "$(ls | wc -l)" = 6 ]
`)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// plant makes a tree with all kinds of objects: files small and large, a sparse file,
// hard links, symbolic links, a fifo, devices, owners, odd modes, times, attributes,
// ACLs, long and strange names.
func plant(t *testing.T, root string) {
	t.Helper()
	must(t, os.MkdirAll(root, 0o755))
	at := func(p string) string { return filepath.Join(root, p) }
	for i := range 20 {
		must(t, os.WriteFile(at(fmt.Sprint("file", i)), []byte(strings.Repeat(fmt.Sprint("content ", i), i*i*50)), os.FileMode(0o600|i*2&0o77)))
	}
	for i := range 3 {
		must(t, os.MkdirAll(at(fmt.Sprintf("dir%d/sub/deep", i)), 0o755))
		for j := range 30 {
			must(t, os.WriteFile(at(fmt.Sprintf("dir%d/sub/%d", i, j)), []byte(fmt.Sprint(i, j)), 0o644))
		}
	}
	must(t, os.Mkdir(at("empty"), 0o700))
	must(t, os.WriteFile(at("large"), []byte(strings.Repeat("0123456789abcdef", 200000)), 0o644))
	sparse, err := os.Create(at("sparse"))
	must(t, err)
	_, err = sparse.WriteAt([]byte("end"), 20<<20)
	must(t, err)
	must(t, sparse.Close())
	must(t, os.Link(at("file1"), at("dir1/hard")))
	must(t, os.Link(at("file1"), at("hard")))
	must(t, os.Symlink("file1", at("link")))
	must(t, os.Symlink("/nonexistent/"+strings.Repeat("x", 200), at("dangling")))
	must(t, unix.Mkfifo(at("fifo"), 0o640))
	must(t, unix.Mknod(at("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(t, os.WriteFile(at(strings.Repeat("n", 255)), []byte("long name"), 0o644))
	must(t, os.WriteFile(at("strange \n\xff name"), []byte("strange name"), 0o644))
	must(t, os.Chown(at("file2"), 12345, 54321))
	must(t, os.Lchown(at("link"), 11, 22))
	must(t, os.Chmod(at("file3"), 0o755|os.ModeSetuid|os.ModeSetgid))
	must(t, os.Chmod(at("empty"), 0o777|os.ModeSticky))
	must(t, unix.Setxattr(at("file4"), "user.comment", []byte("a value\x00with a zero"), 0))
	must(t, unix.Setxattr(at("dir0"), "user.comment", []byte("of a directory"), 0))
	must(t, unix.Setxattr(at("file5"), "trusted.comment", []byte("for root"), 0))
	// u::rw-,u:77:r--,g::r--,m::r--,o::---
	acl := []byte("\x02\x00\x00\x00" + "\x01\x00\x06\x00\xff\xff\xff\xff" + "\x02\x00\x04\x00\x4d\x00\x00\x00" + "\x04\x00\x04\x00\xff\xff\xff\xff" + "\x10\x00\x04\x00\xff\xff\xff\xff" + "\x20\x00\x00\x00\xff\xff\xff\xff")
	must(t, unix.Setxattr(at("file6"), "system.posix_acl_access", acl, 0))
	must(t, unix.Setxattr(at("dir2"), "system.posix_acl_default", acl, 0))
	for i, p := range []string{"file0", "file19", "dir1", "link", "fifo", "."} {
		must(t, unix.UtimesNanoAt(unix.AT_FDCWD, at(p), []unix.Timespec{{Sec: int64(1e9 + i)}, {Sec: int64(1e9 + i), Nsec: int64(123456789 + i)}}, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// compareTrees demands that two trees are equal in all properties except the times of
// change and access.
func compareTrees(t *testing.T, a, b string) {
	t.Helper()
	x, y := describe(t, a), describe(t, b)
	bad := 0
	for p, d := range x {
		if y[p] != d {
			t.Errorf("%q in %s: %s\n   in %s: %s", p, a, d, b, y[p])
			bad++
		}
		if bad > 10 {
			return
		}
	}
	for p := range y {
		if _, ok := x[p]; !ok {
			t.Errorf("%q is in %s, but not in %s", p, b, a)
		}
	}
}

// describe returns a line with all properties of each object of a tree.
func describe(t *testing.T, root string) map[string]string {
	t.Helper()
	all := map[string]string{}
	first := map[uint64]string{} // hard links by their first name
	must(t, filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		d := fmt.Sprintf("mode %o owner %d:%d mtime %d.%09d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			if st.Nlink > 1 {
				if first[st.Ino] == "" {
					first[st.Ino] = rel
				}
				d += " linked to " + first[st.Ino]
			}
			d += fmt.Sprintf(" size %d sha256 %x", len(b), sha256.Sum256(b))
		case unix.S_IFLNK:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			d += " to " + target
		case unix.S_IFCHR, unix.S_IFBLK:
			d += fmt.Sprint(" device ", st.Rdev)
		}
		list := make([]byte, 65536)
		n, err := unix.Llistxattr(p, list)
		if err != nil {
			return fmt.Errorf("llistxattr %q: %w", p, err)
		}
		attrs := strings.Split(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00")
		slices.Sort(attrs)
		for _, name := range attrs {
			if name == "" {
				continue
			}
			v := make([]byte, 65536)
			n, err := unix.Lgetxattr(p, name, v)
			if err != nil {
				return fmt.Errorf("lgetxattr %q %s: %w", p, name, err)
			}
			d += fmt.Sprintf(" %s=%x", name, v[:n])
		}
		all[rel] = d
		return nil
	}))
	return all
}

// TestManyProcesses runs many small processes on one directory: each process makes, reads
// and removes its own files and appends to a common log.
func TestManyProcesses(t *testing.T) {
	dir := subject(t)
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			script := fmt.Sprintf(`for j in 1 2 3 4 5 6 7 8 9 10; do echo "%d $j" > f-%d-$j; cat f-%d-$j >> log; mkdir d-%d-$j; mv f-%d-$j d-%d-$j/; rm -r d-%d-$j; done`, i, i, i, i, i, i, i)
			cmd := exec.CommandContext(t.Context(), find(t, "sh"), "-e", "-c", script)
			cmd.Dir = dir
			if out, err := cmd.CombinedOutput(); err != nil {
				errs[i] = fmt.Errorf("process %d: %w\n%s", i, err, out)
			}
		})
	}
	wg.Wait()
	must(t, errors.Join(errs...))
	b, err := os.ReadFile(filepath.Join(dir, "log"))
	must(t, err)
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	slices.Sort(lines)
	if len(slices.Compact(lines)) != 80 {
		t.Errorf("the log has %d different lines, expected 80", len(lines))
	}
}
