package meta

import (
	"bytes"
	"testing"
)

func FuzzDecodeBlobRef(f *testing.F) {
	for _, ref := range []BlobRef{
		{},
		{Name: "000001.sst", Length: 1 << 40, CRC: 7},
		{Length: 3, Parts: []BlobPart{{Chunk: ChunkID{1, 2, 3}, Length: 3, Servers: []ServerID{1, 1 << 63}}, {}}},
	} {
		b, err := ref.AppendBinary(nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		ref, rest, err := DecodeBlobRef(b)
		if err != nil {
			return
		}
		again, err := ref.AppendBinary(nil)
		if err != nil {
			t.Fatal(err)
		}
		ref2, rest2, err := DecodeBlobRef(append(again, rest...))
		if err != nil || !bytes.Equal(rest, rest2) {
			t.Fatal(err)
		}
		if third, err := ref2.AppendBinary(nil); err != nil || !bytes.Equal(third, again) {
			t.Fatalf("%x became %x: %v", again, third, err)
		}
	})
}
