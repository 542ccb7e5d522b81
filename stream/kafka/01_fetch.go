package kafka

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/partition"
)

// Bounds of a Fetch request.
const (
	maxFetch     = 8 << 20 // bytes of records in a response, beside a single larger batch
	maxFetchWait = 5 * time.Minute
)

// fetched is a partition of a Fetch request.
type fetched struct {
	topic *kmsg.FetchRequestTopic
	q     *kmsg.FetchRequestTopicPartition
	to    *kmsg.FetchResponseTopicPartition
	log   *partition.Log
}

// fetch reads records. There are no incremental sessions: the response has session 0, and every
// request names all partitions.
func (s *Server) fetch(r *request, q *kmsg.FetchRequest) *kmsg.FetchResponse {
	p := q.ResponseKind().(*kmsg.FetchResponse)
	if q.SessionID != 0 {
		p.ErrorCode = codeSessionNotFound
		return p
	}
	var all []fetched
	answerNow := len(q.Topics) == 0
	for i := range q.Topics {
		t := &q.Topics[i]
		pt := kmsg.NewFetchResponseTopic()
		pt.Topic, pt.TopicID = t.Topic, t.TopicID
		pt.Partitions = make([]kmsg.FetchResponseTopicPartition, len(t.Partitions))
		p.Topics = append(p.Topics, pt)
		for j := range t.Partitions {
			f := fetched{topic: t, q: &t.Partitions[j], to: &pt.Partitions[j]}
			*f.to = kmsg.NewFetchResponseTopicPartition()
			f.to.RecordBatches = []byte{} // not null, which librdkafka takes for a damaged response
			f.to.Partition, f.to.HighWatermark, f.to.LastStableOffset, f.to.LogStartOffset = f.q.Partition, -1, -1, -1
			if s.prepareFetch(r, &f); f.log == nil {
				answerNow = true
				continue
			}
			all = append(all, f)
		}
	}
	if !answerNow {
		wait := min(time.Duration(max(q.MaxWaitMillis, 0))*time.Millisecond, maxFetchWait)
		if awaitRecords(r.ctx, all, int64(q.MinBytes), wait) && r.as != nil {
			all = s.stillPermitted(r, all)
		}
	}
	s.readRecords(r, q, all)
	return p
}

// stillPermitted refuses the partitions that the client may not read any more, after a wait, and
// returns the others.
func (s *Server) stillPermitted(r *request, all []fetched) []fetched {
	return slices.DeleteFunc(all, func(f fetched) bool {
		_, err := s.fetchedStream(r, f.topic)
		if code := codeOf(err); code == codeTopicDenied || code == codeUnknownTopicID {
			f.to.ErrorCode = code
			return true
		}
		return false
	})
}

// firstFetchByID is the first version of Fetch that names topics by their ids.
const firstFetchByID = 13

// fetchedStream finds the stream of a topic in a Fetch request.
func (s *Server) fetchedStream(r *request, t *kmsg.FetchRequestTopic) (*stream.Stream, error) {
	if r.version < firstFetchByID {
		return s.stream(r, t.Topic, stream.MayRead)
	}
	topic, err := s.topicOf(r, t.TopicID)
	if err != nil {
		return nil, err
	}
	st, err := s.stream(r, topic, stream.MayRead)
	if errors.Is(err, meta.NotFound) || err == nil && s.topicID(st) != t.TopicID {
		return nil, errUnknownTopicID // renamed or removed meanwhile
	}
	return st, err
}

// prepareFetch finds the log of a partition, and refuses a wrong request before any wait.
func (s *Server) prepareFetch(r *request, f *fetched) {
	st, err := s.fetchedStream(r, f.topic)
	if err != nil {
		f.to.ErrorCode = codeOf(err)
		return
	}
	l, err := st.Partition(r.ctx, f.q.Partition)
	if err != nil {
		f.to.ErrorCode = codeOf(err)
		return
	}
	if f.to.ErrorCode = checkEpoch(l, f.q.CurrentLeaderEpoch); f.to.ErrorCode != codeOK {
		return
	}
	start, high := l.Bounds()
	if last := f.q.LastFetchedEpoch; last >= 0 {
		if epoch, end := l.EpochEnd(last); epoch >= 0 && (epoch < last || end < f.q.FetchOffset) {
			f.to.DivergingEpoch.Epoch, f.to.DivergingEpoch.EndOffset = epoch, end
			f.to.HighWatermark, f.to.LastStableOffset, f.to.LogStartOffset = high, high, start
			return
		}
	}
	if f.q.FetchOffset < start || f.q.FetchOffset > high {
		f.to.ErrorCode = codeOffsetOutOfRange
		f.to.HighWatermark, f.to.LastStableOffset, f.to.LogStartOffset = high, high, start
		return
	}
	f.log = l
}

// checkEpoch compares the epoch of the leader known to a client with the log's.
func checkEpoch(l *partition.Log, epoch int32) int16 {
	switch {
	case epoch < 0 || epoch == l.Epoch():
		return codeOK
	case epoch < l.Epoch():
		return codeFencedLeader
	}
	return codeUnknownLeader
}

// awaitRecords waits until the partitions have some bytes beyond the requested offsets, at most
// a time. A record counts as a byte: enough for the usual minimum of a byte; a greater minimum
// waits for the whole time or for as many records. awaitRecords reports whether it has waited.
func awaitRecords(ctx context.Context, all []fetched, least int64, wait time.Duration) (waited bool) {
	if wait <= 0 {
		return false
	}
	notice := make(chan struct{}, 1)
	for _, f := range all {
		defer f.log.Watch(notice)()
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		have := int64(0)
		for _, f := range all {
			_, high := f.log.Bounds()
			have += high - f.q.FetchOffset
			if f.log.Err() != nil {
				return waited
			}
		}
		if have >= max(least, 1) {
			return waited
		}
		waited = true
		select {
		case <-notice:
		case <-timer.C:
			return waited
		case <-ctx.Done():
			return waited
		}
	}
}

// readRecords fills the response, in the order of the request.
func (s *Server) readRecords(r *request, q *kmsg.FetchRequest, all []fetched) {
	left := int64(maxFetch)
	if q.MaxBytes > 0 {
		left = min(left, int64(q.MaxBytes))
	}
	// The first batch is sent even if larger.
	held := min(max(left, partition.DefaultMaxBatch), s.cfg.Limits.Responses)
	if s.responses.Acquire(r.ctx, held) != nil {
		return
	}
	r.free = append(r.free, func() { s.responses.Release(held) })
	got := false
	for _, f := range all {
		start, high := f.log.Bounds()
		f.to.HighWatermark, f.to.LastStableOffset, f.to.LogStartOffset = high, high, start
		most := min(left, int64(max(f.q.PartitionMaxBytes, 0)))
		if got && most <= 0 {
			continue
		}
		b, err := f.log.Read(f.q.FetchOffset, int(most))
		if err != nil {
			f.to.ErrorCode = codeOf(err)
			continue
		}
		if got && int64(len(b)) > left {
			continue // a large batch is for the next response
		}
		if len(b) > 0 {
			f.to.RecordBatches = b
		}
		left -= int64(len(b))
		got = got || len(b) > 0
	}
}
