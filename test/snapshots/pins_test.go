package snapshots

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/test/operator"
)

// TestViewOfOneThatIsGone: a mount that shows a deleted snapshot pins no other snapshot
// with the same name, and verifies nothing by the other snapshot's digest.
func TestViewOfOneThatIsGone(t *testing.T) {
	s := up(t)
	c, o := dial(t, s, "c"), operator.New(t, s.Meta.Addr, nil)
	if _, err := o.TakeSnapshot(t.Context(), meta.RootVolume, "one"); err != nil {
		t.Fatal(err)
	}
	view, err := c.Snapshot(t.Context(), "root", "one")
	if err != nil {
		t.Fatal(err)
	}
	if err := view.Pin(t.Context(), "run", time.Hour); err != nil {
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
	if _, err := o.UnpinSnapshot(t.Context(), meta.RootVolume, "one", "run"); err != nil {
		t.Fatal(err)
	}
	if _, err := o.DeleteSnapshot(t.Context(), meta.RootVolume, "one"); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err = o.TakeSnapshot(t.Context(), meta.RootVolume, "one"); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := view.Pin(t.Context(), "run", time.Hour); !errors.Is(err, meta.NoSuchSnapshot) {
		t.Errorf("a pin: %v", err)
	}
	if err := view.Demand(t.Context(), digest); !errors.Is(err, meta.NoSuchSnapshot) {
		t.Errorf("a digest: %v", err)
	}
	if all, err := o.Snapshots(t.Context(), meta.RootVolume); err != nil || len(all.Snapshots) != 1 || len(all.Snapshots[0].Pins) > 0 {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestViewOfOneKeptForClones: a snapshot that was deleted while a clone needs it stays
// readable for the client that shows it, whichever client lists the snapshots, and for
// new clients, until the clone is deleted.
func TestViewOfOneKeptForClones(t *testing.T) {
	s := up(t)
	ctx := t.Context()
	c, o := dial(t, s, "c"), operator.New(t, s.Meta.Addr, nil)
	v, err := c.VolumeByID(ctx, meta.RootVolume)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := o.TakeSnapshot(ctx, meta.RootVolume, "one"); err != nil {
		t.Fatal(err)
	}
	if err := v.Clone(ctx, "one", "copy"); err != nil {
		t.Fatal(err)
	}
	view, err := c.Snapshot(ctx, "root", "one")
	if err != nil {
		t.Fatal(err)
	}
	if i, err := o.DropSnapshot(ctx, meta.RootVolume, "one"); err != nil || i.State != meta.SnapshotDropped {
		t.Fatal(i, err)
	}
	look := func() { // lists the snapshots again, which ends the views of snapshots not in the list
		t.Helper()
		if _, err := v.Snapshot(ctx, "none"); !errors.Is(err, meta.NoSuchSnapshot) {
			t.Fatal(err)
		}
	}
	look()
	if _, err := view.Lookup(ctx, meta.RootIno, "nothing"); view.Ended() || err != nil {
		t.Fatalf("the view has ended: %v, and says %v", view.Ended(), err)
	}
	again, err := dial(t, s, "d").Snapshot(ctx, "root", "one")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := again.GetAttr(ctx, meta.RootIno); err != nil {
		t.Fatal(err)
	}
	clone, err := o.FindVolume(ctx, "copy")
	if err == nil {
		err = o.DeleteVolume(ctx, clone.ID, false)
	}
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); !view.Ended(); time.Sleep(10 * time.Millisecond) {
		if look(); time.Now().After(deadline) {
			t.Fatal("it did not go with its clone")
		}
	}
}
