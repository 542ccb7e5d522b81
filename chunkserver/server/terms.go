package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// An owner that was stopped, and resumes after another server took the volume over, may still
// send orders, and earlier orders may still be on the way. Each chunk has its own fence. In
// addition, a server records the latest owner of each volume that sent an order, in
// DIR/terms.json:
//
//	{"version": 1, "terms": {"17": 5}}
//
// by volume. The file is written under another name, synced and renamed a moment after a
// change. A crash loses the terms of the last moment; the fences of the chunks refuse the
// orders of the lost terms.
const (
	termsFile    = "terms.json"
	termsVersion = 1
	// termsDelay gathers changes: every opening of a volume is a new term.
	termsDelay = time.Second
)

type termsRecord struct {
	Version int                         `json:"version"`
	Terms   map[meta.VolumeID]meta.Term `json:"terms"`
}

// terms are the latest owners.
type terms struct {
	path string // "": the terms are not kept
	slog *slog.Logger
	wake chan struct{} // capacity 1

	mu    sync.Mutex
	seen  map[meta.VolumeID]meta.Term
	dirty bool
}

// open reads the kept terms. If the file is unreadable, it begins anew: terms are a second
// line of defence.
func (t *terms) open(dir string, log *slog.Logger) {
	t.seen, t.slog, t.wake = map[meta.VolumeID]meta.Term{}, log, make(chan struct{}, 1)
	if dir == "" {
		return
	}
	t.path = filepath.Join(dir, termsFile)
	b, err := os.ReadFile(t.path)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var rec termsRecord
	if err == nil {
		var v struct{ Version int }
		if err = json.Unmarshal(b, &v); err == nil && v.Version != termsVersion {
			t.path = "" // the file of a later program stays unchanged
			err = fmt.Errorf("it has version %d, this program knows %d", v.Version, termsVersion)
		}
	}
	if err == nil {
		err = json.Unmarshal(b, &rec)
	}
	if err != nil {
		log.Warn("the terms of earlier owners are not known: only the chunks' fences refuse orders of deposed owners", "file", filepath.Join(dir, termsFile), "error", err)
		return
	}
	maps.Copy(t.seen, rec.Terms)
}

// admit says whether an order may be carried out. Errors: Fenced.
func (t *terms) admit(o *meta.Order) error {
	if o.Owner == 0 {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	seen := t.seen[o.Owner]
	switch {
	case o.Term > seen:
		t.seen[o.Owner], t.dirty = o.Term, true
		select {
		case t.wake <- struct{}{}:
		default:
		}
	case o.Term < seen:
		switch o.Kind {
		case meta.OrderStat, meta.OrderList, meta.OrderVerify:
			return nil // these orders change nothing
		}
		return meta.E("order", meta.Fenced, o.Chunk.String(), fmt.Errorf("the order is from the owner of volume %d in term %d, and an owner of the later term %d has already sent orders", o.Owner, o.Term, seen))
	}
	return nil
}

// keep writes changes down until ctx ends, and then once more.
func (t *terms) keep(ctx context.Context) {
	for ended := false; !ended; {
		select {
		case <-t.wake:
		case <-ctx.Done():
			ended = true
		}
		if !ended {
			select {
			case <-time.After(termsDelay):
			case <-ctx.Done():
				ended = true
			}
		}
		if err := t.save(); err != nil {
			t.slog.Warn("the terms of owners could not be written; after a restart only the chunks' fences refuse orders of deposed owners", "error", err)
		}
	}
}

func (t *terms) save() error {
	t.mu.Lock()
	if !t.dirty || t.path == "" {
		t.mu.Unlock()
		return nil
	}
	t.dirty = false
	rec := termsRecord{termsVersion, maps.Clone(t.seen)}
	t.mu.Unlock()
	err := writeJSON(t.path, rec)
	if err != nil {
		t.mu.Lock()
		t.dirty = true // with the next change
		t.mu.Unlock()
	}
	return err
}
