package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

const (
	// groupTries bounds the attempts at a group if the volumes could not be held at one
	// moment. groupTry bounds one attempt.
	groupTries = 4
	groupTry   = 20 * time.Second
	// groupTidy bounds the removal of the snapshots left by a failed attempt.
	groupTidy = 10 * time.Second
)

// Groups lists the group snapshots of a volume, or of the whole cluster if v is zero. Errors:
// AccessDenied.
func (s *Session) Groups(ctx context.Context, v meta.VolumeID) (l []meta.Group, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminGroups, Volume: v}, nil, &l)
	return l, err
}

// Group finds a group of any state. Errors: NotFound, AccessDenied.
func (s *Session) Group(ctx context.Context, name string) (meta.Group, error) {
	var l []meta.Group
	err := s.askJSON(ctx, wire.Admin{Op: wire.AdminGroups, Entry: name}, nil, &l)
	if err == nil && len(l) != 1 {
		err = meta.E("find group", meta.NotFound, name, nil)
	}
	if err != nil {
		return meta.Group{}, err
	}
	return l[0], nil
}

// TakeGroup takes a snapshot of each volume, all with one name and of one moment: if an
// operation of one volume was acknowledged before an operation of another volume began, and
// the group holds the later operation, the group holds the earlier one, too. Either every
// snapshot is taken or none. With strict, TakeGroup fails if a snapshot would hold a file only
// as of its last sync; without strict, the group's members count such files. Errors: Exists (a
// group has the name, or a snapshot in one of the volumes), Busy (a group of this name is
// being taken), Invalid (the name, or not 1 to meta.MaxGroup volumes), NoSuchVolume,
// Unavailable (the volumes could not be held at one moment; with strict: some written data is
// not committed yet), AccessDenied, ResourceExceeded.
func (s *Session) TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID, strict bool) (meta.Group, error) {
	volumes = slices.Clone(volumes)
	slices.Sort(volumes)
	for try := 1; ; {
		id := rand.Uint64()&^1 | 2
		g, err := s.putGroup(ctx, name, &wire.GroupRequest{Do: wire.GroupBegin, ID: id, Volumes: volumes})
		switch meta.KindOf(err) {
		case meta.KindOK:
		case meta.Again:
			continue // another session wrote the record first: the next request returns its state
		case meta.Interrupted, meta.Unavailable, meta.Canceled: // the group may have been made
			_, aerr := s.undoGroup(ctx, name, id, volumes)
			return g, errors.Join(err, aerr)
		default:
			return g, err
		}
		if g.State == meta.GroupAborted { // remains of another session's attempt
			if err := s.forgetGroup(ctx, g); err != nil {
				return g, err
			}
			continue
		}
		members, err := s.tryGroup(ctx, g, strict)
		if err == nil {
			var now meta.Group
			if now, err = s.putGroup(ctx, name, &wire.GroupRequest{Do: wire.GroupDecide, ID: g.ID, Volumes: volumes, Members: members}); err == nil {
				return now, nil
			}
		}
		now, aerr := s.undoGroup(ctx, name, g.ID, volumes)
		switch {
		case aerr == nil && now.ID == g.ID && now.State == meta.GroupReady:
			return now, nil // only the answer was lost
		case !errors.Is(err, meta.Again) && !errors.Is(err, meta.NotOwner) || ctx.Err() != nil:
			return g, errors.Join(err, aerr)
		case try == groupTries:
			return g, meta.E("take group", meta.Unavailable, name, errors.Join(err, aerr))
		}
		try++
	}
}

// undoGroup aborts an undecided group and deletes its snapshots. It returns the group as
// recorded: a group of another id, or an empty group, means that the group is gone.
func (s *Session) undoGroup(ctx context.Context, name string, id uint64, volumes []meta.VolumeID) (meta.Group, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), groupTidy)
	defer cancel()
	for {
		g, err := s.putGroup(ctx, name, &wire.GroupRequest{Do: wire.GroupAbort, ID: id, Volumes: volumes})
		switch {
		case errors.Is(err, meta.Again):
			continue // the group was decided concurrently, perhaps by our request with a lost answer
		case errors.Is(err, meta.NotFound):
			return meta.Group{}, nil
		case err == nil && g.ID == id && g.State == meta.GroupAborted:
			err = s.forgetGroup(ctx, g)
		}
		return g, err
	}
}

