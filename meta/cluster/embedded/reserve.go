package embedded

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// etcd ends the process when the database can't grow. So Penstock reserves blocks beyond the
// end of the database file, without changing the file's size. On a full disk the reserved
// blocks take the journal's entries until the owners of volumes notice the full disk. The log
// (wal) reserves the next segment by etcd's own means.
const (
	reserveAhead = 64 << 20 // bytes beyond the file's end
	reserveAgain = 32 << 20 // with fewer reserved bytes, reserve again
	reserveEvery = 250 * time.Millisecond
)

// reserver keeps blocks reserved behind the end of etcd's database.
type reserver struct {
	path string
	log  *slog.Logger
	ino  uint64 // defragmenting makes another file
	end  int64  // end of the bytes with blocks
	told bool   // the last try failed, which was logged
}

func (r *reserver) run(ctx context.Context) {
	t := time.NewTicker(reserveEvery)
	defer t.Stop()
	for r.reserve() {
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// reserve returns false if the file system can't reserve blocks.
func (r *reserver) reserve() bool {
	var st unix.Stat_t
	if err := unix.Stat(r.path, &st); err != nil {
		return true // between two files
	}
	if st.Ino == r.ino && st.Size+reserveAgain <= r.end {
		return true
	}
	f, err := os.OpenFile(r.path, os.O_RDWR, 0)
	if err != nil {
		return true
	}
	defer f.Close()
	end := st.Size + reserveAhead
	err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, end)
	switch {
	case err == nil:
		r.ino, r.end, r.told = st.Ino, end, false
	case errors.Is(err, unix.EOPNOTSUPP):
		r.log.Warn("the file system can't reserve space: when the disk is full, etcd stops the process", "file", r.path)
		return false
	case !r.told:
		r.told = true
		r.log.Error("no space could be reserved for etcd's database", "file", r.path, "error", err)
	}
	return true
}

func (s *Server) reserveSpace(dir string, log *slog.Logger) {
	r := &reserver{path: filepath.Join(dir, "member", "snap", "db"), log: log}
	if !r.reserve() {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.stop = cancel
	s.wg.Go(func() { r.run(ctx) })
}
