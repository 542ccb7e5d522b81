package kafka

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/partition"
)

// topicConfig is a configuration of a topic, by Kafka's name.
type topicConfig struct {
	name  string
	typ   kmsg.ConfigType
	value func(*stream.Spec) string        // of a stream; the value of an empty Spec is the default
	set   func(*stream.Spec, string) error // nil: the configuration has one value for ever
}

// topicConfigs are the known configurations, in the order of their names.
var topicConfigs = []topicConfig{
	{"cleanup.policy", kmsg.ConfigTypeList, cleanupPolicy, setCleanupPolicy},
	{"compression.type", kmsg.ConfigTypeString, always("producer"), nil},
	milliseconds("delete.retention.ms", func(s *stream.Spec) *time.Duration { return &s.TombstoneAge }, partition.DefaultTombstoneAge),
	{"max.message.bytes", kmsg.ConfigTypeInt, func(s *stream.Spec) string { return strconv.Itoa(s.BatchBytes()) }, setMaxMessageBytes},
	{"message.timestamp.type", kmsg.ConfigTypeString, always("CreateTime"), nil},
	size("retention.bytes", kmsg.ConfigTypeLong, func(s *stream.Spec) *int64 { return &s.RetentionBytes }, 0),
	milliseconds("retention.ms", func(s *stream.Spec) *time.Duration { return &s.Retention }, 0),
	size("segment.bytes", kmsg.ConfigTypeInt, func(s *stream.Spec) *int64 { return &s.SegmentBytes }, partition.DefaultSegmentBytes),
	milliseconds("segment.ms", func(s *stream.Spec) *time.Duration { return &s.SegmentAge }, partition.DefaultSegmentAge),
}

// findConfig finds a configuration by name; nil: it is not known.
func findConfig(name string) *topicConfig {
	i := slices.IndexFunc(topicConfigs, func(c topicConfig) bool { return c.name == name })
	if i < 0 {
		return nil
	}
	return &topicConfigs[i]
}

// setConfig sets a configuration by name.
func setConfig(spec *stream.Spec, name, value string) error {
	c := findConfig(name)
	switch {
	case c == nil:
		return fmt.Errorf("configuration %s is not supported", name)
	case c.set != nil:
		return c.set(spec, value)
	case value != c.value(spec):
		return fmt.Errorf("%s is always %s, not %q", name, c.value(spec), value)
	}
	return nil
}

// byDefault returns the default value.
func (c *topicConfig) byDefault() string { return c.value(&stream.Spec{}) }

// clear sets the default value.
func (c *topicConfig) clear(spec *stream.Spec) error {
	if c.set == nil {
		return nil
	}
	return c.set(spec, c.byDefault())
}

func always(value string) func(*stream.Spec) string {
	return func(*stream.Spec) string { return value }
}

// number parses a number; -1, which stands for no bound or for the default, becomes 0.
func number(name, value string) (int64, error) {
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n < -1 {
		return 0, fmt.Errorf("%s is a number, not %q", name, value)
	}
	return max(n, 0), nil
}

// text is the reverse of number.
func text(n int64) string {
	if n == 0 {
		n = -1
	}
	return strconv.FormatInt(n, 10)
}

// milliseconds is a configuration that is a time; def is what 0 stands for.
func milliseconds(name string, of func(*stream.Spec) *time.Duration, def time.Duration) topicConfig {
	return topicConfig{name, kmsg.ConfigTypeLong, func(s *stream.Spec) string {
		return text(int64(cmp.Or(*of(s), def) / time.Millisecond))
	}, func(s *stream.Spec, value string) error {
		n, err := number(name, value)
		if err != nil {
			return err
		}
		// A Duration has fewer milliseconds than an int64, and the longest is for ever.
		d := time.Duration(0)
		if n <= int64(1<<63-1)/int64(time.Millisecond) {
			d = time.Duration(n) * time.Millisecond
		}
		if *of(s) = d; d == def {
			*of(s) = 0
		}
		return nil
	}}
}

// size is a configuration that is a size; def is what 0 stands for.
func size(name string, typ kmsg.ConfigType, of func(*stream.Spec) *int64, def int64) topicConfig {
	return topicConfig{name, typ, func(s *stream.Spec) string {
		return text(cmp.Or(*of(s), def))
	}, func(s *stream.Spec, value string) error {
		n, err := number(name, value)
		if *of(s) = n; n == def {
			*of(s) = 0
		}
		return err
	}}
}

func setMaxMessageBytes(spec *stream.Spec, value string) error {
	n, err := strconv.Atoi(value)
	if err != nil || n < 1 || n > partition.DefaultMaxBatch {
		return fmt.Errorf("max.message.bytes is a number from 1 to %d, not %q", partition.DefaultMaxBatch, value)
	}
	if spec.MaxBatch = n; n == partition.DefaultMaxBatch {
		spec.MaxBatch = 0
	}
	return nil
}

// Words of cleanup.policy.
const (
	policyDelete  = "delete"
	policyCompact = "compact"
)

func cleanupPolicy(spec *stream.Spec) string {
	switch {
	case !spec.Compact:
		return policyDelete
	case spec.Retention > 0 || spec.RetentionBytes > 0:
		return policyCompact + "," + policyDelete
	}
	return policyCompact
}

func setCleanupPolicy(spec *stream.Spec, value string) error {
	words := splitList(value)
	for _, w := range words {
		if w != policyDelete && w != policyCompact {
			return fmt.Errorf("cleanup.policy %q is not supported: give delete, compact, or both", value)
		}
	}
	if len(words) == 0 {
		return fmt.Errorf("cleanup.policy is empty: give delete, compact, or both")
	}
	spec.Compact = slices.Contains(words, policyCompact)
	return nil
}

// splitList splits the value of a configuration that is a list.
func splitList(value string) (words []string) {
	for w := range strings.SplitSeq(value, ",") {
		if w = strings.TrimSpace(w); w != "" {
			words = append(words, w)
		}
	}
	return words
}
