package operate

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func containsAll(s string, parts ...string) bool {
	for _, p := range parts {
		if !strings.Contains(s, p) {
			return false
		}
	}
	return true
}

type lost struct {
	Chunk string `json:"chunk"`
	State string `json:"state"`
	Files []struct {
		Path string `json:"path"`
	} `json:"files"`
}

func (r *rig) lost() (l []lost, err error) {
	out, err := r.Ctl("chunk", "lost", "-o", "json")
	if err != nil {
		return nil, err
	}
	return l, json.Unmarshal(out, &l)
}

// TestLoss: two chunk servers share no chunk, and one of the servers is gone with its disk.
// Reading the bytes of this server gives EIO, and their files are listed by path; the bytes of
// the other server read as before. An accepted loss stays accepted, even if the server comes back
// with every byte.
func TestLoss(t *testing.T) {
	r := newRig(t, 2, "--repair-delay", "1s", "--repair-grace", "200ms", "--repair-interval", "200ms", "--balance", "-1")
	r.Must("volume", "create", "v", "--attach", "/v", "--replicas", "1")
	// Files of a mount each, so of a chunk each, until both servers have some.
	data := bytes.Repeat([]byte("penstock"), 1<<19)
	onNode := map[uint64][]string{}
	// The owner does not ask a server that has just come yet.
	for i, deadline := 0, time.Now().Add(time.Minute); len(onNode) < 2; i++ {
		name := fmt.Sprint("d/f", i)
		if time.Now().After(deadline) {
			t.Fatalf("files lie on %v alone", onNode)
		}
		time.Sleep(time.Duration(min(i, 20)) * 50 * time.Millisecond)
		at := r.mount("v:/", fmt.Sprint("w", i))
		if err := os.MkdirAll(filepath.Join(at, "d"), 0o755); err != nil {
			t.Fatal(err)
		}
		f, err := os.Create(filepath.Join(at, name))
		if err != nil {
			t.Fatal(err)
		}
		_, err = f.Write(data)
		if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
		var where struct {
			Extents []struct {
				Servers []uint64 `json:"servers"`
			} `json:"extents"`
		}
		if err := json.Unmarshal(r.Must("locate", filepath.Join(at, name), "-o", "json"), &where); err != nil {
			t.Fatal(err)
		}
		on := map[uint64]bool{}
		for _, e := range where.Extents {
			on[e.Servers[0]] = true
		}
		for id := range on {
			if len(on) == 1 { // a writer that waited for too long goes on elsewhere
				onNode[id] = append(onNode[id], name)
			}
		}
	}
	gone := onNode[1][0]
	r.chunks[0].Kill()
	at := r.mount("v:/", "x") // knows nothing yet
	read := func(name string) error {
		b, err := os.ReadFile(filepath.Join(at, name))
		if err == nil && !bytes.Equal(b, data) {
			t.Fatalf("DATA: %s: %d bytes, zeros %v: these are not its bytes", name, len(b), bytes.Count(b, []byte{0}))
		}
		return err
	}
	if err := read(onNode[2][0]); err != nil {
		t.Fatal(err)
	}
	if err := read(gone); !errors.Is(err, syscall.EIO) {
		t.Fatalf("%s, whose server is gone: %v", gone, err)
	}
	state := func(want string) (chunk string) {
		t.Helper()
		r.Until(gone+" is "+want, func() error {
			all, err := r.lost()
			for _, l := range all {
				if l.State == want && len(l.Files) > 0 && l.Files[0].Path == "/"+gone {
					chunk = l.Chunk
					return nil
				}
			}
			return cmp.Or(err, fmt.Errorf("%+v", all))
		})
		return chunk
	}
	chunk := state("waits")
	// Repair looks at the same chunks again and again, and may be at this chunk.
	r.Until("the loss is refused", func() error {
		_, err := r.Ctl("chunk", "accept-loss", chunk, "--yes")
		if err == nil {
			t.Fatal("accepted though its server may come back")
		}
		if strings.Contains(err.Error(), "does not answer") {
			return nil
		}
		return err
	})
	r.Must("node", "remove", "1", "--force", "--yes")
	state("lost")
	if _, err := r.Ctl("chunk", "accept-loss", "--all"); err == nil {
		t.Fatal("nobody was asked, and nobody said --yes")
	}
	r.Until("all are accepted", func() error { _, err := r.Ctl("chunk", "accept-loss", "--all", "--yes"); return err })
	state("accepted")
	if err := read(gone); !errors.Is(err, syscall.EIO) {
		t.Fatalf("%s, which was accepted as lost: %v", gone, err)
	}
	if out := string(r.Must("fsck", "--volume", "v")); !strings.Contains(out, "accepted_lost") {
		t.Errorf("fsck does not tell what was accepted as lost:\n%s", out)
	}
	// The server comes back, and has to delete its replicas.
	r.chunkServer(0)
	r.Until("what came back is deleted", func() error {
		files, err := filepath.Glob(filepath.Join(r.Dir, "c0", "*", "*", "*", "*.data"))
		more, merr := filepath.Glob(filepath.Join(r.Dir, "c0", "*", "*", "*.data"))
		if n := len(files) + len(more); n > 0 || err != nil || merr != nil {
			return fmt.Errorf("%v %v", append(files, more...), errors.Join(err, merr))
		}
		return nil
	})
	if err := read(gone); !errors.Is(err, syscall.EIO) {
		t.Fatalf("%s, after its server came back: %v", gone, err)
	}
	// Written anew, the file is a file like others.
	if err := os.WriteFile(filepath.Join(at, gone), data, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := read(gone); err != nil {
		t.Fatal(err)
	}
}
