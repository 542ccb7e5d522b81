package kafka

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/partition"
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
			for _, c := range topicConfigs(&spec) {
				if qr.ConfigNames == nil || slices.Contains(qr.ConfigNames, c.Name) {
					pr.Configs = append(pr.Configs, c)
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

// topicConfigs lists the configuration of a stream.
func topicConfigs(spec *stream.Spec) []kmsg.DescribeConfigsResponseResourceConfig {
	var l []kmsg.DescribeConfigsResponseResourceConfig
	add := func(name, value string, typ kmsg.ConfigType, isDefault bool) {
		c := kmsg.NewDescribeConfigsResponseResourceConfig()
		c.Name, c.Value, c.ReadOnly, c.IsDefault, c.ConfigType = name, &value, true, isDefault, typ
		if c.Source = kmsg.ConfigSourceDynamicTopicConfig; isDefault {
			c.Source = kmsg.ConfigSourceDefaultConfig
		}
		l = append(l, c)
	}
	number := func(n int64) string {
		if n == 0 {
			n = -1 // no bound
		}
		return strconv.FormatInt(n, 10)
	}
	policy := "delete"
	if spec.Compact {
		policy = "compact"
		if spec.Retention > 0 || spec.RetentionBytes > 0 {
			policy = "compact,delete"
		}
	}
	add("cleanup.policy", policy, kmsg.ConfigTypeList, !spec.Compact)
	add("compression.type", "producer", kmsg.ConfigTypeString, true)
	add("delete.retention.ms", number(int64(cmp.Or(spec.TombstoneAge, partition.DefaultTombstoneAge)/time.Millisecond)), kmsg.ConfigTypeLong, spec.TombstoneAge == 0)
	add("max.message.bytes", strconv.Itoa(partition.DefaultMaxBatch), kmsg.ConfigTypeInt, true)
	add("message.timestamp.type", "CreateTime", kmsg.ConfigTypeString, true)
	add("retention.bytes", number(spec.RetentionBytes), kmsg.ConfigTypeLong, spec.RetentionBytes == 0)
	add("retention.ms", number(int64(spec.Retention/time.Millisecond)), kmsg.ConfigTypeLong, spec.Retention == 0)
	add("segment.bytes", number(spec.SegmentBytes), kmsg.ConfigTypeInt, spec.SegmentBytes == 0)
	add("segment.ms", number(int64(spec.SegmentAge/time.Millisecond)), kmsg.ConfigTypeLong, spec.SegmentAge == 0)
	return l
}
