package kafka

import (
	"net"
	"strconv"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// noOperations hides the allowed operations.
const noOperations = -1 << 31

// address is where the client has reached the gateway.
func (r *request) address() (host string, port int32) {
	host, text, err := net.SplitHostPort(r.conn.c.LocalAddr().String())
	if err != nil {
		return "127.0.0.1", 0
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return host, 0
	}
	return host, int32(n)
}

// metadata names the gateways, and the partitions of topics. A topic is never made by
// asking.
func (s *Server) metadata(r *request, q *kmsg.MetadataRequest) *kmsg.MetadataResponse {
	p := q.ResponseKind().(*kmsg.MetadataResponse)
	b := kmsg.NewMetadataResponseBroker()
	b.NodeID = s.cfg.Node
	b.Host, b.Port = r.address()
	p.Brokers = append(p.Brokers, b)
	p.ClusterID, p.ControllerID, p.AuthorizedOperations = &s.cfg.Cluster, s.cfg.Node, noOperations
	if q.Topics == nil || r.version == 0 && len(q.Topics) == 0 {
		for _, topic := range s.topics(r) {
			p.Topics = append(p.Topics, s.describe(r, topic, false))
		}
		return p
	}
	for _, t := range q.Topics {
		if t.Topic == nil {
			continue
		}
		p.Topics = append(p.Topics, s.describe(r, *t.Topic, true))
	}
	return p
}

// topics lists the names of all topics.
func (s *Server) topics(r *request) (names []string) {
	h, err := s.cfg.Host(r.ctx)
	if err != nil {
		s.cfg.Logger.Warn("kafka: topics can't be listed", "error", err)
		return nil
	}
	paths, whole, err := stream.List(r.ctx, h.Tree())
	if err != nil || !whole {
		s.cfg.Logger.Warn("kafka: not all topics are listed; topics can be used by name", "listed", len(paths), "error", err)
	}
	for _, p := range paths {
		if topic, err := stream.Topic(p); err == nil { // a stream with too long a path can't be a topic
			names = append(names, topic)
		}
	}
	return names
}

// describe describes a topic. With open, the partitions are opened, so that the leaders'
// epochs are known.
func (s *Server) describe(r *request, topic string, open bool) kmsg.MetadataResponseTopic {
	t := kmsg.NewMetadataResponseTopic()
	t.Topic, t.AuthorizedOperations = &topic, noOperations
	st, err := s.stream(r.ctx, topic)
	if err != nil {
		if t.ErrorCode = codeOf(err); t.ErrorCode == codeNotLeader {
			t.ErrorCode = codeLeaderNotAvailable
		}
		return t
	}
	for n := range int32(st.Spec.Partitions) {
		tp := kmsg.NewMetadataResponseTopicPartition()
		tp.Partition, tp.Leader, tp.LeaderEpoch = n, s.cfg.Node, -1
		tp.Replicas, tp.ISR = []int32{s.cfg.Node}, []int32{s.cfg.Node}
		if open {
			l, err := st.Partition(r.ctx, n)
			if err != nil {
				tp.ErrorCode, tp.Leader = codeLeaderNotAvailable, -1
				if meta.KindOf(err) != meta.Unavailable {
					s.cfg.Logger.Warn("kafka: a partition can't be opened", "topic", topic, "partition", n, "error", err)
				}
			} else {
				tp.LeaderEpoch = l.Epoch()
			}
		}
		t.Partitions = append(t.Partitions, tp)
	}
	return t
}
