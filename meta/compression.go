package meta

import (
	"errors"
	"fmt"
)

// Compression is how a volume's sealed chunks are stored.
type Compression uint8

// The algorithms. Their numbers are part of file formats and frames.
const (
	CompressNone Compression = iota
	CompressS2               // fast: S2, an extension of Snappy
	CompressZstd             // small: Zstandard (RFC 8878)
	compressions
)

var compressionNames = [compressions]string{"none", "s2", "zstd"}

func (c Compression) String() string {
	if c < compressions {
		return compressionNames[c]
	}
	return fmt.Sprintf("compression %d", uint8(c))
}

// Known reports whether this program implements the algorithm.
func (c Compression) Known() bool { return c < compressions }

// ParseCompression reads the name of an algorithm. Errors: Invalid.
func ParseCompression(name string) (Compression, error) {
	for i, n := range compressionNames {
		if n == name {
			return Compression(i), nil
		}
	}
	return 0, E("read policy", Invalid, name, errors.New("a compression is none, s2 or zstd"))
}
