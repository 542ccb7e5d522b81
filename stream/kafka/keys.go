package kafka

import "github.com/twmb/franz-go/pkg/kmsg"

// known has the versions of a request, and the function that begins a request.
type known struct {
	min, max int16
	begin    func(s *Server, r *request) (answer func() kmsg.Response)
}

// keys are the known requests by API key. Versions of the requests for offsets that name topics by id
// are left out.
var keys map[int16]known

func init() {
	keys = map[int16]known{
		0:  {3, 9, beginProduce},
		1:  {4, 13, inTurn((*Server).fetch)},
		2:  {1, 6, inTurn((*Server).listOffsets)},
		3:  {0, 12, inTurn((*Server).metadata)},
		8:  {2, 8, inTurn((*Server).offsetCommit)},
		9:  {1, 8, inTurn((*Server).offsetFetch)},
		10: {0, 4, inTurn((*Server).findCoordinator)},
		11: {0, 7, inTurn((*Server).joinGroup)},
		12: {0, 4, inTurn((*Server).heartbeat)},
		13: {0, 4, inTurn((*Server).leaveGroup)},
		14: {0, 5, inTurn((*Server).syncGroup)},
		15: {0, 5, inTurn((*Server).describeGroups)},
		16: {0, 4, inTurn((*Server).listGroups)},
		17: {0, 1, beginSASLHandshake},
		18: {0, 3, inTurn((*Server).apiVersions)},
		19: {0, 7, inTurn((*Server).createTopics)},
		20: {0, 6, inTurn((*Server).deleteTopics)},
		21: {0, 2, inTurn((*Server).deleteRecords)},
		22: {0, 4, inTurn((*Server).initProducerID)},
		23: {0, 4, inTurn((*Server).offsetForLeaderEpoch)},
		32: {0, 4, inTurn((*Server).describeConfigs)},
		33: {0, 2, inTurn((*Server).alterConfigs)},
		36: {0, 2, beginSASLAuthenticate},
		37: {0, 3, inTurn((*Server).createPartitions)},
		42: {0, 2, inTurn((*Server).deleteGroups)},
		44: {0, 1, inTurn((*Server).incrementalAlterConfigs)},
		47: {0, 0, inTurn((*Server).deleteOffsets)},
		60: {0, 0, inTurn((*Server).describeCluster)},
	}
}

// inTurn makes a request that runs when the connection's earlier requests are answered.
func inTurn[Q kmsg.Request, P kmsg.Response](run func(*Server, *request, Q) P) func(*Server, *request) func() kmsg.Response {
	return func(s *Server, r *request) func() kmsg.Response {
		return func() kmsg.Response {
			p := run(s, r, r.body.(Q))
			p.SetVersion(r.version)
			return p
		}
	}
}
