package kafka

import (
	"crypto/rand"
	"encoding/binary"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// initProducerID gives an idempotent producer an id. Ids are 62 random bits, different
// from all ids of all gateways, also after the rollback of a volume, where a counter
// would begin again. A producer asking for the next epoch gets a new id instead.
func (s *Server) initProducerID(_ *request, q *kmsg.InitProducerIDRequest) *kmsg.InitProducerIDResponse {
	p := q.ResponseKind().(*kmsg.InitProducerIDResponse)
	p.ProducerID, p.ProducerEpoch = -1, -1
	if q.TransactionalID != nil {
		p.ErrorCode = codeTransactionDenied
		return p
	}
	var b [8]byte
	rand.Read(b[:]) // never fails
	p.ProducerID, p.ProducerEpoch = int64(binary.BigEndian.Uint64(b[:])>>2), 0
	return p
}
