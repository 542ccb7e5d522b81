package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

//
// Records of computed digests of snapshots.

func (t *tx) setDigest(op *meta.SetDigest) error {
	sn, err := t.snaps().snapshotAt(uint32(op.At))
	if err != nil {
		return err
	}
	key := appendDigestKey(nil, sn.gen)
	if _, have, err := t.r.Get(key); err != nil || have {
		return err
	}
	s := t.mark()
	t.buf = append(t.buf, key...)
	v := len(t.buf)
	t.buf = appendDigest(t.buf, &op.Digest)
	t.putAt(s, v)
	return nil
}

func (t *tx) dropDigest(snap uint32) {
	key := appendDigestKey(nil, snap)
	if _, have, err := t.r.Get(key); err == nil && !have {
		return
	}
	s := t.mark()
	t.buf = append(t.buf, key...)
	t.deleteAt(s)
}

// Digests tells the recorded digests of a volume's snapshots.
func Digests(r Reader) (map[meta.Generation]meta.SnapshotDigest, error) {
	all := map[meta.Generation]meta.SnapshotDigest{}
	err := eachKey(r, []byte{prefixDigest}, 5, func(k, v []byte) (bool, error) {
		d, err := decodeDigest(v)
		all[meta.Generation(binary.BigEndian.Uint32(k[1:]))] = d
		return err == nil, err
	})
	return all, err
}

func decodeDigest(b []byte) (s meta.SnapshotDigest, err error) {
	d := decoder{b: b}
	if err := d.version(digestV1, "digest"); err != nil {
		return s, err
	}
	s.Version = d.byte()
	if len(d.b) < len(s.Sum) {
		return s, fail("digest", meta.Corrupt, fmt.Sprintf("%d bytes", len(b)))
	}
	copy(s.Sum[:], d.b)
	d.b = d.b[len(s.Sum):]
	s.Made = meta.Time(d.fixed64())
	s.Inodes, s.Bytes, s.Read = d.uint(), d.uint(), d.uint()
	if s.Version == 0 || s.Inodes == 0 || s.Read > s.Bytes {
		d.bad = true
	}
	return s, d.end("digest")
}

func appendDigest(b []byte, s *meta.SnapshotDigest) []byte {
	b = append(b, digestV1, s.Version)
	b = append(b, s.Sum[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(s.Made))
	b = binary.AppendUvarint(b, s.Inodes)
	b = binary.AppendUvarint(b, s.Bytes)
	return binary.AppendUvarint(b, s.Read)
}
