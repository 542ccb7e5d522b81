package server

import (
	"penstock.io/penstock/meta"
)

// DrainForecast is the state of volumes if a chunk server takes no new data and is emptied,
// with the other chunk servers as they are now.
type DrainForecast struct {
	Node meta.ServerID `json:"node"`
	// Volumes, by name, are the volumes whose new data would have fewer replicas than the
	// policy wants, and fewer than now: the server's replicas of them have no destination
	// either.
	Volumes []VolumeForecast `json:"volumes"`
	// Used bytes are on the server's disks; Room bytes are free on the other servers.
	Used uint64 `json:"used_bytes"`
	Room uint64 `json:"room_bytes"`
}

// VolumeForecast is the forecast of a volume.
type VolumeForecast struct {
	Name     string `json:"name" pb:"volume"`
	Replicas int    `json:"replicas"` // that the policy wants
	Now      int    `json:"now"`      // of new data; 0: nothing can be written
	Then     int    `json:"then"`
}
