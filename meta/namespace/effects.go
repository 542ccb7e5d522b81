package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// The payload of a journal entry:
//
//	version:1 = 1  count:n  then per effect
//	    kind:1  keyLength:n  key  [valueLength:n  value]     no value for Delete
//
// n is an unsigned varint. Checksums are the journal's.
const effectsV1 = 1

// AppendEffects appends the journal payload of a list of effects to dst.
func AppendEffects(dst []byte, l []Effect) []byte {
	dst = append(dst, effectsV1)
	dst = binary.AppendUvarint(dst, uint64(len(l)))
	for _, e := range l {
		dst = append(dst, byte(e.Kind))
		dst = appendBytes(dst, e.Key)
		if e.Kind != Delete {
			dst = appendBytes(dst, e.Value)
		}
	}
	return dst
}

// DecodeEffects reads a journal payload. Keys and values alias b. Errors:
// Version, Corrupt.
func DecodeEffects(b []byte) ([]Effect, error) {
	d := decoder{b: b}
	if err := d.version(effectsV1, "effects"); err != nil {
		return nil, err
	}
	n := d.uint()
	if n > uint64(len(d.b))/2 { // each takes two bytes at least
		return nil, fail("decode effects", meta.Corrupt, fmt.Sprintf("%d effects in %d bytes", n, len(d.b)))
	}
	l := make([]Effect, 0, n)
	for range n {
		e := Effect{Kind: EffectKind(d.byte())}
		e.Key = d.bytes()
		switch e.Kind {
		case Put, DeleteRange:
			e.Value = d.bytes()
		case Delete:
		default:
			d.bad = true
		}
		if d.bad {
			break
		}
		l = append(l, e)
	}
	return l, d.end("effects")
}
