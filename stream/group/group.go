// Package group is the state machine of a consumer group: its members, their leader, the
// assignment of each member, and the times of rebalances. The rules are the rules of Kafka's
// classic group protocol with static members (KIP-345) and known member ids (KIP-394), so that
// every Kafka client is served.
//
//	          first member joins                  all members have joined,
//	+-------+ ------------------> +-----------+   or the time is over      +------------+
//	| Empty |                     | Preparing | -------------------------> | Completing |
//	+-------+ <------------------ +-----------+ <------------------------- +------------+
//	          no member joined      ^       ^     a member joins or goes         |
//	                                |       |                                    | the leader sends
//	              a member joins or |       |                                    | the assignments
//	              goes              |     +--------+                             |
//	                                +-----| Stable | <---------------------------+
//	                                      +--------+
//
// The package is pure. Every method takes the time, and returns the answers that are due now.
// A waiting request is identified by the caller's ticket, and answered in the result of a
// later call. The caller calls Tick at the time returned by Deadline.
package group

import (
	"bytes"
	"maps"
	"slices"
)

// Code is the outcome of a request. The names are the Kafka protocol's.
type Code uint8

// The outcomes.
const (
	OK Code = iota
	UnknownMember
	IllegalGeneration
	RebalanceInProgress
	InconsistentProtocol
	MemberIDRequired
	FencedInstance
	GroupMaxSize
	InvalidSessionTimeout
	// NotCoordinator is never an answer of a Group: the caller answers so when another process
	// coordinates the group.
	NotCoordinator
)

// State is the state of a group.
type State uint8

const (
	// Empty: the group has no members. Offsets may exist.
	Empty State = iota
	// Preparing: the group waits for its members to join.
	Preparing
	// Completing: the group has a new generation and waits for the leader's assignments.
	Completing
	// Stable: every member has an assignment.
	Stable
)

// Config has the bounds of a group. Times are in milliseconds.
type Config struct {
	// MinSession and MaxSession bound the session timeout of a member.
	MinSession, MaxSession int64
	// InitialDelay is how long an empty group waits for further members after the first.
	InitialDelay int64
	// MaxMembers bounds the members; 0: no bound.
	MaxMembers int
}

// Protocol is a way to assign partitions supported by a member, and the member's metadata for
// the protocol.
type Protocol struct {
	Name     string
	Metadata []byte
}

// JoinRequest asks for membership. Times are in milliseconds.
type JoinRequest struct {
	Member    string // "": a new member
	Instance  string // of a static member; "": a dynamic member
	NewID     string // the id of an admitted new member, drawn by the caller
	Session   int64  // the group removes a member after such a silence
	Rebalance int64  // time for joining when the group rebalances
	Type      string // of the protocols, such as "consumer"
	Protocols []Protocol
	// KnownID: the client can repeat the request with the id from the answer, so that a lost
	// answer leaves no member behind (KIP-394).
	KnownID bool
	// Adopt: an unknown member may be one of the group before this Group was made. The member is
	// admitted by its id.
	Adopt bool
}

// Answer ends a request.
type Answer struct {
	Ticket uint64
	Code   Code
	// Of Join, and for Member also with MemberIDRequired:
	Generation int32
	Protocol   string
	Leader     string
	Member     string
	Members    []Member // for the leader only
	// SkipAssignment: the leader's next incarnation replaced the leader and must assign
	// nothing, since the assignments stay valid.
	SkipAssignment bool
	// Of Sync:
	Assignment []byte
}

// Member is a member in the leader's view.
type Member struct {
	ID, Instance string
	Metadata     []byte
}

// Group is the state of a group. The zero value is not valid; call New.
//
// INVARIANT: see Consistent.
type Group struct {
	cfg        Config
	state      State
	generation int32
	typ        string // type of the members' protocols; "": no member has joined yet
	protocol   string // chosen for the generation
	leader     string // id
	members    map[string]*member
	order      []string          // ids in the order of joining
	instances  map[string]string // ids of static members
	pending    map[string]int64  // ids given to clients and not used yet, with their expiry
	until      int64             // Preparing: when joining ends; Completing: when missing syncs count
	latest     int64             // Preparing from Empty: joining ends at this time at the latest
}

