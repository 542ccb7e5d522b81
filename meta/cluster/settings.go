package cluster

import "penstock.io/penstock/meta"

// A row has what somebody set for the volume (settings), and what the volume is and where
// it stands (identity). A clone begins with its origin's settings: who deletes the clone by
// mistake finds it in the trash as long as the origin would be there. Which field is what
// says fieldsOfRow; a test holds it against the fields of Volume, so that nobody adds a
// field and forgets to decide.

// ofClone is what becomes of a field of the row when a volume is cloned.
type ofClone uint8

const (
	copied ofClone = iota + 1 // a setting: the clone begins with it
	own                       // the clone has its own
)

// fieldsOfRow names every field of Volume.
var fieldsOfRow = map[string]ofClone{
	"Policy":       copied, // as the origin's journal says, which the row may be behind
	"Keep":         copied,
	"TrashSeconds": copied,
	"Compression":  copied,
	"Advisory":     copied, // the limits; whether the clone is above them its owner finds out
	"Labels":       copied, // a record of their own

	"Version":  own,
	"ID":       own,
	"Name":     own,
	"State":    own,
	"Attach":   own,
	"Created":  own,
	"Origin":   own,
	"Deleted":  own,
	"Until":    own,
	"Dropped":  own, // snapshots, which the clone has not
	"Done":     own, // requests about the other row
	"Revision": own,
}

// takeSettings has a row that is made begin with the settings of another, but for the
// policy and the labels, which are read elsewhere.
func (v *Volume) takeSettings(from *Volume) {
	v.Keep, v.TrashSeconds, v.Compression = from.Keep, from.TrashSeconds, from.Compression
	if a := from.Advisory; a != nil {
		v.Advisory = &Advisory{Bytes: a.Bytes, Inodes: a.Inodes}
	}
}

// CloneRow is the row of a clone as it begins, of its origin's row and labels. p is the
// origin's policy.
func CloneRow(name string, p meta.Policy, now meta.Time, from Origin, origin *Volume, labels map[string]string) Volume {
	v := Volume{Name: name, State: VolumeCreating, Policy: p, Created: now, Origin: &from, Labels: labels}
	v.takeSettings(origin)
	return v
}
