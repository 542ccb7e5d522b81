package wire

import "penstock.io/penstock/meta"

// ViewsAnswer answers AdminViews, as JSON: snapshots, oldest first.
type ViewsAnswer struct {
	Snapshots []meta.Snapshot `json:"snapshots"`
}
