package journal

import (
	"context"

	"penstock.io/penstock/meta"
)

// Store is the storage of a log: compare-and-put of numbered records under a fence. Every read
// is linearizable. New makes a Log of a Store; only the Log implements the rules of the log.
//
// After an error of kind NoSpace, ResourceExceeded or Fenced, nothing was written and nothing
// will be. After any other error the write may have happened, or may happen later.
type Store interface {
	// Commit writes record seq if the store's owner still owns the volume, record seq-1 exists
	// (for seq 1: no checkpoint exists) and record seq does not exist. The result tells whether
	// Commit wrote the record.
	Commit(ctx context.Context, seq meta.Seq, value []byte) (bool, error)
	// Inspect returns, as of one moment: record seq (nil if absent), whether record seq-1
	// exists, and whether the store's owner owns the volume.
	Inspect(ctx context.Context, seq meta.Seq) (Inspection, error)
	// Range gives up to limit records from seq on, ascending.
	Range(ctx context.Context, from meta.Seq, limit int) ([]Record, error)
	// Last returns the last record; an empty log gives a record without a value.
	Last(ctx context.Context) (Record, error)
	// Checkpoint returns the checkpoint record and its revision; nil and 0 if absent.
	Checkpoint(ctx context.Context) ([]byte, int64, error)
	// PutCheckpoint replaces the checkpoint record if the record still has revision rev and the
	// store's owner owns the volume. The result tells whether PutCheckpoint replaced the
	// record.
	PutCheckpoint(ctx context.Context, rev int64, value []byte) (bool, error)
	// DeleteBefore deletes the records before seq and frees their space. The call may be
	// repeated, and may happen late: the caller has recorded that nobody needs the records.
	DeleteBefore(ctx context.Context, seq meta.Seq) error
	// Pin holds records and checkpoint from seq on for a reader until release
	// or until the reader's lease ends.
	Pin(ctx context.Context, seq meta.Seq) (release func(context.Context) error, err error)
	// OldestPin gives the lowest pinned number, and false if nothing is pinned.
	OldestPin(ctx context.Context) (meta.Seq, bool, error)
	// Hint returns a channel that may receive when the log grows. Hints may be missing, or
	// false. The channel ends with ctx.
	Hint(ctx context.Context) <-chan struct{}
}

// Record is one numbered record of a Store.
type Record struct {
	Seq   meta.Seq
	Value []byte
}

// Inspection is the result of Inspect.
type Inspection struct {
	Value []byte // of the record, nil if absent
	Prev  bool   // the previous record exists
	Owned bool
}

// Interceptor stands between a log and a Store in tests. An Interceptor may delay do, omit do,
// call do later from another goroutine, or hide do's result. op is the Store's method.
type Interceptor func(ctx context.Context, op string, do func(context.Context) error) error

// Intercept returns a Store whose calls pass through f.
func Intercept(s Store, f Interceptor) Store { return &intercepted{s, f} }

type intercepted struct {
	Store
	f Interceptor
}

// via calls do through f. If f hides the result, the result is lost.
func via[T any](ctx context.Context, i *intercepted, op string, do func(context.Context) (T, error)) (T, error) {
	done := make(chan T, 1) // do may run after f returned, or twice
	err := i.f(ctx, op, func(ctx context.Context) error {
		r, err := do(ctx)
		select {
		case done <- r:
		default:
		}
		return err
	})
	var r T
	if err == nil {
		select {
		case r = <-done:
		default:
			panic("journal: an interceptor returned nil for " + op + " without calling it")
		}
	}
	return r, err
}

func (i *intercepted) Commit(ctx context.Context, seq meta.Seq, value []byte) (bool, error) {
	return via(ctx, i, "Commit", func(ctx context.Context) (bool, error) { return i.Store.Commit(ctx, seq, value) })
}

func (i *intercepted) Inspect(ctx context.Context, seq meta.Seq) (Inspection, error) {
	return via(ctx, i, "Inspect", func(ctx context.Context) (Inspection, error) { return i.Store.Inspect(ctx, seq) })
}

func (i *intercepted) Range(ctx context.Context, from meta.Seq, limit int) ([]Record, error) {
	return via(ctx, i, "Range", func(ctx context.Context) ([]Record, error) { return i.Store.Range(ctx, from, limit) })
}

func (i *intercepted) Last(ctx context.Context) (Record, error) {
	return via(ctx, i, "Last", i.Store.Last)
}

func (i *intercepted) Checkpoint(ctx context.Context) ([]byte, int64, error) {
	type both struct {
		b   []byte
		rev int64
	}
	r, err := via(ctx, i, "Checkpoint", func(ctx context.Context) (both, error) {
		b, rev, err := i.Store.Checkpoint(ctx)
		return both{b, rev}, err
	})
	return r.b, r.rev, err
}

func (i *intercepted) PutCheckpoint(ctx context.Context, rev int64, value []byte) (bool, error) {
	return via(ctx, i, "PutCheckpoint", func(ctx context.Context) (bool, error) { return i.Store.PutCheckpoint(ctx, rev, value) })
}

func (i *intercepted) DeleteBefore(ctx context.Context, seq meta.Seq) error {
	_, err := via(ctx, i, "DeleteBefore", func(ctx context.Context) (struct{}, error) {
		return struct{}{}, i.Store.DeleteBefore(ctx, seq)
	})
	return err
}
