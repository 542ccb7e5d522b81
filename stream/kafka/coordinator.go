package kafka

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
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
	epochs map[uint64]time.Time // of coordinations, with the time of the first request
	closed bool
	wg     sync.WaitGroup // of running timers
}

// coordinated is a group with waiting requests. Order of locks: committing, mu.
type coordinated struct {
	c     *coordinator
	epoch uint64    // of the coordination: see stream.Host.Coordinate
	since time.Time // when the process first served a group in the epoch
	// committing is held from the check of a commit until the commit is durable, so that a
	// later generation reads and writes offsets later.
	committing sync.Mutex

	mu      sync.Mutex
	machine *group.Group
	ticket  uint64
	waiting map[uint64]chan group.Answer
	timer   *time.Timer
	ended   bool
	owner   uint32              // user of the members, if the server asks for credentials
	clients map[string]clientOf // by member
}

// clientOf is the client of a member.
type clientOf struct {
	id, host string // for people
	commits  uint64 // number of the latest connection with a commit of the member
}

func (c *coordinator) init() {
	c.groups, c.epochs = map[string]*coordinated{}, map[uint64]time.Time{}
}

// group returns the group with a name if this gateway coordinates the group, or codeNotCoordinator
// for another gateway's group, or codeGroupDenied for another user's group. make adds a group that
// is not known; without make, an unknown group is nil.
func (s *Server) group(r *request, name string, make bool) (*coordinated, int16) {
	of, code := s.coordinate(r, name)
	if code != codeOK {
		return nil, code
	}
	g := s.groups.find(name, make, of.Epoch)
	if g == nil && make {
		return nil, codeCoordinatorLoading
	}
	if g != nil && !g.admit(r.as) {
		return nil, codeGroupDenied
	}
	return g, codeOK
}

// coordinate returns the coordination of a group by this gateway, or codeNotCoordinator for another
// gateway's group.
func (s *Server) coordinate(r *request, name string) (stream.Coordination, int16) {
	of := stream.Coordination{Group: name}
	h, err := s.cfg.Host(r.ctx)
	if err == nil {
		of.Epoch, err = h.Coordinate(r.ctx, name)
	}
	switch {
	case errors.Is(err, meta.NotOwner):
		return of, codeNotCoordinator
	case err != nil:
		s.cfg.Logger.Warn("kafka: a group can't be coordinated; its members try again", "group", name, "error", err)
		return of, codeCoordinatorLoading
	}
	return of, codeOK
}

// lateLocked reports whether a commit of a member may be older than commits that were made before: the
// member has committed on a later connection since. Bytes of a connection that the client has given up can
// arrive after the commits of the client's next connection.
func (g *coordinated) lateLocked(member string, conn uint64) bool {
	c, ok := g.clients[member]
	if ok && conn > c.commits {
		c.commits = conn
		g.clients[member] = c
	}
	return conn < c.commits
}

// of returns the coordination that the group is in.
func (g *coordinated) of(name string) stream.Coordination {
	return stream.Coordination{Group: name, Epoch: g.epoch}
}

// admit reports whether a client may use the group: a group with members belongs to the user of
// the first member, and user 0 may use all groups.
func (g *coordinated) admit(as *stream.Login) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.admitLocked(as, false)
}

// admitLocked is admit; with join, a group without members becomes the client's.
func (g *coordinated) admitLocked(as *stream.Login, join bool) bool {
	if as == nil {
		return true
	}
	u, err := as.User()
	if err != nil {
		return false
	}
	if g.machine.State() != group.Empty {
		return u.UID == 0 || u.UID == g.owner
	}
	if join {
		g.owner = u.UID
	}
	return true
}

// find returns a group, in an epoch of its coordination; make adds a group that is not known.
// A group of an earlier epoch is forgotten: another gateway may have coordinated the group
// since. find returns nil for an unknown group without make, for too many groups, and after
// close.
func (c *coordinator) find(name string, make bool, epoch uint64) *coordinated {
	c.mu.Lock()
	defer c.mu.Unlock()
	since := c.begunLocked(epoch)
	g := c.groups[name]
	if g != nil && g.epoch != epoch {
		delete(c.groups, name)
		g.end()
		g = nil
	}
	if g == nil && make && len(c.groups) < maxGroups && !c.closed {
		g = &coordinated{c: c, epoch: epoch, since: since, machine: group.New(groupConfig, firstGeneration(epoch)), waiting: map[uint64]chan group.Answer{}, clients: map[string]clientOf{}}
		c.groups[name] = g
	}
	return g
}

// forget ends groups that another gateway coordinates now.
func (c *coordinator) forget(of func(stream.Coordination) bool) {
	c.mu.Lock()
	var ended []*coordinated
	for name, g := range c.groups {
		if of(g.of(name)) {
			delete(c.groups, name)
			ended = append(ended, g)
		}
	}
	c.mu.Unlock()
	for _, g := range ended {
		g.end()
	}
}

// adoptFor is how long a coordinator takes members of the time before its coordination by the ids
// that they have.
const adoptFor = time.Minute

// adopts reports that a member whom the group does not know may be one of the coordinator before: the
// member must join again, and keeps its id.
func (g *coordinated) adopts(member string) bool {
	return member != "" && time.Since(g.since) < adoptFor
}

// unknown is the outcome of a request of a member whose group is not known: the group may be one of
// the coordinator before, which the member then joins again.
func (s *Server) unknown(r *request, name, member string) int16 {
	h, err := s.cfg.Host(r.ctx)
	if err == nil {
		var epoch uint64
		if epoch, err = h.Coordinate(r.ctx, name); err == nil && member != "" && time.Since(s.groups.begun(epoch)) < adoptFor {
			return codeRebalance
		}
	}
	if err != nil {
		return codeNotCoordinator
	}
	return codeUnknownMember
}

// maxEpochs bounds the remembered epochs; a process has at most 16 coordinations at a time.
const maxEpochs = 1000

// begun returns when the process first served a group in an epoch of a coordination.
func (c *coordinator) begun(epoch uint64) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.begunLocked(epoch)
}

func (c *coordinator) begunLocked(epoch uint64) time.Time {
	at, ok := c.epochs[epoch]
	if !ok {
		if len(c.epochs) >= maxEpochs {
			clear(c.epochs)
		}
		at = time.Now()
		c.epochs[epoch] = at
	}
	return at
}

// codeFor translates an outcome of a member's request other than Join: a member whom the group may
// have had under another coordinator joins again.
func (g *coordinated) codeFor(member string, c group.Code) int16 {
	if c == group.UnknownMember && g.adopts(member) {
		return codeRebalance
	}
	return codeOfGroup(c)
}

// firstGeneration is the generation before the first one of an epoch of a coordination: with the ids
// that members keep, no generation of an earlier epoch may be taken for one of this epoch.
func firstGeneration(epoch uint64) int32 { return int32(epoch&(1<<20-1)) << 10 }

// end stops the timer, and tells waiting members that another gateway may coordinate the group.
func (g *coordinated) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ended = true
	if g.timer != nil {
		g.timer.Stop()
		g.timer = nil
	}
	for ticket, ch := range g.waiting {
		ch <- group.Answer{Ticket: ticket, Code: group.NotCoordinator} // has room for the only answer
		delete(g.waiting, ticket)
	}
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
	if g.ended {
		return
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
	if g.ended {
		ch <- group.Answer{Ticket: ticket, Code: group.NotCoordinator}
	} else {
		g.waiting[ticket] = ch
		g.deliverLocked(run(ticket))
	}
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
