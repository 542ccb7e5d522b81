package penstock

import (
	"bytes"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestLateDropTakesNoLease: a late drop must not take a lease that was granted meanwhile:
// the owner would not recall that lease any more, and a writer under it would overwrite
// newer bytes.
func TestLateDropTakesNoLease(t *testing.T) {
	for name, begin := range map[string]func(c *Client, v *Volume, ino meta.Ino) (drops int){
		"recall of what is not here": func(c *Client, v *Volume, ino meta.Ino) int {
			c.Recall(meta.Recall{Volume: v.id, Ino: ino}, func() {})
			return 1
		},
		"eviction, and a grant that it voids": func(c *Client, v *Volume, ino meta.Ino) int {
			// Simulates an operation in flight that was sent before the drop.
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
			case err = <-done: // before the drop: the order must not matter
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
				t.Errorf("DATA: the other client reads %q", got)
			}
			w.check()
		})
	}
}

// opener is a kernel above a client: the kernel calls f once when told to forget a file's pages.
type opener struct {
	kernel
	armed atomic.Bool
	f     func(ino meta.Ino)
}

func (o *opener) InvalData(_ meta.VolumeID, ino meta.Ino, _, _ int64) {
	if o.armed.Swap(false) {
		o.f(ino)
	}
}

// TestOpenedWhileEvicted: a file that is opened during its eviction stays in the table, and the
// owner still knows that this client has the file open, even if the lease of the open is recalled
// again: otherwise the owner would delete the file's bytes with the last name.
func TestOpenedWhileEvicted(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, a := open(t, w, Config{})
	n := &opener{}
	c, b := open(t, w, Config{Notify: n})
	ino := create(t, a, "f")
	write(t, a, ino, []byte("bytes"), 0)
	flushAll(t, a)
	if got := contents(t, b, ino); !bytes.Equal(got, []byte("bytes")) {
		t.Fatalf("DATA: %q", got)
	}
	b.atimes.send(b) // until the access time is sent, the inode stays
	n.f = func(i meta.Ino) {
		if i != ino {
			t.Errorf("inode %d is evicted", i)
		}
		if _, err := b.Open(t.Context(), &Call{}, ino, 0); err != nil {
			t.Error(err)
		}
		write(t, a, ino, []byte("BYTES"), 0) // recalls the lease
		flushAll(t, a)
	}
	n.armed.Store(true)
	// All evictable inodes are evicted; an inode used just now is spared once.
	c.table.mu.Lock()
	was := c.table.max
	c.table.max = 0
	in := c.table.m[inodeKey{b.id, ino}]
	c.table.mu.Unlock()
	for range 3 {
		c.table.evict(c.table.choose())
	}
	if n.armed.Swap(false) {
		t.Fatal("the file was not evicted: nothing is tested")
	}
	c.table.mu.Lock()
	c.table.max = was
	kept := c.table.m[inodeKey{b.id, ino}] == in && in != nil
	c.table.mu.Unlock()
	w.mu.Lock()
	_, counted := w.leases[ino][c.sess.(*fakeSession)]
	w.mu.Unlock()
	if !kept || !counted {
		t.Errorf("an open file is in the table: %v, the owner knows of it: %v", kept, counted)
	}
	if err := a.Unlink(t.Context(), &Call{}, meta.RootIno, "f", false); err != nil {
		t.Fatal(err)
	}
	b.Release(t.Context(), ino, 0)
	w.check()
}
