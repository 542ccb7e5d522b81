package main

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// A data set is SHARDS archives, each of samplesPerShard samples in the form of
// webdataset (N.bin and N.cls, one after the other), and the same number of directories
// of a hundred small files.
const samplesPerShard = 64

func sample(n int) []byte { return bytes.Repeat(small(n), 8) }
func label(n int) []byte  { return []byte(strconv.Itoa(n % 1000)) }

func shardName(dir string, n int) string { return filepath.Join(dir, fmt.Sprintf("shard-%04d.tar", n)) }

func writeData(dir string, shards int) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for n := range shards {
		if err := writeShard(shardName(dir, n), n*samplesPerShard); err != nil {
			return err
		}
	}
	return writeFiles(filepath.Join(dir, "files"), shards*100)
}

func writeShard(name string, first int) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	for n := first; n < first+samplesPerShard; n++ {
		for _, part := range []struct {
			kind string
			b    []byte
		}{{"bin", sample(n)}, {"cls", label(n)}} {
			if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("%08d.%s", n, part.kind), Mode: 0o644, Size: int64(len(part.b))}); err != nil {
				return err
			}
			if _, err := w.Write(part.b); err != nil {
				return err
			}
		}
	}
	return errors.Join(w.Close(), f.Sync())
}

// progress is a worker's checkpoint: the samples that the worker has read and verified,
// in all its lives.
type progress struct {
	Step    int   // steps done, of all epochs
	Lives   int   // starts of the worker
	Samples int   // and small files
	Bytes   int64 // bytes of the samples
	Reading time.Duration
	Total   time.Duration
}

// goOn is the name of the file that lets workers begin their second epoch.
const goOn = "go"

// train reads a worker's share of a data set several times. Each step reads an archive
// and a directory of small files, then writes a checkpoint beside the last checkpoint and
// renames it over the last one. A killed worker goes on from its checkpoint. The second
// epoch begins when the file goOn exists beside the checkpoints; until then train repeats
// the step without counting it.
func train(data, checkpoints string, shards, worker, workers, epochs int, think time.Duration) error {
	var p progress
	state := filepath.Join(checkpoints, strconv.Itoa(worker))
	if err := p.load(state); err != nil {
		return err
	}
	p.Lives++
	var mine []int
	for n := worker; n < shards; n += workers {
		mine = append(mine, n)
	}
	step := func(p *progress) error {
		n := mine[p.Step%len(mine)]
		if err := p.readShard(shardName(data, n), n*samplesPerShard); err != nil {
			return err
		}
		if err := p.readFiles(filepath.Join(data, "files"), n*100); err != nil {
			return err
		}
		time.Sleep(think)
		return nil
	}
	for ; p.Step < epochs*len(mine); p.Step++ {
		for p.Step == len(mine) {
			_, err := os.Stat(filepath.Join(checkpoints, goOn))
			if err == nil {
				break
			}
			if !errors.Is(err, os.ErrNotExist) {
				return err
			}
			again := p
			if err := step(&again); err != nil {
				return err
			}
		}
		begin := time.Now()
		if err := step(&p); err != nil {
			return err
		}
		p.Total += time.Since(begin)
		done := p
		done.Step++
		if err := done.save(state); err != nil {
			return err
		}
	}
	return json.NewEncoder(os.Stdout).Encode(p)
}

// timed is a reader that adds up the time of its reads.
type timed struct {
	io.Reader
	spent *time.Duration
}

func (t timed) Read(b []byte) (int, error) {
	begin := time.Now()
	n, err := t.Reader.Read(b)
	*t.spent += time.Since(begin)
	return n, err
}

func (p *progress) readShard(name string, first int) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	r := tar.NewReader(timed{f, &p.Reading})
	for n := first; n < first+samplesPerShard; n++ {
		for _, part := range []struct {
			kind string
			b    []byte
		}{{"bin", sample(n)}, {"cls", label(n)}} {
			h, err := r.Next()
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			b, err := io.ReadAll(r)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if h.Name != fmt.Sprintf("%08d.%s", n, part.kind) || !bytes.Equal(b, part.b) {
				return fmt.Errorf("%s: %s is not sample %d", name, h.Name, n)
			}
			p.Bytes += int64(len(b))
		}
		p.Samples++
	}
	if _, err := r.Next(); err != io.EOF {
		return fmt.Errorf("%s: more than its samples: %v", name, err)
	}
	return nil
}

func (p *progress) readFiles(dir string, first int) error {
	for n := first; n < first+100; n++ {
		begin := time.Now()
		b, err := os.ReadFile(filepath.Join(dir, nameOf(n)))
		p.Reading += time.Since(begin)
		if err != nil {
			return err
		}
		if !bytes.Equal(b, small(n)) {
			return fmt.Errorf("%s has other bytes", nameOf(n))
		}
		p.Samples++
		p.Bytes += int64(len(b))
	}
	return nil
}

// weights gives a checkpoint a realistic size.
const weights = 4 << 20

// A checkpoint is a line of JSON, and bytes that are a function of the step.
func (p *progress) save(to string) error {
	line, err := json.Marshal(p)
	if err != nil {
		return err
	}
	f, err := os.Create(to + ".new")
	if err != nil {
		return err
	}
	_, err = f.Write(append(append(line, '\n'), bytes.Repeat([]byte{byte(p.Step)}, weights)...))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(to+".new", to)
}

func (p *progress) load(from string) error {
	b, err := os.ReadFile(from)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	line, rest, _ := bytes.Cut(b, []byte{'\n'})
	if err := json.Unmarshal(line, p); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if !bytes.Equal(rest, bytes.Repeat([]byte{byte(p.Step)}, weights)) {
		return fmt.Errorf("%s: the checkpoint of step %d has other bytes", from, p.Step)
	}
	return nil
}
