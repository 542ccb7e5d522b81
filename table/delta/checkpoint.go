package delta

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress/snappy"

	"penstock.io/penstock/meta"
)

// lastCheckpoint is the JSON of _last_checkpoint.
type lastCheckpoint struct {
	Version int64 `json:"version"`
	Size    int64 `json:"size"` // actions
}

// EncodeCheckpoint returns the bytes of a checkpoint: a Parquet file with a row an action.
// Errors: errors of the Parquet writer.
func EncodeCheckpoint(actions []Action) ([]byte, error) {
	var b bytes.Buffer
	w := parquet.NewGenericWriter[Action](&b, parquet.Compression(&snappy.Codec{}))
	if _, err := w.Write(actions); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// DecodeCheckpoint decodes a checkpoint. Errors: Corrupt.
func DecodeCheckpoint(p []byte) (actions []Action, err error) {
	bad := func(err error) error { return meta.E("read checkpoint", meta.Corrupt, "checkpoint", err) }
	defer func() {
		if r := recover(); r != nil { // the Parquet reader panics at some damage
			actions, err = nil, bad(fmt.Errorf("%v", r))
		}
	}()
	f, err := parquet.OpenFile(bytes.NewReader(p), int64(len(p)))
	if err != nil {
		return nil, bad(err)
	}
	r := parquet.NewGenericReader[Action](f)
	defer r.Close()
	buf := make([]Action, 64)
	for {
		clear(buf) // rows do not share maps and pointers
		n, err := r.Read(buf)
		for _, a := range buf[:n] {
			if a.fields() != 1 {
				return nil, bad(fmt.Errorf("a row has %d actions", a.fields()))
			}
			actions = append(actions, a)
		}
		if errors.Is(err, io.EOF) {
			return actions, nil
		}
		if err != nil {
			return nil, bad(err)
		}
		if n == 0 {
			return nil, bad(io.ErrNoProgress)
		}
	}
}

func encodeLast(version int64, actions int) []byte {
	b, err := json.Marshal(lastCheckpoint{Version: version, Size: int64(actions)})
	if err != nil {
		panic("delta: two numbers can't be encoded: " + err.Error())
	}
	return b
}

func decodeLast(p []byte) (version int64, err error) {
	var l lastCheckpoint
	if err := json.Unmarshal(p, &l); err != nil || l.Version < 0 {
		return 0, meta.E("read checkpoint", meta.Corrupt, lastName, err)
	}
	return l.Version, nil
}
