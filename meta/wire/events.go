package wire

import (
	"time"

	"penstock.io/penstock/meta"
)

// EventsRequest is AdminEvents' body.
type EventsRequest struct {
	Since uint64 `json:"since,omitempty"` // the events after it are wanted
	// Oldest: all that are kept are wanted, whatever Since says; Newest: none that
	// there are, just the number of the last.
	Oldest bool `json:"oldest,omitempty"`
	Newest bool `json:"newest,omitempty"`
	// Wait is how long the owner may wait for one, if there is none. It may answer
	// sooner.
	Wait time.Duration `json:"wait,omitempty"`
}

// EventsAnswer answers it. Without events, when nobody waited or none came, it
// is an answer, too.
type EventsAnswer struct {
	Keep  uint64 `json:"keep"` // 0: events are switched off
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
	// Rescan: what came after Since is not all there any more. Who looks at the
	// tree from now on, and then goes on after Last, misses nothing.
	Rescan bool `json:"rescan,omitempty"`
	// Events are fewer than there are if they would take too many bytes.
	Events []EventInfo `json:"events,omitempty"`
	// Dirs are the paths of directories that events name, as far as they are
	// there and shorter than meta.MaxPath, as they are when this is answered:
	// without slashes at the ends.
	Dirs map[meta.Ino][]byte `json:"dirs,omitempty"`
}

// EventInfo is a meta.Event whose names may be any bytes.
type EventInfo struct {
	Seq        uint64         `json:"seq"`
	Kind       meta.EventKind `json:"kind"`
	Time       meta.Time      `json:"time"`
	Ino        meta.Ino       `json:"ino,omitempty"`
	Type       uint32         `json:"type,omitempty"`
	Parent     meta.Ino       `json:"parent,omitempty"`
	Name       []byte         `json:"name,omitempty"`
	FromParent meta.Ino       `json:"from_parent,omitempty"`
	From       []byte         `json:"from,omitempty"`
	Replaced   meta.Ino       `json:"replaced,omitempty"`
	Last       bool           `json:"last,omitempty"`
	Volume     meta.VolumeID  `json:"volume,omitempty"`
	Over       bool           `json:"over,omitempty"`
	Used       uint64         `json:"used,omitempty"`
	Limit      uint64         `json:"limit,omitempty"`
}

// EventInfoOf translates.
func EventInfoOf(e meta.Event) EventInfo {
	return EventInfo{e.Seq, e.Kind, e.Time, e.Ino, e.Type, e.Parent, []byte(e.Name), e.FromParent, []byte(e.From), e.Replaced, e.Last, e.Volume, e.Over, e.Used, e.Limit}
}

// Event translates back.
func (i *EventInfo) Event() meta.Event {
	return meta.Event{Seq: i.Seq, Kind: i.Kind, Time: i.Time, Ino: i.Ino, Type: i.Type, Parent: i.Parent, Name: string(i.Name),
		FromParent: i.FromParent, From: string(i.From), Replaced: i.Replaced, Last: i.Last, Volume: i.Volume,
		Over: i.Over, Used: i.Used, Limit: i.Limit}
}

// SetEventsRequest is AdminSetEvents' body.
type SetEventsRequest struct {
	Keep uint64 `json:"keep"` // 0: off
}
