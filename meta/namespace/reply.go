package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// Reply records make a re-sent operation exactly-once: they are journaled with
// the operation's effects and hold what the first answer gave out (numbers,
// times, attributes). Parents' attributes are not kept; a client that replays
// reads them again.
//
//	reply  01 bits:1 off:n  [ino:n len:n inodeRecord]  [the same again]  chunks:n (chunk:16 len:n chunkRecord)*
//	       bits&1 Attr, bits&2 Attr2, bits&4 Existed, bits&8 EOF
const replyV1 = 1

const (
	replyAttr = 1 << iota
	replyAttr2
	replyExisted
	replyEOF
)

// PutReply is the effect that records an operation's result under the journal
// entry that carries it.
func PutReply(s meta.SessionID, seq meta.Seq, op meta.OpID, res *meta.Result) Effect {
	var bits byte
	if res.Attr.Ino != 0 {
		bits |= replyAttr
	}
	if res.Attr2.Ino != 0 {
		bits |= replyAttr2
	}
	if res.Existed {
		bits |= replyExisted
	}
	if res.EOF {
		bits |= replyEOF
	}
	b := make([]byte, 0, 160)
	b = appendReplyKey(b, s, seq, op)
	n := len(b)
	b = append(b, replyV1, bits)
	b = binary.AppendUvarint(b, res.Off)
	var rec [128]byte
	for _, a := range [...]*meta.Attr{&res.Attr, &res.Attr2} {
		if a.Ino != 0 {
			in := inode{Attr: *a}
			b = binary.AppendUvarint(b, uint64(a.Ino))
			b = appendBytes(b, appendInode(rec[:0], &in))
		}
	}
	b = binary.AppendUvarint(b, uint64(len(res.Chunks)))
	for i := range res.Chunks {
		c := chunk{ChunkRecord: res.Chunks[i]}
		id := c.ID.Bytes()
		b = append(b, id[:]...)
		b = appendBytes(b, appendChunk(rec[:0], &c))
	}
	return Effect{Put, b[:n:n], b[n:]}
}

// DeleteReplies is the effect that forgets a session's replies of the journal
// entries after from, up to and with to: the client has acknowledged them. The
// range begins where the one before ended, so that nobody walks over what is
// deleted already.
func DeleteReplies(s meta.SessionID, from, to meta.Seq) Effect {
	lo := binary.BigEndian.AppendUint64([]byte{prefixReply}, uint64(s))
	hi := binary.BigEndian.AppendUint64(lo[:9:9], uint64(to)+1)
	lo = binary.BigEndian.AppendUint64(lo[:9:9], uint64(from)+1)
	return Effect{DeleteRange, lo, hi}
}

// DecodeReply reads a reply record: its key and value as Replies gives them.
func DecodeReply(key, val []byte) (s meta.SessionID, seq meta.Seq, op meta.OpID, res *meta.Result, err error) {
	if len(key) != 37 || key[0] != prefixReply {
		return 0, 0, op, nil, fail("decode reply", meta.Corrupt, fmt.Sprintf("key %x", key))
	}
	s = meta.SessionID(binary.BigEndian.Uint64(key[1:]))
	seq = meta.Seq(binary.BigEndian.Uint64(key[9:]))
	op = meta.OpID{Incarnation: binary.BigEndian.Uint64(key[17:]), Unique: binary.BigEndian.Uint64(key[25:]), Step: binary.BigEndian.Uint32(key[33:])}
	d := decoder{b: val}
	if err := d.version(replyV1, "reply"); err != nil {
		return s, seq, op, nil, err
	}
	res = &meta.Result{}
	bits := d.byte()
	res.Existed, res.EOF = bits&replyExisted != 0, bits&replyEOF != 0
	res.Off = d.uint()
	for i, a := range [...]*meta.Attr{&res.Attr, &res.Attr2} {
		if bits>>i&1 == 0 {
			continue
		}
		ino := meta.Ino(d.uint())
		rec := d.bytes()
		if d.bad {
			break
		}
		var in inode
		if err := decodeInode(rec, ino, &in); err != nil {
			return s, seq, op, nil, err
		}
		*a = in.Attr
	}
	n := d.uint()
	for range min(n, maxAlloc) {
		id := meta.ChunkID{}
		if len(d.b) >= 16 {
			id, d.b = meta.ChunkIDFromBytes(d.b), d.b[16:]
		}
		rec := d.bytes()
		if d.bad {
			break
		}
		c, err := decodeChunk(rec, id)
		if err != nil {
			return s, seq, op, nil, err
		}
		res.Chunks = append(res.Chunks, c.ChunkRecord)
	}
	if n > maxAlloc {
		d.bad = true
	}
	return s, seq, op, res, d.end("reply")
}
