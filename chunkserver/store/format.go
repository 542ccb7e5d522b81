package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// FormatVersion is the version of everything below one disk's directory.
const FormatVersion = 1

// Names within a disk's directory.
const (
	formatName = "format"
	makingName = "unfinished" // exists until the format file exists
	chunksDir  = "chunks"
	logDir     = "log"
	lockName   = "lock"
)

// The format file, big-endian:
//
//	 0  8  "PENSTKCS"
//	 8  4  version, 1
//	12  4  zero
//	16 16  cluster id
//	32 16  disk id
//	48  4  bytes of a log segment
//	52  4  number of log segments
//	56  4  zero
//	60  4  CRC32C of the bytes before
type format struct {
	cluster, disk [16]byte
	segmentSize   uint32
	segments      uint32
}

const (
	formatMagic = "PENSTKCS"
	formatSize  = 64
)

func (f format) encode() []byte {
	b := make([]byte, formatSize)
	copy(b, formatMagic)
	binary.BigEndian.PutUint32(b[8:], FormatVersion)
	copy(b[16:], f.cluster[:])
	copy(b[32:], f.disk[:])
	binary.BigEndian.PutUint32(b[48:], f.segmentSize)
	binary.BigEndian.PutUint32(b[52:], f.segments)
	binary.BigEndian.PutUint32(b[60:], chunkserver.CRC(b[:60]))
	return b
}

func decodeFormat(b []byte) (f format, err error) {
	const op = "read format file"
	if len(b) < 12 || string(b[:8]) != formatMagic {
		return f, meta.E(op, meta.Invalid, formatName, errors.New("not a chunk store's"))
	}
	if v := binary.BigEndian.Uint32(b[8:]); v != FormatVersion {
		return f, meta.E(op, meta.Version, formatName, fmt.Errorf("the disk has format version %d, this program knows version %d", v, FormatVersion))
	}
	if len(b) != formatSize || binary.BigEndian.Uint32(b[60:]) != chunkserver.CRC(b[:60]) {
		return f, meta.E(op, meta.Corrupt, formatName, nil)
	}
	copy(f.cluster[:], b[16:])
	copy(f.disk[:], b[32:])
	f.segmentSize = binary.BigEndian.Uint32(b[48:])
	f.segments = binary.BigEndian.Uint32(b[52:])
	if f.segmentSize < minSegment || f.segmentSize > maxSegment || f.segmentSize%8 != 0 || f.segments < 3 || f.segments > 4096 {
		return f, meta.E(op, meta.Corrupt, formatName, fmt.Errorf("%d segments of %d bytes", f.segments, f.segmentSize))
	}
	return f, nil
}

// chunkDirs is the number of directories of chunks; the last byte of a chunk's counter selects
// one.
const chunkDirs = 256

func dirOf(id meta.ChunkID) string {
	return path.Join(chunksDir, fmt.Sprintf("%02x", byte(id.Counter)))
}
func dataName(id meta.ChunkID) string { return dirOf(id) + "/" + id.String() + ".data" }
func metaName(id meta.ChunkID) string { return dirOf(id) + "/" + id.String() + ".meta" }
func packName(id meta.ChunkID) string { return dirOf(id) + "/" + id.String() + ".pack" }

// A chunk's .meta file, big-endian. Each block checksum covers ChecksumBlock bytes of the
// .data file, the last one the remaining bytes:
//
//	 0  4  "PSCM"
//	 4  1  version, 1
//	 5  1  state: meta.ChunkOpen or meta.ChunkSealed
//	 6  2  flags: 1 = damaged (bad bytes below the synced mark), 2 = compression saves nothing,
//	       4 = compressed
//	 8 16  chunk id
//	24 12  fence: term 8, seals 4
//	36  8  length, bytes, all of them durable
//	44  4  number of blocks n
//	48 4n  CRC32C of each block
//	..     of a compressed chunk: the layout of the .pack file, see pack.go:
//	       1  algorithm: meta.CompressS2 or meta.CompressZstd; 3 zero
//	       4  number of frames m, of FrameSize plain bytes each
//	       4m length of each frame, in bytes; bit 31: not compressed
//	..  4  CRC32C of the bytes before
//
// The file is replaced as a whole: a new one is written as .meta.tmp, synced and renamed, then
// the directory is synced. The bytes that it describes are durable earlier.
type chunkMeta struct {
	id      meta.ChunkID
	state   meta.ChunkState
	damaged bool
	fence   meta.Fence
	length  uint64
	crcs    []uint32
	dense   bool
	pack    *packing // nil: plain
}

const (
	metaMagic   = "PSCM"
	metaVersion = 1
	metaHead    = 48
	flagDamaged = 1
	flagDense   = 2
	flagPacked  = 4
	// maxChunk bounds a chunk's length (1 TiB), and so the block count of a .meta file.
	maxChunk = 1 << 40
	// maxMeta bounds a .meta file, in bytes.
	maxMeta = metaHead + 4*(maxChunk/block) + 8 + 4*(maxChunk/FrameSize) + 4
)

