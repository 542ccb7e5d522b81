package streams

import (
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"google.golang.org/grpc/codes"

	"penstock.io/penstock/stream/ingest"
)

// resident returns the resident memory of a process, and the greatest so far, in bytes.
func resident(t *testing.T, pid int) (now, peak int64) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var kib int64
		switch n, _ := fmt.Sscanf(line[strings.Index(line, ":")+1:], "%d kB", &kib); {
		case n == 1 && strings.HasPrefix(line, "VmRSS:"):
			now = kib << 10
		case n == 1 && strings.HasPrefix(line, "VmHWM:"):
			peak = kib << 10
		}
	}
	return now, peak
}

// flood is the connections of hostile clients.
type flood struct {
	g  *guarded
	mu sync.Mutex
	c  []net.Conn
}

// open opens connections, some at a time, and runs begin on each.
func (f *flood) open(addr string, n int, begin func(c *tls.Conn) error) {
	f.g.t.Helper()
	config := f.g.trust("")
	config.ServerName = "localhost"
	var wg sync.WaitGroup
	at := make(chan struct{}, 16)
	for range n {
		at <- struct{}{}
		wg.Go(func() {
			defer func() { <-at }()
			c, err := tls.Dial("tcp", addr, config)
			if err == nil {
				f.mu.Lock()
				f.c = append(f.c, c)
				f.mu.Unlock()
				err = begin(c)
			}
			if err != nil {
				f.g.t.Error(err)
			}
		})
	}
	wg.Wait()
}

// close ends the connections.
func (f *flood) close() {
	for _, c := range f.c {
		c.(*tls.Conn).NetConn().Close()
	}
}

// announced begins a frame of a Kafka request.
func announced(key int16, size uint32, sent int) []byte {
	b := binary.BigEndian.AppendUint32(nil, size)
	b = binary.BigEndian.AppendUint16(b, uint16(key))
	return append(b, make([]byte, sent)...)
}

