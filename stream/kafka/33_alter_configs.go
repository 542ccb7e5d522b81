package kafka

import (
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// alterConfigs replaces all configurations of topics: those that a request does not name get
// their defaults.
func (s *Server) alterConfigs(r *request, q *kmsg.AlterConfigsRequest) *kmsg.AlterConfigsResponse {
	p := q.ResponseKind().(*kmsg.AlterConfigsResponse)
	for _, qr := range q.Resources {
		pr := kmsg.NewAlterConfigsResponseResource()
		pr.ResourceType, pr.ResourceName = qr.ResourceType, qr.ResourceName
		names := make([]string, len(qr.Configs))
		for i := range qr.Configs {
			names[i] = qr.Configs[i].Name
		}
		err := s.alterResource(r, qr.ResourceType, qr.ResourceName, names, q.ValidateOnly, func(spec *stream.Spec) error {
			for i := range topicConfigs {
				if err := topicConfigs[i].clear(spec); err != nil {
					return err
				}
			}
			for _, c := range qr.Configs {
				if c.Value == nil {
					continue // the default
				}
				if err := setConfig(spec, c.Name, *c.Value); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			text := err.Error()
			pr.ErrorCode, pr.ErrorMessage = codeOf(err), &text
		}
		p.Resources = append(p.Resources, pr)
	}
	return p
}

// alterResource changes the configurations of a resource, which have some names. alter's errors
// are answered with INVALID_CONFIG.
func (s *Server) alterResource(r *request, typ kmsg.ConfigResourceType, topic string, names []string, only bool, alter func(*stream.Spec) error) error {
	if typ != kmsg.ConfigResourceTypeTopic {
		return &refusal{codeInvalidRequest, "only topics have a configuration that can be changed; the flags of 'penstock gateway' configure a gateway"}
	}
	seen := map[string]bool{}
	for _, name := range names {
		if findConfig(name) == nil {
			return &refusal{codeInvalidConfig, "configuration " + name + " is not supported"}
		}
		if seen[name] {
			return &refusal{codeInvalidRequest, "configuration " + name + " is named twice"}
		}
		seen[name] = true
	}
	return s.change(r, topic, only, func(spec *stream.Spec) error {
		err := alter(spec)
		if err == nil {
			err = spec.Check()
		}
		if _, known := err.(*refusal); err != nil && !known {
			return &refusal{codeInvalidConfig, err.Error()}
		}
		return err
	})
}
