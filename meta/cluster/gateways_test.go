package cluster

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// A name keeps its number, another process can't have the name while the registration lasts, and a
// process that does not call any more is on the list no longer than its term.
func TestGateways(t *testing.T) {
	t.Parallel()
	c := GatewaysOf(join(t, client(t)))
	ctx := t.Context()
	a, lease, err := c.Register(ctx, Gateway{Name: "a", Instance: "1", Kafka: "h:1"}, 0)
	if err != nil || a.Number < 1 || lease == 0 {
		t.Fatal(a, lease, err)
	}
	b, _, err := c.Register(ctx, Gateway{Name: "b", Instance: "1", Number: a.Number}, 0)
	if err != nil || b.Number == a.Number {
		t.Fatal(b, err)
	}
	_, _, err = c.Register(ctx, Gateway{Name: "a", Instance: "2"}, 0)
	want(t, err, meta.Exists)
	for _, name := range []string{"", "x/y", "-x"} {
		_, _, err = c.Register(ctx, Gateway{Name: name, Instance: "1"}, 0)
		want(t, err, meta.Invalid)
	}
	_, _, err = c.Register(ctx, Gateway{Name: "c"}, 0)
	want(t, err, meta.Invalid)
	live := func(all bool) (s []string) {
		t.Helper()
		l, err := c.List(ctx, all)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range l {
			s = append(s, fmt.Sprint(g.Name, g.Number, g.Instance, g.Kafka))
		}
		return s
	}
	if s := live(false); !slices.Equal(s, []string{"a11h:1", "b21"}) {
		t.Error(s)
	}
	// A call with another address is the same process, at another address.
	if g, again, err := c.Register(ctx, Gateway{Name: "a", Instance: "1", Kafka: "h:2"}, lease); err != nil || again != lease || g.Since != a.Since {
		t.Error(g, again, err)
	}
	// Only the process itself ends its registration.
	if err := c.Unregister(ctx, "a", "2"); err != nil {
		t.Fatal(err)
	}
	if s := live(false); !slices.Equal(s, []string{"a11h:2", "b21"}) {
		t.Error(s)
	}
	for range 2 {
		if err := c.Unregister(ctx, "a", "1"); err != nil {
			t.Fatal(err)
		}
	}
	if s := live(true); !slices.Equal(s, []string{"a1", "b21"}) {
		t.Error(s)
	}
	if g, _, err := c.Register(ctx, Gateway{Name: "a", Instance: "3"}, lease); err != nil || g.Number != a.Number {
		t.Error("the name has another number:", g, err)
	}
	// A lease that has ended is replaced, and b, which does not call, goes.
	for deadline := time.Now().Add(2 * time.Minute); len(live(false)) > 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a gateway that is silent stays on the list")
		}
	}
	if g, again, err := c.Register(ctx, Gateway{Name: "a", Instance: "3"}, lease); err != nil || g.Number != a.Number || again == lease {
		t.Error(g, again, err)
	}
}

// Names that come at once get different numbers, and a name the same one from all servers.
func TestGatewayNumbers(t *testing.T) {
	t.Parallel()
	cli := client(t)
	c := GatewaysOf(join(t, cli))
	var mu sync.Mutex
	of := map[string]map[uint32]bool{}
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			name := fmt.Sprint("g", i%4)
			n, err := c.number(t.Context(), name)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			if of[name] == nil {
				of[name] = map[uint32]bool{}
			}
			of[name][n] = true
		})
	}
	wg.Wait()
	all := map[uint32]bool{}
	for name, numbers := range of {
		if len(numbers) != 1 {
			t.Errorf("%s has the numbers %v", name, numbers)
		}
		for n := range numbers {
			if all[n] || n < 1 {
				t.Errorf("the number %d was given twice", n)
			}
			all[n] = true
		}
	}
}
