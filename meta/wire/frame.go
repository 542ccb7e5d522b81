// Package wire owns the frames of the metadata protocol: their layout, their bounds, and the
// encoding of every operation and message.
//
// A frame, all integers little-endian:
//
//	 0        4        5       6        8                16        20
//	+--------+--------+-------+--------+----------------+---------+- - - -+
//	| length |version | type  | zero   | request id     | crc32c  | body  |
//	| u32    | u8     | u8    | u16    | u64            | u32     |       |
//	+--------+--------+-------+--------+----------------+---------+- - - -+
//
// length counts the bytes after the length field, 16 to MaxFrame. crc32c (Castagnoli) covers
// bytes 4 to 16 and the body. The request id joins a reply to the request; messages without a
// reply carry zero. In bodies, unsigned integers are varints as in encoding/binary, times are
// 8 bytes, strings and byte slices are a varint length and the bytes, lists a varint count and
// the elements; a byte 0 or 1 precedes an optional value. A body with bytes left after
// decoding is a protocol error.
//
// The first frame on a connection is Hello, in both directions, with the range of protocol
// versions of the sender. Until a side has checked the other side's Hello, it rejects frames
// longer than MaxHello.
package wire

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"

	"penstock.io/penstock/meta"
)

// Version is the protocol version of this program. Before the first release a change of the
// protocol does not change Version: programs of two commits don't work together.
const Version = 1

// Negotiate returns the protocol version common to both sides, or false if no version is
// common. h is the Hello of the other side.
func Negotiate(h *Hello) (uint8, bool) {
	return Version, h.Min <= Version && Version <= h.Max
}

// Bounds in bytes, excluding the length field.
const (
	HeaderSize = 20
	MaxFrame   = 16 << 20
	MaxHello   = 16 << 10
)

// Type is the type of a frame.
type Type uint8

// Frame types. The table in docs/formats.md lists the answers to each type.
const (
	THello       Type = 1 + iota // both directions, first
	TCall                        // client: an operation
	TReply                       // server: answers TCall
	TBatch                       // client: operations of one volume
	TBatchRe                     // server: answers TBatch
	TSync                        // client: asks for TDurable up to Seq
	TDurable                     // server: the journal holds all entries up to Seq
	TRecall                      // server: lower a lease
	TRecalled                    // client: done
	TDrop                        // client: leases given back
	TKeepAlive                   // client; the server echoes the frame
	TAlloc                       // client: chunks to write; answered by TGrants
	TGrants                      //
	TSeal                        // client: seal a chunk; answered by TReply
	TLock                        // client: set or test a lock; answered by TLockRe
	TLockRe                      //
	TCancel                      // client: stop waiting for request id
	TAdmin                       // client: volumes, cluster; answered by TAdminRe
	TAdminRe                     //
	TReport                      // chunk server: identity and fill level
	TOrder                       // server: seal, delete, ...
	TOrderRe                     // chunk server: done
	TClaim                       // client, after a change of owner: its leases and locks
	TBye                         // client: ends the session in order; the server echoes the frame
	TCaps                        // client: renew read capabilities; answered by TCapsRe
	TCapsRe                      //
	TServers                     // server: the chunk servers, after each change
	TEnter                       // client: starts to use a volume; answered by TEntered
	TEntered                     //
	TBack                        // client: claims and replays of a volume are complete
	TMoved                       // server: no longer serves a volume
	TMetas                       // server: the meta servers, after each change
	TReported                    // server: took in the events of a chunk server's reports
	TTrouble                     // client: chunk servers that failed the client; no answer
	TReserve                     // client: reserve bytes of a quota before writing; answered by TReserved
	TReserved                    //
	TQuota                       // server: a volume got or lost its quota, or the server reclaims idle promises
	TGaveUp                      // client: bytes discarded by an operator; no answer
	TPolicy                      // server: the volume's policy
	TPolicyTaken                 // client: follows the policy of TPolicy
	TGrowth                      // server: sync what was appended to a file, and tell its size
	TGrowthRe                    // client: answers TGrowth
	lastType
)

// Types is larger than every frame type.
const Types = int(lastType)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Begin starts a frame of protocol version v at the end of dst. The caller appends the body to
// frame; End finishes the frame that began at start.
func Begin(dst []byte, v uint8, t Type, id uint64) (frame []byte, start int) {
	start = len(dst)
	var h [HeaderSize]byte
	h[4] = v
	h[5] = byte(t)
	binary.LittleEndian.PutUint64(h[8:], id)
	return append(dst, h[:]...), start
}

