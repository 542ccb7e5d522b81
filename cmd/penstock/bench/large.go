package bench

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

const (
	largeBytes     = 1 << 30
	coldRandReads  = 10_000
	warmRandReads  = 400_000
	warmPasses     = 4 // over the file, for a row long enough to time
	coldReadBlock  = 128 << 10
	warmReadBlock  = 1 << 20
	writeBlock     = 1 << 20
	checkpointSize = 512 << 20
)

// largeGroup writes a large file and reads the file in every way.
func largeGroup() group {
	return group{name: "large", rows: []row{
		{name: "seq-write-fsync", title: "sequential write of 1 GiB in 1 MiB blocks, fsync", unit: MegabytesPerSecond,
			before: func(s *side) error { return os.Remove(filepath.Join(s.dir, "large")) },
			run:    func(s *side) (float64, error) { return s.writeLarge("large", s.largeSize()) }},
		{name: "seq-read-cold", title: "sequential read in 128 KiB blocks, cold", unit: MegabytesPerSecond, cold: true,
			run: func(s *side) (float64, error) { return s.readLarge("large", s.largeSize(), coldReadBlock) }},
		{name: "seq-read-warm", title: "sequential read in 1 MiB blocks, warm", unit: MegabytesPerSecond,
			before: func(s *side) error { _, err := s.readWarm(); return err },
			run:    passes(warmPasses, (*side).readWarm)},
		{name: "rand-read-warm", title: "random reads of 4 KiB, warm", unit: PerSecond,
			before: func(s *side) error { _, err := s.readWarm(); return err },
			run:    func(s *side) (float64, error) { return s.readRandom(warmRandReads) }},
		{name: "mmap-read-warm", title: "read through mmap, warm", unit: MegabytesPerSecond,
			before: func(s *side) error { _, err := s.readWarm(); return err },
			run:    passes(warmPasses, (*side).readMapped)},
		{name: "rand-read-cold", title: "random reads of 4 KiB, cold", unit: PerSecond, cold: true,
			run: func(s *side) (float64, error) { return s.readRandom(coldRandReads) }},
	}, prepare: func(s *side) error {
		_, err := s.writeLarge("large", s.largeSize())
		if err != nil {
			return err
		}
		return syncAll(s.dir)
	}, finish: func(s *side) error { return os.Remove(filepath.Join(s.dir, "large")) }}
}

// passes returns a workload that runs run n times and sums the amounts.
func passes(n int, run func(*side) (float64, error)) func(*side) (float64, error) {
	return func(s *side) (sum float64, err error) {
		for range n {
			amount, err := run(s)
			if err != nil {
				return 0, err
			}
			sum += amount
		}
		return sum, nil
	}
}

// largeSize is the scaled size of the large file: whole MiB.
func (s *side) largeSize() int64 { return int64(s.cfg.scaled(largeBytes>>20)) << 20 }

// writeLarge makes a file of size bytes and syncs the file.
func (s *side) writeLarge(name string, size int64) (float64, error) {
	p := newPath(filepath.Join(s.dir, name))
	fd, err := rawOpen(p, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o644)
	if err != nil {
		return 0, err
	}
	b := newBuffer(writeBlock)
	for off := int64(0); off < size; off += writeBlock {
		stamp(b, mix(s.seed, 0), off)
		if err := writeFull(fd, b); err != nil {
			return 0, err
		}
	}
	if err := rawFsync(fd); err != nil {
		return 0, err
	}
	return float64(size), rawClose(fd)
}

func (s *side) readWarm() (float64, error) {
	return s.readLarge("large", s.largeSize(), warmReadBlock)
}

// readLarge reads a file of writeLarge from end to end and checks each block.
func (s *side) readLarge(name string, size int64, block int) (float64, error) {
	fd, err := rawOpen(newPath(filepath.Join(s.dir, name)), unix.O_RDONLY, 0)
	if err != nil {
		return 0, err
	}
	defer rawClose(fd)
	b := make([]byte, block)
	var off int64
	for {
		n, err := readFull(fd, b)
		if err != nil {
			return 0, err
		}
		if n == 0 {
			break
		}
		if err := check(b[:n], mix(s.seed, 0), off); err != nil {
			return 0, err
		}
		off += int64(n)
	}
	if off != size {
		return 0, fmt.Errorf("%s has %d bytes, %d were written: %w", name, off, size, errMismatch)
	}
	return float64(off), nil
}

func (s *side) readRandom(reads int) (float64, error) {
	fd, err := rawOpen(newPath(filepath.Join(s.dir, "large")), unix.O_RDONLY, 0)
	if err != nil {
		return 0, err
	}
	defer rawClose(fd)
	r := rand.New(rand.NewPCG(s.seed, 1))
	b := make([]byte, blockSize)
	reads = s.cfg.scaled(reads)
	blocks := s.largeSize() / blockSize
	for range reads {
		off := r.Int64N(blocks) * blockSize
		if err := preadFull(fd, b, off); err != nil {
			return 0, err
		}
		if err := check(b, mix(s.seed, 0), off); err != nil {
			return 0, err
		}
	}
	return float64(reads), nil
}

// readMapped copies the whole file out of a shared mapping. If the file system can't fill a
// page, the process gets SIGBUS, and readMapped returns an error.
func (s *side) readMapped() (n float64, err error) {
	f, err := os.Open(filepath.Join(s.dir, "large"))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	m, err := unix.Mmap(int(f.Fd()), 0, int(s.largeSize()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, fmt.Errorf("mmap: %w", err)
	}
	defer unix.Munmap(m)
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("reading the mapping: %v", p)
		}
	}()
	b := make([]byte, warmReadBlock)
	for off := 0; off < len(m); off += len(b) {
		copy(b, m[off:])
		if err := check(b, mix(s.seed, 0), int64(off)); err != nil {
			return 0, err
		}
	}
	return float64(len(m)), nil
}

// checkpointGroup replaces a checkpoint as a training job does.
func checkpointGroup() group {
	size := func(s *side) int64 { return int64(s.cfg.scaled(checkpointSize>>20)) << 20 }
	save := func(s *side) (float64, error) {
		n, err := s.writeLarge("checkpoint.tmp", size(s))
		if err != nil {
			return 0, err
		}
		if err := os.Rename(filepath.Join(s.dir, "checkpoint.tmp"), filepath.Join(s.dir, "checkpoint")); err != nil {
			return 0, err
		}
		d, err := os.Open(s.dir)
		if err != nil {
			return 0, err
		}
		defer d.Close()
		return n, d.Sync()
	}
	return group{name: "checkpoint", rows: []row{
		{name: "checkpoint", title: "checkpoint of 512 MiB: write, fsync, rename over the last, fsync of the directory", unit: MegabytesPerSecond, run: save,
			after: func(s *side) error { _, err := s.readLarge("checkpoint", size(s), warmReadBlock); return err }},
	}, prepare: func(s *side) error { _, err := save(s); return err },
		finish: func(s *side) error { return os.Remove(filepath.Join(s.dir, "checkpoint")) }}
}
