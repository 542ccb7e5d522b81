package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// deleteRecords deletes the first records of partitions, for clients that may remove the files of
// the stream.
func (s *Server) deleteRecords(r *request, q *kmsg.DeleteRecordsRequest) *kmsg.DeleteRecordsResponse {
	p := q.ResponseKind().(*kmsg.DeleteRecordsResponse)
	for _, t := range q.Topics {
		pt := kmsg.NewDeleteRecordsResponseTopic()
		pt.Topic = t.Topic
		for _, tp := range t.Partitions {
			pp := kmsg.NewDeleteRecordsResponseTopicPartition()
			pp.Partition, pp.LowWatermark = tp.Partition, -1
			st, err := s.stream(r, t.Topic, stream.MayWrite|stream.MaySearch)
			if err == nil {
				l, lerr := st.Partition(r.ctx, tp.Partition)
				if err = lerr; err == nil {
					pp.LowWatermark, err = l.DeleteBefore(r.ctx, tp.Offset)
				}
			}
			if err != nil {
				pp.LowWatermark, pp.ErrorCode = -1, codeOf(err)
			}
			pt.Partitions = append(pt.Partitions, pp)
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}
