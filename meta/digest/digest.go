// Package digest owns the fingerprint of a tree of files: one SHA-256 for
// names, types, modes, owners, extended attributes, link targets and contents,
// and nothing else: no times, no inode numbers, no places of bytes. The same
// files have the same digest in every volume, mirror or copy.
//
//	block    = H(00 | bytes)                         1 MiB at a file offset; the last one of a file may be shorter
//	content  = tree of its blocks                    holes are zeros
//	entry    = H(02 | name | type 1 | mode 2 | uid 4 | gid 4 | what)
//	what     = regular file:    size 8 | content 32 | xattrs
//	           directory:       tree of its entries, by name 32 | xattrs
//	           symbolic link:   target | xattrs
//	           device:          rdev 4 | xattrs
//	           fifo, socket:    xattrs
//	           junction (type 0): nothing; the other volume has a digest of its own
//	xattrs   = count 4 | (name | value)*             by name
//	digest   = H(03 | version 4 | entry of the root, whose name is empty)
//
//	tree of no leaves     H(04)
//	tree of one leaf      the leaf
//	tree of n leaves      H(01 | tree of the first k | tree of the rest), k the largest power of two below n
//
// H is SHA-256 (FIPS 180-4). Numbers are big-endian; names, targets and values
// have their length before them, 4 bytes; type is the S_IFMT bits shifted right
// by 12; mode holds the lower 12 bits. First bytes differ, so that no node can
// be taken for another (as in RFC 6962, whose tree this is). Directories are in
// the order of their names' bytes.
package digest

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
)

// Version is the only version so far.
const Version = 1

// BlockSize is the number of a file's bytes in one leaf.
const BlockSize = 1 << 20

const (
	tagBlock = iota
	tagNode
	tagEntry
	tagRoot
	tagNone
)

// Sum is a SHA-256.
type Sum [sha256.Size]byte

const prefix = "sha256-tree-1:"

// String is the form for people and options: sha256-tree-1: and 64 digits.
func (s Sum) String() string { return prefix + hex.EncodeToString(s[:]) }

// Parse parses the output of String. Errors: Invalid, Version.
func Parse(text string) (s Sum, err error) {
	const op = "read digest"
	digits, ok := strings.CutPrefix(text, prefix)
	if !ok {
		if strings.HasPrefix(text, "sha256-tree-") {
			return s, meta.E(op, meta.Version, text, nil)
		}
		return s, meta.E(op, meta.Invalid, text, fmt.Errorf("it begins with %s", prefix))
	}
	b, err := hex.DecodeString(digits)
	if err != nil || len(b) != len(s) {
		return s, meta.E(op, meta.Invalid, text, fmt.Errorf("%d digits follow", 2*len(s)))
	}
	return Sum(b), nil
}

// Block is the leaf of a block of at most BlockSize bytes.
func Block(p []byte) Sum {
	if len(p) > BlockSize {
		panic(fmt.Sprintf("digest: a block of %d bytes", len(p)))
	}
	h := sha256.New()
	h.Write([]byte{tagBlock})
	h.Write(p)
	return Sum(h.Sum(nil))
}

// Zeros is the leaf of n zeros.
func Zeros(n int) Sum {
	if n == BlockSize {
		return zeroBlock
	}
	return Block(zeros[:n])
}

var (
	zeros     [BlockSize]byte
	zeroBlock = Block(zeros[:])
)

// Tree takes leaves in order. It keeps one sum for each bit of their number.
type Tree struct {
	n     uint64
	stack []Sum // of perfect subtrees, the largest first
}

// Add appends a leaf.
func (t *Tree) Add(leaf Sum) {
	t.stack = append(t.stack, leaf)
	for k := t.n; k&1 != 0; k >>= 1 {
		l := len(t.stack)
		t.stack[l-2] = node(t.stack[l-2], t.stack[l-1])
		t.stack = t.stack[:l-1]
	}
	t.n++
}

// Root is the sum of all leaves so far.
func (t *Tree) Root() Sum {
	if t.n == 0 {
		return sha256.Sum256([]byte{tagNone})
	}
	l := len(t.stack) - 1
	root := t.stack[l]
	for l--; l >= 0; l-- {
		root = node(t.stack[l], root)
	}
	return root
}

func node(a, b Sum) Sum {
	var p [1 + 2*sha256.Size]byte
	p[0] = tagNode
	copy(p[1:], a[:])
	copy(p[1+sha256.Size:], b[:])
	return sha256.Sum256(p[:])
}

// Xattr is an extended attribute.
type Xattr struct {
	Name  string
	Value []byte
}

// Entry is the inode behind a name.
type Entry struct {
	Name     string
	Mode     uint32 // type and permissions; ignored of a junction
	UID, GID uint32
	Rdev     uint32  // of devices
	Size     uint64  // of regular files
	Content  Sum     // root of the blocks of a regular file, of the entries of a directory
	Target   string  // of symbolic links
	Xattrs   []Xattr // in any order
	Junction bool
}

// Sum returns the entry's leaf in its directory.
func (e *Entry) Sum() Sum {
	h := sha256.New()
	var n [8]byte
	h.Write([]byte{tagEntry})
	sized(h, e.Name)
	if e.Junction {
		h.Write([]byte{0})
		return Sum(h.Sum(nil))
	}
	kind := e.Mode & meta.TypeMask
	h.Write([]byte{byte(kind >> 12)})
	h.Write(binary.BigEndian.AppendUint16(n[:0], uint16(e.Mode&0o7777)))
	number(h, e.UID)
	number(h, e.GID)
	switch kind {
	case meta.TypeRegular:
		h.Write(binary.BigEndian.AppendUint64(n[:0], e.Size))
		h.Write(e.Content[:])
	case meta.TypeDir:
		h.Write(e.Content[:])
	case meta.TypeSymlink:
		sized(h, e.Target)
	case meta.TypeChar, meta.TypeBlock:
		number(h, e.Rdev)
	}
	l := slices.Clone(e.Xattrs)
	slices.SortFunc(l, func(a, b Xattr) int { return cmp.Or(cmp.Compare(a.Name, b.Name), bytes.Compare(a.Value, b.Value)) })
	number(h, uint32(len(l)))
	for _, x := range l {
		sized(h, x.Name)
		sized(h, string(x.Value))
	}
	return Sum(h.Sum(nil))
}

func number(h hash.Hash, v uint32) {
	var n [4]byte
	binary.BigEndian.PutUint32(n[:], v)
	h.Write(n[:])
}

func sized(h hash.Hash, s string) {
	number(h, uint32(len(s)))
	h.Write([]byte(s))
}

// Dir collects the entries of a directory, in any order. It keeps their names and sums.
type Dir struct{ entries []named }

type named struct {
	name string
	sum  Sum
}

// Add adds an entry. Each name comes once.
func (d *Dir) Add(e *Entry) { d.entries = append(d.entries, named{e.Name, e.Sum()}) }

// Root is the sum of all entries.
func (d *Dir) Root() Sum {
	slices.SortFunc(d.entries, func(a, b named) int { return cmp.Compare(a.name, b.name) })
	var t Tree
	for _, e := range d.entries {
		t.Add(e.sum)
	}
	return t.Root()
}

// Of returns the digest of a tree from the entry of its root directory; the name is ignored.
func Of(root Entry) Sum {
	root.Name = ""
	s := root.Sum()
	p := binary.BigEndian.AppendUint32([]byte{tagRoot}, Version)
	return sha256.Sum256(append(p, s[:]...))
}
