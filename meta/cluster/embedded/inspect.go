package embedded

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"

	bolt "go.etcd.io/bbolt"

	"penstock.io/penstock/meta"
)

// etcd does not detect some damage to its files, and detects other damage in a goroutine of its
// own, where a panic ends the process without a message of Penstock. So the files are inspected
// before etcd opens them:
//
//	member/snap/db      a bbolt file: every page in use is read once
//	member/wal/*.wal    the journal. If the journal is missing beside a non-empty database, etcd starts
//	                    a new journal at its first entry, and skips all entries up to the number that
//	                    the database has reached: writes vanish
//
// etcd also reads the whole database when opening the file, so the inspection only reads the
// file into memory earlier.

// damaged makes the error for an unusable file.
func damaged(path string, cause error) error {
	return meta.E("open etcd's file", meta.Corrupt, path, cause)
}

// inspect returns why etcd must not open the files of its folder, or nil. While another process
// holds the lock of the database, inspect waits.
func inspect(dir string) error {
	member := filepath.Join(dir, "member")
	for _, d := range []string{member, filepath.Join(member, "snap"), filepath.Join(member, "wal")} {
		if i, err := os.Lstat(d); err == nil && !i.IsDir() {
			return damaged(d, errors.New("it is no folder"))
		} else if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return meta.E("open etcd's file", fileKind(err), d, err)
		}
	}
	db := filepath.Join(member, "snap", "db")
	i, err := os.Lstat(db)
	switch {
	case errors.Is(err, fs.ErrNotExist) || err == nil && i.Size() == 0:
		return nil // etcd makes the database again from the journal, or refuses
	case err == nil && !i.Mode().IsRegular():
		return damaged(db, errors.New("it is no regular file"))
	case err == nil:
		var f *os.File
		if f, err = os.OpenFile(db, os.O_RDWR, 0); err == nil {
			err = f.Close()
		}
	}
	if err != nil {
		return meta.E("open etcd's file", fileKind(err), db, err)
	}
	used, err := readDatabase(db)
	if err != nil {
		return damaged(db, err)
	}
	wal := filepath.Join(member, "wal")
	all, err := filepath.Glob(filepath.Join(wal, "*.wal"))
	if err != nil {
		return meta.E("open etcd's file", meta.IO, wal, err)
	}
	if used && len(all) == 0 {
		return damaged(wal, errors.New("the journal is missing, and the database beside it holds a cluster"))
	}
	return nil
}

// readDatabase reads a whole database. used: the database differs from the database of a first
// start.
func readDatabase(path string) (used bool, err error) {
	var file *os.File
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true)) // an unreadable page causes a fault
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("a page of it can't be read or is damaged: %v", r)
			file.Close() // and the lock on the file
		}
	}()
	db, err := bolt.Open(path, 0, &bolt.Options{ReadOnly: true, PreLoadFreelist: true, OpenFile: func(name string, flag int, mode os.FileMode) (_ *os.File, err error) {
		file, err = os.OpenFile(name, flag, mode)
		return file, err
	}})
	if err != nil {
		return false, err
	}
	err = db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			return b.ForEach(func(k, v []byte) error {
				if string(name) == "key" || string(name) == "meta" && string(k) == "consistent_index" && len(v) == 8 && binary.BigEndian.Uint64(v) > 0 {
					used = true
				}
				sum := byte(0)
				for at := 0; at < len(v); at += 4096 {
					sum ^= v[at]
				}
				runtime.KeepAlive(sum)
				return nil
			})
		})
	})
	return used, errors.Join(err, db.Close())
}