// End fills in length and checksum of the frame started by Begin. Errors: ResourceExceeded
// (the frame is longer than MaxFrame). Callers bound their messages; End returns an error
// instead of a panic because a server must continue to serve other clients.
func End(frame []byte, start int) ([]byte, error) {
	n := len(frame) - start - 4
	if n > MaxFrame {
		return nil, meta.E("encode frame", meta.ResourceExceeded, fmt.Sprintf("type %d", frame[start+5]), fmt.Errorf("%d bytes, a frame has at most %d", n, MaxFrame))
	}
	binary.LittleEndian.PutUint32(frame[start:], uint32(n))
	crc := crc32.Update(0, castagnoli, frame[start+4:start+16])
	crc = crc32.Update(crc, castagnoli, frame[start+HeaderSize:])
	binary.LittleEndian.PutUint32(frame[start+16:], crc)
	return frame, nil
}

// Reader reads frames from a connection into a single buffer.
type Reader struct {
	r   *bufio.Reader
	max uint32
	buf []byte
}

// NewReader reads frames of at most MaxHello bytes until Trust is called.
func NewReader(r io.Reader) *Reader {
	return &Reader{r: bufio.NewReaderSize(r, 64<<10), max: MaxHello}
}

// Trust raises the bound to MaxFrame. The caller has checked the peer.
func (r *Reader) Trust() { r.max = MaxFrame }

// Peek returns the next n bytes without consuming them. Errors: as of the connection.
func (r *Reader) Peek(n int) ([]byte, error) { return r.r.Peek(n) }

// Rest returns the unread rest of the stream, for a connection with another protocol than
// frames. The caller must not call Next any more.
func (r *Reader) Rest() io.Reader { return r.r }

// Buffered returns the number of buffered bytes. Zero means that the next call of Next reads
// from the network.
func (r *Reader) Buffered() int { return r.r.Buffered() }

// Body is the body of a frame, with the protocol version in the frame's header.
type Body struct {
	Version uint8
	Bytes   []byte
}

// Next reads a frame. The body is valid until the next call. Errors: io.EOF at a clean end,
// Protocol for a malformed frame, Version.
func (r *Reader) Next() (t Type, id uint64, body Body, err error) {
	var h [HeaderSize]byte
	if _, err := io.ReadFull(r.r, h[:]); err != nil {
		return 0, 0, Body{}, err
	}
	n := binary.LittleEndian.Uint32(h[:])
	if n < HeaderSize-4 || n > r.max {
		return 0, 0, Body{}, meta.E("read frame", meta.Protocol, "", fmt.Errorf("length %d is not in 16..%d", n, r.max))
	}
	if v := h[4]; v != Version {
		return 0, 0, Body{}, meta.E("read frame", meta.Version, "", fmt.Errorf("the frame is of protocol version %d, this program speaks version %d", v, Version))
	}
	t = Type(h[5])
	if t == 0 || t >= lastType || h[6] != 0 || h[7] != 0 {
		return 0, 0, Body{}, meta.E("read frame", meta.Protocol, "", fmt.Errorf("type %d, reserved %d", t, binary.LittleEndian.Uint16(h[6:])))
	}
	id = binary.LittleEndian.Uint64(h[8:])
	n -= HeaderSize - 4
	if uint32(cap(r.buf)) < n {
		// Grow as bytes arrive: a length alone must not cause a large allocation.
		if r.buf, err = readGrowing(r.r, r.buf[:0], int(n)); err != nil {
			return 0, 0, Body{}, err
		}
	} else {
		r.buf = r.buf[:n]
		if _, err := io.ReadFull(r.r, r.buf); err != nil {
			return 0, 0, Body{}, unexpected(err)
		}
	}
	crc := crc32.Update(0, castagnoli, h[4:16])
	if crc = crc32.Update(crc, castagnoli, r.buf); crc != binary.LittleEndian.Uint32(h[16:]) {
		return 0, 0, Body{}, meta.E("read frame", meta.Protocol, "", fmt.Errorf("checksum of a frame of type %d does not match", t))
	}
	body = Body{h[4], r.buf}
	if cap(r.buf) > 1<<20 {
		r.buf = nil // no connection keeps a large buffer in memory
	}
	return t, id, body, nil
}

func readGrowing(r io.Reader, buf []byte, n int) ([]byte, error) {
	for len(buf) < n {
		step := min(n-len(buf), max(len(buf), 64<<10))
		old := len(buf)
		buf = append(buf, make([]byte, step)...)
		if _, err := io.ReadFull(r, buf[old:]); err != nil {
			return nil, unexpected(err)
		}
	}
	return buf, nil
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
