package streams

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl"
	saslplain "github.com/twmb/franz-go/pkg/sasl/plain"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/test/slow"
)

// wire is a connection of a Kafka client by hand, which shows when the server ends it.
type wire struct {
	t testing.TB
	*tls.Conn
	in *bufio.Reader
}

// dial connects to the Kafka server.
func (g *guarded) dial(config *tls.Config) *wire {
	g.t.Helper()
	config.ServerName = "localhost"
	c, err := tls.Dial("tcp", g.kafka, config)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	return g.wire(c)
}

func (g *guarded) wire(c *tls.Conn) *wire { return &wire{g.t, c, bufio.NewReader(c)} }

// mechanism logs a client of franz-go in.
func (g *guarded) mechanism(user, password string) sasl.Mechanism {
	return saslplain.Auth{User: user, Pass: password}.AsMechanism()
}

// send sends a request, and waits for no response.
func (w *wire) send(q kmsg.Request) error {
	_, err := w.Write(kmsg.NewRequestFormatter(kmsg.FormatterClientID("wire")).AppendRequest(nil, q, 1))
	return err
}

// receive reads the response to a request.
func (w *wire) receive(q kmsg.Request) (kmsg.Response, error) {
	head := make([]byte, 8)
	if _, err := io.ReadFull(w.in, head); err != nil {
		return nil, err
	}
	body := make([]byte, binary.BigEndian.Uint32(head)-4)
	if _, err := io.ReadFull(w.in, body); err != nil {
		return nil, err
	}
	p := q.ResponseKind()
	p.SetVersion(q.GetVersion())
	if p.IsFlexible() && p.Key() != int16(kmsg.ApiVersions) {
		body = body[1:]
	}
	return p, p.ReadFrom(body)
}

func (w *wire) ask(q kmsg.Request) (kmsg.Response, error) {
	if err := w.send(q); err != nil {
		return nil, err
	}
	return w.receive(q)
}

// login logs in by SASL PLAIN.
func (w *wire) login(user, password string) error {
	hello := kmsg.NewPtrSASLHandshakeRequest()
	hello.Version, hello.Mechanism = 1, "PLAIN"
	if _, err := w.ask(hello); err != nil {
		return err
	}
	q := kmsg.NewPtrSASLAuthenticateRequest()
	q.Version, q.SASLAuthBytes = 2, []byte("\x00"+user+"\x00"+password)
	p, err := w.ask(q)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(p.(*kmsg.SASLAuthenticateResponse).ErrorCode)
}

// serves reports why the server does not serve the connection any more.
func (w *wire) serves() error {
	q := kmsg.NewPtrMetadataRequest()
	q.Version, q.Topics = 5, []kmsg.MetadataRequestTopic{}
	_, err := w.ask(q)
	return err
}

// ended waits until a deadline for the end of a connection by the server.
func (w *wire) ended(what string, deadline time.Time) {
	w.t.Helper()
	if err := w.SetReadDeadline(deadline); err != nil {
		w.t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, w.in); os.IsTimeout(err) {
		w.t.Errorf("%s: the server did not end the connection (%d bytes came)", what, n)
	}
}

// waitingFetch is a Fetch request that waits a minute for records of a topic's first partition.
func waitingFetch(topic string) *kmsg.FetchRequest {
	q := kmsg.NewPtrFetchRequest()
	q.Version, q.MaxWaitMillis, q.MinBytes, q.MaxBytes, q.SessionEpoch = 11, 60_000, 64<<20, 64<<20, -1
	qt := kmsg.NewFetchRequestTopic()
	qt.Topic = topic
	qp := kmsg.NewFetchRequestTopicPartition()
	qp.FetchOffset, qp.PartitionMaxBytes = 1000, 64<<20
	qt.Partitions = append(qt.Partitions, qp)
	q.Topics = append(q.Topics, qt)
	return q
}

// long is an append over HTTP whose body has no end yet.
type long struct {
	body *io.PipeWriter
	code chan int
}

