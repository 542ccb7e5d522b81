package server

import (
	"context"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// eventsAPI is the service penstock.admin.v1.Events.
type eventsAPI struct {
	admin.UnimplementedEventsServer
	s *Server
}

func (a eventsAPI) GetEventLog(ctx context.Context, q *admin.GetEventLogRequest) (*admin.EventLog, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	answer, err := o.eventWaits.events(ctx, eventsQuery{newest: true})
	return answer.GetLog(), err
}

func (a eventsAPI) ReadEvents(ctx context.Context, q *admin.ReadEventsRequest) (*admin.ReadEventsResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	return o.eventWaits.events(ctx, eventsQuery{since: q.Since, oldest: q.Oldest, wait: q.Wait.AsDuration()})
}

func (a eventsAPI) KeepEvents(ctx context.Context, q *admin.KeepEventsRequest) (*admin.KeepEventsResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	if err := o.mirror.mayMirror(ctx, callerOf(ctx), "events"); err != nil {
		return nil, err
	}
	return &admin.KeepEventsResponse{}, o.leases.durably(ctx, &meta.SetEvents{Keep: q.Keep})
}
