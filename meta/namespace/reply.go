package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// Reply records make a repeated operation exactly-once: a record is journaled with the
// operation's effects and has the values of the first answer (numbers, times, attributes). The
// record does not have the attributes of parents; a client that replays an operation reads the
// parents again.
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

// PutReply returns the effect that records an operation's result under the journal entry with
// the operation's effects.
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

// DeleteReplies returns the effect that deletes a session's replies of the journal entries
// after from up to and including to, which the client has acknowledged. The range begins at
// the end of the previous range, so that no scan passes deleted records.
func DeleteReplies(s meta.SessionID, from, to meta.Seq) Effect {
	lo := binary.BigEndian.AppendUint64([]byte{prefixReply}, uint64(s))
	hi := binary.BigEndian.AppendUint64(lo[:9:9], uint64(to)+1)
	lo = binary.BigEndian.AppendUint64(lo[:9:9], uint64(from)+1)
	return Effect{DeleteRange, lo, hi}
}

// DecodeReply decodes a reply record: the key and value from Replies.
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
