package partition

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
)

// Leadership is the right to append to a partition. At most one Leadership of a partition is
// valid at a time.
type Leadership interface {
	// Epoch numbers the leaders of the partition; a later leader has a greater number.
	Epoch() int32
	// Done is closed when the leadership has ended. The log then appends nothing any more.
	Done() <-chan struct{}
}

// alone is the leadership of the only process that opens the partition.
type alone int32

func (e alone) Epoch() int32          { return int32(e) }
func (e alone) Done() <-chan struct{} { return nil }

// Alone returns a leadership for a partition which no other process opens for appends. The
// caller guarantees the exclusion. The epoch is the next above the epoch of the last leader that
// opened the log.
func Alone(ctx context.Context, dir Dir) (Leadership, error) {
	l, err := readEpochs(ctx, dir)
	if err != nil {
		return nil, err
	}
	return alone(l.last() + 1), nil
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

// epochsRecord is the JSON in the file epochs.
type epochsRecord struct {
	Version int    `json:"version"`
	Epochs  epochs `json:"epochs"`
}

func readEpochs(ctx context.Context, dir Dir) (epochs, error) {
	b, err := dir.ReadFile(ctx, epochsFile)
	if errors.Is(err, meta.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return decodeEpochs(b)
}

func decodeEpochs(b []byte) (epochs, error) {
	const op = "read leaders of a partition"
	var r epochsRecord
	if err := json.Unmarshal(b, &r); err != nil || r.Version < 1 {
		return nil, meta.E(op, meta.Corrupt, epochsFile, err)
	}
	if r.Version > epochsVersion {
		return nil, meta.E(op, meta.Version, epochsFile, fmt.Errorf("version %d is newer than %d: use a newer program", r.Version, epochsVersion))
	}
	for i, e := range r.Epochs {
		if e.Epoch < 0 || e.Start < 0 || i > 0 && (r.Epochs[i-1].Epoch >= e.Epoch || r.Epochs[i-1].Start > e.Start) {
			return nil, meta.E(op, meta.Corrupt, epochsFile, fmt.Errorf("leader %d at offset %d does not follow the leader before", e.Epoch, e.Start))
		}
	}
	return r.Epochs, nil
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

func (l epochs) encode() []byte {
	b, err := json.Marshal(epochsRecord{Version: epochsVersion, Epochs: l})
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
