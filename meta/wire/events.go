package wire

import (
	"time"

	"penstock.io/penstock/meta"
)

// EventsRequest is the body of AdminEvents.
type EventsRequest struct {
	Since uint64 `json:"since,omitempty"` // asks for the events after number Since
	// Oldest asks for all events that the volume keeps, and Since is ignored. Newest asks for
	// no event, only for the number of the last event.
	Oldest bool `json:"oldest,omitempty"`
	Newest bool `json:"newest,omitempty"`
	// Wait is how long the owner may wait for an event if the volume has none after Since. The
	// owner may answer sooner.
	Wait time.Duration `json:"wait,omitempty"`
}

// EventsAnswer answers EventsRequest. An answer without events is valid: the request set no
// Wait, or no event happened in time.
type EventsAnswer struct {
	Keep  uint64 `json:"keep"` // 0: events are switched off
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
	// Rescan: the volume no longer keeps all events after Since. A client misses nothing if it
	// reads the tree after this answer and then continues after Last.
	Rescan bool `json:"rescan,omitempty"`
	// Events omits the later events if all would take too many bytes.
	Events []EventInfo `json:"events,omitempty"`
	// Dirs are the present paths of the directories named by the events, without slashes at
	// the ends. Dirs omits directories that are gone, and paths of meta.MaxPath bytes or more.
	Dirs map[meta.Ino][]byte `json:"dirs,omitempty"`
}

// EventInfo is a meta.Event with names of arbitrary bytes.
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

// SetEventsRequest is the body of AdminSetEvents.
type SetEventsRequest struct {
	Keep uint64 `json:"keep"` // 0: off
}
