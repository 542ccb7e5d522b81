package server

import (
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Every frame and every administrative request has a row.
func TestEveryRequestHasARule(t *testing.T) {
	t.Parallel()
	for typ := 1; typ < wire.Types; typ++ {
		if frameRules[typ].roles == nil {
			t.Errorf("frame type %d has no rule", typ)
		}
	}
	for op := 1; op < wire.AdminOps; op++ {
		if adminRules[op].roles == nil {
			t.Errorf("administrative request %d has no rule", op)
		}
	}
}

// guarded is a cluster whose grants a test sets.
type guarded struct {
	*fakeCluster
	view    atomic.Pointer[cluster.View]
	mu      sync.Mutex
	changed chan struct{} // closed and replaced with each view: several callers wait for the change
	// newer is etcd's view when this server's watch is late; nil: the view.
	newer atomic.Pointer[cluster.View]
	asked atomic.Int64
	deaf  atomic.Bool // etcd does not answer
}

func (g *guarded) Current(context.Context) (*cluster.View, error) {
	g.asked.Add(1)
	if g.deaf.Load() {
		return nil, meta.E("read cluster", meta.Unavailable, "etcd", nil)
	}
	if v := g.newer.Load(); v != nil {
		g.view.Store(v)
	}
	return g.View(), nil
}

func (g *guarded) View() *cluster.View { return g.view.Load() }
func (g *guarded) Changed() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.changed
}

// set makes a view the newest, and wakes all that wait for a view.
func (g *guarded) set(v *cluster.View) {
	g.view.Store(v)
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.changed)
	g.changed = make(chan struct{})
}

// secured is a server on TCP with certificates.
type secured struct {
	*site
	g    *guarded
	a    *peering.Authority
	addr string
}

func newSecured(t *testing.T) *secured {
	t.Helper()
	dir := t.TempDir()
	s := &secured{site: &site{t: t, dir: dir, ttl: time.Minute, addr: filepath.Join(dir, "m.sock")}}
	s.cluster = newFakeCluster(t, dir)
	s.g = &guarded{fakeCluster: s.cluster, changed: make(chan struct{})}
	s.g.view.Store(&cluster.View{Revision: 1})
	s.adjust = func(c *Config) { c.Cluster, c.Gateways = s.g, new(fakeGateways) }
	s.start()
	var err error
	if s.a, err = peering.NewAuthority("test", time.Hour); err != nil {
		t.Fatal(err)
	}
	l, err := peering.ListenJoiners("127.0.0.1:0", s.creds(peering.Meta, "m"))
	if err != nil {
		t.Fatal(err)
	}
	s.addr = l.Addr().String()
	served := make(chan error, 1)
	go func() { served <- s.srv.Serve(l) }()
	t.Cleanup(func() {
		s.srv.Close(t.Context())
		<-s.done
		<-served
		s.cluster.Shared.Close()
	})
	return s
}

