package kafka

import "github.com/twmb/franz-go/pkg/kmsg"

// describeCluster names the gateways.
func (s *Server) describeCluster(r *request, q *kmsg.DescribeClusterRequest) *kmsg.DescribeClusterResponse {
	p := q.ResponseKind().(*kmsg.DescribeClusterResponse)
	p.ClusterID, p.ControllerID, p.ClusterAuthorizedOperations = s.cfg.Cluster, s.cfg.Node, noOperations
	for _, known := range s.brokers(r) {
		b := kmsg.NewDescribeClusterResponseBroker()
		b.NodeID, b.Host, b.Port = known.id, known.host, known.port
		p.Brokers = append(p.Brokers, b)
	}
	return p
}
