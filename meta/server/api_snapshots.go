package server

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// snapshotsAPI is the service penstock.admin.v1.Snapshots.
type snapshotsAPI struct {
	admin.UnimplementedSnapshotsServer
	s *Server
}

func sayPin(p meta.PinInfo) *admin.Pin {
	m := &admin.Pin{}
	admin.Say(m, p)
	return m
}

func saySnapshot(i meta.SnapshotInfo) *admin.Snapshot {
	m := &admin.Snapshot{}
	admin.Say(m, i)
	return m
}

func (a snapshotsAPI) ListSnapshots(ctx context.Context, q *admin.ListSnapshotsRequest) (*admin.ListSnapshotsResponse, error) {
	o, v, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	l, err := o.listSnapshots(q.Name)
	if err != nil {
		return nil, err
	}
	if q.Count && len(l.Snapshots) > 0 {
		o.usage.countHeld(ctx, l)
	}
	markDropped(l, v.Dropped)
	l.Keep = v.Keep
	answer := &admin.ListSnapshotsResponse{}
	admin.Say(answer, l)
	return answer, nil
}

// markDropped marks the snapshots that stay for their clones only.
func markDropped(l *meta.SnapshotList, dropped []meta.Generation) {
	for i, x := range l.Snapshots {
		if x.State == meta.SnapshotReady && slices.Contains(dropped, x.At) {
			l.Snapshots[i].State = meta.SnapshotDropped
		}
	}
}

func (a snapshotsAPI) CreateSnapshot(ctx context.Context, q *admin.CreateSnapshotRequest) (*admin.Snapshot, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	if err := o.mirror.mayMirror(ctx, callerOf(ctx), "snapshot"); err != nil {
		return nil, err
	}
	if err := checkSnapshotName(q.Name); err != nil {
		return nil, err
	}
	sn, late, err := o.snapshots.take(ctx, &meta.TakeSnapshot{Name: q.Name, Token: q.RequestId}, takeHow{strict: q.Strict})
	if err != nil {
		return nil, err
	}
	i := snapshotInfo(sn)
	i.Strict = q.Strict && late.known && late.files == 0
	tellUnanswered(&i, late)
	return saySnapshot(i), nil
}

func (a snapshotsAPI) DeleteSnapshot(ctx context.Context, q *admin.DeleteSnapshotRequest) (*admin.Snapshot, error) {
	if q.Generation == 0 {
		return nil, meta.E("delete snapshot", meta.Invalid, q.Name, errors.New("the request does not say of which generation: ListSnapshots tells"))
	}
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	i, err := o.clones.deleteUnpinned(ctx, q.Name, meta.Generation(q.Generation), q.Later)
	if err != nil {
		return nil, err
	}
	return saySnapshot(i), nil
}

func (a snapshotsAPI) DiffSnapshots(ctx context.Context, q *admin.DiffSnapshotsRequest) (*admin.DiffSnapshotsResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	if q.To == "" { // with the live tree
		if err := o.mirror.mayMirror(ctx, callerOf(ctx), "compare"); err != nil {
			return nil, err
		}
	}
	var page *changePage
	if q.PageToken == "" {
		page, err = o.diff(ctx, q.From, q.To, q.Exact)
	} else {
		var from changePlace
		if _, err := fmt.Sscanf(q.PageToken, "%d.%d", &from.of, &from.told); err != nil {
			return nil, meta.E("compare", meta.Invalid, q.PageToken, errors.New("that is no page token"))
		}
		page, err = a.s.comparisons.page(o, from)
	}
	if err != nil {
		return nil, err
	}
	answer := &admin.DiffSnapshotsResponse{Changes: make([]*admin.Change, len(page.changes))}
	for i, c := range page.changes {
		answer.Changes[i] = &admin.Change{Kind: admin.ChangeKind(c.Kind), Path: []byte(c.Path), From: []byte(c.From), Inode: uint64(c.Ino), Type: c.Type, Content: c.Content}
	}
	if page.next != (changePlace{}) {
		answer.NextPageToken = fmt.Sprintf("%d.%d", page.next.of, page.next.told)
	}
	return answer, nil
}

func (a snapshotsAPI) RollBackVolume(ctx context.Context, q *admin.RollBackVolumeRequest) (*admin.RollBackVolumeResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	if err := o.mirror.mayMirror(ctx, callerOf(ctx), "snapshot"); err != nil {
		return nil, err
	}
	return &admin.RollBackVolumeResponse{}, o.rollbacks.rollBack(ctx, callerOf(ctx), q.Snapshot, rollHow{token: q.RequestId, force: q.Force})
}

func (a snapshotsAPI) SetSchedule(ctx context.Context, q *admin.SetScheduleRequest) (*admin.SetScheduleResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	// A schedule may be removed from a target, where it would take no snapshots.
	if err := o.mirror.mayMirror(ctx, callerOf(ctx), "snapshot"); err != nil && q.Keep != "" {
		return nil, err
	}
	return &admin.SetScheduleResponse{}, o.schedule.setSchedule(ctx, q.Keep)
}

func (a snapshotsAPI) GetSnapshotUsage(ctx context.Context, q *admin.GetSnapshotUsageRequest) (*admin.SnapshotUsage, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	u, err := o.usage.count(ctx, q.Delete)
	if err != nil {
		return nil, err
	}
	answer := &admin.SnapshotUsage{}
	admin.Say(answer, u)
	return answer, nil
}

func (a snapshotsAPI) PinSnapshot(ctx context.Context, q *admin.PinSnapshotRequest) (*admin.Pin, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	p, err := o.pinned.Pin(ctx, q.Snapshot, meta.Generation(q.Generation), q.Holder, a.s.askerOf(ctx).who.String(), q.Ttl.AsDuration())
	if err != nil {
		return nil, err
	}
	return sayPin(p), nil
}

func (a snapshotsAPI) UnpinSnapshot(ctx context.Context, q *admin.UnpinSnapshotRequest) (*admin.UnpinSnapshotResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	released, err := o.pinned.unpin(ctx, a.s.askerOf(ctx), q.Snapshot, q.Holder)
	if err != nil {
		return nil, err
	}
	return &admin.UnpinSnapshotResponse{Released: released}, nil
}

func (a snapshotsAPI) GetSnapshotDigest(ctx context.Context, q *admin.GetSnapshotDigestRequest) (*admin.Snapshot, error) {
	o, v, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	l, err := o.listSnapshots(q.Snapshot)
	if err != nil {
		return nil, err
	}
	markDropped(l, v.Dropped)
	n := l.Named(q.Snapshot)
	if n < 0 {
		return nil, meta.E("find snapshot", meta.NoSuchSnapshot, q.Snapshot, nil)
	}
	if l.Snapshots[n].Digest == nil {
		o.digesting.awaitDigest(l.Snapshots[n].At, q.Unpaced && a.s.askerOf(ctx).administers(v.ID))
	}
	return saySnapshot(l.Snapshots[n]), nil
}

func (a snapshotsAPI) GetSnapshotIndex(ctx context.Context, q *admin.GetSnapshotIndexRequest) (*admin.SnapshotIndex, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	return o.indexing.index(ctx, q.Snapshot)
}
