package cluster

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Health returns the volumes that the metadata servers know to be unhealthy. For an open
// volume the report is as of the last inspection of its chunks, some seconds ago. A closed
// volume was healthy when its owner closed it, and is opened when a chunk server fails.
// Errors: AccessDenied, Unavailable (a running metadata server does not answer).
func (c *Cluster) Health(ctx context.Context) (map[meta.VolumeID]meta.VolumeHealth, error) {
	api, err := c.administration()
	if err != nil {
		return nil, err
	}
	servers, err := api.Health.ListServers(ctx, &admin.ListServersRequest{})
	if err != nil {
		return nil, err
	}
	all := map[meta.VolumeID]meta.VolumeHealth{}
	for _, m := range servers.Servers {
		one, err := api.At(m.Address)
		if err != nil {
			return nil, err
		}
		if err := healthAt(ctx, one, all); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// healthAt adds the report of one metadata server to all, page by page.
func healthAt(ctx context.Context, one *admin.Client, all map[meta.VolumeID]meta.VolumeHealth) error {
	for q := (&admin.ListVolumeHealthRequest{}); ; {
		page, err := one.Health.ListVolumeHealth(ctx, q)
		if err != nil {
			return err
		}
		for _, answer := range page.Volumes {
			var v meta.VolumeHealth
			admin.Hear(&v, answer)
			x := all[v.ID]
			// Two servers may report a volume moving between the servers: keep the worse of
			// each value.
			if v.Failed == "" {
				v.Failed = x.Failed
			}
			if v.Unplaceable == "" {
				v.Unplaceable = x.Unplaceable
			}
			if v.GivenUpFiles == 0 {
				v.GivenUpFiles, v.GivenUpBytes, v.GivenUpBy, v.GivenUpAt = x.GivenUpFiles, x.GivenUpBytes, x.GivenUpBy, x.GivenUpAt
			}
			if v.Unmet == "" {
				v.Unmet = x.Unmet
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
		}
		if page.NextPageToken == "" {
			return nil
		}
		q.PageToken = page.NextPageToken
	}
}
