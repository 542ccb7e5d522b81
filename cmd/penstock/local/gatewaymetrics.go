package local

import (
	"cmp"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/partition"
)

// maxLags bounds the consumer groups with a metric of their lag; the groups with the greatest lags have one.
const maxLags = 100

// Metrics collects the counters of a gateway; none for a nil gateway.
func (g *Gateway) Metrics() prometheus.Gatherer {
	r := prometheus.NewRegistry()
	if g != nil {
		r.MustRegister(gatewayCollector{g})
	}
	return r
}

type gatewayCollector struct{ g *Gateway }

// Describe sends nothing: the set of groups changes.
func (gatewayCollector) Describe(chan<- *prometheus.Desc) {}

// Collect sends the metrics. A gateway that is connecting has no partitions yet.
func (c gatewayCollector) Collect(out chan<- prometheus.Metric) {
	const count, gauge = prometheus.CounterValue, prometheus.GaugeValue
	send := func(r reading, labels map[string]string) {
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(r.name, r.help, nil, labels), r.kind, r.value)
	}
	n := &c.g.counters
	var now stream.Status
	if c.g.mu.TryLock() {
		host := c.g.host
		c.g.mu.Unlock()
		if host != nil {
			now = host.Status()
		}
	}
	for _, r := range []reading{
		{"penstock_stream_appended_records_total", "Records that were appended to streams and are durable.", count, float64(n.AppendedRecords.Load())},
		{"penstock_stream_appended_bytes_total", "Bytes of the batches of these records, as the producers sent the batches.", count, float64(n.AppendedBytes.Load())},
		{"penstock_stream_read_records_total", "Records that were read for consumers.", count, float64(n.ReadRecords.Load())},
		{"penstock_stream_read_bytes_total", "Bytes of the batches of these records.", count, float64(n.ReadBytes.Load())},
		{"penstock_stream_partitions_led", "Partitions that this gateway leads.", gauge, float64(now.Led)},
		{"penstock_stream_unpublished_records", "Records that were not in the published tables when the last round of publishing began, of the partitions that this gateway leads.", gauge, float64(now.Unpublished)},
	} {
		send(r, nil)
	}
	slices.SortFunc(now.Lags, func(a, b stream.Lag) int { return cmp.Compare(b.Records, a.Records) })
	type labels struct{ stream, group string } // a renamed stream may have had the path of another one
	seen := map[labels]bool{}
	for _, l := range now.Lags {
		of := labels{l.Stream, l.Group}
		if seen[of] || len(seen) == maxLags {
			continue
		}
		seen[of] = true
		send(reading{"penstock_stream_group_lag_records", "Records that a consumer group has not committed, of partitions that this gateway leads; for the 100 groups with the greatest lags among the groups that this gateway coordinates.", gauge, float64(l.Records)},
			map[string]string{"stream": l.Stream, "group": l.Group})
	}
	histogram := func(name, help string, d *partition.Durations) {
		total, sum, upTo := d.Total()
		buckets := map[float64]uint64{}
		for i, bound := range partition.DurationBounds {
			buckets[bound.Seconds()] = upTo[i]
		}
		out <- prometheus.MustNewConstHistogram(prometheus.NewDesc(name, help, nil, nil), total, sum.Seconds(), buckets)
	}
	histogram("penstock_stream_append_seconds", "Time from the arrival of a batch until the batch is durable.", &n.Append)
	histogram("penstock_stream_read_seconds", "Time of a read of batches for consumers.", &n.Read)
}
