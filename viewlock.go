package penstock

import (
	"context"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/lock"
)

// viewLocks are the advisory locks on files of a view. No program can write there, but
// programs also use locks to coordinate other work. The locks hold within this client only;
// owners are not asked.
type viewLocks struct {
	mu    sync.Mutex
	table *lock.Table
	next  lock.Ticket
	waits map[lock.Ticket]chan struct{}
}

// with runs fn on the table and wakes the tickets that fn returns.
func (l *viewLocks) with(fn func(t *lock.Table) (woken []lock.Ticket)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.table == nil {
		l.table, l.waits = lock.New(), make(map[lock.Ticket]chan struct{})
	}
	for _, w := range fn(l.table) {
		close(l.waits[w])
		delete(l.waits, w)
	}
}

func (l *viewLocks) set(ctx context.Context, k meta.Lock, wait bool) error {
	var answer lock.Answer
	var err error
	var woken chan struct{}
	var ticket lock.Ticket
	l.with(func(t *lock.Table) []lock.Ticket {
		if wait {
			l.next++
			ticket = l.next
		}
		answer, err = t.Set(k, ticket)
		if wait && err == nil && !answer.Granted {
			woken = make(chan struct{})
			l.waits[ticket] = woken
		}
		return answer.Woken
	})
	if err != nil || woken == nil {
		return err
	}
	select {
	case <-woken:
		return nil
	case <-ctx.Done():
	}
	l.with(func(t *lock.Table) []lock.Ticket {
		if t.Cancel(ticket) {
			delete(l.waits, ticket)
			err = meta.E("lock", meta.Interrupted, "", context.Cause(ctx))
		}
		return nil
	})
	return err
}

func (l *viewLocks) get(k meta.Lock) meta.Lock {
	l.with(func(t *lock.Table) []lock.Ticket {
		if held, ok := t.Get(k); ok {
			k = held
		} else {
			k.Type = meta.LockUnlock
		}
		return nil
	})
	return k
}

func (l *viewLocks) drop(ino meta.Ino, owner uint64) {
	l.with(func(t *lock.Table) []lock.Ticket { return t.DropOwner(ino, 0, owner, false) })
}
