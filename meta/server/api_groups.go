package server

import (
	"context"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// groupsAPI is the service penstock.admin.v1.Groups.
type groupsAPI struct {
	admin.UnimplementedGroupsServer
	s *Server
}

func (a groupsAPI) ListGroups(ctx context.Context, q *admin.ListGroupsRequest) (*admin.ListGroupsResponse, error) {
	of := meta.VolumeID(0)
	if q.Volume != nil {
		v, err := a.s.catalogue.named(ctx, q.Volume)
		if err != nil {
			return nil, err
		}
		of = v.ID
	}
	all, err := a.s.cfg.Cluster.Groups(ctx)
	if err != nil {
		return nil, err
	}
	answer, asker := &admin.ListGroupsResponse{}, a.s.askerOf(ctx)
	for _, g := range all {
		volumes := g.Volumes()
		foreign := func(v meta.VolumeID) bool { return !asker.administers(v) }
		if (of == 0 || slices.Contains(volumes, of)) && !slices.ContainsFunc(volumes, foreign) {
			answer.Groups = append(answer.Groups, admin.SayGroup(g))
		}
	}
	return answer, nil
}

func (a groupsAPI) GetGroup(ctx context.Context, q *admin.GetGroupRequest) (*admin.Group, error) {
	g, err := a.s.cfg.Cluster.Group(ctx, q.Group.GetName())
	if err != nil {
		return nil, err
	}
	return admin.SayGroup(g), nil
}

// wanted translates the group that a request means. Errors: NoSuchVolume, Invalid.
func (a groupsAPI) wanted(ctx context.Context, name string, id uint64, refs []*admin.VolumeRef) (*groupWanted, error) {
	if len(refs) > meta.MaxGroup { // before any is looked up
		return nil, errGroupVolumes(name)
	}
	volumes, err := a.s.catalogue.numbersOf(ctx, refs)
	return &groupWanted{name, id, volumes}, err
}

func (a groupsAPI) records() groupRecords { return groupRecords{a.s.cfg.Cluster} }

// sayGroup translates the result of a change of a record.
func sayGroup(g meta.Group, err error) (*admin.Group, error) {
	if err != nil {
		return nil, err
	}
	return admin.SayGroup(g), nil
}

func (a groupsAPI) BeginGroup(ctx context.Context, q *admin.BeginGroupRequest) (*admin.Group, error) {
	w, err := a.wanted(ctx, q.Name, q.Id, q.Volumes)
	if err != nil {
		return nil, err
	}
	return sayGroup(a.records().begin(ctx, w))
}

func (a groupsAPI) DecideGroup(ctx context.Context, q *admin.DecideGroupRequest) (*admin.Group, error) {
	w, err := a.wanted(ctx, q.Name, q.Id, q.Volumes)
	if err != nil {
		return nil, err
	}
	members := make([]meta.GroupMember, len(q.Members))
	for i, m := range q.Members {
		admin.Hear(&members[i], m)
	}
	return sayGroup(a.records().decide(ctx, w, members))
}

func (a groupsAPI) AbortGroup(ctx context.Context, q *admin.AbortGroupRequest) (*admin.Group, error) {
	w, err := a.wanted(ctx, q.Name, q.Id, q.Volumes)
	if err != nil {
		return nil, err
	}
	return sayGroup(a.records().abort(ctx, w))
}

func (a groupsAPI) ForgetGroup(ctx context.Context, q *admin.ForgetGroupRequest) (*admin.ForgetGroupResponse, error) {
	w, err := a.wanted(ctx, q.Name, q.Id, q.Volumes)
	if err != nil {
		return nil, err
	}
	return &admin.ForgetGroupResponse{}, a.records().forget(ctx, w)
}

func (a groupsAPI) HoldVolume(ctx context.Context, q *admin.HoldVolumeRequest) (*admin.HoldVolumeResponse, error) {
	if err := checkGroupID(q.Name, q.Id); err != nil {
		return nil, err
	}
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	if err := o.mirror.mayMirror(ctx, callerOf(ctx), "snapshot"); err != nil {
		return nil, err
	}
	return &admin.HoldVolumeResponse{}, o.groups.hold(ctx, q.Name, q.Id, q.Strict)
}

func (a groupsAPI) AwaitVolume(ctx context.Context, q *admin.AwaitVolumeRequest) (*admin.AwaitVolumeResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	return &admin.AwaitVolumeResponse{}, o.groups.awaitReady(ctx, q.Id)
}

func (a groupsAPI) TakeMember(ctx context.Context, q *admin.TakeMemberRequest) (*admin.GroupMember, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	m, err := o.groups.takeHeld(ctx, q.Id)
	if err != nil {
		return nil, err
	}
	answer := &admin.GroupMember{}
	admin.Say(answer, m)
	return answer, nil
}

func (a groupsAPI) ReleaseVolume(ctx context.Context, q *admin.ReleaseVolumeRequest) (*admin.ReleaseVolumeResponse, error) {
	o, _, err := a.s.catalogue.owned(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	return &admin.ReleaseVolumeResponse{}, o.groups.releaseHold(q.Id)
}

func (a groupsAPI) DeleteMember(ctx context.Context, q *admin.DeleteMemberRequest) (*admin.DeleteMemberResponse, error) {
	if err := checkGroupID(q.Name, q.Id); err != nil {
		return nil, err
	}
	v, err := a.s.catalogue.named(ctx, q.Volume)
	if err != nil {
		return nil, err
	}
	o, err := a.s.hosted.ownerOfMember(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	return &admin.DeleteMemberResponse{}, o.groups.deleteMember(ctx, q.Name, q.Id)
}