// upload begins an append over HTTP, and returns when the first records are in the stream.
func (g *guarded) upload(config *tls.Config, user, password, stream string) *long {
	g.t.Helper()
	r, w := io.Pipe()
	q, err := http.NewRequestWithContext(g.t.Context(), http.MethodPost, "https://"+g.ingest+"/v1/append"+stream, r)
	if err != nil {
		g.t.Fatal(err)
	}
	q.Header.Set("Content-Type", "text/plain")
	if user != "" {
		q.SetBasicAuth(user, password)
	}
	u := &long{w, make(chan int, 1)}
	go func() {
		transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
		defer transport.CloseIdleConnections()
		p, err := transport.RoundTrip(q)
		if err != nil {
			u.code <- -1
			return
		}
		defer p.Body.Close()
		io.Copy(io.Discard, p.Body)
		u.code <- p.StatusCode
	}()
	u.more()
	return u
}

// more sends somewhat more than the server appends as one batch.
func (u *long) more() { fmt.Fprint(u.body, strings.Repeat(strings.Repeat("x", 1023)+"\n", 1100)) }

// open begins an append over gRPC.
func (g *guarded) open(config *tls.Config, user, password, stream string) grpc.BidiStreamingClient[ingest.AppendRequest, ingest.AppendResponse] {
	g.t.Helper()
	c, err := grpc.NewClient(g.ingest, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	ctx := g.t.Context()
	if user != "" {
		q := &http.Request{Header: http.Header{}}
		q.SetBasicAuth(user, password)
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", q.Header.Get("Authorization"))
	}
	s, err := ingest.NewIngestClient(c).Append(ctx)
	if err == nil {
		err = s.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: &ingest.Open{Stream: stream}}})
	}
	if err == nil {
		_, err = s.Recv()
	}
	if err == nil {
		err = appendOne(s)
	}
	if err != nil {
		g.t.Fatal(err)
	}
	return s
}

// appendOne appends a record in a call.
func appendOne(s grpc.BidiStreamingClient[ingest.AppendRequest, ingest.AppendResponse]) error {
	_ = s.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Batch{Batch: &ingest.Batch{Records: []*ingest.Record{{Value: []byte("x")}}}}}) // Recv has the error
	_, err := s.Recv()
	return err
}

// remove removes users from the file of users.
func (g *guarded) remove(names ...string) {
	g.t.Helper()
	b, err := os.ReadFile(g.users)
	if err != nil {
		g.t.Fatal(err)
	}
	var all struct {
		Version int            `json:"version"`
		Users   map[string]any `json:"users"`
	}
	if err := json.Unmarshal(b, &all); err != nil {
		g.t.Fatal(err)
	}
	for _, name := range names {
		if all.Users[name] == nil {
			g.t.Fatalf("there is no user %s", name)
		}
		delete(all.Users, name)
	}
	b, err = json.Marshal(all)
	if err != nil {
		g.t.Fatal(err)
	}
	g.replace(g.users, b)
}

// replace replaces a file at once.
func (g *guarded) replace(name string, b []byte) {
	g.t.Helper()
	err := os.WriteFile(name+".new", b, 0o600)
	if err == nil {
		err = os.Rename(name+".new", name)
	}
	if err != nil {
		g.t.Fatal(err)
	}
}

// loginUser is a user whose login ends, with the user's clients at each door.
type loginUser struct {
	name, password, stream string
	idle, waiting          *wire
	web                    *long
	call                   grpc.BidiStreamingClient[ingest.AppendRequest, ingest.AppendResponse]
}

