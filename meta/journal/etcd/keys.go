// Package etcd owns the etcd form of the journal and the ownership of volumes. Only this
// package and package cluster use etcd.
//
// Keys of a volume, under /penstock/<cluster>/volumes/<volume, 8 hex digits>/:
//
//	owner                  leased: the present owner of the volume (JSON, Owner). The key's
//	                       create revision is the fence: every write of the owner compares it
//	term                   the last Owner record, kept: the term counter, and whether the
//	                       last owner released the volume in an orderly way
//	journal/<seq, 16 hex>  an entry, as package journal draws it
//	checkpoint             the checkpoint record, as package journal draws it
//	pins/<lease, 16 hex>   leased: a reader's pin, 8 bytes big-endian: the entry number
//
// An idle volume keeps term, checkpoint and the last journal entry. Before the last trim of a
// volume that goes idle, the owner appends an empty entry, so that the remaining entry has 64
// bytes.
package etcd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"penstock.io/penstock/meta"
)

// VolumePrefix is the prefix of all keys of a volume; clusterPrefix has no
// slash at its end.
func VolumePrefix(clusterPrefix string, v meta.VolumeID) string {
	return fmt.Sprintf("%s/volumes/%08x/", clusterPrefix, uint32(v))
}

type keys struct{ prefix string }

func (k keys) owner() string      { return k.prefix + "owner" }
func (k keys) term() string       { return k.prefix + "term" }
func (k keys) checkpoint() string { return k.prefix + "checkpoint" }
func (k keys) pins() string       { return k.prefix + "pins/" }

func (k keys) entry(seq meta.Seq) string {
	return fmt.Sprintf("%sjournal/%016x", k.prefix, uint64(seq))
}

// afterEntries is the end of the range of entries.
func (k keys) afterEntries() string { return k.prefix + "journal0" }

func (k keys) seq(key []byte) (meta.Seq, error) {
	hex, ok := strings.CutPrefix(string(key), k.prefix+"journal/")
	n, err := strconv.ParseUint(hex, 16, 64)
	if !ok || err != nil || len(hex) != 16 {
		return 0, meta.E("read journal", meta.Corrupt, string(key), errors.New("no entry's key"))
	}
	return meta.Seq(n), nil
}

// wrap gives an etcd error a kind. NoSpace and ResourceExceeded are certain:
// nothing was written.
func wrap(op, subject string, err error) error {
	if err == nil {
		return nil
	}
	kind := meta.Unavailable
	switch {
	case errors.Is(err, rpctypes.ErrNoSpace), errors.Is(err, rpctypes.ErrGRPCNoSpace):
		kind = meta.NoSpace
	case errors.Is(err, rpctypes.ErrRequestTooLarge), errors.Is(err, rpctypes.ErrGRPCRequestTooLarge),
		errors.Is(err, rpctypes.ErrTooManyOps), errors.Is(err, rpctypes.ErrGRPCTooManyOps):
		kind = meta.ResourceExceeded
	case errors.Is(err, context.Canceled):
		kind = meta.Canceled
	case errors.Is(err, rpctypes.ErrCorrupt), errors.Is(err, rpctypes.ErrGRPCCorrupt):
		kind = meta.Corrupt
	}
	return meta.E(op, kind, subject, err)
}
