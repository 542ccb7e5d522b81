package partition

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"

	"penstock.io/penstock/meta"
)

// Leadership is the right to append to a partition. At most one Leadership of a partition is
// valid at a time.
type Leadership interface {
	// Epoch numbers the leaders of the partition; a later leader has a greater number.
	Epoch() uint64
	// Done is closed when the leadership has ended. The log then appends nothing any more.
	Done() <-chan struct{}
	// Valid reports that no other process leads the partition. The answer may be false for a
	// while, and true again.
	Valid() bool
}

// epochs lists the leaders of a log.
//
// INVARIANT: epochs and starts ascend.
type epochs []epochStart

// epochStart says where a leader's first batch lies. The fields' names are the names in the file.
type epochStart struct {
	Epoch int32 `json:"epoch"`
	Start int64 `json:"start"`
}

// maxEpochs bounds the remembered leaders of a log. For an older leader, the answer is the
// oldest remembered leader.
const maxEpochs = 1000

const epochsVersion = 1

// leaders is the file epochs: the leaders of a log, and how their epochs were numbered.
//
// Kafka's epochs have 31 bits, and must grow in a log for ever. Leaderships are counted by the
// journal of the volume, whose counter no rollback lowers. But a clone, a promoted mirror or a
// copy of the files brings a list of leaders into a volume whose counter begins at 1. So an
// epoch is the volume's count plus a base: the last epoch in the list when the list came into
// the volume. The base is a function of the list as it came, so that a rollback to a moment
// before the first leader in the volume gives the same base again.
type leaders struct {
	volume uint64 // whose counter numbered the last leaders
	base   int32
	list   epochs
}

// number returns the epoch of the leader with a count of a volume. Errors: Fenced (a later
// leader is in the list), ResourceExceeded (the epochs are used up).
func (l *leaders) number(volume, count uint64) (int32, error) {
	if l.volume != volume {
		l.volume, l.base = volume, max(l.list.last(), 0)
	}
	if count > math.MaxInt32-uint64(l.base) {
		return 0, meta.E("open", meta.ResourceExceeded, epochsFile, fmt.Errorf("%d leaders are more than Kafka's epochs: copy the stream to another volume", count))
	}
	epoch := l.base + int32(count)
	if last := l.list.last(); epoch <= last {
		return 0, meta.E("open", meta.Fenced, epochsFile, fmt.Errorf("a leader of epoch %d has opened the log, epoch %d is over", last, epoch))
	}
	return epoch, nil
}

// epochsRecord is the JSON in the file epochs.
type epochsRecord struct {
	Version int    `json:"version"`
	Volume  uint64 `json:"volume"`
	Base    int32  `json:"base"`
	Epochs  epochs `json:"epochs"`
}

// LastEpoch returns the epoch of the last leader that opened a partition's log, -1 if there was none.
// Errors: Corrupt, Version, and errors of dir.
func LastEpoch(ctx context.Context, dir Dir) (int32, error) {
	l, err := readLeaders(ctx, dir)
	return l.list.last(), err
}

func readLeaders(ctx context.Context, dir Dir) (leaders, error) {
	b, err := dir.ReadFile(ctx, epochsFile)
	if errors.Is(err, meta.NotFound) {
		return leaders{}, nil
	}
	if err != nil {
		return leaders{}, err
	}
	return decodeLeaders(b)
}

func decodeLeaders(b []byte) (leaders, error) {
	const op = "read leaders of a partition"
	var r epochsRecord
	if err := json.Unmarshal(b, &r); err != nil || r.Version < 1 {
		return leaders{}, meta.E(op, meta.Corrupt, epochsFile, err)
	}
	if r.Version > epochsVersion {
		return leaders{}, meta.E(op, meta.Version, epochsFile, fmt.Errorf("version %d is newer than %d: use a newer program", r.Version, epochsVersion))
	}
	for i, e := range r.Epochs {
		if e.Epoch < 0 || e.Start < 0 || i > 0 && (r.Epochs[i-1].Epoch >= e.Epoch || r.Epochs[i-1].Start > e.Start) {
			return leaders{}, meta.E(op, meta.Corrupt, epochsFile, fmt.Errorf("leader %d at offset %d does not follow the leader before", e.Epoch, e.Start))
		}
	}
	if r.Base < 0 {
		return leaders{}, meta.E(op, meta.Corrupt, epochsFile, fmt.Errorf("the base is %d", r.Base))
	}
	return leaders{r.Volume, r.Base, r.Epochs}, nil
}

// last returns the epoch of the last leader, or -1.
func (l epochs) last() int32 {
	if len(l) == 0 {
		return -1
	}
	return l[len(l)-1].Epoch
}

// begin adds a leader that begins at the end of the log. Leaders that appended nothing leave
// the list.
func (l epochs) begin(epoch int32, end int64) epochs {
	for len(l) > 0 && l[len(l)-1].Start >= end {
		l = l[:len(l)-1]
	}
	l = append(l, epochStart{Epoch: epoch, Start: end})
	return l[max(0, len(l)-maxEpochs):]
}

func (l *leaders) encode() []byte {
	b, err := json.Marshal(epochsRecord{Version: epochsVersion, Volume: l.volume, Base: l.base, Epochs: l.list})
	if err != nil {
		panic("partition: a list of numbers can't be encoded: " + err.Error())
	}
	return append(b, '\n')
}

// end returns the greatest epoch up to an epoch that appended, and the offset after the last
// record of the epoch, where high is the end of the log. Without such an epoch, end returns -1 and -1.
func (l epochs) end(epoch int32, high int64) (int32, int64) {
	for i := len(l) - 1; i >= 0; i-- {
		if l[i].Epoch > epoch {
			high = l[i].Start
			continue
		}
		return l[i].Epoch, high
	}
	return -1, -1
}
