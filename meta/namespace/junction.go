package namespace

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

//
// Junctions in snapshots. The place of a volume in the tree is also recorded in the volume's
// row, which has no snapshots. So a clone, or a rolled back volume, must not contain a junction
// without confirmation by the row. Before making either, the owner looks for such junctions:
// among the present junctions of the volume, and among the changes since the snapshot.

// JunctionChange is a name that leads to a volume in a snapshot or in the live tree, but not
// to the same volume in both.
type JunctionChange struct {
	Parent   meta.Ino
	Name     string
	Was, Now meta.VolumeID // zero: none
}

// JunctionsSince examines at most limit names changed since a snapshot, from the key from on
// (nil: the first), and returns the names that lead or led to volumes. next is the key at which
// to continue; nil: the end. Errors: NoSuchSnapshot.
func JunctionsSince(r Reader, at meta.Generation, from []byte, limit int) (all []JunctionChange, next []byte, err error) {
	t, then, err := sides(r, at)
	if err != nil {
		return nil, nil, err
	}
	if from == nil {
		from = binary.BigEndian.AppendUint32([]byte{prefixNameGen}, uint32(at)+1)
	}
	var notes [][]byte
	if err := r.Scan(from, []byte{prefixNameGen + 1}, func(k, _ []byte) bool {
		notes = append(notes, bytes.Clone(k))
		return len(notes) <= limit
	}); err != nil {
		return nil, nil, err
	}
	if len(notes) > limit {
		next = notes[limit]
		notes = notes[:limit]
	}
	for _, k := range notes {
		if len(k) < 13 {
			return nil, nil, fail("junctions", meta.Corrupt, fmt.Sprintf("key %x", k))
		}
		c := JunctionChange{Parent: meta.Ino(binary.BigEndian.Uint64(k[5:])), Name: string(k[13:])}
		was, _, err := then.findEntry(c.Parent, c.Name)
		if err != nil {
			return nil, nil, err
		}
		now, _, err := t.findEntry(c.Parent, c.Name)
		if err != nil {
			return nil, nil, err
		}
		if c.Was, c.Now = was.vol, now.vol; c.Was != c.Now {
			all = append(all, c)
		}
	}
	return all, next, nil
}

// JunctionThen tells which volume a name led to when a snapshot was taken; zero:
// none. Errors: NoSuchSnapshot.
func JunctionThen(r Reader, at meta.Generation, parent meta.Ino, name string) (meta.VolumeID, error) {
	_, then, err := sides(r, at)
	if err != nil {
		return 0, err
	}
	e, _, err := then.findEntry(parent, name)
	return e.vol, err
}

// sides returns the live volume and the volume as of a snapshot.
func sides(r Reader, at meta.Generation) (now, then *tx, err error) {
	now = &tx{view: view{r: r}}
	if err := now.begin(); err != nil {
		return nil, nil, err
	}
	if _, err := now.snaps().snapshotAt(uint32(at)); err != nil {
		return nil, nil, err
	}
	return now, &tx{view: view{r: r, gen: uint32(at), base: now.base}, vol: now.vol}, nil
}
