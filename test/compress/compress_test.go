// Package compress tests that compression changes nothing for users of a volume: with
// real processes and mounts, random changes compared with plain files, and chunk servers
// killed while the servers compress.
package compress

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

var (
	steps = flag.Int("steps", 400, "random changes in a round of TestModel")
	seed  = flag.Uint64("seed", 0, "of TestModel; 0: by the clock")
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// rig is a metadata server and a chunk server.
type rig struct {
	*program.Rig
	chunk *spawn.Process
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t)}
	r.Run("meta", "--dir", filepath.Join(r.Dir, "m"))
	r.Until("the metadata server listens", func() error { _, err := os.Stat(filepath.Join(r.Dir, "m", "meta.sock")); return err })
	r.startChunk()
	return r
}

func (r *rig) disk() string { return filepath.Join(r.Dir, "c") }
func (r *rig) startChunk() {
	r.chunk = r.Run("chunkserver", "--data", r.disk(), "--cluster", r.Addr, "--topology", "/dc/r/n")
}

// second starts another chunk server, with the topology of another machine.
func (r *rig) second() *spawn.Process {
	return r.Run("chunkserver", "--data", filepath.Join(r.Dir, "c2"), "--cluster", r.Addr, "--topology", "/dc/r/n2")
}

func (r *rig) volume(args ...string) {
	r.T.Helper()
	r.Until(args[0], func() error { _, err := r.Ctl(append([]string{"volume"}, args...)...); return err })
}

// mount mounts a path of the tree. unmount ends the mount in order, which seals the
// chunks that the mount wrote.
func (r *rig) mount(path, name string) (at string, unmount func()) {
	r.T.Helper()
	at = filepath.Join(r.Dir, name)
	if err := os.MkdirAll(at, 0o755); err != nil {
		r.T.Fatal(err)
	}
	p := r.Run("mount", "--cluster", r.Addr, path, at)
	r.T.Cleanup(func() { p.Kill(); spawn.Unmount(at) })
	r.Until("mounted", func() error {
		if !spawn.Mounted(at) {
			return errors.New("not yet")
		}
		return nil
	})
	return at, func() {
		r.T.Helper()
		spawn.Unmount(at)
		r.Until("unmounted", func() error {
			if spawn.Mounted(at) {
				return errors.New("not yet")
			}
			return nil
		})
	}
}

type shown struct {
	Compression string `json:"compression"`
	Data        struct {
		Open   uint64 `json:"open"`
		Stored struct {
			Replicas   uint64  `json:"replicas"`
			Compressed uint64  `json:"compressed"`
			Dense      uint64  `json:"dense"`
			Plain      uint64  `json:"plain_bytes"`
			Stored     uint64  `json:"stored_bytes"`
			Ratio      float64 `json:"ratio"`
		} `json:"stored"`
	} `json:"data"`
}

func (r *rig) show(name string) (s shown, err error) {
	out, err := r.Ctl("volume", "show", name, "--output", "json")
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(out, &s)
}

// compressed waits until all chunks but so many are sealed, and compressed or
// found not to shrink.
func (r *rig) compressed(name string, open uint64) (s shown) {
	r.T.Helper()
	r.Until("compressed", func() (err error) {
		if s, err = r.show(name); err != nil {
			return err
		}
		if d := s.Data; d.Open > open || d.Stored.Compressed+d.Stored.Dense < d.Stored.Replicas || d.Stored.Compressed == 0 {
			time.Sleep(200 * time.Millisecond)
			return fmt.Errorf("%+v", d)
		}
		return nil
	})
	return s
}

// prose returns n bytes that compress well.
func prose(r *rand.Rand, n int) []byte {
	words := []string{"flow ", "penstock ", "head ", "weir ", "gate ", "turbine ", "\n"}
	b := make([]byte, 0, n+16)
	for len(b) < n {
		b = append(b, words[r.IntN(len(words))]...)
	}
	return b[:n]
}

// model is a set of files of the volume with the contents that each file must have.
type model struct {
	r     *rand.Rand
	files map[string][]byte
}

const maxFile = 3 << 20

// step changes or reads one random file.
func (m *model) step(dir string) error {
	r := m.r
	name := fmt.Sprint("f", r.IntN(12))
	have := m.files[name]
	path := filepath.Join(dir, name)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	switch op := r.IntN(100); {
	case op < 55: // anywhere, also beyond the end, which leaves a hole
		off := r.IntN(min(len(have)+200_000, maxFile))
		if r.IntN(2) == 0 {
			off = min(len(have), maxFile-1)
		}
		p := prose(r, 1+r.IntN(min(maxFile-off, []int{100, 40_000, 1 << 20}[r.IntN(3)])))
		if r.IntN(4) == 0 {
			for i := range p {
				p[i] = byte(r.Uint32())
			}
		}
		if _, err := f.WriteAt(p, int64(off)); err != nil {
			return err
		}
		if end := off + len(p); end > len(have) {
			have = append(have, make([]byte, end-len(have))...)
		}
		copy(have[off:], p)
	case op < 65:
		n := r.IntN(min(len(have)+100_000, maxFile))
		if err := f.Truncate(int64(n)); err != nil {
			return err
		}
		if n > len(have) {
			have = append(have, make([]byte, n-len(have))...)
		}
		have = have[:n:n]
	case op < 70:
		if err := f.Sync(); err != nil {
			return err
		}
	case op < 73:
		if err := os.Remove(path); err != nil {
			return err
		}
		delete(m.files, name)
		return nil
	default:
		if len(have) == 0 {
			break
		}
		off := r.IntN(len(have))
		p := make([]byte, 1+r.IntN(min(len(have)-off, 300_000)))
		if _, err := f.ReadAt(p, int64(off)); err != nil {
			return err
		}
		if !bytes.Equal(p, have[off:off+len(p)]) {
			return fmt.Errorf("DATA: %s: %d bytes at %d are others", name, len(p), off)
		}
	}
	m.files[name] = have
	return f.Close()
}

