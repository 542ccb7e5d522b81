package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// deleteTopics removes streams with all records.
func (s *Server) deleteTopics(r *request, q *kmsg.DeleteTopicsRequest) *kmsg.DeleteTopicsResponse {
	p := q.ResponseKind().(*kmsg.DeleteTopicsResponse)
	for _, topic := range q.TopicNames {
		pt := kmsg.NewDeleteTopicsResponseTopic()
		pt.Topic = &topic
		if err := s.deleteTopic(r, topic); err != nil {
			text := err.Error()
			pt.ErrorCode, pt.ErrorMessage = codeOf(err), &text
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}

func (s *Server) deleteTopic(r *request, topic string) error {
	path, err := stream.Path(topic)
	if err != nil {
		return err
	}
	h, err := s.cfg.Host(r.ctx)
	if err != nil {
		return err
	}
	return h.Delete(r.ctx, r.as, path)
}
