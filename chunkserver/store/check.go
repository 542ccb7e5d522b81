package store

import (
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"

	"penstock.io/penstock/meta"
)

// CheckReport is the result of Check.
type CheckReport struct {
	Chunks, Sealed uint64
	Packed         uint64 // compressed chunks
	Bytes          uint64 // bytes read with right checksums
	LogRecords     uint64
	// Notes are harmless oddities, for example remains of a crash.
	Notes []string
	// Problems are damage. Without problems, the disk is whole.
	Problems []string
}

// Check reads and compares everything on a disk, without changing anything. Check has decoders
// of its own for the formats, so that a mistake in the encoding code shows up. The store may be
// open, but only a check of a closed store is reliable. An error means that the disk could not
// be read; damage is in the report.
func Check(d Disk) (CheckReport, error) {
	k := checker{d: d, inLog: map[string]bool{}}
	if err := k.run(); err != nil {
		return k.rep, meta.E("check chunk store", meta.IO, "", err)
	}
	return k.rep, nil
}

type checker struct {
	d     Disk
	rep   CheckReport
	inLog map[string]bool // hexadecimal ids of chunks in the log
}

func (k *checker) problem(format string, args ...any) {
	k.rep.Problems = append(k.rep.Problems, fmt.Sprintf(format, args...))
}

func (k *checker) note(format string, args ...any) {
	k.rep.Notes = append(k.rep.Notes, fmt.Sprintf(format, args...))
}

// be reads a big-endian number of n bytes.
func be(b []byte, off, n int) (v uint64) {
	for _, c := range b[off : off+n] {
		v = v<<8 | uint64(c)
	}
	return v
}

func crcOf(parts ...[]byte) uint64 {
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	for _, p := range parts {
		h.Write(p)
	}
	return uint64(h.Sum32())
}

