package snapshots

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// TestGroupAtomic is TestAtomic over two volumes: W1 writes A in one volume, and tells
// W2, which writes B in the other volume, while the test takes group snapshots.
func TestGroupAtomic(t *testing.T) {
	s := up(t)
	clients := [2]*penstock.Client{dial(t, s, "w1"), dial(t, s, "w2")}
	admin, err := clients[0].Volumes()
	if err != nil {
		t.Fatal(err)
	}
	second, err := admin.Create(t.Context(), "second", meta.Policy{Replicas: 1}, penstock.VolumeWords{})
	if err != nil {
		t.Fatal(err)
	}
	// Writer 0 writes into the volume with the higher number, so the order of the writes
	// is not the order of the volumes' numbers.
	ids := [2]meta.VolumeID{second.ID, meta.RootVolume}
	var vols [2]*penstock.Volume
	for side := range 2 {
		if vols[side], err = clients[side].VolumeByID(t.Context(), ids[side]); err != nil {
			t.Fatal(err)
		}
	}
	var pairs []*pair
	for i, a := range kinds {
		pairs = append(pairs, newPair(t, vols, a, kinds[(i+1)%len(kinds)]))
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	for _, p := range pairs {
		wg.Go(func() { p.count(ctx, t, vols) })
	}
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.Meta.Addr}, Role: wire.RoleClient, Name: "reader", Handler: quiet{}})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(context.Background())
	groups, err := clients[0].Groups()
	if err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		before := make([][2]uint64, len(pairs))
		var g penstock.Group
		for end := time.Now().Add(time.Minute); ; {
			for j, p := range pairs {
				before[j] = [2]uint64{p.done[0].Load(), p.done[1].Load()}
			}
			if g, err = groups.Take(t.Context(), fmt.Sprint("g", i), true, vols[:]...); err == nil {
				break
			}
			// A machine may be too busy for clients to answer within a second.
			if !errors.Is(err, meta.Unavailable) || time.Now().After(end) {
				t.Fatal(err)
			}
			t.Log(err)
		}
		at := map[meta.VolumeID]meta.Generation{}
		for _, m := range g.Members {
			at[m.Volume] = m.At
		}
		for j, p := range pairs {
			var n [2]uint64
			for side := range 2 {
				r := &reader{t.Context(), sess, ids[side], at[ids[side]]}
				if n[side], err = p.of[side].read(r, p.name[side]); err != nil {
					t.Fatal(err)
				}
				if n[side] < before[j][side] || n[side] > p.begun[side].Load() {
					t.Errorf("DATA: group %d: %s is %d; write returned for %d before the call", i, p.name[side], n[side], before[j][side])
				}
			}
			if n[1] > n[0] || n[0] > n[1]+1 {
				t.Errorf("DATA: group %d: %s is %d, %s is %d: no such moment was", i, p.name[0], n[0], p.name[1], n[1])
			}
		}
	}
	if _, err := groups.Find(t.Context(), "g0"); err != nil {
		t.Error(err)
	}
	if err := groups.Delete(t.Context(), "g0"); err != nil {
		t.Error(err)
	}
	if _, err := groups.Find(t.Context(), "g0"); !errors.Is(err, meta.NotFound) {
		t.Error(err)
	}
}
