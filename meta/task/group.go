package task

import "sync"

// Group counts the goroutines and the users of something that is to be closed after the last of
// them. Unlike a sync.WaitGroup, a Group may grow from 0 while Wait is called: the goroutine of
// a connection or of a volume may begin work at the moment when its server stops. The zero
// value is an empty group.
type Group struct {
	mu    sync.Mutex
	n     int
	empty chan struct{} // closed when n becomes 0; nil: nobody waits
}

// Go runs f in a goroutine that belongs to the group until f returns.
func (g *Group) Go(f func()) {
	g.Hold()
	go func() {
		defer g.Release()
		f()
	}()
}

// Hold adds a user to the group. The user calls Release once.
func (g *Group) Hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n++
}

// Release ends a Hold.
func (g *Group) Release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.n--; g.n < 0 {
		panic("task: a group was released more often than held")
	}
	if g.n == 0 && g.empty != nil {
		close(g.empty)
		g.empty = nil
	}
}

// Wait waits until the group is empty. Work that begins while Wait waits is waited for; work
// that begins later is not, so that a caller with such work must ask Empty under the lock that
// new work needs.
func (g *Group) Wait() {
	for {
		g.mu.Lock()
		if g.n == 0 {
			g.mu.Unlock()
			return
		}
		if g.empty == nil {
			g.empty = make(chan struct{})
		}
		empty := g.empty
		g.mu.Unlock()
		<-empty
	}
}

// Empty reports whether the group has no goroutine and no user.
func (g *Group) Empty() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.n == 0
}
