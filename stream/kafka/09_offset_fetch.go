package kafka

import (
	"errors"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/offsets"
)

// offsetFetch returns the committed offsets of groups.
func (s *Server) offsetFetch(r *request, q *kmsg.OffsetFetchRequest) *kmsg.OffsetFetchResponse {
	p := q.ResponseKind().(*kmsg.OffsetFetchResponse)
	if r.version < 8 {
		p.Topics, p.ErrorCode = s.committed(r, q.Group, q.Topics)
		return p
	}
	for _, qg := range q.Groups {
		g := kmsg.NewOffsetFetchResponseGroup()
		g.Group = qg.Group
		var topics []kmsg.OffsetFetchRequestTopic
		if qg.Topics != nil {
			topics = []kmsg.OffsetFetchRequestTopic{}
		}
		for _, t := range qg.Topics {
			topic := kmsg.NewOffsetFetchRequestTopic()
			topic.Topic, topic.Partitions = t.Topic, t.Partitions
			topics = append(topics, topic)
		}
		var found []kmsg.OffsetFetchResponseTopic
		found, g.ErrorCode = s.committed(r, qg.Group, topics)
		for _, t := range found {
			gt := kmsg.NewOffsetFetchResponseGroupTopic()
			gt.Topic = t.Topic
			for _, tp := range t.Partitions {
				gp := kmsg.NewOffsetFetchResponseGroupTopicPartition()
				gp.Partition, gp.Offset, gp.LeaderEpoch, gp.Metadata, gp.ErrorCode = tp.Partition, tp.Offset, tp.LeaderEpoch, tp.Metadata, tp.ErrorCode
				gt.Partitions = append(gt.Partitions, gp)
			}
			g.Topics = append(g.Topics, gt)
		}
		p.Groups = append(p.Groups, g)
	}
	return p
}

// committed returns the offsets of a group in topics; nil is all topics.
func (s *Server) committed(r *request, name string, topics []kmsg.OffsetFetchRequestTopic) (found []kmsg.OffsetFetchResponseTopic, code int16) {
	if name == "" {
		return nil, codeInvalidGroup
	}
	g, code := s.group(r, name, false)
	if code != codeOK {
		return nil, code
	}
	var of stream.Coordination
	if g != nil {
		g.committing.Lock()
		defer g.committing.Unlock()
		of = g.of(name)
	} else if of, code = s.coordinate(r, name); code != codeOK {
		return nil, code
	}
	if topics == nil {
		for _, topic := range s.topics(r) {
			commits, err := s.commitsIn(r, of, topic)
			if err != nil || len(commits) == 0 {
				continue
			}
			pt := kmsg.NewOffsetFetchResponseTopic()
			pt.Topic = topic
			for _, c := range commits {
				pt.Partitions = append(pt.Partitions, fetchedCommit(c))
			}
			found = append(found, pt)
		}
		return found, codeOK
	}
	for _, t := range topics {
		pt := kmsg.NewOffsetFetchResponseTopic()
		pt.Topic = t.Topic
		commits, err := s.commitsIn(r, of, t.Topic)
		denied := errors.Is(err, meta.AccessDenied)
		if err != nil && !denied && !errors.Is(err, meta.NotFound) {
			// Without an answer the consumer would begin at one end of the log.
			return nil, codeOfCommit(err)
		}
		by := map[int32]offsets.Commit{}
		for _, c := range commits {
			by[c.Partition] = c
		}
		for _, n := range t.Partitions {
			c, ok := by[n]
			if !ok {
				c = offsets.Commit{Partition: n, Offset: -1, Epoch: -1}
			}
			tp := fetchedCommit(c)
			if denied {
				tp.ErrorCode = codeTopicDenied
			}
			pt.Partitions = append(pt.Partitions, tp)
		}
		found = append(found, pt)
	}
	return found, codeOK
}

func fetchedCommit(c offsets.Commit) kmsg.OffsetFetchResponseTopicPartition {
	tp := kmsg.NewOffsetFetchResponseTopicPartition()
	tp.Partition, tp.Offset, tp.LeaderEpoch, tp.Metadata = c.Partition, c.Offset, c.Epoch, &c.Metadata
	return tp
}

// commitsIn returns the commits of a group in a topic. Errors: NotFound (no such topic, or no
// commits).
func (s *Server) commitsIn(r *request, of stream.Coordination, topic string) ([]offsets.Commit, error) {
	st, err := s.stream(r, topic, stream.MayRead)
	if err != nil {
		return nil, err
	}
	o, err := st.Offsets(r.ctx, of, false)
	if err != nil {
		return nil, err
	}
	return o.All(), nil
}
