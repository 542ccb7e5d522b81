package kafka

import (
	"errors"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/group"
	"penstock.io/penstock/stream/offsets"
)

// offsetCommit makes the offsets of a group durable, each in its stream.
func (s *Server) offsetCommit(r *request, q *kmsg.OffsetCommitRequest) *kmsg.OffsetCommitResponse {
	p := q.ResponseKind().(*kmsg.OffsetCommitResponse)
	all := func(code int16) *kmsg.OffsetCommitResponse {
		for i := range q.Topics {
			p.Topics = append(p.Topics, commitResponse(&q.Topics[i], func(*kmsg.OffsetCommitRequestTopicPartition) int16 { return code }))
		}
		return p
	}
	if q.Group == "" {
		return all(codeInvalidGroup)
	}
	g, no := s.group(r, q.Group, true)
	if no != codeOK {
		return all(no)
	}
	g.committing.Lock()
	defer g.committing.Unlock()
	g.mu.Lock()
	code := g.machine.MayCommit(now(), q.Generation, q.MemberID, deref(q.InstanceID))
	if g.ended || r.ctx.Err() != nil { // a client that is gone may have sent the commit again, and later commits
		code = group.NotCoordinator
	}
	late := code == group.OK && g.lateLocked(q.MemberID, r.conn.number) && !s.cfg.UnsafeLate
	g.mu.Unlock()
	if code != group.OK {
		return all(g.codeFor(q.MemberID, code))
	}
	for i := range q.Topics {
		p.Topics = append(p.Topics, s.commitTopic(r, g.of(q.Group), late, &q.Topics[i]))
	}
	return p
}

// commitResponse answers for every partition of a topic.
func commitResponse(t *kmsg.OffsetCommitRequestTopic, code func(*kmsg.OffsetCommitRequestTopicPartition) int16) kmsg.OffsetCommitResponseTopic {
	pt := kmsg.NewOffsetCommitResponseTopic()
	pt.Topic = t.Topic
	for i := range t.Partitions {
		tp := kmsg.NewOffsetCommitResponseTopicPartition()
		tp.Partition, tp.ErrorCode = t.Partitions[i].Partition, code(&t.Partitions[i])
		pt.Partitions = append(pt.Partitions, tp)
	}
	return pt
}

// commitTopic commits the offsets of a topic. A late commit moves no offset back.
func (s *Server) commitTopic(r *request, of stream.Coordination, late bool, t *kmsg.OffsetCommitRequestTopic) kmsg.OffsetCommitResponseTopic {
	var commits []offsets.Commit
	st, err := s.stream(r, t.Topic, stream.MayRead)
	var to *offsets.Offsets
	if err == nil {
		to, err = st.Offsets(r.ctx, of, true)
	}
	have := map[int32]int64{} // committed offsets, if the commit is late
	check := func(tp *kmsg.OffsetCommitRequestTopicPartition) int16 {
		switch {
		case tp.Partition < 0 || int(tp.Partition) >= st.Spec().Partitions:
			return codeUnknownTopic
		case len(deref(tp.Metadata)) > offsets.MaxMetadata:
			return codeMetadataTooLarge
		case tp.Offset < have[tp.Partition]:
			return codeCoordinatorLoading // a client that uses both connections tries again
		}
		return codeOK
	}
	if err == nil {
		if late {
			for _, c := range to.All() {
				have[c.Partition] = c.Offset
			}
		}
		for i := range t.Partitions {
			tp := &t.Partitions[i]
			if check(tp) == codeOK {
				commits = append(commits, offsets.Commit{Partition: tp.Partition, Offset: tp.Offset, Epoch: tp.LeaderEpoch, Time: now(), Metadata: deref(tp.Metadata)})
			}
		}
		if len(commits) > 0 {
			err = to.Commit(commits)
		}
	}
	return commitResponse(t, func(tp *kmsg.OffsetCommitRequestTopicPartition) int16 {
		if err != nil {
			return codeOfCommit(err)
		}
		return check(tp)
	})
}

// codeOfCommit translates an error of a group's offsets.
func codeOfCommit(err error) int16 {
	switch {
	case errors.Is(err, meta.Invalid):
		return codeInvalidGroup
	case errors.Is(err, meta.NotFound):
		return codeUnknownTopic
	case errors.Is(err, meta.ReadOnly), errors.Is(err, meta.AccessDenied): // a mirror's target
		return codeTopicDenied
	case errors.Is(err, meta.NotOwner), errors.Is(err, meta.Fenced), errors.Is(err, meta.SessionExpired):
		return codeNotCoordinator // another gateway commits for the group
	}
	return codeCoordinatorLoading // the client tries again
}
