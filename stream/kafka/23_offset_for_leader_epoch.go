package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// offsetForLeaderEpoch tells where the records of a leader end, so that a client finds out
// whether the log was cut below what it has read.
func (s *Server) offsetForLeaderEpoch(r *request, q *kmsg.OffsetForLeaderEpochRequest) *kmsg.OffsetForLeaderEpochResponse {
	p := q.ResponseKind().(*kmsg.OffsetForLeaderEpochResponse)
	for _, t := range q.Topics {
		pt := kmsg.NewOffsetForLeaderEpochResponseTopic()
		pt.Topic = t.Topic
		for _, qp := range t.Partitions {
			tp := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
			tp.Partition, tp.LeaderEpoch, tp.EndOffset = qp.Partition, -1, -1
			st, err := s.stream(r, t.Topic, stream.MayRead)
			if err == nil {
				l, lerr := st.Partition(r.ctx, qp.Partition)
				if err = lerr; err == nil {
					if tp.ErrorCode = checkEpoch(l, qp.CurrentLeaderEpoch); tp.ErrorCode == codeOK {
						tp.LeaderEpoch, tp.EndOffset = l.EpochEnd(qp.LeaderEpoch)
					}
				}
			}
			if err != nil {
				tp.ErrorCode = codeOf(err)
			}
			pt.Partitions = append(pt.Partitions, tp)
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}
