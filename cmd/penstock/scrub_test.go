package main

import (
	"slices"
	"testing"
)

func TestScrubWaitsForEveryDisk(t *testing.T) {
	disk := func(id string, server uint64, state, end string, read float64) diskView {
		return diskView{ID: id, Path: "/" + id, Server: server, State: state, ScrubEnd: end, Scrub: read}
	}
	before := []diskView{disk("a", 1, "ok", "t0", 0), disk("b", 1, "ok", "", 0), disk("c", 2, "ok", "t0", 0)}
	for _, c := range []struct {
		name   string
		now    []diskView
		node   uint64
		disks  int
		read   float64
		failed []string
		away   []string
	}{
		{"nothing was read", before, 0, 3, 0, nil, nil},
		{"one pass is over, one is half way", []diskView{disk("a", 1, "ok", "t1", 0), disk("b", 1, "ok", "", 0.5), disk("c", 2, "ok", "t0", 0)}, 0, 3, 1.5, nil, nil},
		{"a pass at its end is not over", []diskView{disk("c", 2, "ok", "t0", 1)}, 2, 1, 0.999, nil, nil},
		{"a disk that is not connected was not read", []diskView{disk("a", 1, "ok", "t1", 0), disk("b", 1, "ok", "t1", 0)}, 0, 3, 2, nil, []string{"/c"}},
		{"a disk of another server is not waited for", []diskView{disk("a", 1, "ok", "t1", 0), disk("b", 1, "ok", "t1", 0)}, 1, 2, 2, nil, nil},
		{"a failed disk is named", []diskView{disk("a", 1, "failed", "t0", 0), disk("b", 1, "ok", "t1", 0), disk("c", 2, "ok", "t1", 0)}, 0, 2, 2, []string{"/a"}, nil},
		{"no disk is connected", nil, 0, 0, 0, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := scrubbed(before, c.now, c.node)
			if s.disks != c.disks || s.read != c.read || !slices.Equal(s.failed, c.failed) || !slices.Equal(s.away, c.away) {
				t.Errorf("got %+v, want %d disks, %v read, failed %v, away %v", s, c.disks, c.read, c.failed, c.away)
			}
		})
	}
}
