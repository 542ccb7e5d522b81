package server

import (
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/wire"
)

// A server counts as emptied when no disk of the server is good and a disk still serves.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		disks []meta.DiskState
		want  bool
	}{
		{nil, false}, // the server has reported no disk yet
		{[]meta.DiskState{meta.DiskOK}, false},
		{[]meta.DiskState{meta.DiskFailing}, true},
		{[]meta.DiskState{meta.DiskFailing, meta.DiskFailed}, true},
		{[]meta.DiskState{meta.DiskFailing, meta.DiskFull}, false},
		{[]meta.DiskState{meta.DiskFailed}, false}, // nothing is left to be moved
	} {
		var i meta.ServerInfo
		for _, s := range c.disks {
			i.Disks = append(i.Disks, meta.DiskInfo{State: s})
		}
		if givenUp(&i) != c.want {
			t.Errorf("disks %v: given up is %t", c.disks, !c.want)
		}
	}
}

// A map of the servers that was begun before a server was seen does not serve later placements.
func TestMapBegunBeforeAServerCame(t *testing.T) {
	t.Parallel()
	s := newSite(t).srv
	report := &wire.Report{Info: meta.ServerInfo{ID: 7, Addr: "unix:/nowhere", Total: 1 << 40, Free: 1 << 39}}
	s.serverMap.forgetMap()
	s.serverMap.mapWith(func() *placement.Map {
		m := s.serverMap.makeMap(nil)
		s.serverMap.saw("n", report)
		return m
	})
	if _, err := s.serverMap.place(1, &meta.Policy{Replicas: 1}, placement.Writer{}, nil); err != nil {
		t.Error(err)
	}
	s.serverMap.forgetMap()
	s.serverMap.mapWith(func() *placement.Map {
		m := s.serverMap.makeMap(nil)
		s.serverMap.unseen(7)
		return m
	})
	if _, err := s.serverMap.place(1, &meta.Policy{Replicas: 1}, placement.Writer{}, nil); meta.KindOf(err) != meta.Unavailable {
		t.Errorf("a chunk is placed on a server that is gone: %v", err)
	}
}
