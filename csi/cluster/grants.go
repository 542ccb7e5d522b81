package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
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
	q := wire.GrantsFor{Who: clientOf(node), For: use + handle}
	for _, v := range slices.Sorted(maps.Keys(volumes)) {
		rights := "read"
		if volumes[v] {
			rights = "write"
		}
		q.Volumes = append(q.Volumes, wire.VolumeRights{Volume: v, Rights: rights})
	}
	return c.grantFor(ctx, q)
}

// Unpublish takes back what Publish gave a node for a handle; "": what it gave all.
func (c *Cluster) Unpublish(ctx context.Context, node, handle string) error {
	q := wire.GrantsFor{For: use + handle}
	if node != "" {
		q.Who = clientOf(node)
	}
	return c.grantFor(ctx, q)
}

// Published tells which handles, or with a handle whether that one, are published to which
// nodes, these by what their certificates call them.
func (c *Cluster) Published(ctx context.Context, handle string) (nodes map[string][]string, err error) {
	nodes = map[string][]string{}
	of := ""
	if handle != "" {
		of = use + handle
	}
	err = c.with(ctx, func(s *client.Session) error {
		all, err := s.UseGrants(ctx, of)
		for _, g := range all {
			handle, ours := strings.CutPrefix(g.For, use)
			node := strings.TrimPrefix(g.Who, string(peer.Client)+"/")
			if ours && !slices.Contains(nodes[handle], node) {
				nodes[handle] = append(nodes[handle], node)
			}
		}
		return err
	})
	return nodes, err
}

// grantTries bounds how often a call is made again because of others about the same
// node that came between; the orchestrator makes it again after that.
const grantTries = 20

// grantFor asks for grants, or their end. A call may be given up and served later, when
// the orchestrator has made another one about the same node and volume. So it carries a
// revision that was read while this one was waited for, and the metadata servers refuse
// it if another came since: then this one may be the later, and looks again.
func (c *Cluster) grantFor(ctx context.Context, q wire.GrantsFor) error {
	err := c.with(ctx, func(s *client.Session) (err error) {
		for range grantTries {
			if q.AsOf, err = s.Revision(ctx); err != nil {
				return err
			}
			// Nobody waits any more: that revision may be younger than the next call.
			if ctx.Err() != nil {
				return meta.E("publish", meta.Unavailable, q.For, context.Cause(ctx))
			}
			if err = s.GrantFor(ctx, q); !errors.Is(err, meta.Again) {
				return err
			}
		}
		return err
	})
	return err
}

// clientOf is the identity of a node, which may have a longer name than certificates do.
func clientOf(node string) string { return string(peer.Client) + "/" + peer.FitName(node) }
