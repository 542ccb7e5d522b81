package client

import (
	"context"
	"encoding/json"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// askJSON runs a request of the owner of a volume whose report is JSON.
func (s *Session) askJSON(ctx context.Context, a wire.Admin, body, to any) error {
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			panic("client: a request is plain data: " + err.Error())
		}
		a.Body = b
	}
	re, err := s.Admin(ctx, a)
	if err != nil || to == nil {
		return err
	}
	if err := json.Unmarshal(re.Report, to); err != nil {
		return meta.E("admin", meta.Protocol, "", err)
	}
	return nil
}

// ListViews lists the snapshots of a volume that can be shown, oldest first.
func (s *Session) ListViews(ctx context.Context, v meta.VolumeID) ([]meta.Snapshot, error) {
	var a wire.ViewsAnswer
	err := s.askJSON(ctx, wire.Admin{Op: wire.AdminViews, Volume: v}, nil, &a)
	return a.Snapshots, err
}

// TakeTarget takes a snapshot of a mirror's target, which this session has the right to fill;
// once, however often the request had to be sent. Errors: Exists, Invalid, NameTooLong,
// ResourceExceeded, Unavailable, ReadOnly (it has not that right).
func (s *Session) TakeTarget(ctx context.Context, v meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminTakeTarget, Volume: v, Entry: name}, once(), nil)
}

// RollBackTarget makes a mirror's target what a snapshot is, while the volume is one and this
// session has the right to fill it, which ends with it; once, however often the request had
// to be sent. Errors: NoSuchSnapshot, Busy, Unavailable, ReadOnly.
func (s *Session) RollBackTarget(ctx context.Context, v meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminRollBackTarget, Volume: v, Entry: name}, once(), nil)
}
