package state

import (
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"strings"

	"penstock.io/penstock/meta"
)

// Version is the newest directory format of this program.
const Version = 1

const (
	formatFile = "FORMAT"
	storeDir   = "store"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// writeFormat makes dir a state directory of a volume, durably: write, fsync,
// rename, fsync the folder.
func writeFormat(dir string, v meta.VolumeID) error {
	const op = "write state format"
	line := fmt.Sprintf("penstock-state %d volume %08x id %s", Version, uint32(v), rand.Text())
	line += fmt.Sprintf(" crc %08x\n", crc32.Checksum([]byte(line), castagnoli))
	tmp := filepath.Join(dir, formatFile+".tmp")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return ioError(op, dir, err)
	}
	_, err = f.WriteString(line)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(tmp, filepath.Join(dir, formatFile))
	}
	if err == nil {
		err = syncDir(dir)
	}
	return ioError(op, dir, err)
}

// checkFormat reads FORMAT and nothing else, and writes nothing.
// Errors: NotFound (no such directory, or empty), Corrupt, Version, IO.
func checkFormat(dir string, v meta.VolumeID) error {
	const op = "open state"
	names, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(names) == 0 {
		return meta.E(op, meta.NotFound, dir, err)
	}
	if err != nil {
		return ioError(op, dir, err)
	}
	b, err := os.ReadFile(filepath.Join(dir, formatFile))
	if errors.Is(err, os.ErrNotExist) {
		return meta.E(op, meta.Corrupt, dir, errors.New("it has no FORMAT file"))
	}
	if err != nil {
		return ioError(op, dir, err)
	}
	got, volume, err := parseFormat(string(b))
	switch {
	case err != nil:
		return meta.E(op, meta.KindOf(err), dir, err)
	case got > Version:
		return meta.E(op, meta.Version, dir, fmt.Errorf("written by a newer program: format %d, this one knows up to %d", got, Version))
	case volume != v:
		return meta.E(op, meta.Corrupt, dir, fmt.Errorf("it belongs to volume %d, not %d", volume, v))
	}
	return nil
}

// parseFormat parses the line. It checks the version first: a newer version may have changed
// the rest.
func parseFormat(line string) (version int, v meta.VolumeID, err error) {
	bad := meta.E("read state format", meta.Corrupt, formatFile, nil)
	var n uint32
	if c, err := fmt.Sscanf(line, "penstock-state %d ", &version); err != nil || c != 1 || version < 1 {
		return 0, 0, bad
	}
	if version > Version {
		return version, 0, nil
	}
	body, sum, ok := strings.Cut(line, " crc ")
	if !ok || sum != fmt.Sprintf("%08x\n", crc32.Checksum([]byte(body), castagnoli)) {
		return 0, 0, bad
	}
	var id string
	if c, err := fmt.Sscanf(body, "penstock-state %d volume %x id %s", &version, &n, &id); err != nil || c != 3 {
		return 0, 0, bad
	}
	return version, meta.VolumeID(n), nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
