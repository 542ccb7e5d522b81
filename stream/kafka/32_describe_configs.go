package kafka

import (
	"slices"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// describeConfigs tells the configuration of topics, in Kafka's names.
func (s *Server) describeConfigs(r *request, q *kmsg.DescribeConfigsRequest) *kmsg.DescribeConfigsResponse {
	p := q.ResponseKind().(*kmsg.DescribeConfigsResponse)
	for _, qr := range q.Resources {
		pr := kmsg.NewDescribeConfigsResponseResource()
		pr.ResourceType, pr.ResourceName = qr.ResourceType, qr.ResourceName
		switch qr.ResourceType {
		case kmsg.ConfigResourceTypeTopic:
			st, err := s.seen(r, qr.ResourceName)
			if err != nil {
				text := err.Error()
				pr.ErrorCode, pr.ErrorMessage = codeOf(err), &text
				break
			}
			spec := st.Spec()
			for i := range topicConfigs {
				if c := &topicConfigs[i]; qr.ConfigNames == nil || slices.Contains(qr.ConfigNames, c.name) {
					pr.Configs = append(pr.Configs, c.describe(&spec))
				}
			}
		case kmsg.ConfigResourceTypeBroker: // a gateway has no configuration in Kafka's names
		default:
			pr.ErrorCode = codeInvalidRequest
		}
		p.Resources = append(p.Resources, pr)
	}
	return p
}

// describe describes a configuration of a stream.
func (c *topicConfig) describe(spec *stream.Spec) kmsg.DescribeConfigsResponseResourceConfig {
	d := kmsg.NewDescribeConfigsResponseResourceConfig()
	value := c.value(spec)
	d.Name, d.Value, d.ReadOnly, d.IsDefault, d.ConfigType = c.name, &value, c.set == nil, value == c.byDefault(), c.typ
	if d.Source = kmsg.ConfigSourceDynamicTopicConfig; d.IsDefault {
		d.Source = kmsg.ConfigSourceDefaultConfig
	}
	return d
}
