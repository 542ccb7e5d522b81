package cluster

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/peer"
)

// use begins the Use of grants made for a volume's handle.
const use = "csi:"

// Publish grants a node the rights to volumes, for a handle; true: the right to write. With
// alone, Publish refuses if another node has the handle. In a cluster without certificates
// every client has all rights. Errors: NotFound (no such node), NoSuchVolume, Exists (the node
// has other rights for the handle), Busy (another node has the handle).
func (c *Cluster) Publish(ctx context.Context, node, handle string, volumes map[meta.VolumeID]bool, alone bool) error {
	q := &admin.GrantForUseRequest{Client: clientOf(node), Use: use + handle, Alone: alone}
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

// Unpublish revokes the rights that Publish granted a node for a handle; node "": the rights
// of all nodes.
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

// Published returns, for each published handle, the nodes' names in their certificates. With
// handle, Published returns only the nodes of this handle.
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

// grantTries bounds the tries of a call refused because of other calls about the same node;
// after these tries the orchestrator calls again.
const grantTries = 20

// inOrder runs change, which grants rights for a use or revokes the rights. The server may
// execute a cancelled request late, after the orchestrator's next call about the same node and
// volume. So the request carries a revision read while its call was running. With Again the
// metadata servers refuse a grant older than a revocation of the node's rights, and a
// revocation older than a grant for the use. The refused call may nevertheless be the newer
// call, so inOrder reads the revision again and retries. Errors: change's, Unavailable (ctx
// ended).
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
		// The call was cancelled: the revision may be newer than the orchestrator's next call.
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
