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

// record describes how a volume was staged. The service writes the record before mounting the
// volume, and removes the record after unmounting.
type record struct {
	Version int      `json:"version"` // recordVersion
	Volume  string   `json:"volume"`  // the volume's handle
	Staging string   `json:"staging"` // the path of the mount
	Source  string   `json:"source"`
	Options []string `json:"options"`
	// Pods has the pods with the volume, by target path, as far as the orchestrator named the
	// pods. Some may have been unpublished since.
	Pods map[string]pod `json:"pods,omitempty"`
	Pin  *pinned        `json:"pin,omitempty"` // of a snapshot
	// Boot is the machine's boot id if NodePublishVolume staged the volume again in that boot.
	// The orchestrator takes the volume for staged, mounted or not, and would not stage the
	// volume again.
	Boot string `json:"boot,omitempty"`
}

// pinned names the snapshot pinned by a mount, and the pin's holder.
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

// read reads the record. Errors: NotFound, Version, Corrupt, IO.
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

// lockTries bounds how often lock tries again after the folder was removed meanwhile.
const lockTries = 100

// lock takes the lock, which a mount's process holds. Errors: Busy (the process lives), IO.
func (f folder) lock() (l *os.File, err error) {
	for range lockTries {
		if l, err = f.tryLock(); l != nil || err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, os.ErrExist) {
			return l, err
		}
	}
	return nil, meta.E("lock state", meta.IO, string(f), errors.Join(errors.New("it goes again and again"), err))
}

// tryLock is one try of lock. If the folder is removed meanwhile, tryLock returns no file, and
// either no error or an error of a step, ErrNotExist or ErrExist.
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
	// The last owner of the lock may have removed the file after OpenFile here. A lock on the
	// removed file excludes nobody: the next caller would get a lock on a new file.
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

// remove removes the folder: its files by name, and no other files. The caller has the lock.
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

// Recover inspects the volumes staged by an earlier driver, and returns the handles of the
// volumes still staged. Recover leaves alone volumes that are mounted, that can't be
// inspected, whose data is not yet durable, or that are to be mounted again, and removes the
// state of all others. The driver calls Recover once, before the service serves.
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
			// The record is of another version, damaged, or on an unreadable disk: the record
			// may belong to a mount used by pods.
			s.Logger.Error("a record of the driver's state can't be read: the driver leaves the record and its mount alone", "folder", f, "err", err)
			l.Close()
			continue
		}
		if err == nil {
			m, merr := s.mountsAt(r.Staging)
			if merr != nil {
				s.Logger.Error("the driver can't tell whether a volume is mounted, and takes the volume for mounted", "volume", r.Volume, "path", r.Staging, "err", merr)
			}
			if merr != nil || len(m) > 0 {
				// The mount's process has ended. If a holder has the mount, Keep takes the
				// mount up. Otherwise the mount is dead, and the next call that stages or
				// unstages the volume finds the record.
				s.Logger.Warn("a staged volume's process is gone", "volume", r.Volume, "path", r.Staging)
				staged = append(staged, r.Volume)
				l.Close()
				continue
			}
			if err := s.left(r.Staging); err != nil {
				// A call unstaging the volume was cut off. The orchestrator calls again;
				// meanwhile Keep starts a process to make the data durable.
				s.Logger.Warn("an unmounted volume has bytes that are not durable: the driver takes the volume for staged until they are durable", "volume", r.Volume, "path", r.Staging, "err", err)
				staged = append(staged, r.Volume)
				l.Close()
				continue
			}
			if r.Boot != "" && r.Boot == process.Boot() {
				// A driver was killed before it had mounted the volume again; the next call
				// mounts the volume.
				staged = append(staged, r.Volume)
				l.Close()
				continue
			}
		}
		if err == nil {
			if err := s.forget(r.Staging); err != nil {
				// The holder drops the mount by itself, later.
				s.Logger.Warn("the holder could not forget an ended mount", "path", r.Staging, "err", err)
			}
			if r.Pin != nil { // the call unstaging the volume was cut off
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

// folders returns the folders of staged volumes by staging path, and the number of unreadable
// records.
func (s *Server) folders() (all map[string]folder, unread int) {
	all = map[string]folder{}
	dirs, err := os.ReadDir(filepath.Join(s.State, "volumes"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.Logger.Error("the state can't be read", "err", err)
	}
	for _, d := range dirs {
		f := folder(filepath.Join(s.State, "volumes", d.Name()))
		r, err := f.read()
		if err == nil {
			all[r.Staging] = f
		} else if meta.KindOf(err) != meta.NotFound { // without a record the volume is being staged or unstaged
			unread++
		}
	}
	return all, unread
}

// socket returns the path of the socket on which a mount's process answers the driver. The
// socket lies beside the volumes' folders, not in f.
func (f folder) socket() string {
	state := filepath.Dir(filepath.Dir(string(f)))
	return filepath.Join(state, "sockets", filepath.Base(string(f)))
}
