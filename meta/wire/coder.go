package wire

import (
	"encoding/binary"
	"errors"

	"penstock.io/penstock/meta"
)

// coder walks a message's fields in order, and either appends or reads the fields. One
// function describes a message, so the two directions can't drift apart.
type coder struct {
	buf []byte // encode: bytes written; decode: bytes left
	dec bool
	err error
}

var errShort = errors.New("the body ends too early")

func (c *coder) fail(err error) {
	if c.err == nil {
		c.err = err
	}
	c.buf = nil
}

func (c *coder) u64(v *uint64) {
	if !c.dec {
		c.buf = binary.AppendUvarint(c.buf, *v)
		return
	}
	x, n := binary.Uvarint(c.buf)
	if n <= 0 {
		c.fail(errShort)
		*v = 0
		return
	}
	*v, c.buf = x, c.buf[n:]
}

// Encoding only reads a message: several goroutines may encode messages that share data.

func (c *coder) u32(v *uint32) {
	x := uint64(*v)
	c.u64(&x)
	if !c.dec {
		return
	}
	if x > 1<<32-1 {
		c.fail(errors.New("a 32-bit value is larger"))
	}
	*v = uint32(x)
}

func (c *coder) u8(v *uint8) {
	if !c.dec {
		c.buf = append(c.buf, *v)
		return
	}
	if len(c.buf) < 1 {
		c.fail(errShort)
		*v = 0
		return
	}
	*v, c.buf = c.buf[0], c.buf[1:]
}

func (c *coder) bool(v *bool) {
	var b uint8
	if *v {
		b = 1
	}
	c.u8(&b)
	if !c.dec {
		return
	}
	if b > 1 {
		c.fail(errors.New("a flag is neither 0 nor 1"))
	}
	*v = b == 1
}

func (c *coder) fixed(v *uint64) {
	if !c.dec {
		c.buf = binary.LittleEndian.AppendUint64(c.buf, *v)
		return
	}
	if len(c.buf) < 8 {
		c.fail(errShort)
		*v = 0
		return
	}
	*v, c.buf = binary.LittleEndian.Uint64(c.buf), c.buf[8:]
}

func (c *coder) time(v *meta.Time) {
	x := uint64(*v)
	c.fixed(&x)
	if c.dec {
		*v = meta.Time(x)
	}
}

// count codes the length of a list. Decoding rejects a length larger than the rest of the
// body, so that a short frame causes no large allocation.
func (c *coder) count(n int) int {
	x := uint64(n)
	c.u64(&x)
	if c.dec && x > uint64(len(c.buf)) {
		c.fail(errShort)
		return 0
	}
	return int(x)
}

func (c *coder) str(v *string) {
	n := c.count(len(*v))
	if !c.dec {
		c.buf = append(c.buf, *v...)
		return
	}
	*v = string(c.buf[:n])
	c.buf = c.buf[n:]
}

func (c *coder) bytes(v *[]byte) {
	n := c.count(len(*v))
	if !c.dec {
		c.buf = append(c.buf, *v...)
		return
	}
	if n == 0 {
		*v = nil
		return
	}
	*v = append(make([]byte, 0, n), c.buf[:n]...)
	c.buf = c.buf[n:]
}

// list codes a slice: the length, then each element.
func list[T any](c *coder, v *[]T, elem func(*coder, *T)) {
	n := c.count(len(*v))
	if c.dec {
		if n == 0 {
			*v = nil
			return
		}
		*v = make([]T, 0, min(n, 1024))
		for range n {
			var e T
			elem(c, &e)
			if c.err != nil {
				return
			}
			*v = append(*v, e)
		}
		return
	}
	for i := range *v {
		elem(c, &(*v)[i])
	}
}

func ino(c *coder, v *meta.Ino)                { c.u64((*uint64)(v)) }
func server(c *coder, v *meta.ServerID)        { c.u64((*uint64)(v)) }
func (c *coder) seq(v *meta.Seq)               { c.u64((*uint64)(v)) }
func (c *coder) volume(v *meta.VolumeID)       { c.u32((*uint32)(v)) }
func (c *coder) session(v *meta.SessionID)     { c.fixed((*uint64)(v)) }
func (c *coder) mode(v *meta.LeaseMode)        { c.u8((*uint8)(v)) }
func servers(c *coder, v *[]meta.ServerID)     { list(c, v, server) }
func (c *coder) fence(f *meta.Fence)           { c.u64((*uint64)(&f.Term)); c.u32(&f.Seals) }
func (c *coder) chunkState(v *meta.ChunkState) { c.u8((*uint8)(v)) }

func (c *coder) kind(k *meta.Kind) {
	x := uint32(*k)
	c.u32(&x)
	if c.dec {
		*k = meta.Kind(x)
	}
}

func (c *coder) opID(o *meta.OpID) {
	c.fixed(&o.Incarnation)
	c.u64(&o.Unique)
	c.u32(&o.Step)
}

func (c *coder) chunkID(id *meta.ChunkID) {
	c.volume(&id.Volume)
	c.u32(&id.Term)
	c.u64(&id.Counter)
}

