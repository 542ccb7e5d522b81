package server

import (
	"bytes"
	"context"
	"io"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

func bytesReader(b []byte) io.Reader { return bytes.NewReader(b) }

// LoadManifest fills in the list of files of a checkpoint that keeps it in a
// blob. Errors: Corrupt, and those of Blob.Get.
func LoadManifest(ctx context.Context, blob meta.Blob, cp journal.Checkpoint) (journal.Checkpoint, error) {
	if cp.Manifest.IsZero() {
		return cp, nil
	}
	r, err := blob.Get(ctx, cp.Manifest)
	if err != nil {
		return cp, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, int64(cp.Manifest.Length)+1))
	if err != nil {
		return cp, err
	}
	cp.Files, err = journal.DecodeFiles(b)
	return cp, err
}
