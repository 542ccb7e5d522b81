package server

import (
	"context"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
)

// nodesAPI is the service penstock.admin.v1.Nodes.
type nodesAPI struct {
	admin.UnimplementedNodesServer
	s *Server
}

func (a nodesAPI) ListNodes(context.Context, *admin.ListNodesRequest) (*admin.ListNodesResponse, error) {
	answer := &admin.ListNodesResponse{}
	for _, n := range a.s.repairs.NodeList() {
		node := &admin.Node{}
		admin.Say(node, n)
		answer.Nodes = append(answer.Nodes, node)
	}
	return answer, nil
}

func (a nodesAPI) ForecastDrain(ctx context.Context, q *admin.ForecastDrainRequest) (*admin.DrainForecast, error) {
	f, err := a.s.serverMap.drainForecast(ctx, meta.ServerID(q.Node))
	if err != nil {
		return nil, err
	}
	answer := &admin.DrainForecast{}
	admin.Say(answer, f)
	return answer, nil
}

func (a nodesAPI) DrainNode(ctx context.Context, q *admin.DrainNodeRequest) (*admin.DrainNodeResponse, error) {
	return &admin.DrainNodeResponse{}, a.s.repairs.drainNode(ctx, meta.ServerID(q.Node))
}

func (a nodesAPI) CancelDrain(ctx context.Context, q *admin.CancelDrainRequest) (*admin.CancelDrainResponse, error) {
	return &admin.CancelDrainResponse{}, a.s.repairs.setNodeState(ctx, meta.ServerID(q.Node), cluster.NodeActive)
}

func (a nodesAPI) RemoveNode(ctx context.Context, q *admin.RemoveNodeRequest) (*admin.RemoveNodeResponse, error) {
	return &admin.RemoveNodeResponse{}, a.s.repairs.removeNode(ctx, meta.ServerID(q.Node), q.Force)
}

func (a nodesAPI) GetRepairStatus(ctx context.Context, q *admin.GetRepairStatusRequest) (*admin.GetRepairStatusResponse, error) {
	answer := &admin.GetRepairStatusResponse{Status: &admin.RepairStatus{}}
	var sum *RepairStatus
	var err error
	var silent map[string]error
	switch {
	case q.Volume != nil:
		v, verr := a.s.catalogue.named(ctx, q.Volume)
		if verr != nil {
			return nil, verr
		}
		sum, err = a.s.repairs.RepairStatus(ctx, v.ID)
	case q.Server != "":
		if err = a.s.here(q.Server); err == nil {
			sum, err = a.s.repairs.RepairStatus(ctx, 0)
		}
	default:
		sum, silent, err = a.s.repairs.allRepairStatus(ctx)
	}
	if err != nil {
		return nil, err
	}
	admin.Say(answer.Status, sum)
	for _, server := range slices.Sorted(maps.Keys(silent)) {
		answer.Unanswered = append(answer.Unanswered, &admin.Unanswered{Server: server, Error: admin.ErrorOf(silent[server])})
	}
	return answer, nil
}

func (a nodesAPI) FailDisk(ctx context.Context, q *admin.FailDiskRequest) (*admin.FailDiskResponse, error) {
	_, err := a.s.chunkServers.Order(ctx, meta.ServerID(q.Node), meta.Order{Kind: meta.OrderDisk, Disk: q.Disk})
	return &admin.FailDiskResponse{}, err
}

func (a nodesAPI) ReplaceDisk(ctx context.Context, q *admin.ReplaceDiskRequest) (*admin.ReplaceDiskResponse, error) {
	_, err := a.s.chunkServers.Order(ctx, meta.ServerID(q.Node), meta.Order{Kind: meta.OrderDisk, Disk: q.Disk, Adopt: true})
	return &admin.ReplaceDiskResponse{}, err
}

func (a nodesAPI) ScrubNodes(ctx context.Context, q *admin.ScrubNodesRequest) (*admin.ScrubNodesResponse, error) {
	return &admin.ScrubNodesResponse{}, a.s.chunkServers.scrub(ctx, meta.ServerID(q.Node))
}
