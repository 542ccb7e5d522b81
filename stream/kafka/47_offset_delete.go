package kafka

import (
	"errors"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// deleteOffsets removes what a group without members has committed in some partitions.
func (s *Server) deleteOffsets(r *request, q *kmsg.OffsetDeleteRequest) *kmsg.OffsetDeleteResponse {
	p := q.ResponseKind().(*kmsg.OffsetDeleteResponse)
	if q.Group == "" {
		p.ErrorCode = codeInvalidGroup
		return p
	}
	g, code := s.group(r, q.Group, true)
	if code != codeOK {
		p.ErrorCode = code
		return p
	}
	g.committing.Lock()
	defer g.committing.Unlock()
	if g.inUse() {
		p.ErrorCode = codeNonEmptyGroup
		return p
	}
	for _, t := range q.Topics {
		pt := kmsg.NewOffsetDeleteResponseTopic()
		pt.Topic = t.Topic
		of := make([]int32, len(t.Partitions))
		for i, tp := range t.Partitions {
			of[i] = tp.Partition
		}
		st, err := s.stream(r, t.Topic, stream.MayRead)
		if err == nil {
			if err = st.DeleteOffsetsOf(r.ctx, g.of(q.Group), of); errors.Is(err, meta.NotFound) {
				err = nil // the group has committed nothing in the stream
			}
		}
		for _, n := range of {
			tp := kmsg.NewOffsetDeleteResponseTopicPartition()
			if tp.Partition = n; err != nil {
				tp.ErrorCode = codeOfCommit(err)
			}
			pt.Partitions = append(pt.Partitions, tp)
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}