func (m *chunkMeta) encode() []byte {
	b := make([]byte, metaHead, metaHead+4*len(m.crcs)+4)
	copy(b, metaMagic)
	b[4], b[5] = metaVersion, byte(m.state)
	var flags uint16
	if m.damaged {
		flags |= flagDamaged
	}
	if m.dense {
		flags |= flagDense
	}
	if m.pack != nil {
		flags |= flagPacked
	}
	binary.BigEndian.PutUint16(b[6:], flags)
	id := m.id.Bytes()
	copy(b[8:], id[:])
	putFence(b[24:], m.fence)
	binary.BigEndian.PutUint64(b[36:], m.length)
	binary.BigEndian.PutUint32(b[44:], uint32(len(m.crcs)))
	for _, c := range m.crcs {
		b = binary.BigEndian.AppendUint32(b, c)
	}
	if m.pack != nil {
		b = append(b, byte(m.pack.alg), 0, 0, 0)
		b = binary.BigEndian.AppendUint32(b, uint32(len(m.pack.lens)))
		for _, n := range m.pack.lens {
			b = binary.BigEndian.AppendUint32(b, n)
		}
	}
	return binary.BigEndian.AppendUint32(b, chunkserver.CRC(b))
}

func decodeMeta(id meta.ChunkID, b []byte) (*chunkMeta, error) {
	const op = "read chunk metadata"
	bad := func(why string) (*chunkMeta, error) {
		return nil, meta.E(op, meta.Corrupt, id.String(), errors.New(why))
	}
	if len(b) < metaHead+4 || string(b[:4]) != metaMagic {
		return bad("no chunk metadata")
	}
	if chunkserver.CRC(b[:len(b)-4]) != binary.BigEndian.Uint32(b[len(b)-4:]) {
		return bad("checksum")
	}
	if b[4] != metaVersion {
		return nil, meta.E(op, meta.Version, id.String(), fmt.Errorf("the metadata file has version %d, this program knows version %d", b[4], metaVersion))
	}
	flags := binary.BigEndian.Uint16(b[6:])
	if flags > flagDamaged|flagDense|flagPacked {
		return bad(fmt.Sprintf("unknown flags %#x", flags))
	}
	m := &chunkMeta{
		id:      meta.ChunkIDFromBytes(b[8:]),
		state:   meta.ChunkState(b[5]),
		damaged: flags&flagDamaged != 0,
		dense:   flags&flagDense != 0,
		fence:   getFence(b[24:]),
		length:  binary.BigEndian.Uint64(b[36:]),
	}
	n := uint64(binary.BigEndian.Uint32(b[44:]))
	switch {
	case m.id != id:
		return bad("belongs to " + m.id.String())
	case m.state != meta.ChunkOpen && m.state != meta.ChunkSealed:
		return bad("state")
	case m.length > maxChunk || n != chunkserver.Blocks(m.length):
		return bad("length")
	}
	size := metaHead + 4*n + 4
	if flags&flagPacked != 0 {
		size += 8 + 4*frames(m.length)
	}
	if uint64(len(b)) != size {
		return bad("length")
	}
	m.crcs = make([]uint32, n)
	for i := range m.crcs {
		m.crcs[i] = binary.BigEndian.Uint32(b[metaHead+4*i:])
	}
	if flags&flagPacked != 0 {
		p := b[metaHead+4*n : len(b)-4]
		lens := make([]uint32, frames(m.length))
		for i := range lens {
			lens[i] = binary.BigEndian.Uint32(p[8+4*i:])
		}
		alg := meta.Compression(p[0])
		if !alg.Known() || alg == meta.CompressNone {
			return nil, meta.E(op, meta.Version, id.String(), fmt.Errorf("compressed with algorithm %d", p[0]))
		}
		if m.state != meta.ChunkSealed || binary.BigEndian.Uint32(p[4:]) != uint32(len(lens)) {
			return bad("compressed")
		}
		if err := checkFrames(lens, m.length); err != nil {
			return bad(err.Error())
		}
		m.pack = newPacking(alg, lens)
	}
	return m, nil
}

func putFence(b []byte, f meta.Fence) {
	binary.BigEndian.PutUint64(b, uint64(f.Term))
	binary.BigEndian.PutUint32(b[8:], f.Seals)
}

func getFence(b []byte) meta.Fence {
	return meta.Fence{Term: meta.Term(binary.BigEndian.Uint64(b)), Seals: binary.BigEndian.Uint32(b[8:])}
}

// Fresh reports that Init may make a store on d: d is empty (except lost+found), or has the
// remains of an interrupted Init.
func Fresh(d Disk) (bool, error) {
	names, err := d.List(".")
	if err != nil {
		return false, ioError("look at disk", "", err)
	}
	if slices.Contains(names, makingName) {
		return !slices.Contains(names, formatName), nil
	}
	return !slices.ContainsFunc(names, func(n string) bool { return n != "lost+found" }), nil
}

