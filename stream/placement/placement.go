// Package placement chooses which gateway leads what: partitions of streams, and the files whose
// leaders coordinate consumer groups. The package is pure: all gateways with the same list of
// gateways choose the same leader, without asking each other.
//
// The choice is by rendezvous hashing: each pair of a thing and a gateway has a weight, a hash, and
// the gateway with the greatest weight leads the thing. When a gateway goes, only what it led gets
// another leader; when a gateway comes, it takes about an equal share, and nothing else moves.
package placement

import (
	"encoding/binary"
	"hash/fnv"
)

// Gateway is a gateway that serves streams now.
type Gateway struct {
	// Number is the gateway's number, which is the broker's id for Kafka clients; greater than 0.
	Number int32
	// The addresses of the gateway for clients, "host:port"; "": the gateway has no such server.
	Kafka  string
	Ingest string
}

// Key identifies what is led: the partition with a number in a stream's directory, or the
// coordination with a number in the directory of the coordinations.
type Key struct {
	Volume    uint32
	Directory uint64 // inode
	Number    int32
}

// Leader returns the gateway of a list that is to lead what a key identifies; false: the list is
// empty. The order of the list does not matter.
func Leader(key Key, live []Gateway) (leader Gateway, ok bool) {
	var most uint64
	for _, g := range live {
		if w := weight(key, g.Number); !ok || w > most || w == most && g.Number < leader.Number {
			leader, most, ok = g, w, true
		}
	}
	return leader, ok
}

// weight is a hash of a key and a gateway's number.
func weight(key Key, gateway int32) uint64 {
	var b [20]byte
	binary.BigEndian.PutUint32(b[0:], key.Volume)
	binary.BigEndian.PutUint64(b[4:], key.Directory)
	binary.BigEndian.PutUint32(b[12:], uint32(key.Number))
	binary.BigEndian.PutUint32(b[16:], uint32(gateway))
	h := fnv.New64a()
	h.Write(b[:]) // never fails
	// FNV mixes the last bytes into the upper half too little: the finalizer of MurmurHash3 mixes
	// all bits.
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