// whole reads a file; nil if the file does not exist.
func (k *checker) whole(name string) ([]byte, error) {
	f, err := k.d.OpenRead(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	n, err := f.Size()
	if err != nil {
		return nil, err
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return b, nil
}

func (k *checker) run() error {
	b, err := k.whole("format")
	if err != nil {
		return err
	}
	switch {
	case len(b) != 64 || string(b[:8]) != "PENSTKCS":
		k.problem("format: missing or no chunk store's")
		return nil
	case crcOf(b[:60]) != be(b, 60, 4):
		k.problem("format: checksum")
		return nil
	case be(b, 8, 4) != 1 && be(b, 8, 4) != 2:
		k.problem("format: version %d", be(b, 8, 4))
		return nil
	}
	if err := k.log(b[32:48], be(b, 48, 4), be(b, 52, 4)); err != nil {
		return err
	}
	for i := range 256 {
		if err := k.dir(fmt.Sprintf("chunks/%02x", i)); err != nil {
			return err
		}
	}
	return nil
}

// log reads the log from the checkpoint on.
func (k *checker) log(disk []byte, size, count uint64) error {
	cp, err := k.whole("log/checkpoint")
	if err != nil {
		return err
	}
	var best, pos uint64
	for off := 0; off+44 <= len(cp); off += 4096 {
		c := cp[off : off+44]
		if string(c[:4]) == "PSLC" && crcOf(c[:40]) == be(c, 40, 4) && string(c[8:24]) == string(disk) && be(c, 24, 8) > best {
			best, pos = be(c, 24, 8), be(c, 32, 8)
		}
	}
	if best == 0 {
		k.problem("log/checkpoint: no valid copy")
		return nil
	}
	var prev []byte
	seq, off := pos/size, pos%size
	for ; ; seq, off = seq+1, 4096 {
		name := fmt.Sprintf("log/%04d", seq%count)
		b, err := k.whole(name)
		if err != nil {
			return err
		}
		if uint64(len(b)) != size {
			k.problem("%s: %d bytes, not %d", name, len(b), size)
			return nil
		}
		if string(b[:4]) != "PSLS" || crcOf(b[:52]) != be(b, 52, 4) || be(b, 24, 8) != seq || prev != nil && string(b[44:52]) != string(prev) {
			if prev == nil {
				k.problem("%s: not segment %d, where the log begins", name, seq)
			}
			return nil
		}
		prev = b[32:40]
		ended, err := k.segment(name, b, seq, off)
		if err != nil || !ended {
			return err
		}
	}
}

// segment reads the records of one segment. ended: the log continues in the next segment.
func (k *checker) segment(name string, b []byte, seq, off uint64) (ended bool, err error) {
	at := int(off)
	for at+32 <= len(b) && string(b[at:at+4]) == "PSLR" {
		h := b[at : at+32]
		n := int(be(h, 8, 4))
		if n > len(b)-at-32 || be(h, 12, 4) != seq&0xffffffff || be(h, 24, 4) != uint64(at) ||
			crcOf(b[32:40], h[:28], b[at+32:at+32+n]) != be(h, 28, 4) {
			break
		}
		body := b[at+32 : at+32+n]
		k.rep.LogRecords++
		switch h[4] {
		case 1, 2, 3, 4, 5:
			if n < 16 {
				k.problem("%s at %d: record of type %d with %d bytes", name, at, h[4], n)
				return false, nil
			}
			k.inLog[hex.EncodeToString(body[:16])] = true
		case 6:
		case 7:
			return true, nil
		default:
			k.problem("%s at %d: record of type %d", name, at, h[4])
		}
		at += (32 + n + 7) / 8 * 8
	}
	// The end, unless a later record says that the log was durable beyond this position.
	end := seq*uint64(len(b)) + uint64(at)
	for o := at; o+32 <= len(b); o += 8 {
		if string(b[o:o+4]) != "PSLR" || be(b, o+12, 4) != seq&0xffffffff {
			continue
		}
		n := int(be(b, o+8, 4))
		if n <= len(b)-o-32 && crcOf(b[32:40], b[o:o+28], b[o+32:o+32+n]) == be(b, o+28, 4) && be(b, o+16, 8) > end {
			k.problem("%s at %d: damaged below what was durable", name, at)
			return false, nil
		}
	}
	return false, nil
}

// dir checks the chunks of one directory.
func (k *checker) dir(dir string) error {
	names, err := k.d.List(dir)
	if errors.Is(err, os.ErrNotExist) {
		k.problem("%s: missing", dir)
		return nil
	}
	if err != nil {
		return err
	}
	slices.Sort(names)
	for _, n := range names {
		id, isMeta := strings.CutSuffix(n, ".meta")
		id, isData := strings.CutSuffix(id, ".data")
		id, isPack := strings.CutSuffix(id, ".pack")
		switch b, err := hex.DecodeString(id); {
		case strings.HasSuffix(n, ".tmp"):
			k.note("%s/%s: left by a crash", dir, n)
		case err != nil || len(b) != 16 || !isMeta && !isData && !isPack:
			k.note("%s/%s: not of a chunk", dir, n)
		case dir != fmt.Sprintf("chunks/%02x", b[15]):
			k.problem("%s/%s: in the wrong directory", dir, n)
		case isMeta:
			if err := k.chunk(dir+"/"+id, b, k.inLog[id]); err != nil {
				return err
			}
			if slices.Contains(names, id+".data") && slices.Contains(names, id+".pack") {
				k.note("%s/%s: plain and compressed, one of them left by a crash", dir, id)
			}
		case !slices.Contains(names, id+".meta") && !k.inLog[id]:
			k.note("%s/%s: data that nothing is known of, left by a crash", dir, n)
		}
	}
	return nil
}

// chunk checks a chunk's .meta and .data. With flux, the log has newer facts than .meta; then
// only facts of .meta about a chunk without a later cut are certain.
func (k *checker) chunk(path string, id []byte, flux bool) error {
	b, err := k.whole(path + ".meta")
	if err != nil || b == nil {
		return err
	}
	k.rep.Chunks++
	if len(b) < 52 || string(b[:4]) != "PSCM" || crcOf(b[:len(b)-4]) != be(b, len(b)-4, 4) {
		k.problem("%s.meta: damaged", path)
		return nil
	}
	length, n := be(b, 36, 8), be(b, 44, 4)
	switch {
	case b[4] != 1:
		k.problem("%s.meta: version %d", path, b[4])
		return nil
	case string(b[8:24]) != string(id):
		k.problem("%s.meta: belongs to chunk %x", path, b[8:24])
		return nil
	case n != (length+65535)/65536 || b[7]&4 == 0 && uint64(len(b)) != 52+4*n || b[5] != 1 && b[5] != 2:
		k.problem("%s.meta: inconsistent", path)
		return nil
	}
	if b[7]&1 != 0 {
		k.problem("%s: damaged below its synced length, as recovery found", path)
	}
	sealed := b[5] == 2
	if sealed {
		k.rep.Sealed++
	}
	if b[7]&4 != 0 {
		k.rep.Packed++
		return k.packed(path, b, length, n)
	}
	f, err := k.d.OpenRead(path + ".data")
	if errors.Is(err, os.ErrNotExist) {
		if length > 0 && !flux {
			k.problem("%s.data: missing", path)
		}
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil {
		return err
	}
	if uint64(size) > length && !flux {
		k.note("%s.data: %d bytes beyond the chunk's end, left by a crash", path, uint64(size)-length)
	}
	if flux && !sealed {
		return nil // a seal in the log may have cut the chunk below the length in .meta
	}
	buf := make([]byte, 65536)
	for i := uint64(0); i < n; i++ {
		want := min(65536, length-i*65536)
		got, err := f.ReadAt(buf[:want], int64(i*65536))
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if uint64(got) < want {
			k.problem("%s.data: ends at %d, should at %d", path, size, length)
			return nil
		}
		if crcOf(buf[:want]) != be(b, 48+4*int(i), 4) {
			k.problem("%s.data: block at %d damaged", path, i*65536)
			return nil
		}
		k.rep.Bytes += want
	}
	return nil
}

// packed checks a compressed chunk of n blocks, whose .meta is b.
func (k *checker) packed(path string, b []byte, length, n uint64) error {
	m := (length + 131071) / 131072
	if uint64(len(b)) != 60+4*n+4*m || be(b, int(52+4*n), 4) != m || b[5] != 2 {
		k.problem("%s.meta: inconsistent", path)
		return nil
	}
	z, err := k.whole(path + ".pack")
	if err != nil {
		return err
	}
	for i := uint64(0); i < m; i++ {
		size, plain := be(b, int(56+4*n+4*i), 4), min(131072, length-i*131072)
		frame := z
		if asIs := size >= 1<<31; asIs {
			size -= 1 << 31
		}
		if size > uint64(len(z)) {
			k.problem("%s.pack: ends within the bytes at %d", path, i*131072)
			return nil
		}
		frame, z = frame[:size], z[size:]
		out, err := frame, error(nil)
		switch alg := b[48+4*n]; {
		case be(b, int(56+4*n+4*i), 4) >= 1<<31:
		case alg == 1:
			var got int
			if got, err = s2.DecodedLen(frame); err == nil && uint64(got) > plain {
				err = fmt.Errorf("%d bytes, not %d", got, plain)
			}
			if err == nil {
				out, err = s2.Decode(nil, frame)
			}
		case alg == 2:
			var d *zstd.Decoder
			if d, err = zstd.NewReader(nil, zstd.WithDecoderMaxMemory(131072), zstd.WithDecoderConcurrency(1)); err == nil {
				out, err = d.DecodeAll(frame, nil)
				d.Close()
			}
		default:
			err = fmt.Errorf("algorithm %d", alg)
		}
		if err != nil || uint64(len(out)) != plain {
			if err == nil {
				err = fmt.Errorf("%d bytes, not %d", len(out), plain)
			}
			k.problem("%s.pack: the bytes at %d can't be decoded: %v", path, i*131072, err)
			return nil
		}
		for at := uint64(0); at < plain; at += 65536 {
			if crcOf(out[at:min(at+65536, plain)]) != be(b, int(48+4*(i*2+at/65536)), 4) {
				k.problem("%s.pack: block at %d damaged", path, i*131072+at)
				return nil
			}
		}
		k.rep.Bytes += plain
	}
	if len(z) > 0 {
		k.problem("%s.pack: %d bytes more than its index says", path, len(z))
	}
	return nil
}
