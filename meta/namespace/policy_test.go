package namespace

import (
	"testing"

	"penstock.io/penstock/meta"
)

// A volume's record holds each policy, and no part of a longer record is taken for one.
func TestPolicyRecord(t *testing.T) {
	v := volume{id: 7, gen: 1, nextIno: 9, inodes: 4, bytes: 5, chunks: 6}
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
