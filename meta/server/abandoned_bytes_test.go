package server

import (
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// TestGivenUpBytesAreTold: what an operator gave up at clients is told by health, by volume,
// also if nobody uses the volume any more.
func TestGivenUpBytesAreTold(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	told := func() (of meta.VolumeHealth) {
		page, _ := s.srv.health.VolumesHealth(0)
		for _, v := range page {
			if v.ID == 1 {
				of = v
			}
		}
		return of
	}
	if _, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone); err != nil {
		t.Fatal(err)
	}
	a.GaveUp(1, 2, 300)
	until(t, "health tells", func() bool { return told().GivenUpBytes == 300 })
	a.GaveUp(1, 1, 5)
	until(t, "health tells of more", func() bool { return told().GivenUpBytes == 305 })
	if v := told(); v.GivenUpFiles != 3 || v.GivenUpBy != "a" || v.GivenUpAt.IsZero() {
		t.Errorf("%+v", v)
	}
}

// Health tells of the deletion for a day.
func TestGivenUpBytesAreForgotten(t *testing.T) {
	var g abandonedBytes
	at := time.Now()
	g.add(&wire.GaveUp{Volume: 3, Files: 1, Bytes: 7}, "c", at)
	if l := g.told(at.Add(abandonedTold)); l[3].bytes != 7 {
		t.Errorf("within a day: %v", l)
	}
	if l := g.told(at.Add(abandonedTold + 1)); len(l) != 0 {
		t.Errorf("after a day: %v", l)
	}
}
