package server

import (
	"testing"

	"penstock.io/penstock/meta"
)

// A server is emptied when no disk of it is good and one still serves.
func TestGivenUp(t *testing.T) {
	for _, c := range []struct {
		disks []meta.DiskState
		want  bool
	}{
		{nil, false}, // an older server
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
