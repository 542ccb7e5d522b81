package local

import (
	"context"
	"errors"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/stream/ingest/client"
)

// StreamFiles returns a function that makes the streams of a client's tree, for the client's mounts.
// The caller has called g.Open.
func StreamFiles(g *StreamGateways) func(*penstock.Client) fuse.Streams {
	return func(c *penstock.Client) fuse.Streams { return streamFiles{c, g} }
}

type streamFiles struct {
	client   *penstock.Client
	gateways *StreamGateways
}

func (s streamFiles) Tail(ctx context.Context, volume meta.VolumeID, partition meta.Ino, offset int64, skip int) (fuse.StreamTail, error) {
	v, err := s.client.VolumeByID(ctx, volume)
	if err != nil {
		return nil, err
	}
	t, err := stream.Tail(ctx, v, partition, offset, skip)
	if err != nil {
		return nil, err
	}
	return t, nil
}

// hasInputWait bounds the wait for the list of gateways, while a program opens in.jsonl.
const hasInputWait = 5 * time.Second

func (s streamFiles) HasInput(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, hasInputWait)
	defer cancel()
	has, err := s.gateways.hasAddresses(ctx)
	return has || err != nil // without an answer now, Append asks again
}

func (s streamFiles) Input(volume meta.VolumeID, dir meta.Ino, as fuse.InputName) (fuse.StreamInput, error) {
	cfg := client.Config{
		Find: s.gateways.addresses, Directory: &ingest.Directory{Volume: uint64(volume), Inode: uint64(dir)},
		Name: as.Name, Next: as.Next, Promised: as.Promised, Impatient: true, Dial: s.gateways.dial,
	}
	if as.Partition >= 0 {
		cfg.Partition = &as.Partition
	}
	p, err := client.New(cfg)
	if err != nil {
		return nil, err
	}
	return streamInput{p}, nil
}

// streamInput appends lines as a producer with a name.
type streamInput struct{ *client.Producer }

func (s streamInput) Append(ctx context.Context, lines [][]byte) (partition int32, refused, err error) {
	records := make([]*ingest.Record, len(lines))
	for i, line := range lines {
		records[i] = &ingest.Record{Value: line}
	}
	r, err := s.Producer.Append(ctx, records...)
	if errors.Is(err, meta.Interrupted) {
		err = meta.E("append", meta.Unavailable, "lines", err)
	}
	if err != nil {
		return -1, nil, err
	}
	for i := range lines {
		if why, ok := r.Refused[i]; ok {
			return r.Partition, meta.E("append", meta.Invalid, "lines", errors.New(why)), nil
		}
	}
	return r.Partition, nil, nil
}
