package kafka

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// A request is a frame: the length of the rest (4 bytes, big-endian), then
//
//	key 2 | version 2 | correlation 4 | client's name: length 2, bytes | tagged fields | body
//
// where tagged fields are there in flexible versions only. A response is the length, the
// correlation, tagged fields in flexible versions (except of ApiVersions), and the body.

// errFrame refuses a frame. The connection is closed, as
// Kafka does.
var errFrame = errors.New("not a frame of the Kafka protocol")

// header precedes the body of a request.
type header struct {
	key, version int16
	correlation  int32
	client       string
}

// readFrame reads the length and the rest of a frame. memory is called with the key and the
// length before the rest is read. Bytes are allocated on arrival, so that a length
// without bytes costs nothing.
func readFrame(r io.Reader, memory func(key int16, size int) error) ([]byte, error) {
	var head [6]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	size := int32(binary.BigEndian.Uint32(head[:]))
	if size < 8 {
		return nil, fmt.Errorf("%w: its length is %d", errFrame, size)
	}
	if err := memory(int16(binary.BigEndian.Uint16(head[4:])), int(size)); err != nil {
		return nil, err
	}
	b := bytes.NewBuffer(append(make([]byte, 0, min(int(size), 64<<10)), head[4:]...))
	if _, err := io.CopyN(b, r, int64(size)-2); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return b.Bytes(), nil
}

// parseHeader parses the header of a request and returns the rest of the frame.
func parseHeader(b []byte) (h header, rest []byte, err error) {
	bad := func(why string) (header, []byte, error) { return h, nil, fmt.Errorf("%w: %s", errFrame, why) }
	if len(b) < 10 {
		return bad("its header is cut")
	}
	h.key, h.version = int16(binary.BigEndian.Uint16(b)), int16(binary.BigEndian.Uint16(b[2:]))
	h.correlation = int32(binary.BigEndian.Uint32(b[4:]))
	n := int16(binary.BigEndian.Uint16(b[8:]))
	b = b[10:]
	if n > 0 {
		if int(n) > len(b) {
			return bad("the client's name is cut")
		}
		h.client, b = string(b[:n]), b[n:]
	}
	return h, b, nil
}

// skipTags skips the tagged fields at the beginning of b.
func skipTags(b []byte) ([]byte, error) {
	n, k := binary.Uvarint(b)
	if k <= 0 {
		return nil, fmt.Errorf("%w: its tagged fields are cut", errFrame)
	}
	for b = b[k:]; n > 0; n-- {
		_, k := binary.Uvarint(b)
		if k <= 0 {
			return nil, fmt.Errorf("%w: its tagged fields are cut", errFrame)
		}
		b = b[k:]
		size, k := binary.Uvarint(b)
		if k <= 0 || size > uint64(len(b)-k) {
			return nil, fmt.Errorf("%w: its tagged fields are cut", errFrame)
		}
		b = b[uint64(k)+size:]
	}
	return b, nil
}

// parseBody decodes the body of a request of a known version.
func parseBody(h header, b []byte) (kmsg.Request, error) {
	q := kmsg.RequestForKey(h.key)
	q.SetVersion(h.version)
	var err error
	if q.IsFlexible() {
		if b, err = skipTags(b); err != nil {
			return nil, err
		}
	}
	if h.key == produceKey {
		if err := boundProduce(b, q.IsFlexible()); err != nil {
			return nil, err
		}
	}
	if err := q.ReadFrom(b); err != nil {
		return nil, fmt.Errorf("%w: request %d, version %d: %w", errFrame, h.key, h.version, err)
	}
	return q, nil
}

const produceKey = 0

// maxProduce bounds the partitions of a Produce request, because a decoded partition takes many
// times the memory of the bytes.
const maxProduce = 20000

// boundProduce counts the topics and partitions of a Produce request before decoding.
func boundProduce(b []byte, flexible bool) error {
	c := cursor{b: b, flexible: flexible}
	c.bytes(2) // the transaction
	c.skip(6)  // acks, timeout
	left := maxProduce
	for range c.count(&left) {
		c.bytes(2) // the topic
		for range c.count(&left) {
			c.skip(4)
			c.bytes(4) // the records
			c.tags()
		}
		c.tags()
	}
	return c.err
}

// cursor walks over a request without decoding it.
type cursor struct {
	b        []byte
	flexible bool
	err      error
}

func (c *cursor) fail() {
	c.b = nil
	if c.err == nil {
		c.err = fmt.Errorf("%w: a Produce request is cut, or has more than %d partitions", errFrame, maxProduce)
	}
}

func (c *cursor) skip(n int) {
	if n > len(c.b) {
		c.fail()
		return
	}
	c.b = c.b[n:]
}

// length reads a length of a fixed width, or of a flexible version; -1 stands for null.
func (c *cursor) length(width int) int {
	if c.flexible {
		n, k := binary.Uvarint(c.b)
		if k <= 0 || n > 1<<31 {
			c.fail()
			return -1
		}
		c.b = c.b[k:]
		return int(n) - 1
	}
	if width > len(c.b) {
		c.fail()
		return -1
	}
	var n int
	if width == 2 {
		n = int(int16(binary.BigEndian.Uint16(c.b)))
	} else {
		n = int(int32(binary.BigEndian.Uint32(c.b)))
	}
	c.b = c.b[width:]
	return n
}

func (c *cursor) bytes(width int) {
	if n := c.length(width); n > 0 {
		c.skip(n)
	}
}

// count reads the length of an array and takes it from left.
func (c *cursor) count(left *int) int {
	n := max(c.length(4), 0)
	if *left -= n; *left < 0 {
		c.fail()
	}
	if c.err != nil {
		return 0
	}
	return n
}

func (c *cursor) tags() {
	if !c.flexible || c.err != nil {
		return
	}
	b, err := skipTags(c.b)
	if err != nil {
		c.fail()
		return
	}
	c.b = b
}

// appendResponse appends the frame of a response.
func appendResponse(dst []byte, correlation int32, p kmsg.Response) []byte {
	start := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	dst = binary.BigEndian.AppendUint32(dst, uint32(correlation))
	if p.IsFlexible() && p.Key() != apiVersionsKey {
		dst = append(dst, 0)
	}
	dst = p.AppendTo(dst)
	binary.BigEndian.PutUint32(dst[start:], uint32(len(dst)-start-4))
	return dst
}
