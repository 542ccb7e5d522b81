package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/peer"
)

// use names what a volume's handle is published for, in grants.
const use = "csi:"

// Publish lets a node have volumes for the sake of a handle; true: it may write. With
// alone, it does so if no other node has that handle. A cluster without certificates lets
// everybody. Errors: NotFound (no such node), NoSuchVolume, Exists (it may do something
// else for that handle already), Busy (another node has it).
func (c *Cluster) Publish(ctx context.Context, node, handle string, volumes map[meta.VolumeID]bool, alone bool) error {
	if alone {
		have, err := c.Published(ctx, handle)
		if err != nil {
			return err
		}
		for _, n := range have[handle] {
			if n != peer.FitName(node) {
				return meta.E("publish", meta.Busy, handle, fmt.Errorf("it is for one node at a time, and published to %s", n))
			}
		}
	}
	q := &admin.GrantForUseRequest{Client: clientOf(node), Use: use + handle}
	for _, v := range slices.Sorted(maps.Keys(volumes)) {
		right := admin.Right_RIGHT_READ
		if volumes[v] {
			right = admin.Right_RIGHT_WRITE
		}
		q.Volumes = append(q.Volumes, &admin.VolumeRight{Volume: uint32(v), Right: right})
	}
	return c.inOrder(ctx, q.Use, func(grants admin.GrantsClient, asOf int64) error {
		q.AsOf = asOf
		_, err := grants.GrantForUse(ctx, q)
		return err
	})
}

// Unpublish takes back what Publish gave a node for a handle; "": what it gave all.
func (c *Cluster) Unpublish(ctx context.Context, node, handle string) error {
	q := &admin.EndUseRequest{Use: use + handle}
	if node != "" {
		q.Client = clientOf(node)
	}
	return c.inOrder(ctx, q.Use, func(grants admin.GrantsClient, asOf int64) error {
		q.AsOf = asOf
		_, err := grants.EndUse(ctx, q)
		return err
	})
}

// Published tells which handles, or with a handle whether that one, are published to which
// nodes, these by what their certificates call them.
func (c *Cluster) Published(ctx context.Context, handle string) (nodes map[string][]string, err error) {
	nodes = map[string][]string{}
	api, err := c.administration()
	if err != nil {
		return nil, err
	}
	q := &admin.ListGrantsRequest{}
	if handle != "" {
		q.Use = use + handle
	}
	for {
		page, err := api.Grants.ListGrants(ctx, q)
		if errors.Is(err, meta.NotSupported) {
			return nodes, nil // no certificates, no grants
		}
		if err != nil {
			return nodes, err
		}
		for _, g := range page.Grants {
			handle, ours := strings.CutPrefix(g.Use, use)
			node := strings.TrimPrefix(g.Client, string(peer.Client)+"/")
			if ours && !slices.Contains(nodes[handle], node) {
				nodes[handle] = append(nodes[handle], node)
			}
		}
		if q.PageToken = page.NextPageToken; q.PageToken == "" {
			return nodes, nil
		}
	}
}

// grantTries bounds how often a call is made again because of others about the same
// node that came between; the orchestrator makes it again after that.
const grantTries = 20

// inOrder grants something for a use, or ends it. A call may be given up and served later, when
// the orchestrator has made another one about the same node and volume. So it carries a
// revision that was read while this one was waited for, and the metadata servers refuse
// it if another came since: then this one may be the later, and looks again.
func (c *Cluster) inOrder(ctx context.Context, use string, change func(grants admin.GrantsClient, asOf int64) error) error {
	api, err := c.administration()
	if err != nil {
		return err
	}
	for range grantTries {
		now, rerr := api.Grants.GetRevision(ctx, &admin.GetRevisionRequest{})
		if rerr != nil {
			return rerr
		}
		// Nobody waits any more: that revision may be younger than the next call.
		if ctx.Err() != nil {
			return meta.E("publish", meta.Unavailable, use, context.Cause(ctx))
		}
		if err = change(api.Grants, now.Revision); !errors.Is(err, meta.Again) {
			return err
		}
	}
	return err
}

// clientOf is the identity of a node, which may have a longer name than certificates do.
func clientOf(node string) string { return string(peer.Client) + "/" + peer.FitName(node) }
