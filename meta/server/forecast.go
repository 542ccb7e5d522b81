package server

import (
	"cmp"
	"context"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/placement"
)

// DrainForecast is what becomes of volumes when a chunk server takes nothing new any
// more and is emptied, as the chunk servers stand now.
type DrainForecast struct {
	Node meta.ServerID `json:"node"`
	// Volumes whose new data has fewer replicas then than their policy wants, and than
	// now, by name: the replicas that they have on the server have nowhere to go, too.
	Volumes []VolumeForecast `json:"volumes"`
	// Used bytes are on the server's disks, Room bytes on those that are left.
	Used uint64 `json:"used_bytes"`
	Room uint64 `json:"room_bytes"`
}

// VolumeForecast is what becomes of one volume.
type VolumeForecast struct {
	Name     string `json:"name" pb:"volume"`
	Replicas int    `json:"replicas"` // by its policy
	Now      int    `json:"now"`      // of new data; 0: nothing can be written
	Then     int    `json:"then"`
}

// drainForecast looks at the policies of all volumes. Errors: those of Cluster.Volumes.
func (s *Server) drainForecast(ctx context.Context, id meta.ServerID) (DrainForecast, error) {
	f := DrainForecast{Node: id, Volumes: []VolumeForecast{}}
	now := s.servers()
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
	all, err := s.cfg.Cluster.Volumes(ctx)
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
