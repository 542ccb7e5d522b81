package wire

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// Ticketed connections. TLS keeps the kernel from sending a file to a socket by
// itself, so a cluster may let bulk bytes of volumes that allow it go over plain
// TCP. A client asks for a Ticket over TLS, where both sides know who they are,
// and opens plain connections with it, to the same address:
//
//	client  hello with FlagTicket; its capability is the ticket, then 16 random bytes
//	server  hello with FlagTicket and 16 random bytes of its own
//
// From then on every frame, both ways, ends its body with 16 bytes: HMAC-SHA256,
// cut, of header (up to the length of the data, and the data's checksum) and
// body, with a key made of the ticket's secret and both random values. Nobody
// who sees the connection can make a frame of it, or one for another connection.
// A frame that is repeated on its own connection does no harm: every request
// may be repeated. What the MAC does not cover is the data, but for its CRC32C:
// who can change packets under way can change bytes of files, and anybody on the
// way can read them. A volume that must have better has Policy.Encrypt.

// MACSize is what each frame of a ticketed connection is longer by.
const MACSize = 16

// NonceSize is the size of the random values of both hellos.
const NonceSize = 16

// macs are the two directions' states; a hash of one is used under the lock of
// writing, the other by the reader.
type macs struct {
	out, in hash.Hash
	sum     [sha256.Size]byte // of the reader
}

// Protect makes every frame after this one carry a MAC, both ways. The one
// goroutine that uses the connection so far calls it, after the hellos.
func (c *Conn) Protect(secret, clientNonce, serverNonce []byte) {
	k := hmac.New(sha256.New, secret)
	k.Write([]byte("penstock bulk 1"))
	k.Write(clientNonce)
	k.Write(serverNonce)
	key := k.Sum(nil)
	c.macs = &macs{out: hmac.New(sha256.New, key), in: hmac.New(sha256.New, key)}
}

func (m *macs) write(h hash.Hash, header, body []byte) {
	h.Reset()
	h.Write(header[:16])
	h.Write(header[20:24])
	h.Write(header[28:32])
	h.Write(body)
}

// seal appends a finished frame with its MAC.
func (m *macs) seal(b, frame []byte) []byte {
	at := len(b)
	b = append(b, frame...)
	m.write(m.out, b[at:at+HeaderSize], b[at+HeaderSize:])
	n := len(b)
	b = m.out.Sum(b)[:n+MACSize]
	h, body := b[at:at+HeaderSize], b[at+HeaderSize:]
	binary.BigEndian.PutUint32(h[16:], uint32(len(body)))
	binary.BigEndian.PutUint32(h[24:], chunkserver.CRC(body))
	binary.BigEndian.PutUint32(h[36:], chunkserver.CRC(h[:36]))
	return b
}

// open checks a frame's MAC and takes it off the body. Errors: AccessDenied.
func (m *macs) open(header, body []byte) ([]byte, error) {
	n := len(body) - MACSize
	if n >= 0 {
		m.write(m.in, header, body[:n])
		if hmac.Equal(m.in.Sum(m.sum[:0])[:MACSize], body[n:]) {
			return body[:n], nil
		}
	}
	return nil, meta.E("read frame", meta.AccessDenied, "", errors.New("a frame was not made by who was let in"))
}
