package kafka

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

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

// broker is a gateway, for clients.
type broker struct {
	id   int32
	host string
	port int32
}

func (s *Server) self(r *request) broker {
	host, port := r.address()
	return broker{s.cfg.Node, host, port}
}

// Address is what the leader of a partition tells of itself: node@host:port.
func Address(node int32, at string) string { return fmt.Sprintf("%d@%s", node, at) }

// parseAddress parses an Address.
func parseAddress(text string) (b broker, ok bool) {
	node, at, ok := strings.Cut(text, "@")
	if !ok {
		return b, false
	}
	id, err := strconv.ParseInt(node, 10, 32)
	if err != nil || id < 0 {
		return b, false
	}
	host, port, err := net.SplitHostPort(at)
	if err != nil || host == "" {
		return b, false
	}
	n, err := strconv.ParseUint(port, 10, 16)
	return broker{int32(id), host, int32(n)}, err == nil && n > 0
}

// leader returns the other gateway that leads a partition, if err says that another one does.
func (s *Server) leader(r *request, st *stream.Stream, n int32, err error) (broker, bool) {
	if !errors.Is(err, meta.NotOwner) {
		return broker{}, false
	}
	text, err := st.Leader(r.ctx, n)
	if err != nil {
		return broker{}, false // the leader may have ended meanwhile: the client asks again
	}
	b, ok := parseAddress(text)
	return b, ok && b.id != s.cfg.Node
}

// metadata names the gateways that the client needs, and the partitions of topics. A topic is never made by
// asking.
func (s *Server) metadata(r *request, q *kmsg.MetadataRequest) *kmsg.MetadataResponse {
	p := q.ResponseKind().(*kmsg.MetadataResponse)
	know := func(b broker) {
		if slices.ContainsFunc(p.Brokers, func(k kmsg.MetadataResponseBroker) bool { return k.NodeID == b.id }) {
			return
		}
		pb := kmsg.NewMetadataResponseBroker()
		pb.NodeID, pb.Host, pb.Port = b.id, b.host, b.port
		p.Brokers = append(p.Brokers, pb)
	}
	know(s.self(r))
	p.ClusterID, p.ControllerID, p.AuthorizedOperations = &s.cfg.Cluster, s.cfg.Node, noOperations
	if q.Topics == nil || r.version == 0 && len(q.Topics) == 0 {
		for _, topic := range s.topics(r) {
			p.Topics = append(p.Topics, s.describe(r, topic, nil))
		}
		return p
	}
	for _, t := range q.Topics {
		if t.Topic == nil {
			continue
		}
		p.Topics = append(p.Topics, s.describe(r, *t.Topic, know))
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
	paths, whole, err := h.List(r.ctx, r.as)
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

// describe describes a topic. With know, the partitions that no other gateway leads are opened,
// so that the leaders' epochs are known, and know gets the other gateways that lead some.
func (s *Server) describe(r *request, topic string, know func(broker)) kmsg.MetadataResponseTopic {
	t := kmsg.NewMetadataResponseTopic()
	t.Topic, t.AuthorizedOperations = &topic, noOperations
	st, err := s.seen(r, topic)
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
		if know != nil {
			l, err := st.Partition(r.ctx, n)
			if b, ok := s.leader(r, st, n, err); ok {
				know(b)
				tp.Leader, tp.Replicas, tp.ISR = b.id, []int32{b.id}, []int32{b.id}
			} else if err != nil {
				tp.ErrorCode, tp.Leader = codeLeaderNotAvailable, -1
				s.tellNoLeader(topic, n, err)
			} else {
				tp.LeaderEpoch = l.Epoch()
			}
		}
		t.Partitions = append(t.Partitions, tp)
	}
	return t
}

// noLeaderEvery is the time after which the log says again that a partition has no leader.
const noLeaderEvery = 5 * time.Second

// tellNoLeader logs why a partition has no leader that clients could be sent to. Clients ask
// several times a second, so most answers are not logged.
func (s *Server) tellNoLeader(topic string, n int32, err error) {
	now := time.Now().UnixNano()
	if told := s.noLeader.Load(); now-told < int64(noLeaderEvery) || !s.noLeader.CompareAndSwap(told, now) {
		return
	}
	s.cfg.Logger.Warn("kafka: a partition can't be opened, and no other gateway leads it; clients try again", "topic", topic, "partition", n, "error", err)
}
