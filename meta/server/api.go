package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// The administrative API (package meta/admin) is gRPC on the port of the frames. The first
// bytes of a connection select gRPC or frames: HTTP/2 begins with "PRI ", which as the length
// of a frame would be beyond every bound. The caller's identity is the identity in the
// connection's certificate; no session is opened.
//
// Every call takes the same path (call): admit applies the method's rule from the service
// definition. Then this server does the call or, if another server must do it, passes the call
// on to that server. So every server answers every call.

// api serves the administrative API.
type api struct {
	s     *Server
	grpc  *grpc.Server
	conns chan net.Conn // for Accept
	peers *peerClients
	done  atomic.Uint64 // calls handed to their method here, failed calls included
}

// newAPI makes the API of a server. The API serves from run on.
func newAPI(s *Server) *api {
	a := &api{s: s, conns: make(chan net.Conn), peers: &peerClients{creds: s.cfg.Creds, at: map[peerConn]*admin.Client{}}}
	a.grpc = grpc.NewServer(
		grpc.Creds(knownCaller{}),
		grpc.UnaryInterceptor(a.call),
		grpc.StreamInterceptor(a.stream),
		grpc.WaitForHandlers(true),
		grpc.MaxRecvMsgSize(admin.MaxMessage), grpc.MaxSendMsgSize(admin.MaxMessage),
		grpc.MaxConcurrentStreams(maxCalls),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: admin.PingEvery / 2}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Minute, Timeout: 20 * time.Second}),
	)
	admin.RegisterNodesServer(a.grpc, nodesAPI{s: s})
	admin.RegisterHealthServer(a.grpc, healthAPI{s: s})
	admin.RegisterSnapshotsServer(a.grpc, snapshotsAPI{s: s})
	admin.RegisterGrantsServer(a.grpc, grantsAPI{s: s})
	admin.RegisterVolumesServer(a.grpc, volumesAPI{s: s})
	admin.RegisterEventsServer(a.grpc, eventsAPI{s: s})
	admin.RegisterMirrorsServer(a.grpc, mirrorsAPI{s: s})
	admin.RegisterClonesServer(a.grpc, clonesAPI{s: s})
	admin.RegisterGroupsServer(a.grpc, groupsAPI{s: s})
	admin.RegisterEnrolmentServer(a.grpc, enrolmentAPI{s: s})
	admin.RegisterGatewaysServer(a.grpc, gatewaysAPI{s: s})
	reflection.Register(a.grpc)
	return a
}

// maxCalls bounds the running calls of a connection; further calls wait. A server may pass on
// the waiting calls of so many followers of events.
const maxCalls = 1000

// run serves until the server ends. It returns when no call is running any more.
func (a *api) run() {
	stop := context.AfterFunc(a.s.ctx, a.grpc.Stop)
	defer stop()
	if err := a.grpc.Serve(a); err != nil && a.s.ctx.Err() == nil {
		a.s.log.Error("the administrative API has ended on this server: restart the server", "error", err)
	}
	a.grpc.Stop() // waits for calls
	a.peers.close()
}

