package kafka

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// createTopics makes streams.
func (s *Server) createTopics(r *request, q *kmsg.CreateTopicsRequest) *kmsg.CreateTopicsResponse {
	p := q.ResponseKind().(*kmsg.CreateTopicsResponse)
	for i := range q.Topics {
		t := &q.Topics[i]
		pt := kmsg.NewCreateTopicsResponseTopic()
		pt.Topic, pt.ReplicationFactor = t.Topic, 1
		spec, code, err := specOf(t)
		if err == nil {
			pt.NumPartitions = int32(spec.Partitions)
			if pt.TopicID, err = s.createTopic(r, t.Topic, spec, q.ValidateOnly); err != nil {
				code = codeOf(err)
			}
		}
		if err != nil {
			text := err.Error()
			pt.ErrorCode, pt.ErrorMessage = code, &text
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}

// createTopic makes a stream, and returns the topic's id. With only, createTopic verifies that the
// topic does not exist, and the id is 0.
func (s *Server) createTopic(r *request, topic string, spec stream.Spec, only bool) (id topicID, err error) {
	path, err := stream.Path(topic)
	if err != nil {
		return id, err
	}
	h, err := s.cfg.Host(r.ctx)
	if err != nil {
		return id, err
	}
	if only {
		if _, err = h.Stream(r.ctx, r.as, path, 0); err == nil {
			return id, meta.E("create stream", meta.Exists, path, nil)
		} else if errors.Is(err, meta.NotFound) {
			err = nil
		}
		return id, err
	}
	if err := h.Create(r.ctx, r.as, path, spec); err != nil {
		return id, err
	}
	if st, err := h.Stream(r.ctx, r.as, path, 0); err == nil {
		id = s.topicID(st)
	}
	return id, nil // the topic exists, even if its id can't be found out now
}

// specOf translates the words of a CreateTopics request. How often bytes are stored is a matter
// of the volume, so that any replication factor is taken.
func specOf(t *kmsg.CreateTopicsRequestTopic) (spec stream.Spec, code int16, err error) {
	spec.Partitions = int(t.NumPartitions)
	if t.NumPartitions == -1 {
		spec.Partitions = max(1, len(t.ReplicaAssignment))
	}
	if spec.Partitions < 1 || spec.Partitions > stream.MaxPartitions {
		return spec, codeInvalidPartitions, fmt.Errorf("a topic has 1 to %d partitions", stream.MaxPartitions)
	}
	for _, c := range t.Configs {
		if err := setConfig(&spec, c.Name, deref(c.Value)); err != nil {
			return spec, codeInvalidConfig, err
		}
	}
	if err := spec.Check(); err != nil {
		return spec, codeInvalidConfig, err
	}
	return spec, codeOK, nil
}
