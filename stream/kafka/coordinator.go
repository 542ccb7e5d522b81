package kafka

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"

	"penstock.io/penstock/stream/group"
)

// maxGroups bounds the groups of a coordinator.
const maxGroups = 10000

// groupConfig has the bounds of every group.
var groupConfig = group.Config{MinSession: 1000, MaxSession: 30 * 60 * 1000, InitialDelay: 300, MaxMembers: 10000}

// coordinator drives the machines of consumer groups. Members live in memory: after a restart
// members join again. Offsets lie in the streams.
type coordinator struct {
	mu     sync.Mutex
	groups map[string]*coordinated
	closed bool
	wg     sync.WaitGroup // of running timers
}

// coordinated is a group with waiting requests. Order of locks: committing, mu.
type coordinated struct {
	c *coordinator
	// committing is held from the check of a commit until the commit is durable, so that a
	// later generation reads and writes offsets later.
	committing sync.Mutex

	mu      sync.Mutex
	machine *group.Group
	ticket  uint64
	waiting map[uint64]chan group.Answer
	timer   *time.Timer
	clients map[string]clientOf // by member
}

// clientOf describes the client of a member, for people.
type clientOf struct{ id, host string }

func (c *coordinator) init() { c.groups = map[string]*coordinated{} }

// find returns a group; make adds a group that is not known. find returns nil for an unknown
// group without make, for too many groups, and after close.
func (c *coordinator) find(name string, make bool) *coordinated {
	c.mu.Lock()
	defer c.mu.Unlock()
	g := c.groups[name]
	if g == nil && make && len(c.groups) < maxGroups && !c.closed {
		g = &coordinated{c: c, machine: group.New(groupConfig, 0), waiting: map[uint64]chan group.Answer{}, clients: map[string]clientOf{}}
		c.groups[name] = g
	}
	return g
}

func (c *coordinator) close() {
	c.mu.Lock()
	c.closed = true
	groups := c.groups
	c.groups = nil
	c.mu.Unlock()
	for _, g := range groups {
		g.mu.Lock()
		if g.timer != nil {
			g.timer.Stop()
		}
		g.timer = nil
		g.mu.Unlock()
	}
	c.wg.Wait()
}

func now() int64 { return time.Now().UnixMilli() }

// deliverLocked answers waiting requests, and sets the timer.
func (g *coordinated) deliverLocked(answers []group.Answer) {
	for _, a := range answers {
		if ch := g.waiting[a.Ticket]; ch != nil {
			ch <- a // has room for the only answer
			delete(g.waiting, a.Ticket)
		}
	}
	at := g.machine.Deadline()
	if g.timer != nil {
		g.timer.Stop()
		g.timer = nil
	}
	if at == 0 {
		return
	}
	g.timer = time.AfterFunc(time.Duration(max(at-now(), 1))*time.Millisecond, g.tick)
}

func (g *coordinated) tick() {
	g.c.mu.Lock()
	if g.c.closed {
		g.c.mu.Unlock()
		return
	}
	g.c.wg.Add(1)
	g.c.mu.Unlock()
	defer g.c.wg.Done()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.deliverLocked(g.machine.Tick(now()))
}

// ask runs a request of the machine, and waits for the answer. ok is false if ctx
// ended first.
func (g *coordinated) ask(ctx context.Context, run func(ticket uint64) []group.Answer) (a group.Answer, ok bool) {
	ch := make(chan group.Answer, 1)
	g.mu.Lock()
	g.ticket++
	ticket := g.ticket
	g.waiting[ticket] = ch
	g.deliverLocked(run(ticket))
	g.mu.Unlock()
	select {
	case a := <-ch:
		return a, true
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.waiting, ticket)
		return group.Answer{}, false
	}
}

// newMember makes the id of a member.
func newMember(client string) string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	if len(client) > 100 {
		client = client[:100]
	}
	return client + "-" + hex.EncodeToString(b[:])
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}
