package local

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"penstock.io/penstock/meta"
)

// A metadata server keeps copies of volumes' states, made from the journals that the server
// followed. 'penstock cluster restore' begins the journals anew at checkpoints, and the older
// copies are ahead of the new journals. The cluster's format record has the time of the last
// restore; the file COPIES has the time of the restore that the copies belong to. Copies from
// before the last restore are moved aside, not deleted: an operator may want changes that only
// the copies have.

// copiesFile holds the time of the restore that the copies in a folder belong to. Without the
// file, the copies belong to a cluster that was never restored.
const copiesFile = "COPIES"

// copiesOf is the content of copiesFile.
type copiesOf struct {
	Version  int       `json:"v"` // 1
	Restored meta.Time `json:"restored"`
}

const copiesVersion = 1

// ageCopies moves the copies in a folder aside if the cluster was restored after the copies
// were made. Errors: Invalid (the copies belong to a later restore than etcd's records),
// Version, Corrupt, IO.
func ageCopies(dir string, restored meta.Time, log *slog.Logger) error {
	const op = "look at the copies of volumes"
	var of copiesOf
	path := filepath.Join(dir, copiesFile)
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return meta.E(op, meta.IO, path, err)
	case json.Unmarshal(b, &of) != nil || of.Version < 1:
		return meta.E(op, meta.Corrupt, path, nil)
	case of.Version > copiesVersion:
		return meta.E(op, meta.Version, path, fmt.Errorf("it has format %d, this program knows up to %d: use a newer program", of.Version, copiesVersion))
	}
	switch {
	case of.Restored == restored:
		return nil
	case of.Restored > restored:
		return meta.E(op, meta.Invalid, dir, fmt.Errorf("the copies here are of the cluster as it was restored at %s, and etcd holds it as it was before: an older etcd took the place of the restored one; give that back", stamp(of.Restored)))
	}
	if err := setAside(dir, restored, log); err != nil {
		return meta.E(op, meta.IO, dir, err)
	}
	if b, err = json.Marshal(copiesOf{copiesVersion, restored}); err != nil {
		panic("local: what is said of copies is plain data: " + err.Error())
	}
	if err := replaceFile(path, append(b, '\n')); err != nil {
		return meta.E(op, meta.IO, path, err)
	}
	return nil
}

// setAside moves all copies, and the digests computed from the copies, to the subfolder
// "before-TIME". After a crash in setAside, the next start moves the rest.
func setAside(dir string, restored meta.Time, log *slog.Logger) error {
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return os.MkdirAll(dir, 0o700)
	}
	if err != nil {
		return err
	}
	aside := filepath.Join(dir, "before-"+stamp(restored))
	n := 0
	for _, name := range names {
		if !strings.HasPrefix(name.Name(), "volume-") && name.Name() != "digests" {
			continue
		}
		if err := os.MkdirAll(aside, 0o700); err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(dir, name.Name()), filepath.Join(aside, name.Name())); err != nil {
			return err
		}
		if name.Name() != "digests" {
			n++
		}
	}
	if n > 0 {
		log.Warn("the cluster was restored since the copies of volumes here were made: they are set aside, and made anew from the checkpoints. They may have changes that the restored volumes lack; when nobody misses any, remove them", "copies", n, "restored", stamp(restored), "in", aside)
	}
	return nil
}

// stamp renders the time of a restore, for file names and people.
func stamp(t meta.Time) string { return time.Unix(0, int64(t)).UTC().Format("20060102T150405.000Z") }

// replaceFile replaces a file: write path.new, sync, rename, sync the folder.
func replaceFile(path string, b []byte) error {
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
