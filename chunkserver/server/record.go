package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// writeJSON replaces a file: write beside, sync, rename, sync the directory.
func writeJSON(path string, v any) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		panic("chunk server: a record is plain data: " + err.Error())
	}
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err == nil {
		_, err = f.Write(append(b, '\n'))
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err == nil {
		var d *os.File
		if d, err = os.Open(filepath.Dir(path)); err == nil {
			err = errors.Join(d.Sync(), d.Close())
		}
	}
	if err != nil {
		return meta.E("write "+filepath.Base(path), meta.IO, path, err)
	}
	return nil
}

// diskRecord is a disk in disks.json.
type diskRecord struct {
	Path    string `json:"path"`
	ID      string `json:"id"`
	Retired bool   `json:"retired,omitempty"` // the operator gave it up
	Replace bool   `json:"replace,omitempty"` // an empty directory may take its place
}

type disksRecord struct {
	Version int          `json:"version"`
	Disks   []diskRecord `json:"disks"`
}

// owner is the content of a disk's file "server".
type owner struct {
	Version int           `json:"version"`
	Server  meta.ServerID `json:"server"`
	Disk    string        `json:"disk"`
}

func readOwner(path string) (o owner, err error) {
	const op = "open disk"
	name := filepath.Join(path, serverFile)
	b, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return o, nil
	}
	if err != nil {
		return o, meta.E(op, meta.IO, name, err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&o); err != nil || o.Version < 1 || len(o.Disk) != 32 {
		return owner{}, meta.E(op, meta.Corrupt, name, err)
	}
	if o.Version > disksVersion {
		return owner{}, meta.E(op, meta.Version, name, fmt.Errorf("it has version %d, this program knows up to %d", o.Version, disksVersion))
	}
	return o, nil
}

// isFresh reports whether a directory does not exist, or is one in which a store can be made.
func isFresh(path string) (bool, error) {
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return store.Fresh(store.DirDisk(path))
}
