package stream

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/partition"
	"penstock.io/penstock/stream/publish"
)

// MaxPartitions bounds the partitions of a stream.
const MaxPartitions = 4096

// Formats of the values of a stream's records. The log has the bytes as they came in any case.
var Formats = []string{publish.Bytes, publish.UTF8, publish.JSON}

// Spec is what stream.json says of a stream.
type Spec struct {
	Partitions int
	// NamedPartitions is how many partitions producers with a name are spread over: the number of
	// partitions before the stream first got more, so that a name stays in its partition; 0: all.
	NamedPartitions int
	Format          string        // of Formats; "" is bytes
	Retention       time.Duration // records are removed after the time; 0: kept for ever
	// RetentionBytes is the size of a partition from which the oldest records are removed; 0:
	// no bound.
	RetentionBytes int64
	// Compact keeps only the last record of each key, and TombstoneAge says how long a last record
	// without a value is kept; 0: the default of stream/partition.
	Compact      bool
	TombstoneAge time.Duration
	// SegmentBytes and SegmentAge say when a partition begins the next file; 0: the defaults of
	// stream/partition.
	SegmentBytes int64
	SegmentAge   time.Duration
	// MaxBatch bounds the batches of Kafka's producers, in bytes; 0: partition.DefaultMaxBatch.
	MaxBatch int
	// Lag is how late the published table is at the most, of gateways that are not overloaded;
	// 0: no table is published. Schema names the fields of JSON values that are columns of the
	// table, see publish.ParseSchema; "": the value is a column.
	Lag    time.Duration
	Schema string
}

// BatchBytes returns the bound on the batches of Kafka's producers, in bytes.
func (s *Spec) BatchBytes() int { return cmp.Or(s.MaxBatch, partition.DefaultMaxBatch) }

// Named returns how many partitions producers with a name are spread over.
func (s *Spec) Named() int { return cmp.Or(s.NamedPartitions, s.Partitions) }

// fields returns the fields of Schema.
func (s *Spec) fields() ([]publish.Field, error) {
	if s.Schema == "" {
		return nil, nil
	}
	return publish.ParseSchema(s.Schema)
}

const specVersion = 1

// cleanupCompact is the word of specRecord.Cleanup for Spec.Compact.
const cleanupCompact = "compact"

// specRecord is the JSON of stream.json.
type specRecord struct {
	Version        int    `json:"version"`
	Partitions     int    `json:"partitions"`
	Named          int    `json:"named_partitions,omitempty"`
	Format         string `json:"format"`
	Retention      string `json:"retention,omitempty"`
	RetentionBytes int64  `json:"retention_bytes,omitempty"`
	Cleanup        string `json:"cleanup,omitempty"`
	TombstoneAge   string `json:"tombstone_age,omitempty"`
	SegmentBytes   int64  `json:"segment_bytes,omitempty"`
	SegmentAge     string `json:"segment_age,omitempty"`
	MaxBatch       int    `json:"max_batch,omitempty"`
	Lag            string `json:"lag,omitempty"`
	Schema         string `json:"schema,omitempty"`
}

// Check verifies the values. Errors: Invalid.
func (s *Spec) Check() error {
	bad := func(format string, args ...any) error {
		return meta.E("check stream", meta.Invalid, SpecFile, fmt.Errorf(format, args...))
	}
	switch {
	case s.Partitions < 1 || s.Partitions > MaxPartitions:
		return bad("a stream has 1 to %d partitions, not %d", MaxPartitions, s.Partitions)
	case s.NamedPartitions < 0 || s.NamedPartitions > s.Partitions:
		return bad("producers with a name use 1 to %d partitions, not %d", s.Partitions, s.NamedPartitions)
	case s.Format != "" && !slices.Contains(Formats, s.Format):
		return bad("format %q is not known; give %s", s.Format, strings.Join(Formats, ", "))
	case s.Retention < 0 || s.RetentionBytes < 0 || s.SegmentAge < 0 || s.TombstoneAge < 0:
		return bad("a retention or an age is negative")
	case s.SegmentBytes < 0 || s.SegmentBytes > 0 && s.SegmentBytes < 4096:
		return bad("a segment has 4096 bytes or more, not %d", s.SegmentBytes)
	case s.MaxBatch < 0 || s.MaxBatch > partition.DefaultMaxBatch:
		return bad("a batch has 1 to %d bytes, not %d", partition.DefaultMaxBatch, s.MaxBatch)
	case s.Lag != 0 && (s.Lag < time.Second || s.Lag > MaxLag):
		return bad("the lag of a table is between 1s and %v, not %v", MaxLag, s.Lag)
	case s.Schema != "" && s.Format != publish.JSON:
		return bad("a schema needs the format %s", publish.JSON)
	}
	if _, err := s.fields(); err != nil {
		return meta.E("check stream", meta.Invalid, SpecFile, err)
	}
	return nil
}

// Encode returns the bytes of stream.json.
func (s *Spec) Encode() []byte {
	r := specRecord{Version: specVersion, Partitions: s.Partitions, Named: s.NamedPartitions, Format: s.Format, RetentionBytes: s.RetentionBytes, SegmentBytes: s.SegmentBytes, MaxBatch: s.MaxBatch, Schema: s.Schema}
	if r.Format == "" {
		r.Format = Formats[0]
	}
	if s.Retention > 0 {
		r.Retention = s.Retention.String()
	}
	if s.Compact {
		r.Cleanup = cleanupCompact
	}
	if s.TombstoneAge > 0 {
		r.TombstoneAge = s.TombstoneAge.String()
	}
	if s.SegmentAge > 0 {
		r.SegmentAge = s.SegmentAge.String()
	}
	if s.Lag > 0 {
		r.Lag = s.Lag.String()
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		panic("stream: a record of plain values can't be encoded: " + err.Error())
	}
	return append(b, '\n')
}

// DecodeSpec decodes stream.json. Errors: Corrupt, Version, Invalid.
func DecodeSpec(b []byte) (Spec, error) {
	const op = "read stream"
	var r specRecord
	if err := json.Unmarshal(b, &r); err != nil || r.Version < 1 {
		return Spec{}, meta.E(op, meta.Corrupt, SpecFile, err)
	}
	if r.Version > specVersion {
		return Spec{}, meta.E(op, meta.Version, SpecFile, fmt.Errorf("version %d is newer than %d: use a newer program", r.Version, specVersion))
	}
	s := Spec{Partitions: r.Partitions, NamedPartitions: r.Named, Format: r.Format, RetentionBytes: r.RetentionBytes, SegmentBytes: r.SegmentBytes, MaxBatch: r.MaxBatch, Schema: r.Schema}
	switch r.Cleanup {
	case "":
	case cleanupCompact:
		s.Compact = true
	default:
		return Spec{}, meta.E(op, meta.Corrupt, SpecFile, fmt.Errorf("cleanup %q is not known", r.Cleanup))
	}
	for _, d := range []struct {
		text string
		to   *time.Duration
	}{{r.Retention, &s.Retention}, {r.SegmentAge, &s.SegmentAge}, {r.TombstoneAge, &s.TombstoneAge}, {r.Lag, &s.Lag}} {
		if d.text == "" {
			continue
		}
		var err error
		if *d.to, err = time.ParseDuration(d.text); err != nil {
			return Spec{}, meta.E(op, meta.Corrupt, SpecFile, err)
		}
	}
	return s, s.Check()
}
