package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/group"
)

// deleteGroups removes what groups without members have committed.
func (s *Server) deleteGroups(r *request, q *kmsg.DeleteGroupsRequest) *kmsg.DeleteGroupsResponse {
	p := q.ResponseKind().(*kmsg.DeleteGroupsResponse)
	for _, name := range q.Groups {
		pg := kmsg.NewDeleteGroupsResponseGroup()
		pg.Group, pg.ErrorCode = name, s.deleteGroup(r, name)
		p.Groups = append(p.Groups, pg)
	}
	return p
}

// deleteGroup removes the offsets of a group in all streams that the client may read, beside streams
// that nobody can write.
func (s *Server) deleteGroup(r *request, name string) int16 {
	if name == "" {
		return codeInvalidGroup
	}
	g, code := s.group(r, name, false)
	if code != codeOK {
		return code
	}
	found := g != nil
	if !found { // members that join meanwhile must find the same group
		if g, code = s.group(r, name, true); code != codeOK {
			return code
		}
	}
	g.committing.Lock()
	defer g.committing.Unlock()
	if g.inUse() {
		return codeNonEmptyGroup
	}
	for _, topic := range s.topics(r) {
		st, err := s.stream(r, topic, stream.MayRead)
		had := false
		if err == nil {
			had, err = st.DeleteOffsets(r.ctx, g.of(name))
		}
		switch meta.KindOf(err) {
		case meta.NotFound, meta.AccessDenied, meta.ReadOnly:
			err = nil
		}
		if err != nil {
			return codeOfCommit(err)
		}
		found = found || had
	}
	s.groups.discard(name, g)
	if !found {
		return codeGroupNotFound
	}
	return codeOK
}

// inUse reports that the group has members, or was replaced by a group of a later epoch.
func (g *coordinated) inUse() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ended || g.machine.State() != group.Empty
}

// discard removes a group without members.
func (c *coordinator) discard(name string, g *coordinated) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.groups[name] == g && !g.inUse() {
		delete(c.groups, name)
		g.end()
	}
}