// Accept, Close and Addr make api the net.Listener of the API's gRPC server.
func (a *api) Accept() (net.Conn, error) {
	select {
	case c := <-a.conns:
		return c, nil
	case <-a.s.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close does nothing: Accept ends with the server.
func (a *api) Close() error { return nil }

// Addr is used in logs.
func (a *api) Addr() net.Addr { return &net.UnixAddr{Name: a.s.cfg.Addr, Net: "penstock"} }

// http2 begins every HTTP/2 connection.
const http2 = "PRI "

// speaksHTTP2 peeks at the first bytes of a connection. It leaves an error of the connection
// to the next read.
func speaksHTTP2(rd *wire.Reader) bool {
	b, err := rd.Peek(len(http2))
	return err == nil && string(b) == http2
}

// serve passes a connection to the gRPC server, and returns when the connection has ended.
func (a *api) serve(conn net.Conn, rd *wire.Reader, who peering.Identity) {
	if !who.Anyone() && who.Role == "" {
		a.s.refusals.Warn(a.s.log, "a connection was refused", "error", meta.E("call", meta.AccessDenied, who.String(), errors.New("it showed no certificate")))
		return
	}
	conn.SetDeadline(time.Time{})
	if !who.Expires.IsZero() {
		defer time.AfterFunc(time.Until(who.Expires), func() { conn.Close() }).Stop()
		defer a.s.enrolment.certs.shown(who)()
	}
	c := &calling{Conn: conn, rest: rd.Rest(), closed: make(chan struct{}), caller: caller{
		sess: &session{srv: a.s, ctx: a.s.ctx, who: who, role: wire.RoleAdmin, name: who.String(), pace: a.s.clients.paces.of(who)},
	}}
	select {
	case a.conns <- c:
		<-c.closed
	case <-a.s.ctx.Done():
	}
}

// askerOf returns a session of the identity that makes a call: the caller, or the original
// caller if another server passed the call on. The session serves to look up rights.
func (s *Server) askerOf(ctx context.Context) *session {
	sess := callerOf(ctx)
	from := passer(ctx, sess.who)
	if from == "" {
		return sess
	}
	var who peering.Identity
	switch from {
	case peering.Identity{Local: true}.String():
		who.Local = true
	case peering.Identity{Insecure: true}.String():
		who.Insecure = true
	default:
		role, name, _ := strings.Cut(from, "/")
		who = peering.Identity{Cluster: sess.who.Cluster, Role: peering.Role(role), Name: name}
	}
	return &session{srv: s, ctx: s.ctx, who: who, role: wire.RoleAdmin, name: from}
}

// administers reports whether a session may administer a volume.
func (s *session) administers(v meta.VolumeID) bool {
	return s.who.Anyone() || slices.Contains(admins, s.who.Role) || s.access(v).Rights >= cluster.AdminRights
}

// call handles every call except reflection.
func (a *api) call(ctx context.Context, request any, info *grpc.UnaryServerInfo, do grpc.UnaryHandler) (any, error) {
	sess := callerOf(ctx)
	m := admin.MethodOf(info.FullMethod)
	if m == nil {
		return nil, admin.StatusOf(meta.E("call", meta.NotSupported, info.FullMethod, nil))
	}
	from := passer(ctx, sess.who)
	sess.hold(ctx, 1)
	if err := a.admit(ctx, sess, m, request.(proto.Message)); err != nil {
		a.s.stats.refused.Add(1)
		return nil, admin.StatusOf(err)
	}
	m.NameRequest(request.(proto.Message)) // so that the request can be sent several times
	answer, err := a.doOrPass(ctx, sess, m, request.(proto.Message), from != "", do)
	return answer, admin.StatusOf(err)
}

// stream admits calls of reflection, which lists the services for every caller with a
// certificate.
func (a *api) stream(srv any, st grpc.ServerStream, info *grpc.StreamServerInfo, do grpc.StreamHandler) error {
	sess := callerOf(st.Context())
	if m := admin.MethodOf(info.FullMethod); m != nil {
		return admin.StatusOf(meta.E("call", meta.NotSupported, info.FullMethod, errors.New("no rule is applied to streams yet")))
	}
	sess.hold(st.Context(), 1)
	if err := a.s.enrolment.mayConnect(sess.who, wire.RoleEnrol); err != nil {
		return admin.StatusOf(err)
	}
	return do(srv, st)
}

// admit refuses a call that the caller has no right to make, or that this server can't answer
// now. Errors: AccessDenied, Unavailable.
func (a *api) admit(ctx context.Context, sess *session, m *admin.Method, request proto.Message) error {
	if err := a.s.enrolment.mayConnect(sess.who, wire.RoleEnrol); err != nil { // the caller may have been evicted
		return err
	}
	if _, lost := a.s.cfg.Cluster.(*lostCluster); lost && !m.WhileRestoring {
		return beingRestored()
	}
	switch {
	case a.s.stops():
		return admin.NotBegun(a.s.cfg.Name, errStopping)
	case sess.who.Role != peering.Meta && a.s.hosted.grant() <= 0:
		return admin.NotBegun(a.s.cfg.Name, errors.New("this server has no lease at etcd"))
	}
	return a.mayCall(ctx, sess, m, request)
}

// mayCall applies a method's rule. Errors: AccessDenied.
func (a *api) mayCall(ctx context.Context, sess *session, m *admin.Method, request proto.Message) error {
	if sess.who.Anyone() || a.s.cfg.Unsafe.NoRules || slices.Contains(m.Rule.Roles, admin.RoleOf(sess.who.Role)) {
		return nil
	}
	refused := meta.E("call", meta.AccessDenied, sess.who.String(), fmt.Errorf("%s is not for its role", m.Name))
	right := cluster.Rights(m.Rule.Right) // see TestRightsAreThoseOfGrants
	if right == cluster.NoRights || !sess.who.Role.Granted() {
		return refused
	}
	volumes, err := a.volumesOf(ctx, request)
	if err != nil || len(volumes) == 0 {
		return refused // don't reveal whether the volume or the group exists
	}
	enough := func() error {
		for _, v := range volumes {
			if err := sess.enough(sess.access(v), v, right); err != nil {
				return err
			}
		}
		return nil
	}
	if err = enough(); err == nil {
		return nil
	}
	// The grant may have been made a moment ago, through another server.
	look, cancel := context.WithTimeout(ctx, currentWait)
	defer cancel()
	if _, lerr := a.s.cfg.Cluster.Current(look); lerr != nil {
		return err
	}
	return enough()
}

// volumesOf returns the volumes on which a request needs the right of its rule. Errors:
// NoSuchVolume (of a name), NotFound (of a group).
func (a *api) volumesOf(ctx context.Context, request proto.Message) (volumes []meta.VolumeID, err error) {
	if volumes, err = a.s.catalogue.numbersOf(ctx, admin.VolumesOf(request)); err != nil {
		return nil, err
	}
	for _, ref := range admin.GroupsOf(request) {
		g, err := a.s.cfg.Cluster.Group(ctx, ref.Name)
		if err != nil {
			return nil, err
		}
		volumes = append(volumes, g.Volumes()...)
	}
	return volumes, nil
}

// passWait bounds the search for the server that must do a call: the call's volume may be
// changing its owner.
const passWait = 30 * time.Second

// doOrPass does a call here or, if another server must do it, passes the call on. It does not
// pass on a call already passed on: the first server goes on searching.
func (a *api) doOrPass(ctx context.Context, sess *session, m *admin.Method, request proto.Message, passed bool, do grpc.UnaryHandler) (any, error) {
	began, wait := time.Now(), 10*time.Millisecond
	begun := false // by a server that could not finish the call
	for {
		answer, err := do(ctx, request)
		a.done.Add(1)
		for hops := 0; !passed && hops < 4; hops++ {
			at, only := atServer(err)
			if at == "" || at == a.s.cfg.Addr {
				break
			}
			answer, err = a.pass(ctx, sess, m, request, at)
			if only {
				return answer, err
			}
			begun = true
		}
		if begun && m.DoneBefore(err) {
			return m.NewAnswer(), nil
		}
		begun = begun || errors.Is(err, meta.NotOwner) || admin.IsUnanswered(err)
		// The server named by the error may be gone, and another may own the volume by now.
		again := errors.Is(err, meta.NotOwner) || admin.IsNotBegun(err) || admin.IsUnanswered(err) && m.Resend && ctx.Err() == nil
		if !again || passed || time.Since(began) > passWait {
			return answer, err
		}
		select {
		case <-time.After(wait):
			wait = min(2*wait, 250*time.Millisecond)
		case <-ctx.Done():
			return nil, meta.E("call", meta.Unavailable, "", context.Cause(ctx))
		}
		if a.s.stops() { // the owner is another server by now, or will be
			return nil, admin.NotBegun(a.s.cfg.Name, errStopping)
		}
	}
}

// pass sends a call to the server at addr, on behalf of the session's identity.
func (a *api) pass(ctx context.Context, sess *session, m *admin.Method, request proto.Message, addr string) (proto.Message, error) {
	c, err := a.peers.client(addr, m.Long)
	if err != nil {
		return nil, err
	}
	answer := m.NewAnswer()
	if err := c.Conn().Invoke(metadata.AppendToOutgoingContext(ctx, passedOn, sess.who.String()), m.Name, request, answer); err != nil {
		return nil, err
	}
	return answer, nil
}

// atOther is the error of a call that only a certain other server can answer. For code that
// passes no calls on, the error is a NotOwner.
type atOther struct{ why *meta.Error }

func (e *atOther) Error() string { return e.why.Error() }
func (e *atOther) Unwrap() error { return e.why }

// atServer returns the address at which a call must be made, or "" if the error names no
// address. only: no other server can answer the call.
func atServer(err error) (addr string, only bool) {
	if other, is := errors.AsType[*atOther](err); is {
		return other.why.Subject, true
	}
	if e, is := errors.AsType[*meta.Error](err); is && e.Kind == meta.NotOwner {
		return e.Subject, false
	}
	return "", false
}

// here returns nil if name is "" or this server, else the error that refuses a call to be
// answered by the server name. Errors: NotFound; *atOther.
func (s *Server) here(name string) error {
	if name == "" || name == s.cfg.Name {
		return nil
	}
	for _, m := range s.peers.others() {
		if m.Name == name {
			return &atOther{meta.E("ask metadata server", meta.NotOwner, m.Addr, errors.New("it is another one"))}
		}
	}
	return meta.E("find metadata server", meta.NotFound, name, errors.New("no metadata server of this name runs now: see 'penstock cluster status'"))
}

// peerClients call other metadata servers.
type peerClients struct {
	creds *peering.Credentials

	mu     sync.Mutex
	at     map[peerConn]*admin.Client
	closed bool
}

// peerConn is a connection to another server. Long calls have a connection of their own: many
// that wait there, such as those of followers of events, must not hold up the others.
type peerConn struct {
	addr string
	long bool
}

// peerReach bounds the tries to reach another server.
const peerReach = 3 * time.Second

func (p *peerClients) client(addr string, long bool) (*admin.Client, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := peerConn{addr, long}
	if c := p.at[at]; c != nil {
		return c, nil
	}
	if p.closed {
		return nil, admin.NotBegun(addr, errStopping)
	}
	c, err := admin.New(admin.Config{Addrs: []string{addr}, Creds: p.creds, Reach: peerReach})
	if err == nil {
		p.at[at] = c
	}
	return c, err
}

func (p *peerClients) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, c := range p.at { // in any order
		c.Close()
	}
}
