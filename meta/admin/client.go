package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// Config describes the cluster and the caller.
type Config struct {
	// Addrs are the addresses of metadata servers: "unix:/path" or "host:port". Every server
	// answers every call: a server passes a call on if another server must execute the call.
	Addrs []string
	// Known, if not nil, lists further servers known to the caller. The client calls Known
	// when it can reach no server listed before.
	Known func() []string
	// Creds are shown to servers reached over TCP; nil: Unix sockets only.
	Creds *peer.Credentials
	// Reach bounds the attempts to reach a server before a call fails; 0: 10 s.
	Reach time.Duration
	// AnswerWait bounds how long a connected server may take to answer a call that reads and
	// is not marked long; 0: as long as the caller's context lasts.
	AnswerWait time.Duration
	// UnsafeResend repeats each call without an answer, although a server may have executed
	// the call (positive control).
	UnsafeResend bool
}

// Client calls the administrative API. A call returns the server's error as a *meta.Error. If
// an answer is lost, the client repeats the call if repetition is harmless: the client sets
// the request_id of requests that have one. The client connects at its first call, and is safe
// for concurrent use.
type Client struct {
	Nodes     NodesClient
	Health    HealthClient
	Snapshots SnapshotsClient
	Grants    GrantsClient
	Volumes   VolumesClient
	Events    EventsClient
	Mirrors   MirrorsClient
	Clones    ClonesClient
	Groups    GroupsClient
	Enrolment EnrolmentClient
	Gateways  GatewaysClient

	cfg  Config
	conn *grpc.ClientConn
	last lastDial

	mu sync.Mutex
	at map[string]*Client // single-server clients by address; nil: closed
}

// lastDial is the result of the newest attempt to connect.
type lastDial struct {
	mu   sync.Mutex
	addr string
	err  error
}

func (l *lastDial) note(addr string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addr, l.err = addr, err
}

func (l *lastDial) get() (addr string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.addr, l.err
}

// Bounds of connections and of the search for a server.
const (
	defaultReach = 10 * time.Second
	connectWait  = 3 * time.Second
	tryMin       = 10 * time.Millisecond
	tryMax       = 250 * time.Millisecond
	// MaxMessage bounds requests and answers, in bytes.
	MaxMessage = 16 << 20
	// PingEvery is how long a connection with a waiting call may be silent before the client
	// sends a ping. pingWait bounds the wait for the ping's answer.
	PingEvery = 10 * time.Second
	pingWait  = 10 * time.Second
)

// New makes a client; nothing is connected yet. Errors: Invalid (no address).
func New(cfg Config) (*Client, error) {
	if len(cfg.Addrs) == 0 {
		return nil, meta.E("connect", meta.Invalid, "", errors.New("no address of a metadata server is given"))
	}
	cfg.Reach = cmp.Or(cfg.Reach, defaultReach)
	c := &Client{cfg: cfg, at: map[string]*Client{}}
	servers := manual.NewBuilderWithScheme("penstock")
	servers.InitialState(endpoints(cfg.Addrs))
	if cfg.Known != nil {
		servers.ResolveNowCallback = func(resolver.ResolveNowOptions) {
			all := slices.Clone(cfg.Addrs)
			for _, addr := range cfg.Known() {
				if !slices.Contains(all, addr) {
					all = append(all, addr)
				}
			}
			go servers.UpdateState(endpoints(all)) // at once, but not inside the callback
		}
	}
	var err error
	c.conn, err = grpc.NewClient("penstock:///cluster",
		grpc.WithResolvers(servers), grpc.WithNoProxy(), grpc.WithDisableServiceConfig(),
		grpc.WithContextDialer(c.dial),
		// The function dial makes the TLS connection.
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: connectWait, Backoff: backoff.Config{BaseDelay: tryMin, Multiplier: 2, Jitter: 0.5, MaxDelay: tryMax}}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: PingEvery, Timeout: pingWait}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(MaxMessage), grpc.MaxCallSendMsgSize(MaxMessage)),
		grpc.WithUnaryInterceptor(c.call),
	)
	if err != nil {
		return nil, meta.E("connect", meta.Invalid, strings.Join(cfg.Addrs, ", "), err)
	}
	c.Nodes, c.Health, c.Snapshots = NewNodesClient(c.conn), NewHealthClient(c.conn), NewSnapshotsClient(c.conn)
	c.Grants, c.Volumes, c.Events = NewGrantsClient(c.conn), NewVolumesClient(c.conn), NewEventsClient(c.conn)
	c.Mirrors, c.Clones, c.Groups = NewMirrorsClient(c.conn), NewClonesClient(c.conn), NewGroupsClient(c.conn)
	c.Enrolment, c.Gateways = NewEnrolmentClient(c.conn), NewGatewaysClient(c.conn)
	return c, nil
}

func endpoints(addrs []string) (state resolver.State) {
	for _, addr := range addrs {
		state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: addr}}})
	}
	return state
}

