package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	reflectionpb "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// requestOf makes an empty request of a method. With volume, requestOf names the volume in every
// field that can name a volume, and the volume's group in every field that can name a group.
func requestOf(t *testing.T, m *admin.Method, volume *admin.VolumeRef) proto.Message {
	t.Helper()
	name := protoreflect.FullName(strings.ReplaceAll(m.Name[1:], "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		t.Fatal(err)
	}
	in, err := protoregistry.GlobalTypes.FindMessageByName(d.(protoreflect.MethodDescriptor).Input().FullName())
	if err != nil {
		t.Fatal(err)
	}
	q := in.New()
	for i := range in.Descriptor().Fields().Len() {
		f := in.Descriptor().Fields().Get(i)
		switch x := f.Message(); {
		case volume == nil || x == nil:
		case x.FullName() == "penstock.admin.v1.GroupRef":
			q.Set(f, protoreflect.ValueOfMessage((&admin.GroupRef{Name: fmt.Sprint(volume.GetId())}).ProtoReflect()))
		case x.FullName() != "penstock.admin.v1.VolumeRef":
		case f.IsList():
			q.Mutable(f).List().Append(protoreflect.ValueOfMessage(volume.ProtoReflect()))
		default:
			q.Set(f, protoreflect.ValueOfMessage(volume.ProtoReflect()))
		}
	}
	return q.Interface()
}

// Every method by every role, from the service definition: a role without a rule is refused
// before the server does anything. A client needs the right on each volume that the request
// names.
func TestWhoMayCall(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	granted := func(r cluster.Rights) {
		s.grants(time.Now().UnixNano(), cluster.Grant{ID: 1, Who: "client/x", Volume: 1, Rights: r}, cluster.Grant{ID: 2, Who: "gateway/x", Volume: 1, Rights: r})
	}
	granted(cluster.NoRights)
	if _, err := s.cluster.PutGroup(t.Context(), meta.Group{Version: meta.GroupVersion, Name: "1", Members: []meta.GroupMember{{Volume: 1}}}); err != nil {
		t.Fatal(err)
	}
	clients := map[peering.Role]*session{}
	for _, role := range allRoles {
		who := peering.Identity{Cluster: "test", Role: role, Name: "x"}
		clients[role] = &session{srv: s.srv, ctx: t.Context(), who: who}
	}
	may := func(role peering.Role, m *admin.Method, volume *admin.VolumeRef) bool {
		t.Helper()
		err := s.srv.api.admit(t.Context(), clients[role], m, requestOf(t, m, volume))
		if err != nil && !errors.Is(err, meta.AccessDenied) && !errors.Is(err, meta.ReadOnly) {
			t.Errorf("%s by a %s: %v", m.Name, role, err)
		}
		return err == nil
	}
	if len(admin.Methods()) < 10 {
		t.Fatalf("only %d methods", len(admin.Methods()))
	}
	for _, m := range admin.Methods() {
		for _, role := range allRoles {
			named := slices.Contains(m.Rule.Roles, admin.RoleOf(role))
			if got := may(role, m, nil); got != named {
				t.Errorf("%s by a %s: allowed is %v, its rule says %v", m.Name, role, got, named)
			}
			if named || !role.Granted() {
				continue
			}
			for have := cluster.NoRights; have <= cluster.AdminRights; have++ {
				granted(have)
				want := m.Rule.Right != 0 && have >= cluster.Rights(m.Rule.Right)
				if got := may(role, m, admin.Numbered(1)); got != want {
					t.Errorf("%s by a %s that was granted %v: allowed is %v, want %v", m.Name, role, have, got, want)
				}
				if may(role, m, admin.Numbered(77)) {
					t.Errorf("%s of a volume that is not there is allowed to a %s", m.Name, role)
				}
			}
			granted(cluster.NoRights)
		}
	}
	// And on the way of a real call.
	client := s.apiAs(s.creds(peering.Client, "x"))
	if _, err := client.Nodes.DrainNode(t.Context(), &admin.DrainNodeRequest{Node: 1}); !errors.Is(err, meta.AccessDenied) || !strings.Contains(err.Error(), "client/x") {
		t.Errorf("a client drains a node: %v", err)
	}
	granted(cluster.AdminRights)
	if _, err := client.Nodes.GetRepairStatus(t.Context(), &admin.GetRepairStatusRequest{Volume: admin.Named("root")}); err != nil {
		t.Errorf("a volume's own administrator: %v", err)
	}
	if _, err := client.Nodes.GetRepairStatus(t.Context(), &admin.GetRepairStatusRequest{}); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("of all volumes: %v", err)
	}
	if _, err := s.apiAs(s.creds(peering.Admin, "x")).Nodes.ListNodes(t.Context(), &admin.ListNodesRequest{}); err != nil {
		t.Errorf("an administrator: %v", err)
	}
}