type member struct {
	id, instance string
	session      int64
	rebalance    int64
	protocols    []Protocol
	alive        int64  // the last sign of life
	join         uint64 // ticket of a waiting Join; 0: none
	sync         uint64 // ticket of a waiting Sync; 0: none
	synced       bool   // Completing: the member has sent Sync
	assignment   []byte
}

// New makes an empty group. generation is the last generation of the group's earlier life, or
// 0 for a new group: a generation's number is never reused.
func New(cfg Config, generation int32) *Group {
	return &Group{
		cfg: cfg, generation: generation,
		members: map[string]*member{}, instances: map[string]string{}, pending: map[string]int64{},
	}
}

// State returns the state of the group.
func (g *Group) State() State { return g.state }

// Generation returns the number of the last generation.
func (g *Group) Generation() int32 { return g.generation }

// Type returns the type of the members' protocols; "" if the group never had any.
func (g *Group) Type() string { return g.typ }

// Protocol returns the protocol of the present generation; "" without a generation.
func (g *Group) Protocol() string { return g.protocol }

// Leader returns the id of the leader; "" if the group has none.
func (g *Group) Leader() string { return g.leader }

// Members lists the members in the order of joining, each member with its metadata for the
// protocol of the present generation.
func (g *Group) Members() []Member {
	var l []Member
	for _, id := range g.order {
		m := g.members[id]
		l = append(l, Member{ID: id, Instance: m.instance, Metadata: m.metadata(g.protocol)})
	}
	return l
}

// Assignment returns the assignment of a member in the present generation.
func (g *Group) Assignment(id string) []byte {
	if m := g.members[id]; m != nil {
		return m.assignment
	}
	return nil
}

// Join adds a member, or lets a member join the next generation. The request is answered now,
// or by a later call when the group has a new generation.
func (g *Group) Join(now int64, ticket uint64, q JoinRequest) []Answer {
	if q.Session < g.cfg.MinSession || q.Session > g.cfg.MaxSession {
		return refuse(ticket, InvalidSessionTimeout, q.Member)
	}
	_, wasPending := g.pending[q.Member]
	m := g.members[q.Member]
	if q.Instance != "" {
		id, known := g.instances[q.Instance]
		switch {
		case q.Member == "" && known:
			m = g.members[id]
		case q.Member != "" && known && id != q.Member:
			return refuse(ticket, FencedInstance, q.Member)
		case q.Member != "" && !known && !q.Adopt:
			return refuse(ticket, UnknownMember, q.Member)
		}
	}
	if q.Member != "" && m == nil && !wasPending && !q.Adopt {
		return refuse(ticket, UnknownMember, q.Member)
	}
	if m == nil && g.cfg.MaxMembers > 0 && len(g.members) >= g.cfg.MaxMembers {
		delete(g.pending, q.Member)
		return refuse(ticket, GroupMaxSize, q.Member)
	}
	if len(q.Protocols) == 0 || q.Type == "" || !g.supports(&q, m) {
		return refuse(ticket, InconsistentProtocol, q.Member)
	}
	switch {
	case m != nil && q.Member == "":
		return g.replace(now, ticket, m, &q)
	case m != nil:
		return g.rejoin(now, ticket, m, &q)
	case q.Member == "" && q.Instance == "" && q.KnownID:
		g.pending[q.NewID] = now + q.Session
		return []Answer{{Ticket: ticket, Code: MemberIDRequired, Member: q.NewID}}
	}
	id := q.Member
	if id == "" {
		id = q.NewID
	}
	delete(g.pending, id)
	m = &member{id: id, instance: q.Instance}
	g.members[id] = m
	g.order = append(g.order, id)
	if q.Instance != "" {
		g.instances[q.Instance] = id
	}
	g.typ = q.Type
	m.take(now, ticket, &q)
	return g.prepare(now)
}

// take records the member's settings in the request, and its ticket as waiting for a
// generation.
func (m *member) take(now int64, ticket uint64, q *JoinRequest) {
	m.session, m.rebalance, m.protocols, m.alive = q.Session, q.Rebalance, q.Protocols, now
	m.join = ticket
}

