package namespace

import (
	"encoding/binary"

	"penstock.io/penstock/meta"
)

// Keys. All numbers are big-endian, to make the store's order useful. A key with versions for
// snapshots ends with gen: the complement (^) of the generation of the write, 4 bytes, so the
// newest version not after generation G is the first key at or after base+^G. Names end with a
// zero byte, which no name contains, so no other name's keys lie among the versions of a name.
//
//	v                                     the volume: counters, policy       1 byte
//	i ino:8 gen:4                         inode                             13 bytes
//	d parent:8 name 00 gen:4              directory entry by name           14 + name
//	r parent:8 cookie:8 gen:4             directory entry by position       21 bytes
//	e ino:8 end:8 gen:4                   extent, by its end in the file    21 bytes
//	x ino:8 name 00 gen:4                 extended attribute                14 + name
//	c chunk:16                            chunk                             17 bytes
//	k chunk:16                            chunk whose deletion is due       17 bytes
//	w session:8 chunk:16                  open chunk of a session           25 bytes
//	o session:8 ino:8                     unlinked inode held open          17 bytes
//	n session:8                           session                            9 bytes
//	p session:8 seq:8 inc:8 uniq:8 step:4 reply of an operation             37 bytes
//	q ino:8                               inode with extents to reap         9 bytes
//	s gen:4                               snapshot, not complemented         5 bytes
//	b snap:4 key                          version that snapshots alone see   5 + key
//	g gen:4 ino:8                         inode changed in a generation     13 bytes
//	h gen:4 parent:8 name                 entry changed in a generation     13 + name
//	f gen:4 clone:4                       volume cloned from a snapshot      9 bytes
//	t snap:4 holder                       pin of a snapshot                  5 + holder
//	m snap:4                              digest of a snapshot               5 bytes
//	j snap:4                              index of a snapshot                5 bytes
//	y number:8                            event                              9 bytes
//	z session:8 ino:8                     file being changed, for an event  17 bytes
//	u                                     target of a mirror                 1 byte
//	a                                     advisory quotas that are crossed   1 byte
//	l                                     last epoch of a leadership         1 byte
//	l ino:8                               leader of a file                   9 bytes
//
// snap in a key of prefix b is the youngest snapshot that sees the version whose key follows
// (buried there when it was superseded). g and h are written from the first snapshot on; with g
// and h, two snapshots are compared in time proportional to the number of changes.
//
// An extent's key holds the offset after the extent's last byte, not the first offset: the
// extents at or after a file offset are then a single ascending scan, including the extent
// across the offset, and the store needs no backward seek.
const (
	prefixVolume  = 'v'
	prefixInode   = 'i'
	prefixDentry  = 'd'
	prefixCookie  = 'r'
	prefixExtent  = 'e'
	prefixXattr   = 'x'
	prefixChunk   = 'c'
	prefixDelete  = 'k'
	prefixWriter  = 'w'
	prefixOrphan  = 'o'
	prefixSession = 'n'
	prefixReply   = 'p'
	prefixReap    = 'q'
	prefixSnap    = 's'
	prefixBuried  = 'b'
	prefixInoGen  = 'g'
	prefixNameGen = 'h'
	prefixClone   = 'f'
	prefixPin     = 't'
	prefixDigest  = 'm'
	prefixIndex   = 'j'
	prefixEvent   = EventPrefix
	prefixChanger = 'z'
	prefixMirror  = 'u'
	prefixOver    = 'a'
	prefixLeader  = 'l'
)

// EventPrefix is the first byte of the keys of events. No operation reads them.
const EventPrefix = 'y'

// firstGen is the live generation of a volume without snapshots.
const firstGen = 1

// genLen is the length of the generation that ends versioned keys.
const genLen = 4

var volumeKey = []byte{prefixVolume}

func putGen(b []byte, gen uint32) []byte { return binary.BigEndian.AppendUint32(b, ^gen) }

func appendInodeBase(b []byte, ino meta.Ino) []byte {
	return binary.BigEndian.AppendUint64(append(b, prefixInode), uint64(ino))
}

func appendDentryBase(b []byte, parent meta.Ino, name string) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixDentry), uint64(parent))
	return append(append(b, name...), 0)
}

func appendCookieBase(b []byte, parent meta.Ino, cookie uint64) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixCookie), uint64(parent))
	return binary.BigEndian.AppendUint64(b, cookie)
}

