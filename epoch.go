package penstock

import (
	"errors"

	"penstock.io/penstock/meta"
)

// expiredSince tells, with mu held, whether the session has expired since an epoch in
// which something of the file f was captured. What was captured is lost then,
// and whoever wrote it was told so: it must never come back, neither later nor,
// since another client may have the lease by now, above what that one wrote.
func (in *inode) expiredSince(f *file, epoch uint64) error {
	if in.file == f && f.epoch == epoch {
		return nil
	}
	return meta.E("write back", meta.SessionExpired, in.vol.subject(in.ino), errors.New("this was given up when the session expired"))
}

// stale: see expiredSince. mu is held.
func (w *work) stale() bool { return w.f != nil && w.in.expiredSince(w.f, w.epoch) != nil }
