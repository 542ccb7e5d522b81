package server

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// A server remembers its disks in DIR/disks.json, to distinguish the directory of an unmounted
// disk, also empty, from a new directory:
//
//	{"version": 1, "disks": [{"path": "/data/1", "id": "…32 hexadecimal digits", "retired": false, "replace": false}]}
//
// Every disk records its server in the file "server" of the disk:
//
//	{"version": 1, "server": 3, "disk": "…32 hexadecimal digits"}
//
// The server writes each file under another name, syncs and renames it. If a server crashed
// before writing a disk's file "server", the next opening of the disk writes the file.
const (
	disksFile    = "disks.json"
	serverFile   = "server"
	disksVersion = 1
)

// DiskSpec is a directory that the operator gave.
type DiskSpec struct{ Path, Class string }

// DisksConfig says which disks a server has.
type DisksConfig struct {
	Dir     string // where disks.json lies
	Disks   []DiskSpec
	Cluster [16]byte
	Server  meta.ServerID
	Options store.Options // Cluster and Disk are filled in
	Logger  *slog.Logger  // nil: slog.Default()
}

// Disks are a server's disks: open, failed, or missing.
type Disks struct {
	cfg  DisksConfig
	slog *slog.Logger
	// bad is called for chunks with wrong checksums and for unreadable chunks.
	bad atomic.Pointer[func(*disk, meta.ChunkID, error)]

	mu  sync.Mutex
	all []*disk // replaced, never changed
}

// disk is one disk of the server.
type disk struct {
	id          string
	path, class string
	st          atomic.Pointer[store.Store] // nil: the disk is not open

	mu         sync.Mutex
	why        error // the reason, while the disk is not open
	retired    bool
	hung       error                     // the disk has not answered for long
	slow       error                     // the disk answers late
	broken     error                     // the disk's directories are unreadable
	unreadable map[meta.ChunkID]struct{} // chunks whose reads failed with I/O errors
	last       meta.DiskState            // the last reported state
	scrub      scrubState
}

// unreadableMost is the number of chunks with I/O errors when read from which
// on the disk as a whole counts as failed.
const unreadableMost = 3

// state is how the disk stands, and why.
func (d *disk) state() (meta.DiskState, string) {
	st := d.st.Load()
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case st == nil && d.retired:
		return meta.DiskRemoved, "given up by the operator"
	case st == nil:
		return meta.DiskFailed, d.why.Error()
	case d.hung != nil:
		return meta.DiskFailed, d.hung.Error()
	case d.broken != nil:
		return meta.DiskFailed, d.broken.Error()
	case len(d.unreadable) >= unreadableMost:
		return meta.DiskFailed, fmt.Sprintf("%d chunks on it could not be read", len(d.unreadable))
	case st.Err() != nil:
		// The disk's chunks are verified when read, and may be the last copies.
		return meta.DiskFailing, "it takes no more writes: " + st.Err().Error()
	case d.retired:
		return meta.DiskFailing, "given up by the operator; its replicas are moved elsewhere"
	case d.slow != nil:
		return meta.DiskFailing, d.slow.Error()
	case st.Full():
		return meta.DiskFull, ""
	}
	return meta.DiskOK, ""
}

// rank orders disks with the same chunk: the lowest rank keeps it.
func (d *disk) rank() int {
	if state, _ := d.state(); state == meta.DiskFailing {
		return 1
	}
	return 0
}

// serves gives the store if the disk answers.
func (d *disk) serves() *store.Store {
	if s, _ := d.state(); s == meta.DiskFailed || s == meta.DiskRemoved {
		return nil
	}
	return d.st.Load()
}

func (d *disk) info() meta.DiskInfo {
	i := meta.DiskInfo{ID: d.id, Path: d.path, Class: d.class}
	i.State, i.Detail = d.state()
	if st := d.serves(); st != nil {
		i.Total, i.Free = st.Space()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	i.Scrubbed, i.ScrubEnd = d.scrub.progress()
	return i
}

// wireDisks makes the Disks of New from open stores.
func wireDisks(class string, stores []*store.Store) *Disks {
	ds := &Disks{}
	for i, st := range stores {
		id := st.ID()
		if id == [16]byte{} {
			id[15] = byte(i + 1)
		}
		d := &disk{id: hex.EncodeToString(id[:]), class: class, last: meta.DiskOK}
		d.st.Store(st)
		ds.all = append(ds.all, d)
	}
	return ds
}

// watch sets bad, which is called for chunks with wrong checksums and for unreadable chunks.
func (ds *Disks) watch(bad func(*disk, meta.ChunkID, error)) { ds.bad.Store(&bad) }

// cantRead tells whether reading the chunk failed with an I/O error before.
func (d *disk) cantRead(id meta.ChunkID) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, bad := d.unreadable[id]
	return bad
}

func (ds *Disks) list() []*disk {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	return ds.all
}