// rejoin handles the Join of a present member.
func (g *Group) rejoin(now int64, ticket uint64, m *member, q *JoinRequest) []Answer {
	m.alive = now
	same := slices.EqualFunc(m.protocols, q.Protocols, func(a, b Protocol) bool {
		return a.Name == b.Name && bytes.Equal(a.Metadata, b.Metadata)
	})
	switch {
	case g.state == Completing && same, g.state == Stable && same && m.id != g.leader:
		// The answer to the member's last Join was lost, or the member repeats Join without
		// need.
		return []Answer{g.joined(m, ticket)}
	}
	var l []Answer
	if m.join != 0 { // the client has sent the request again
		l = refuse(m.join, RebalanceInProgress, m.id)
	}
	m.take(now, ticket, q)
	return append(l, g.prepare(now)...)
}

// replace gives a static member's place to the member's next incarnation. replace refuses the
// waiting requests of the previous incarnation; its later requests are refused, too.
func (g *Group) replace(now int64, ticket uint64, m *member, q *JoinRequest) []Answer {
	var l []Answer
	for _, t := range []uint64{m.join, m.sync} {
		if t != 0 {
			l = append(l, refuse(t, FencedInstance, m.id)...)
		}
	}
	was := *m
	delete(g.members, m.id)
	g.order[slices.Index(g.order, m.id)] = q.NewID
	m.id, m.join, m.sync = q.NewID, 0, 0
	g.members[m.id], g.instances[m.instance] = m, m.id
	if g.leader == was.id {
		g.leader = m.id
	}
	m.take(now, 0, q)
	if g.state == Stable && g.vote() == g.protocol && bytes.Equal(was.metadata(g.protocol), m.metadata(g.protocol)) {
		// The assignment stays valid, so that a restart moves no partition.
		a := g.joined(m, ticket)
		a.SkipAssignment = m.id == g.leader
		return append(l, a)
	}
	m.join = ticket
	return append(l, g.prepare(now)...)
}

// supports reports whether the request has the type of all members but except, and a protocol
// supported by all of these members.
func (g *Group) supports(q *JoinRequest, except *member) bool {
	others := 0
	for _, m := range g.members { // in any order
		if m != except {
			others++
		}
	}
	if others == 0 {
		return true
	}
	return q.Type == g.typ && slices.ContainsFunc(q.Protocols, func(p Protocol) bool {
		for _, m := range g.members { // in any order
			if m != except && !m.supports(p.Name) {
				return false
			}
		}
		return true
	})
}

func (m *member) supports(name string) bool {
	return slices.ContainsFunc(m.protocols, func(p Protocol) bool { return p.Name == name })
}

func (m *member) metadata(name string) []byte {
	for _, p := range m.protocols {
		if p.Name == name {
			return p.Metadata
		}
	}
	return nil
}

// vote returns the protocol preferred by most members, of the protocols supported by all
// members; in a tie, the first protocol by name.
func (g *Group) vote() string {
	votes := map[string]int{}
	for _, m := range g.members {
		for _, p := range m.protocols {
			all := true
			for _, o := range g.members {
				all = all && o.supports(p.Name)
			}
			if all {
				votes[p.Name]++
				break
			}
		}
	}
	best := ""
	for _, name := range slices.Sorted(maps.Keys(votes)) {
		if best == "" || votes[name] > votes[best] {
			best = name
		}
	}
	return best
}

// prepare begins or continues a rebalance, and completes the joining if no member is missing.
func (g *Group) prepare(now int64) []Answer {
	var l []Answer
	longest := int64(0)
	for _, id := range g.order {
		longest = max(longest, g.members[id].rebalance)
	}
	switch g.state {
	case Empty:
		g.until = now + g.cfg.InitialDelay
		g.latest = now + max(longest, g.cfg.InitialDelay)
	case Preparing:
		if g.latest > 0 && g.cfg.InitialDelay > 0 { // still gathering the first members
			g.until = min(now+g.cfg.InitialDelay, g.latest)
		}
	case Completing, Stable:
		for _, id := range g.order {
			if m := g.members[id]; m.sync != 0 {
				l = append(l, refuse(m.sync, RebalanceInProgress, id)...)
				m.sync, m.alive = 0, now // the member's session timeout starts at the answer
			}
		}
		g.until, g.latest = now+longest, 0
	}
	g.state = Preparing
	return append(l, g.mayComplete(now)...)
}

