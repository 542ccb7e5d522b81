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

// ParseDigest reads a digest as Digest.String writes it. Errors: Invalid, Version.
func ParseDigest(text string) (Digest, error) { return digest.Parse(text) }

// DigestProgress tells how far the computation of a digest is.
type DigestProgress = digest.Progress

// verifyAside is how many blocks ComputeDigest reads and sums at a time.
const verifyAside = 4

// ComputeDigest reads a whole snapshot, names, attributes and every byte, and
// gives its digest. The volume shows a snapshot (Client.Snapshot); told, if not
// nil, hears now and then how far it is. Memory does not grow with the volume,
// but with the entries of the directories on one path, and the extents of one
// file. Errors: NotSupported (a live volume), Stale, Corrupt.
func (v *Volume) ComputeDigest(ctx context.Context, told func(DigestProgress)) (Digest, DigestProgress, error) {
	if v.view == nil {
		return Digest{}, DigestProgress{}, meta.E("digest", meta.NotSupported, v.name, fmt.Errorf("only of a snapshot"))
	}
	ctx = context.WithValue(ctx, pastIndex{}, true) // it does not rest on an index either
	src := digest.Asked{
		Ask: func(ctx context.Context, op meta.Op) (*meta.Result, error) {
			res, _, err := v.ask(ctx, op)
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

// RecordedDigest is what the owner of the volume found when it computed the
// digest of the snapshot that is shown here. If there is none yet, it is computed
// before others, and faster, since somebody asked. Errors: NotSupported (a live
// volume), NoSuchSnapshot, Unavailable (it has not been computed yet, or could not
// be: the text says why).
func (v *Volume) RecordedDigest(ctx context.Context) (Digest, error) {
	if v.view == nil {
		return Digest{}, meta.E("digest", meta.NotSupported, v.name, fmt.Errorf("only of a snapshot"))
	}
	s, err := v.view.of.awaitDigest(ctx, v.view.snap.Name, false)
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

// awaitDigest tells of a snapshot of the volume, whose digest somebody waits for; unpaced,
// it is read as fast as can be. Errors: NoSuchSnapshot.
func (v *Volume) awaitDigest(ctx context.Context, name string, unpaced bool) (Snapshot, error) {
	s, err := v.snapshotSession()
	if err != nil {
		return Snapshot{}, err
	}
	return s.AwaitDigest(ctx, v.id, name, unpaced)
}

// WrongDigestError says that what a snapshot holds is not what was demanded.
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
