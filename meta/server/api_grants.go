package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// grantsAPI is the service penstock.admin.v1.Grants.
type grantsAPI struct {
	admin.UnimplementedGrantsServer
	s *Server
}

// sayGrants translates grants.
func sayGrants(all []cluster.Grant) (said []*admin.Grant) {
	for _, g := range all {
		one := &admin.Grant{}
		admin.Say(one, g)
		said = append(said, one)
	}
	return said
}

func (a grantsAPI) ListGrants(ctx context.Context, q *admin.ListGrantsRequest) (*admin.ListGrantsResponse, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	after, err := parsePageToken("list grants", q.PageToken, 64)
	if err != nil {
		return nil, err
	}
	var all []cluster.Grant
	if q.Use != "" {
		all, err = t.Members.GrantsOf(ctx, q.Use)
	} else {
		all, err = t.Members.Grants(ctx)
	}
	if err != nil {
		return nil, err
	}
	page := grantsAfter(all, after)
	answer := &admin.ListGrantsResponse{Grants: sayGrants(page)}
	if len(page) > 0 && page[len(page)-1].ID != all[len(all)-1].ID {
		answer.NextPageToken = strconv.FormatUint(page[len(page)-1].ID, 10)
	}
	return answer, nil
}

func (a grantsAPI) AddGrant(ctx context.Context, q *admin.AddGrantRequest) (*admin.Grant, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	g := cluster.Grant{Users: cluster.UsersAsIs, Request: q.RequestId, Created: meta.Time(time.Now().UnixNano())}
	admin.Hear(&g, &admin.Grant{Client: q.Client, Rights: q.Rights, Users: q.Users, Uid: q.Uid, Gid: q.Gid})
	if q.Volume != nil {
		v, err := a.s.catalogue.named(ctx, q.Volume)
		if err != nil {
			return nil, err
		}
		g.Volume = v.ID
	}
	if g, err = t.Members.AddGrant(ctx, g); err != nil {
		return nil, err
	}
	a.s.log.Info("a grant was made", "grant", g.ID, "to", g.Who, "volume", g.Volume, "rights", g.Rights.String(), "users", g.Users)
	answer := &admin.Grant{}
	admin.Say(answer, g)
	return answer, nil
}

func (a grantsAPI) RevokeGrant(ctx context.Context, q *admin.RevokeGrantRequest) (*admin.RevokeGrantResponse, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	a.s.log.Info("grant revoked", "grant", q.Id)
	return &admin.RevokeGrantResponse{}, t.Members.RevokeGrant(ctx, q.Id)
}

func (a grantsAPI) GrantForUse(ctx context.Context, q *admin.GrantForUseRequest) (*admin.GrantForUseResponse, error) {
	const op = "grant"
	if a.s.cfg.Trust == nil {
		return &admin.GrantForUseResponse{}, nil // nobody needs grants
	}
	want := map[meta.VolumeID]cluster.Rights{}
	for _, v := range q.Volumes {
		id, right := meta.VolumeID(v.Volume), cluster.Rights(v.Right) // see TestRightsAreThoseOfGrants
		if _, twice := want[id]; twice || id == 0 {
			return nil, meta.E(op, meta.Invalid, fmt.Sprint(id), errors.New("the request names the volume twice"))
		}
		want[id] = right
	}
	if len(want) == 0 {
		return nil, meta.E(op, meta.Invalid, q.Use, errors.New("it names no volume"))
	}
	all, err := a.s.cfg.Trust.Members.GrantFor(ctx, cluster.ForUse{Who: q.Client, Use: q.Use, Rights: want, AsOf: q.AsOf, Alone: q.Alone}, meta.Time(time.Now().UnixNano()))
	if err != nil {
		return nil, err
	}
	a.s.log.Info("granted", "to", q.Client, "for", q.Use, "grants", len(all))
	return &admin.GrantForUseResponse{Grants: sayGrants(all)}, nil
}

func (a grantsAPI) EndUse(ctx context.Context, q *admin.EndUseRequest) (*admin.EndUseResponse, error) {
	if a.s.cfg.Trust == nil {
		return &admin.EndUseResponse{}, nil // without grants
	}
	n, err := a.s.cfg.Trust.Members.EndUse(ctx, q.Client, q.Use, q.AsOf)
	if err != nil {
		return nil, err
	}
	a.s.log.Info("grants ended", "to", q.Client, "for", q.Use, "grants", n)
	return &admin.EndUseResponse{Ended: uint64(n)}, nil
}

