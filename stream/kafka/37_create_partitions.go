package kafka

import (
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// createPartitions gives streams more partitions. Where the partitions lie is a matter of the
// volume, so that any assignment is taken.
func (s *Server) createPartitions(r *request, q *kmsg.CreatePartitionsRequest) *kmsg.CreatePartitionsResponse {
	p := q.ResponseKind().(*kmsg.CreatePartitionsResponse)
	for _, t := range q.Topics {
		pt := kmsg.NewCreatePartitionsResponseTopic()
		pt.Topic = t.Topic
		err := s.change(r, t.Topic, q.ValidateOnly, func(spec *stream.Spec) error {
			if n := int(t.Count); n <= spec.Partitions || n > stream.MaxPartitions {
				return &refusal{codeInvalidPartitions, fmt.Sprintf("the topic has %d partitions: give more than these, and at most %d, not %d", spec.Partitions, stream.MaxPartitions, n)}
			}
			spec.Partitions = int(t.Count)
			return nil
		})
		if err != nil {
			text := err.Error()
			pt.ErrorCode, pt.ErrorMessage = codeOf(err), &text
		}
		p.Topics = append(p.Topics, pt)
	}
	return p
}

// change changes the stream of a topic, for a client that may; only: change only checks.
func (s *Server) change(r *request, topic string, only bool, change func(*stream.Spec) error) error {
	path, err := stream.Path(topic)
	if err != nil {
		return err
	}
	h, err := s.cfg.Host(r.ctx)
	if err == nil {
		_, err = h.Change(r.ctx, r.as, path, stream.ChangeOptions{Change: change, Check: only})
	}
	return err
}
