package journal

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"penstock.io/penstock/meta"
)

// Checkpoint says that Files have the state up to and including entry Seq. A record is these
// bytes, all numbers big-endian:
//
//	offset  size
//	     0     2  magic "PC"
//	     2     1  version, 1
//	     3     1  flags: 1, the files are listed in the blob Manifest
//	     4     4  volume
//	     8     8  sequence number
//	    16    16  hash of the entry with this number
//	    32     8  term of the owner that made the checkpoint
//	    40        blob reference Manifest, when flag 1 is set; otherwise
//	              uvarint files | files * ( uvarint length | name |
//	              uvarint size | sum 16 | blob reference )
//	  last     4  CRC32C (Castagnoli) of all bytes before
//
// If the list of files does not fit MaxInlineFiles, the caller puts the list into a blob, as a
// Manifest.
type Checkpoint struct {
	Volume meta.VolumeID
	Position
	Term  meta.Term
	Files []File
	// Manifest holds a list of files that is too long for the record; then Files is empty.
	Manifest meta.BlobRef
}

// File is one file of a checkpoint.
type File struct {
	Name string   // in the state's directory, no slash
	Size uint64   // bytes
	Sum  [16]byte // SHA-256 of the file's bytes, cut to 16 bytes
	Ref  meta.BlobRef
}

// CheckpointVersion is the newest checkpoint format of this program.
const CheckpointVersion = 1

// MaxInlineFiles bounds the bytes of the list of files in a record.
const MaxInlineFiles = 256 << 10

const (
	checkpointHeader = 40
	flagManifest     = 1
	maxFileName      = 255
	maxFiles         = 1 << 24
	minFileSize      = 1 + 1 + 16 + 7 // an encoded file is never shorter
)

// EncodeCheckpoint gives the record's bytes. Errors: ResourceExceeded.
func EncodeCheckpoint(cp Checkpoint) ([]byte, error) {
	b := make([]byte, checkpointHeader, 4<<10)
	b[0], b[1], b[2] = 'P', 'C', CheckpointVersion
	binary.BigEndian.PutUint32(b[4:], uint32(cp.Volume))
	binary.BigEndian.PutUint64(b[8:], uint64(cp.Seq))
	copy(b[16:], cp.Hash[:])
	binary.BigEndian.PutUint64(b[32:], uint64(cp.Term))
	var err error
	if !cp.Manifest.IsZero() {
		b[3] |= flagManifest
		b, err = cp.Manifest.AppendBinary(b)
	} else {
		b, err = appendFiles(b, cp.Files)
	}
	if err != nil {
		return nil, err
	}
	if len(b) > MaxInlineFiles+checkpointHeader {
		return nil, meta.E("encode checkpoint", meta.ResourceExceeded, cp.Position.String(),
			fmt.Errorf("%d files take %d bytes: put the list into a blob", len(cp.Files), len(b)))
	}
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli)), nil
}

// DecodeCheckpoint decodes the output of EncodeCheckpoint. Errors: Corrupt, Version.
func DecodeCheckpoint(b []byte) (Checkpoint, error) {
	corrupt := func(why string) (Checkpoint, error) {
		return Checkpoint{}, meta.E("decode checkpoint", meta.Corrupt, "", fmt.Errorf("%s", why))
	}
	if len(b) < checkpointHeader+4 || b[0] != 'P' || b[1] != 'C' {
		return corrupt("no checkpoint record")
	}
	if b[2] > CheckpointVersion {
		return Checkpoint{}, meta.E("decode checkpoint", meta.Version, "",
			fmt.Errorf("record has format %d, this program knows up to %d", b[2], CheckpointVersion))
	}
	body, sum := b[:len(b)-4], binary.BigEndian.Uint32(b[len(b)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return corrupt("checksum")
	}
	if b[2] != CheckpointVersion || b[3]&^flagManifest != 0 {
		return corrupt("version or flags")
	}
	cp := Checkpoint{
		Volume:   meta.VolumeID(binary.BigEndian.Uint32(b[4:])),
		Position: Position{Seq: meta.Seq(binary.BigEndian.Uint64(b[8:])), Hash: Hash(b[16:32])},
		Term:     meta.Term(binary.BigEndian.Uint64(b[32:])),
	}
	var err error
	rest := body[checkpointHeader:]
	if b[3]&flagManifest != 0 {
		if cp.Manifest, rest, err = meta.DecodeBlobRef(rest); err != nil || cp.Manifest.IsZero() {
			return corrupt("manifest reference")
		}
	} else if cp.Files, rest, err = takeFiles(rest); err != nil {
		return Checkpoint{}, err
	}
	if len(rest) != 0 {
		return corrupt("bytes after the end")
	}
	return cp, nil
}

func appendFiles(b []byte, files []File) ([]byte, error) {
	b = binary.AppendUvarint(b, uint64(len(files)))
	var err error
	for _, f := range files {
		if len(f.Name) == 0 || len(f.Name) > maxFileName {
			return nil, meta.E("encode checkpoint", meta.ResourceExceeded, f.Name, nil)
		}
		b = binary.AppendUvarint(b, uint64(len(f.Name)))
		b = append(b, f.Name...)
		b = binary.AppendUvarint(b, f.Size)
		b = append(b, f.Sum[:]...)
		if b, err = f.Ref.AppendBinary(b); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func takeFiles(b []byte) ([]File, []byte, error) {
	corrupt := meta.E("decode checkpoint", meta.Corrupt, "", fmt.Errorf("list of files"))
	n, used := binary.Uvarint(b)
	if used <= 0 || n > maxFiles || n > uint64(len(b))/minFileSize {
		return nil, nil, corrupt
	}
	b = b[used:]
	var files []File
	for range n {
		var f File
		l, used := binary.Uvarint(b)
		if used <= 0 || l == 0 || l > maxFileName || uint64(len(b)-used) < l {
			return nil, nil, corrupt
		}
		f.Name, b = string(b[used:used+int(l)]), b[used+int(l):]
		if f.Size, used = binary.Uvarint(b); used <= 0 || len(b)-used < 16 {
			return nil, nil, corrupt
		}
		f.Sum, b = [16]byte(b[used:used+16]), b[used+16:]
		var err error
		if f.Ref, b, err = meta.DecodeBlobRef(b); err != nil {
			return nil, nil, corrupt
		}
		files = append(files, f)
	}
	return files, b, nil
}