func (s *secured) creds(role peering.Role, name string) *peering.Credentials {
	s.t.Helper()
	dir := filepath.Join(s.t.TempDir(), "c")
	if err := s.a.Issue(dir, peering.Identity{Cluster: "test", Role: role, Name: name}, nil); err != nil {
		s.t.Fatal(err)
	}
	c, err := peering.Load(dir, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// apiAs is a client of the administrative API that shows a certificate.
func (s *secured) apiAs(creds *peering.Credentials) *admin.Client {
	return newAPIClient(s.t, s.addr, creds)
}

// grants sets the cluster's grants.
func (s *secured) grants(rev int64, all ...cluster.Grant) {
	s.g.set(&cluster.View{Revision: rev, Grants: all})
}

// hello connects as a role.
func (s *secured) hello(creds *peering.Credentials, as wire.Role) (net.Conn, *wire.Reader, wire.Hello) {
	s.t.Helper()
	nc, err := peering.Dial(s.t.Context(), s.addr, creds, peering.Meta)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { nc.Close() })
	nc.SetDeadline(time.Now().Add(2 * time.Minute))
	nc.Write(wire.Append(nil, wire.Version, 0, &wire.Hello{Min: wire.Version, Max: wire.Version, Role: as, Name: "test"}))
	rd := wire.NewReader(nc)
	t, _, body, err := rd.Next()
	if err != nil || t != wire.THello {
		s.t.Fatal(t, err)
	}
	var h wire.Hello
	if err := wire.Decode(body, &h); err != nil {
		s.t.Fatal(err)
	}
	rd.Trust()
	return nc, rd, h
}

var allRoles = []peering.Role{peering.Client, peering.Gateway, peering.Admin, peering.ChunkServer, peering.Meta}

// A certificate is good for the roles that its names list, in the hello too.
func TestHelloAsAnotherRole(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	for as, roles := range roleOf {
		for _, role := range allRoles {
			_, _, h := s.hello(s.creds(role, "x"), as)
			if ok := slices.Contains(roles, role); ok != (h.Err == meta.KindOK) || !ok && h.Err != meta.AccessDenied {
				t.Errorf("a %s that speaks as role %d: %v %s", role, as, h.Err, h.Detail)
			}
		}
	}
}

// ask sends a frame and returns the kind of the answer: Unavailable if the connection ends,
// KindOK if no answer comes within a moment.
func (s *secured) ask(nc net.Conn, rd *wire.Reader, m wire.Message) meta.Kind {
	s.t.Helper()
	const id = 77
	nc.Write(wire.Append(nil, wire.Version, id, m))
	for {
		t, got, body, err := rd.Next()
		if err != nil {
			return meta.Unavailable
		}
		if got != id {
			continue
		}
		re, st := answerOf(t)
		if re == nil {
			s.t.Fatalf("an answer of type %d", t)
		}
		if err := wire.Decode(body, re); err != nil {
			s.t.Fatal(err)
		}
		if b, ok := re.(*wire.BatchRe); ok {
			return b.Replies[0].Status.Err
		}
		return st.Err
	}
}

// answerOf makes an empty answer and returns the place of its status.
func answerOf(t wire.Type) (wire.Message, *wire.Status) {
	switch t {
	case wire.TReply:
		r := new(wire.Reply)
		return r, &r.Status
	case wire.TBatchRe:
		return new(wire.BatchRe), nil
	case wire.TGrants:
		r := new(wire.Grants)
		return r, &r.Status
	case wire.TLockRe:
		r := new(wire.LockRe)
		return r, &r.Status
	case wire.TCapsRe:
		r := new(wire.CapsRe)
		return r, &r.Status
	case wire.TEntered:
		r := new(wire.Entered)
		return r, &r.Status
	case wire.TReserved:
		r := new(wire.Reserved)
		return r, &r.Status
	case wire.TAdminRe:
		r := new(wire.AdminRe)
		return r, &r.Status
	}
	return nil, nil
}

// asked makes a frame of each type that requests something on volume 1.
func asked() map[wire.Type]wire.Message {
	lookup := &meta.Lookup{Parent: meta.RootIno, Name: "x"}
	return map[wire.Type]wire.Message{
		wire.TCall:  &wire.Call{Volume: 1, Op: lookup},
		wire.TBatch: &wire.Batch{Calls: []wire.Call{{Volume: 1, Op: lookup}}},
		wire.TSync:  &wire.Sync{Volume: 1},
		wire.TAlloc: &wire.Alloc{Volume: 1, N: 1},
		wire.TSeal:  &wire.Seal{Chunk: meta.ChunkID{Volume: 1, Term: 1, Counter: 1}},
		wire.TLock:  &wire.Lock{Volume: 1, Lock: meta.Lock{Ino: 1, Type: meta.LockRead}},
		wire.TCaps:  &wire.Caps{Volume: 1},
		wire.TEnter: &wire.Enter{Volume: 1},

		wire.TReserve: &wire.Reserve{Volume: 1, Serial: 1, Want: 1},
	}
}

// Every frame, sent by every role: a role that may not send the frame loses the connection or is
// refused; a client without a grant gets nothing of a volume.
func TestEveryFrameIsRefused(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	for typ := wire.Type(2); int(typ) < wire.Types; typ++ {
		r := frameRules[typ]
		m := asked()[typ]
		if m == nil && r.right != cluster.NoRights && typ != wire.TClaim && typ != wire.TTrouble && typ != wire.TGaveUp {
			t.Errorf("frame type %d needs a right, and this test does not ask for it", typ)
		}
		for _, role := range allRoles {
			if role == peering.Admin {
				continue
			}
			as := map[peering.Role]wire.Role{peering.Client: wire.RoleClient, peering.Gateway: wire.RoleClient, peering.ChunkServer: wire.RoleEnrol, peering.Meta: wire.RoleEnrol}[role]
			nc, rd, h := s.hello(s.creds(role, "x"), as)
			if h.Err != meta.KindOK {
				t.Fatal(h.Err, h.Detail)
			}
			if !slices.Contains(r.roles, role) {
				// The server does not look at the body.
				frame, start := wire.Begin(nil, wire.Version, typ, 77)
				frame, err := wire.End(frame, start)
				if err != nil {
					t.Fatal(err)
				}
				nc.Write(frame)
				for {
					_, id, _, err := rd.Next()
					if err != nil {
						break
					}
					if id == 77 {
						t.Errorf("frame type %d of a %s is answered", typ, role)
						break
					}
				}
			} else if m != nil && role.Granted() {
				if k := s.ask(nc, rd, m); k != meta.AccessDenied {
					t.Errorf("frame type %d of a %s without a grant: %v", typ, role, k)
				}
			}
			nc.Close()
		}
	}
}

// Every administrative request, by every role that may not make the request.
func TestEveryAdminRequestIsRefused(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	for _, role := range []peering.Role{peering.Client, peering.Gateway, peering.ChunkServer} {
		as := map[peering.Role]wire.Role{peering.Client: wire.RoleClient, peering.Gateway: wire.RoleClient, peering.ChunkServer: wire.RoleEnrol}[role]
		nc, rd, _ := s.hello(s.creds(role, "x"), as)
		for op := wire.AdminOp(1); int(op) < wire.AdminOps; op++ {
			if slices.Contains(adminRules[op].roles, role) {
				continue
			}
			if k := s.ask(nc, rd, &wire.Admin{Op: op, Name: "root", Volume: 1}); k != meta.AccessDenied && k != meta.NotPermitted {
				t.Errorf("request %d by a %s: %v", op, role, k)
			}
		}
	}
	// The right to write does not let a client fill a mirror's target.
	s.grants(2, cluster.Grant{ID: 1, Who: "client/x", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersAsIs})
	nc, rd, _ := s.hello(s.creds(peering.Client, "x"), wire.RoleClient)
	if k := s.ask(nc, rd, &wire.Admin{Op: wire.AdminVolumeByName, Name: "root"}); k != meta.KindOK {
		t.Errorf("naming a volume that it may read: %v", k)
	}
	for _, op := range []wire.AdminOp{wire.AdminTakeTarget, wire.AdminRollBackTarget, wire.AdminShowTarget} {
		if k := s.ask(nc, rd, &wire.Admin{Op: op, Name: "root"}); k != meta.AccessDenied {
			t.Errorf("request %d with the right to write: %v", op, k)
		}
	}
}

// A chunk server's number is its certificate's: another certificate, however good, neither gets
// the number confirmed nor reports under the number, nor under two numbers.
func TestChunkServerNumberIsTheCertificates(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	one, two := s.creds(peering.ChunkServer, "one"), s.creds(peering.ChunkServer, "two")
	// report sends an identity and tells whether orders come.
	report := func(creds *peering.Credentials, ids ...meta.ServerID) bool {
		t.Helper()
		nc, rd, h := s.hello(creds, wire.RoleChunkServer)
		if h.Err != meta.KindOK {
			t.Fatal(h.Err, h.Detail)
		}
		for i, id := range ids {
			nc.Write(wire.Append(nil, wire.Version, 0, &wire.Report{Info: meta.ServerInfo{ID: id, Addr: "unix:/x"}}))
			if i > 0 {
				continue
			}
			for { // other frames, such as the metadata servers' clocks, may come first
				typ, _, _, err := rd.Next()
				if err != nil {
					return false
				}
				if typ == wire.TOrder {
					break
				}
			}
		}
		if len(ids) == 1 {
			nc.Close()
			return true
		}
		for {
			if _, _, _, err := rd.Next(); err != nil {
				return false
			}
		}
	}
	enrol := func(creds *peering.Credentials, id meta.ServerID) meta.Kind {
		t.Helper()
		_, err := s.apiAs(creds).Enrolment.EnrolChunkServer(t.Context(), &admin.EnrolChunkServerRequest{Server: uint64(id)})
		return meta.KindOf(err)
	}
	if k := enrol(one, 7); k != meta.KindOK {
		t.Fatal(k)
	}
	if !report(one, 7) {
		t.Fatal("a server's own number is refused")
	}
	if k := enrol(two, 7); k != meta.AccessDenied {
		t.Errorf("enrolling as another's number: %v", k)
	}
	if report(two, 7) {
		t.Error("another certificate reports as server 7")
	}
	if !report(two, 8) {
		t.Fatal("a number that nobody has is refused")
	}
	if report(one, 7, 8) {
		t.Error("one stream reports as two servers")
	}
	if report(one, 0) {
		t.Error("a report without a number is taken")
	}
	eventually(t, "server 8 is its own", func() error {
		s.srv.chunkServers.mu.Lock()
		defer s.srv.chunkServers.mu.Unlock()
		if l := s.srv.chunkServers.links[8]; l != nil && l.who.Name == "one" {
			return meta.E("look", meta.Busy, "", nil)
		}
		return nil
	})
}

// Chunk servers learn of evictions as soon as a view of the cluster has the eviction, and chunk
// servers that connect later learn at once.
func TestChunkServersHearOfEvictions(t *testing.T) {
	s := newSecured(t)
	heard := func(rd *wire.Reader) []string {
		t.Helper()
		for {
			typ, _, body, err := rd.Next()
			if err != nil {
				t.Fatal(err)
			}
			var o wire.Order
			if typ != wire.TOrder {
				continue
			}
			if err := wire.Decode(body, &o); err != nil {
				t.Fatal(err)
			}
			if o.Order.Kind == meta.OrderKeys {
				return o.Order.Evicted
			}
		}
	}
	report := func(name string, id meta.ServerID) *wire.Reader {
		t.Helper()
		nc, rd, h := s.hello(s.creds(peering.ChunkServer, name), wire.RoleChunkServer)
		if h.Err != meta.KindOK {
			t.Fatal(h.Err, h.Detail)
		}
		nc.Write(wire.Append(nil, wire.Version, 0, &wire.Report{Info: meta.ServerInfo{ID: id, Addr: "unix:/x"}}))
		return rd
	}
	first := report("one", 1)
	if who := heard(first); who != nil {
		t.Fatalf("%v are evicted", who)
	}
	keys, err := s.cluster.CapKeys(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.g.set(&cluster.View{Revision: 2, CapKeys: keys, Members: []cluster.Member{
		{Role: peering.Client, Name: "lab", Evicted: true}, {Role: peering.Client, Name: "pod"},
	}})
	if who := heard(first); !slices.Equal(who, []string{"client/lab"}) {
		t.Errorf("who is there hears that %v are evicted", who)
	}
	if who := heard(report("two", 2)); !slices.Equal(who, []string{"client/lab"}) {
		t.Errorf("who comes later hears that %v are evicted", who)
	}
}

// A chunk server learns of all metadata servers when the chunk server connects, also if nothing
// changes any more: each may own a volume, and the chunk server's own list may name a single
// server.
func TestChunkServerHearsOfAllServers(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.g.set(&cluster.View{Revision: 2, MetaServers: []cluster.MetaServer{{Name: "m", Addr: "m:7400"}, {Name: "n", Addr: "n:7400"}}})
	for id, name := range []string{"one", "two"} {
		nc, rd, _ := s.hello(s.creds(peering.ChunkServer, name), wire.RoleChunkServer)
		nc.Write(wire.Append(nil, wire.Version, 0, &wire.Report{Info: meta.ServerInfo{ID: meta.ServerID(id + 1), Addr: "unix:/x"}}))
		for {
			typ, _, body, err := rd.Next()
			if err != nil {
				t.Fatalf("%s heard of no other: %v", name, err)
			}
			if typ != wire.TMetas {
				continue
			}
			var m wire.Metas
			if err := wire.Decode(body, &m); err != nil {
				t.Fatal(err)
			}
			if len(m.Servers) == 2 && m.Servers[1].Addr == "n:7400" {
				break
			}
		}
	}
}

// A connection without a certificate may show a single token, in a small frame, and no more.
func TestStrangersMayOnlyJoin(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	for what, m := range map[string]wire.Message{
		"a question":    &wire.Admin{Op: wire.AdminVolumeByName, Name: "root"},
		"a lookup":      asked()[wire.TCall],
		"a token":       &wire.Admin{Op: wire.AdminJoin, Body: []byte(`{"token":"psj1.admin.aaaaaaaaaa.aaaaaaaaaaaaaaaa.` + s.a.Fingerprint() + `","name":"x"}`)},
		"a large frame": &wire.Admin{Op: wire.AdminJoin, Body: make([]byte, 2*wire.MaxHello)},
	} {
		nc, _, err := peering.DialStranger(t.Context(), s.addr, s.a.Fingerprint())
		if err != nil {
			t.Fatal(err)
		}
		nc.SetDeadline(time.Now().Add(time.Minute))
		nc.Write(wire.Append(nil, wire.Version, 0, &wire.Hello{Min: wire.Version, Max: wire.Version, Role: wire.RoleClient}))
		rd := wire.NewReader(nc)
		if typ, _, _, err := rd.Next(); err != nil || typ != wire.THello {
			t.Fatal(typ, err)
		}
		if k := s.ask(nc, rd, m); k != meta.AccessDenied && k != meta.NotSupported && k != meta.Unavailable { // this server signs nothing
			t.Errorf("%s: %v", what, k)
		}
		if k := s.ask(nc, rd, m); k != meta.Unavailable {
			t.Errorf("%s, again: %v", what, k)
		}
		nc.Close()
	}
	s.srv.clients.mu.Lock()
	defer s.srv.clients.mu.Unlock()
	if n := len(s.srv.clients.sessions); n != 0 {
		t.Errorf("strangers have %d sessions", n)
	}
}

// A grant that another server made is good here before this server's watch of the cluster reports
// the grant: before a refusal, the server looks the grant up once more. A client without a grant
// can't make the server ask etcd with each frame.
func TestGrantsMadeElsewhere(t *testing.T) {
	t.Parallel()
	grant := cluster.Grant{ID: 1, Who: "client/pod", Volume: 1, Rights: cluster.AdminRights, Users: cluster.UsersAsIs}
	for what, m := range asked() {
		s := newSecured(t)
		nc, rd, _ := s.hello(s.creds(peering.Client, "pod"), wire.RoleClient)
		s.g.newer.Store(&cluster.View{Revision: 2, Grants: []cluster.Grant{grant}})
		if k := s.ask(nc, rd, m); k == meta.AccessDenied || k == meta.ReadOnly || k == meta.Unavailable {
			t.Errorf("frame %d, granted elsewhere: %v", what, k)
		}
		if n := s.g.asked.Load(); n != 1 {
			t.Errorf("frame %d: etcd was asked %d times", what, n)
		}
	}
	s := newSecured(t)
	pod := s.creds(peering.Client, "pod")
	nc, rd, _ := s.hello(pod, wire.RoleClient)
	// More rights than before.
	read := grant
	read.Rights = cluster.ReadRights
	s.grants(2, read)
	if k := s.ask(nc, rd, &wire.Admin{Op: wire.AdminShowTarget, Volume: 1}); k != meta.AccessDenied && k != meta.ReadOnly {
		t.Fatal(k)
	}
	create := &wire.Call{Volume: 1, Op: &meta.Create{Parent: meta.RootIno, Name: "x", Mode: 0o100644}}
	asked, began := s.g.asked.Load(), time.Now()
	for range 20 {
		if k := s.ask(nc, rd, create); k != meta.ReadOnly {
			t.Fatal(k)
		}
	}
	if n := s.g.asked.Load() - asked; n > 1+int64(time.Since(began)/lookEvery) {
		t.Errorf("20 refused operations asked etcd %d times", n)
	}
	s.g.newer.Store(&cluster.View{Revision: 3, Grants: []cluster.Grant{grant}})
	if k := s.ask(nc, rd, &wire.Enter{Volume: 1}); k != meta.KindOK {
		t.Fatal(k)
	}
	s.srv.clients.mu.Lock()
	for _, sess := range s.srv.clients.sessions {
		sess.accMu.Lock()
		sess.look = time.Time{} // as if the pace's time were over
		sess.accMu.Unlock()
	}
	s.srv.clients.mu.Unlock()
	if k := s.ask(nc, rd, create); k == meta.ReadOnly || k == meta.AccessDenied || k == meta.Unavailable {
		t.Error(k)
	}
	// Evicted by this server's view, let in again by a new token elsewhere.
	evicted := []cluster.Member{{Role: peering.Client, Name: "pod", Evicted: true}}
	s.g.newer.Store(&cluster.View{Revision: 4, Members: evicted})
	s.g.view.Store(s.g.newer.Load())
	if _, _, h := s.hello(pod, wire.RoleClient); h.Err != meta.AccessDenied {
		t.Errorf("evicted: %v", h.Err)
	}
	s.g.newer.Store(&cluster.View{Revision: 5})
	if _, _, h := s.hello(pod, wire.RoleClient); h.Err != meta.KindOK {
		t.Errorf("let in again: %v", h.Err)
	}
}

// A server with an old view of the cluster does not know of a client's grant, and etcd does not
// answer. The server does not refuse: the client, which would give up its buffered writes, waits,
// and goes on when etcd answers.
func TestRefusalsAreKnownFromEtcd(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	grant := cluster.Grant{ID: 1, Who: "client/pod", Volume: 1, Rights: cluster.AdminRights, Users: cluster.UsersAsIs}
	s.grants(2, grant)
	old := &cluster.View{Revision: 1}
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.addr}, Name: "pod", Handler: p, Creds: s.creds(peering.Client, "pod")})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(context.Background())
	s.g.newer.Store(s.g.View())
	s.g.deaf.Store(true)
	s.g.view.Store(old)
	done := make(chan error, 1)
	go func() {
		_, err := sess.Do(t.Context(), 1, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: "x", Mode: 0o100644}, meta.LeaseNone)
		done <- err
	}()
	for end := time.Now().Add(time.Minute); s.g.asked.Load() < 3; time.Sleep(time.Millisecond) {
		select {
		case err := <-done:
			t.Fatalf("it was told %v", err)
		default:
		}
		if time.Now().After(end) {
			t.Fatalf("etcd was asked %d times", s.g.asked.Load())
		}
	}
	s.g.deaf.Store(false)
	if err := <-done; err != nil {
		t.Fatalf("it was told %v", err)
	}
}