// mayComplete ends the joining if all members have joined, or the time is over.
func (g *Group) mayComplete(now int64) []Answer {
	if g.state != Preparing {
		return nil
	}
	if g.latest > 0 && now < g.until {
		return nil
	}
	missing := len(g.pending) > 0
	for _, m := range g.members { // in any order
		missing = missing || m.join == 0
	}
	if missing && now < g.until {
		return nil
	}
	return g.complete(now)
}

// complete begins the next generation with the joined members. A static member that has not
// joined stays until its session ends.
func (g *Group) complete(now int64) []Answer {
	joined := 0
	for _, id := range slices.Clone(g.order) {
		m := g.members[id]
		if m.join != 0 {
			joined++
		} else if m.instance == "" {
			g.remove(m)
		}
	}
	if joined == 0 && len(g.members) > 0 {
		// Only static members are left, and no member has joined: wait for the end of the
		// sessions.
		longest := int64(0)
		for _, m := range g.members { // in any order
			longest = max(longest, m.rebalance)
		}
		g.until, g.latest = now+max(longest, 1), 0
		return nil
	}
	g.generation++
	if len(g.members) == 0 {
		g.state, g.protocol, g.leader = Empty, "", ""
		return nil
	}
	g.state, g.protocol = Completing, g.vote()
	g.until, g.latest = now, 0
	if m := g.members[g.leader]; m == nil || m.join == 0 {
		for _, id := range g.order {
			if g.members[id].join != 0 {
				g.leader = id
				break
			}
		}
	}
	var l []Answer
	for _, id := range g.order {
		m := g.members[id]
		m.assignment, m.synced = nil, false
		g.until = max(g.until, now+m.rebalance)
		if m.join != 0 {
			l = append(l, g.joined(m, m.join))
			m.join, m.alive = 0, now
		}
	}
	return l
}

// joined is the answer to a member's Join in the present generation.
func (g *Group) joined(m *member, ticket uint64) Answer {
	a := Answer{Ticket: ticket, Generation: g.generation, Protocol: g.protocol, Leader: g.leader, Member: m.id}
	if m.id == g.leader {
		a.Members = g.Members()
	}
	return a
}

// Sync requests a member's assignment. The leader's Sync has the assignments of all members,
// by id; a member missing in assignments gets an empty assignment.
func (g *Group) Sync(now int64, ticket uint64, generation int32, id, instance string, assignments map[string][]byte) []Answer {
	m, code := g.find(id, instance)
	if code == OK && generation != g.generation {
		code = IllegalGeneration
	}
	if code == OK && g.state == Preparing {
		code = RebalanceInProgress
	}
	if code != OK {
		return refuse(ticket, code, id)
	}
	m.alive = now
	if g.state == Stable {
		return []Answer{{Ticket: ticket, Member: id, Generation: generation, Protocol: g.protocol, Assignment: m.assignment}}
	}
	var l []Answer
	if m.sync != 0 { // the client has sent the request again
		l = refuse(m.sync, RebalanceInProgress, id)
	}
	m.sync, m.synced = ticket, true
	if id != g.leader {
		return l
	}
	g.state = Stable
	for _, id := range g.order {
		m := g.members[id]
		if m.assignment = assignments[id]; m.assignment == nil {
			m.assignment = []byte{}
		}
		if m.sync != 0 {
			l = append(l, Answer{Ticket: m.sync, Member: id, Generation: generation, Protocol: g.protocol, Assignment: m.assignment})
			m.sync, m.alive = 0, now
		}
	}
	return l
}

// find returns the member named in a request by id and, for a static member, instance.
func (g *Group) find(id, instance string) (*member, Code) {
	if instance != "" {
		if known, ok := g.instances[instance]; ok && known != id {
			return nil, FencedInstance
		}
	}
	m := g.members[id]
	if m == nil {
		return nil, UnknownMember
	}
	return m, OK
}

