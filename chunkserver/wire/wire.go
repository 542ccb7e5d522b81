// Package wire owns the frames of the chunk data path, over TCP and Unix
// sockets alike. All integers are big-endian. A frame is a header, a body and
// data:
//
//	 0  4  "PSCF"
//	 4  1  version that brought this form of the frame: 1, so far
//	 5  1  type; replies have bit 7 set
//	 6  2  flags
//	 8  8  request id, chosen by the client, echoed in the reply
//	16  4  length of the body, at most MaxBody
//	20  4  length of the data, at most MaxData
//	24  4  CRC32C of the body
//	28  4  CRC32C of the data; zero with FlagRaw and FlagShared
//	32  4  zero
//	36  4  CRC32C of the header before
//
// The first 5 bytes are the same in every version, so that a peer of another
// version can be recognised and told the reason of the refusal. The first frame
// on a connection is Hello, in which each side names its highest version;
// replies come in any order. A frame that a later version changes has the
// number of that version, and is sent only if the other side's hello has named
// the version. All other frames stay unchanged and have the number 1, so that
// programs of two versions work together.
//
// A request's body begins with the capability (length 2, bytes); what follows, by type (id 16, fence 12):
//
//	1 hello   highest version 2, name (length 2, bytes)
//	2 append  id, fence, offset 8; the bytes are the frame's data, or with FlagShared: position 8, length 4, CRC32C 4 in the shared ring
//	3 sync    id, up to 8
//	4 read    id, offset 8, length 4
//	5 stat    id
//	6 seal    id, fence, final 1, length 8
//	7 delete  id, fence
//	8 local   id, first block 8, most blocks 4
//	9 ping    nothing
//	10 share  size 8; a memory file of that size comes along as a descriptor: the ring for FlagShared
//	11 ticket nothing
//
// A reply's body begins with the error kind 2 and a detail for people (length
// 2, bytes). If the kind is zero, then by type:
//
//	hello   version 2, server 8, host (length 2, bytes); with FlagTicket, random bytes (length 2, bytes)
//	ticket  ticket (length 2, bytes), secret (length 2, bytes), seconds that it holds 4
//	sync    synced 8
//	read    FlagRaw: checksums of the blocks, 4 each; the data is the bytes, unchecked. Else nothing; the data is the bytes
//	stat, seal  info
//	local   info, first block 8, ctime of a sealed chunk's data file 8 (ns since 1970); the data is the checksums, 4 each, then a bit each: verified. FlagDescriptor: a read-only descriptor comes along.
//	        The bits hold while ctime is the same. With FlagVerify in the request, the server verifies all of the chunk before
//
// Info is id, state 1, length 8, synced 8, fence, CRC32C 4. With a failed seal, info follows, too.
package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// Version is the highest protocol version of this program, and the only version so far.
const Version = 1

// Sizes in bytes.
const (
	HeaderSize = 40
	MaxBody    = 32 << 10
	MaxData    = chunkserver.MaxAppend
	// MaxLocal bounds the blocks in one Local reply (256 MiB).
	MaxLocal = 4096
)

// maxBody leaves room for the MAC of a ticketed connection.
const maxBody = MaxBody - MACSize

const magic = "PSCF"

// Type is the kind of request of a frame; answers have Reply set.
type Type uint8

// The types.
const (
	Hello Type = 1 + iota
	Append
	Sync
	Read
	Stat
	Seal
	Delete
	Local
	Ping
	Share
	Ticket
	lastType

	// Types bounds the types of requests.
	Types = int(lastType)

	Reply Type = 0x80
)

// Flags of a frame.
const (
	FlagRaw        uint16 = 1 << iota // read: whole blocks with their checksums, for the receiver to verify
	FlagDescriptor                    // local: the request asks for a descriptor, or the reply has one
	FlagShared                        // append: the bytes are in the shared ring
	FlagVerify                        // local: verify all of the chunk before answering
	FlagTicket                        // hello: on a ticketed connection, see mac.go
)

// Header is a decoded frame header.
type Header struct {
	Type    Type
	Flags   uint16
	ID      uint64
	Body    uint32
	Data    uint32
	BodyCRC uint32
	DataCRC uint32
}