// A client does as its grant allows: read, then write with its user ids mapped; and when the
// grant is gone, nothing, at once.
func TestGrants(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	creds := s.creds(peering.Client, "pod-1")
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{}}
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.addr}, Name: "pod", Handler: p, Creds: creds})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(t.Context())
	create := func(name string) (*meta.Result, error) {
		return sess.Do(t.Context(), 1, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: name, Mode: 0o100644}, meta.LeaseExclusive)
	}
	read := func() error {
		_, err := sess.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone)
		return err
	}
	grant := cluster.Grant{ID: 1, Who: "client/pod-*", Volume: 1, Rights: cluster.ReadRights, Users: cluster.UsersAsIs}
	if err := read(); meta.KindOf(err) != meta.AccessDenied {
		t.Fatalf("without a grant: %v", err)
	}
	s.grants(2, grant)
	if err := read(); err != nil {
		t.Fatal(err)
	}
	if _, err := create("x"); meta.KindOf(err) != meta.ReadOnly {
		t.Fatalf("with the right to read: %v", err)
	}
	if sess.ReadCap(2) != nil {
		t.Error("a capability for another volume")
	}
	grant.Rights, grant.Users = cluster.WriteRights, cluster.UsersNoRoot
	s.grants(3, grant)
	r, err := create("x")
	if err != nil || r.Attr.UID != cluster.NobodyID || r.Attr.GID != cluster.NobodyID {
		t.Fatalf("%+v, %v", r, err)
	}
	_, err = sess.Do(t.Context(), 1, meta.OpID{}, &meta.SetAttr{Ino: r.Attr.Ino, Mask: meta.SetUID, UID: 0}, meta.LeaseNone)
	if a, gerr := sess.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: r.Attr.Ino}, meta.LeaseNone); err != nil || gerr != nil || a.Attr.UID != cluster.NobodyID {
		t.Fatalf("given to root: %+v, %v, %v", a, err, gerr)
	}
	began := time.Now()
	s.grants(4)
	for err = nil; err == nil && time.Since(began) < time.Minute; time.Sleep(10 * time.Millisecond) {
		err = read()
	}
	if k := meta.KindOf(err); k != meta.AccessDenied && k != meta.SessionExpired {
		t.Fatalf("after revocation: %v", err)
	}
	if err := read(); meta.KindOf(err) != meta.AccessDenied {
		t.Fatal(err)
	}
	t.Logf("a revoked grant stopped working after %v; what it may still read from chunk servers ends within %v", time.Since(began), CapLife)
	if CapLife > 50*time.Second {
		t.Errorf("capabilities hold %v: a revoked grant would work for a minute", CapLife)
	}
}

