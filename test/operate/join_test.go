package operate

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/test/load"
	"penstock.io/penstock/test/program"
)

// gathered is how many bytes of pieces compaction had copied into chunks on a chunk
// server since that was started.
func (r *rig) gathered(i int) (float64, error) {
	all, err := program.Metrics(filepath.Join(r.Dir, fmt.Sprint("c", i), "admin.sock"))
	n, ok := all["penstock_chunkserver_gathered_bytes_total"]
	if err == nil && !ok {
		err = errors.New("chunk servers do not tell what they gathered")
	}
	return n, err
}

// stored lists the chunks of a volume on a chunk server's disk.
func (r *rig) stored(i int, volume string) (ids []string, err error) {
	err = filepath.WalkDir(filepath.Join(r.Dir, fmt.Sprint("c", i)), func(path string, _ fs.DirEntry, err error) error {
		if id, ok := strings.CutSuffix(filepath.Base(path), ".data"); ok && strings.HasPrefix(id, volume) {
			ids = append(ids, id)
		}
		if errors.Is(err, fs.ErrNotExist) { // removed meanwhile
			err = nil
		}
		return err
	})
	return ids, err
}

// TestKilledWhileJoining kills a chunk server in the middle of joining a file's fragments,
// again and again. The file has the bytes that were written, also during the joining. In the
// end the file lies in few chunks, of which each server has its replica. Nothing else is on any
// disk: neither the joined fragments nor half-done work of a killed server.
func TestKilledWhileJoining(t *testing.T) {
	t.Parallel() // the test waits for copies with a low rate
	const (
		block  = 64 << 10
		blocks = 512 // two orders of 16 MiB, of some seconds each
		rounds = 2
	)
	r := newRig(t, 2, "--repair-grace", "200ms", "--repair-interval", "500ms", "--balance", "-1",
		"--compact-rate", "4M", "--join-fragments", "4", "--join-interval", "1s")
	r.Must("volume", "create", "v", "--attach", "/v", "--replicas", "2")
	at := r.mount("v:/", "w")
	name := filepath.Join(at, "f")
	var want []byte
	rnd := rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 1))
	write := func(seed uint64) {
		t.Helper()
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		want = make([]byte, block*blocks)
		load.Pattern(want, seed, 0)
		for i, k := range rnd.Perm(blocks) {
			if _, err := f.WriteAt(want[k*block:(k+1)*block], int64(k*block)); err != nil {
				t.Fatal(err)
			}
			if i%64 == 63 {
				if err := f.Sync(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	check := func(when string) {
		t.Helper()
		// By a mount that has nothing of the file cached.
		from := filepath.Join(r.mount("v:/", "r-"+strings.ReplaceAll(when, " ", "-")), "f")
		got, err := os.ReadFile(from)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("DATA: %s: %d bytes, %v: not what was written", when, len(got), err)
		}
	}
	locate := func() (extents int, chunks map[string][]uint64, err error) {
		out, err := r.Ctl("locate", name, "-o", "json")
		if err != nil {
			return 0, nil, err
		}
		var l struct {
			Extents []struct {
				Chunk   string   `json:"chunk"`
				Servers []uint64 `json:"servers"`
			} `json:"extents"`
		}
		chunks = map[string][]uint64{}
		err = json.Unmarshal(out, &l)
		for _, e := range l.Extents {
			chunks[e.Chunk] = e.Servers
		}
		return len(l.Extents), chunks, err
	}

	for round := range rounds {
		write(uint64(round + 1))
		n, _, err := locate()
		if err != nil || n < blocks/8 {
			t.Fatalf("%d fragments, %v: nothing is to be joined", n, err)
		}
		victim := round % 2
		var before float64
		r.Until("it is being joined", func() (err error) {
			if victim == 0 { // within the first order
				log, err := os.ReadFile(filepath.Join(r.Dir, "log"))
				if bytes.Count(log, []byte(`"joining fragments"`)) <= round {
					err = cmp.Or(err, errors.New("not yet"))
				}
				return err
			}
			if before, err = r.gathered(victim); err == nil && before == 0 {
				err = errors.New("nothing was gathered yet")
			}
			return err
		})
		time.Sleep(time.Duration(rnd.IntN(2500)) * time.Millisecond)
		r.chunks[victim].Kill()
		within, _, err := locate()
		if err != nil {
			t.Fatal(err)
		}
		check(fmt.Sprint("dead in round ", round))
		r.chunks[victim] = r.chunkServer(victim)
		t.Logf("round %d: killed with %d bytes gathered there and %d of %d fragments left", round, int(before), within, n)
		if within < blocks/8 {
			t.Errorf("round %d: all was joined before the kill", round)
		}
		var chunks map[string][]uint64
		r.Until("it is joined", func() (err error) {
			var n int
			if n, chunks, err = locate(); err == nil && n > 16 {
				err = fmt.Errorf("%d fragments", n)
			}
			return err
		})
		r.Until("nothing else is on the disks", func() error {
			// Repair may move a replica, joining the last writes.
			if _, chunks, err = locate(); err != nil {
				return err
			}
			var errs []error
			volume := "" // the first part of the names of the volume's chunks
			for id := range chunks {
				volume = id[:8]
			}
			for i := range r.chunks {
				for id, servers := range chunks {
					if !slices.Contains(servers, uint64(i+1)) {
						errs = append(errs, fmt.Errorf("%s has no replica on server %d", id, i+1))
					}
				}
				ids, err := r.stored(i, volume)
				if err != nil || len(ids) != len(chunks) {
					errs = append(errs, err, fmt.Errorf("server %d has %v, the file lies in %v", i+1, ids, chunks))
				}
			}
			return errors.Join(errs...)
		})
		check(fmt.Sprint("joined in round ", round))
	}
	r.Until("fsck", func() error { _, err := r.Ctl("fsck", "--volume", "v"); return err })
}