func (a grantsAPI) GetRevision(ctx context.Context, _ *admin.GetRevisionRequest) (*admin.GetRevisionResponse, error) {
	if a.s.cfg.Trust == nil {
		return &admin.GetRevisionResponse{}, nil
	}
	r, err := a.s.cfg.Trust.Members.Revision(ctx)
	return &admin.GetRevisionResponse{Revision: r}, err
}

func (a grantsAPI) MakeJoinToken(ctx context.Context, q *admin.MakeJoinTokenRequest) (*admin.MakeJoinTokenResponse, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	token, err := t.makeToken(ctx, q.Role.Peer(), q.Name, q.Life.AsDuration())
	if err != nil {
		return nil, err
	}
	return &admin.MakeJoinTokenResponse{Token: token.String(), Id: token.ID}, nil
}

func (a grantsAPI) ListJoinTokens(ctx context.Context, _ *admin.ListJoinTokensRequest) (*admin.ListJoinTokensResponse, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	all, err := t.Members.Tokens(ctx)
	answer := &admin.ListJoinTokensResponse{}
	for _, r := range all {
		one := &admin.JoinToken{} // has no field for the secret's hash
		admin.Say(one, r)
		answer.Tokens = append(answer.Tokens, one)
	}
	return answer, err
}

func (a grantsAPI) RevokeJoinToken(ctx context.Context, q *admin.RevokeJoinTokenRequest) (*admin.RevokeJoinTokenResponse, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	return &admin.RevokeJoinTokenResponse{}, t.Members.RevokeToken(ctx, q.Id)
}

func (a grantsAPI) ListMembers(ctx context.Context, _ *admin.ListMembersRequest) (*admin.ListMembersResponse, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	all, err := t.Members.Members(ctx)
	answer := &admin.ListMembersResponse{}
	for _, m := range all {
		one := &admin.Member{}
		admin.Say(one, m)
		answer.Members = append(answer.Members, one)
	}
	return answer, err
}

func (a grantsAPI) EvictMember(ctx context.Context, q *admin.EvictMemberRequest) (*admin.EvictMemberResponse, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	role, name, _ := strings.Cut(q.Identity, "/")
	if err := t.Members.Evict(ctx, peering.Role(role), name); err != nil {
		if meta.KindOf(err) == meta.NotFound {
			err = meta.E("evict", meta.NotFound, q.Identity, errors.New("no identity of the cluster is called so; 'penstock cluster members' shows them"))
		}
		return nil, err
	}
	a.s.log.Warn("an identity was evicted", "identity", q.Identity)
	return &admin.EvictMemberResponse{}, nil
}

// settings returns the current settings: another server may have changed them a moment ago.
func (a grantsAPI) settings(ctx context.Context) (set cluster.Settings, err error) {
	v, err := a.s.cfg.Cluster.Current(ctx)
	if err != nil {
		return set, err
	}
	return v.Settings, nil
}

func (a grantsAPI) GetSettings(ctx context.Context, _ *admin.GetSettingsRequest) (*admin.Settings, error) {
	if _, err := a.s.enrolment.trust(); err != nil {
		return nil, err
	}
	set, err := a.settings(ctx)
	if err != nil {
		return nil, err
	}
	answer := &admin.Settings{}
	admin.Say(answer, set)
	return answer, nil
}

func (a grantsAPI) ChangeSettings(ctx context.Context, q *admin.ChangeSettingsRequest) (*admin.Settings, error) {
	t, err := a.s.enrolment.trust()
	if err != nil {
		return nil, err
	}
	set, err := a.settings(ctx)
	if err != nil {
		return nil, err
	}
	if q.PlainBulk != nil {
		set.PlainBulk = *q.PlainBulk
	}
	if q.KeyLife != nil {
		set.KeyLife = q.KeyLife.AsDuration()
	}
	if q.ClientRate != nil {
		set.ClientRate = *q.ClientRate
	}
	if err := t.Members.SetSettings(ctx, set); err != nil {
		return nil, err
	}
	answer := &admin.Settings{}
	admin.Say(answer, set)
	return answer, nil
}

// parsePageToken reads a numeric page token: the number of the last item before the page.
// Errors: Invalid.
func parsePageToken(op, token string, bits int) (after uint64, err error) {
	if after, err = strconv.ParseUint(cmp.Or(token, "0"), 10, bits); err != nil {
		return 0, meta.E(op, meta.Invalid, token, errors.New("it is no page token of an answer"))
	}
	return after, nil
}