// A call that another server passes on is judged as the caller's own, so the caller may pin and
// release no more than on a direct call; a client that claims to pass a call on is not believed.
func TestPassedOnIsTheCallers(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.grants(time.Now().UnixNano(),
		cluster.Grant{ID: 1, Who: "client/reader", Volume: 1, Rights: cluster.ReadRights},
		cluster.Grant{ID: 2, Who: "client/boss", Volume: 1, Rights: cluster.AdminRights})
	through, reader := s.apiAs(s.creds(peering.Meta, "m2")), s.apiAs(s.creds(peering.Client, "reader"))
	as := func(who string) context.Context { return metadata.AppendToOutgoingContext(t.Context(), passedOn, who) }
	volume := admin.Numbered(1)
	if _, err := through.Snapshots.CreateSnapshot(as("client/boss"), &admin.CreateSnapshotRequest{Volume: volume, Name: "one"}); err != nil {
		t.Fatal(err)
	}
	pin := &admin.PinSnapshotRequest{Volume: volume, Snapshot: "one", Holder: "run", Ttl: durationpb.New(time.Hour)}
	if p, err := through.Snapshots.PinSnapshot(as("client/boss"), pin); err != nil || p.By != "client/boss" {
		t.Errorf("the pin is %v, %v", p, err)
	}
	unpin := &admin.UnpinSnapshotRequest{Volume: volume, Snapshot: "one", Holder: "run"}
	if _, err := through.Snapshots.UnpinSnapshot(as("client/reader"), unpin); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("another's pin was released for a reader: %v", err)
	}
	if _, err := reader.Snapshots.UnpinSnapshot(as("client/boss"), unpin); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("another's pin was released for a reader that claims to be a server: %v", err)
	}
	for _, who := range []string{"client/boss", "admin/x", "local", "insecure"} {
		if _, err := through.Snapshots.PinSnapshot(as("client/reader"), &admin.PinSnapshotRequest{Volume: volume, Snapshot: "one", Holder: who, Ttl: durationpb.New(time.Hour)}); err != nil {
			t.Fatal(err)
		}
		if a, err := through.Snapshots.UnpinSnapshot(as(who), &admin.UnpinSnapshotRequest{Volume: volume, Snapshot: "one", Holder: who}); err != nil || !a.Released {
			t.Errorf("released for %s: %v, %v", who, a, err)
		}
	}
}

// The numbers of roles, rights and kinds of errors equal the numbers in the packages that own the
// roles, rights and kinds.
func TestRightsAreThoseOfGrants(t *testing.T) {
	t.Parallel()
	for api, own := range map[admin.Right]cluster.Rights{
		admin.Right_RIGHT_UNSPECIFIED: cluster.NoRights, admin.Right_RIGHT_READ: cluster.ReadRights,
		admin.Right_RIGHT_WRITE: cluster.WriteRights, admin.Right_RIGHT_ADMIN: cluster.AdminRights,
	} {
		if cluster.Rights(api) != own {
			t.Errorf("%v is %d, that of a grant %d", api, api, own)
		}
	}
	for _, role := range allRoles {
		if api := admin.RoleOf(role); api == 0 || api.Peer() != role {
			t.Errorf("a %s is %v, and that is a %s", role, api, api.Peer())
		}
	}
	if len(admin.Role_name)-1 != len(allRoles) {
		t.Errorf("%d roles of the API, %d of certificates", len(admin.Role_name)-1, len(allRoles))
	}
}

