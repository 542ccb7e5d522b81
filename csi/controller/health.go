package controller

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// conditions translates a volume's health into the entries of the interface. Unreachable
// chunks are no data loss: only an operator knows that a server does not come back.
func conditions(h meta.VolumeHealth) (all []*csi.VolumeHealth_VolumeHealthEntry) {
	say := func(is csi.VolumeHealthErrorType, reason, text string, args ...any) {
		all = append(all, &csi.VolumeHealth_VolumeHealthEntry{Status: is, Reason: reason, Message: fmt.Sprintf(text, args...)})
	}
	switch {
	case h.Failed != "":
		say(csi.VolumeHealthErrorType_INACCESSIBLE, "CannotBeServed", "no metadata server can serve it: %s", h.Failed)
	case h.Recovering:
		say(csi.VolumeHealthErrorType_INACCESSIBLE, "Recovering", "another metadata server takes it over")
	}
	if h.Unplaceable != "" {
		say(csi.VolumeHealthErrorType_DEGRADED, "PolicyCannotBeMet", "writes are refused: %s", h.Unplaceable)
	} else if h.Unmet != "" {
		say(csi.VolumeHealthErrorType_DEGRADED, "PolicyCannotBeMet", "what is written has fewer replicas than the class wants: %s", h.Unmet)
	}
	if n := h.Lost + h.Unreachable; n > 0 {
		say(csi.VolumeHealthErrorType_INACCESSIBLE, "ChunksUnreachable", "%d chunks have no good replica that can be reached, reads of them wait or fail; which files: penstock chunk lost", n)
	}
	if h.AcceptedLost > 0 {
		say(csi.VolumeHealthErrorType_DATA_LOSS, "ChunksLost", "%d chunks were lost, and an operator accepted that; which files: penstock chunk lost", h.AcceptedLost)
	}
	if h.GivenUpFiles > 0 {
		say(csi.VolumeHealthErrorType_DATA_LOSS, "BytesGivenUp", "an operator gave up %d bytes of %d files that were not durable, by the client %s at %s; told for a day", h.GivenUpBytes, h.GivenUpFiles, h.GivenUpBy, h.GivenUpAt.UTC().Format(time.RFC3339))
	}
	if n := h.Endangered + h.UnderReplicated; n > 0 {
		say(csi.VolumeHealthErrorType_DEGRADED, "TooFewReplicas", "%d chunks have too few replicas, %d of them a single one; repair is at it", n, h.Endangered)
	}
	if h.Corrupt > 0 {
		say(csi.VolumeHealthErrorType_DEGRADED, "CorruptReplicas", "%d chunks have a corrupt replica; repair is at it", h.Corrupt)
	}
	if h.Away > 0 {
		say(csi.VolumeHealthErrorType_DEGRADED, "ServersAway", "%d chunks have replicas on servers that are out of reach; those are waited for before anything is copied", h.Away)
	}
	quota := func(what string, used, limit uint64) {
		switch {
		case limit == 0:
		case used >= limit:
			say(csi.VolumeHealthErrorType_DEGRADED, what+"UsedUp", "%d of %d are used: writes are refused", used, limit)
		default:
			say(csi.VolumeHealthErrorType_DEGRADED, what+"NearlyUsedUp", "%d of %d are used", used, limit)
		}
	}
	quota("Bytes", h.UsedBytes, h.QuotaBytes)
	quota("Inodes", h.UsedInodes, h.QuotaInodes)
	return all
}

// ControllerGetVolumeHealth reports a volume's health.
func (s *Server) ControllerGetVolumeHealth(ctx context.Context, q *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	if q.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no volume id")
	}
	v, err := s.there(ctx, q.GetVolumeId())
	var all map[meta.VolumeID]meta.VolumeHealth
	if err == nil {
		all, err = s.Cluster.Health(ctx)
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: q.GetVolumeId(), HealthStatuses: conditions(all[v.ID])}}, nil
}

// ControllerListVolumeHealth lists this driver's unhealthy volumes by number, with tokens as
// of ListVolumes.
func (s *Server) ControllerListVolumeHealth(ctx context.Context, q *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	after, err := readToken(q.GetStartingToken(), q.GetMaxEntries())
	if err != nil {
		return nil, err
	}
	health, err := s.Cluster.Health(ctx)
	if err != nil {
		return nil, reply.Error(err)
	}
	all, err := s.Cluster.Volumes(ctx)
	if err != nil {
		return nil, reply.Error(err)
	}
	all = slices.DeleteFunc(all, func(v cluster.Volume) bool {
		return !made(v) || v.Deleting || uint64(v.ID) <= after || len(conditions(health[v.ID])) == 0
	})
	slices.SortFunc(all, func(a, b cluster.Volume) int { return int(a.ID) - int(b.ID) })
	r := &csi.ControllerListVolumeHealthResponse{}
	if n := int(q.GetMaxEntries()); n > 0 && len(all) > n {
		all = all[:n]
		r.NextToken = strconv.FormatUint(uint64(all[n-1].ID), 10)
	}
	for _, v := range all {
		id, err := s.handleOf(ctx, v.ID)
		if err != nil {
			return nil, reply.Error(err)
		}
		r.Entries = append(r.Entries, &csi.VolumeHealth{VolumeId: id, HealthStatuses: conditions(health[v.ID])})
	}
	return r, nil
}
