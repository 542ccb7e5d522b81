package server

import (
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
)

// scrub orders chunk server only, or all connected chunk servers if only is 0, to read and
// verify all replicas.
func (cs *chunkServers) scrub(ctx context.Context, only meta.ServerID) error {
	asked := 0
	var errs []error
	for _, i := range cs.liveServers() {
		if only != 0 && i.ID != only {
			continue
		}
		asked++
		if _, err := cs.Order(ctx, i.ID, meta.Order{Kind: meta.OrderScrub}); err != nil {
			errs = append(errs, err)
		}
	}
	if asked == 0 {
		return meta.E("scrub", meta.Unavailable, fmt.Sprintf("chunk server %d", only), errors.New("it is not connected"))
	}
	return errors.Join(errs...)
}