// Structs of this module survive the way through messages, field by field.
func TestNothingIsUnsaid(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		m    proto.Message
		s    any
		less []string
	}{
		{&admin.Node{}, NodeStatus{}, nil},
		{&admin.DrainForecast{}, DrainForecast{}, nil},
		{&admin.RepairStatus{}, RepairStatus{}, nil},
		{&admin.ServerHealth{}, meta.ServerHealth{}, nil},
		{&admin.VolumeHealth{}, meta.VolumeHealth{}, nil},
		{&admin.Certificate{}, meta.CertHealth{}, nil},
		{&admin.ServerStatus{}, Status{}, nil},
		{&admin.ListSnapshotsResponse{}, meta.SnapshotList{}, nil},
		{&admin.SnapshotUsage{}, meta.SnapshotUse{}, nil},
		{&admin.Clone{}, meta.CloneInfo{}, nil},
		{&admin.Volume{}, meta.VolumeInfo{}, nil},
		{&admin.Promotion{}, meta.PromoteStatus{}, nil},
		{&admin.Group{}, meta.Group{}, nil},
		{&admin.Grant{}, cluster.Grant{}, nil},
		{&admin.JoinToken{}, cluster.TokenRecord{}, nil},
		{&admin.Member{}, cluster.Member{}, nil},
		{&admin.Settings{}, cluster.Settings{}, nil},
		{&admin.VolumeCheck{}, FsckReport{}, nil},
		{&admin.LostChunk{}, LostChunk{}, nil},
		{&admin.EventLog{}, meta.EventLog{}, nil},
		{&admin.Mirror{}, meta.Mirror{}, nil},
		{&admin.Gateway{}, cluster.Gateway{}, nil},
		{&admin.GetAccessResponse{}, cluster.Access{}, nil},
		{&admin.Event{}, meta.Event{}, []string{".path", ".from_path"}},
	} {
		if l := admin.Unsaid(c.m, c.s); !slices.Equal(l, c.less) {
			t.Errorf("%T and %T: these have no partner: %q, want %q", c.m, c.s, l, c.less)
		}
		full := reflect.New(reflect.TypeOf(c.s))
		n := 0
		fill(full.Elem(), &n)
		admin.Say(c.m, full.Interface())
		b, err := proto.Marshal(c.m)
		if err != nil {
			t.Fatal(err)
		}
		came := c.m.ProtoReflect().New().Interface()
		if err := proto.Unmarshal(b, came); err != nil {
			t.Fatal(err)
		}
		heard := reflect.New(reflect.TypeOf(c.s))
		admin.Hear(heard.Interface(), came)
		if !reflect.DeepEqual(full.Interface(), heard.Interface()) {
			t.Errorf("said  %+v\nheard %+v", full.Elem(), heard.Elem())
		}
	}
}

// fill gives every field inside a value a different value.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.String:
		v.SetString(fmt.Sprint("word ", *n))
		switch v.Type() {
		case reflect.TypeFor[cluster.NodeState]():
			v.SetString(string(cluster.NodeDraining))
		case reflect.TypeFor[meta.SnapshotState]():
			v.SetString(string(meta.SnapshotDropped))
		case reflect.TypeFor[LossState]():
			v.SetString(string(LossShort))
		case reflect.TypeFor[meta.VolumeState]():
			v.SetString(string(meta.VolumeDetaching))
		case reflect.TypeFor[meta.MirrorState]():
			v.SetString(string(meta.MirrorPromoting))
		case reflect.TypeFor[meta.GroupState]():
			v.SetString(string(meta.GroupAborted))
		case reflect.TypeFor[cluster.Users]():
			v.SetString(string(cluster.UsersNoRoot))
		case reflect.TypeFor[peering.Role]():
			v.SetString(string(peering.ChunkServer))
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(float64(*n) / 2)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), n)
		fill(v.Index(1), n)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, n)
		fill(value, n)
		v.SetMapIndex(key, value)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(int64(*n), 5).UTC()))
			return
		}
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && f.Tag.Get("pb") != "-" && f.Tag.Get("json") != "-" {
				fill(v.Field(i), n)
			}
		}
	default:
		if v.CanUint() {
			v.SetUint(uint64(*n % 200))
		} else {
			v.SetInt(int64(*n))
		}
	}
}