// TestPagesOfGrants: the pages of more grants than fit into an answer have every grant once.
func TestPagesOfGrants(t *testing.T) {
	t.Parallel()
	var all []cluster.Grant
	for i := range uint64(30000) {
		all = append(all, cluster.Grant{ID: 2*i + 1, Who: "client/worker", Users: cluster.UsersAsIs, For: "csi:" + strings.Repeat("x", 100)})
	}
	var got []cluster.Grant
	pages := 0
	for after := uint64(0); ; pages++ {
		page := grantsAfter(all, after)
		if len(page) == 0 {
			break
		}
		b, err := json.Marshal(page)
		if err != nil || len(b) > pageBytes+1 {
			t.Fatalf("a page of %d bytes, %v", len(b), err)
		}
		got = append(got, page...)
		after = page[len(page)-1].ID
	}
	if !slices.Equal(got, all) || pages < 2 {
		t.Errorf("%d of %d in %d pages", len(got), len(all), pages)
	}
	if page := grantsAfter(all, 4); page[0].ID != 5 { // a grant was revoked meanwhile
		t.Errorf("after 4 comes %d", page[0].ID)
	}
}

// Rights add up; the most particular grant decides the mapping of ids.
func TestAccessOf(t *testing.T) {
	t.Parallel()
	all := []cluster.Grant{
		{ID: 1, Who: "client/*", Rights: cluster.ReadRights, Users: cluster.UsersNoRoot},
		{ID: 2, Who: "client/a", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersAllTo, UID: 5, GID: 6},
		{ID: 3, Who: "client/b*", Volume: 2, Rights: cluster.AdminRights, Users: cluster.UsersAsIs},
	}
	for _, x := range []struct {
		who    string
		volume meta.VolumeID
		rights cluster.Rights
		users  cluster.Users
	}{
		{"client/a", 1, cluster.WriteRights, cluster.UsersAllTo}, {"client/a", 2, cluster.ReadRights, cluster.UsersNoRoot},
		{"client/bb", 2, cluster.AdminRights, cluster.UsersAsIs}, {"client/c", 9, cluster.ReadRights, cluster.UsersNoRoot},
		{"chunkserver/a", 1, cluster.NoRights, ""}, {"client/a/b", 1, cluster.NoRights, ""},
	} {
		if a := cluster.AccessOf(all, x.who, x.volume); a.Rights != x.rights || a.Users != x.users {
			t.Errorf("%s on %d: %+v", x.who, x.volume, a)
		}
	}
	for _, bad := range []cluster.Grant{{Who: "admin/x", Rights: 1, Users: cluster.UsersAsIs}, {Who: "client/[", Rights: 1, Users: cluster.UsersAsIs}, {Who: "client/x", Users: cluster.UsersAsIs}, {Who: "client/x", Rights: 1}} {
		if err := bad.Check(); meta.KindOf(err) != meta.Invalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}