// Init makes a new, empty store on d, or completes a store whose Init a crash interrupted. It
// refuses a directory with other contents (except lost+found): Exists.
func Init(d Disk, o Options) error {
	const op = "make chunk store"
	if fresh, err := Fresh(d); err != nil {
		return err
	} else if !fresh {
		return meta.E(op, meta.Exists, "", errors.New("the directory is not empty; a new disk needs an empty one"))
	}
	f := format{cluster: o.Cluster, disk: o.Disk, segmentSize: o.SegmentSize, segments: o.Segments}
	if f.segmentSize == 0 || f.segments == 0 {
		f.segmentSize, f.segments = 16<<20, 6
		if total, _, err := d.Space(); err == nil && total < 4<<30 {
			f.segmentSize, f.segments = 1<<20, 6
		}
	}
	if _, err := decodeFormat(f.encode()); err != nil {
		return err
	}
	m, err := d.Open(makingName, true)
	if err != nil {
		return ioError(op, makingName, err)
	}
	if err := errors.Join(m.Close(), d.SyncDir(".")); err != nil {
		return ioError(op, makingName, err)
	}
	dirs := []string{chunksDir, logDir}
	for i := range chunkDirs {
		dirs = append(dirs, fmt.Sprintf("%s/%02x", chunksDir, i))
	}
	for _, dir := range dirs {
		if err := d.Mkdir(dir); err != nil && !errors.Is(err, os.ErrExist) {
			return ioError(op, dir, err)
		}
	}
	if err := d.SyncDir(chunksDir); err != nil {
		return ioError(op, chunksDir, err)
	}
	if err := createLog(d, f); err != nil {
		return err
	}
	// The format file comes last: a directory with one is complete.
	if err := replaceFile(d, formatName, f.encode()); err != nil {
		return ioError(op, formatName, err)
	}
	if err := d.SyncDir("."); err != nil {
		return ioError(op, "", err)
	}
	return made(d)
}

// made removes the mark of an unfinished store, if it exists: a store with a format file is
// complete. A mark that reappears after a crash does no harm.
func made(d Disk) error {
	if err := d.Remove(makingName); err != nil && !errors.Is(err, os.ErrNotExist) {
		return ioError("make chunk store", makingName, err)
	}
	return nil
}

// replaceFile makes name hold b, whole or not at all, after the caller has
// also synced the directory.
func replaceFile(d Disk, name string, b []byte) error {
	if err := writeBeside(d, name, b, true); err != nil {
		return err
	}
	return d.Rename(name+tmpSuffix, name)
}

const tmpSuffix = ".tmp"

// writeBeside writes the future replacement of the file name.
func writeBeside(d Disk, name string, b []byte, sync bool) error {
	f, err := d.Open(name+tmpSuffix, true)
	if err != nil {
		return err
	}
	if err = f.Truncate(0); err == nil {
		_, err = f.WriteAt(b, 0)
	}
	if err == nil && sync {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// readFile reads a whole file of at most limit bytes.
func readFile(d Disk, name string, limit int64) ([]byte, error) {
	f, err := d.OpenRead(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	n, err := f.Size()
	if err != nil {
		return nil, err
	}
	if n > limit {
		return nil, fmt.Errorf("%s: %d bytes, at most %d expected", name, n, limit)
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, err
	}
	return b, nil
}

// readFormat reads the format file, and refuses the store of another cluster or disk.
func readFormat(d Disk, o Options) (format, error) {
	const op = "open chunk store"
	b, err := readFile(d, formatName, 4096)
	if errors.Is(err, os.ErrNotExist) {
		return format{}, meta.E(op, meta.NotFound, formatName,
			errors.New("no format file: an empty or wrong directory, or the disk isn't mounted; nothing was changed"))
	}
	if err != nil {
		return format{}, ioError(op, formatName, err)
	}
	f, err := decodeFormat(b)
	if err != nil {
		return f, err
	}
	var zero [16]byte
	if o.Cluster != zero && o.Cluster != f.cluster {
		return f, meta.E(op, meta.Invalid, formatName, fmt.Errorf("belongs to cluster %x, not %x", f.cluster, o.Cluster))
	}
	if o.Disk != zero && o.Disk != f.disk {
		return f, meta.E(op, meta.Invalid, formatName, fmt.Errorf("is disk %x, not %x", f.disk, o.Disk))
	}
	return f, nil
}

// chunkOf tells which chunk a file is of.
func chunkOf(name string) (meta.ChunkID, bool) {
	for _, suffix := range []string{".data", ".pack", ".meta"} {
		if hex, ok := strings.CutSuffix(name, suffix); ok {
			id, err := meta.ParseChunkID(hex)
			return id, err == nil
		}
	}
	return meta.ChunkID{}, false
}
