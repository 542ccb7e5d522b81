package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream/group"
)

// knownIDVersion is the version from which clients repeat JoinGroup with an assigned id.
const knownIDVersion = 4

// joinGroup adds a member to a group, and waits for the group's next generation.
func (s *Server) joinGroup(r *request, q *kmsg.JoinGroupRequest) *kmsg.JoinGroupResponse {
	p := q.ResponseKind().(*kmsg.JoinGroupResponse)
	p.Generation, p.MemberID = -1, q.MemberID
	empty := ""
	p.Protocol, p.ProtocolType = &empty, &empty
	if q.Group == "" {
		p.ErrorCode = codeInvalidGroup
		return p
	}
	g, code := s.group(r, q.Group, true)
	if code != codeOK {
		p.ErrorCode = code
		return p
	}
	rebalance := int64(q.RebalanceTimeoutMillis)
	if r.version < 1 || rebalance <= 0 {
		rebalance = int64(q.SessionTimeoutMillis)
	}
	join := group.JoinRequest{
		Member: q.MemberID, Instance: deref(q.InstanceID), NewID: newMember(r.client), Session: int64(q.SessionTimeoutMillis), Rebalance: rebalance,
		Type: q.ProtocolType, KnownID: r.version >= knownIDVersion, Adopt: g.adopts(q.MemberID),
	}
	for _, pr := range q.Protocols {
		join.Protocols = append(join.Protocols, group.Protocol{Name: pr.Name, Metadata: pr.Metadata})
	}
	denied := false
	a, ok := g.ask(r.ctx, func(ticket uint64) []group.Answer {
		if denied = !g.admitLocked(r.as, true); denied {
			return []group.Answer{{Ticket: ticket, Code: group.UnknownMember}}
		}
		return g.machine.Join(now(), ticket, join)
	})
	if denied {
		p.ErrorCode = codeGroupDenied
		return p
	}
	if !ok {
		p.ErrorCode = codeRebalance
		return p
	}
	p.ErrorCode, p.MemberID = codeOfGroup(a.Code), a.Member
	if a.Code != group.OK {
		return p
	}
	g.mu.Lock()
	c := g.clients[a.Member]
	c.id, c.host = r.client, r.conn.c.RemoteAddr().String()
	g.clients[a.Member] = c
	g.forgetLocked()
	typ := g.machine.Type()
	g.mu.Unlock()
	p.Generation, p.Protocol, p.ProtocolType, p.LeaderID, p.SkipAssignment = a.Generation, &a.Protocol, &typ, a.Leader, a.SkipAssignment
	for _, m := range a.Members {
		pm := kmsg.NewJoinGroupResponseMember()
		pm.MemberID, pm.ProtocolMetadata = m.ID, m.Metadata
		if m.Instance != "" {
			pm.InstanceID = &m.Instance
		}
		p.Members = append(p.Members, pm)
	}
	return p
}

// forgetLocked forgets the clients of former members.
func (g *coordinated) forgetLocked() {
	members := g.machine.Members()
	if len(g.clients) <= len(members) {
		return
	}
	there := map[string]bool{}
	for _, m := range members {
		there[m.ID] = true
	}
	for id := range g.clients {
		if !there[id] {
			delete(g.clients, id)
		}
	}
}
