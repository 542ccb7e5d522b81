package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// NodeState is the state that administrators want for a chunk server.
type NodeState string

const (
	NodeActive   NodeState = "active"
	NodeDraining NodeState = "draining" // gets no chunks; its chunks are moved away
	NodeRemoved  NodeState = "removed"  // not expected back; gets no chunks if it returns
)

// Node is a chunk server that has connected at least once, running or not.
type Node struct {
	Version   int           `json:"v"`
	ID        meta.ServerID `json:"id"`
	Name      string        `json:"name"`
	Addr      string        `json:"addr"` // the last address
	Topology  string        `json:"topology"`
	State     NodeState     `json:"state"`
	Disks     []NodeDisk    `json:"disks,omitempty"` // sorted by id
	FirstSeen meta.Time     `json:"first_seen"`
	// Since is when the state was set.
	Since meta.Time `json:"since,omitempty"`
	// Revision of the record in etcd; not stored.
	Revision int64 `json:"-"`
}

// NodeDisk is a disk that was seen on a node.
type NodeDisk struct {
	ID    string `json:"id"`
	Class string `json:"class"`
	Total uint64 `json:"total"`
}

func (c *Cluster) nodeRecord(id meta.ServerID) string {
	return fmt.Sprintf("%s/nodes/%016x", c.prefix, uint64(id))
}

// NodeOf describes a reporting chunk server as its record would.
func NodeOf(name string, info meta.ServerInfo) Node {
	n := Node{Version: recordVersion, ID: info.ID, Name: name, Addr: info.Addr, Topology: info.Topology, State: NodeActive}
	for _, d := range info.Disks {
		n.Disks = append(n.Disks, NodeDisk{ID: d.ID, Class: d.Class, Total: d.Total})
	}
	slices.SortFunc(n.Disks, func(a, b NodeDisk) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return n
}

// Tells reports whether the record n agrees with the newer description seen.
func (n *Node) Tells(seen *Node) bool {
	return n.Name == seen.Name && n.Addr == seen.Addr && n.Topology == seen.Topology && slices.Equal(n.Disks, seen.Disks)
}

// ObserveNode records a reporting chunk server; its state stays unchanged. Errors:
// Unavailable, NoSpace.
func (c *Cluster) ObserveNode(ctx context.Context, seen Node, now meta.Time) error {
	_, err := c.updateNode(ctx, seen.ID, true, func(n *Node) error {
		if n.ID == 0 {
			seen.FirstSeen, seen.Since = now, now
			*n = seen
			return nil
		}
		n.Name, n.Addr, n.Topology, n.Disks = seen.Name, seen.Addr, seen.Topology, seen.Disks
		return nil
	})
	return err
}

// SetNodeState sets the wanted state of a node. Errors: NotFound, Unavailable, NoSpace.
func (c *Cluster) SetNodeState(ctx context.Context, id meta.ServerID, state NodeState, now meta.Time) (Node, error) {
	n, err := c.updateNode(ctx, id, false, func(n *Node) error {
		if n.State != state {
			n.State, n.Since = state, now
		}
		return nil
	})
	if err != nil {
		return n, err
	}
	// So that the caller's process uses the new state at once.
	_, err = c.Refresh(ctx)
	return n, err
}

func (c *Cluster) updateNode(ctx context.Context, id meta.ServerID, create bool, change func(*Node) error) (Node, error) {
	const op = "record node"
	key := c.nodeRecord(id)
	for {
		r, err := c.cli.Get(ctx, key)
		if err != nil {
			return Node{}, wrap(op, fmt.Sprint(id), err)
		}
		var n Node
		var rev int64
		if len(r.Kvs) > 0 {
			if n, err = decode[Node](r.Kvs[0].Key, r.Kvs[0].Value); err != nil {
				return Node{}, err
			}
			rev = r.Kvs[0].ModRevision
		} else if !create {
			return Node{}, meta.E(op, meta.NotFound, fmt.Sprintf("node %d", id), errors.New("no such chunk server was ever seen"))
		}
		if err := change(&n); err != nil {
			return Node{}, err
		}
		n.Version = recordVersion
		t, err := c.cli.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", rev)).
			Then(clientv3.OpPut(key, encode(n))).Commit()
		if err != nil {
			return Node{}, wrap(op, fmt.Sprint(id), err)
		}
		if t.Succeeded {
			n.Revision = t.Header.Revision
			return n, nil
		}
	}
}

// Nodes lists the known nodes by id: at most a few seconds old while etcd answers.
func (c *Cluster) Nodes() []Node { return c.View().Nodes }