func (s *Session) putGroup(ctx context.Context, name string, q *wire.GroupRequest) (g meta.Group, err error) {
	err = s.askJSON(ctx, wire.Admin{Op: wire.AdminGroupPut, Entry: name}, q, &g)
	return g, err
}

func (s *Session) groupStep(ctx context.Context, g *meta.Group, v meta.VolumeID, step string, strict bool, to any) error {
	return s.askJSON(ctx, wire.Admin{Op: wire.AdminGroupStep, Volume: v, Entry: g.Name}, wire.GroupStep{Step: step, ID: g.ID, Strict: strict}, to)
}

// atEach runs a step at all volumes at once.
func (s *Session) atEach(g *meta.Group, do func(i int, v meta.VolumeID) error) error {
	errs := make([]error, len(g.Members))
	var wg sync.WaitGroup
	for i, m := range g.Members {
		wg.Go(func() { errs[i] = do(i, m.Volume) })
	}
	wg.Wait()
	for _, err := range errs { // a final error says more
		if err != nil && !errors.Is(err, meta.Again) && !errors.Is(err, meta.NotOwner) {
			return err
		}
	}
	return errors.Join(errs...)
}

// tryGroup takes the snapshots of an undecided group. If tryGroup returns no error, no volume
// answered changes at some moment after the last snapshot was taken and before the first
// volume was released.
func (s *Session) tryGroup(ctx context.Context, g meta.Group, strict bool) ([]meta.GroupMember, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, groupTry, meta.E("take group", meta.Again, g.Name, errors.New("it took too long")))
	defer cancel()
	// Hold the volumes in order: two groups sharing volumes must not deadlock.
	for _, m := range g.Members {
		if err := s.groupStep(ctx, &g, m.Volume, wire.GroupHold, strict, nil); err != nil {
			return nil, fmt.Errorf("volume %d: %w", m.Volume, err)
		}
	}
	step := func(step string) error {
		return s.atEach(&g, func(_ int, v meta.VolumeID) error {
			if err := s.groupStep(ctx, &g, v, step, false, nil); err != nil {
				return fmt.Errorf("volume %d: %w", v, err)
			}
			return nil
		})
	}
	if err := step(wire.GroupReady); err != nil {
		return nil, err
	}
	members := make([]meta.GroupMember, len(g.Members))
	if err := s.atEach(&g, func(i int, v meta.VolumeID) error {
		if err := s.groupStep(ctx, &g, v, wire.GroupTake, false, &members[i]); err != nil {
			return fmt.Errorf("volume %d: %w", v, err)
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return members, step(wire.GroupRelease)
}

// DeleteGroup deletes a group and its snapshots. A snapshot needed by clones is deleted with
// the last clone, as in DropSnapshot. A snapshot already deleted is no error, nor is a volume
// that is gone; a volume in the trash is not gone. If no session is taking an undecided group
// any more, DeleteGroup aborts the group first. Errors: NotFound, Busy (a snapshot is pinned:
// other snapshots may be deleted by then; or the group is being taken), AccessDenied.
func (s *Session) DeleteGroup(ctx context.Context, name string) error {
	g, err := s.Group(ctx, name)
	if err != nil {
		return err
	}
	return s.forgetGroup(ctx, g)
}

// forgetGroup deletes the snapshots of a decided or aborted group, and the group's record.
func (s *Session) forgetGroup(ctx context.Context, g meta.Group) error {
	err := s.atEach(&g, func(_ int, v meta.VolumeID) error {
		err := s.groupStep(ctx, &g, v, wire.GroupDelete, false, nil)
		if errors.Is(err, meta.NoSuchVolume) || errors.Is(err, meta.NotFound) { // another session deleted the snapshot
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	_, err = s.putGroup(ctx, g.Name, &wire.GroupRequest{Do: wire.GroupForget, ID: g.ID, Volumes: g.Volumes()})
	if errors.Is(err, meta.Again) {
		return nil // another session deleted the record
	}
	return err
}
