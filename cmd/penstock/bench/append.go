package bench

import (
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const appends = 2_000

// appendGroup appends records to a log, and syncs each record before the next.
func appendGroup() group {
	log := func(s *side) (cpath, int) { return newPath(filepath.Join(s.dir, "log")), s.cfg.scaled(appends) }
	return group{name: "append", rows: []row{
		{name: "append-fsync", title: "appends of 4 KiB, each with fsync", unit: PerSecond, run: func(s *side) (float64, error) {
			p, n := log(s)
			fd, err := rawOpen(p, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_APPEND, 0o644)
			if err != nil {
				return 0, err
			}
			b := newBuffer(blockSize)
			for i := range n {
				stamp(b, mix(s.seed, 0), int64(i)*blockSize)
				if err := writeFull(fd, b); err != nil {
					return 0, err
				}
				if err := rawFsync(fd); err != nil {
					return 0, err
				}
			}
			return float64(n), rawClose(fd)
		}, after: func(s *side) error {
			p, n := log(s)
			return s.checkLog(p, n)
		}},
	}}
}

// checkLog reads the log and checks each record.
func (s *side) checkLog(p cpath, records int) error {
	fd, err := rawOpen(p, unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer rawClose(fd)
	b := make([]byte, (records+1)*blockSize)
	n, err := readFull(fd, b)
	if err != nil {
		return err
	}
	if n != records*blockSize {
		return fmt.Errorf("the log has %d bytes, %d were appended: %w", n, records*blockSize, errMismatch)
	}
	return check(b[:n], mix(s.seed, 0), 0)
}
