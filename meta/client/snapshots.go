package client

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"time"

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

// Snapshots lists a volume's snapshots.
func (s *Session) Snapshots(ctx context.Context, v meta.VolumeID) (l wire.SnapshotList, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshots, Volume: v}, nil, &l)
	return l, err
}

// CountedSnapshots is Snapshots, with what they alone hold to the byte if that can be counted
// in a moment.
func (s *Session) CountedSnapshots(ctx context.Context, v meta.VolumeID) (l wire.SnapshotList, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshots, Volume: v}, wire.SnapshotsRequest{Count: true}, &l)
	return l, err
}

// AwaitDigest tells of a snapshot, and if it has no digest yet, has it computed
// before others and faster than those that nobody waits for; unpaced, as fast as its
// bytes can be read, for who may take snapshots. Errors: NoSuchSnapshot.
func (s *Session) AwaitDigest(ctx context.Context, v meta.VolumeID, name string, unpaced bool) (wire.SnapshotInfo, error) {
	var l wire.SnapshotList
	if err := s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshots, Volume: v}, wire.SnapshotsRequest{Digest: name, Unpaced: unpaced}, &l); err != nil {
		return wire.SnapshotInfo{}, err
	}
	i := l.Named(name)
	if i < 0 {
		return wire.SnapshotInfo{}, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil)
	}
	return l.Snapshots[i], nil
}

// TakeSnapshot takes one. It is taken once, however often the request had to be
// sent. Errors: Exists, Invalid, NameTooLong, ResourceExceeded, Unavailable.
func (s *Session) TakeSnapshot(ctx context.Context, v meta.VolumeID, name string) (i wire.SnapshotInfo, err error) {
	return s.takeSnapshot(ctx, v, name, wire.SnapshotRequest{})
}

// TakeWhole is TakeSnapshot, unless the snapshot would have files only as they were
// synced last, since their clients did not commit in time what they had buffered.
// Errors: as TakeSnapshot; Unavailable (there are such files, and the text says whose),
// NotSupported (the owner is of an older version, or the volume changes owners all the
// time).
func (s *Session) TakeWhole(ctx context.Context, v meta.VolumeID, name string) (i wire.SnapshotInfo, err error) {
	for try := 1; ; try++ {
		i, err = s.takeSnapshot(ctx, v, name, wire.SnapshotRequest{Strict: true})
		if err != nil || i.Strict {
			return i, err
		}
		// One of before took it, and what it was told of goes with it. Another request may
		// do better: the owner has changed.
		_, derr := s.deleteSnapshot(ctx, v, name, wire.SnapshotRequest{At: i.At})
		if try == 2 || derr != nil {
			return i, meta.E("take snapshot", meta.NotSupported, name, errors.Join(errors.New("the owner of the volume can't tell whether everything is in it"), derr))
		}
	}
}

// TakeTarget is TakeSnapshot for who fills a mirror's target: as RollBackTarget.
// Errors: also ReadOnly.
func (s *Session) TakeTarget(ctx context.Context, v meta.VolumeID, name string) error {
	_, err := s.takeSnapshot(ctx, v, name, wire.SnapshotRequest{Filler: true})
	return err
}

func (s *Session) takeSnapshot(ctx context.Context, v meta.VolumeID, name string, q wire.SnapshotRequest) (i wire.SnapshotInfo, err error) {
	q.Token = once().Token
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotCreate, Volume: v, Entry: name}, q, &i)
	return i, err
}

// DeleteSnapshot deletes one: nobody can read it any more, and what it alone
// held goes in the background. Errors: NoSuchSnapshot, Busy (somebody pinned it:
// the text says who, and until when).
func (s *Session) DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) (i wire.SnapshotInfo, err error) {
	return s.deleteSnapshot(ctx, v, name, wire.SnapshotRequest{})
}

// deleteSnapshot asks first which snapshot has the name: sent again, the request must not
// delete another that got the name meanwhile.
func (s *Session) deleteSnapshot(ctx context.Context, v meta.VolumeID, name string, q wire.SnapshotRequest) (i wire.SnapshotInfo, err error) {
	if q.At == 0 {
		var l wire.SnapshotList
		if err := s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshots, Volume: v}, wire.SnapshotsRequest{Only: name}, &l); err != nil {
			return i, err
		}
		n := l.Named(name)
		if n < 0 { // one that is being deleted is no error
			n = slices.IndexFunc(l.Snapshots, func(i wire.SnapshotInfo) bool { return i.Name == name })
		}
		if n < 0 {
			return i, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil)
		}
		q.At = l.Snapshots[n].At
	}
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotDelete, Volume: v, Entry: name}, q, &i)
	return i, err
}

// DropSnapshot is DeleteSnapshot, but one that clones need goes with the last of
// them, and is wire.SnapshotDropped until then: who reads it goes on. Errors:
// NoSuchSnapshot, Busy (it is pinned, or clones need it and the server is one of before).
func (s *Session) DropSnapshot(ctx context.Context, v meta.VolumeID, name string) (i wire.SnapshotInfo, err error) {
	return s.deleteSnapshot(ctx, v, name, wire.SnapshotRequest{Later: true})
}

