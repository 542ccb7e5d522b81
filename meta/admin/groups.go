package admin

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

const (
	// groupTries bounds the attempts at a group if the volumes could not be held at one
	// moment. groupTry bounds one attempt.
	groupTries = 4
	groupTry   = 20 * time.Second
	// groupTidy bounds the removal of the snapshots left by a failed attempt.
	groupTidy = 10 * time.Second
)

// Record translates a group's record to package meta.
func (x *Group) Record() (g meta.Group) {
	Hear(&g, x)
	return g
}

// SayGroup translates a group's record to the API.
func SayGroup(g meta.Group) *Group {
	x := &Group{}
	Say(x, g)
	return x
}

// Records translates all records to package meta.
func (x *ListGroupsResponse) Records() []meta.Group {
	all := make([]meta.Group, len(x.GetGroups()))
	for i, g := range x.GetGroups() {
		all[i] = g.Record()
	}
	return all
}

// groupAt is a group that is being taken or removed: its record's name and id, and its volumes.
type groupAt struct {
	c       *Client
	name    string
	id      uint64
	volumes []meta.VolumeID
}

func (c *Client) groupAt(g *Group) groupAt {
	at := groupAt{c: c, name: g.Name, id: g.Id}
	for _, m := range g.Members {
		at.volumes = append(at.volumes, meta.VolumeID(m.Volume))
	}
	return at
}

func (g groupAt) refs() (all []*VolumeRef) {
	for _, v := range g.volumes {
		all = append(all, Numbered(v))
	}
	return all
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
func (c *Client) TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID, strict bool) (*Group, error) {
	volumes = slices.Sorted(slices.Values(volumes))
	for try := 1; ; {
		at := groupAt{c, name, rand.Uint64()&^1 | 2, volumes}
		begun, err := c.Groups.BeginGroup(ctx, &BeginGroupRequest{Name: name, Id: at.id, Volumes: at.refs()})
		switch kind := meta.KindOf(err); {
		case err == nil:
		case kind == meta.Again:
			continue // another caller wrote the record first: the next request returns its state
		case IsUnanswered(err), kind == meta.Interrupted, kind == meta.Unavailable, kind == meta.Canceled: // the group may have been made
			_, aerr := at.undo(ctx)
			return nil, errors.Join(err, aerr)
		default:
			return nil, err
		}
		if begun.State == GroupState_GROUP_ABORTED { // remains of another caller's attempt
			if err := c.groupAt(begun).forget(ctx); err != nil {
				return nil, err
			}
			continue
		}
		members, err := at.try(ctx, strict)
		if err == nil {
			var now *Group
			if now, err = c.Groups.DecideGroup(ctx, &DecideGroupRequest{Name: name, Id: at.id, Volumes: at.refs(), Members: members}); err == nil {
				return now, nil
			}
		}
		now, aerr := at.undo(ctx)
		switch {
		case aerr == nil && now.GetId() == at.id && now.GetState() == GroupState_GROUP_READY:
			return now, nil // only the answer was lost
		case !errors.Is(err, meta.Again) && !errors.Is(err, meta.NotOwner) || ctx.Err() != nil:
			return nil, errors.Join(err, aerr)
		case try == groupTries:
			return nil, meta.E("take group", meta.Unavailable, name, errors.Join(err, aerr))
		}
		try++
	}
}

// undo aborts an undecided group and deletes its snapshots. It returns the group as recorded: a
// group of another id, or nil, means that the group is gone.
func (g groupAt) undo(ctx context.Context) (*Group, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), groupTidy)
	defer cancel()
	for {
		now, err := g.c.Groups.AbortGroup(ctx, &AbortGroupRequest{Name: g.name, Id: g.id, Volumes: g.refs()})
		switch {
		case errors.Is(err, meta.Again):
			continue // the group was decided concurrently, perhaps by our request with a lost answer
		case errors.Is(err, meta.NotFound):
			return nil, nil
		case err == nil && now.Id == g.id && now.State == GroupState_GROUP_ABORTED:
			err = g.forget(ctx)
		}
		return now, err
	}
}

