package etcd

import (
	"encoding/json"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

func FuzzDecodeOwner(f *testing.F) {
	b, err := json.Marshal(Owner{Version: 1, Term: 7, Server: "m1", Addr: "unix:/x", Process: process.Process{Boot: "b", PIDNS: "n", PID: 1, Start: 2}, Released: true})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"v":2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if o, err := decodeOwner("k", b); err == nil && (o.Version < 1 || o.Version > ownerVersion) {
			t.Fatalf("%+v", o)
		}
	})
}

func TestNewerOwnerIsTold(t *testing.T) {
	if _, err := decodeOwner("k", []byte(`{"v":2,"term":"changed"}`)); meta.KindOf(err) != meta.Version {
		t.Fatal(err)
	}
}