// Heartbeat records a member's sign of life. After RebalanceInProgress the member must join
// again.
func (g *Group) Heartbeat(now int64, generation int32, id, instance string) Code {
	if until, ok := g.pending[id]; ok && until > now {
		return OK
	}
	m, code := g.find(id, instance)
	switch {
	case code != OK:
		return code
	case generation != g.generation:
		return IllegalGeneration
	}
	m.alive = now
	if g.state == Preparing {
		return RebalanceInProgress
	}
	return OK
}

// MayCommit reports whether a member may commit offsets now. A request with a negative
// generation and without an id comes from a consumer outside the group, which may commit only
// while the group is empty.
func (g *Group) MayCommit(now int64, generation int32, id, instance string) Code {
	if generation < 0 && id == "" && instance == "" {
		if g.state == Empty {
			return OK
		}
		return UnknownMember
	}
	m, code := g.find(id, instance)
	switch {
	case code != OK:
		return code
	case generation != g.generation:
		return IllegalGeneration
	case g.state == Completing:
		return RebalanceInProgress
	}
	m.alive = now
	return OK
}

// Leave removes a member by id, or a static member by instance.
func (g *Group) Leave(now int64, id, instance string) (Code, []Answer) {
	if id == "" && instance != "" {
		id = g.instances[instance]
	}
	if _, ok := g.pending[id]; ok {
		delete(g.pending, id)
		return OK, g.mayComplete(now)
	}
	m, code := g.find(id, instance)
	if code != OK {
		return code, nil
	}
	return OK, g.gone(now, m)
}

// gone removes a member and rebalances the others.
func (g *Group) gone(now int64, m *member) []Answer {
	var l []Answer
	for _, t := range []uint64{m.join, m.sync} {
		if t != 0 {
			l = append(l, refuse(t, UnknownMember, m.id)...)
		}
	}
	g.remove(m)
	if g.state == Preparing {
		return append(l, g.mayComplete(now)...)
	}
	return append(l, g.prepare(now)...)
}

func (g *Group) remove(m *member) {
	delete(g.members, m.id)
	g.order = slices.DeleteFunc(g.order, func(id string) bool { return id == m.id })
	if m.instance != "" {
		delete(g.instances, m.instance)
	}
	if g.leader == m.id {
		g.leader = ""
	}
}

// ends returns the time at which Tick removes a silent member; 0: a request of the member
// waits for an answer of the group, so the member's session does not end.
func (g *Group) ends(m *member) int64 {
	if m.join != 0 || m.sync != 0 {
		return 0
	}
	return m.alive + m.session
}

// Deadline returns the time at which Tick has something to do; 0: never.
func (g *Group) Deadline() int64 {
	next := int64(0)
	at := func(t int64) {
		if t > 0 && (next == 0 || t < next) {
			next = t
		}
	}
	if g.state == Preparing || g.state == Completing {
		at(g.until)
	}
	for _, m := range g.members { // in any order
		at(g.ends(m))
	}
	for _, until := range g.pending { // in any order
		at(until)
	}
	return next
}

// Tick removes silent members, and ends expired waits.
func (g *Group) Tick(now int64) []Answer {
	var l []Answer
	maps.DeleteFunc(g.pending, func(_ string, until int64) bool { return until <= now })
	for _, id := range slices.Clone(g.order) {
		if m := g.members[id]; m != nil {
			if end := g.ends(m); end > 0 && end <= now {
				l = append(l, g.gone(now, m)...)
			}
		}
	}
	if g.state == Completing && now >= g.until {
		// The leader, or members before the leader could answer them, have not sent Sync in
		// time.
		for _, id := range slices.Clone(g.order) {
			if m := g.members[id]; m != nil && g.state == Completing && !m.synced {
				l = append(l, g.gone(now, m)...)
			}
		}
		if g.state == Completing {
			l = append(l, g.prepare(now)...)
		}
	}
	return append(l, g.mayComplete(now)...)
}

func refuse(ticket uint64, code Code, id string) []Answer {
	return []Answer{{Ticket: ticket, Code: code, Member: id, Generation: -1}}
}
