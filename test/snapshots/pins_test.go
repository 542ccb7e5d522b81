package snapshots

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestViewOfOneThatIsGone: who shows a snapshot that was deleted pins no other one
// that has its name by now, and proves nothing with the other's digest.
func TestViewOfOneThatIsGone(t *testing.T) {
	s := up(t)
	c := dial(t, s, "c")
	v, err := c.VolumeByID(t.Context(), meta.RootVolume)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.TakeSnapshot(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	view, err := c.Snapshot(t.Context(), "root", "one")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := view.Pin(t.Context(), "run", time.Hour); err != nil {
		t.Fatal(err)
	}
	digest, err := view.RecordedDigest(t.Context())
	for deadline := time.Now().Add(time.Minute); errors.Is(err, meta.Unavailable) && time.Now().Before(deadline); digest, err = view.RecordedDigest(t.Context()) {
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := view.Demand(t.Context(), digest); err != nil {
		t.Fatal(err)
	}
	if _, err := v.UnpinSnapshot(t.Context(), "one", "run"); err != nil {
		t.Fatal(err)
	}
	if err := v.DeleteSnapshot(t.Context(), "one"); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err = v.TakeSnapshot(t.Context(), "one"); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := view.Pin(t.Context(), "run", time.Hour); !errors.Is(err, meta.NoSuchSnapshot) {
		t.Errorf("a pin: %v", err)
	}
	if err := view.Demand(t.Context(), digest); !errors.Is(err, meta.NoSuchSnapshot) {
		t.Errorf("a digest: %v", err)
	}
	if all, err := v.Snapshots(t.Context()); err != nil || len(all) != 1 || len(all[0].Pins) > 0 {
		t.Errorf("%+v, %v", all, err)
	}
}
