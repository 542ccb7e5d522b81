package cluster

import "penstock.io/penstock/meta"

// A row has the settings of a volume, and the identity and state of the volume. A clone begins
// with its origin's settings, so that a clone deleted by mistake stays in the trash as long as
// the origin would. fieldsOfRow assigns each field to settings, identity or state; a test
// compares fieldsOfRow with the fields of Volume, so that every new field needs a decision.

// ofClone says what a clone gets in a field of the row.
type ofClone uint8

const (
	copied ofClone = iota + 1 // a setting: the clone begins with the origin's
	own                       // the clone has its own value
)

// fieldsOfRow names every field of Volume.
var fieldsOfRow = map[string]ofClone{
	"Policy":       copied, // as the origin's journal says, which the row may be behind
	"Keep":         copied,
	"TrashSeconds": copied,
	"Compression":  copied,
	"Advisory":     copied, // the limits; the clone's owner finds out whether the clone exceeds them
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

// takeSettings copies the settings of another row, except the policy and the labels, which are
// stored elsewhere.
func (v *Volume) takeSettings(from *Volume) {
	v.Keep, v.TrashSeconds, v.Compression = from.Keep, from.TrashSeconds, from.Compression
	if a := from.Advisory; a != nil {
		v.Advisory = &Advisory{Bytes: a.Bytes, Inodes: a.Inodes}
	}
}

// CloneRow returns the first row of a clone, from its origin's row and labels. p is the
// origin's policy.
func CloneRow(name string, p meta.Policy, now meta.Time, from Origin, origin *Volume, labels map[string]string) Volume {
	v := Volume{Name: name, State: VolumeCreating, Policy: p, Created: now, Origin: &from, Labels: labels}
	v.takeSettings(origin)
	return v
}
