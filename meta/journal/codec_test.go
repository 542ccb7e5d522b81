package journal

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
	"testing"

	"penstock.io/penstock/meta"
)

var entries = []Entry{
	Next(7, Position{}, 1, nil),
	Next(7, Position{Seq: 41, Hash: Hash{1, 2, 3}}, 9, []byte("payload")),
	Next(meta.MaxVolume, Position{Seq: 1<<63 - 1}, 1<<63, bytes.Repeat([]byte{0xff}, 3000)),
}

var checkpoints = []Checkpoint{
	{Volume: 7, Position: Position{Seq: 1}},
	{Volume: 7, Position: entries[1].Position(), Term: 3, Files: []File{
		{Name: "000001.sst", Size: 1 << 33, Sum: [16]byte{1}, Ref: meta.BlobRef{Parts: []meta.BlobPart{{Chunk: meta.ChunkID{Volume: 1, Term: 2, Counter: 3}, Length: 9, Servers: []meta.ServerID{1, 2, 3}}}, Length: 9}},
		{Name: "MANIFEST-000001"},
	}},
	{Volume: 7, Position: Position{Seq: 5}, Manifest: meta.BlobRef{Name: "list", Length: 77, CRC: 5}},
}

// The encoded forms stand still: every later version must read the bytes written by this version.
func TestGolden(t *testing.T) {
	b, err := Encode(entries[1])
	if err != nil {
		t.Fatal(err)
	}
	const want = "504a010000000007000000000000002a000000000000000901020300000000000000000000000000cd70a5fe6f0952e17d4c360d7a8179a300000007ed1f6c577061796c6f6164"
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("entry is %s, want %s", got, want)
	}
}

// An entry with a right checksum and a wrong hash was not made by Next.
func TestWrongHash(t *testing.T) {
	for _, at := range []int{4, 8, 16, 24, 40, 64} {
		b, err := Encode(entries[1])
		if err != nil {
			t.Fatal(err)
		}
		b[at] ^= 1
		binary.BigEndian.PutUint32(b[60:], checksum(b[:HeaderSize], b[HeaderSize:]))
		if _, err := Decode(b); meta.KindOf(err) != meta.Corrupt {
			t.Fatalf("byte %d: %v", at, err)
		}
	}
}

func TestNewerVersionIsTold(t *testing.T) {
	b, err := Encode(entries[1])
	if err != nil {
		t.Fatal(err)
	}
	b[2]++
	if _, err := Decode(b); meta.KindOf(err) != meta.Version {
		t.Fatal(err)
	}
	if b, err = EncodeCheckpoint(checkpoints[1]); err != nil {
		t.Fatal(err)
	}
	b[2]++
	if _, err := DecodeCheckpoint(b); meta.KindOf(err) != meta.Version {
		t.Fatal(err)
	}
}

func TestCheckpointFlips(t *testing.T) {
	for _, cp := range checkpoints {
		b, err := EncodeCheckpoint(cp)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := DecodeCheckpoint(b); err != nil {
			t.Fatal(err)
		}
		for i := range b {
			bad := bytes.Clone(b)
			bad[i] ^= 1 << (i % 8)
			if _, err := DecodeCheckpoint(bad); err == nil {
				t.Fatalf("byte %d flipped and believed", i)
			}
			if _, err := DecodeCheckpoint(b[:i]); err == nil {
				t.Fatalf("cut at %d and believed", i)
			}
		}
	}
}

func TestLongListNeedsManifest(t *testing.T) {
	cp := Checkpoint{Volume: 1, Position: Position{Seq: 1}}
	for range 10_000 {
		cp.Files = append(cp.Files, File{Name: "000001.sst", Ref: meta.BlobRef{Name: "x"}})
	}
	if _, err := EncodeCheckpoint(cp); meta.KindOf(err) != meta.ResourceExceeded {
		t.Fatal(err)
	}
}

func FuzzDecode(f *testing.F) {
	for _, e := range entries {
		b, err := Encode(e)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := Decode(b)
		if err != nil {
			return
		}
		if again, err := Encode(e); err == nil && !bytes.Equal(again, b) {
			t.Fatalf("%x became %x", b, again)
		}
	})
}

// The checksum would keep a fuzzer out: the test corrects the checksum before decoding.
func FuzzDecodeCheckpoint(f *testing.F) {
	for _, cp := range checkpoints {
		b, err := EncodeCheckpoint(cp)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:len(b)-4])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		cp, err := DecodeCheckpoint(sealed(b))
		if err != nil {
			return
		}
		again, err := EncodeCheckpoint(cp)
		if err != nil {
			return // longer than a record may be
		}
		cp2, err := DecodeCheckpoint(again)
		if err != nil {
			t.Fatal(err)
		}
		if third, err := EncodeCheckpoint(cp2); err != nil || !bytes.Equal(third, again) {
			t.Fatalf("%x became %x: %v", again, third, err)
		}
	})
}

func sealed(b []byte) []byte {
	return binary.BigEndian.AppendUint32(bytes.Clone(b), crc32.Checksum(b, castagnoli))
}