// check compares all files.
func (m *model) check(dir string) error {
	names, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(names) != len(m.files) {
		return fmt.Errorf("%d files, not %d", len(names), len(m.files))
	}
	for name, want := range m.files {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		if !bytes.Equal(got, want) {
			return fmt.Errorf("DATA: %s: %d bytes are not the %d that were written", name, len(got), len(want))
		}
	}
	return nil
}

// TestModel makes random changes in a compressed volume and compares the volume with a
// model. Between rounds, the mount ends and the chunks are compressed, so later rounds
// change, cut and overwrite compressed data. In the second round, the chunk server is
// killed while compressing. A snapshot of the first round keeps its contents and its
// digest, and fsck finds no problem.
func TestModel(t *testing.T) {
	s := *seed
	if s == 0 {
		s = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", s)
	r := newRig(t)
	r.volume("create", "z", "--attach", "/z", "--compression", "zstd")
	m := &model{r: rand.New(rand.NewPCG(s, 3)), files: map[string][]byte{}}
	var first model
	for round := range 3 {
		if round == 2 {
			r.Must("volume", "set", "z", "--compression", "s2") // for new chunks
		}
		at, unmount := r.mount("/z", fmt.Sprint("a", round))
		if err := m.check(at); err != nil {
			t.Fatalf("round %d: before: %v", round, err)
		}
		for range *steps {
			if err := m.step(at); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		if round == 0 {
			first.files = map[string][]byte{}
			for n, b := range m.files {
				first.files[n] = bytes.Clone(b)
			}
			r.Must("snapshot", "create", "z", "one")
		}
		unmount()
		if round == 1 {
			for range 3 {
				time.Sleep(time.Duration(m.r.IntN(200)) * time.Millisecond)
				r.chunk.Kill()
				r.startChunk()
			}
		}
		got := r.compressed("z", 0)
		t.Logf("round %d: %+v", round, got.Data)
	}
	at, unmount := r.mount("/z", "b")
	if err := m.check(at); err != nil {
		t.Fatal(err)
	}
	if err := first.check(filepath.Join(at, ".snapshot", "one")); err != nil {
		t.Fatalf("the snapshot: %v", err)
	}
	unmount()
	r.Until("fsck", func() error { _, err := r.Ctl("fsck"); return err })
	r.Until("digest", func() error { _, err := r.Ctl("verify", "z@one"); return err })
	if err := r.chunk.Stop(time.Minute); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(program.Path, "disk", "check", filepath.Join(r.disk(), "chunks"), "--output", "json").Output()
	var rep struct {
		Compressed uint64   `json:"compressed"`
		Problems   []string `json:"problems"`
	}
	if jerr := json.Unmarshal(out, &rep); err != nil || jerr != nil || rep.Compressed == 0 || len(rep.Problems) > 0 {
		t.Fatalf("%v, %v: %s", err, jerr, out)
	}
	// Compressed bytes rot: reads that verify must fail, not return other bytes.
	packs, err := filepath.Glob(filepath.Join(r.disk(), "chunks", "chunks", "*", "*.pack"))
	if err != nil || len(packs) == 0 {
		t.Fatal(packs, err)
	}
	for _, name := range packs {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for k := range 8 { // a decoder may not care for some bits
			b[len(b)*(k+1)/9] ^= 1 << k
		}
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.startChunk()
	r.Until("verify finds what rotted", func() error {
		out, err := r.Ctl("verify", "z@one")
		if err == nil {
			t.Fatalf("rotten chunks pass for whole: %s", out)
		}
		if !strings.Contains(err.Error(), "checksum") {
			return err
		}
		return nil
	})
}

// TestCompressedUnderReaders compresses a file of a seal-on-close volume while a program
// reads the file directly from the disk. The program goes on reading, and so does a
// program that opens the file later. A second replica is copied from the compressed
// replica, is compressed, too, and serves alone when the first replica is gone.
func TestCompressedUnderReaders(t *testing.T) {
	r := newRig(t)
	r.volume("create", "z", "--attach", "/z", "--seal-on-close")
	at, _ := r.mount("/z", "a")
	want := prose(rand.New(rand.NewPCG(8, 8)), 6<<20)
	if err := os.WriteFile(filepath.Join(at, "f"), want, 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(at, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	look := func(what string, f *os.File) {
		t.Helper()
		got := make([]byte, len(want))
		if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("DATA: %s: %v, equal %v", what, err, bytes.Equal(got, want))
		}
	}
	look("plain", f)
	r.Must("volume", "set", "z", "--compression", "s2") // for existing chunks, too
	if s := r.compressed("z", 1); s.Compression != "s2" || s.Data.Stored.Ratio < 2 {
		t.Fatalf("%+v", s)
	}
	look("open since before", f)
	again := func(what, name string) {
		t.Helper()
		at, unmount := r.mount("/z", name)
		g, err := os.Open(filepath.Join(at, "f"))
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		look(what, g)
		g.Close()
		unmount()
	}
	again("opened later", "b")
	r.second()
	r.Must("volume", "set", "z", "--replicas", "2", "--force")
	r.Until("two compressed replicas", func() error {
		s, err := r.show("z")
		if err == nil && s.Data.Stored.Compressed != 2 {
			err = fmt.Errorf("%+v", s.Data)
		}
		return err
	})
	r.chunk.Kill()
	again("from the second", "d")
}
