package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

//
// Records of the places of snapshots' indexes. The chunks of an index are counted like chunks
// of files, and so are repaired, moved and deleted like chunks of files.

func (t *tx) setIndex(op *meta.SetIndex, res *meta.Result) error {
	const name = "set index"
	if len(op.Index.Parts) == 0 {
		return t.dropIndex(uint32(op.At))
	}
	sn, err := t.snaps().snapshotAt(uint32(op.At))
	if err != nil {
		return err
	}
	have, ok, err := t.index(sn.gen)
	if err != nil {
		return err
	}
	if ok && have.Version >= op.Index.Version {
		res.Existed = true
		return nil
	}
	if err := t.dropIndex(sn.gen); err != nil {
		return err
	}
	x := &op.Index
	var length uint64
	for i, p := range x.Parts {
		for _, q := range x.Parts[:i] {
			if q.Chunk == p.Chunk {
				return fail(name, meta.Invalid, fmt.Sprintf("chunk %v twice", p.Chunk))
			}
		}
		if p.Length == 0 || p.Chunk.IsZero() {
			return fail(name, meta.Invalid, fmt.Sprintf("%d bytes of chunk %v", p.Length, p.Chunk))
		}
		if err := t.content().checkNew(meta.Extent{Len: p.Length, Chunk: p.Chunk}); err != nil {
			return err
		}
		c, err := t.chunk(p.Chunk)
		if err != nil {
			return err
		}
		c.Live += p.Length
		length += p.Length
	}
	if x.Version == 0 || x.Inodes == 0 || x.Length != length || len(x.Parts) > meta.MaxIndexParts {
		return fail(name, meta.Invalid, fmt.Sprintf("form %d of %d inodes, %d bytes in %d parts that have %d", x.Version, x.Inodes, x.Length, len(x.Parts), length))
	}
	s := t.mark()
	t.buf = appendIndexKey(t.buf, sn.gen)
	v := len(t.buf)
	t.buf = appendIndex(t.buf, x)
	t.putAt(s, v)
	return nil
}

func (t *tx) index(snap uint32) (x meta.SnapshotIndex, ok bool, err error) {
	b, ok, err := t.r.Get(appendIndexKey(nil, snap))
	if err != nil || !ok {
		return x, false, err
	}
	x, err = decodeIndex(b)
	return x, err == nil, err
}

// dropIndex removes the record of a snapshot's index, together with the index's chunks.
func (t *tx) dropIndex(snap uint32) error {
	x, ok, err := t.index(snap)
	if err != nil || !ok {
		return err
	}
	for _, p := range x.Parts {
		c, err := t.chunk(p.Chunk)
		if err != nil {
			return err
		}
		if c.Live < p.Length {
			return fail("drop index", meta.Corrupt, fmt.Sprintf("chunk %v counts %d live bytes, an index holds %d", p.Chunk, c.Live, p.Length))
		}
		c.Live -= p.Length
	}
	s := t.mark()
	t.buf = appendIndexKey(t.buf, snap)
	t.deleteAt(s)
	return nil
}

// Indexes tells the recorded indexes of a volume's snapshots.
func Indexes(r Reader) (map[meta.Generation]meta.SnapshotIndex, error) {
	all := map[meta.Generation]meta.SnapshotIndex{}
	err := eachKey(r, []byte{prefixIndex}, 5, func(k, v []byte) (bool, error) {
		x, err := decodeIndex(v)
		all[meta.Generation(binary.BigEndian.Uint32(k[1:]))] = x
		return err == nil, err
	})
	return all, err
}

// InodesAt visits the attributes of the inodes with a name in a snapshot, from inode number
// from on, in ascending order, until fn returns false. fn must not read the store. Errors:
// NoSuchSnapshot.
func InodesAt(r Reader, at meta.Generation, from meta.Ino, fn func(a *meta.Attr) bool) error {
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return err
	}
	sn, err := t.snaps().snapshotAt(uint32(at))
	if err != nil {
		return err
	}
	t.gen = sn.gen
	lo := appendInodeBase(nil, from)
	var in inode
	return t.scan(lo, []byte{prefixInode + 1}, func(base, val []byte, _ uint32) (bool, error) {
		if len(base) != 9 {
			return false, fail("scan", meta.Corrupt, fmt.Sprintf("key %x", base))
		}
		in = inode{}
		if err := decodeInode(val, meta.Ino(binary.BigEndian.Uint64(base[1:])), &in); err != nil {
			return false, err
		}
		return in.Nlink == 0 || fn(&in.Attr), nil
	})
}

func decodeIndex(b []byte) (x meta.SnapshotIndex, err error) {
	d := decoder{b: b}
	if err := d.version(indexV1, "index"); err != nil {
		return x, err
	}
	x.Version = d.byte()
	if len(d.b) < len(x.Sum) {
		return x, fail("index", meta.Corrupt, fmt.Sprintf("%d bytes", len(b)))
	}
	copy(x.Sum[:], d.b)
	d.b = d.b[len(x.Sum):]
	x.Length, x.Inodes = d.uint(), d.uint()
	x.Made = meta.Time(d.fixed64())
	n := d.uint()
	var sum uint64
	if x.Version == 0 || x.Inodes == 0 || n == 0 || n > meta.MaxIndexParts {
		d.bad = true
	}
	for ; n > 0 && !d.bad; n-- {
		p := meta.IndexPart{Chunk: meta.ChunkID{Volume: meta.VolumeID(d.uint32()), Term: d.uint32(), Counter: d.uint()}, Length: d.uint()}
		sum += p.Length
		x.Parts = append(x.Parts, p)
	}
	if sum != x.Length {
		d.bad = true
	}
	return x, d.end("index")
}

func appendIndex(b []byte, x *meta.SnapshotIndex) []byte {
	b = append(b, indexV1, x.Version)
	b = append(b, x.Sum[:]...)
	b = binary.AppendUvarint(b, x.Length)
	b = binary.AppendUvarint(b, x.Inodes)
	b = binary.BigEndian.AppendUint64(b, uint64(x.Made))
	b = binary.AppendUvarint(b, uint64(len(x.Parts)))
	for _, p := range x.Parts {
		b = binary.AppendUvarint(b, uint64(p.Chunk.Volume))
		b = binary.AppendUvarint(b, uint64(p.Chunk.Term))
		b = binary.AppendUvarint(b, p.Chunk.Counter)
		b = binary.AppendUvarint(b, p.Length)
	}
	return b
}