// SnapshotUse counts what a volume's snapshots hold, and what deleting some of them,
// all together, would give back. It looks at what was superseded since the oldest, and
// at all of the files that were changed. Errors: NoSuchSnapshot, NotSupported (a server
// of before it).
func (s *Session) SnapshotUse(ctx context.Context, v meta.VolumeID, drop []string) (u wire.SnapshotUse, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotUse, Volume: v}, wire.SnapshotUseRequest{Delete: drop}, &u)
	return u, err
}

// DiffSnapshots calls fn with what changed between a snapshot and a later one,
// or with to empty the volume as it is committed now, in the order of paths.
// Errors: NoSuchSnapshot, Invalid (from is not the earlier one), Stale (fn was
// so slow that the owner gave the comparison up, or another server took the volume
// over: begin again), and fn's.
func (s *Session) DiffSnapshots(ctx context.Context, v meta.VolumeID, from, to string, fn func(meta.Change) error) error {
	return s.diff(ctx, v, wire.DiffRequest{From: from, To: to}, fn)
}

// DiffExact is DiffSnapshots for who makes a copy equal: see
// namespace.DiffExact. Errors: also Version (a server of before it).
func (s *Session) DiffExact(ctx context.Context, v meta.VolumeID, from, to string, fn func(meta.Change) error) error {
	return s.diff(ctx, v, wire.DiffRequest{From: from, To: to, Exact: true}, fn)
}

func (s *Session) diff(ctx context.Context, v meta.VolumeID, q wire.DiffRequest, fn func(meta.Change) error) error {
	for {
		var a wire.DiffAnswer
		if err := s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotDiff, Volume: v}, q, &a); err != nil {
			return err
		}
		if q.Exact && !a.Exact {
			return meta.E("compare", meta.Version, "", errors.New("the volume's server does not know exact comparisons: bring it up to date"))
		}
		for _, c := range a.Changes {
			if err := fn(meta.Change{Kind: c.Kind, Path: string(c.Path), From: string(c.From), Ino: c.Ino, Type: c.Type, Content: c.Content}); err != nil {
				return err
			}
		}
		if !a.More {
			return nil
		}
		q.Skip, q.Of = q.Skip+len(a.Changes), a.Of
	}
}

// RollBack makes a volume what a snapshot is. While sessions are in it, that is
// refused with Busy unless force: then they end, what they had not synced is
// lost, and their descriptors fail. It is rolled back once, however often the request had
// to be sent. Errors: NoSuchSnapshot, Busy, Unavailable.
func (s *Session) RollBack(ctx context.Context, v meta.VolumeID, name string, force bool) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotRollback, Volume: v, Entry: name}, wire.SnapshotRequest{Token: once().Token, Force: force}, nil)
}

// RollBackTarget is RollBack, forced, for who fills a mirror's target: it is done
// only while the volume is one and this session has the right to fill it, which ends
// with it. Errors: also ReadOnly.
func (s *Session) RollBackTarget(ctx context.Context, v meta.VolumeID, name string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotRollback, Volume: v, Entry: name}, wire.SnapshotRequest{Token: once().Token, Force: true, Filler: true}, nil)
}

// ScheduleSnapshots has the owners of a volume take and delete snapshots by
// themselves: keep is like "24h:hourly,30d:daily", empty for none. Errors:
// Invalid.
func (s *Session) ScheduleSnapshots(ctx context.Context, v meta.VolumeID, keep string) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotSchedule, Volume: v, Entry: keep}, nil, nil)
}

// PinSnapshot keeps a snapshot from being deleted for ttl at least: a pin of the
// holder that lasts longer stays as it is. Errors: NoSuchSnapshot, Invalid,
// NameTooLong, ResourceExceeded.
func (s *Session) PinSnapshot(ctx context.Context, v meta.VolumeID, name, holder string, ttl time.Duration) (wire.PinInfo, error) {
	return s.PinSnapshotAt(ctx, v, name, 0, holder, ttl)
}

// PinSnapshotAt is PinSnapshot of the snapshot that has the name and the
// generation; zero: whichever has the name. Errors: also NoSuchSnapshot if another
// one has the name by now.
func (s *Session) PinSnapshotAt(ctx context.Context, v meta.VolumeID, name string, at meta.Generation, holder string, ttl time.Duration) (p wire.PinInfo, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminPin, Volume: v, Entry: name}, wire.PinRequest{Holder: holder, TTL: ttl, At: at}, &p)
	return p, err
}

// UnpinSnapshot gives a pin up, and tells whether there was one; of a request
// that had to be sent again, the last one counts. Errors: NoSuchSnapshot,
// AccessDenied (somebody else made it).
func (s *Session) UnpinSnapshot(ctx context.Context, v meta.VolumeID, name, holder string) (released bool, err error) {
	var a wire.UnpinAnswer
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminUnpin, Volume: v, Entry: name}, wire.PinRequest{Holder: holder}, &a)
	return a.Released, err
}

// SnapshotIndex tells where the index of a snapshot lies, and has it made if
// there is none. Errors: NoSuchSnapshot; NotSupported (an older server).
func (s *Session) SnapshotIndex(ctx context.Context, v meta.VolumeID, name string) (a wire.IndexAnswer, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminSnapshotIndex, Volume: v, Entry: name}, nil, &a)
	return a, err
}