// A program that knows only the port and has a certificate learns the services from the server
// and calls a service, as grpcurl does.
func TestReflection(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	conn := s.apiAs(s.creds(peering.Admin, "x")).Conn()
	st, err := reflectionpb.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(q *reflectionpb.ServerReflectionRequest) *reflectionpb.ServerReflectionResponse {
		t.Helper()
		if err := st.Send(q); err != nil {
			t.Fatal(err)
		}
		a, err := st.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	var services []string
	for _, x := range ask(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_ListServices{}}).GetListServicesResponse().GetService() {
		services = append(services, x.Name)
	}
	for _, want := range []string{"penstock.admin.v1.Nodes", "penstock.admin.v1.Health", "penstock.admin.v1.Snapshots"} {
		if !slices.Contains(services, want) {
			t.Errorf("%s is not among %q", want, services)
		}
	}
	// The files of a symbol and their imports, as the server tells.
	var set descriptorpb.FileDescriptorSet
	seen := map[string]bool{}
	add := func(a *reflectionpb.ServerReflectionResponse) (next []string) {
		for _, b := range a.GetFileDescriptorResponse().GetFileDescriptorProto() {
			var f descriptorpb.FileDescriptorProto
			if err := proto.Unmarshal(b, &f); err != nil {
				t.Fatal(err)
			}
			if !seen[f.GetName()] {
				seen[f.GetName()] = true
				set.File = append(set.File, &f)
				next = append(next, f.Dependency...)
			}
		}
		return next
	}
	next := add(ask(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "penstock.admin.v1.Health"}}))
	for len(next) > 0 {
		name := next[0]
		next = next[1:]
		if !seen[name] {
			next = append(next, add(ask(&reflectionpb.ServerReflectionRequest{MessageRequest: &reflectionpb.ServerReflectionRequest_FileByFilename{FileByFilename: name}}))...)
		}
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatal(err)
	}
	d, err := files.FindDescriptorByName("penstock.admin.v1.Health.GetServerStatus")
	if err != nil {
		t.Fatal(err)
	}
	m := d.(protoreflect.MethodDescriptor)
	q, a := dynamicpb.NewMessage(m.Input()), dynamicpb.NewMessage(m.Output())
	if err := conn.Invoke(t.Context(), "/penstock.admin.v1.Health/GetServerStatus", q, a); err != nil {
		t.Fatal(err)
	}
	if name := a.Get(m.Output().Fields().ByName("name")).String(); name != "m" {
		t.Errorf("the server is called %q", name)
	}
}

// A foreign program calls over TLS, offers HTTP/2 and insists that the server choose HTTP/2. A
// program without a certificate, or with an evicted certificate, learns nothing.
func TestForeignCallers(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	call := func(tls grpc.DialOption) error {
		conn, err := grpc.NewClient("passthrough:///"+s.addr, tls)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = admin.NewHealthClient(conn).GetServerStatus(t.Context(), &admin.GetServerStatusRequest{})
		return err
	}
	creds := s.creds(peering.Admin, "x")
	if err := call(grpc.WithTransportCredentials(foreignTLS(t, creds))); err != nil {
		t.Errorf("with a certificate: %v", err)
	}
	if err := call(grpc.WithTransportCredentials(foreignTLS(t, nil))); err == nil {
		t.Error("without one it is answered")
	}
	if err := call(grpc.WithTransportCredentials(insecure.NewCredentials())); err == nil {
		t.Error("without TLS it is answered")
	}
	api := s.apiAs(creds)
	if _, err := api.Health.ListServers(t.Context(), &admin.ListServersRequest{}); err != nil {
		t.Fatal(err)
	}
	s.g.set(&cluster.View{Revision: 5, Members: []cluster.Member{{Role: peering.Admin, Name: "x", Evicted: true}}})
	if _, err := api.Health.ListServers(t.Context(), &admin.ListServersRequest{}); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("on a connection from before it was evicted: %v", err)
	}
}

// A server's refusal reaches the caller unchanged: kind, words and text.
func TestErrorsTravel(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	api := s.api()
	_, err := api.Nodes.DrainNode(t.Context(), &admin.DrainNodeRequest{Node: 9})
	want := s.srv.repairs.drainNode(t.Context(), 9)
	e, ok := errors.AsType[*meta.Error](err)
	if !ok || !errors.Is(err, meta.NotFound) || err.Error() != want.Error() || e.Op == "" || e.Subject != "9" {
		t.Errorf("%v, want %v", err, want)
	}
	if _, err := api.Health.ListVolumeHealth(t.Context(), &admin.ListVolumeHealthRequest{PageToken: "x"}); !errors.Is(err, meta.Invalid) {
		t.Errorf("a bad page token: %v", err)
	}
	if _, err := api.Health.GetServerHealth(t.Context(), &admin.GetServerHealthRequest{Server: "nobody"}); !errors.Is(err, meta.NotFound) {
		t.Errorf("a server that is not there: %v", err)
	}
}

// breaker stands between clients and a server, and cuts connections off.
type breaker struct {
	net.Listener
	to string
	// when, if not nil, is asked whenever the server says something: at the first true that is
	// thrown away, and both sides lose the connection.
	when atomic.Pointer[func() bool]
}

