package penstock

import (
	"bytes"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// A drop that is sent late must not take a lease that was granted meanwhile:
// nobody would recall that one, and who writes under it overwrites newer bytes.
func TestLateDropTakesNoLease(t *testing.T) {
	for name, begin := range map[string]func(c *Client, v *Volume, ino meta.Ino) (drops int){
		"recall of what is not here": func(c *Client, v *Volume, ino meta.Ino) int {
			c.Recall(meta.Recall{Volume: v.id, Ino: ino}, func() {})
			return 1
		},
		"eviction, and a grant that it voids": func(c *Client, v *Volume, ino meta.Ino) int {
			// As if an operation were in flight that was sent before the drop.
			g := c.table.begin()
			c.table.mu.Lock()
			send := c.table.giveUpLocked(inodeKey{v.id, ino})
			c.table.mu.Unlock()
			if !send {
				t.Error("a round was under way")
			}
			c.spawn(func() {
				c.table.sendDrops()
				c.Granted(v.id, meta.Grant{Ino: ino, Mode: meta.LeaseShared})
				c.table.end(g)
			})
			return 2
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, meta.Policy{Replicas: 1})
			_, a := open(t, w, Config{})
			c, b := open(t, w, Config{})
			ino := create(t, a, "f")
			write(t, a, ino, []byte("old"), 0)
			flushAll(t, a)

			free := make(chan struct{})
			s := c.sess.(*fakeSession)
			s.dropping = func() { <-free }
			drops := begin(c, b, ino)
			done := make(chan error, 1)
			go func() {
				_, err := b.Open(t.Context(), &Call{}, ino, rdwr)
				if err == nil {
					_, err = b.Write(t.Context(), &Call{}, ino, []byte("mine"), 0, false, false)
				}
				done <- err
			}()
			var err error
			select {
			case err = <-done: // before the drop: it must not matter
				close(free)
			case <-time.After(100 * time.Millisecond):
				close(free)
				err = <-done
			}
			if err != nil {
				t.Fatal(err)
			}
			for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
				c.table.mu.Lock()
				over := c.table.dropping == nil
				c.table.mu.Unlock()
				w.mu.Lock()
				over = over && s.drops >= drops
				w.mu.Unlock()
				if over {
					break
				}
				if time.Now().After(end) {
					t.Fatal("the drops are not over")
				}
			}
			if got := contents(t, a, ino); !bytes.Equal(got, []byte("mine")) {
				t.Errorf("the other client reads %q", got)
			}
			w.check()
		})
	}
}
