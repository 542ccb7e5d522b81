package server

import (
	"context"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
)

// series appends the records of one request or call to a partition, in order.
type series struct {
	log    *partition.Log
	format string // of the values
	most   int    // bytes of a batch
	name   string // of the producer; "": the records have no sequence numbers

	begun bool
	last  int64 // sequence number of the last record that was appended or found; valid if begun
	next  int64 // sequence number after the last record, refused records included; valid if begun
}

// maxName bounds the name of a producer, in bytes.
const maxName = 256

// checkName verifies the name of a producer. Errors: Invalid.
func checkName(name string) error {
	if len(name) > maxName {
		return meta.E("append", meta.Invalid, "producer", fmt.Errorf("the name of a producer has at most %d bytes", maxName))
	}
	return nil
}

// run is a run of records with consecutive offsets.
type run struct {
	Record int64 `json:"record"` // number of the first record in the request
	Offset int64 `json:"offset"` // of the first record
	Count  int64 `json:"count"`
}

// refusal is a record that does not fit its stream.
type refusal struct {
	Record int64
	Reason error
}

// taken is what became of records. The records are numbered from 0 on.
type taken struct {
	runs     []run // of appended and of found records
	refused  []refusal
	repeated int64 // records that the partition had
	count    int64 // records that were appended or found
	last     int64 // sequence number of the last record that was appended or found
	waits    []*partition.Append
}

// wait waits until the records are durable.
func (t *taken) wait(ctx context.Context) error {
	// The last batch comes last: earlier waits return at once.
	for i := len(t.waits) - 1; i >= 0; i-- {
		if err := t.waits[i].Wait(ctx); err != nil {
			return err
		}
	}
	return nil
}

// append takes records into the log. first is the sequence number of the first record, previous
// that of the producer's record before; both are ignored for a producer without a name. A record
// that does not fit the format, or is too large for a batch, is refused alone. After an error, the log may have the first of the
// records. Errors: Invalid, WrongOffset (the numbers do not follow those of the
// partition), Again (another call appends for the producer), and errors of the log.
func (c *series) append(records []record, first, previous int64) (*taken, error) {
	t := &taken{}
	bad := make([]error, len(records))
	for i := range records {
		if bad[i] = records[i].check(c.format, c.most); bad[i] != nil {
			t.refused = append(t.refused, refusal{Record: int64(i), Reason: bad[i]})
		}
	}
	if c.name == "" {
		return t, c.appendAll(t, records, bad)
	}
	if n := int64(len(records)); first < 0 || first > log.MaxNumber-n || previous < -1 || previous >= first {
		return nil, c.fail(meta.Invalid, "sequence numbers are 0 to %d, and the number before is smaller than the first number: %d records have the numbers from %d on, after %d", int64(log.MaxNumber), n, first, previous)
	}
	had, err := c.find(t, bad, first, previous)
	if err != nil {
		return nil, err
	}
	for i := had; i < len(records); {
		if bad[i] != nil {
			i++
			continue
		}
		n, err := c.appendRun(t, records[i:], bad[i:], int64(i), first+int64(i))
		if err != nil {
			return nil, err
		}
		i += n
	}
	c.next, t.last = first+int64(len(records)), c.last
	return t, nil
}

// find finds the records that the partition has, and returns how many they are with the refused
// records among them. Afterwards, last is the producer's last number in the partition. Errors:
// WrongOffset.
func (c *series) find(t *taken, bad []error, first, previous int64) (had int, err error) {
	id := log.NamedProducer(c.name)
	at, wait, known := c.log.Place(id)
	if !known {
		if !c.begun || c.next != first {
			c.begun, c.last = true, first-1
		}
		return 0, nil
	}
	if at.Last >= first {
		had = int(min(at.Last-first+1, int64(len(bad))))
		t.waits = append(t.waits, wait)
	} else if at.Last != previous && (!c.begun || c.next != first || c.last != at.Last) {
		return 0, c.fail(meta.WrongOffset, "the last sequence number in the partition is %d, and the records have the numbers from %d on, after %d: records between are missing", at.Last, first, previous)
	}
	for i := range had {
		if bad[i] != nil {
			continue
		}
		t.repeated++
		t.count++
		if offset, ok := c.log.Find(id, first+int64(i)); ok {
			t.runs = join(t.runs, run{Record: int64(i), Offset: offset, Count: 1})
		}
	}
	c.begun, c.last = true, at.Last
	return had, nil
}

// appendRun appends a batch of the first records of a list: consecutive records which are not
// refused. number is that of the first record in the request, sequence its sequence number.
func (c *series) appendRun(t *taken, records []record, bad []error, number, sequence int64) (n int, err error) {
	b := batch{most: c.most}
	for n < len(records) && bad[n] == nil && !b.full() && int64(n) < log.Room(sequence) && b.add(&records[n]) {
		n++
	}
	b.Number(log.NamedProducer(c.name), sequence)
	a, err := c.log.AppendNamed(b.Encode(b.records), c.last)
	if _, ok := errors.AsType[*partition.SequenceError](err); ok || err == nil && a.Repeated {
		return 0, c.fail(meta.Again, "another request of the same producer is under way: a producer sends one request after the other")
	}
	if err != nil {
		return 0, err
	}
	c.last = sequence + int64(n) - 1
	t.add(a, []run{{Record: number, Count: int64(n)}}, int64(n))
	return n, nil
}

// appendAll appends the records of a producer without a name.
func (c *series) appendAll(t *taken, records []record, bad []error) error {
	for i := 0; i < len(records); {
		b := batch{most: c.most}
		var runs []run // offsets are relative to the batch
		for ; i < len(records) && !b.full(); i++ {
			if bad[i] != nil {
				continue
			}
			if !b.add(&records[i]) {
				break
			}
			runs = join(runs, run{Record: int64(i), Offset: int64(b.Records) - 1, Count: 1})
		}
		if b.Records == 0 {
			return nil
		}
		b.Producer, b.Epoch, b.Sequence = log.NoProducer, -1, -1
		a, err := c.log.Append(b.Encode(b.records))
		if err != nil {
			return err
		}
		t.add(a, runs, int64(b.Records))
	}
	return nil
}

// add adds a batch. The offsets of its runs are relative to the batch.
func (t *taken) add(a *partition.Append, runs []run, count int64) {
	t.waits, t.count = append(t.waits, a), t.count+count
	for _, r := range runs {
		r.Offset += a.Base
		t.runs = join(t.runs, r)
	}
}

// join adds a run to a list of runs. Runs that follow each other become one.
func join(runs []run, r run) []run {
	if n := len(runs); n > 0 {
		last := &runs[n-1]
		if last.Record+last.Count == r.Record && last.Offset+last.Count == r.Offset {
			last.Count += r.Count
			return runs
		}
	}
	return append(runs, r)
}

// fail makes an error about the producer.
func (c *series) fail(kind meta.Kind, format string, args ...any) error {
	return meta.E("append", kind, "producer "+c.name, fmt.Errorf(format, args...))
}

// reasonOf returns why a record was refused.
func reasonOf(why error) string {
	if e, ok := errors.AsType[*meta.Error](why); ok && e.Err != nil {
		return e.Err.Error()
	}
	return why.Error()
}
