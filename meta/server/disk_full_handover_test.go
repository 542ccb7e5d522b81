package server

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster/embedded"
)

// The metadata disk of a volume's owner fills up while a client writes: another server that has
// room takes the volume, and no change is refused. When all disks are full, the volume stays,
// changes are refused, and health names the full disks; as soon as a server has room, that server
// takes the volume.
func TestFullMetadataDiskHandsOver(t *testing.T) {
	t.Parallel()
	s, err := embedded.Start(embedded.Config{Dir: shortDir(t) + "/e"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	var free [3]atomic.Uint64
	for i := range free {
		free[i].Store(1 << 30)
	}
	c := newCrewWith(t, 3, s.Client(), func(cfg *Config) {
		var i int
		if _, err := fmt.Sscanf(cfg.Name, "m%d", &i); err != nil {
			t.Error(err)
		}
		cfg.Room = func() (uint64, uint64, error) { return free[i].Load(), 1 << 40, nil }
		cfg.RoomPath = "/disk-of-" + cfg.Name
	})
	at := func() (all []int) {
		for i, h := range c.hands {
			if o := h.srv.hosted.opened(1); o != nil && o.ctx.Err() == nil {
				all = append(all, i)
			}
		}
		return all
	}
	// settles waits until a server with room has the volume. (Its home may take the volume for a
	// moment, when a client asks there just as the volume is released.)
	settles := func() (to int) {
		t.Helper()
		eventually(t, "a server with room has the volume", func() error {
			now := at()
			if len(now) != 1 || free[now[0]].Load() < 1<<30 {
				return fmt.Errorf("it is at %v", now)
			}
			to = now[0]
			return nil
		})
		return to
	}
	c.hands[0].own(1)
	b := c.hands[0].busy("f")
	defer b.stop()
	b.more(t, 20)

	free[0].Store(roomSoft + 1) // changes are not refused yet
	second := settles()
	b.more(t, 20)
	b.mu.Lock()
	refused, failed, last := b.refused, b.failed, b.last
	b.mu.Unlock()
	if refused > 0 || failed > 0 {
		t.Errorf("%d changes were refused and %d failed although two servers have room: %v", refused, failed, last)
	}
	if h := c.hands[0].srv.health.Health(t.Context()); h.MetaDisk == nil || h.MetaDisk.Refusing || h.MetaDisk.Path != "/disk-of-m0" {
		t.Errorf("health of the one without room: %+v", h.MetaDisk)
	}

	// At once, to the last block.
	free[second].Store(1 << 10)
	third := settles()
	b.more(t, 20)

	free[third].Store(roomSoft / 8)
	p := c.hands[third].dial("p")
	n := 0
	eventually(t, "changes are refused when all are full", func() error {
		n++
		if err := p.try(t, newFile(fmt.Sprint("full", n))); !errors.Is(err, meta.NoSpace) {
			return fmt.Errorf("not refused: %w", err)
		}
		return nil
	})
	for range 20 {
		if now := at(); len(now) != 1 || now[0] != third {
			t.Fatalf("all servers are full, and the volume went from %d to %v", third, now)
		}
		time.Sleep(100 * time.Millisecond)
	}
	if h := c.hands[third].srv.health.Health(t.Context()); h.MetaDisk == nil || !h.MetaDisk.Refusing {
		t.Errorf("health of the owner: %+v", h.MetaDisk)
	}
	free[0].Store(1 << 30)
	settles()
	b.more(t, 20)
	b.stop()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, name := range b.names {
		if err := p.try(t, &meta.Lookup{Parent: meta.RootIno, Name: name}); err != nil {
			t.Errorf("DATA: %s was synced: %v", name, err)
		}
	}
}

// A volume that was handed away does not come back at once, and not for a moment of room.
func TestRoomlessRests(t *testing.T) {
	var r roomless
	r.look(1<<30, roomSoft)
	if r.rests(time.Hour) {
		t.Error("it never was short of room")
	}
	r.look(2*roomSoft-1, roomSoft)
	if !r.low.Load() {
		t.Error("there is room")
	}
	r.look(2*roomSoft+1, roomSoft)
	if !r.low.Load() {
		t.Error("a byte more is room: to and fro")
	}
	r.look(3*roomSoft, roomSoft)
	if r.low.Load() || !r.rests(time.Hour) || r.rests(0) {
		t.Error("it must rest for a while, and no longer")
	}
}