// begin opens a connection to each door. A user without a password has a certificate.
func (g *guarded) begin(u *loginUser) {
	g.t.Helper()
	g.Must("stream", "create", u.stream, "--no-table")
	if err := os.Chmod(g.mnt+u.stream, 0o777); err != nil {
		g.t.Fatal(err)
	}
	config, as := g.trust(""), u.name
	if u.password == "" {
		config, as = g.trust(u.name), ""
	}
	for _, w := range []**wire{&u.idle, &u.waiting} {
		*w = g.dial(config.Clone())
		var err error
		if as != "" {
			err = (*w).login(as, u.password)
		}
		if err == nil {
			err = (*w).serves()
		}
		if err != nil {
			g.t.Fatalf("%s: %v", u.name, err)
		}
	}
	if err := u.waiting.send(waitingFetch(strings.Replace(u.stream[1:], "/", ".", 1))); err != nil {
		g.t.Fatal(err)
	}
	u.web = g.upload(config, as, u.password, u.stream)
	u.call = g.open(config, as, u.password, u.stream)
}

// TestLoginsEnd: users are removed, or get another password, while they have connections to each
// door. Kafka connections end within 10 s, whether they are idle or wait for records. Calls of gRPC
// and requests of HTTP append nothing any more. The connections of another user go on.
func TestLoginsEnd(t *testing.T) {
	g := newGuarded(t)
	g.Until("the mount serves", func() error { _, err := os.Stat(g.mnt + "/.snapshot"); return err })
	users := []*loginUser{
		{name: "gone", password: "secret", stream: "/v/gone"}, {name: "changed", password: "secret", stream: "/v/changed"}, {name: "loader", stream: "/v/loader"},
	}
	for _, u := range users {
		if u.password != "" {
			g.password(u.name, u.password, "--uid", "1000", "--gid", "1000")
		}
		g.begin(u)
	}
	other := &loginUser{name: "bob", password: "secret", stream: "/v/bob"}
	g.begin(other)
	watcher := g.as("bob", "secret")
	end := func(u *loginUser) int64 { return g.ends(watcher, "v."+u.name, 1)[0] }
	for _, u := range append(users, other) {
		g.Until("the first records are in the stream", func() error {
			if n := end(u); n < 1000 {
				return fmt.Errorf("%s has %d records", u.stream, n)
			}
			return nil
		})
	}

	meter := slow.Start()
	defer meter.Close()
	g.remove("gone", "loader")
	g.password("changed", "another")
	began := time.Now()
	for _, u := range users {
		before := end(u)
		if err := appendOne(u.call); err == nil {
			t.Errorf("DATA: %s: gRPC takes a record after the login has ended", u.name)
		} else if c := status.Code(err); c != codes.PermissionDenied && c != codes.Unauthenticated {
			t.Errorf("%s: gRPC says %v", u.name, err)
		}
		u.web.more()
		u.web.body.Close()
		if code := <-u.web.code; code != http.StatusForbidden && code != http.StatusUnauthorized {
			t.Errorf("%s: HTTP says %d", u.name, code)
		}
		if after := end(u); after != before {
			t.Errorf("DATA: %s: %d records were appended after the login had ended", u.name, after-before)
		}
		u.idle.ended(u.name+", idle", began.Add(patience))
		u.waiting.ended(u.name+", waiting", began.Add(patience))
	}
	if took, most := time.Since(began), slow.Bound(10*time.Second, meter.Factor()); took > most {
		t.Errorf("the connections ended after %v, the bound is %v", took, most)
	}
	if err := g.dial(g.trust("loader")).serves(); err == nil {
		t.Error("a certificate of a removed user logs in")
	}
	for password, want := range map[string]bool{"secret": false, "another": true} {
		if err := g.dial(g.trust("")).login("changed", password); (err == nil) != want {
			t.Errorf("a login with the password %s: %v", password, err)
		}
	}

	before := end(other)
	if err := other.idle.serves(); err != nil {
		t.Errorf("the connection of another user: %v", err)
	}
	if err := appendOne(other.call); err != nil {
		t.Errorf("the call of another user: %v", err)
	}
	other.web.more()
	other.web.body.Close()
	if code := <-other.web.code; code != http.StatusOK {
		t.Errorf("the request of another user: HTTP says %d", code)
	}
	if after := end(other); after < before+1101 {
		t.Errorf("DATA: another user appended %d records of 1101", after-before)
	}
}
