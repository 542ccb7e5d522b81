package server

import (
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/placement"
)

// A replica that was on a disk which is to be emptied, and is listed on another by now,
// counts for that disk no more, whatever is wrong with it.
func TestFaultsFollowTheDisk(t *testing.T) {
	t.Parallel()
	id := meta.ChunkID{Volume: 1, Counter: 1}
	rec := &meta.ChunkRecord{ID: id, State: meta.ChunkSealed, Length: 100, Servers: []meta.ServerID{1, 2}}
	x := &sighting{info: meta.ServerInfo{ID: 1, Disks: []meta.DiskInfo{{ID: "old", State: meta.DiskFailing}, {ID: "new", Class: "hdd"}}}}
	for _, c := range []struct {
		name    string
		listed  meta.ReplicaInfo // on the new disk
		class   string
		corrupt bool // it was known to be
		state   placement.ReplicaState
	}{
		{name: "good", listed: meta.ReplicaInfo{Length: 100}, state: placement.Good},
		{name: "too short", listed: meta.ReplicaInfo{Length: 50}, state: placement.Bad},
		{name: "corrupt", listed: meta.ReplicaInfo{Length: 100, Err: meta.Corrupt}, state: placement.Bad},
		{name: "was corrupt", listed: meta.ReplicaInfo{Length: 100}, corrupt: true, state: placement.Bad},
		{name: "of another class", listed: meta.ReplicaInfo{Length: 100}, class: "ssd", state: placement.Unfit},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := &owner{}
			list := func(c meta.ReplicaInfo, disk, class string) {
				c.ID, c.State, c.Disk = id, meta.ChunkSealed, disk
				o.listedOne(&lists{seen: map[meta.ChunkID]uint8{}}, x, &c, rec, false, &meta.Policy{Class: class})
			}
			counted := func() uint64 {
				var st RepairStatus
				o.faults.onDisks(rec, &st)
				return st.Disks["old"].Chunks
			}
			list(meta.ReplicaInfo{Length: 100}, "old", "")
			if n := counted(); n != 1 {
				t.Fatalf("%d chunks are on the failing disk", n)
			}
			o.faults.set(id, 1, placement.Bad, c.corrupt) // somebody who does not know where it is
			if n := counted(); n != 1 {
				t.Errorf("found bad: %d chunks are on the failing disk", n)
			}
			list(c.listed, "new", c.class)
			if n := counted(); n != 0 {
				t.Errorf("on another disk: %d chunks are on the failing one", n)
			}
			if got := o.faults.replicas(rec)[0].State; got != c.state {
				t.Errorf("the replica is %v, not %v", got, c.state)
			}
		})
	}
}
