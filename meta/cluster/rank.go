package cluster

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"penstock.io/penstock/meta"
)

// Rank orders metadata servers for a volume by rendezvous hashing: the first server should own
// the volume, the following servers follow the volume's journal. A server that joins or leaves
// moves only volumes for which the server ranks first.
func Rank(v meta.VolumeID, servers []MetaServer) []MetaServer {
	type weighed struct {
		s MetaServer
		w uint64
	}
	all := make([]weighed, len(servers))
	for i, s := range servers {
		b := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(s.Name)), uint32(v))
		sum := sha256.Sum256(append(b, s.Name...))
		all[i] = weighed{s, binary.BigEndian.Uint64(sum[:])}
	}
	slices.SortFunc(all, func(a, b weighed) int {
		return cmp.Or(cmp.Compare(b.w, a.w), cmp.Compare(a.s.Name, b.s.Name))
	})
	out := make([]MetaServer, len(all))
	for i, a := range all {
		out[i] = a.s
	}
	return out
}
