package penstock

import (
	"context"
	"errors"
)

// gather copies small blobs of many files into one append.
type gather struct {
	v    *Volume
	buf  []byte
	list []gathered
}

type gathered struct {
	w  *work
	b  *blob
	at int
}

func (g *gather) add(ctx context.Context, w *work, b *blob) error {
	if len(g.buf)+len(b.data) > gatherSize {
		if err := g.flush(ctx); err != nil {
			return err
		}
	}
	if g.buf == nil {
		g.buf = g.v.c.buf.buffer(gatherSize)
	}
	g.list = append(g.list, gathered{w, b, len(g.buf)})
	g.buf = append(g.buf, b.data...)
	return nil
}

func (g *gather) flush(ctx context.Context) error {
	if len(g.list) == 0 {
		return nil
	}
	c, off, err := g.v.chunks.appendPacked(ctx, g.buf)
	for _, it := range g.list {
		if err != nil {
			it.w.err = errors.Join(it.w.err, pushAgain(ctx, err))
			continue
		}
		g.v.back.placed(it.w.in, it.b, c, off+uint64(it.at))
	}
	g.list, g.buf = g.list[:0], g.buf[:0]
	return err
}

func (g *gather) close() {
	if g.buf != nil {
		g.v.c.buf.recycle(g.buf)
	}
}
