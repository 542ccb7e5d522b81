// Package posix runs the conformance suite of test/posix/suite, go-fuse's
// posixtest and real programs on native ext4 and on a Penstock mount.
package posix

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/test/posix/suite"
	"penstock.io/penstock/test/program"
)

var (
	dirFlag   = flag.String("dir", os.Getenv("PENSTOCK_POSIX_DIR"), "directory to run the suite in, instead of ext4 and a mount that the test brings up")
	otherFlag = flag.String("other", "", "the directory that -dir names, on another mount of the same cluster")
	caseFlag  = flag.String("case", "", "run only the cases whose name matches this regular expression")
	workers   = flag.Int("workers", 4, "cases that run at the same time")
)

// leastCases is the number of distinct conditions below which the suite may
// never fall.
const leastCases = 1500

func TestMain(m *testing.M) {
	suite.RunAsHelper() // does not return in a helper process
	calmRuntime()
	flag.Parse()
	os.Exit(program.InOwnMounts(func() int { return withScratch(m) }))
}

// withScratch makes the tests' scratch directory. Its mode lets other users walk through.
func withScratch(m *testing.M) int {
	var err error
	if scratchDir, err = os.MkdirTemp("/var/tmp", "pp-"); err == nil {
		err = os.Chmod(scratchDir, 0o755)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(scratchDir)
	return m.Run()
}

// calmRuntime runs the test binary again without the runtime's preemption signals: such a
// signal may interrupt a system call on a FUSE file system. A C program without signals
// never sees EINTR, and the cases must not either.
func calmRuntime() {
	const setting = "asyncpreemptoff=1"
	if strings.Contains(os.Getenv("GODEBUG"), setting) {
		return
	}
	exe, err := os.Executable()
	if err == nil {
		err = unix.Exec(exe, os.Args, append(os.Environ(), "GODEBUG="+setting))
	}
	fmt.Fprintln(os.Stderr, "starting the test again without preemption signals:", err)
	os.Exit(2)
}

// TestCount checks the number of cases, and that no two cases have the same name.
func TestCount(t *testing.T) {
	seen := map[string]bool{}
	for _, c := range slices.Concat(suite.Cases(), suite.CoherenceCases(), mappedTable()) {
		if seen[c.Name] {
			t.Errorf("case %s stands twice", c.Name)
		}
		seen[c.Name] = true
	}
	t.Logf("%d distinct cases", len(seen))
	if len(seen) < leastCases {
		t.Errorf("%d distinct cases, want at least %d", len(seen), leastCases)
	}
}

// TestConformance runs the suite in the directory of -dir, or without -dir on a Penstock
// mount.
func TestConformance(t *testing.T) {
	dir := subject(t)
	conform(t, dir, dir, suite.Cases())
}

// TestExt4 runs the suite on ext4, which proves that the suite tests POSIX and not
// Penstock.
func TestExt4(t *testing.T) {
	if *dirFlag != "" {
		return // -dir: only this directory
	}
	dir := ext4Dir(t)
	conform(t, dir, dir, slices.Concat(suite.Cases(), suite.CoherenceCases(), mappedTable()))
}

// conform runs the cases in dir, which other names on another mount, and
// prints the figures.
func conform(t *testing.T, dir, other string, all []suite.Case) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("the suite makes devices and becomes other users: run it as root")
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	match, err := regexp.Compile(*caseFlag)
	if err != nil {
		t.Fatalf("-case: %v", err)
	}
	var cases []suite.Case
	for _, c := range all {
		if match.MatchString(c.Name) {
			cases = append(cases, c)
		}
	}
	passed, failed := suite.Run(dir, other, cases, *workers, func(r suite.Result) {
		if r.Err != nil {
			t.Errorf("%s: %v", r.Name, r.Err)
		} else if testing.Verbose() && *caseFlag != "" {
			t.Logf("%s: passed in %s", r.Name, r.Took)
		}
	})
	t.Logf("%d passed, %d failed", passed, failed)
	for _, l := range left(dir, other) {
		t.Errorf("the cases left this open: %s", l)
	}
}

// left lists the open files and working directories of this process that lie in the
// directories.
func left(dirs ...string) []string {
	time.Sleep(50 * time.Millisecond) // the threads of the last cases end
	var found []string
	for _, pattern := range []string{"/proc/self/fd/*", "/proc/self/task/*/cwd"} {
		links, err := filepath.Glob(pattern)
		if err != nil {
			return []string{err.Error()}
		}
		for _, l := range links {
			target, err := os.Readlink(l)
			if err != nil {
				continue // the descriptor was closed meanwhile
			}
			for _, d := range dirs {
				if strings.HasPrefix(target, d) {
					found = append(found, l+" -> "+target)
				}
			}
		}
	}
	return found
}

// ext4Dir returns a directory on native ext4: the scratch directory if it is on ext4,
// otherwise a directory on a loop device made for the test.
func ext4Dir(t *testing.T) string {
	dir, err := os.MkdirTemp(scratchDir, "ext4-")
	if err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	if st.Type == unix.EXT4_SUPER_MAGIC {
		return dir
	}
	image, mnt := filepath.Join(dir, "image"), filepath.Join(dir, "mnt")
	for _, args := range [][]string{
		{"truncate", "-s", "2G", image}, {"mkfs.ext4", "-q", "-F", image}, {"mkdir", mnt}, {"mount", "-o", "loop", image, mnt},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("making an ext4 image: %v: %v\n%s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, unix.MNT_DETACH); err != nil {
			t.Errorf("unmounting %s: %v", mnt, err)
		}
	})
	return mnt
}
