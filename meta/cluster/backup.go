package cluster

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// Backup is etcd's contents of a cluster at one revision: all records without a lease, so the
// cluster's records, including secrets, and every volume's journal since its checkpoint. The
// contents of files and of checkpoints are not included: chunk servers hold both.
//
// The backup's file, version 1; numbers are big-endian:
//
//	offset  size
//	     0     2  magic "PB"        2  1  version, 1        3  1  flags, 0
//	     4     8  when, nanoseconds since 1970
//	    12     8  etcd's revision
//	    20        uvarint length | the cluster's id
//	              uvarint records | records * ( uvarint length | key | uvarint length | value ), keys ascending
//	  last    32  SHA-256 of all before
type Backup struct {
	Cluster  string
	At       meta.Time
	Revision int64
	Records  []Record
}

// BackupVersion is the newest backup format of this program.
const BackupVersion = 1

const (
	backupHeader = 20
	backupSum    = sha256.Size
)

// Encode gives the bytes of the file.
func (b *Backup) Encode() []byte {
	out := []byte{'P', 'B', BackupVersion, 0}
	out = binary.BigEndian.AppendUint64(out, uint64(b.At))
	out = binary.BigEndian.AppendUint64(out, uint64(b.Revision))
	put := func(p []byte) { out = append(binary.AppendUvarint(out, uint64(len(p))), p...) }
	put([]byte(b.Cluster))
	out = binary.AppendUvarint(out, uint64(len(b.Records)))
	for _, r := range b.Records {
		put([]byte(r.Key))
		put(r.Value)
	}
	sum := sha256.Sum256(out)
	return append(out, sum[:]...)
}

// DecodeBackup decodes a complete backup, or says why it can't be used. Errors: Corrupt,
// Version.
func DecodeBackup(b []byte) (*Backup, error) {
	const op = "read backup"
	corrupt := func(why string) (*Backup, error) { return nil, meta.E(op, meta.Corrupt, "", errors.New(why)) }
	if len(b) < 4 || b[0] != 'P' || b[1] != 'B' {
		return corrupt("this is no backup of a cluster")
	}
	if b[2] > BackupVersion {
		return nil, meta.E(op, meta.Version, "", fmt.Errorf("it has format %d, this program knows up to %d: use a newer program", b[2], BackupVersion))
	}
	if len(b) < backupHeader+backupSum {
		return corrupt("it ends too early")
	}
	body := b[:len(b)-backupSum]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], b[len(body):]) {
		return corrupt("its checksum does not match: it was cut or changed")
	}
	if b[2] != BackupVersion || b[3] != 0 {
		return corrupt("version or flags")
	}
	out := &Backup{At: meta.Time(binary.BigEndian.Uint64(b[4:])), Revision: int64(binary.BigEndian.Uint64(b[12:]))}
	rest, ok := body[backupHeader:], true
	number := func() uint64 {
		n, used := binary.Uvarint(rest)
		if ok = ok && used > 0; !ok {
			return 0
		}
		rest = rest[used:]
		return n
	}
	take := func() (p []byte) {
		n := number()
		if ok = ok && n <= uint64(len(rest)); !ok {
			return nil
		}
		p, rest = rest[:n:n], rest[n:]
		return p
	}
	out.Cluster = string(take())
	n := number()
	if !ok || n > uint64(len(rest))/2 || out.Cluster == "" {
		return corrupt("the cluster or the number of records")
	}
	last := ""
	for range n {
		r := Record{string(take()), take()}
		if !ok || r.Key <= last {
			return corrupt("records")
		}
		out.Records, last = append(out.Records, r), r.Key
	}
	if len(rest) != 0 {
		return corrupt("bytes after the end")
	}
	return out, nil
}

// backupTries bounds how often a backup starts again because owners compacted the revision of
// the backup.
const backupTries = 50

// backupPage bounds the records of one read: journal entries may be large.
const backupPage = 64

// TakeBackup reads the whole cluster at one revision. Errors: NotFound (etcd has no such
// cluster), Version, Unavailable.
func TakeBackup(ctx context.Context, cli *clientv3.Client, name string) (*Backup, error) {
	const op = "back up cluster"
	prefix, err := prefixOf(op, Config{Name: name})
	if err != nil {
		return nil, err
	}
	for try := 0; ; try++ {
		b, err := takeBackup(ctx, cli, prefix)
		if !errors.Is(err, rpctypes.ErrCompacted) || try == backupTries {
			return b, err
		}
	}
}

func takeBackup(ctx context.Context, cli *clientv3.Client, prefix string) (*Backup, error) {
	const op = "back up cluster"
	b := &Backup{At: meta.Time(time.Now().UnixNano())}
	r, err := cli.Get(ctx, prefix+"/format")
	if err != nil {
		return nil, wrap(op, prefix, err)
	}
	if len(r.Kvs) == 0 {
		return nil, meta.E(op, meta.NotFound, prefix, errors.New("etcd holds no cluster of this name"))
	}
	f, err := decode[Format](r.Kvs[0].Key, r.Kvs[0].Value)
	if err != nil {
		return nil, err
	}
	if f.Format > FormatVersion {
		return nil, meta.E(op, meta.Version, prefix, fmt.Errorf("its format is %d, this program knows up to %d: use a newer program", f.Format, FormatVersion))
	}
	b.Cluster, b.Revision = f.ID, r.Header.Revision
	end := clientv3.GetPrefixRangeEnd(prefix + "/")
	for from, more := prefix+"/", true; more; {
		r, err := cli.Get(ctx, from, clientv3.WithRange(end), clientv3.WithLimit(backupPage), clientv3.WithRev(b.Revision))
		if err != nil {
			return nil, wrap(op, prefix, err)
		}
		for _, kv := range r.Kvs {
			from = string(kv.Key) + "\x00"
			if kv.Lease == 0 { // records under leases only say which processes run
				b.Records = append(b.Records, Record{strings.TrimPrefix(string(kv.Key), prefix+"/"), kv.Value})
			}
		}
		more = r.More
	}
	return b, nil
}

// volumesKey begins the keys of volumes' journals.
const volumesKey = "volumes/"

// ClusterRecords returns the records that belong to no journal.
func (b *Backup) ClusterRecords() (all []Record) {
	for _, r := range b.Records {
		if !strings.HasPrefix(r.Key, volumesKey) {
			all = append(all, r)
		}
	}
	return all
}

// VolumeRecords returns the records of the journals, by volume; keys are without the volume's
// prefix.
func (b *Backup) VolumeRecords() map[meta.VolumeID][]Record {
	all := map[meta.VolumeID][]Record{}
	for _, r := range b.Records {
		rest, ok := strings.CutPrefix(r.Key, volumesKey)
		if !ok {
			continue
		}
		var v uint32
		hex, key, ok := strings.Cut(rest, "/")
		if n, err := fmt.Sscanf(hex, "%08x", &v); !ok || err != nil || n != 1 {
			continue
		}
		all[meta.VolumeID(v)] = append(all[meta.VolumeID(v)], Record{key, r.Value})
	}
	return all
}
