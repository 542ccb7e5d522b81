package pins_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/server/pins"
)

// volume is a volume in memory, with two snapshots, one and two.
type volume struct {
	keys   []string // sorted
	values map[string][]byte
	now    meta.Time
	seq    meta.Seq
	failed error // answer to every change
}

func newVolume(t *testing.T) *volume {
	t.Helper()
	v := &volume{values: map[string][]byte{}, now: meta.Time(time.Hour)}
	v.apply(namespace.Format(1, v.now, 0o755, 0, 0, meta.Policy{}))
	for i, name := range []string{"one", "two"} {
		if _, err := v.Change(t.Context(), &meta.TakeSnapshot{Name: name, Token: uint64(i + 1)}); err != nil {
			t.Fatal(err)
		}
	}
	return v
}

func (v *volume) apply(effects []namespace.Effect) {
	for _, e := range effects {
		switch e.Kind {
		case namespace.Put:
			v.values[string(e.Key)] = bytes.Clone(e.Value)
		case namespace.Delete:
			delete(v.values, string(e.Key))
		case namespace.DeleteRange:
			for k := range v.values {
				if k >= string(e.Key) && k < string(e.Value) {
					delete(v.values, k)
				}
			}
		}
	}
	v.keys = v.keys[:0]
	for k := range v.values {
		v.keys = append(v.keys, k)
	}
	slices.Sort(v.keys)
}

func (v *volume) Get(key []byte) ([]byte, bool, error) {
	val, ok := v.values[string(key)]
	return val, ok, nil
}

func (v *volume) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	for _, k := range v.keys {
		if k >= string(lo) && k < string(hi) && !fn([]byte(k), v.values[k]) {
			break
		}
	}
	return nil
}

func (v *volume) Change(_ context.Context, op meta.Op) (*meta.Result, error) {
	if v.failed != nil {
		return nil, v.failed
	}
	v.seq++
	v.now++
	res, effects, err := namespace.Execute(v, namespace.Context{Now: v.now, Term: 1, Volume: 1, Seq: v.seq}, op)
	if err == nil {
		v.apply(effects)
	}
	return res, err
}

func (v *volume) Read(fn func(r namespace.Reader, now meta.Time) error) error {
	return fn(v, v.now)
}

func (v *volume) Snapshot(name string) (meta.Snapshot, error) {
	all, err := namespace.Snapshots(v)
	i := slices.IndexFunc(all, func(s meta.Snapshot) bool { return s.Name == name && !s.Deleting })
	if err != nil || i < 0 {
		return meta.Snapshot{}, errors.Join(err, meta.E("find snapshot", meta.NoSuchSnapshot, name, nil))
	}
	return all[i], nil
}

// TestOnlyTheMakerReleases: a pin holds the snapshot until its maker, or a caller with the
// right, releases the pin.
func TestOnlyTheMakerReleases(t *testing.T) {
	v := newVolume(t)
	p := pins.Pins{Volume: v}
	sn, err := v.Snapshot("one")
	if err != nil {
		t.Fatal(err)
	}
	got, err := p.Pin(t.Context(), "one", sn.At, "run", "client-a", time.Hour)
	if err != nil || got.Holder != "run" || got.By != "client-a" {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, err := v.Change(t.Context(), &meta.DropSnapshot{At: sn.At, Max: 1}); meta.KindOf(err) != meta.Busy {
		t.Errorf("a pinned snapshot was deleted: %v", err)
	}
	var asked string
	refuse := func(maker string) error { asked = maker; return errors.New("not yours") }
	if released, err := p.Unpin(t.Context(), "one", "run", refuse); meta.KindOf(err) != meta.AccessDenied || released || asked != "client-a" {
		t.Errorf("released %v by another client than %q: %v", released, asked, err)
	}
	if released, err := p.Unpin(t.Context(), "one", "another run", refuse); err != nil || released {
		t.Errorf("a pin that is not there was released: %v, %v", released, err)
	}
	allow := func(string) error { return nil }
	if released, err := p.Unpin(t.Context(), "one", "run", allow); err != nil || !released {
		t.Errorf("released %v, %v", released, err)
	}
	if _, err := v.Change(t.Context(), &meta.DropSnapshot{At: sn.At, Max: 1}); err != nil {
		t.Errorf("a released snapshot stays: %v", err)
	}
}

// TestAnotherSnapshotOfTheName: a pin for a generation does not fall on a newer snapshot with
// the same name.
func TestAnotherSnapshotOfTheName(t *testing.T) {
	v := newVolume(t)
	p := pins.Pins{Volume: v}
	sn, err := v.Snapshot("one")
	if err != nil {
		t.Fatal(err)
	}
	for name, at := range map[string]meta.Generation{"one": sn.At + 1, "three": 0} {
		if got, err := p.Pin(t.Context(), name, at, "run", "a", time.Hour); meta.KindOf(err) != meta.NoSuchSnapshot {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	v.failed = meta.E("journal", meta.NoSpace, "", nil)
	if _, err := p.Pin(t.Context(), "one", 0, "run", "a", time.Hour); meta.KindOf(err) != meta.NoSpace {
		t.Errorf("an error of the journal is answered with %v", err)
	}
}

// TestPinsBeyondAPage: pins beyond the list are counted, and a pinned volume is not deleted
// before the last pin ends.
func TestPinsBeyondAPage(t *testing.T) {
	v := newVolume(t)
	p := pins.Pins{Volume: v}
	for _, holder := range []string{"a", "b", "c"} {
		if _, err := p.Pin(t.Context(), "two", 0, holder, "client", time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	sn, err := v.Snapshot("two")
	if err != nil {
		t.Fatal(err)
	}
	l, left := []meta.SnapshotInfo{{At: sn.At - 1}, {At: sn.At}}, 2
	err = pins.List(v, v.now, l, func(*meta.PinInfo) bool { left--; return left >= 0 })
	if err != nil || len(l[0].Pins) != 0 || len(l[1].Pins) != 2 || l[1].MorePins != 1 {
		t.Errorf("%+v, %v", l, err)
	}
	if err := pins.MayDelete(v, v.now, "volume 1"); meta.KindOf(err) != meta.Busy || !strings.Contains(err.Error(), "one by a until") {
		t.Errorf("a volume with pins may be deleted: %v", err)
	}
	if err := pins.MayDelete(v, v.now+meta.Time(24*time.Hour), "volume 1"); err != nil {
		t.Errorf("pins that ended hold the volume: %v", err)
	}
}