// atEach runs a step at all volumes at once.
func (g groupAt) atEach(do func(i int, v *VolumeRef) error) error {
	errs := make([]error, len(g.volumes))
	var wg sync.WaitGroup
	for i, v := range g.volumes {
		wg.Go(func() {
			if err := do(i, Numbered(v)); err != nil {
				errs[i] = fmt.Errorf("volume %d: %w", v, err)
			}
		})
	}
	wg.Wait()
	for _, err := range errs { // a final error says more
		if err != nil && !errors.Is(err, meta.Again) && !errors.Is(err, meta.NotOwner) {
			return err
		}
	}
	return errors.Join(errs...)
}

// try takes the snapshots of an undecided group. If try returns no error, no volume answered
// changes at some moment after the last snapshot was taken and before the first volume was
// released.
func (g groupAt) try(ctx context.Context, strict bool) ([]*GroupMember, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, groupTry, meta.E("take group", meta.Again, g.name, errors.New("it took too long")))
	defer cancel()
	members, err := g.steps(ctx, strict)
	if err != nil && ctx.Err() != nil {
		err = errors.Join(err, context.Cause(ctx)) // the error of a call has no cause
	}
	return members, err
}

func (g groupAt) steps(ctx context.Context, strict bool) ([]*GroupMember, error) {
	// Hold the volumes in order: two groups sharing volumes must not deadlock.
	for _, v := range g.volumes {
		if _, err := g.c.Groups.HoldVolume(ctx, &HoldVolumeRequest{Volume: Numbered(v), Name: g.name, Id: g.id, Strict: strict}); err != nil {
			return nil, fmt.Errorf("volume %d: %w", v, err)
		}
	}
	if err := g.atEach(func(_ int, v *VolumeRef) error {
		_, err := g.c.Groups.AwaitVolume(ctx, &AwaitVolumeRequest{Volume: v, Id: g.id})
		return err
	}); err != nil {
		return nil, err
	}
	members := make([]*GroupMember, len(g.volumes))
	if err := g.atEach(func(i int, v *VolumeRef) (err error) {
		members[i], err = g.c.Groups.TakeMember(ctx, &TakeMemberRequest{Volume: v, Id: g.id})
		return err
	}); err != nil {
		return nil, err
	}
	return members, g.atEach(func(_ int, v *VolumeRef) error {
		_, err := g.c.Groups.ReleaseVolume(ctx, &ReleaseVolumeRequest{Volume: v, Id: g.id})
		return err
	})
}

// DeleteGroup deletes a group and its snapshots. A snapshot needed by clones is deleted with
// the last clone. A snapshot already deleted is no error, nor is a volume that is gone; a volume
// in the trash is not gone. If no caller is taking an undecided group any more, DeleteGroup
// aborts the group first. Errors: NotFound, Busy (a snapshot is pinned: other snapshots may be
// deleted by then; or the group is being taken), AccessDenied.
func (c *Client) DeleteGroup(ctx context.Context, name string) error {
	g, err := c.Groups.GetGroup(ctx, &GetGroupRequest{Group: &GroupRef{Name: name}})
	if err != nil {
		return err
	}
	return c.groupAt(g).forget(ctx)
}

// forget deletes the snapshots of a decided or aborted group, and the group's record.
func (g groupAt) forget(ctx context.Context) error {
	err := g.atEach(func(_ int, v *VolumeRef) error {
		_, err := g.c.Groups.DeleteMember(ctx, &DeleteMemberRequest{Volume: v, Name: g.name, Id: g.id})
		if errors.Is(err, meta.NoSuchVolume) || errors.Is(err, meta.NotFound) { // another caller deleted the snapshot
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	_, err = g.c.Groups.ForgetGroup(ctx, &ForgetGroupRequest{Name: g.name, Id: g.id, Volumes: g.refs()})
	if errors.Is(err, meta.Again) {
		return nil // another caller deleted the record
	}
	return err
}
