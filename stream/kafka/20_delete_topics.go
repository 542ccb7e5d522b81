package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// deleteTopics removes streams with all records. From version 6 on, a topic is named by its name or
// by its id.
func (s *Server) deleteTopics(r *request, q *kmsg.DeleteTopicsRequest) *kmsg.DeleteTopicsResponse {
	p := q.ResponseKind().(*kmsg.DeleteTopicsResponse)
	for i := range q.TopicNames {
		p.Topics = append(p.Topics, s.deleteTopic(r, &q.TopicNames[i], topicID{}))
	}
	for i := range q.Topics {
		p.Topics = append(p.Topics, s.deleteTopic(r, q.Topics[i].Topic, q.Topics[i].TopicID))
	}
	return p
}

// deleteTopic removes a stream that is named by the topic's name, or, with a nil name, by the
// topic's id.
func (s *Server) deleteTopic(r *request, name *string, id topicID) kmsg.DeleteTopicsResponseTopic {
	pt := kmsg.NewDeleteTopicsResponseTopic()
	pt.Topic, pt.TopicID = name, id
	var err error
	switch {
	case name != nil && id != topicID{}:
		err = &refusal{codeInvalidRequest, "a topic is named by its name or by its id, not by both"}
	case name != nil:
		err = s.deleteStream(r, *name)
	default:
		var topic string
		if topic, err = s.topicOf(r, id); err == nil {
			pt.Topic = &topic
			err = s.deleteStream(r, topic)
		}
	}
	if err != nil {
		text := err.Error()
		pt.ErrorCode, pt.ErrorMessage = codeOf(err), &text
	}
	return pt
}

func (s *Server) deleteStream(r *request, topic string) error {
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
