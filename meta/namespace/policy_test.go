package namespace

import (
	"bytes"
	"testing"

	"penstock.io/penstock/meta"
)

// A volume's record as the first release wrote it is read, and is written the
// same as long as the policy says nothing that the first release had no words
// for.
func TestPolicyRecord(t *testing.T) {
	old := []byte{1, 7, 1, 9, 4, 5, 6, 100, 3, 2, 0, 5}
	var v volume
	if err := decodeVolume(old, &v); err != nil {
		t.Fatal(err)
	}
	want := meta.Policy{QuotaBytes: 100, QuotaInodes: 3, Replicas: 2, SealOnClose: true, SyncOnClose: true, LocalFirst: true}
	if v.policy != want {
		t.Fatalf("%+v, want %+v", v.policy, want)
	}
	if b := appendVolume(nil, &v); !bytes.Equal(b, old) {
		t.Fatalf("written as %x, was %x", b, old)
	}
	// What was once called degrade is a least number of one.
	degrade := []byte{2, 7, 1, 9, 4, 5, 6, 0, 0, 3, 0, 0, 3, 0, 0, 0}
	if err := decodeVolume(degrade, &v); err != nil || v.policy != (meta.Policy{Replicas: 3, MinReplicas: 1, LocalFirst: true}) {
		t.Fatalf("a policy that may degrade: %+v, %v", v.policy, err)
	}
	if err := decodeVolume(old, &v); err != nil {
		t.Fatal(err)
	}
	for _, p := range []meta.Policy{
		{Replicas: 1},
		{Replicas: 3, MinReplicas: 1, LocalFirst: true},
		{Replicas: 5, MinReplicas: 4, Class: "ssd", QuotaInodes: 9},
		{Replicas: 3, LocalFirst: true, Topology: "/dc1/rack2"},
		{Replicas: 3, LocalFirst: true, Spread: meta.SpreadDC},
		{Replicas: 3, LocalFirst: true, Class: "nvme", Encrypt: true, NoAtime: true},
	} {
		v.policy = p
		b := appendVolume(nil, &v)
		if want := byte(volumeV2); p.MinReplicas == 0 && b[0] != want || p.MinReplicas != 0 && b[0] != volumeV7 {
			t.Errorf("%+v is written in version %d", p, b[0])
		}
		var got volume
		got.policy = meta.Policy{Topology: "/left", Class: "over"} // must not show through
		if err := decodeVolume(b, &got); err != nil || got != v {
			t.Errorf("%+v, %v; want %+v", got, err, v)
		}
		for n := range b {
			if err := decodeVolume(b[:n], &got); err == nil {
				t.Errorf("%d of %d bytes are taken for a record", n, len(b))
			}
		}
		if rec, problem := readVolume(b); problem != "" || rec.id != 7 {
			t.Errorf("fsck reads %+v: %s", rec, problem)
		}
	}
}
