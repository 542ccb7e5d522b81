package local

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"sync"
	"sync/atomic"

	chunkclient "penstock.io/penstock/chunkserver/client"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/server"
)

// chunkBlob keeps the files of checkpoints as chunks of volume 0. Volume 0 has no state: the
// checkpoint's record in etcd lists the chunks' ids and servers, so that restoring a volume
// needs no other volume.
type chunkBlob struct {
	creds  *peer.Credentials
	log    *slog.Logger
	server *server.Server

	last atomic.Uint32 // counts the chunks made here

	mu     sync.Mutex
	client *chunkclient.Client
}

// blobPart is the largest part of a blob, in bytes. Each part is a chunk.
const blobPart = 256 << 20

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func newChunkBlob(creds *peer.Credentials, log *slog.Logger) *chunkBlob {
	return &chunkBlob{creds: creds, log: log}
}

func (b *chunkBlob) chunks() *chunkclient.Client {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.client == nil {
		b.client = chunkclient.New(chunkclient.Config{
			Resolve: b.server.Resolve,
			ReadCap: b.server.SystemReadCap,
			HostID:  process.Boot(), Logger: b.log, Creds: b.creds,
		})
	}
	return b.client
}

// Close ends the connections.
func (b *chunkBlob) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.client == nil {
		return nil
	}
	return b.client.Close()
}

// Put writes a blob's chunks, syncs and seals the chunks, and reads the blob back. After an
// error, Put deletes the parts.
func (b *chunkBlob) Put(ctx context.Context, of meta.BlobOwner, name string, r io.Reader) (ref meta.BlobRef, err error) {
	ref.Name = name
	defer func() {
		if err != nil {
			b.Delete(context.WithoutCancel(ctx), ref)
		}
	}()
	sum := crc32.New(castagnoli)
	buf := make([]byte, 1<<20)
	for {
		part, n, err := b.putPart(ctx, of, io.TeeReader(r, sum), buf)
		if len(part.Servers) > 0 { // also a part that failed: servers may have its chunk
			ref.Parts = append(ref.Parts, part)
			ref.Length += n
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			return ref, err
		}
	}
	ref.CRC = sum.Sum32()
	rd, err := b.Get(ctx, ref)
	if err != nil {
		return ref, err
	}
	_, err = io.Copy(io.Discard, rd)
	return ref, errors.Join(err, rd.Close())
}

// putPart writes a chunk. A part without servers has no chunk. io.EOF: the reader is at its
// end.
func (b *chunkBlob) putPart(ctx context.Context, of meta.BlobOwner, r io.Reader, buf []byte) (part meta.BlobPart, n uint64, err error) {
	// A volume's term belongs to a single owner in a single process, so the id is new.
	id := meta.ChunkID{Term: uint32(of.Term), Counter: uint64(of.Volume)<<32 | uint64(b.last.Add(1))}
	grant, err := b.server.SystemGrant(id, blobPart)
	if err != nil {
		return part, 0, err
	}
	n, end, err := b.write(ctx, grant, r, buf, blobPart)
	if n == 0 && err == nil {
		return part, 0, io.EOF
	}
	part = meta.BlobPart{Chunk: id, Length: n, Servers: grant.Servers}
	if err != nil {
		return part, n, err
	}
	fence := grant.Fence
	fence.Seals++
	for _, s := range grant.Servers {
		if _, err := b.server.Order(ctx, s, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: fence, Final: true, Length: n}); err != nil {
			return part, n, err
		}
	}
	if end {
		return part, n, io.EOF
	}
	return part, n, nil
}

// write appends at most limit bytes to a chunk and syncs the chunk. end: the reader is at its
// end.
func (b *chunkBlob) write(ctx context.Context, grant meta.ChunkGrant, r io.Reader, buf []byte, limit uint64) (n uint64, end bool, err error) {
	w := b.chunks().NewWriter(grant)
	defer w.Close()
	for n < limit && !end {
		k, err := io.ReadFull(r, buf)
		end = err == io.EOF || err == io.ErrUnexpectedEOF
		if err != nil && !end {
			return n, false, meta.E("write chunk", meta.IO, "", err)
		}
		if k == 0 {
			break
		}
		if _, err := w.Append(ctx, buf[:k]); err != nil {
			return n, false, err
		}
		n += uint64(k)
	}
	if n == 0 {
		return 0, end, nil
	}
	return n, end, w.Sync(ctx)
}

// Write writes a chunk of any volume, for indexes of snapshots.
func (b *chunkBlob) Write(ctx context.Context, g meta.ChunkGrant, r io.Reader) (uint64, error) {
	n, _, err := b.write(ctx, g, r, make([]byte, 1<<20), g.MaxLen)
	return n, err
}

// Get returns a reader of a blob. At the end of the blob, Read returns Corrupt if the length
// or the checksum is wrong.
func (b *chunkBlob) Get(ctx context.Context, ref meta.BlobRef) (io.ReadCloser, error) {
	for _, p := range ref.Parts {
		if err := b.server.AwaitServer(ctx, p.Servers); err != nil {
			return nil, err
		}
	}
	return &blobReader{ctx: ctx, b: b, ref: ref, sum: crc32.New(castagnoli)}, nil
}

type blobReader struct {
	ctx  context.Context
	b    *chunkBlob
	ref  meta.BlobRef
	part int
	off  uint64
	read uint64
	sum  interface {
		io.Writer
		Sum32() uint32
	}
}

func (r *blobReader) Read(p []byte) (int, error) {
	for r.part < len(r.ref.Parts) && r.off == r.ref.Parts[r.part].Length {
		r.part, r.off = r.part+1, 0
	}
	if r.part == len(r.ref.Parts) {
		if r.read != r.ref.Length || r.sum.Sum32() != r.ref.CRC {
			return 0, meta.E("read blob", meta.Corrupt, r.ref.Name, fmt.Errorf("%d bytes with checksum %08x, want %d with %08x", r.read, r.sum.Sum32(), r.ref.Length, r.ref.CRC))
		}
		return 0, io.EOF
	}
	part := r.ref.Parts[r.part]
	n := min(uint64(len(p)), part.Length-r.off)
	pl := meta.ChunkPlace{ID: part.Chunk, Servers: part.Servers, Sealed: true, Length: part.Length}
	if err := r.b.chunks().ReadAt(r.ctx, pl, p[:n], r.off); err != nil {
		return 0, err
	}
	r.sum.Write(p[:n])
	r.off += n
	r.read += n
	return int(n), nil
}

func (r *blobReader) Close() error { return nil }

// ReadAt reads bytes of any volume's chunks, for digests of snapshots.
func (b *chunkBlob) ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error {
	return b.chunks().ReadAt(ctx, pl, p, off)
}

// Delete removes a blob's parts from their servers.
func (b *chunkBlob) Delete(ctx context.Context, ref meta.BlobRef) error {
	var errs []error
	for _, p := range ref.Parts {
		for _, s := range p.Servers {
			_, err := b.server.Order(ctx, s, meta.Order{Kind: meta.OrderDelete, Chunk: p.Chunk, Fence: meta.Fence{Term: 1<<64 - 1}})
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
