package cluster

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"penstock.io/penstock/meta"
)

// Rank orders metadata servers for a volume by rendezvous hashing: the first should own it,
// the following ones follow its journal. A server that comes or goes moves only the volumes
// for which it ranks first.
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
