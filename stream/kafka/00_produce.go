package kafka

import (
	"errors"
	"fmt"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
)

// produced is a batch of a Produce request, on the way into a log.
type produced struct {
	to     *kmsg.ProduceResponseTopicPartition
	append *partition.Append
	log    *partition.Log
}

// beginProduce takes the batches of a Produce request into their logs. The answer waits until
// the batches are durable. acks=1 is served as acks=all; acks=0 is not answered.
func beginProduce(s *Server, r *request) func() kmsg.Response {
	q := r.body.(*kmsg.ProduceRequest)
	p := q.ResponseKind().(*kmsg.ProduceResponse)
	var batches []produced
	for _, t := range q.Topics {
		pt := kmsg.NewProduceResponseTopic()
		pt.Topic = t.Topic
		pt.Partitions = make([]kmsg.ProduceResponseTopicPartition, len(t.Partitions))
		p.Topics = append(p.Topics, pt)
		for i, tp := range t.Partitions {
			to := &pt.Partitions[i]
			*to = kmsg.NewProduceResponseTopicPartition()
			to.Partition, to.BaseOffset, to.LogStartOffset = tp.Partition, -1, -1
			if b, ok := s.produce(r, q, t.Topic, tp, to); ok {
				batches = append(batches, b)
			}
		}
	}
	return func() kmsg.Response {
		for _, b := range batches {
			if err := b.append.Wait(s.ctx); err != nil {
				refuse(b.to, codeOf(err), err)
				continue
			}
			b.to.BaseOffset = b.append.Base
			b.to.LogStartOffset, _ = b.log.Bounds()
		}
		if q.Acks == 0 {
			return nil
		}
		return p
	}
}

func refuse(to *kmsg.ProduceResponseTopicPartition, code int16, err error) {
	to.ErrorCode = code
	text := err.Error()
	to.ErrorMessage = &text
}

// produce takes a batch into the log. After an error, to has the error.
func (s *Server) produce(r *request, q *kmsg.ProduceRequest, topic string, tp kmsg.ProduceRequestTopicPartition, to *kmsg.ProduceResponseTopicPartition) (produced, bool) {
	fail := func(code int16, err error) (produced, bool) {
		refuse(to, code, err)
		return produced{}, false
	}
	if q.Acks < -1 || q.Acks > 1 {
		return fail(codeInvalidAcks, errors.New("acks is -1, 0 or 1"))
	}
	if q.TransactionID != nil {
		return fail(codeTransactionDenied, errTransactions)
	}
	st, err := s.stream(r, topic, stream.MayWrite)
	if err != nil {
		return fail(codeOf(err), err)
	}
	l, err := st.Partition(r.ctx, tp.Partition)
	if err != nil {
		return fail(codeOf(err), err)
	}
	if spec := st.Spec(); len(tp.Records) > spec.BatchBytes() {
		return fail(codeMessageTooLarge, fmt.Errorf("the batch has %d bytes, max.message.bytes of the topic is %d", len(tp.Records), spec.BatchBytes()))
	}
	if len(tp.Records) > log.HeaderSize && tp.Records[16] < 2 {
		return fail(codeUnsupportedFormat, errors.New("only message format 2 is taken"))
	}
	a, err := l.Append(tp.Records)
	if err != nil {
		if l.Err() != nil || meta.KindOf(err) == meta.Fenced {
			return fail(codeOf(err), err)
		}
		return fail(codeOfBatch(err), err)
	}
	return produced{to: to, append: a, log: l}, true
}

// errTransactions refuses transactions.
var errTransactions = errors.New("transactions are not supported: use an idempotent producer")