// Put encodes the header into b[:HeaderSize].
func (h *Header) Put(b []byte) {
	_ = b[HeaderSize-1]
	copy(b, magic)
	b[4], b[5] = Version, byte(h.Type)
	binary.BigEndian.PutUint16(b[6:], h.Flags)
	binary.BigEndian.PutUint64(b[8:], h.ID)
	binary.BigEndian.PutUint32(b[16:], h.Body)
	binary.BigEndian.PutUint32(b[20:], h.Data)
	binary.BigEndian.PutUint32(b[24:], h.BodyCRC)
	binary.BigEndian.PutUint32(b[28:], h.DataCRC)
	binary.BigEndian.PutUint32(b[32:], 0)
	binary.BigEndian.PutUint32(b[36:], chunkserver.CRC(b[:36]))
}

// ParseHeader decodes and checks b[:HeaderSize]. Errors: Protocol; Version if the peer's
// version is another one.
func ParseHeader(b []byte) (h Header, err error) {
	const op = "read frame"
	_ = b[HeaderSize-1]
	if string(b[:4]) != magic {
		return h, meta.E(op, meta.Protocol, "", errors.New("no chunk protocol frame"))
	}
	if b[4] != Version {
		return h, meta.E(op, meta.Version, "", fmt.Errorf("the peer speaks version %d of the chunk protocol, this program version %d", b[4], Version))
	}
	if chunkserver.CRC(b[:36]) != binary.BigEndian.Uint32(b[36:]) {
		return h, meta.E(op, meta.Protocol, "", errors.New("header checksum"))
	}
	h = Header{
		Type: Type(b[5]), Flags: binary.BigEndian.Uint16(b[6:]), ID: binary.BigEndian.Uint64(b[8:]),
		Body: binary.BigEndian.Uint32(b[16:]), Data: binary.BigEndian.Uint32(b[20:]),
		BodyCRC: binary.BigEndian.Uint32(b[24:]), DataCRC: binary.BigEndian.Uint32(b[28:]),
	}
	if h.Body > MaxBody || h.Data > MaxData {
		return h, meta.E(op, meta.Protocol, "", fmt.Errorf("body of %d bytes, data of %d", h.Body, h.Data))
	}
	return h, nil
}

// CheckBody verifies a body against its header.
func (h *Header) CheckBody(b []byte) error {
	if chunkserver.CRC(b) != h.BodyCRC {
		return meta.E("read frame", meta.Protocol, "", errors.New("body checksum"))
	}
	return nil
}

// Request is the body of any request; its type determines the fields in use.
type Request struct {
	Cap    []byte
	Chunk  meta.ChunkID
	Fence  meta.Fence
	Off    uint64 // append, read; sync: up to; seal: length; local: first block; share: size
	N      uint32 // read: bytes; local: most blocks; append with FlagShared: bytes
	Pos    uint64 // append with FlagShared: position in the ring
	CRC    uint32 // append with FlagShared
	Final  bool
	Name   string // hello
	Speaks uint16 // hello: highest version
}

// AppendFrame appends a request frame without its data: n bytes of data with
// checksum crc must follow it on the wire.
func (q *Request) AppendFrame(b []byte, t Type, flags uint16, id uint64, n int, crc uint32) []byte {
	at := len(b)
	b = append(b, make([]byte, HeaderSize)...)
	b = appendBytes(b, q.Cap)
	switch t {
	case Hello:
		b = binary.BigEndian.AppendUint16(b, q.Speaks)
		b = appendBytes(b, []byte(q.Name))
	case Append:
		b = appendID(b, q.Chunk)
		b = appendFence(b, q.Fence)
		b = binary.BigEndian.AppendUint64(b, q.Off)
		if flags&FlagShared != 0 {
			b = binary.BigEndian.AppendUint64(b, q.Pos)
			b = binary.BigEndian.AppendUint32(b, q.N)
			b = binary.BigEndian.AppendUint32(b, q.CRC)
		}
	case Sync:
		b = binary.BigEndian.AppendUint64(appendID(b, q.Chunk), q.Off)
	case Read, Local:
		b = binary.BigEndian.AppendUint64(appendID(b, q.Chunk), q.Off)
		b = binary.BigEndian.AppendUint32(b, q.N)
	case Stat:
		b = appendID(b, q.Chunk)
	case Seal:
		b = appendFence(appendID(b, q.Chunk), q.Fence)
		b = append(b, bool8(q.Final))
		b = binary.BigEndian.AppendUint64(b, q.Off)
	case Delete:
		b = appendFence(appendID(b, q.Chunk), q.Fence)
	case Share:
		b = binary.BigEndian.AppendUint64(b, q.Off)
	case Ping, Ticket:
	default:
		panic(fmt.Sprintf("wire: no request of type %d", t))
	}
	finish(b[at:], t, flags, id, n, crc)
	return b
}

