package local

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Metrics collects the counters of this process's parts. The names follow Prometheus's
// convention: penstock_<part>_<what>_<unit>. Parts that do not run are nil.
func Metrics(m *Meta, c *Chunk, mount *Mount) prometheus.Gatherer {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), &collector{meta: m, chunk: c, mount: mount, health: lastHealth{turn: make(chan struct{}, 1)}})
	return r
}

type collector struct {
	meta   *Meta
	chunk  *Chunk
	mount  *Mount
	health lastHealth
}

// lastHealth caches a metadata server's health for healthHolds: computing the health asks all
// members of etcd, and anybody may read metrics as often as they like.
type lastHealth struct {
	turn chan struct{} // a lock: the holder asks or reads the cache
	at   time.Time
	h    *meta.ServerHealth
}

// healthHolds is how long an answer is reused: shorter than the scrape interval of any
// Prometheus.
const healthHolds = 3 * time.Second

// ask returns a health no older than healthHolds, calling of if needed.
func (l *lastHealth) ask(of func(context.Context) *meta.ServerHealth) *meta.ServerHealth {
	l.turn <- struct{}{}
	defer func() { <-l.turn }()
	if l.h == nil || time.Since(l.at) >= healthHolds {
		ctx, cancel := context.WithTimeout(context.Background(), healthWithin)
		defer cancel()
		l.h = of(ctx)
		l.at = time.Now()
	}
	return l.h
}

// healthWithin bounds the computation of a health, which asks etcd.
const healthWithin = 3 * time.Second

// labelled is a set of readings with the same labels.
type labelled struct {
	labels   map[string]string
	readings []reading
}

// serverHealth converts a metadata server's health into metrics, for the same facts as
// `penstock health` prints. Each server counts the chunks of the volumes it serves, so a query
// adds the chunk counts of all servers. Chunk servers and etcd are the same for every server.
func serverHealth(h *meta.ServerHealth) []labelled {
	const gauge = prometheus.GaugeValue
	one := func(is bool) float64 {
		if is {
			return 1
		}
		return 0
	}
	failed := 0
	for _, v := range h.Volumes {
		if v.Failed != "" {
			failed++
		}
	}
	all := []labelled{{nil, []reading{
		{"penstock_meta_chunkservers_known", "Chunk servers of the cluster that were not removed.", gauge, float64(h.Nodes)},
		{"penstock_meta_chunkservers_away", "Those of them that this server does not hear.", gauge, float64(h.Nodes - h.NodesLive)},
		{"penstock_meta_cluster_bytes", "Size of all disks of chunk servers that are there.", gauge, float64(h.Total)},
		{"penstock_meta_cluster_free_bytes", "What is free on them.", gauge, float64(h.Free)},
		{"penstock_meta_volumes_failed", "Volumes that can't be served here, of those that were to be.", gauge, float64(failed)},
		{"penstock_meta_certificates_ending", "Connected identities whose certificate has less than a quarter of its life left, 100 at most.", gauge, float64(len(h.Certificates))},
		{"penstock_meta_clients_cut_off", "Clients whose session ended in the last quarter of an hour while they used a volume, and that did not come back, 100 at most.", gauge, float64(len(h.CutOff))},
		{"penstock_meta_etcd_reached", "1 if this server can ask etcd.", gauge, one(h.Etcd.Error == "")},
		{"penstock_meta_etcd_alarms", "Alarms that etcd has raised.", gauge, float64(len(h.Etcd.Alarms))},
	}}}
	for state, n := range map[string]uint64{
		"lost": h.Chunks.Lost, "endangered": h.Chunks.Endangered, "under_replicated": h.Chunks.UnderReplicated, "corrupt": h.Chunks.Corrupt,
		"misplaced": h.Chunks.Misplaced, "draining": h.Chunks.Draining, "surplus": h.Chunks.Surplus, "blocked": h.Chunks.Blocked,
		"unreachable": h.Chunks.Unreachable, "last_reachable": h.Chunks.LastReachable,
	} {
		all = append(all, labelled{map[string]string{"state": state}, []reading{
			{"penstock_meta_bad_chunks", "Chunks of volumes open here with something wrong, each by the worst: lost (no replica can be reached), endangered (one is left), under_replicated, corrupt, misplaced, draining, surplus; blocked: of those, what can't be helped now; and, apart from those, unreachable and last_reachable: none, or only one of several replicas can be reached now, since servers are away.", gauge, float64(n)},
		}})
	}
	seen := map[string]bool{}
	for _, e := range h.Etcd.Endpoints {
		if seen[e.Address] {
			continue // configured twice
		}
		seen[e.Address] = true
		rs := []reading{{"penstock_meta_etcd_endpoint_up", "1 if this member of etcd answers this server and knows a leader.", gauge, one(e.Error == "" && !e.NoLeader)}}
		if e.Quota > 0 {
			rs = append(rs,
				reading{"penstock_meta_etcd_bytes", "Size of a member's database file.", gauge, float64(e.Bytes)},
				reading{"penstock_meta_etcd_used_bytes", "What is in use of it.", gauge, float64(e.Used)},
				reading{"penstock_meta_etcd_quota_bytes", "What it may grow to: beyond it all changes are refused.", gauge, float64(e.Quota)},
			)
		}
		all = append(all, labelled{map[string]string{"endpoint": e.Address}, rs})
	}
	return all
}

