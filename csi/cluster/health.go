package cluster

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// Health tells of the volumes that something is wrong with, as the metadata servers
// know it: of those that are open, as of the last inspection of their chunks, some
// seconds ago. The others were as they should be when they were closed, and are
// opened when a chunk server goes. Errors: AccessDenied; Unavailable, a metadata
// server that runs does not answer.
func (c *Cluster) Health(ctx context.Context) (all map[meta.VolumeID]meta.VolumeHealth, err error) {
	err = c.with(ctx, func(s *client.Session) error {
		all = map[meta.VolumeID]meta.VolumeHealth{}
		// With the first answer has come who the metadata servers are.
		if _, err := s.Admin(ctx, wire.Admin{Op: wire.AdminVolumeByName, Volume: meta.RootVolume}); err != nil {
			return err
		}
		for _, m := range s.MetaServers() {
			if err := healthAt(ctx, s, m.Addr, all); err != nil {
				return err
			}
		}
		return nil
	})
	return all, err
}

// healthAt adds what one server tells, page by page.
func healthAt(ctx context.Context, s *client.Session, addr string, all map[meta.VolumeID]meta.VolumeHealth) error {
	for q := (meta.HealthRequest{Volumes: true}); ; {
		h, err := s.Health(ctx, addr, q)
		if err != nil {
			return err
		}
		last := q.After
		for _, v := range h.Volumes {
			// One that moves may be told of by two: what is worst.
			x := all[v.ID]
			if v.Failed == "" {
				v.Failed = x.Failed
			}
			if v.Unplaceable == "" {
				v.Unplaceable = x.Unplaceable
			}
			v.Recovering = v.Recovering || x.Recovering
			v.Lost, v.Unreachable, v.AcceptedLost = max(v.Lost, x.Lost), max(v.Unreachable, x.Unreachable), max(v.AcceptedLost, x.AcceptedLost)
			v.Endangered, v.UnderReplicated = max(v.Endangered, x.Endangered), max(v.UnderReplicated, x.UnderReplicated)
			v.Corrupt, v.Away = max(v.Corrupt, x.Corrupt), max(v.Away, x.Away)
			if v.QuotaBytes == 0 {
				v.UsedBytes, v.QuotaBytes = x.UsedBytes, x.QuotaBytes
			}
			if v.QuotaInodes == 0 {
				v.UsedInodes, v.QuotaInodes = x.UsedInodes, x.QuotaInodes
			}
			v.Advisory = v.Advisory || x.Advisory
			all[v.ID] = v
			last = max(last, v.ID)
		}
		// A server of before tells all that it does each time.
		if h.Left == 0 || last == q.After {
			return nil
		}
		q.After = last
	}
}
