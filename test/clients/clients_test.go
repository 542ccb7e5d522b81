// Package clients uses streams of a running 'penstock up' with Kafka clients from elsewhere, and
// prints a table of clients and cases. The package is a module of its own, so that the product's
// go.mod does not name the clients.
package clients

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var (
	program = flag.String("program", "../../bin/penstock", "the penstock program")
)

// patience bounds a wait for a required event.
const patience = 90 * time.Second

// compressions are the codecs tried with each client.
var compressions = []string{"none", "gzip", "snappy", "lz4", "zstd"}

// sizes are the lengths of the values that each client sends and reads back.
var sizes = []int{0, 1, 1000, 1 << 20}

// value is a value of n bytes that compresses only in part.
func value(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// table collects the outcomes of clients and cases.
type table struct {
	cases []string
	rows  []string
	cell  map[[2]string]string
}

func (t *table) set(client, name, outcome string) {
	if t.cell == nil {
		t.cell = map[[2]string]string{}
	}
	if !contains(t.rows, client) {
		t.rows = append(t.rows, client)
	}
	if !contains(t.cases, name) {
		t.cases = append(t.cases, name)
	}
	t.cell[[2]string{client, name}] = outcome
}

func contains(l []string, s string) bool {
	for _, x := range l {
		if x == s {
			return true
		}
	}
	return false
}

func (t *table) String() string {
	var b strings.Builder
	b.WriteString("| case | " + strings.Join(t.rows, " | ") + " |\n")
	for _, c := range t.cases {
		b.WriteString("| " + c)
		for _, r := range t.rows {
			b.WriteString(" | " + t.cell[[2]string{r, c}])
		}
		b.WriteString(" |\n")
	}
	return b.String()
}

// server is a running 'penstock up'.
type server struct {
	addr   string // for Kafka clients
	ingest string // for gRPC clients
	dir    string
}

// freeAddress returns an unused loopback address.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	bin, err := filepath.Abs(*program)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{addr: freeAddress(t), ingest: freeAddress(t), dir: filepath.Join(t.TempDir(), "d")}
	var logs bytes.Buffer
	up := exec.Command(bin, append([]string{"up", "--dir", s.dir, "--kafka", s.addr, "--ingest", s.ingest}, args...)...)
	up.Stdout, up.Stderr = &logs, &logs
	if err := up.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		up.Process.Signal(os.Interrupt)
		up.Wait()
		if t.Failed() {
			os.WriteFile(filepath.Join(os.TempDir(), "penstock-clients.log"), logs.Bytes(), 0o600)
		}
	})
	awaitServer(t, s.addr)
	return s
}

// gateway starts one more gateway of the server, and returns the gateway's address for Kafka clients.
func (s *server) gateway(t *testing.T, name string) string {
	t.Helper()
	bin, err := filepath.Abs(*program)
	if err != nil {
		t.Fatal(err)
	}
	addr := freeAddress(t)
	cmd := exec.Command(bin, "gateway", "--cluster", "unix:"+filepath.Join(s.dir, "meta.sock"), "--name", name, "--kafka", addr, "--admin", "none")
	var logs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &logs, &logs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			t.Logf("gateway %s: %s", name, logs.Bytes())
		}
	})
	awaitServer(t, addr)
	return addr
}

// awaitServer waits until a gateway listens.
func awaitServer(t *testing.T, addr string) {
	t.Helper()
	ended := time.Now().Add(patience)
	for {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
			return
		}
		if time.Now().After(ended) {
			t.Fatalf("the gateway does not answer: %v", err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// story is a case for each client. The name of the topic is the client's own.
type story struct {
	name string
	run  func(ctx context.Context, addr, topic string) error
}

// TestClients runs each client through all cases and logs the table.
func TestClients(t *testing.T) {
	s := startServer(t)
	makeTopics(t, s.addr, "kcat")
	var all table
	for _, c := range []struct {
		name    string
		stories []story
	}{
		{"franz-go", franzStories()},
		{"sarama", saramaStories()},
		{"segmentio", segmentioStories()},
	} {
		for i, st := range c.stories {
			t.Run(c.name+"/"+st.name, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				if err := st.run(ctx, s.addr, fmt.Sprintf("%s-%d", c.name, i)); err != nil {
					all.set(c.name, st.name, "FAILED")
					t.Error(err)
					return
				}
				all.set(c.name, st.name, "passed")
			})
		}
	}
	for _, c := range []struct {
		name    string
		command []string
	}{
		{"confluent-go", []string{confluent(t)}},
		{"confluent-python", []string{"/usr/bin/python3", "scripts/confluent.py"}},
		{"kafka-python", []string{"/usr/bin/python3", "scripts/kafkapython.py"}},
		{"kcat", []string{"/bin/sh", "scripts/kcat.sh"}},
		{"kafkajs", []string{"node", "scripts/kafkajs.cjs"}},
		{"platformatic", []string{"node", "scripts/platformatic.mjs"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			script(t, s, &all, c.name, c.command)
		})
	}
	t.Logf("\n%s", all.String())
}

// makeTopics makes ten topics for each client that makes none.
func makeTopics(t *testing.T, addr string, clients ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, admin, err := franzClient(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, name := range clients {
		for i := range 10 {
			if _, err := admin.CreateTopic(ctx, 1, 1, nil, fmt.Sprintf("%s-%d", name, i)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// confluent builds the program with the cases of confluent-kafka-go, and returns its path.
func confluent(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "confluent")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", bin, ".")
	cmd.Dir, cmd.Env = "confluent", append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("the cases of confluent-kafka-go can't be built: %v\n%s", err, out)
	}
	return bin
}

// script runs a client's program, which prints a line "CASE<tab>passed", "CASE<tab>no codec" (the
// client has none) or "CASE<tab>why it failed" for each case.
func script(t *testing.T, s *server, all *table, name string, command []string) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*patience)
	defer cancel()
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, command[0], append(command[1:], s.addr)...)
	cmd.Stderr = &errs
	out, err := cmd.Output()
	for line := range strings.Lines(string(out)) {
		story, outcome, ok := strings.Cut(strings.TrimSpace(line), "\t")
		if !ok {
			continue
		}
		if outcome != "passed" && outcome != "no codec" {
			t.Errorf("%s: %s", story, outcome)
			outcome = "FAILED"
		}
		all.set(name, story, outcome)
	}
	if err != nil {
		t.Errorf("%v: %v\n%s", command, err, errs.String())
	}
}