// certificate returns the begin and the end of the certificate's validity; nil without a
// certificate.
func certificate(creds *peer.Credentials) []reading {
	if creds == nil || creds.IsInsecure() {
		return nil
	}
	id := creds.Identity()
	return []reading{
		{"penstock_certificate_begin_timestamp_seconds", "From when this process's certificate holds.", prometheus.GaugeValue, float64(id.Begins.Unix())},
		{"penstock_certificate_end_timestamp_seconds", "When it ends; it is renewed after half of its life.", prometheus.GaugeValue, float64(id.Expires.Unix())},
	}
}

// CertificateMetrics collects the validity of a process's credentials, for processes without
// Metrics.
func CertificateMetrics(creds *peer.Credentials) prometheus.Collector { return bearer{creds} }

type bearer struct{ creds *peer.Credentials }

func (bearer) Describe(chan<- *prometheus.Desc) {}

func (b bearer) Collect(out chan<- prometheus.Metric) {
	for _, r := range certificate(b.creds) {
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc(r.name, r.help, nil, nil), r.kind, r.value)
	}
}

// Describe sends nothing: the set of disks may change.
func (c *collector) Describe(chan<- *prometheus.Desc) {}

type reading struct {
	name, help string
	kind       prometheus.ValueType
	value      float64
}

