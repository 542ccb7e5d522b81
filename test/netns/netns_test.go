package netns

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// childEnv makes the test binary the process that TestLeftovers kills.
const childEnv = "NETNS_TEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		fmt.Println(abandon())
		select {} // until the kill
	}
	os.Exit(m.Run())
}

// abandon makes a data centre with a process, and returns the names of both.
func abandon() string {
	n, err := New()
	if err != nil {
		return err.Error()
	}
	r, err := n.AddRack("r")
	if err != nil {
		return err.Error()
	}
	a, err := r.AddNode("a")
	if err != nil {
		return err.Error()
	}
	p, err := a.Start(Config{Name: "sleep", Path: "sleep", Args: []string{"1000"}, Alone: true})
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s %d", n.prefix, p.PID())
}

// centre has two nodes in the first rack and one node in the second rack.
func centre(t *testing.T, make func() (*Net, error)) (n *Net, racks []*Rack, nodes []*Node) {
	t.Helper()
	n, err := make()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if names := named(t, n.prefix); len(names) > 0 {
			t.Errorf("namespaces are left: %v", names)
		}
	})
	for i, count := range []int{2, 1} {
		r, err := n.AddRack(fmt.Sprint("rack", i))
		if err != nil {
			t.Fatal(err)
		}
		racks = append(racks, r)
		for range count {
			node, err := r.AddNode(fmt.Sprint("node", len(nodes)))
			if err != nil {
				t.Fatal(err)
			}
			nodes = append(nodes, node)
		}
	}
	return n, racks, nodes
}

func named(t *testing.T, prefix string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(namespaces)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) {
			names = append(names, e.Name())
		}
	}
	return names
}

// port is a UDP socket on a node.
type port struct {
	node *Node
	conn *net.UDPConn
	got  atomic.Int64 // datagrams
	size atomic.Int64 // bytes of the datagrams
}

func open(t *testing.T, node *Node) *port {
	t.Helper()
	p := &port{node: node}
	err := node.Do(func() (err error) {
		p.conn, err = net.ListenUDP("udp4", &net.UDPAddr{IP: node.Addr.AsSlice(), Port: 7000})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2000)
		for {
			k, err := p.conn.Read(b)
			if err != nil {
				return // closed
			}
			p.got.Add(1)
			p.size.Add(int64(k))
		}
	}()
	t.Cleanup(func() { p.conn.Close(); <-done })
	return p
}

// send sends datagrams from one node to another, and returns the number of arrivals.
func send(t *testing.T, from, to *port, count, size int) int {
	t.Helper()
	before := to.got.Load()
	for range count {
		// An unreachable host causes an error; the count shows the loss, too.
		_, _ = from.conn.WriteToUDP(make([]byte, size), &net.UDPAddr{IP: to.node.Addr.AsSlice(), Port: 7000})
		time.Sleep(20 * time.Microsecond)
	}
	// Until all have arrived, or nothing came for a while: longer for many datagrams.
	for idle := 0; idle < min(20*count, 100) && to.got.Load()-before < int64(count); idle++ {
		seen := to.got.Load()
		time.Sleep(10 * time.Millisecond)
		if to.got.Load() != seen {
			idle = 0
		}
	}
	return int(to.got.Load() - before)
}

func TestFaults(t *testing.T) {
	t.Run("own addresses", func(t *testing.T) { testFaults(t, New) })
	t.Run("loopback addresses", func(t *testing.T) { testFaults(t, NewLoopback) })
}

