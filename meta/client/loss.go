package client

import (
	"context"
	"iter"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// LostChunks lists the chunks of a volume of which no good replica is left, and
// those that were accepted as lost, by their ids. It asks for a page at a time.
func (s *Session) LostChunks(ctx context.Context, v meta.VolumeID) iter.Seq2[wire.LostChunk, error] {
	return func(yield func(wire.LostChunk, error) bool) {
		for q := (wire.LostRequest{}); ; {
			var l wire.LostChunks
			err := s.askJSON(ctx, wire.Admin{Op: wire.AdminLostChunks, Volume: v}, q, &l)
			for _, c := range l.Chunks {
				if !yield(c, nil) {
					return
				}
			}
			if err != nil {
				yield(wire.LostChunk{}, err)
				return
			}
			if l.More == 0 {
				return
			}
			q.After = l.After
		}
	}
}

// acceptAtOnce bounds the chunks of one request to accept their loss.
const acceptAtOnce = 1000

// AcceptLoss records that what no replica has of chunks, named by their ids in hex,
// is lost, and gives those of which that is on record now; with an error those
// before it. damaged: what damaged replicas still serve is given up, too. Errors:
// Invalid (no such id), NoSuchChunk, Unavailable (a server or disk may have it),
// Busy (it is not lost), Corrupt (damaged replicas are left).
func (s *Session) AcceptLoss(ctx context.Context, v meta.VolumeID, chunks []string, damaged bool) (done []wire.LostChunk, err error) {
	for some := range slices.Chunk(chunks, acceptAtOnce) {
		var l wire.LostChunks
		if err := s.askJSON(ctx, wire.Admin{Op: wire.AdminAcceptLoss, Volume: v}, wire.AcceptLoss{Chunks: some, Damaged: damaged}, &l); err != nil {
			return done, err
		}
		done = append(done, l.Chunks...)
	}
	return done, nil
}