// Collect sends the metrics of every part.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	send := func(labels map[string]string, rs ...reading) {
		for _, r := range rs {
			d := prometheus.NewDesc(r.name, r.help, nil, labels)
			out <- prometheus.MustNewConstMetric(d, r.kind, r.value)
		}
	}
	const count, gauge = prometheus.CounterValue, prometheus.GaugeValue
	if c.meta != nil && c.meta.Server != nil {
		s := c.meta.Server.Counters()
		full := 0.0
		if s.NoSpace {
			full = 1
		}
		send(nil,
			reading{"penstock_meta_calls_total", "Operations asked for.", count, float64(s.Calls)},
			reading{"penstock_meta_calls_held_total", "Operations that waited because their client identity was ahead of its rate.", count, float64(s.Held)},
			reading{"penstock_meta_calls_held_seconds_total", "How long they waited, all together.", count, s.HeldFor.Seconds()},
			reading{"penstock_meta_journal_entries_total", "Journal entries committed.", count, float64(s.Entries)},
			reading{"penstock_meta_journal_bytes_total", "Bytes of payload in committed journal entries.", count, float64(s.JournalBytes)},
			reading{"penstock_meta_checkpoints_total", "Checkpoints made.", count, float64(s.Checkpoints)},
			reading{"penstock_meta_sessions_expired_total", "Sessions whose lease ran out.", count, float64(s.Expired)},
			reading{"penstock_meta_chunks_sealed_total", "Chunks sealed.", count, float64(s.Sealed)},
			reading{"penstock_meta_chunks_deleted_total", "Chunks deleted.", count, float64(s.Deleted)},
			reading{"penstock_meta_compacted_chunks_total", "Chunks that compaction filled.", count, float64(s.Compacted)},
			reading{"penstock_meta_compacted_bytes_total", "Bytes it copied, each once however many replicas there are.", count, float64(s.CompactedBytes)},
			reading{"penstock_meta_compacted_extents_total", "Extents it moved.", count, float64(s.CompactedExtents)},
			reading{"penstock_meta_compact_errors_total", "Times it stopped with an error.", count, float64(s.CompactFailed)},
			reading{"penstock_meta_fragmented_files", "Files with fragments to be joined, when they were last looked for.", gauge, float64(s.FragmentedFiles)},
			reading{"penstock_meta_fragments", "Fragments to be joined in them.", gauge, float64(s.Fragments)},
			reading{"penstock_meta_sessions", "Sessions now.", gauge, float64(s.Sessions)},
			reading{"penstock_meta_volumes", "Volumes open here.", gauge, float64(s.Volumes)},
			reading{"penstock_meta_chunkservers", "Chunk servers connected.", gauge, float64(s.ChunkServers)},
			reading{"penstock_meta_leases", "Inodes that some session may cache.", gauge, float64(s.Leases)},
			reading{"penstock_meta_overlay_records", "Records not yet in the store.", gauge, float64(s.OverlayRecords)},
			reading{"penstock_meta_queued_bytes", "Bytes of effects that wait for the journal.", gauge, float64(s.QueuedBytes)},
			reading{"penstock_meta_followed_volumes", "Volumes of other owners that are followed here.", gauge, float64(s.Followed)},
			reading{"penstock_meta_followed_behind_volumes", "Followed volumes whose copy is not known to be near the end of the journal.", gauge, float64(s.FollowUnknown)},
			reading{"penstock_meta_follow_lag_seconds", "Longest time since a followed volume's copy was last at the end of its journal; an idle journal is looked at every 8 s.", gauge, s.FollowLag.Seconds()},
			reading{"penstock_meta_follow_entries_total", "Journal entries applied to followed volumes.", count, float64(s.FollowEntries)},
			reading{"penstock_meta_follow_bytes_total", "Bytes of payload in them.", count, float64(s.FollowBytes)},
			reading{"penstock_meta_follow_loads_total", "Copies opened to follow, from disk or from a checkpoint.", count, float64(s.FollowLoads)},
			reading{"penstock_meta_follow_damaged_total", "Copies that were put aside because they were damaged or did not fit the journal.", count, float64(s.FollowDamaged)},
			reading{"penstock_meta_journal_full", "1 while changes are refused because the journal has no space.", gauge, full},
		)
		for _, v := range c.meta.Server.VolumeCounters() {
			labels := map[string]string{"volume": v.Name}
			if v.Compressed {
				send(labels,
					reading{"penstock_meta_volume_plain_bytes", "Bytes of replicas of sealed chunks, of volumes that are compressed.", gauge, float64(v.PlainBytes)},
					reading{"penstock_meta_volume_stored_bytes", "What they take on the disks, as last listed.", gauge, float64(v.StoredBytes)},
				)
			}
			advisory := func(of string, limit, used uint64, over bool) {
				if limit == 0 {
					return
				}
				above := 0.0
				if over {
					above = 1
				}
				send(map[string]string{"volume": v.Name, "of": of},
					reading{"penstock_meta_volume_advisory_quota", "The advisory quota, of bytes or of inodes.", gauge, float64(limit)},
					reading{"penstock_meta_volume_advisory_used", "What is used of it.", gauge, float64(used)},
					reading{"penstock_meta_volume_advisory_exceeded", "1 while the volume counts as above its advisory quota.", gauge, above},
				)
			}
			advisory("bytes", v.AdvisoryBytes, v.UsedBytes, v.BytesOver)
			advisory("inodes", v.AdvisoryInodes, v.UsedInodes, v.InodesOver)
		}
		send(nil, certificate(c.meta.cfg.Creds)...)
		for _, of := range serverHealth(c.health.ask(c.meta.Server.Health)) {
			send(of.labels, of.readings...)
		}
		if c.meta.etcd != nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			size, used, err := c.meta.etcd.DBSize(ctx)
			cancel()
			if err == nil {
				send(nil,
					reading{"penstock_etcd_db_bytes", "Size of the embedded etcd's database file.", gauge, float64(size)},
					reading{"penstock_etcd_db_used_bytes", "Bytes in use in it.", gauge, float64(used)},
				)
			}
		}
	}
	if c.chunk != nil && c.chunk.Server != nil {
		s := c.chunk.Server.Stats()
		send(nil, certificate(c.chunk.creds)...)
		send(nil,
			reading{"penstock_chunkserver_connections", "Connections now.", gauge, float64(s.Conns)},
			reading{"penstock_chunkserver_refused_total", "Connections and capabilities refused.", count, float64(s.Refused)},
			reading{"penstock_chunkserver_frames_total", "Frames served.", count, float64(s.Frames)},
			reading{"penstock_chunkserver_descriptors_total", "Descriptors of chunks passed to readers on this machine.", count, float64(s.Descriptors)},
			reading{"penstock_chunkserver_shared_appends_total", "Appends through memory shared with a writer on this machine.", count, float64(s.Shared)},
			reading{"penstock_chunkserver_answers_bytes", "Bytes of answers to reads that are in memory now.", gauge, float64(s.Answering)},
			reading{"penstock_chunkserver_reads_held_total", "Reads that waited since their client had too many answers to come.", count, float64(s.Held)},
		)
		send(nil,
			reading{"penstock_chunkserver_pulled_chunks_total", "Chunks copied from other servers.", count, float64(s.Pulled)},
			reading{"penstock_chunkserver_pulled_bytes_total", "Bytes of them.", count, float64(s.PulledBytes)},
			reading{"penstock_chunkserver_pull_errors_total", "Chunks or pieces that could not be copied.", count, float64(s.PullErrors)},
			reading{"penstock_chunkserver_gathered_bytes_total", "Bytes of pieces that compaction had copied into chunks here.", count, float64(s.GatheredBytes)},
		)
		for _, d := range s.Disks {
			failed, bad := 0.0, 0.0
			switch d.State {
			case meta.DiskFailed, meta.DiskRemoved:
				failed, bad = 1, 1
			case meta.DiskFailing:
				bad = 1
			}
			send(map[string]string{"disk": d.Path},
				reading{"penstock_chunkserver_appends_total", "Appends.", count, float64(d.Appends)},
				reading{"penstock_chunkserver_append_bytes_total", "Bytes appended.", count, float64(d.AppendBytes)},
				reading{"penstock_chunkserver_syncs_total", "Syncs asked for.", count, float64(d.Syncs)},
				reading{"penstock_chunkserver_log_syncs_total", "Flushes of the disk's log; one may serve many syncs.", count, float64(d.LogSyncs)},
				reading{"penstock_chunkserver_read_bytes_total", "Bytes read, descriptors passed apart.", count, float64(d.ReadBytes)},
				reading{"penstock_chunkserver_corrupt_total", "Blocks or chunks found bad.", count, float64(d.Corrupt)},
				reading{"penstock_chunkserver_disk_bytes", "Size of the disk.", gauge, float64(d.DiskInfo.Total)},
				reading{"penstock_chunkserver_disk_free_bytes", "Bytes that appends may still take.", gauge, float64(d.DiskInfo.Free)},
				reading{"penstock_chunkserver_disk_failed", "1 while the disk serves nothing.", gauge, failed},
				reading{"penstock_chunkserver_disk_unhealthy", "1 while the disk takes nothing new because it failed, is failing or was given up.", gauge, bad},
				reading{"penstock_chunkserver_scrub_progress_ratio", "How far the reading of everything is.", gauge, float64(d.Scrubbed) / 1000},
				reading{"penstock_chunkserver_scrub_end_timestamp_seconds", "When everything was last read to its end.", gauge, float64(d.ScrubEnd) / 1e9},
				reading{"penstock_chunkserver_scrub_bytes", "Bytes read in this pass, or in the last one.", gauge, float64(d.Scrub.Bytes)},
				reading{"penstock_chunkserver_scrub_bad_chunks", "Chunks found bad in this pass, or in the last one.", gauge, float64(d.Scrub.Bad)},
			)
		}
	}
	if c.mount != nil {
		for _, r := range clientReadings(c.mount.Client.Stats()) {
			send(nil, r)
		}
		if c.mount.Hold {
			held := 0.0
			if c.mount.Held() {
				held = 1
			}
			send(nil, reading{"penstock_mount_held", "1 if a holder has the mount, 0 if it was to have it and can't (Linux before 6.9): then the mount ends with its process.", gauge, held})
		}
		t := c.mount.ReadTimes()
		send(nil, reading{"penstock_mount_read_waiting_seconds_total", "Time in which a READ of the kernel was asked for and not answered: its share of the time bounds how long a program that reads stood still for data.", count, t.Waiting.Seconds()})
		buckets := make(map[float64]uint64)
		for i, bound := range fuse.ReadBounds {
			buckets[bound.Seconds()] = t.Buckets[i]
		}
		d := prometheus.NewDesc("penstock_mount_read_seconds", "How long READs of the kernel took, of what it had not cached; with read-ahead.", nil, nil)
		out <- prometheus.MustNewConstHistogram(d, t.Count, t.Sum.Seconds(), buckets)
	}
}

