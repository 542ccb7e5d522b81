package wire

import (
	"bytes"
	"testing"

	"penstock.io/penstock/meta"
)

// A policy that an older program can say is coded as that program codes it, and
// what it sends is understood.
func TestPolicyOfBefore(t *testing.T) {
	old := []byte{100, 3, 2, 0, 1, 0, 1, 1} // quotas, replicas, largest chunk, four flags
	want := meta.Policy{QuotaBytes: 100, QuotaInodes: 3, Replicas: 2, SealOnClose: true, SyncOnClose: true, NoAtime: true, LocalFirst: true}
	c := coder{buf: old, dec: true}
	var p meta.Policy
	if c.policy(&p); c.err != nil || len(c.buf) != 0 || p != want {
		t.Fatalf("%+v, %v, %d bytes left; want %+v", p, c.err, len(c.buf), want)
	}
	c = coder{}
	if c.policy(&p); !bytes.Equal(c.buf, old) {
		t.Fatalf("coded as %v, was %v", c.buf, old)
	}
	c = coder{buf: []byte{0, 0, 1, 0, 0, 0, 0, 4}, dec: true}
	if c.policy(&p); c.err == nil {
		t.Fatal("words that nobody knows were let through")
	}
}