func testFaults(t *testing.T, make func() (*Net, error)) {
	n, racks, nodes := centre(t, make)
	var p []*port
	for _, node := range nodes {
		p = append(p, open(t, node))
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	// reach demands the pairs of nodes that hear each other: "01" for 0 to 1.
	reach := func(what string, not ...string) {
		t.Helper()
		for i := range p {
			for j := range p {
				want := 1
				for _, pair := range not {
					if pair == fmt.Sprint(i)+fmt.Sprint(j) {
						want = 0
					}
				}
				// Once more after a loss: the first datagram may wait for an address.
				got := 0
				for tries := 0; i != j && tries < 5 && got < want || tries == 0; tries++ {
					got = send(t, p[i], p[j], 1, 100)
				}
				if i != j && min(got, 1) != want { // more: a datagram that waited for an address came, too
					t.Errorf("%s: from %d to %d arrived %d, want %d", what, i, j, got, want)
				}
			}
		}
	}
	reach("whole")
	check(n.Cut(nodes[0], nodes[1]))
	reach("cut", "01", "10")
	check(n.Heal(nodes[0], nodes[1]))
	check(n.CutOneWay(nodes[0], nodes[2]))
	reach("cut one way", "02")
	check(n.CutOneWay(nodes[1], nodes[2]))
	reach("two cut one way", "02", "12")
	check(n.HealAll())
	reach("healed")
	check(racks[0].CutUplink())
	reach("without uplink", "02", "12", "20", "21")
	check(racks[0].HealUplink())
	check(nodes[1].Down())
	reach("node down", "01", "10", "12", "21")
	check(n.HealAll())
	reach("up again")

	check(n.Set(nodes[0], nodes[1], Fault{Loss: 0.5}))
	if got := send(t, p[0], p[1], 400, 100); got < 100 || got > 300 {
		t.Errorf("with half of the packets lost, %d of 400 arrived", got)
	}
	check(n.Set(nodes[0], nodes[1], Fault{}))

	// 420 KB: a burst of 128 KiB passes at once, the rest in a second or more, or
	// not at all.
	timed := func() (got int, d time.Duration) {
		began := time.Now()
		got = send(t, p[0], p[2], 300, 1400)
		return got, time.Since(began)
	}
	// The best of some tries: datagrams that arrive while the reader has no processor are
	// dropped.
	unlimited := func(when string) {
		t.Helper()
		for try := 1; ; try++ {
			got, d := timed()
			if got >= 290 && d <= time.Second {
				return
			}
			if try == 10 {
				t.Errorf("%s %d of 300 arrived within %v", when, got, d)
				return
			}
		}
	}
	unlimited("without a limit")
	check(nodes[0].Slow(100 << 10))
	if got, d := timed(); got < 20 || got > 220 && d < time.Second {
		t.Errorf("at 100 KiB/s %d of 300 arrived within %v", got, d)
	}
	check(nodes[0].Slow(0))
	unlimited("without a limit again")
}

func TestProcesses(t *testing.T) {
	_, _, nodes := centre(t, New)
	out, err := nodes[2].Run(t.Context(), "ip", "-brief", "address", "show", "dev", link)
	if err != nil || !bytes.Contains(out, []byte(nodes[2].Addr.String())) {
		t.Fatalf("a process on node 2 sees %q, %v", out, err)
	}
	out, err = exec.Command("ip", "-brief", "address").CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("10.77.")) {
		t.Fatalf("the machine's own network has an address of ours: %s %v", out, err)
	}
	var log bytes.Buffer
	r, w := io.Pipe()
	p, err := nodes[0].Start(Config{Name: "ticker", Path: "sh", Args: []string{"-c", "while :; do echo $$; sleep 0.01; done"}, Alone: true, Log: io.MultiWriter(&log, w)})
	if err != nil {
		t.Fatal(err)
	}
	ticks := make(chan struct{}, 1)
	go func() {
		for b := make([]byte, 100); ; {
			if _, err := r.Read(b); err != nil {
				return
			}
			select {
			case ticks <- struct{}{}:
			default:
			}
		}
	}()
	tick := func(within time.Duration) bool {
		select {
		case <-ticks:
			return true
		case <-time.After(within):
			return false
		}
	}
	if !tick(time.Minute) {
		t.Fatal("the process prints nothing")
	}
	if err := p.Pause(); err != nil {
		t.Fatal(err)
	}
	for tick(time.Second) { // datagrams under way
	}
	if tick(300 * time.Millisecond) {
		t.Error("a paused process prints")
	}
	if err := p.Resume(); err != nil {
		t.Fatal(err)
	}
	if !tick(time.Minute) {
		t.Error("a resumed process prints nothing")
	}
	p.Kill()
	w.Close()
	if !strings.HasPrefix(log.String(), "1\n") {
		t.Errorf("a process alone should be number 1 of its space; it says %q", log.String()[:20])
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := nodes[0].Run(ctx, "sleep", "100"); err == nil {
		t.Error("a command that was given up ended well")
	}
}

// TestLeftovers: the next test removes the remains of a killed test; the killed test's processes
// die, too.
func TestLeftovers(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var prefix string
	var pid int
	if _, err := fmt.Fscan(out, &prefix, &pid); err != nil {
		t.Fatal(err)
	}
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	if len(named(t, prefix)) != 2 || syscall.Kill(pid, 0) != nil {
		t.Error("what belongs to a living test was swept")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the status is the signal
	deadline := time.Now().Add(time.Minute)
	for syscall.Kill(pid, 0) == nil {
		if time.Now().After(deadline) {
			t.Fatal("a process outlives the test that started it")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if len(named(t, prefix)) != 2 {
		t.Error("the killed test left nothing: this test tests nothing")
	}
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	if names := named(t, prefix); len(names) > 0 {
		t.Errorf("leftovers of a dead test: %v", names)
	}
}
