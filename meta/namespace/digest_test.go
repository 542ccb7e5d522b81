package namespace

import (
	"bytes"
	"testing"

	"penstock.io/penstock/meta"
)

// TestDigestRecords: a snapshot has one digest, the first recorded one; the digest goes
// with the snapshot, a clone has none, and damage is seen.
func TestDigestRecords(t *testing.T) {
	f := newFixture(t)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "one"}).Off)
	d := meta.SnapshotDigest{Version: 1, Sum: [32]byte{1, 2, 3}, Made: f.now, Inodes: 7, Bytes: 1 << 40, Read: 5}
	f.do(&meta.SetDigest{At: at, Digest: d})
	other := d
	other.Sum[0]++
	f.do(&meta.SetDigest{At: at, Digest: other})
	f.fails(meta.NoSuchSnapshot, &meta.SetDigest{At: at + 1, Digest: d})
	all, err := Digests(f.s)
	if err != nil || len(all) != 1 || all[at] != d {
		t.Fatal(all, err)
	}
	l, err := CloneEffects(f.s, at, testVolume+1, meta.Policy{}, f.now)
	if err != nil {
		t.Fatal(err)
	}
	clone := &memStore{f.s.t.Clone()}
	clone.apply(l)
	if all, err := Digests(clone); err != nil || len(all) != 0 {
		t.Fatal(all, err)
	}
	key := appendDigestKey(nil, uint32(at))
	v, _, _ := f.s.Get(key)
	good := bytes.Clone(v)
	for name, v := range map[string][]byte{
		"cut": good[:len(good)-1], "short": good[:9], "empty": nil, "longer": append(bytes.Clone(good), 1), "version": append([]byte{9}, good[1:]...),
		"more read than there is": appendDigest(nil, &meta.SnapshotDigest{Version: 1, Inodes: 1, Bytes: 1, Read: 2}),
	} {
		f.s.t.ReplaceOrInsert(memItem{key, v})
		if rep, err := Check(f.s); err != nil || rep.OK() {
			t.Errorf("%s: Check sees nothing (%v)", name, err)
		}
		if _, err := Digests(f.s); meta.KindOf(err) != meta.Corrupt && meta.KindOf(err) != meta.Version {
			t.Errorf("%s: %v", name, err)
		}
	}
	f.s.t.ReplaceOrInsert(memItem{key, good})
	f.check()
	for !f.do(&meta.DropSnapshot{At: at}).EOF {
	}
	if all, err := Digests(f.s); err != nil || len(all) != 0 {
		t.Fatal(all, err)
	}
}