func newBreaker(t *testing.T, to string) *breaker {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "b.sock"))
	if err != nil {
		t.Fatal(err)
	}
	b := &breaker{Listener: l, to: to}
	t.Cleanup(func() { l.Close() })
	go func() { // ends with the listener
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go b.serve(c) // ends with either side
		}
	}()
	return b
}

func (b *breaker) addr() string { return "unix:" + b.Listener.Addr().String() }

func (b *breaker) serve(c net.Conn) {
	defer c.Close()
	up, err := net.Dial("unix", b.to)
	if err != nil {
		return
	}
	defer up.Close()
	go func() { // ends with c
		io.Copy(up, c)
		up.Close()
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := up.Read(buf)
		if err != nil {
			return
		}
		if when := b.when.Load(); when != nil && (*when)() && b.when.CompareAndSwap(when, nil) {
			return
		}
		if _, err := c.Write(buf[:n]); err != nil {
			return
		}
	}
}

// losing runs a call and loses the first answer after the server has carried out the call, which
// calls counts.
func (b *breaker) losing(t *testing.T, calls *atomic.Uint64, call func() error) error {
	t.Helper()
	before := calls.Load()
	when := func() bool { return calls.Load() > before }
	b.when.Store(&when)
	err := call()
	if b.when.Load() != nil {
		t.Error("no answer was lost")
	}
	return err
}

// A call whose answer is lost is repeated if a repetition does no harm; any other call fails with
// an error that says the outcome is unknown.
func TestLostAnswers(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.cluster.mu.Lock()
	s.cluster.nodes[1] = cluster.Node{ID: 1, State: cluster.NodeActive}
	s.cluster.mu.Unlock()
	b := newBreaker(t, s.addr)
	api := newAPIClient(t, b.addr(), nil)
	done := &s.srv.api.done
	before := done.Load()
	if err := b.losing(t, done, func() error {
		_, err := api.Nodes.DrainNode(t.Context(), &admin.DrainNodeRequest{Node: 1})
		return err
	}); err != nil || done.Load() != before+2 {
		t.Errorf("an idempotent call: %v, done %d times", err, done.Load()-before)
	}
	if n := s.cluster.Nodes()[0]; n.State != cluster.NodeDraining {
		t.Errorf("the node is %s", n.State)
	}
	before = done.Load()
	if err := b.losing(t, done, func() error {
		_, err := api.Nodes.ReplaceDisk(t.Context(), &admin.ReplaceDiskRequest{Node: 1})
		return err
	}); !admin.IsUnanswered(err) || done.Load() != before+1 {
		t.Errorf("a call that must not be made twice: %v, done %d times", err, done.Load()-before)
	}
	// A request with an id is carried out once, however often the client sends the request.
	before = done.Load()
	if err := b.losing(t, done, func() error {
		_, err := api.Snapshots.CreateSnapshot(t.Context(), &admin.CreateSnapshotRequest{Volume: admin.Numbered(1), Name: "one"})
		return err
	}); err != nil || done.Load() != before+2 {
		t.Errorf("a request with an id: %v, done %d times", err, done.Load()-before)
	}
	if l, err := api.Snapshots.ListSnapshots(t.Context(), &admin.ListSnapshotsRequest{Volume: admin.Numbered(1)}); err != nil || len(l.Snapshots) != 1 {
		t.Errorf("DATA: snapshots are %v, %v; one was asked for", l, err)
	}
	before = done.Load()
	if err := b.losing(t, done, func() error {
		_, err := api.Clones.CreateClone(t.Context(), &admin.CreateCloneRequest{Volume: admin.Numbered(1), Snapshot: "one", Name: "copy"})
		return err
	}); err != nil || done.Load() != before+2 {
		t.Errorf("a clone: %v, done %d times", err, done.Load()-before)
	}
	if l, err := api.Clones.ListClones(t.Context(), &admin.ListClonesRequest{}); err != nil || len(l.Clones) != 1 {
		t.Errorf("clones are %v, %v; one was asked for", l, err)
	}
	// No server listens any more.
	b.Listener.Close()
	always := func() bool { return true }
	b.when.Store(&always)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := api.Nodes.ListNodes(ctx, &admin.ListNodesRequest{}); !errors.Is(err, meta.Unavailable) {
		t.Errorf("of nobody: %v", err)
	}
}
