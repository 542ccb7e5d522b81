package server

import (
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/wire"
)

// A server is emptied when no disk of it is good and one still serves.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		disks []meta.DiskState
		want  bool
	}{
		{nil, false}, // it has told of no disk yet
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

// A map of the servers that was begun before one was seen does not serve those
// who place chunks afterwards.
func TestMapBegunBeforeAServerCame(t *testing.T) {
	t.Parallel()
	s := newSite(t).srv
	report := &wire.Report{Info: meta.ServerInfo{ID: 7, Addr: "unix:/nowhere", Total: 1 << 40, Free: 1 << 39}}
	s.forgetMap()
	s.mapWith(func() *placement.Map {
		m := s.makeMap(nil)
		s.saw("n", report)
		return m
	})
	if _, err := s.place(1, &meta.Policy{Replicas: 1}, placement.Writer{}, nil); err != nil {
		t.Error(err)
	}
	s.forgetMap()
	s.mapWith(func() *placement.Map {
		m := s.makeMap(nil)
		s.unseen(7)
		return m
	})
	if _, err := s.place(1, &meta.Policy{Replicas: 1}, placement.Writer{}, nil); meta.KindOf(err) != meta.Unavailable {
		t.Errorf("a chunk is placed on a server that is gone: %v", err)
	}
}