func finish(b []byte, t Type, flags uint16, id uint64, n int, crc uint32) {
	body := b[HeaderSize:]
	if len(body) > maxBody || n > MaxData {
		panic(fmt.Sprintf("wire: frame of type %d with a body of %d and data of %d bytes", t, len(body), n))
	}
	h := Header{Type: t, Flags: flags, ID: id, Body: uint32(len(body)), Data: uint32(n), BodyCRC: chunkserver.CRC(body), DataCRC: crc}
	h.Put(b)
}

// DecodeRequest reads a request's body. Cap aliases b. Errors: Protocol.
func DecodeRequest(t Type, flags uint16, b []byte) (q Request, err error) {
	d := decoder{b: b}
	q.Cap = d.bytes()
	switch t {
	case Hello:
		q.Speaks = d.u16()
		q.Name = string(d.bytes())
	case Append:
		q.Chunk, q.Fence, q.Off = d.id(), d.fence(), d.u64()
		if flags&FlagShared != 0 {
			q.Pos, q.N, q.CRC = d.u64(), d.u32(), d.u32()
		}
	case Sync:
		q.Chunk, q.Off = d.id(), d.u64()
	case Read, Local:
		q.Chunk, q.Off, q.N = d.id(), d.u64(), d.u32()
	case Stat:
		q.Chunk = d.id()
	case Seal:
		q.Chunk, q.Fence, q.Final, q.Off = d.id(), d.fence(), d.u8() != 0, d.u64()
	case Delete:
		q.Chunk, q.Fence = d.id(), d.fence()
	case Share:
		q.Off = d.u64()
	case Ping, Ticket:
	default:
		return q, meta.E("read frame", meta.Protocol, "", fmt.Errorf("request of type %d", t))
	}
	return q, d.end()
}

// Answer is any reply's body.
type Answer struct {
	Kind   meta.Kind
	Detail string
	Info   chunkserver.Info // stat, seal, local
	Synced uint64           // sync
	First  uint64           // local
	Time   int64            // local: ctime of a sealed chunk's data file, ns since 1970
	CRCs   []uint32         // read with FlagRaw
	Speaks uint16           // hello
	Server meta.ServerID    // hello
	Host   string           // hello
	Ticket []byte           // ticket; hello with FlagTicket: random
	Secret []byte           // ticket
	TTL    uint32           // ticket, seconds
}

// Err is the reply's error, or nil.
func (a *Answer) Err(op, subject string) error {
	if a.Kind == meta.KindOK {
		return nil
	}
	var cause error
	if a.Detail != "" {
		cause = errors.New(a.Detail)
	}
	return meta.E(op, a.Kind, subject, cause)
}

// AppendFrame appends a reply frame to a request of type t without its data: n bytes, at most
// MaxData, with checksum crc must follow it on the wire. If the body of a reply without data
// would be too long, AppendFrame appends a reply of kind ResourceExceeded instead.
func (a *Answer) AppendFrame(b []byte, t Type, flags uint16, id uint64, n int, crc uint32) []byte {
	at := len(b)
	b = append(b, make([]byte, HeaderSize)...)
	b = binary.BigEndian.AppendUint16(b, uint16(a.Kind))
	b = appendBytes(b, []byte(a.Detail[:min(len(a.Detail), 1024)]))
	switch {
	case t == Seal, a.Kind == meta.KindOK && t == Stat:
		b = appendInfo(b, &a.Info)
	case a.Kind != meta.KindOK:
	case t == Hello:
		b = binary.BigEndian.AppendUint16(b, a.Speaks)
		b = binary.BigEndian.AppendUint64(b, uint64(a.Server))
		b = appendBytes(b, []byte(a.Host))
		if flags&FlagTicket != 0 {
			b = appendBytes(b, a.Ticket)
		}
	case t == Ticket:
		b = appendBytes(appendBytes(b, a.Ticket), a.Secret)
		b = binary.BigEndian.AppendUint32(b, a.TTL)
	case t == Sync:
		b = binary.BigEndian.AppendUint64(b, a.Synced)
	case t == Read && flags&FlagRaw != 0:
		for _, c := range a.CRCs {
			b = binary.BigEndian.AppendUint32(b, c)
		}
	case t == Local:
		b = binary.BigEndian.AppendUint64(appendInfo(b, &a.Info), a.First)
		b = binary.BigEndian.AppendUint64(b, uint64(a.Time))
	}
	if n == 0 && len(b)-at-HeaderSize > maxBody {
		a = &Answer{Kind: meta.ResourceExceeded, Detail: fmt.Sprintf("a reply of %d bytes, a frame has at most %d", len(b)-at-HeaderSize, maxBody), Info: a.Info}
		return a.AppendFrame(b[:at], t, flags, id, 0, 0)
	}
	finish(b[at:], t|Reply, flags, id, n, crc)
	return b
}

