package fuse

import "penstock.io/penstock/meta"

// A stream is a directory with the file stream.json. Beside its files, the directory has names
// that no listing shows, so that programs which walk over a tree come to an end:
//
//	tail/N     the records of partition N from now on, as lines of text; a READ waits for records
//	in.jsonl   takes lines, and appends each line as a record (streaminput.go)
//
// A node of such a file is the inode of a directory with a mark in the two highest bits of the
// inode number, which a volume never gives to an inode (meta.LastIno):
//
//	1  tail      the directory of the stream
//	2  tail/N    the directory of the partition, log/N
//	3  in.jsonl  the directory of the stream
//
// So the nodes, too, have the same meaning in each process that serves the mount.

// Names in the directory of a stream.
const (
	tailName   = "tail"
	inputName  = "in.jsonl"
	logName    = "log"
	streamSpec = "stream.json"
)

// streamKind is the mark of a node.
type streamKind uint8

const (
	noStream    streamKind = iota
	streamTails            // the directory tail
	streamTail             // a file of tail
	streamInput            // in.jsonl
)

// markShift is the lowest bit of the mark in an inode number.
const markShift = meta.InoBits - 2

// streamOf returns the mark of a node, the volume, and the inode without the mark.
func streamOf(node uint64) (kind streamKind, v meta.VolumeID, ino meta.Ino) {
	v = meta.VolumeID(node >> meta.InoBits)
	if v == 0 || v > meta.MaxVolume {
		return noStream, 0, 0
	}
	return streamKind(node >> markShift & 3), v, meta.Ino(node) & meta.LastIno
}

// isStream reports whether a node is a file of a stream that no listing shows.
func isStream(node uint64) bool {
	kind, _, _ := streamOf(node)
	return kind != noStream
}

// isOwn reports whether a node belongs to the mount itself, which programs can't change.
func isOwn(node uint64) bool { return isText(node) || isStream(node) }

// isStreamName reports whether a name that a directory does not have may be a file of a stream.
func isStreamName(name string) bool { return name == tailName || name == inputName }

// waits reports whether a request may wait for ever, and therefore ends with any signal to its
// caller.
func waits(op uint32, node uint64) bool {
	switch op {
	case opSetlkw:
		return true
	case opRead:
		return isStream(node)
	case opWrite, opFsync, opFlush:
		return isInput(node)
	}
	return false
}
