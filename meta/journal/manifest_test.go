package journal

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
)

var manifests = []Manifest{
	{Checkpoint: Checkpoint{Volume: 7, Position: Position{Seq: 1}}},
	{Cluster: "id", Checkpoint: checkpoints[1], Written: 5, Row: []byte(`{"v":1}`), Entry: []byte("entry"),
		Records: []KeyValue{{[]byte("table/1"), []byte("x")}, {[]byte("k"), nil}}},
}

func TestManifestGolden(t *testing.T) {
	m := manifests[1]
	m.Files = nil
	b, err := EncodeManifest(m)
	if err != nil {
		t.Fatal(err)
	}
	const want = "504601000000000700000000000000" + "2acd70a5fe6f0952e17d4c360d7a8179a300000000000000030000000000000005" +
		"0269640" + "77b2276223a317d05656e7472790207" + "7461626c652f310178016b000034053748"
	if got := hex.EncodeToString(b); got != want {
		t.Errorf("a manifest is %s, want %s", got, want)
	}
}

func TestManifestFlips(t *testing.T) {
	for _, m := range manifests {
		b, err := EncodeManifest(m)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeManifest(b)
		if err != nil || fmt.Sprintf("%v", got) != fmt.Sprintf("%v", m) {
			t.Fatalf("%v became %v, %v", m, got, err)
		}
		if !LooksLikeManifest(b) {
			t.Fatal("it does not look like one")
		}
		for i := range b {
			bad := bytes.Clone(b)
			bad[i] ^= 1 << (i % 8)
			if _, err := DecodeManifest(bad); err == nil {
				t.Fatalf("byte %d flipped and believed", i)
			}
			if _, err := DecodeManifest(b[:i]); err == nil {
				t.Fatalf("cut at %d and believed", i)
			}
		}
		b[2]++
		if _, err := DecodeManifest(b); meta.KindOf(err) != meta.Version {
			t.Fatal(err)
		}
	}
}

func FuzzDecodeManifest(f *testing.F) {
	for _, m := range manifests {
		b, err := EncodeManifest(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b[:len(b)-4])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeManifest(sealed(b))
		if err != nil || b[2] != ManifestVersion {
			return
		}
		again, err := EncodeManifest(m)
		if err != nil {
			t.Fatal(err)
		}
		m2, err := DecodeManifest(again)
		if err != nil {
			t.Fatal(err)
		}
		if third, err := EncodeManifest(m2); err != nil || !bytes.Equal(third, again) {
			t.Fatalf("%x became %x: %v", again, third, err)
		}
	})
}
