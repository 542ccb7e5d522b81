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

//
// Ticketed connections. With TLS, the kernel can't send a file to a socket by itself, so a
// cluster may send the bulk bytes of volumes that allow it over plain TCP. A client requests a
// Ticket over TLS, where both sides are authenticated, and opens plain connections to the same
// address with it:
//
//	client  hello with FlagTicket; its capability is the ticket, then 16 random bytes
//	server  hello with FlagTicket and 16 random bytes of its own
//
// From then on the body of every frame, both ways, ends with 16 bytes: a truncated HMAC-SHA256
// of header (up to the length of the data, and the data's checksum) and body, with a key
// derived from the ticket's secret and both random values. An observer of the connection can't
// forge a frame on it, or on another connection. A replayed frame on the same connection does
// no harm: every request may be repeated. The MAC covers the data only through their CRC32C:
// an attacker that can change packets can change bytes of files, and an observer can read
// them. For volumes that need more there is Policy.Encrypt.

// MACSize is the additional length of each frame on a ticketed connection, in bytes.
const MACSize = 16

// NonceSize is the size of the random values of both hellos.
const NonceSize = 16

// macs are the states of the two directions. One hash is used under the lock of writing, the
// other by the reader.
type macs struct {
	out, in hash.Hash
	sum     [sha256.Size]byte // of the reader
}

// Protect makes every later frame carry a MAC, both ways. It is called after the hellos, by
// the only goroutine that uses the connection so far.
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

// open checks a frame's MAC and cuts it off the body. Errors: AccessDenied.
func (m *macs) open(header, body []byte) ([]byte, error) {
	n := len(body) - MACSize
	if n >= 0 {
		m.write(m.in, header, body[:n])
		if hmac.Equal(m.in.Sum(m.sum[:0])[:MACSize], body[n:]) {
			return body[:n], nil
		}
	}
	return nil, meta.E("read frame", meta.AccessDenied, "", errors.New("a frame was not made by the peer that was let in"))
}