func (c *coder) attr(a *meta.Attr) {
	ino(c, &a.Ino)
	if a.Ino == 0 {
		return // no attributes
	}
	c.u32(&a.Mode)
	c.u32(&a.Nlink)
	c.u32(&a.UID)
	c.u32(&a.GID)
	c.u32(&a.Rdev)
	c.u32((*uint32)(&a.Flags))
	c.u64(&a.Size)
	c.u64(&a.Blocks)
	c.time(&a.Atime)
	c.time(&a.Mtime)
	c.time(&a.Ctime)
	c.time(&a.Btime)
	c.u64(&a.Change)
	ino(c, &a.Parent)
}

func extent(c *coder, e *meta.Extent) {
	c.u64(&e.Off)
	c.u64(&e.Len)
	c.chunkID(&e.Chunk)
	c.u64(&e.ChunkOff)
	c.bool(&e.OpenEnded)
}

func dirent(c *coder, d *meta.Dirent) {
	c.str(&d.Name)
	ino(c, &d.Ino)
	c.u32(&d.Type)
	c.u64(&d.Cookie)
	c.volume(&d.Volume)
	has := d.Attr != nil
	c.bool(&has)
	if has {
		if c.dec {
			d.Attr = new(meta.Attr)
		}
		c.attr(d.Attr)
	}
}

func chunkRecord(c *coder, r *meta.ChunkRecord) {
	c.chunkID(&r.ID)
	c.chunkState(&r.State)
	c.session(&r.Session)
	c.fence(&r.Fence)
	servers(c, &r.Servers)
	c.u64(&r.Length)
	c.u32(&r.CRC)
	c.u64(&r.Live)
	c.bool(&r.Own)
}

func chunkPlace(c *coder, p *meta.ChunkPlace) {
	c.chunkID(&p.ID)
	servers(c, &p.Servers)
	c.bool(&p.Sealed)
	c.u64(&p.Length)
}

func copySource(c *coder, s *meta.CopySource) {
	c.chunkID(&s.Chunk)
	c.u64(&s.Length)
	c.u32(&s.CRC)
	servers(c, &s.Servers)
}

func chunkGrant(c *coder, g *meta.ChunkGrant) {
	c.chunkID(&g.ID)
	c.fence(&g.Fence)
	servers(c, &g.Servers)
	c.bytes(&g.Cap)
	c.u64(&g.TTL)
	c.u64(&g.MaxLen)
}

func serverInfo(c *coder, s *meta.ServerInfo) {
	server(c, &s.ID)
	c.str(&s.Addr)
	c.str(&s.Topology)
	c.str(&s.Class)
	c.u64(&s.Total)
	c.u64(&s.Free)
	c.str(&s.Host)
	list(c, &s.Disks, diskInfo)
	c.str(&s.Local)
}

func diskInfo(c *coder, d *meta.DiskInfo) {
	c.str(&d.ID)
	c.str(&d.Path)
	c.str(&d.Class)
	c.u64(&d.Total)
	c.u64(&d.Free)
	c.u8((*uint8)(&d.State))
	c.str(&d.Detail)
	c.u32(&d.Scrubbed)
	c.time(&d.ScrubEnd)
}

func replicaInfo(c *coder, r *meta.ReplicaInfo) {
	c.chunkID(&r.ID)
	c.chunkState(&r.State)
	c.u64(&r.Length)
	c.u64(&r.Synced)
	c.u32(&r.CRC)
	c.fence(&r.Fence)
	c.str(&r.Disk)
	c.kind(&r.Err)
	c.u8((*uint8)(&r.Form))
	c.u64(&r.Stored)
	c.bool(&r.Dense)
}

func replicaEvent(c *coder, e *meta.ReplicaEvent) {
	c.u64(&e.Seq)
	c.u8((*uint8)(&e.Kind))
	c.chunkID(&e.Chunk)
	c.str(&e.Disk)
	c.str(&e.Detail)
}

func grant(c *coder, g *meta.Grant) { ino(c, &g.Ino); c.mode(&g.Mode) }

func (c *coder) policy(p *meta.Policy) {
	c.u64(&p.QuotaBytes)
	c.u64(&p.QuotaInodes)
	c.bool(&p.QuotaSnapshots)
	c.u32(&p.Replicas)
	c.u32(&p.MinReplicas)
	c.u64(&p.MaxChunk)
	c.bool(&p.SealOnClose)
	c.bool(&p.Immutable)
	c.bool(&p.SyncOnClose)
	c.bool(&p.NoAtime)
	c.str(&p.Topology)
	c.u8((*uint8)(&p.Spread))
	c.str(&p.Class)
	c.bool(&p.LocalFirst)
	c.bool(&p.Encrypt)
}

func lock(c *coder, l *meta.Lock) {
	ino(c, &l.Ino)
	c.session(&l.Session)
	c.fixed(&l.Owner)
	c.u32(&l.PID)
	c.u8((*uint8)(&l.Type))
	c.u64(&l.Start)
	c.u64(&l.End)
	c.bool(&l.Flock)
}
