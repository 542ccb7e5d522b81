package server

import (
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// adminDisk hands an administrator's word about a disk to its chunk server.
func (s *Server) adminDisk(ctx context.Context, m *wire.Admin) error {
	o := meta.Order{Kind: meta.OrderDisk, Disk: m.Name}
	switch m.Entry {
	case "fail":
	case "replace":
		o.Adopt = true
	default:
		return meta.E("admin", meta.Invalid, m.Entry, errors.New("a disk is failed or replaced"))
	}
	_, err := s.Order(ctx, meta.ServerID(m.Ino), o)
	return err
}

// adminScrub has one chunk server, or all that are connected, read everything.
func (s *Server) adminScrub(ctx context.Context, only meta.ServerID) error {
	asked := 0
	var errs []error
	for _, i := range s.liveServers() {
		if only != 0 && i.ID != only {
			continue
		}
		asked++
		if _, err := s.Order(ctx, i.ID, meta.Order{Kind: meta.OrderScrub}); err != nil {
			errs = append(errs, err)
		}
	}
	if asked == 0 {
		return meta.E("scrub", meta.Unavailable, fmt.Sprintf("chunk server %d", only), errors.New("it is not connected"))
	}
	return errors.Join(errs...)
}
