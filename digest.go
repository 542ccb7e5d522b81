package penstock

import (
	"context"
	"errors"
	"fmt"
	"io"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
)

// Digest is the fingerprint of a tree; its text is sha256-tree-1: and 64 digits.
type Digest = digest.Sum

// ParseDigest parses the output of Digest.String. Errors: Invalid, Version.
func ParseDigest(text string) (Digest, error) { return digest.Parse(text) }

// DigestProgress tells how far the computation of a digest is.
type DigestProgress = digest.Progress

// verifyAside is how many blocks ComputeDigest reads and sums at a time.
const verifyAside = 4

// ComputeDigest reads a whole snapshot, names, attributes and every byte, and returns its
// digest. The volume must show a snapshot (Client.Snapshot). If told is not nil, ComputeDigest
// calls it from time to time with the progress. Memory grows with the entries of the
// directories on one path and with the extents of one file, but not with the volume. Errors:
// NotSupported (a live volume), Stale, Corrupt.
func (v *Volume) ComputeDigest(ctx context.Context, told func(DigestProgress)) (Digest, DigestProgress, error) {
	if v.view == nil {
		return Digest{}, DigestProgress{}, meta.E("digest", meta.NotSupported, v.name, fmt.Errorf("only snapshots have a digest: name one as VOLUME@SNAPSHOT"))
	}
	ctx = context.WithValue(ctx, pastIndex{}, true) // the digest must not depend on an index
	src := digest.Asked{
		Ask: func(ctx context.Context, op meta.Op) (*meta.Result, error) {
			res, _, err := v.owner.ask(ctx, op)
			return res, err
		},
		Read: func(ctx context.Context, ino meta.Ino, p []byte, off uint64) error {
			n, err := v.Read(ctx, ino, p, int64(off))
			if err == nil && n < len(p) {
				err = meta.E("digest", meta.Corrupt, v.subject(ino), io.ErrUnexpectedEOF)
			}
			return err
		},
	}
	return digest.Walk(ctx, src, digest.Way{Told: told, Aside: func() int { return verifyAside }})
}

// RecordedDigest returns the digest that the volume's owner computed for the snapshot shown
// here. If the digest is missing, the owner computes it before others, and faster, since a
// caller waits. Errors: NotSupported (a live volume), NoSuchSnapshot, Unavailable (not
// computed yet, or not computable: the text says why).
func (v *Volume) RecordedDigest(ctx context.Context) (Digest, error) {
	if v.view == nil {
		return Digest{}, meta.E("digest", meta.NotSupported, v.name, fmt.Errorf("only snapshots have a digest: name one as VOLUME@SNAPSHOT"))
	}
	s, err := v.view.of.snapshots.awaitDigest(ctx, v.view.snap.Name, false)
	switch {
	case err != nil:
		return Digest{}, err
	case s.At != v.view.snap.At:
		return Digest{}, meta.E("digest", meta.NoSuchSnapshot, v.name, nil)
	case s.Digest != nil:
		return digest.Parse(s.Digest.Digest)
	case s.DigestTrying:
		return Digest{}, meta.E("digest", meta.Unavailable, v.name, fmt.Errorf("it is being computed; the last time that failed: %s", s.DigestError))
	case s.DigestError != "":
		return Digest{}, meta.E("digest", meta.Unavailable, v.name, fmt.Errorf("it could not be computed: %s", s.DigestError))
	}
	return Digest{}, meta.E("digest", meta.Unavailable, v.name, errors.New("it has not been computed yet"))
}

// awaitDigest returns the record of a snapshot of the volume at once. If the digest is
// missing, the owner notes that a caller waits for it; unpaced: the owner then reads without a
// bound on the rate. Errors: NoSuchSnapshot.
func (sn *snapshotNames) awaitDigest(ctx context.Context, name string, unpaced bool) (meta.SnapshotInfo, error) {
	s, err := sn.session()
	if err != nil {
		return meta.SnapshotInfo{}, err
	}
	return s.AwaitDigest(ctx, sn.v.id, name, unpaced)
}

// WrongDigestError reports that a snapshot's contents do not have the demanded digest.
type WrongDigestError struct{ Have, Want Digest }

func (e *WrongDigestError) Error() string {
	return fmt.Sprintf("it is %v, and %v is demanded", e.Have, e.Want)
}

// Demand refuses a snapshot whose recorded digest is another. Errors: as
// RecordedDigest, and Corrupt with a *WrongDigestError.
func (v *Volume) Demand(ctx context.Context, want Digest) error {
	have, err := v.RecordedDigest(ctx)
	if err == nil && have != want {
		err = meta.E("digest", meta.Corrupt, v.name, &WrongDigestError{have, want})
	}
	return err
}
