package server

import (
	"cmp"
	"context"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/placement"
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

// drainForecast makes the forecast from the policies of all volumes. Errors:
// Cluster.Volumes's.
func (sm *serverMap) drainForecast(ctx context.Context, id meta.ServerID) (DrainForecast, error) {
	f := DrainForecast{Node: id, Volumes: []VolumeForecast{}}
	now := sm.servers()
	then := now.With(id, placement.Draining)
	for _, x := range now.Servers() {
		for _, d := range x.Disks {
			switch {
			case x.ID == id:
				f.Used += d.Total - min(d.Free, d.Total)
			case x.State == placement.Live:
				f.Room += d.Free - min(d.Free, placement.Reserve(d.Total))
			}
		}
	}
	all, err := sm.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return f, err
	}
	for i := range all {
		v := &all[i]
		if v.State != cluster.VolumeActive && v.State != cluster.VolumeTrash {
			continue
		}
		x := VolumeForecast{Name: v.Name, Replicas: int(max(v.Policy.Replicas, 1)), Now: now.Most(&v.Policy, nil), Then: then.Most(&v.Policy, nil)}
		if x.Then < x.Now {
			f.Volumes = append(f.Volumes, x)
		}
	}
	slices.SortFunc(f.Volumes, func(a, b VolumeForecast) int { return cmp.Compare(a.Name, b.Name) })
	return f, nil
}
