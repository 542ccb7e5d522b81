// Package decompress decompresses the records of batches, whatever a client has compressed: the
// package owns the bounds on what comes out.
package decompress

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"

	"penstock.io/penstock/stream/log"
)

// Max bounds the records of a batch after decompression, in bytes.
const Max = 64 << 20

var errBomb = fmt.Errorf("the records are larger than %d bytes after decompression", Max)

// Records returns the records of a batch, decompressed. An error says why that is not
// possible: the producer has compressed the records, and no program has examined them before.
func Records(compression int, p []byte) ([]byte, error) {
	switch compression {
	case log.Plain:
		return p, nil
	case log.Gzip:
		r, err := gzip.NewReader(bytes.NewReader(p))
		if err != nil {
			return nil, err
		}
		return readBounded(r)
	case log.LZ4:
		return readBounded(lz4.NewReader(bytes.NewReader(p)))
	case log.Snappy:
		return unsnappy(p)
	case log.Zstd:
		r, err := zstd.NewReader(bytes.NewReader(p), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(Max))
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return readBounded(r)
	default:
		return nil, fmt.Errorf("compression %d is unknown", compression)
	}
}

func readBounded(r io.Reader) ([]byte, error) {
	p, err := io.ReadAll(io.LimitReader(r, Max+1))
	if err == nil && len(p) > Max {
		err = errBomb
	}
	return p, err
}

// snappyFrame begins the form of Java's clients: the mark, two versions of four bytes, then
// blocks, each with its length before it. Other clients send a single block.
var snappyFrame = []byte("\x82SNAPPY\x00")

func unsnappy(p []byte) (plain []byte, err error) {
	if !bytes.HasPrefix(p, snappyFrame) {
		return unsnappyBlock(nil, p)
	}
	if len(p) < len(snappyFrame)+8 {
		return nil, io.ErrUnexpectedEOF
	}
	for p = p[len(snappyFrame)+8:]; len(p) > 0; {
		if len(p) < 4 || int64(binary.BigEndian.Uint32(p)) > int64(len(p)-4) {
			return nil, io.ErrUnexpectedEOF
		}
		n := int(binary.BigEndian.Uint32(p))
		if plain, err = unsnappyBlock(plain, p[4:4+n]); err != nil {
			return nil, err
		}
		p = p[4+n:]
	}
	return plain, nil
}

func unsnappyBlock(to, p []byte) ([]byte, error) {
	n, err := s2.DecodedLen(p)
	if err != nil {
		return nil, err
	}
	if n > Max-len(to) {
		return nil, errBomb
	}
	block, err := s2.Decode(nil, p)
	if err != nil {
		return nil, errors.Join(errors.New("snappy"), err)
	}
	return append(to, block...), nil
}