// TestFloods: a thousand connections over TLS send half of a handshake, of a frame, of a header, of a
// line or of a message, announce 1 GiB, or never read what they asked for. The memory of the gateway
// stays bounded, and other users go on.
func TestFloods(t *testing.T) {
	g := newGuarded(t)
	g.Until("the mount serves", func() error { _, err := os.Stat(g.mnt + "/.snapshot"); return err })
	g.Must("stream", "create", "/v/t", "--no-table")
	if err := os.Chmod(g.mnt+"/v/t", 0o777); err != nil {
		t.Fatal(err)
	}
	honest := g.as("ann", "secret")
	big := g.client(kgo.DialTLSConfig(g.trust("")), kgo.SASL(g.mechanism("ann", "secret")), kgo.ProducerBatchMaxBytes(8<<20), kgo.ProducerBatchCompression(kgo.NoCompression()))
	if err := big.ProduceSync(t.Context(), &kgo.Record{Topic: "v.t", Value: make([]byte, 7<<20)}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	goesOn := func(when string) {
		t.Helper()
		began := time.Now()
		if err := g.code(honest, "write", "v.t"); err != nil {
			t.Errorf("%s: a Kafka client: %v", when, err)
		}
		if err := g.code(g.as("bob", "secret"), "read", "v.t"); err != nil { // a new login
			t.Errorf("%s: a Kafka client that logs in: %v", when, err)
		}
		if code := g.status(g.trust(""), "ann", "secret"); code != http.StatusOK {
			t.Errorf("%s: HTTP says %d", when, code)
		}
		if code := g.call(g.trust(""), "ann", "secret"); code != codes.OK {
			t.Errorf("%s: gRPC says %v", when, code)
		}
		if took := time.Since(began); took > 30*time.Second { // half a frame is given up after a minute
			t.Errorf("%s: other users waited for %v", when, took)
		}
	}
	goesOn("before")
	base, _ := resident(t, g.up.PID())
	f := &flood{g: g}
	defer f.close()
	writes := func(b []byte) func(*tls.Conn) error {
		return func(c *tls.Conn) error { _, err := c.Write(b); return err }
	}
	asAnn := func(begin func(w *wire) error) func(*tls.Conn) error {
		return func(c *tls.Conn) error {
			w := g.wire(c)
			if err := w.login("ann", "secret"); err != nil {
				return err
			}
			return begin(w)
		}
	}
	// A login frame has at most 16 KiB, and counts for 512 KiB of 256 MiB.
	f.open(g.kafka, 550, writes(announced(int16(kmsg.SASLAuthenticate), 16<<10, 100)))
	goesOn("half a login")
	f.open(g.kafka, 50, func(c *tls.Conn) error {
		if _, err := c.Write(announced(int16(kmsg.Produce), 1<<30, 1000)); err != nil {
			return err
		}
		return ends(c)
	})
	f.open(g.kafka, 4, asAnn(func(w *wire) error { _, err := w.Write(announced(int16(kmsg.Produce), 32<<20, 1<<20)); return err }))
	f.open(g.kafka, 4, asAnn(func(w *wire) error {
		if _, err := w.Write(announced(int16(kmsg.Produce), 1<<30, 1000)); err != nil {
			return err
		}
		return ends(w.Conn)
	}))
	fetch := waitingFetch("v.t")
	fetch.MinBytes, fetch.Topics[0].Partitions[0].FetchOffset = 1, 0
	f.open(g.kafka, 200, asAnn(func(w *wire) error { return w.send(fetch) }))
	// The first bytes of a handshake, whose record is announced with 64 KiB.
	for range 50 {
		c, err := net.Dial("tcp", g.kafka)
		if err == nil {
			f.c = append(f.c, tls.Client(c, nil))
			_, err = c.Write([]byte{22, 3, 1, 0xff, 0xff, 1, 0xff})
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	head := "POST /v1/append/v/t HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
	q := &http.Request{Header: http.Header{}}
	q.SetBasicAuth("ann", "secret")
	body := head + "Authorization: " + q.Header.Get("Authorization") + "\r\nContent-Length: 67108864\r\n\r\n" + strings.Repeat("x", 900_000)
	f.open(g.ingest, 100, writes([]byte(head)))
	f.open(g.ingest, 20, func(c *tls.Conn) error {
		go c.Write([]byte(body)) // the server reads when the server has memory
		return nil
	})
	calls := g.halfCalls(100)
	defer calls()
	goesOn("all at once")
	f.close()
	calls()
	goesOn("after")
	_, peak := resident(t, g.up.PID())
	if grown := peak - base; grown > 1500<<20 {
		t.Errorf("the gateway grew by %d MiB", grown>>20)
	} else {
		t.Logf("the gateway grew by %d MiB", grown>>20)
	}
}

// ends waits until the server has ended a connection.
func ends(c *tls.Conn) error {
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, c); os.IsTimeout(err) {
		return fmt.Errorf("the server did not end a connection that announced 1 GiB")
	}
	return nil
}

// halfCalls makes connections of HTTP/2 with calls of gRPC whose messages come in part, or are
// announced with 1 GiB. It returns a function to end the calls.
func (g *guarded) halfCalls(n int) (end func()) {
	g.t.Helper()
	var bodies []*io.PipeWriter
	for i := range n {
		r, w := io.Pipe()
		bodies = append(bodies, w)
		q, err := http.NewRequestWithContext(g.t.Context(), http.MethodPost, "https://"+g.ingest+ingest.Ingest_Append_FullMethodName, r)
		if err != nil {
			g.t.Fatal(err)
		}
		q.Header.Set("Content-Type", "application/grpc")
		q.Header.Set("TE", "trailers")
		q.SetBasicAuth("ann", "secret")
		go func() {
			transport := &http.Transport{TLSClientConfig: g.trust(""), ForceAttemptHTTP2: true}
			defer transport.CloseIdleConnections()
			p, err := transport.RoundTrip(q)
			if err != nil {
				return
			}
			defer p.Body.Close()
			io.Copy(io.Discard, p.Body)
		}()
		size := uint32(1 << 30)
		if i%2 == 0 {
			size = 300 << 10
		}
		go w.Write(slices.Concat([]byte{0}, binary.BigEndian.AppendUint32(nil, size), make([]byte, 60<<10)))
	}
	return func() {
		for _, w := range bodies {
			w.CloseWithError(io.ErrUnexpectedEOF)
		}
	}
}
