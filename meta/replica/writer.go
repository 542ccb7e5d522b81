package replica

import (
	"fmt"

	"penstock.io/penstock/meta"
)

// Writer is a writer's knowledge of a chunk's replicas. The shell sends appends in the order
// of Append, to each replica over a connection that keeps the order, and reports the answers.
//
// INVARIANT: for each replica synced <= acked <= length, and synced <= asked.
type Writer struct {
	length uint64
	max    uint64
	reps   []progress
	failed error
	safe   uint64 // Acked at the time of the failure
	synced uint64 // Synced at the time of the failure

	Off *Off
}

type progress struct {
	acked  uint64
	synced uint64
	asked  uint64 // a sync up to here is under way or done
}

// NewWriter begins a chunk on n replicas; max bounds its length in bytes, 0: no bound.
func NewWriter(n int, max uint64) *Writer {
	return &Writer{reps: make([]progress, n), max: max}
}

// Append adds n bytes at the returned offset; the shell sends the bytes to every replica.
// Errors: the writer's lasting error; FileTooBig, after which the writer stays usable and
// unchanged.
func (w *Writer) Append(n uint64) (off uint64, err error) {
	if w.failed != nil {
		return 0, w.failed
	}
	if w.max != 0 && (n > w.max || w.length > w.max-n) {
		return 0, refuse("append", meta.FileTooBig, "%d bytes at %d, at most %d", n, w.length, w.max)
	}
	off = w.length
	w.length += n
	return off, nil
}

// AckedTo records that replica i has all bytes below end. Answers to appends may be repeated.
func (w *Writer) AckedTo(i int, end uint64) {
	r := &w.reps[i]
	r.acked = max(r.acked, min(end, w.length))
}

// Has reports whether replica i has acknowledged the first end bytes.
func (w *Writer) Has(i int, end uint64) bool { return w.reps[i].acked >= end }

// Ask reports whether the shell must ask replica i to sync, so that the first upTo bytes are
// durable on the replica. Ask records the request as sent. The shell must send the request
// after the appends: a replica without the bytes refuses the sync.
func (w *Writer) Ask(i int, upTo uint64) bool {
	r := &w.reps[i]
	if w.failed != nil || r.asked >= upTo {
		return false
	}
	r.asked = upTo
	return true
}

// SyncedTo records that replica i answered a sync up to asked with its mark.
func (w *Writer) SyncedTo(i int, asked, mark uint64) {
	r := &w.reps[i]
	r.synced = max(r.synced, min(mark, w.length))
	r.acked = max(r.acked, min(max(asked, mark), w.length))
}

// Next is a writer's next step after an error.
type Next uint8

const (
	// Seal: the writer has failed. Have the chunk sealed and go on elsewhere.
	Seal Next = iota
	// Renew: get a fresh capability and send the unanswered requests again; no replica has
	// failed (rule 18).
	Renew
)

// Fail records that replica i answered with an error, or did not answer. The first failure is
// lasting: Acked and Synced ignore all later acknowledgements, because from then on the seal
// determines the chunk's length.
func (w *Writer) Fail(i int, err error) Next {
	if w.failed == nil && meta.KindOf(err) == meta.BadCapability && expired(err) {
		return Renew
	}
	if w.failed == nil {
		w.safe, w.synced = w.Acked(), w.Synced()
		w.failed = meta.E("append to chunk", meta.KindOf(err), fmt.Sprintf("replica %d", i), err)
	}
	return Seal
}

// Expired marks the cause of a BadCapability error as mere age.
var Expired = meta.E("capability", meta.Again, "", fmt.Errorf("expired"))

func expired(err error) bool {
	for err != nil {
		if err == error(Expired) {
			return true
		}
		u, ok := err.(interface{ Unwrap() error })
		if !ok {
			return false
		}
		err = u.Unwrap()
	}
	return false
}

// Length is the number of bytes appended, acknowledged or not.
func (w *Writer) Length() uint64 { return w.length }

// Acked returns the length acknowledged by every replica; extents may refer to these bytes.
// Acked stays constant once the writer has failed.
func (w *Writer) Acked() uint64 {
	if w.failed != nil && !w.Off.ackLate() {
		return w.safe
	}
	n := w.length
	for i, r := range w.reps {
		if w.Off.ackAll() {
			if i == 0 {
				n = 0
			}
			n = max(n, r.acked)
		} else {
			n = min(n, r.acked)
		}
	}
	return n
}

// Synced returns the length durable on every replica; a sync up to this length may return.
// Synced stays constant once the writer has failed.
func (w *Writer) Synced() uint64 {
	if w.failed != nil && !w.Off.ackLate() {
		return w.synced
	}
	n := w.length
	for i, r := range w.reps {
		if w.Off.ackAll() {
			if i == 0 {
				n = 0
			}
			n = max(n, r.synced)
		} else {
			n = min(n, r.synced)
		}
	}
	return n
}

// Err is the sticky error, or nil.
func (w *Writer) Err() error { return w.failed }

// Need returns the length that a seal requested by the writer must keep: Case.Need.
func (w *Writer) Need() uint64 { return w.Acked() }

// Again returns the range [from, to) of this chunk to send again to another chunk, after this
// chunk was sealed at length sealed. The sealed chunk has the bytes below from, acknowledged
// or not.
func (w *Writer) Again(sealed uint64) (from, to uint64) {
	return min(sealed, w.length), w.length
}
