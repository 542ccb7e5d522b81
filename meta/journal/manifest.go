package journal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"penstock.io/penstock/meta"
)

// Manifest is a self-contained checkpoint: from the manifest's blob and the blobs of the files,
// a volume can be restored when everything in etcd is lost. A manifest is these bytes, all
// numbers big-endian:
//
//	offset  size
//	     0     2  magic "PF"
//	     2     1  version, 1
//	     3     1  flags, 0
//	     4     4  volume
//	     8     8  sequence number
//	    16    16  hash of the entry with this number
//	    32     8  term of the owner that made the checkpoint
//	    40     8  time of the making, nanoseconds since 1970
//	    48        uvarint length | cluster's id
//	              uvarint length | the volume's row, JSON
//	              uvarint length | entry Seq as in the journal; a restored log
//	                               continues after entry Seq
//	              uvarint records | records * ( uvarint length | key |
//	                               uvarint length | value ): of the cluster, in
//	                               the root volume's manifests only
//	              the list of files, as in a checkpoint record
//	  last     4  CRC32C (Castagnoli) of all bytes before
type Manifest struct {
	Cluster string
	Checkpoint
	Written meta.Time
	Row     []byte
	Entry   []byte
	Records []KeyValue
}

// KeyValue is one record of the cluster; the key has no cluster prefix.
type KeyValue struct{ Key, Value []byte }

// ManifestVersion is the manifest format of this program.
const ManifestVersion = 1

const (
	manifestHeader = 48
	maxRecords     = 1 << 24
)

// EncodeManifest gives the manifest's bytes. Errors: ResourceExceeded.
func EncodeManifest(m Manifest) ([]byte, error) {
	b := make([]byte, manifestHeader, 64<<10)
	b[0], b[1], b[2] = 'P', 'F', ManifestVersion
	binary.BigEndian.PutUint32(b[4:], uint32(m.Volume))
	binary.BigEndian.PutUint64(b[8:], uint64(m.Seq))
	copy(b[16:], m.Hash[:])
	binary.BigEndian.PutUint64(b[32:], uint64(m.Term))
	binary.BigEndian.PutUint64(b[40:], uint64(m.Written))
	put := func(p []byte) { b = append(binary.AppendUvarint(b, uint64(len(p))), p...) }
	put([]byte(m.Cluster))
	put(m.Row)
	put(m.Entry)
	b = binary.AppendUvarint(b, uint64(len(m.Records)))
	for _, r := range m.Records {
		put(r.Key)
		put(r.Value)
	}
	b, err := appendFiles(b, m.Files)
	if err != nil {
		return nil, err
	}
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli)), nil
}

// DecodeManifest decodes the output of EncodeManifest. Errors: Corrupt, Version.
func DecodeManifest(b []byte) (Manifest, error) {
	corrupt := func(why string) (Manifest, error) {
		return Manifest{}, meta.E("decode manifest", meta.Corrupt, "", fmt.Errorf("%s", why))
	}
	if len(b) < 9 || b[0] != 'P' || b[1] != 'F' {
		return corrupt("no manifest")
	}
	switch {
	case b[2] > ManifestVersion:
		return Manifest{}, meta.E("decode manifest", meta.Version, "",
			fmt.Errorf("it has format %d, this program knows format %d", b[2], ManifestVersion))
	case len(b) < manifestHeader+4:
		return corrupt("short")
	}
	body := b[:len(b)-4]
	if crc32.Checksum(body, castagnoli) != binary.BigEndian.Uint32(b[len(b)-4:]) {
		return corrupt("checksum")
	}
	if b[2] != ManifestVersion || b[3] != 0 {
		return corrupt("version or flags")
	}
	m := Manifest{Checkpoint: Checkpoint{
		Volume:   meta.VolumeID(binary.BigEndian.Uint32(b[4:])),
		Position: Position{Seq: meta.Seq(binary.BigEndian.Uint64(b[8:])), Hash: Hash(b[16:32])},
		Term:     meta.Term(binary.BigEndian.Uint64(b[32:])),
	}, Written: meta.Time(binary.BigEndian.Uint64(b[40:]))}
	rest, ok := body[manifestHeader:], true
	take := func() (p []byte) {
		n, used := binary.Uvarint(rest)
		if ok = ok && used > 0 && n <= uint64(len(rest)-used); !ok {
			return nil
		}
		p, rest = rest[used:used+int(n):used+int(n)], rest[used+int(n):]
		return p
	}
	m.Cluster, m.Row, m.Entry = string(take()), take(), take()
	n, used := binary.Uvarint(rest)
	if !ok || used <= 0 || n > maxRecords || n > uint64(len(rest))/2 {
		return corrupt("fields")
	}
	rest = rest[used:]
	for range n {
		m.Records = append(m.Records, KeyValue{take(), take()})
	}
	if !ok {
		return corrupt("records")
	}
	var err error
	if m.Files, rest, err = takeFiles(rest); err != nil {
		return Manifest{}, err
	}
	if len(rest) != 0 {
		return corrupt("bytes after the end")
	}
	return m, nil
}

// LooksLikeManifest reports whether a blob with the first bytes head may be a manifest.
func LooksLikeManifest(head []byte) bool {
	return len(head) >= 4 && head[0] == 'P' && head[1] == 'F' && head[2] >= ManifestVersion && head[3] == 0
}