func appendExtentBase(b []byte, ino meta.Ino, end uint64) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixExtent), uint64(ino))
	return binary.BigEndian.AppendUint64(b, end)
}

func appendXattrBase(b []byte, ino meta.Ino, name string) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixXattr), uint64(ino))
	return append(append(b, name...), 0)
}

func appendChunkKey(b []byte, prefix byte, id meta.ChunkID) []byte {
	b = binary.BigEndian.AppendUint32(append(b, prefix), uint32(id.Volume))
	b = binary.BigEndian.AppendUint32(b, id.Term)
	return binary.BigEndian.AppendUint64(b, id.Counter)
}

func appendWriterKey(b []byte, s meta.SessionID, id meta.ChunkID) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixWriter), uint64(s))
	b = binary.BigEndian.AppendUint32(b, uint32(id.Volume))
	b = binary.BigEndian.AppendUint32(b, id.Term)
	return binary.BigEndian.AppendUint64(b, id.Counter)
}

func appendOrphanKey(b []byte, s meta.SessionID, ino meta.Ino) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixOrphan), uint64(s))
	return binary.BigEndian.AppendUint64(b, uint64(ino))
}

func appendSessionKey(b []byte, s meta.SessionID) []byte {
	return binary.BigEndian.AppendUint64(append(b, prefixSession), uint64(s))
}

func appendReplyKey(b []byte, s meta.SessionID, seq meta.Seq, op meta.OpID) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixReply), uint64(s))
	b = binary.BigEndian.AppendUint64(b, uint64(seq))
	b = binary.BigEndian.AppendUint64(b, op.Incarnation)
	b = binary.BigEndian.AppendUint64(b, op.Unique)
	return binary.BigEndian.AppendUint32(b, op.Step)
}

func appendReapKey(b []byte, ino meta.Ino) []byte {
	return binary.BigEndian.AppendUint64(append(b, prefixReap), uint64(ino))
}

func appendSnapKey(b []byte, gen uint32) []byte {
	return binary.BigEndian.AppendUint32(append(b, prefixSnap), gen)
}

func appendDigestKey(b []byte, snap uint32) []byte {
	return binary.BigEndian.AppendUint32(append(b, prefixDigest), snap)
}

func appendIndexKey(b []byte, snap uint32) []byte {
	return binary.BigEndian.AppendUint32(append(b, prefixIndex), snap)
}

func appendEventKey(b []byte, seq uint64) []byte {
	return binary.BigEndian.AppendUint64(append(b, prefixEvent), seq)
}

func appendChangerKey(b []byte, s meta.SessionID, ino meta.Ino) []byte {
	b = binary.BigEndian.AppendUint64(append(b, prefixChanger), uint64(s))
	return binary.BigEndian.AppendUint64(b, uint64(ino))
}

func appendPinKey(b []byte, snap uint32, holder string) []byte {
	return append(binary.BigEndian.AppendUint32(append(b, prefixPin), snap), holder...)
}

func appendBuriedKey(b []byte, snap uint32, key []byte) []byte {
	return append(binary.BigEndian.AppendUint32(append(b, prefixBuried), snap), key...)
}

func appendCloneKey(b []byte, gen uint32, clone meta.VolumeID) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(append(b, prefixClone), gen), uint32(clone))
}

func appendInoGenKey(b []byte, gen uint32, ino meta.Ino) []byte {
	b = binary.BigEndian.AppendUint32(append(b, prefixInoGen), gen)
	return binary.BigEndian.AppendUint64(b, uint64(ino))
}

func appendNameGenKey(b []byte, gen uint32, parent meta.Ino, name string) []byte {
	b = binary.BigEndian.AppendUint32(append(b, prefixNameGen), gen)
	return append(binary.BigEndian.AppendUint64(b, uint64(parent)), name...)
}

// after returns the smallest key after all keys that begin with b. Such a key always exists,
// because no prefix byte of this package is 0xff.
func after(b []byte) []byte {
	n := append([]byte(nil), b...)
	for i := len(n) - 1; i >= 0; i-- {
		n[i]++
		if n[i] != 0 {
			return n[:i+1]
		}
	}
	panic("namespace: no key follows a prefix of 0xff bytes")
}
