package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// Times of a ListOffsets request, standing for the ends of the log.
const (
	timeLatest   = -1
	timeEarliest = -2
)

// listOffsets finds offsets by time.
func (s *Server) listOffsets(r *request, q *kmsg.ListOffsetsRequest) *kmsg.ListOffsetsResponse {
	p := q.ResponseKind().(*kmsg.ListOffsetsResponse)
	for _, t := range q.Topics {
		pt := kmsg.NewListOffsetsResponseTopic()
		pt.Topic = t.Topic
		for i := range t.Partitions {
			pt.Partitions = append(pt.Partitions, s.offsetOf(r, t.Topic, &t.Partitions[i]))
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}

func (s *Server) offsetOf(r *request, topic string, q *kmsg.ListOffsetsRequestTopicPartition) kmsg.ListOffsetsResponseTopicPartition {
	p := kmsg.NewListOffsetsResponseTopicPartition()
	p.Partition, p.Offset, p.Timestamp = q.Partition, -1, -1
	st, err := s.stream(r, topic, stream.MayRead)
	if err != nil {
		p.ErrorCode = codeOf(err)
		return p
	}
	l, err := st.Partition(r.ctx, q.Partition)
	if err != nil {
		p.ErrorCode = codeOf(err)
		return p
	}
	if p.ErrorCode = checkEpoch(l, q.CurrentLeaderEpoch); p.ErrorCode != codeOK {
		return p
	}
	p.LeaderEpoch = l.Epoch()
	start, high := l.Bounds()
	switch {
	case q.Timestamp == timeLatest:
		p.Offset = high
	case q.Timestamp == timeEarliest:
		p.Offset = start
	case q.Timestamp < 0:
		p.ErrorCode = codeUnsupportedVersion
	default:
		offset, at, ok, err := l.OffsetAt(r.ctx, q.Timestamp)
		if err != nil {
			p.ErrorCode = codeOf(err)
		} else if ok {
			p.Offset, p.Timestamp = offset, at
		}
	}
	return p
}
