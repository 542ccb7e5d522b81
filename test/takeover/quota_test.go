package takeover

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// limited is a mount of a volume with a quota, and the quota's size.
func limited(t *testing.T) (r *rig, limit int) {
	t.Helper()
	r = newRig(t, "--respawn", "--settle=100ms")
	r.Until("a volume", func() error { _, err := r.Ctl("volume", "create", "q", "--quota", "32M"); return err })
	r.mountOf("q:/")
	return r, 32 << 20
}

// killed kills the serving process, and waits for the next.
func (r *rig) killed() {
	r.T.Helper()
	pid := r.server()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		r.T.Fatal(err)
	}
	r.next(pid)
}

// soon does a call that may wait for ever: bytes that can't be committed are tried again and
// again.
func soon(t *testing.T, what string, do func() error) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- do() }() // ends with the mount at the latest
	select {
	case err := <-ended:
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	case <-time.After(90 * time.Second):
		t.Fatalf("%s: it waits", what)
	}
}

// TestQuotaIsInherited: the successors of killed processes inherit the reserved part of a
// quota. The part is not counted twice, and becomes free when the files for which it was
// reserved are gone.
func TestQuotaIsInherited(t *testing.T) {
	r, limit := limited(t)
	// More than half of the volume each time, partly synced, in files that end in chunks of their
	// own, partly only buffered.
	for n := range uint64(3) {
		want := pattern(n, 1, limit*5/8)
		f, err := os.Create(filepath.Join(r.at, "f"))
		if err != nil {
			t.Fatal(err)
		}
		half := len(want) / 2
		soon(t, fmt.Sprintf("write %d", n), func() error {
			_, err := f.Write(want[:half])
			err = errors.Join(err, f.Sync())
			_, werr := f.Write(want[half:])
			return errors.Join(err, werr)
		})
		r.killed()
		soon(t, "what write(2) took", func() error { return errors.Join(f.Sync(), f.Close()) })
		if got, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("DATA: round %d: %d bytes, not those that were written: %v", n, len(got), err)
		}
		if err := os.Remove(f.Name()); err != nil {
			t.Fatal(err)
		}
	}
	// The whole quota is free for one file.
	soon(t, "a file of almost the whole volume", func() error {
		return os.WriteFile(filepath.Join(r.at, "all"), make([]byte, limit-limit/64), 0o644)
	})
	r.clean(r.server())
}

// TestFullVolumeIsTakenOver: a volume is full, and has uncommitted bytes. Neither the successor
// of the killed process nor the next successor refuses bytes that write(2) took.
func TestFullVolumeIsTakenOver(t *testing.T) {
	r, limit := limited(t)
	f, err := os.Create(filepath.Join(r.at, "f"))
	if err != nil {
		t.Fatal(err)
	}
	taken := 0
	for n := uint64(0); ; n++ {
		_, err := f.Write(pattern(n, 1, 1<<20))
		if errors.Is(err, syscall.EDQUOT) {
			break
		}
		if err != nil || taken > limit {
			t.Fatalf("%d bytes: %v", taken, err)
		}
		taken += 1 << 20
	}
	if taken < limit/2 {
		t.Fatalf("%d bytes are too many", taken)
	}
	r.killed()
	r.killed()
	soon(t, "what write(2) took", func() error { return errors.Join(f.Sync(), f.Close()) })
	got, err := os.ReadFile(f.Name())
	if err != nil || len(got) != taken {
		t.Fatalf("DATA: %d bytes, not %d: %v", len(got), taken, err)
	}
	for n := range uint64(taken >> 20) {
		if !bytes.Equal(got[n<<20:][:1<<20], pattern(n, 1, 1<<20)) {
			t.Fatalf("DATA: MiB %d is not what was written", n)
		}
	}
	r.clean(r.server())
}
