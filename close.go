package penstock

import (
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
)

// Close makes everything durable, gives all leases back and ends the session. If that fails,
// or ctx ends first, the error names what was lost.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()
	var errs []error
	for _, v := range c.openVolumes() {
		if err := v.back.flushAll(ctx, flushClose); err != nil {
			errs = append(errs, err)
		}
		if err := v.back.closeEnds(ctx); err != nil {
			errs = append(errs, err)
		}
		if err := v.SyncAll(ctx); err != nil {
			errs = append(errs, err)
		}
		v.chunks.retireAll(ctx)
	}
	c.cancel()
	for _, v := range c.openVolumes() {
		v.leaderships.endAll()
	}
	errs = append(errs, c.sess.Close(ctx))
	c.wg.Wait()
	errs = append(errs, c.chunks.Close())
	if left := c.buf.inUse(); left > 0 {
		errs = append(errs, meta.E("close", meta.IO, fmt.Sprintf("%d written bytes are lost", left), nil))
	}
	return errors.Join(errs...)
}

// closeEnds commits the lengths of files with an open-ended last extent.
func (wb *writeBack) closeEnds(ctx context.Context) error {
	var first error
	for _, in := range wb.v.c.table.all(func(in *inode) bool { return in.vol == wb.v }) {
		in.mu.Lock()
		open := in.file != nil && (in.file.own.ended || in.file.own.chunk != nil)
		in.mu.Unlock()
		if open {
			if err := wb.flushOne(ctx, in, flushClose); err != nil && first == nil {
				first = err
			}
		}
		in.put()
	}
	return first
}
