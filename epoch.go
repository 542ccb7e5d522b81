package penstock

import (
	"errors"

	"penstock.io/penstock/meta"
)

// expiredSince reports whether the session has expired since the epoch in which bytes of the
// file f were captured. The captured bytes are lost then, and their writers were told, so the
// bytes must never come back: not later, and not above the bytes of another client that may
// hold the lease by now. The caller holds mu.
func (in *inode) expiredSince(f *file, epoch uint64) error {
	if in.file == f && f.epoch == epoch {
		return nil
	}
	return meta.E("write back", meta.SessionExpired, in.vol.subject(in.ino), errors.New("the bytes were given up when the session expired"))
}

// stale: see expiredSince. mu is held.
func (w *work) stale() bool { return w.f != nil && w.in.expiredSince(w.f, w.epoch) != nil }