// At returns a client of the server at an address, for reports that each server makes about
// itself. Closing c closes the returned client.
func (c *Client) At(addr string) (*Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.at == nil {
		return nil, meta.E("connect", meta.Canceled, addr, errors.New("the client is closed"))
	}
	if one := c.at[addr]; one != nil {
		return one, nil
	}
	cfg := c.cfg
	cfg.Addrs, cfg.Known = []string{addr}, nil
	one, err := New(cfg)
	if err == nil {
		c.at[addr] = one
	}
	return one, err
}

// Conn is the connection, for clients of the servers' other services.
func (c *Client) Conn() grpc.ClientConnInterface { return c.conn }

// Close ends the connections. Calls in progress fail with Canceled.
func (c *Client) Close() error {
	c.mu.Lock()
	at := c.at
	c.at = nil
	c.mu.Unlock()
	err := c.conn.Close()
	for _, one := range at { // in any order
		err = errors.Join(err, one.Close())
	}
	return err
}

// dial connects to a metadata server, and notes the result.
func (c *Client) dial(ctx context.Context, addr string) (net.Conn, error) {
	nc, err := peer.Dial(ctx, addr, c.cfg.Creds, peer.Meta)
	c.last.note(addr, err)
	if err != nil {
		return nil, err
	}
	return &dialled{Conn: nc, addr: addr, last: &c.last}, nil
}

// dialled is a connection that notes a refusal of our certificate. The server sends the
// refusal only after our part of the handshake, so Read gets it.
type dialled struct {
	net.Conn
	addr string
	last *lastDial
}

func (d *dialled) Read(b []byte) (int, error) {
	n, err := d.Conn.Read(b)
	if err != nil && peer.Refused(err) {
		d.last.note(d.addr, meta.E("handshake", meta.AccessDenied, d.addr, err))
	}
	return n, err
}

// errNoAnswer is the cause when a call takes longer than Config.AnswerWait.
var errNoAnswer = errors.New("no answer in time")

// call intercepts every call: it sets the request id, sends the request, repeats it if
// necessary, and translates the error.
func (c *Client) call(ctx context.Context, name string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	m := MethodOf(name)
	if m == nil {
		m = &Method{}
	} else {
		m.NameRequest(request.(proto.Message))
	}
	if m.Reads && !m.Long && c.cfg.AnswerWait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, c.cfg.AnswerWait, errNoAnswer)
		defer cancel()
	}
	// lost is the time since which no server can be reached.
	var lost time.Time
	sent := false // and a server may have executed it
	for wait := tryMin; ; wait = min(2*wait, tryMax) {
		asked := time.Now()
		var server grpcpeer.Peer // without an address if the request never got a connection
		err, answered := errorOf(invoke(ctx, name, request, answer, conn, append(slices.Clip(opts), grpc.Peer(&server))...))
		refusedNow := answered && IsNotBegun(err) // by this server; another one may begin the call
		if answered && !refusedNow {
			if sent && m.DoneBefore(err) {
				return nil
			}
			return err
		}
		sent = sent || server.Addr != nil && !refusedNow
		addr, derr := c.last.get()
		if lost.IsZero() || time.Since(asked) > connectWait {
			lost = time.Now()
		}
		switch {
		case errors.Is(context.Cause(ctx), errNoAnswer) && derr == nil:
			return meta.E("ask metadata server", meta.Unavailable, addr, fmt.Errorf("it has not answered within %v: it may be starting, or waiting for etcd or for a volume that is being taken over; ask again, or see what each server says with 'penstock cluster status'", c.cfg.AnswerWait))
		case ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) && !errors.Is(context.Cause(ctx), errNoAnswer):
			return meta.E("call", meta.Canceled, "", context.Cause(ctx))
		case derr != nil && refused(derr):
			return &noAnswer{addrs: strings.Join(c.cfg.Addrs, ", "), err: derr}
		case refusedNow && time.Since(lost) > c.cfg.Reach:
			return err
		case ctx.Err() != nil || time.Since(lost) > c.cfg.Reach:
			if derr != nil {
				err = derr
			}
			return &noAnswer{strings.Join(c.cfg.Addrs, ", "), err, ctx.Err()}
		case !m.Resend && server.Addr != nil && !refusedNow && !c.cfg.UnsafeResend:
			return &noAnswer{addrs: strings.Join(c.cfg.Addrs, ", "), err: err} // a server may have executed the call
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

// noAnswer is the error of a call without an answer from any server.
type noAnswer struct {
	addrs string
	err   error
	ended error // why the caller stopped waiting; nil: the client gave up before
}

func (e *noAnswer) Error() string { return "no answer from " + e.addrs + ": " + e.err.Error() }

func (e *noAnswer) Unwrap() []error {
	if e.ended == nil {
		return []error{e.err}
	}
	return []error{e.err, e.ended}
}

// IsUnanswered reports whether a call's error means that no server answered: the call may or
// may not have been executed.
func IsUnanswered(err error) bool {
	_, is := errors.AsType[*noAnswer](err)
	return is
}

// refused reports that another attempt would not help.
func refused(err error) bool {
	switch meta.KindOf(err) {
	case meta.AccessDenied, meta.Invalid, meta.Version:
		return true
	}
	return false
}
