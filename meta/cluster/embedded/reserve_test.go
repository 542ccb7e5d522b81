package embedded

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// The database has blocks behind its end, and keeps such blocks when the database grows or
// becomes another file.
func TestBlocksAreReservedBehindTheEnd(t *testing.T) {
	path := filepath.Join(folder(t), "db")
	if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	r := &reserver{path: path, log: slog.New(slog.DiscardHandler)}
	check := func(size int64) {
		t.Helper()
		if !r.reserve() {
			t.Fatal("this file system can't reserve; the test needs one that can")
		}
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			t.Fatal(err)
		}
		if st.Size != size {
			t.Fatalf("the file has %d bytes, not %d", st.Size, size)
		}
		if have := st.Blocks*512 - size; have < reserveAgain {
			t.Fatalf("%d bytes are reserved behind the end, want %d", have, reserveAgain)
		}
	}
	check(4096)
	if err := os.Truncate(path, 48<<20); err != nil {
		t.Fatal(err)
	}
	check(48 << 20)
	if err := os.WriteFile(path+".new", make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	check(4096)
}