// OpenDisks opens the disks given by the operator and the recorded disks. A disk that can't be
// opened (not mounted, another server's, damaged) counts as failed; the other disks serve. A
// new path must be empty or have a disk of this server; OpenDisks never removes anything. The
// error reports that the record of the disks is unreadable or not writable.
func OpenDisks(cfg DisksConfig) (*Disks, error) {
	const op = "open disks"
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	ds := &Disks{cfg: cfg, slog: cfg.Logger}
	rec, err := ds.read()
	if err != nil {
		return nil, err
	}
	paths := map[string]bool{}
	for _, spec := range cfg.Disks {
		if paths[spec.Path] {
			return nil, errors.Join(meta.E(op, meta.Invalid, spec.Path, errors.New("it is given twice")), ds.Close())
		}
		paths[spec.Path] = true
		ds.all = append(ds.all, ds.open(spec, rec))
	}
	// Disks that the server had, and that the operator no longer gives.
	for _, r := range rec.Disks {
		if !r.Retired && !slices.ContainsFunc(ds.all, func(d *disk) bool { return d.id == r.ID }) && !paths[r.Path] {
			ds.all = append(ds.all, &disk{id: r.ID, path: r.Path,
				why: errors.New("the server was started without it: give --disk, or give it up with 'penstock disk fail'")})
		}
	}
	if err := ds.save(); err != nil {
		return nil, errors.Join(err, ds.Close())
	}
	return ds, nil
}

// FirstError returns nil if any disk is open, else the reason why a disk is not.
func (ds *Disks) FirstError() error {
	var first error
	for _, d := range ds.list() {
		if d.st.Load() != nil {
			return nil
		}
		if first == nil {
			first = d.why
		}
	}
	if first == nil {
		first = meta.E("open disks", meta.Invalid, "", errors.New("there are none"))
	}
	return first
}

// Close closes all.
func (ds *Disks) Close() error {
	var errs []error
	for _, d := range ds.list() {
		if st := d.st.Load(); st != nil {
			errs = append(errs, st.Close())
		}
	}
	return errors.Join(errs...)
}

func (ds *Disks) read() (rec disksRecord, err error) {
	const op = "open disks"
	path := filepath.Join(ds.cfg.Dir, disksFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return disksRecord{Version: disksVersion}, nil
	}
	if err != nil {
		return rec, meta.E(op, meta.IO, path, err)
	}
	if err := json.Unmarshal(b, &rec); err != nil || rec.Version < 1 {
		return rec, meta.E(op, meta.Corrupt, path, err)
	}
	if rec.Version > disksVersion {
		return rec, meta.E(op, meta.Version, path, fmt.Errorf("it has version %d, this program knows up to %d", rec.Version, disksVersion))
	}
	return rec, nil
}

// save writes the record of the disks. The caller holds mu, or no other goroutine runs yet.
func (ds *Disks) save() error {
	rec := disksRecord{Version: disksVersion}
	for _, d := range ds.all {
		d.mu.Lock()
		if d.id != "" {
			rec.Disks = append(rec.Disks, diskRecord{Path: d.path, ID: d.id, Retired: d.retired})
		}
		d.mu.Unlock()
	}
	return writeJSON(filepath.Join(ds.cfg.Dir, disksFile), rec)
}

// open opens one disk if possible, and otherwise records the reason.
func (ds *Disks) open(spec DiskSpec, rec disksRecord) *disk {
	d := &disk{path: spec.Path, class: spec.Class}
	err := ds.openInto(d, rec)
	if err != nil {
		d.why = err
		if d.id == "" {
			// The disk that the path should have.
			for _, r := range rec.Disks {
				if r.Path == d.path {
					d.id, d.retired = r.ID, r.Retired
				}
			}
		}
		ds.slog.Error("a disk is not used", "path", d.path, "disk", d.id, "error", err)
		return d
	}
	ds.slog.Info("a disk is in use", "path", d.path, "disk", d.id, "class", d.class)
	return d
}

