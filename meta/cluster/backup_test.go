package cluster

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

var sample = &Backup{Cluster: "ABC", At: 1700000000000000000, Revision: 42, Records: []Record{
	{"format", []byte(`{"v":1}`)}, {"grants/0000000000000001", []byte(`{"v":1,"who":"client/a"}`)},
	{"volumes/00000001/journal/0000000000000001", bytes.Repeat([]byte{7}, 300)},
}}

// TestBackupFormat: a backup of the first version can be read for ever; each byte
// matters.
func TestBackupFormat(t *testing.T) {
	path := filepath.Join("testdata", "backup-v1")
	kept, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(kept, sample.Encode()) {
		t.Errorf("%s is written otherwise now", path)
	}
	got, err := DecodeBackup(kept)
	if err != nil || !reflect.DeepEqual(got, sample) {
		t.Fatalf("DATA: %+v, %v", got, err)
	}
	for i := range kept {
		bad := bytes.Clone(kept)
		bad[i] ^= 1
		if _, err := DecodeBackup(bad); !errors.Is(err, meta.Corrupt) && !errors.Is(err, meta.Version) {
			t.Fatalf("byte %d changed: %v", i, err)
		}
		if _, err := DecodeBackup(kept[:i]); !errors.Is(err, meta.Corrupt) {
			t.Fatalf("cut at %d: %v", i, err)
		}
	}
	newer := bytes.Clone(kept)
	newer[2] = 2
	if _, err := DecodeBackup(newer); !errors.Is(err, meta.Version) {
		t.Fatal(err)
	}
}

func FuzzDecodeBackup(f *testing.F) {
	f.Add(sample.Encode())
	f.Add((&Backup{Cluster: "x"}).Encode())
	f.Add([]byte("PB\x01\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := DecodeBackup(b)
		if err == nil && !bytes.Equal(got.Encode(), b) {
			// Only lengths may have more than one encoding.
			if again, err := DecodeBackup(got.Encode()); err != nil || !reflect.DeepEqual(again, got) {
				t.Fatalf("DATA: %+v, %v", again, err)
			}
		}
		if err == nil {
			got.VolumeRecords()
		}
	})
}

// TestTakeBackup: a backup is of one revision, whatever changes in etcd meanwhile; it has
// secrets and journals, and no records with a lease.
func TestTakeBackup(t *testing.T) {
	t.Parallel()
	cli := client(t)
	if _, err := TakeBackup(t.Context(), cli, ""); !errors.Is(err, meta.NotFound) {
		t.Fatalf("of an empty etcd: %v", err)
	}
	c, err := Open(t.Context(), cli, Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	put := func(key, value string, opts ...clientv3.OpOption) {
		t.Helper()
		if _, err := cli.Put(t.Context(), c.prefix+"/"+key, value, opts...); err != nil {
			t.Fatal(err)
		}
	}
	lease, err := cli.Grant(t.Context(), 60)
	if err != nil {
		t.Fatal(err)
	}
	put("metaservers/m", "alive", clientv3.WithLease(lease.ID))
	put("capkeys", "secret")
	put("volumes/0000000a/term", "t")
	for i := range 3 * backupPage {
		put(fmt.Sprintf("volumes/0000000a/journal/%016x", i), "1")
	}
	if err := Absent(t.Context(), cli, ""); !errors.Is(err, meta.Exists) {
		t.Errorf("a cluster that is there may be restored over: %v", err)
	}
	if err := Overwritable(t.Context(), cli, ""); !errors.Is(err, meta.Busy) {
		t.Errorf("a cluster whose server lives may be written over: %v", err)
	}
	b, err := TakeBackup(t.Context(), cli, "")
	if err != nil {
		t.Fatal(err)
	}
	has := map[string]string{}
	for _, r := range b.ClusterRecords() {
		has[r.Key] = string(r.Value)
	}
	if b.Cluster != c.ID() || has["capkeys"] != "secret" || has["metaservers/m"] != "" || has["format"] == "" {
		t.Errorf("DATA: of %s: %v", b.Cluster, has)
	}
	if n := len(b.VolumeRecords()[10]); n != 3*backupPage+1 {
		t.Errorf("DATA: %d records of the volume's journal", n)
	}
}
