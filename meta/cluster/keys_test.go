package cluster

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/cluster/embedded"
)

// testHold is the shortest lease of etcd.
const testHold = time.Second

// rotateNow rotates the capability keys whatever their age.
func rotateNow(ctx context.Context, c *Cluster) error {
	if _, err := c.cli.Delete(ctx, c.prefix+"/keyhold"); err != nil {
		return err
	}
	_, err := c.freshCapKeys(ctx, time.Now(), 0, testHold)
	return err
}

// letGo waits until no key is held.
func letGo(t *testing.T, c *Cluster) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		r, err := c.cli.Get(t.Context(), c.prefix+"/keyhold")
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Kvs) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the newest key is held for ever")
		}
	}
}

func newest(t *testing.T, c *Cluster) meta.CapKey {
	t.Helper()
	k, err := c.CapKeys(t.Context())
	if err != nil || len(k) == 0 {
		t.Fatal(k, err)
	}
	return k[len(k)-1]
}

// fresh asks for fresh keys at a time and reports whether a new key was made.
func fresh(t *testing.T, c *Cluster, now time.Time, every time.Duration) bool {
	t.Helper()
	return freshHeld(t, c, now, every, testHold)
}

func freshHeld(t *testing.T, c *Cluster, now time.Time, every, hold time.Duration) bool {
	t.Helper()
	was := newest(t, c)
	rotated, err := c.freshCapKeys(t.Context(), now, every, hold)
	if err != nil {
		t.Fatal(err)
	}
	if is := newest(t, c); (is.ID != was.ID) != rotated {
		t.Fatalf("rotated: %v, the newest was %d and is %d", rotated, was.ID, is.ID)
	}
	return rotated
}

// TestKeysRotateThoughEtcdRestarts: if etcd is restarted more often than keys are due,
// every lease begins anew, and keys are replaced all the same.
func TestKeysRotateThoughEtcdRestarts(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "etcd")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	const every = 24 * time.Hour
	now := time.Now()
	var rotated []int
	for half := range 7 {
		s, err := embedded.Start(embedded.Config{Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		c := join(t, s.Client())
		letGo(t, c)
		if fresh(t, c, now.Add(time.Duration(half)*every/2+time.Minute), every) {
			rotated = append(rotated, half)
		}
		c.Close()
		s.Close()
	}
	if len(rotated) != 3 || rotated[0] != 2 || rotated[1] != 4 || rotated[2] != 6 {
		t.Errorf("rotated after %v half days", rotated)
	}
}

// TestKeysRotateOnSchedule: of several servers that check the age of the capability keys,
// one rotates, and none before the time. A changed interval counts from the making of the
// newest key.
func TestKeysRotateOnSchedule(t *testing.T) {
	t.Parallel()
	cli := client(t)
	const every = 24 * time.Hour
	var all [4]*Cluster
	for i := range all {
		all[i] = join(t, cli)
	}
	c := all[0]
	newest(t, c)
	now := time.Now()
	for day := range 3 {
		letGo(t, c)
		if fresh(t, c, now.Add(every-time.Minute), every) {
			t.Fatal("rotated before it was due")
		}
		now = now.Add(every + time.Minute)
		var mu sync.Mutex
		var wg sync.WaitGroup
		n := 0
		for _, c := range all {
			wg.Go(func() {
				rotated, err := c.freshCapKeys(t.Context(), now, every, testHold)
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					t.Error(err)
				}
				if rotated {
					n++
				}
			})
		}
		wg.Wait()
		if n != 1 {
			t.Fatalf("day %d: %d rotated", day, n)
		}
	}
	keys, err := c.CapKeys(t.Context())
	if err != nil || len(keys) != keptKeys || keys[1].ID != 4 || keys[0].ID != 3 {
		t.Fatal(keys, err)
	}
	letGo(t, c)
	now = now.Add(3 * time.Hour)
	if fresh(t, c, now, 4*time.Hour) {
		t.Error("a shorter interval rotated before it was over")
	}
	if !fresh(t, c, now, 2*time.Hour) {
		t.Error("a shorter interval waits for the longer one")
	}
	leases, err := cli.Leases(t.Context())
	if err != nil || len(leases.Leases) > 1 {
		t.Errorf("leases are left: %v, %v", leases, err)
	}
	want(t, c.SetSettings(t.Context(), Settings{KeyLife: MinKeyLife - 1}), meta.Invalid)
	if MinKeyLife <= keyHold || keyHold <= capability.MaxLife {
		t.Errorf("keys stay for %v at least, are held for %v, and sign for %v", MinKeyLife, keyHold, capability.MaxLife)
	}
}

// TestKeysWithWrongClocks: whatever a server's clock shows, no key is dropped while its
// capabilities are valid, and no replacement is put off for longer than the interval.
func TestKeysWithWrongClocks(t *testing.T) {
	t.Parallel()
	c := join(t, client(t))
	const every = 24 * time.Hour
	newest(t, c)
	now, ahead := time.Now(), time.Now().AddDate(50, 0, 0)
	// This machine never stands still for as long as the hold.
	if !freshHeld(t, c, ahead, every, 10*time.Minute) {
		t.Fatal("50 years were not enough")
	}
	// Every server in turn, repeatedly: etcd counts the hold.
	for range 3 {
		for _, at := range []time.Time{now, ahead, now.AddDate(-50, 0, 0)} {
			if fresh(t, c, at, every) {
				t.Fatal("a key was dropped that signed a moment ago")
			}
		}
	}
	if fresh(t, c, now, every) {
		t.Fatal("rotated while the newest was held")
	}
	if _, err := c.cli.Delete(t.Context(), c.prefix+"/keyhold"); err != nil { // the end of the lease does the same
		t.Fatal(err)
	}
	// The server with the fast clock is gone, and the last check was by a right clock.
	if rotated := fresh(t, c, now.Add(every+time.Second), every); !rotated {
		t.Error("a clock that was wrong once puts off what is due")
	}
	if fresh(t, c, now.Add(every+time.Hour), every) {
		t.Error("rotated twice")
	}
}

// A record of a newer version is refused.
func TestNewerKeys(t *testing.T) {
	c := join(t, client(t))
	newest(t, c)
	put := func(v string) {
		t.Helper()
		if _, err := c.cli.Put(t.Context(), c.prefix+"/capkeys", v); err != nil {
			t.Fatal(err)
		}
	}
	put(`{"v":2,"keys":[]}`)
	if _, err := c.FreshCapKeys(t.Context(), time.Hour); meta.KindOf(err) != meta.Version {
		t.Errorf("a record of a newer program: %v", err)
	}
}
