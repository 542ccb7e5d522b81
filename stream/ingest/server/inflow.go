package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"penstock.io/penstock/meta"
)

// Bounds of a message of an Append call.
const (
	maxMessage = 4<<20 + 64<<10 // bytes
	maxEntries = 1 << 14        // records and headers
	window     = 16             // unanswered messages of a call
	// allEntries bounds the records and headers of all messages between their transfer and their
	// append. A decoded record or header takes about 256 bytes beside its own.
	allEntries = 1 << 18
)

// inflow is the body of an Append call: messages with a prefix of a byte, 0, and four bytes with
// the length. grpc-go would read the body as fast as the client sends. inflow reads a message only
// when there is memory for the message, so that HTTP/2's flow control stops the client.
type inflow struct {
	s        *Server
	ctx      context.Context // ends with the call
	stop     context.CancelCauseFunc
	body     io.Reader
	deadline func(time.Time) error // of reads of the body

	rest   []byte        // of the current message, with the prefix
	places chan struct{} // has an element for each unanswered message

	mu      sync.Mutex
	weights []int64 // memory of the unanswered messages, in order
	entries []int64 // entries of the messages before their append, in order
	err     error   // why the body ended early
	// ended: the request is over, and its memory given back. The goroutines of the call may
	// still run, because grpc-go does not wait for them when the client is gone.
	ended bool
}

func newInflow(ctx context.Context, s *Server, body io.Reader, deadline func(time.Time) error) *inflow {
	f := &inflow{s: s, body: body, deadline: deadline, places: make(chan struct{}, window)}
	f.ctx, f.stop = context.WithCancelCause(ctx)
	return f
}

// Read reads bytes of messages. After an error, Read ends the body with io.EOF between two
// messages, and failure returns the error. Read returns no other error, because grpc-go would
// answer such an error with a code of its own choice.
func (f *inflow) Read(p []byte) (int, error) {
	if len(f.rest) == 0 {
		if err := f.next(); err != nil {
			if !errors.Is(err, io.EOF) {
				f.fail(err)
			}
			return 0, io.EOF
		}
	}
	n := copy(p, f.rest)
	if f.rest = f.rest[n:]; len(f.rest) == 0 {
		f.rest = nil
	}
	return n, nil
}

// Close ends the reads, also a read that waits.
func (f *inflow) Close() error {
	f.abort(io.ErrClosedPipe)
	return nil
}

// abort ends the reads for a reason.
func (f *inflow) abort(why error) {
	f.fail(why)
	f.stop(why)
	// An error says that the client is gone: the reads have ended.
	_ = f.deadline(past)
}

// next reads the next message.
func (f *inflow) next() error {
	select {
	case f.places <- struct{}{}:
	case <-f.ctx.Done():
		return context.Cause(f.ctx)
	}
	if err := f.deadline(time.Now().Add(f.s.cfg.Limits.Idle)); err != nil {
		return err
	}
	prefix := make([]byte, 5)
	if _, err := io.ReadFull(f.body, prefix); err != nil {
		return err
	}
	length := int64(binary.BigEndian.Uint32(prefix[1:]))
	if prefix[0] != 0 {
		return meta.E("append", meta.NotSupported, "message", errors.New("compressed messages are not supported"))
	}
	if length > maxMessage {
		return meta.E("append", meta.TooBig, "message", fmt.Errorf("a message of %d bytes is larger than %d", length, maxMessage))
	}
	// The memory of a message is twice its bytes, because grpc-go copies the message, and the
	// encoded batch. The caller of answered never waits for memory, so that the memory of earlier
	// messages becomes free.
	weight := 3 * length
	if err := f.s.memory.Acquire(f.ctx, weight); err != nil {
		return context.Cause(f.ctx)
	}
	if !f.holds(&f.weights, weight) {
		f.s.memory.Release(weight)
		return net.ErrClosed
	}
	if err := f.deadline(time.Now().Add(f.s.cfg.Limits.Transfer)); err != nil {
		return err
	}
	message := make([]byte, len(prefix)+int(length))
	copy(message, prefix)
	if _, err := io.ReadFull(f.body, message[len(prefix):]); err != nil {
		return unexpected(err)
	}
	if err := f.deadline(time.Time{}); err != nil {
		return err
	}
	n, err := countEntries(message[len(prefix):])
	if err != nil {
		return meta.E("append", meta.Invalid, "message", err)
	}
	if err := f.s.entries.Acquire(f.ctx, n); err != nil {
		return context.Cause(f.ctx)
	}
	if !f.holds(&f.entries, n) {
		f.s.entries.Release(n)
		return net.ErrClosed
	}
	f.rest = message
	return nil
}

// holds notes that the call holds n more of a budget; false: the request is over.
func (f *inflow) holds(list *[]int64, n int64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		return false
	}
	*list = append(*list, n)
	return true
}

// unexpected makes the end of a body within a message an error.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// decoded says that the records of the oldest message are encoded in a batch.
func (f *inflow) decoded() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		return
	}
	f.s.entries.Release(f.entries[0])
	f.entries = f.entries[1:]
}

// answered says that the oldest message was answered: its memory and its place are free.
func (f *inflow) answered() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		return
	}
	f.s.memory.Release(f.weights[0])
	f.weights = f.weights[1:]
	<-f.places // has an element for each weight
}

// end gives back what the call holds. The call's goroutines take nothing more.
func (f *inflow) end() {
	f.stop(nil)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, n := range f.weights {
		f.s.memory.Release(n)
	}
	for _, n := range f.entries {
		f.s.entries.Release(n)
	}
	f.weights, f.entries, f.ended = nil, nil, true
}

func (f *inflow) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

// failure returns why the body ended early; nil if it did not, or the connection has ended.
func (f *inflow) failure() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.err
}

// countEntries counts the records and the headers in an AppendRequest, before anything is
// decoded, because a record of two bytes takes many times that when it is decoded. Errors: the
// message is damaged, or has too many entries.
func countEntries(message []byte) (n int64, err error) {
	// The fields that lead to a header: AppendRequest.batch, Batch.records, Record.headers.
	path := []protowire.Number{2, 3, 3}
	var walk func(p []byte, depth int) error
	walk = func(p []byte, depth int) error {
		for len(p) > 0 {
			field, kind, k := protowire.ConsumeTag(p)
			if k < 0 {
				return protowire.ParseError(k)
			}
			p = p[k:]
			if k = protowire.ConsumeFieldValue(field, kind, p); k < 0 {
				return protowire.ParseError(k)
			}
			value := p[:k]
			p = p[k:]
			if field != path[depth] || kind != protowire.BytesType {
				continue
			}
			if n++; n > maxEntries {
				return fmt.Errorf("a message has at most %d records and headers", maxEntries)
			}
			if depth+1 == len(path) {
				continue
			}
			inner, _ := protowire.ConsumeBytes(value)
			if err := walk(inner, depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	return n, walk(message, 0)
}
