package local

import (
	"context"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// StreamFiles reads the streams of a client's tree for the client's mounts.
func StreamFiles(c *penstock.Client) fuse.Streams { return streamFiles{c} }

type streamFiles struct{ client *penstock.Client }

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
