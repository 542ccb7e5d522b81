package node

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// record says how a volume was staged. It is written before the volume is
// mounted and removed after it was unmounted.
type record struct {
	Version int      `json:"version"` // recordVersion
	Volume  string   `json:"volume"`  // its handle
	Staging string   `json:"staging"` // where it is mounted
	Source  string   `json:"source"`
	Options []string `json:"options"`
	// Pods have it, by the path at which each looks for it, as far as they were
	// told. A volume may have been taken from them since.
	Pods map[string]pod `json:"pods,omitempty"`
	Pin  *pinned        `json:"pin,omitempty"` // of a snapshot
	// Boot, of the machine: publishing it, the driver has staged it again in that boot. The
	// orchestrator takes it for staged, mounted or not, and would not stage it again.
	Boot string `json:"boot,omitempty"`
}

// pinned is what the mount of a snapshot holds of it.
type pinned struct {
	Volume   meta.VolumeID `json:"volume"`
	Snapshot string        `json:"snapshot"`
	Holder   string        `json:"holder"`
}

const (
	recordVersion = 1
	recordName    = "record.json"
	lockName      = "lock"
	logName       = "log"
)

// keyOf names a volume's folder.
func keyOf(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

// folder is a staged volume's folder of the state.
type folder string

func (s *Server) folderOf(volume, staging string) folder {
	return folder(filepath.Join(s.State, "volumes", keyOf(volume, staging)))
}

func (f folder) file(name string) string { return filepath.Join(string(f), name) }

// read gives the record. Errors: NotFound, Version, Corrupt.
func (f folder) read() (r record, err error) {
	const op = "read state"
	b, err := os.ReadFile(f.file(recordName))
	if errors.Is(err, os.ErrNotExist) {
		return r, meta.E(op, meta.NotFound, string(f), nil)
	}
	if err != nil {
		return r, meta.E(op, meta.IO, string(f), err)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, meta.E(op, meta.Corrupt, string(f), err)
	}
	if r.Version != recordVersion {
		return r, meta.E(op, meta.Version, string(f), fmt.Errorf("version %d; this program knows %d", r.Version, recordVersion))
	}
	return r, nil
}

// write keeps a record: whole or not at all, also after a power cut.
func (f folder) write(r record) error {
	r.Version = recordVersion
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		panic("node: a record is plain data: " + err.Error())
	}
	if err := os.MkdirAll(string(f), 0o700); err != nil {
		return err
	}
	tmp := f.file(recordName + ".new")
	w, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	if err = errors.Join(err, w.Sync(), w.Close()); err != nil {
		return err
	}
	if err := os.Rename(tmp, f.file(recordName)); err != nil {
		return err
	}
	d, err := os.Open(string(f))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// lockTries bounds how often a folder is found to go while its lock is taken.
const lockTries = 100

// lock takes the lock that a mount's process holds. Busy: it lives.
func (f folder) lock() (l *os.File, err error) {
	for range lockTries {
		if l, err = f.tryLock(); l != nil || err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) {
			return l, err
		}
	}
	return nil, meta.E("lock state", meta.IO, string(f), errors.Join(errors.New("it goes again and again"), err))
}

// tryLock is lock, but for a folder that goes meanwhile: it gives nothing then, or
// NotExist or Exist of a step.
func (f folder) tryLock() (*os.File, error) {
	if err := os.MkdirAll(string(f), 0o700); err != nil {
		return nil, err
	}
	l, err := os.OpenFile(f.file(lockName), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(l.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		l.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, meta.E("lock state", meta.Busy, string(f), errors.New("its process lives"))
		}
		return nil, os.NewSyscallError("flock", err)
	}
	// Who had the lock before may have removed the file since it was opened here: then
	// this is a lock of nothing, and the next caller would get one, too.
	mine, err := l.Stat()
	if err == nil {
		var there os.FileInfo
		if there, err = os.Lstat(f.file(lockName)); err == nil && os.SameFile(mine, there) {
			return l, nil
		}
	}
	l.Close()
	return nil, err
}

// remove takes the folder away, whose lock is held: its files by their names,
// and nothing else that might lie there.
func (f folder) remove() error {
	for _, name := range []string{f.socket(), f.file(recordName), f.file(recordName + ".new"), f.file(logName), f.file(lockName)} {
		if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Remove(string(f)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// Recover looks at what was staged when the driver ran last: what is still mounted
// stays as it is, and what can't be told of, and what is to be mounted again; the state of
// what else is not mounted is removed. It gives the volumes that are staged. It is called once, before the service
// serves.
func (s *Server) Recover() (staged []string, err error) {
	dirs, err := os.ReadDir(filepath.Join(s.State, "volumes"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, d := range dirs {
		f := folder(filepath.Join(s.State, "volumes", d.Name()))
		l, err := f.lock()
		if meta.KindOf(err) == meta.Busy {
			if r, err := f.read(); err == nil {
				staged = append(staged, r.Volume)
			} else {
				s.Logger.Error("a volume is mounted whose record can't be read", "folder", f, "err", err)
			}
			continue
		}
		if err != nil {
			return staged, err
		}
		r, err := f.read()
		if err != nil && meta.KindOf(err) != meta.NotFound {
			// Of another version, damaged, or on a disk that can't be read: it may be of a
			// mount that pods use.
			s.Logger.Error("a record that can't be read is left alone, and what it is of", "folder", f, "err", err)
			l.Close()
			continue
		}
		if err == nil {
			m, merr := s.mountsAt(r.Staging)
			if merr != nil {
				s.Logger.Error("whether a volume is mounted can't be told: it is taken for mounted", "volume", r.Volume, "path", r.Staging, "err", merr)
			}
			if merr != nil || len(m) > 0 {
				// Its process is gone. A holder may have the mount: see Keep. Else it
				// is dead, and whoever stages or unstages it next finds the record.
				s.Logger.Warn("a staged volume's process is gone", "volume", r.Volume, "path", r.Staging)
				staged = append(staged, r.Volume)
				l.Close()
				continue
			}
			if err := s.left(r.Staging); err != nil {
				// An unstaging was cut off. It is called again; meanwhile Keep has a process
				// see to it.
				s.Logger.Warn("a volume that was taken away is taken for staged until all is durable", "volume", r.Volume, "path", r.Staging, "err", err)
				staged = append(staged, r.Volume)
				l.Close()
				continue
			}
			if r.Boot != "" && r.Boot == process.Boot() {
				// A driver was killed before the mount was there again; the next call brings it.
				staged = append(staged, r.Volume)
				l.Close()
				continue
			}
		}
		if err == nil {
			if err := s.forget(r.Staging); err != nil {
				// It gives it up by itself, later.
				s.Logger.Warn("the holder does not forget a mount that is no more", "path", r.Staging, "err", err)
			}
			if r.Pin != nil { // its unstaging was cut off
				s.pinnedYet = append(s.pinnedYet, r)
			}
		}
		err = f.remove()
		l.Close()
		if err != nil {
			return staged, err
		}
	}
	return staged, nil
}
