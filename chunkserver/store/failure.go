package store

import (
	"errors"
	"fmt"
	"syscall"

	"penstock.io/penstock/meta"
)

// fail marks the disk as failed for good. After an I/O error of a write or a sync, data in the
// kernel's memory can't be trusted to reach the disk: a later sync may report success although
// data is lost.
func (s *Store) fail(err error) error {
	e := meta.E("chunk store", meta.IO, "", err)
	if s.failed.CompareAndSwap(nil, e) {
		s.slog.Error("a disk failed, and takes no more writes: see 'penstock disk list'", "disk", fmt.Sprintf("%x", s.f.disk), "err", err)
	}
	return s.failed.Load()
}

// Err is the disk's sticky error, nil while healthy.
func (s *Store) Err() error {
	if e := s.failed.Load(); e != nil {
		return e
	}
	return nil
}

// writable returns nil if data may be written.
func (s *Store) writable() error {
	if s.closed.Load() {
		return meta.E("chunk store", meta.Unavailable, "", errors.New("closed"))
	}
	return s.Err()
}

// ioError wraps an error of the disk: NoSpace for a full disk, else IO; nil for nil.
func ioError(op, subject string, err error) error {
	if err == nil {
		return nil
	}
	var e *meta.Error
	if errors.As(err, &e) {
		return err
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return meta.E(op, meta.NoSpace, subject, err)
	}
	return meta.E(op, meta.IO, subject, err)
}

// diskError is ioError for a write: a full disk fails only the write; any other error marks the
// disk as failed.
func (s *Store) diskError(op string, id meta.ChunkID, err error) error {
	if err = ioError(op, id.String(), err); meta.KindOf(err) == meta.IO {
		return s.fail(err)
	}
	return err
}

func errShut(id meta.ChunkID) error {
	return meta.E("chunk store", meta.Unavailable, id.String(), errors.New("closed"))
}

func errDamaged(id meta.ChunkID) error {
	return meta.E("stat", meta.Corrupt, id.String(), errors.New("bad bytes were found below its synced length"))
}