func (ds *Disks) openInto(d *disk, rec disksRecord) error {
	const op = "open disk"
	var expected *diskRecord
	for i := range rec.Disks {
		if rec.Disks[i].Path == d.path {
			expected = &rec.Disks[i]
		}
	}
	fresh, err := isFresh(d.path)
	if err != nil {
		return meta.E(op, meta.IO, d.path, err)
	}
	if fresh {
		if expected != nil && !expected.Replace {
			return meta.E(op, meta.NotFound, d.path, fmt.Errorf(
				"disk %s ought to be here, and here is nothing: is it mounted? Nothing was changed. If it was exchanged for a new one: penstock disk replace %s", expected.ID, expected.ID))
		}
		return ds.initInto(d)
	}
	o := ds.cfg.Options
	o.Cluster, o.Logger, o.Disk = ds.cfg.Cluster, ds.slog, [16]byte{}
	o.Bad = func(id meta.ChunkID, err error) {
		if bad := ds.bad.Load(); bad != nil {
			(*bad)(d, id, err)
		}
	}
	// The identity comes first: nothing may be recovered on a disk of another server.
	own, err := readOwner(d.path)
	if err != nil {
		return err
	}
	if own.Version != 0 {
		d.id = own.Disk
		if own.Server != ds.cfg.Server {
			id := d.id
			d.id = ""
			return meta.E(op, meta.Invalid, d.path, fmt.Errorf("disk %s belongs to chunk server %d, this is server %d", id, own.Server, ds.cfg.Server))
		}
		known := slices.IndexFunc(rec.Disks, func(r diskRecord) bool { return r.ID == own.Disk })
		if known < 0 && expected != nil && !expected.Replace {
			d.id = ""
			return meta.E(op, meta.Invalid, d.path, fmt.Errorf("disk %s ought to be here, not %s; nothing was changed", expected.ID, own.Disk))
		}
		if known >= 0 {
			d.retired = rec.Disks[known].Retired
		}
	}
	st, err := store.Open(store.DirDisk(d.path), o)
	if err != nil {
		return err
	}
	if own.Version == 0 {
		// The server crashed after it had made the store and before it recorded the store's
		// server.
		id := st.ID()
		if id == [16]byte{} {
			if expected != nil {
				if b, err := hex.DecodeString(expected.ID); err == nil {
					copy(id[:], b)
				}
			} else {
				rand.Read(id[:])
			}
		}
		d.id = hex.EncodeToString(id[:])
		if err := writeJSON(filepath.Join(d.path, serverFile), owner{disksVersion, ds.cfg.Server, d.id}); err != nil {
			return errors.Join(err, st.Close())
		}
	}
	d.last = meta.DiskOK
	d.st.Store(st)
	return nil
}

// initInto makes an empty directory a disk.
func (ds *Disks) initInto(d *disk) error {
	const op = "open disk"
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return meta.E(op, meta.IO, d.path, err)
	}
	o := ds.cfg.Options
	o.Cluster, o.Logger = ds.cfg.Cluster, ds.slog
	rand.Read(o.Disk[:])
	if err := store.Init(store.DirDisk(d.path), o); err != nil {
		return err
	}
	d.id = hex.EncodeToString(o.Disk[:])
	if err := writeJSON(filepath.Join(d.path, serverFile), owner{disksVersion, ds.cfg.Server, d.id}); err != nil {
		return err
	}
	return ds.openInto(d, disksRecord{})
}

// Retire gives a disk up: the disk gets no new data, and its chunks are moved.
func (ds *Disks) Retire(id string) error {
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d, err := ds.byID("give up disk", id)
	if err != nil {
		return err
	}
	d.mu.Lock()
	d.retired = true
	d.mu.Unlock()
	return ds.save()
}

func (ds *Disks) byID(op, id string) (*disk, error) {
	for _, d := range ds.all {
		if d.id == id {
			return d, nil
		}
	}
	return nil, meta.E(op, meta.NotFound, id, errors.New("this server has no such disk"))
}

// Replace releases a disk that failed or was given up, so that the operator can unmount the
// disk. A second call takes an empty directory at the same path for the new disk. Errors: Busy
// (the disk serves), NotEmpty (the disk has now been released; mount the new one and call
// again), Exists (the disk was released before, and the directory is not empty).
func (ds *Disks) Replace(id string) error {
	const op = "replace disk"
	ds.mu.Lock()
	defer ds.mu.Unlock()
	d, err := ds.byID(op, id)
	if err != nil {
		return err
	}
	switch s, _ := d.state(); s {
	case meta.DiskOK, meta.DiskFull:
		return meta.E(op, meta.Busy, id, fmt.Errorf("it serves from %s; to give it up first: penstock disk fail %s", d.path, id))
	}
	d.mu.Lock()
	if d.why == nil {
		d.why = errors.New("let go of, to be replaced")
	}
	d.mu.Unlock()
	kind := meta.Exists
	if st := d.st.Swap(nil); st != nil {
		kind = meta.NotEmpty
		ds.mu.Unlock()
		err := st.Close()
		ds.mu.Lock()
		if err != nil {
			ds.slog.Warn("a disk to be replaced was closed with an error", "disk", id, "error", err)
		}
	}
	fresh, err := isFresh(d.path)
	if err != nil {
		return meta.E(op, meta.IO, d.path, err)
	}
	if !fresh {
		return meta.E(op, kind, d.path, fmt.Errorf("the old disk was let go of; mount an empty file system at %s, then once more: penstock disk replace %s", d.path, id))
	}
	n := &disk{path: d.path, class: d.class}
	if err := ds.initInto(n); err != nil {
		return err
	}
	ds.all = slices.Clone(ds.all)
	ds.all[slices.Index(ds.all, d)] = n
	n.last = 0 // so that the state is reported
	ds.slog.Info("disk replaced", "path", d.path, "old", id, "disk", n.id)
	return ds.save()
}
