package kafka

import (
	"context"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// deleteTopics removes streams with all records.
func (s *Server) deleteTopics(r *request, q *kmsg.DeleteTopicsRequest) *kmsg.DeleteTopicsResponse {
	p := q.ResponseKind().(*kmsg.DeleteTopicsResponse)
	for _, topic := range q.TopicNames {
		pt := kmsg.NewDeleteTopicsResponseTopic()
		pt.Topic = &topic
		if err := s.deleteTopic(r.ctx, topic); err != nil {
			text := err.Error()
			pt.ErrorCode, pt.ErrorMessage = codeOf(err), &text
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}

func (s *Server) deleteTopic(ctx context.Context, topic string) error {
	path, err := stream.Path(topic)
	if err != nil {
		return err
	}
	h, err := s.cfg.Host(ctx)
	if err != nil {
		return err
	}
	return h.Delete(ctx, path)
}