func clientReadings(s penstock.Stats) []reading {
	const gauge = prometheus.GaugeValue
	const count = prometheus.CounterValue
	return []reading{
		{"penstock_client_inodes", "Inodes kept in memory.", gauge, float64(s.Inodes)},
		{"penstock_client_dentries", "Names kept in memory, present and absent.", gauge, float64(s.Dentries)},
		{"penstock_client_dirty_bytes", "Bytes written, not yet durable and committed.", gauge, float64(s.DirtyBytes)},
		{"penstock_client_buffer_bytes", "Memory that written bytes take.", gauge, float64(s.BufferBytes)},
		{"penstock_client_rpcs_total", "Requests sent to metadata servers.", count, float64(s.RPCs)},
		{"penstock_client_lookup_hits_total", "Lookups answered from memory.", count, float64(s.LookupHits)},
		{"penstock_client_indexed_total", "Questions answered from the indexes of snapshots.", count, float64(s.Indexed)},
		{"penstock_client_bad_indexes_total", "Indexes of snapshots refused because they were damaged.", count, float64(s.BadIndexes)},
		{"penstock_client_recalls_total", "Leases recalled.", count, float64(s.Recalls)},
		{"penstock_client_written_bytes_total", "Bytes written by programs.", count, float64(s.WrittenBytes)},
		{"penstock_client_read_bytes_total", "Bytes read through this process, the kernel's own reads apart.", count, float64(s.ReadBytes)},
		{"penstock_client_appended_bytes_total", "Bytes sent to chunk servers.", count, float64(s.AppendedBytes)},
		{"penstock_client_commits_total", "Files whose extents were committed.", count, float64(s.Commits)},
		{"penstock_client_lost_bytes_total", "Written bytes that are lost: to errors, to the end of the session, or given up by an operator.", count, float64(s.LostBytes)},
		{"penstock_client_lost_files_total", "Files that lost written bytes, each time.", count, float64(s.LostFiles)},
		{"penstock_client_dirty_files", "Files with bytes, a size or times that are not durable and committed.", gauge, float64(s.DirtyFiles)},
	}
}
