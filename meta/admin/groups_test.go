package admin

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"penstock.io/penstock/meta"
)

// slowOwner answers the first holds only when their callers have given up.
type slowOwner struct {
	GroupsClient
	slow  int
	begun []uint64 // ids
	ended map[uint64]GroupState
}

func (o *slowOwner) BeginGroup(_ context.Context, q *BeginGroupRequest, _ ...grpc.CallOption) (*Group, error) {
	o.begun = append(o.begun, q.Id)
	return &Group{Name: q.Name, Id: q.Id, State: GroupState_GROUP_TAKING}, nil
}

func (o *slowOwner) HoldVolume(ctx context.Context, _ *HoldVolumeRequest, _ ...grpc.CallOption) (*HoldVolumeResponse, error) {
	if o.slow > 0 {
		o.slow--
		<-ctx.Done()
		return nil, &noAnswer{"m1", errors.New("the context ended"), ctx.Err()} // as Client.call
	}
	return &HoldVolumeResponse{}, nil
}

func (o *slowOwner) AwaitVolume(context.Context, *AwaitVolumeRequest, ...grpc.CallOption) (*AwaitVolumeResponse, error) {
	return &AwaitVolumeResponse{}, nil
}

func (o *slowOwner) TakeMember(context.Context, *TakeMemberRequest, ...grpc.CallOption) (*GroupMember, error) {
	return &GroupMember{Volume: 1}, nil
}

func (o *slowOwner) ReleaseVolume(context.Context, *ReleaseVolumeRequest, ...grpc.CallOption) (*ReleaseVolumeResponse, error) {
	return &ReleaseVolumeResponse{}, nil
}

func (o *slowOwner) DecideGroup(_ context.Context, q *DecideGroupRequest, _ ...grpc.CallOption) (*Group, error) {
	o.ended[q.Id] = GroupState_GROUP_READY
	return &Group{Name: q.Name, Id: q.Id, State: GroupState_GROUP_READY}, nil
}

func (o *slowOwner) AbortGroup(_ context.Context, q *AbortGroupRequest, _ ...grpc.CallOption) (*Group, error) {
	o.ended[q.Id] = GroupState_GROUP_ABORTED
	return &Group{Name: q.Name, Id: q.Id, State: GroupState_GROUP_ABORTED}, nil
}

func (o *slowOwner) DeleteMember(context.Context, *DeleteMemberRequest, ...grpc.CallOption) (*DeleteMemberResponse, error) {
	return &DeleteMemberResponse{}, nil
}

func (o *slowOwner) ForgetGroup(context.Context, *ForgetGroupRequest, ...grpc.CallOption) (*ForgetGroupResponse, error) {
	return &ForgetGroupResponse{}, nil
}

// An attempt at a group that takes too long is aborted, and the next attempt has another id.
// After the bounded number of attempts, or when the caller's own time is over, the group fails.
func TestSlowAttemptsAtAGroup(t *testing.T) {
	for _, c := range []struct {
		name     string
		slow     int
		patience time.Duration
		attempts int
		err      error
	}{
		{"one slow", 1, time.Hour, 2, nil},
		{"all slow", groupTries, time.Hour, groupTries, meta.Unavailable},
		{"the caller's time is over", 1, groupTry / 2, 1, context.DeadlineExceeded},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := &slowOwner{slow: c.slow, ended: map[uint64]GroupState{}}
				ctx, cancel := context.WithTimeout(t.Context(), c.patience)
				defer cancel()
				g, err := (&Client{Groups: o}).TakeGroup(ctx, "g", []meta.VolumeID{1}, false)
				if !errors.Is(err, c.err) || len(o.begun) != c.attempts {
					t.Fatalf("%v, %v after %d attempts", g, err, len(o.begun))
				}
				for i, id := range o.begun {
					want := GroupState_GROUP_ABORTED
					if c.err == nil && i == len(o.begun)-1 {
						want = GroupState_GROUP_READY
					}
					if !meta.IsGroupID(id) || o.ended[id] != want {
						t.Errorf("attempt %d, %d: %v", i, id, o.ended[id])
					}
				}
				if len(o.ended) != c.attempts {
					t.Errorf("%d of %d attempts had ids of their own", len(o.ended), c.attempts)
				}
			})
		})
	}
}
