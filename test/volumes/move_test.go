package volumes

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// shown is the output of `volume show` about a volume's data.
type shown struct {
	Used      uint64 `json:"used_bytes"`
	Topology  string `json:"topology"`
	Snapshots struct {
		Count int    `json:"count"`
		Held  uint64 `json:"held_bytes"`
	} `json:"snapshots"`
	Data struct {
		Placed  bool   `json:"placed"`
		ToMove  uint64 `json:"to_move"`
		Servers []struct {
			ID       uint64 `json:"id"`
			Topology string `json:"topology"`
			Chunks   uint64 `json:"chunks"`
		} `json:"servers"`
	} `json:"data"`
}

func (r *rig) show(name string) (s shown) {
	r.T.Helper()
	if err := json.Unmarshal(r.Must("volume", "show", name, "--output", "json"), &s); err != nil {
		r.T.Fatal(err)
	}
	return s
}

// located is the place of a file's bytes by `penstock locate`, as the attribute
// penstock.locations has the place.
func (r *rig) located(file string) (text string, servers []uint64) {
	r.T.Helper()
	var v struct {
		Extents []struct {
			Offset, Length uint64
			Chunk          string
			ChunkOffset    uint64 `json:"chunk_offset"`
			Servers        []uint64
		}
	}
	if err := json.Unmarshal(r.Must("locate", file, "--output", "json"), &v); err != nil {
		r.T.Fatal(err)
	}
	for _, e := range v.Extents {
		on := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(e.Servers)), ","), "[]")
		text += fmt.Sprintf("%d %d %s %d %s\n", e.Offset, e.Length, e.Chunk, e.ChunkOffset, on)
		for _, s := range e.Servers {
			if !slices.Contains(servers, s) {
				servers = append(servers, s)
			}
		}
	}
	return text, servers
}

func attribute(t *testing.T, file string) string {
	t.Helper()
	b := make([]byte, 64<<10)
	n, err := unix.Getxattr(file, "penstock.locations", b)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return string(b[:n])
}

// A volume's policy moves its data to another rack: `volume set --wait` returns when the data has
// arrived, and a reader and a writer go on meanwhile. The command and the attribute report the
// same places.
func TestPolicyMovesData(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.Run("chunkserver", "--data", filepath.Join(r.Dir, "c2"), "--cluster", r.Addr, "--topology", "/dc/r2/n")
	r.Until("both chunk servers are there", func() error {
		out, err := r.Ctl("node", "list")
		if err == nil && !(bytes.Contains(out, []byte("/dc/r2/n")) && bytes.Contains(out, []byte("/dc/r/n"))) {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
	r.Must("volume", "create", "v", "--attach", "/v", "--topology", "/dc/r")
	root := r.mount("/", "root")
	const files, size = 6, 2 << 20
	name := func(i int) string { return filepath.Join(root, "v", fmt.Sprint("f", i)) }
	content := func(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, size) }
	put := func(file string, b []byte) error {
		f, err := os.Create(file)
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := f.Write(b); err != nil {
			return err
		}
		return f.Sync()
	}
	for i := range files {
		if err := put(name(i), content(i)); err != nil {
			t.Fatal(err)
		}
	}
	r.Must("snapshot", "create", "v", "s")
	if err := os.Remove(name(files - 1)); err != nil {
		t.Fatal(err)
	}
	text, before := r.located(name(0))
	if got := attribute(t, name(0)); got != text || len(before) != 1 {
		t.Errorf("the attribute says %q, the command %q", got, text)
	}
	r.write(filepath.Join(root, "v", "small"), "small")
	r.Until("the small file is committed", func() error {
		if got := attribute(t, filepath.Join(root, "v", "small")); got != "inline\n" {
			return fmt.Errorf("it is at %q", got)
		}
		return nil
	})
	if _, err := unix.Getxattr(filepath.Join(root, "v"), "penstock.locations", nil); err != unix.ENODATA {
		t.Errorf("the locations of a directory: %v", err)
	}
	r.Until("what the snapshot holds is counted", func() error {
		if s := r.show("v"); s.Snapshots.Count != 1 || s.Snapshots.Held != size || s.Used != (files-1)*size+5 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})

	stop, done := make(chan struct{}), make(chan error, 2)
	go func() { // the reader
		for i := 0; ; i = (i + 1) % (files - 1) {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if b, err := os.ReadFile(name(i)); err != nil || !bytes.Equal(b, content(i)) {
				done <- fmt.Errorf("DATA: reading f%d: %d bytes, %w", i, len(b), err)
				return
			}
		}
	}()
	go func() { // the writer
		for i := 0; ; i++ {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if err := put(filepath.Join(root, "v", "written"), content(i%200)); err != nil {
				done <- err
				return
			}
		}
	}()
	r.Must("volume", "set", "v", "--topology", "/dc/r2", "--wait")
	r.Until("the files lie in the other rack", func() error {
		for i := range files - 1 {
			if text, now := r.located(name(i)); len(now) != 1 || now[0] == before[0] {
				return fmt.Errorf("f%d: %s", i, text)
			}
		}
		return nil
	})
	close(stop)
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	r.Until("show says so", func() error {
		s := r.show("v")
		if s.Topology != "/dc/r2" || !s.Data.Placed || s.Data.ToMove != 0 || len(s.Data.Servers) == 0 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	for i := range files - 1 {
		r.Until("the attribute agrees", func() error {
			if text, _ := r.located(name(i)); attribute(t, name(i)) != text {
				return fmt.Errorf("%q, not %q", attribute(t, name(i)), text)
			}
			return nil
		})
	}
	if out := r.Must("fsck"); !bytes.Contains(out, []byte("clean")) {
		t.Errorf("DATA: fsck: %s", out)
	}
}
