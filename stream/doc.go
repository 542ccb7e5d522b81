// Package stream owns streams: which directory is a stream, what stream.json says, which
// topic name stands for which path, and which streams a process has open. A stream is a
// directory of a volume:
//
//	/v/clicks/stream.json       partitions, retention, format of the values
//	/v/clicks/log/0/            the log of partition 0: stream/partition
//	/v/clicks/groups/g.offsets  the offsets of a consumer group: stream/offsets
//	/v/clicks/data/, _delta_log/, rejected/   the published table: stream/publish
//
// A directory is a stream as long as it has a stream.json, so a renamed directory is a renamed
// stream, and the removal of stream.json ends a stream.
package stream
