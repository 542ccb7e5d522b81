package kafka

import (
	"fmt"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
)

// incrementalAlterConfigs changes the configurations of topics that a request names.
func (s *Server) incrementalAlterConfigs(r *request, q *kmsg.IncrementalAlterConfigsRequest) *kmsg.IncrementalAlterConfigsResponse {
	p := q.ResponseKind().(*kmsg.IncrementalAlterConfigsResponse)
	for _, qr := range q.Resources {
		pr := kmsg.NewIncrementalAlterConfigsResponseResource()
		pr.ResourceType, pr.ResourceName = qr.ResourceType, qr.ResourceName
		names := make([]string, len(qr.Configs))
		for i := range qr.Configs {
			names[i] = qr.Configs[i].Name
		}
		err := s.alterResource(r, qr.ResourceType, qr.ResourceName, names, q.ValidateOnly, func(spec *stream.Spec) error {
			for i := range qr.Configs {
				if err := alterConfig(spec, &qr.Configs[i]); err != nil {
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

// alterConfig changes a known configuration.
func alterConfig(spec *stream.Spec, q *kmsg.IncrementalAlterConfigsRequestResourceConfig) error {
	c := findConfig(q.Name)
	if q.Op == kmsg.IncrementalAlterConfigOpDelete {
		return c.clear(spec)
	}
	if q.Value == nil {
		return &refusal{codeInvalidRequest, fmt.Sprintf("configuration %s has no value", q.Name)}
	}
	if q.Op == kmsg.IncrementalAlterConfigOpSet {
		return setConfig(spec, q.Name, *q.Value)
	}
	if c.typ != kmsg.ConfigTypeList {
		return fmt.Errorf("configuration %s is no list", q.Name)
	}
	words := splitList(c.value(spec))
	for _, w := range splitList(*q.Value) {
		at := slices.Index(words, w)
		switch {
		case q.Op == kmsg.IncrementalAlterConfigOpAppend && at < 0:
			words = append(words, w)
		case q.Op == kmsg.IncrementalAlterConfigOpSubtract && at >= 0:
			words = slices.Delete(words, at, at+1)
		case q.Op != kmsg.IncrementalAlterConfigOpAppend && q.Op != kmsg.IncrementalAlterConfigOpSubtract:
			return &refusal{codeInvalidRequest, fmt.Sprintf("operation %d on a configuration is not known", q.Op)}
		}
	}
	return setConfig(spec, q.Name, strings.Join(words, ","))
}
