package blobdir

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"

	"penstock.io/penstock/meta"
)

func TestPutGetDelete(t *testing.T) {
	dir := t.TempDir()
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{0, 1, 100_000} {
		want := bytes.Repeat([]byte("x"), n)
		ref, err := d.Put(t.Context(), meta.BlobOwner{}, "../a b/000001.sst", bytes.NewReader(want))
		if err != nil || ref.Length != uint64(n) {
			t.Fatal(ref, err)
		}
		b, err := ref.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		if ref, _, err = meta.DecodeBlobRef(b); err != nil {
			t.Fatal(err)
		}
		r, err := d.Get(t.Context(), ref)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("DATA: %d bytes, not %d: %v", len(got), len(want), err)
		}
		r.Close()
		for range 2 {
			if err := d.Delete(t.Context(), ref); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := d.Get(t.Context(), ref); !errors.Is(err, meta.NotFound) {
			t.Fatal(err)
		}
	}
	if _, err := d.Get(t.Context(), meta.BlobRef{Name: "../../etc/passwd"}); err == nil {
		t.Fatal("left the folder")
	}
}

func TestDamage(t *testing.T) {
	dir := t.TempDir()
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	good := bytes.Repeat([]byte("0123456789"), 10_000)
	for name, bad := range map[string][]byte{
		"flipped": append([]byte("x"), good[1:]...),
		"short":   good[:len(good)-1],
		"long":    append(bytes.Clone(good), 'x'),
		"empty":   nil,
	} {
		ref, err := d.Put(t.Context(), meta.BlobOwner{}, name, bytes.NewReader(good))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, ref.Name), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		r, err := d.Get(t.Context(), ref)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if !errors.Is(err, meta.Corrupt) || len(got) >= len(good) {
			t.Fatalf("%s: %d bytes, %v", name, len(got), err)
		}
		r.Close()
	}
}

// A Put that fails or is given up leaves nothing.
func TestUnfinished(t *testing.T) {
	dir := t.TempDir()
	d, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	if _, err := d.Put(t.Context(), meta.BlobOwner{}, "a", iotest.ErrReader(boom)); !errors.Is(err, boom) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Put(ctx, meta.BlobOwner{}, "a", bytes.NewReader([]byte("x"))); !errors.Is(err, meta.Canceled) {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "b.X.tmp"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir); err != nil {
		t.Fatal(err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Fatal(names, err)
	}
}
