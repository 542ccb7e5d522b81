// Package capability defines the signed rights that volume owners give to clients, and that
// chunk servers check without asking a metadata server. The package is pure: keys and time are
// arguments.
//
// A token, big-endian:
//
//	 0  1  version, 1
//	 1  4  id of the key that signed it
//	 5 16  chunk id; counter and term zero: all chunks of the volume
//	21  1  rights, the bits of Rights
//	22 12  fence: term 8, seals 4
//	34  8  largest length of the chunk, bytes; 0: not bounded
//	42  8  expiry, nanoseconds since 1970
//	50  1  length n of the client's name
//	51  n  the client's name
//	..  1  length m of the disk class
//	..  m  the disk class
//	..  32 HMAC-SHA256 (RFC 2104, FIPS 180-4) of the bytes before
package capability

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
)

// Rights are the operations that a token allows.
type Rights uint8

// The rights.
const (
	Read Rights = 1 << iota
	Append
	Seal
	Delete
	// Plain allows the operation over a connection that others can read.
	Plain
)

// Claims are the contents of a token.
type Claims struct {
	Volume meta.VolumeID
	Chunk  meta.ChunkID // zero: every chunk of Volume; else its volume is Volume
	Rights Rights
	Fence  meta.Fence // with Append, Seal, Delete: of the request
	MaxLen uint64     // bytes; 0: not bounded
	Client string     // identity of the bearer, "role/name", at most 255 bytes; empty: any bearer
	// Class is the class of the disk for a new chunk (right Append), at most meta.MaxClass
	// bytes; "": any disk.
	Class  string
	Expiry meta.Time // not valid from then on
}

const (
	version = 1
	fixed   = 51
	macLen  = sha256.Size
	// MaxLife bounds the life of tokens. A key stays valid for longer than MaxLife after the
	// last token that it signed.
	MaxLife = time.Hour
	// MaxToken is the size of the largest token, in bytes.
	MaxToken = fixed + 255 + 1 + meta.MaxClass + macLen
)

// Sign makes a token. A longer Client is cut to 255 bytes, a longer Class to meta.MaxClass bytes.
func Sign(key meta.CapKey, c Claims) []byte {
	client := c.Client[:min(len(c.Client), 255)]
	class := c.Class[:min(len(c.Class), meta.MaxClass)]
	b := make([]byte, fixed, fixed+len(client)+1+len(class)+macLen)
	b[0] = version
	binary.BigEndian.PutUint32(b[1:], key.ID)
	chunk := c.Chunk
	chunk.Volume = c.Volume
	id := chunk.Bytes()
	copy(b[5:], id[:])
	b[21] = byte(c.Rights)
	binary.BigEndian.PutUint64(b[22:], uint64(c.Fence.Term))
	binary.BigEndian.PutUint32(b[30:], c.Fence.Seals)
	binary.BigEndian.PutUint64(b[34:], c.MaxLen)
	binary.BigEndian.PutUint64(b[42:], uint64(c.Expiry))
	b[50] = byte(len(client))
	b = append(b, client...)
	b = append(b, byte(len(class)))
	b = append(b, class...)
	return mac(key, b).Sum(b)
}

func mac(key meta.CapKey, b []byte) interface{ Sum([]byte) []byte } {
	h := hmac.New(sha256.New, key.Secret)
	h.Write(b)
	return h
}

// RightsOf returns the rights in a token without checking the token: what its bearer may
// expect.
func RightsOf(token []byte) Rights {
	if len(token) < fixed || token[0] != version {
		return 0
	}
	return Rights(token[21])
}

// Verify checks a token against the keys and the time and returns its claims. Claims.Allow
// tells whether they cover an operation. Errors: BadCapability.
func Verify(keys []meta.CapKey, token []byte, now meta.Time) (Claims, error) {
	bad := func(why string) (Claims, error) {
		return Claims{}, meta.E("check capability", meta.BadCapability, "", errors.New(why))
	}
	if len(token) == 0 {
		return bad("none given")
	}
	if len(token) < fixed+1+macLen || len(token) > MaxToken {
		return bad("malformed")
	}
	names, ok := namesOf(token)
	if !ok {
		return bad("malformed")
	}
	if token[0] != version {
		return bad(fmt.Sprintf("version %d", token[0]))
	}
	id := binary.BigEndian.Uint32(token[1:])
	body, sum := token[:len(token)-macLen], token[len(token)-macLen:]
	for _, k := range keys {
		// An empty secret would let anyone sign.
		if k.ID != id || len(k.Secret) < 16 {
			continue
		}
		if !hmac.Equal(mac(k, body).Sum(nil), sum) {
			return bad("forged")
		}
		c := Claims{
			Chunk:  meta.ChunkIDFromBytes(body[5:]),
			Rights: Rights(body[21]),
			Fence:  meta.Fence{Term: meta.Term(binary.BigEndian.Uint64(body[22:])), Seals: binary.BigEndian.Uint32(body[30:])},
			MaxLen: binary.BigEndian.Uint64(body[34:]),
			Expiry: meta.Time(binary.BigEndian.Uint64(body[42:])),
			Client: string(names[0]),
			Class:  string(names[1]),
		}
		c.Volume = c.Chunk.Volume
		if c.Chunk.Term == 0 && c.Chunk.Counter == 0 {
			c.Chunk = meta.ChunkID{}
		}
		if now >= c.Expiry {
			return bad("expired")
		}
		return c, nil
	}
	return bad(fmt.Sprintf("signed with key %d, which is not known here", id))
}

// namesOf returns the client's name and the disk class in a token; false if their lengths do not
// agree with the token's.
func namesOf(token []byte) (names [2][]byte, ok bool) {
	client := int(token[50])
	rest := token[fixed : len(token)-macLen]
	if len(rest) < client+1 || len(rest) != client+1+int(rest[client]) || int(rest[client]) > meta.MaxClass {
		return names, false
	}
	return [2][]byte{rest[:client], rest[client+1:]}, true
}

// Allow tells whether the claims cover an operation: the right, the chunk, at
// fence (not for Read), reaching to length end of the chunk (for Append).
// Errors: BadCapability; Fenced if only the fence differs.
func (c Claims) Allow(r Rights, chunk meta.ChunkID, fence meta.Fence, end uint64) error {
	const op = "check capability"
	switch {
	case c.Rights&r != r:
		return meta.E(op, meta.BadCapability, chunk.String(), errors.New("it doesn't give this right"))
	case c.Volume != chunk.Volume || !c.Chunk.IsZero() && c.Chunk != chunk:
		return meta.E(op, meta.BadCapability, chunk.String(), errors.New("it is for another chunk"))
	case r&(Append|Seal|Delete) != 0 && !c.Chunk.IsZero() && fence != c.Fence:
		return meta.E(op, meta.Fenced, chunk.String(), fmt.Errorf("it is for fence %v, not %v", c.Fence, fence))
	case r&Append != 0 && c.MaxLen != 0 && end > c.MaxLen:
		return meta.E(op, meta.BadCapability, chunk.String(), fmt.Errorf("it ends at %d, the append at %d", c.MaxLen, end))
	}
	return nil
}
