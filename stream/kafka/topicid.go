package kafka

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// topicID is the UUID of a topic (KIP-516). It names the stream's directory, so a renamed topic has
// the same id, and a topic that is deleted and created again has another id. Numbers are big-endian:
//
//	0 4 SHA-256 of the cluster's id, its first bytes, without the top bit
//	4 4 volume
//	8 8 inode of the directory
//
// The number of a volume and the inode numbers of a volume are never given out twice. The bytes
// of the cluster's id keep a client from taking a topic of a new cluster at an old address for the
// topic that the old cluster had.
type topicID = [16]byte

// topicIDs begin with the same bytes in a cluster.
func clusterPrefix(cluster string) (p [4]byte) {
	sum := sha256.Sum256([]byte(cluster))
	copy(p[:], sum[:])
	p[0] &= 0x7f // programs print ids as base64, and one that begins with - looks like a flag
	return p
}

// topicID returns the id of a stream's topic.
func (s *Server) topicID(st *stream.Stream) (id topicID) {
	volume, ino := st.Directory()
	copy(id[:], s.idPrefix[:])
	binary.BigEndian.PutUint32(id[4:], uint32(volume))
	binary.BigEndian.PutUint64(id[8:], uint64(ino))
	return id
}

// errUnknownTopicID refuses an id.
var errUnknownTopicID = &refusal{codeUnknownTopicID, "there is no topic with this id"}

// topicOf finds the name of the topic with an id. Errors: errUnknownTopicID, if the client
// may neither read nor write such a topic.
func (s *Server) topicOf(r *request, id topicID) (string, error) {
	if [4]byte(id[:4]) != s.idPrefix {
		return "", errUnknownTopicID
	}
	h, err := s.cfg.Host(r.ctx)
	if err != nil {
		return "", err
	}
	p, err := h.PathOf(r.ctx, r.as, meta.VolumeID(binary.BigEndian.Uint32(id[4:])), meta.Ino(binary.BigEndian.Uint64(id[8:])))
	if k := meta.KindOf(err); k == meta.NotFound || k == meta.AccessDenied {
		return "", errUnknownTopicID
	}
	if err != nil {
		return "", err
	}
	topic, err := stream.Topic(p)
	if err != nil {
		return "", errors.Join(errUnknownTopicID, err) // a path that is too long for a topic
	}
	return topic, nil
}