// DecodeAnswer reads the body of a reply to a request of type t. Errors:
// Protocol.
func DecodeAnswer(t Type, flags uint16, b []byte) (a Answer, err error) {
	d := decoder{b: b}
	a.Kind = meta.Kind(d.u16())
	a.Detail = string(d.bytes())
	switch {
	case t == Seal, a.Kind == meta.KindOK && t == Stat:
		a.Info = d.info()
	case a.Kind != meta.KindOK:
	case t == Hello:
		a.Speaks, a.Server, a.Host = d.u16(), meta.ServerID(d.u64()), string(d.bytes())
		if flags&FlagTicket != 0 {
			a.Ticket = bytes.Clone(d.bytes())
		}
	case t == Ticket:
		a.Ticket, a.Secret, a.TTL = bytes.Clone(d.bytes()), bytes.Clone(d.bytes()), d.u32()
	case t == Sync:
		a.Synced = d.u64()
	case t == Read && flags&FlagRaw != 0:
		a.CRCs = make([]uint32, 0, len(d.b)/4)
		for len(d.b) >= 4 {
			a.CRCs = append(a.CRCs, d.u32())
		}
	case t == Local:
		a.Info, a.First, a.Time = d.info(), d.u64(), int64(d.u64())
	}
	return a, d.end()
}

// ---- primitives

func bool8(v bool) byte {
	if v {
		return 1
	}
	return 0
}

func appendBytes(b, p []byte) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(p)))
	return append(b, p...)
}

func appendID(b []byte, id meta.ChunkID) []byte {
	i := id.Bytes()
	return append(b, i[:]...)
}

func appendFence(b []byte, f meta.Fence) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(b, uint64(f.Term)), f.Seals)
}

func appendInfo(b []byte, i *chunkserver.Info) []byte {
	b = append(appendID(b, i.ID), byte(i.State))
	b = binary.BigEndian.AppendUint64(b, i.Length)
	b = binary.BigEndian.AppendUint64(b, i.Synced)
	return binary.BigEndian.AppendUint32(appendFence(b, i.Fence), i.CRC)
}

// decoder reads a body from front to back. After the end of the body it returns zeros, and end
// returns the error.
type decoder struct {
	b     []byte
	short bool
}

var zeros [16]byte

func (d *decoder) take(n int) []byte {
	if d.short || n > len(d.b) {
		d.short = true
		return zeros[:min(n, len(zeros))]
	}
	p := d.b[:n]
	d.b = d.b[n:]
	return p
}

func (d *decoder) u8() byte    { return d.take(1)[0] }
func (d *decoder) u16() uint16 { return binary.BigEndian.Uint16(d.take(2)) }
func (d *decoder) u32() uint32 { return binary.BigEndian.Uint32(d.take(4)) }
func (d *decoder) u64() uint64 { return binary.BigEndian.Uint64(d.take(8)) }

func (d *decoder) bytes() []byte {
	n := int(d.u16())
	if d.short || n > len(d.b) {
		d.short = true
		return nil
	}
	return d.take(n)
}

func (d *decoder) id() meta.ChunkID { return meta.ChunkIDFromBytes(d.take(16)) }

func (d *decoder) fence() meta.Fence { return meta.Fence{Term: meta.Term(d.u64()), Seals: d.u32()} }

func (d *decoder) info() chunkserver.Info {
	return chunkserver.Info{ID: d.id(), State: meta.ChunkState(d.u8()), Length: d.u64(), Synced: d.u64(), Fence: d.fence(), CRC: d.u32()}
}

func (d *decoder) end() error {
	if d.short || len(d.b) > 0 {
		return meta.E("read frame", meta.Protocol, "", errors.New("body of the wrong length"))
	}
	return nil
}
