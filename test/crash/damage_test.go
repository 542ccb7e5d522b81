package crash

import (
	"strings"
	"testing"
)

// etcdRoom is the room, in bytes, left on the metadata disk when a test fills the disk
// between two checks by the metadata server. The room is less than the eighth of the
// disk, and less than the quarter of this eighth, at which the server refuses changes,
// and is enough for etcd's writes of earlier changes. An etcd without any room ends the
// process.
const etcdRoom = 8 << 20

// TestFullDisk: each disk in turn.
func TestFullDisk(t *testing.T) {
	t.Run("chunks", func(t *testing.T) {
		m := machineOf(t, 512<<20, 256<<20)
		if err := m.full(t.Context(), m.chunks, 0, *seed, t.Logf); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("meta", func(t *testing.T) {
		m := machineOf(t, 512<<20, 256<<20)
		if err := m.full(t.Context(), m.meta, etcdRoom, *seed, t.Logf); err != nil {
			t.Fatal(err)
		}
	})
}

// TestFailingSyncs: EIO of a sync on the disk reaches fsync and close, and no later call
// reports a success falsely.
func TestFailingSyncs(t *testing.T) {
	for name, chunksOnly := range map[string]bool{"all files": false, "the chunk disk's files": true} {
		t.Run(name, func(t *testing.T) {
			if err := machineOf(t, 512<<20, 512<<20).failingSyncs(t.Context(), few(1), chunksOnly, *seed, t.Logf); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// damaged lists the kinds of files in which the test flips bits.
var damaged = []struct {
	name, folder string
	match        func(string) bool
	// trials is the number of trials in go test. noticed is the least percentage of flips
	// that must be noticed: nearly all in files without unused bytes.
	trials, noticed int
}{
	{"chunk data", "chunks", func(n string) bool { return strings.HasSuffix(n, ".data") }, 3, 60},
	{"chunk metadata", "chunks", func(n string) bool { return !strings.HasSuffix(n, ".data") }, 3, 0},
	{"state", "meta", func(n string) bool { return strings.HasSuffix(n, ".sst") || strings.HasSuffix(n, ".log") }, 2, 0},
	{"journal", "etcd", func(string) bool { return true }, 2, 0},
}

// TestFlippedBits: a flipped bit is an error or nothing, never other bytes.
func TestFlippedBits(t *testing.T) {
	s := newSystem(t)
	if err := s.prepareFlips(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, d := range damaged {
		t.Run(d.name, func(t *testing.T) {
			n := few(d.trials)
			got, err := s.flip(t.Context(), n, *seed, d.folder, d.match)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%+v", got)
			if 100*(got.refused+got.errors) < d.noticed*n {
				t.Errorf("of %d flips only %d were noticed", n, got.refused+got.errors)
			}
		})
	}
}
