package kafka

import (
	"errors"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/placement"
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

// self returns this gateway at the address that clients are told: the configured one, else the address
// at which the client has reached the gateway.
func (s *Server) self(r *request) broker {
	if b, ok := brokerOf(placement.Gateway{Number: s.cfg.Node, Kafka: s.cfg.Advertise}); ok {
		return b
	}
	host, port := r.address()
	return broker{s.cfg.Node, host, port}
}

// brokerOf returns a gateway as clients see it; false: the gateway has no Kafka server.
func brokerOf(g placement.Gateway) (broker, bool) {
	host, port, ok := g.KafkaAt()
	return broker{g.Number, host, port}, ok
}

// brokers returns this gateway and the other registered gateways that have a Kafka server.
func (s *Server) brokers(r *request) []broker {
	all := []broker{s.self(r)}
	if s.cfg.Gateways == nil {
		return all
	}
	_, live := s.cfg.Gateways()
	for _, g := range live {
		if b, ok := brokerOf(g); ok && b.id != s.cfg.Node {
			all = append(all, b)
		}
	}
	return all
}

// leader returns the other gateway that leads a partition, or is to lead it, and the epoch of the
// last leader, if err says that this gateway does not lead the partition.
func (s *Server) leader(r *request, st *stream.Stream, n int32, err error) (b broker, epoch int32, ok bool) {
	if !errors.Is(err, meta.NotOwner) {
		return b, -1, false
	}
	g, epoch, err := st.Leader(r.ctx, n)
	if err != nil {
		return b, -1, false // the leader may have ended meanwhile: the client asks again
	}
	b, ok = brokerOf(g)
	return b, epoch, ok && b.id != s.cfg.Node
}

// metadata names the gateways, and the partitions of topics. A topic is never made by
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
	for _, b := range s.brokers(r) {
		know(b)
	}
	p.ClusterID, p.ControllerID, p.AuthorizedOperations = &s.cfg.Cluster, s.cfg.Node, noOperations
	if q.Topics == nil || r.version == 0 && len(q.Topics) == 0 {
		for _, topic := range s.topics(r) {
			p.Topics = append(p.Topics, s.describe(r, topic, nil))
		}
		return p
	}
	for _, t := range q.Topics {
		if t.Topic != nil {
			p.Topics = append(p.Topics, s.describe(r, *t.Topic, know))
			continue
		}
		p.Topics = append(p.Topics, s.describeByID(r, t.TopicID, know))
	}
	return p
}

// describeByID describes the topic with an id. A client that may neither read nor write the topic
// gets UNKNOWN_TOPIC_ID, and does not learn the topic's name.
func (s *Server) describeByID(r *request, id topicID, know func(broker)) kmsg.MetadataResponseTopic {
	unknown := kmsg.NewMetadataResponseTopic()
	unknown.TopicID, unknown.AuthorizedOperations = id, noOperations
	topic, err := s.topicOf(r, id)
	if err != nil {
		unknown.ErrorCode = codeOf(err)
		return unknown
	}
	t := s.describe(r, topic, know)
	switch {
	case t.ErrorCode == codeTopicDenied || t.ErrorCode == codeUnknownTopic || t.ErrorCode == codeOK && t.TopicID != id:
		unknown.ErrorCode = codeUnknownTopicID // renamed or removed meanwhile, or not for the client
		return unknown
	}
	return t
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

// describe describes a topic. With know, the partitions that this gateway is to lead are opened, so
// that the leaders' epochs are known, and know gets the other gateways that lead some. Without know,
// the leaders are those that are to lead.
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
	t.TopicID = s.topicID(st)
	for n := range int32(st.Spec().Partitions) {
		tp := kmsg.NewMetadataResponseTopicPartition()
		tp.Partition, tp.Leader, tp.LeaderEpoch = n, s.cfg.Node, -1
		if know != nil {
			l, err := st.Partition(r.ctx, n)
			if b, epoch, ok := s.leader(r, st, n, err); ok {
				know(b)
				tp.Leader, tp.LeaderEpoch = b.id, epoch
			} else if err != nil {
				tp.ErrorCode, tp.Leader = codeLeaderNotAvailable, -1
				s.tellNoLeader(topic, n, err)
			} else {
				tp.LeaderEpoch = l.Epoch()
			}
		} else if g, other := st.Place(n); other && g.Kafka != "" {
			tp.Leader = g.Number
		}
		replica := tp.Leader
		if replica < 0 {
			replica = s.cfg.Node
		}
		tp.Replicas, tp.ISR = []int32{replica}, []int32{replica}
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
