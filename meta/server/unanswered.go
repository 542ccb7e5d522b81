package server

import (
	"fmt"
	"strings"

	"penstock.io/penstock/meta"
)

// unanswered describes the files of clients that gave no lease back. The snapshot has these
// files as last synced.
type unanswered struct {
	known   bool // this owner took the snapshot; else the fields say nothing
	files   int
	clients []string // names of the files' clients, each once; at most unansweredNamed
}

const unansweredNamed = 8

func (u unanswered) String() string {
	return fmt.Sprintf("%d files, written by %s", u.files, strings.Join(u.clients, ", "))
}

// tellUnanswered adds the unanswered files to a snapshot's description.
func tellUnanswered(i *meta.SnapshotInfo, u unanswered) {
	i.Unanswered, i.UnansweredBy = uint64(u.files), u.clients
}
