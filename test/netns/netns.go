// Package netns owns a data centre made of Linux network namespaces: racks with a bridge each,
// nodes with addresses of their own, processes on the nodes, and the faults of a network: links
// cut both ways or one way, packets lost, links slowed, racks without an uplink.
//
//	        fabric (one namespace)
//	   +-------- core bridge --------+
//	   | uplink (veth)               | uplink
//	rack bridge r1                rack bridge r2
//	 | port    | port              | port
//	node a    node b              node c          a namespace each
//	10.77.1.1 10.77.1.2           10.77.2.1
//
// A data centre does not touch the machine's own network, and two data centres never meet, so
// that all use the same addresses. Needed: root, ip, tc, iptables.
//
// Names of namespaces contain the process that made the namespace, so that New removes the
// remains of a killed process.
package netns

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
)

// Net is a data centre.
type Net struct {
	prefix   string
	loopback bool

	// mu is held while commands run: changes of the net come one by one.
	mu     sync.Mutex
	racks  []*Rack
	nodes  map[string]*Node
	faults map[pair]Fault
}

// Rack is a bridge with an uplink to the core.
type Rack struct {
	Name  string
	net   *Net
	index int
	nodes int
}

// Node is a namespace with one address.
type Node struct {
	Name string
	Rack *Rack
	Addr netip.Addr
	net  *Net
	ns   string // name of the namespace
	port string // the rack's end of the node's link, in the fabric
}

// pair is a direction between two nodes.
type pair struct{ from, to *Node }

// Fault describes the treatment of packets of one direction.
type Fault struct {
	// Loss is the share of lost packets, above 0 to 1 for all.
	Loss float64
}

var nets atomic.Int64

// family begins the names of all our namespaces.
const family = "pnet."

// New makes an empty data centre, after removing the data centres of dead processes.
func New() (*Net, error) { return build(false) }

// NewLoopback is New with addresses from 127.0.0.0/8, for programs that speak without
// certificates between loopback addresses only.
func NewLoopback() (*Net, error) { return build(true) }

func build(loopback bool) (*Net, error) {
	if err := Sweep(); err != nil {
		return nil, err
	}
	pid := os.Getpid()
	n := &Net{
		prefix:   fmt.Sprintf("%s%d.%d.%d.", family, pid, startOf(pid), nets.Add(1)),
		loopback: loopback, nodes: map[string]*Node{}, faults: map[pair]Fault{},
	}
	err := errors.Join(
		run("ip", "netns", "add", n.fabric()),
		run("ip", "-n", n.fabric(), "link", "add", "core", "type", "bridge"),
		run("ip", "-n", n.fabric(), "link", "set", "core", "up"),
	)
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

func (n *Net) fabric() string { return n.prefix + "fabric" }

// AddRack adds a rack.
func (n *Net) AddRack(name string) (*Rack, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := &Rack{Name: name, net: n, index: len(n.racks) + 1}
	n.racks = append(n.racks, r)
	f := n.fabric()
	return r, errors.Join(
		run("ip", "-n", f, "link", "add", r.bridge(), "type", "bridge"),
		run("ip", "-n", f, "link", "set", r.bridge(), "up"),
		run("ip", "-n", f, "link", "add", r.uplink(), "type", "veth", "peer", "name", r.downlink()),
		run("ip", "-n", f, "link", "set", r.uplink(), "master", r.bridge(), "up"),
		run("ip", "-n", f, "link", "set", r.downlink(), "master", "core", "up"),
	)
}

func (r *Rack) bridge() string   { return fmt.Sprintf("rack%d", r.index) }
func (r *Rack) uplink() string   { return fmt.Sprintf("up%d", r.index) }
func (r *Rack) downlink() string { return fmt.Sprintf("down%d", r.index) }

// CutUplink separates the rack from all other racks; nodes inside the rack still reach each
// other.
func (r *Rack) CutUplink() error { return r.set("down") }

// HealUplink undoes CutUplink.
func (r *Rack) HealUplink() error { return r.set("up") }

func (r *Rack) set(state string) error {
	r.net.mu.Lock()
	defer r.net.mu.Unlock()
	return run("ip", "-n", r.net.fabric(), "link", "set", r.uplink(), state)
}

// link is the name of a node's interface, in the node's namespace.
const link = "eth0"

// AddNode adds a node to the rack. Names are unique in the data centre.
func (r *Rack) AddNode(name string) (*Node, error) {
	n := r.net
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.nodes[name] != nil {
		return nil, fmt.Errorf("netns: there is a node %s already", name)
	}
	r.nodes++
	node := &Node{
		Name: name, Rack: r, net: n, ns: n.prefix + name,
		port: fmt.Sprintf("p%d-%d", r.index, r.nodes),
		Addr: netip.AddrFrom4([4]byte{10, 77, byte(r.index), byte(r.nodes)}),
	}
	n.nodes[name] = node
	if err := run("ip", "netns", "add", node.ns); err != nil {
		return node, err
	}
	if n.loopback {
		node.Addr = netip.AddrFrom4([4]byte{127, 77, byte(r.index), byte(r.nodes)})
		if err := node.freeLoopback(); err != nil {
			return node, err
		}
	}
	return node, errors.Join(
		run("ip", "link", "add", link, "netns", node.ns, "type", "veth", "peer", "name", node.port, "netns", n.fabric()),
		run("ip", "-n", n.fabric(), "link", "set", node.port, "master", r.bridge(), "up"),
		run("ip", "-n", node.ns, "addr", "add", node.Addr.String()+"/16", "dev", link),
		run("ip", "-n", node.ns, "link", "set", link, "up"),
		run("ip", "-n", node.ns, "link", "set", "lo", "up"),
		node.moveLoopback(),
	)
}

// freeLoopback lets 127.0.0.0/8 be used on links.
func (n *Node) freeLoopback() error {
	return run("ip", "netns", "exec", n.ns, "sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1", "net.ipv4.conf.default.route_localnet=1")
}

// moveLoopback leaves 127.0.0.1 alone to the loopback interface.
func (n *Node) moveLoopback() error {
	if !n.net.loopback {
		return nil
	}
	return run("ip", "-n", n.ns, "route", "del", "local", "127.0.0.0/8", "dev", "lo", "table", "local")
}

// Down takes the node's link away.
func (n *Node) Down() error { return n.set("down") }

// Up restores the link.
func (n *Node) Up() error { return n.set("up") }

func (n *Node) set(state string) error {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	return run("ip", "-n", n.net.fabric(), "link", "set", n.port, state)
}

// Slow limits the node's link, each way, to a rate in bytes per second; 0 takes the limit away.
// Packets beyond the rate wait for at most 400 ms, then the link drops the packets.
func (n *Node) Slow(rate uint64) error {
	n.net.mu.Lock()
	defer n.net.mu.Unlock()
	for _, end := range [][2]string{{n.ns, link}, {n.net.fabric(), n.port}} {
		var err error
		if rate == 0 {
			err = run("tc", "-n", end[0], "qdisc", "del", "dev", end[1], "root")
			if err != nil && strings.Contains(err.Error(), "handle of zero") {
				err = nil // was not slow
			}
		} else {
			// A burst of 10 ms, and no less than a packet of segmentation offload.
			burst := max(rate/100, 128<<10)
			err = run("tc", "-n", end[0], "qdisc", "replace", "dev", end[1], "root", "tbf",
				"rate", fmt.Sprintf("%dbit", 8*rate), "burst", strconv.FormatUint(burst, 10), "latency", "400ms")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Set puts a fault on packets from one node to another, in place of the earlier fault; Fault{}
// heals.
func (n *Net) Set(from, to *Node, f Fault) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f == (Fault{}) {
		delete(n.faults, pair{from, to})
	} else {
		n.faults[pair{from, to}] = f
	}
	return n.filter(to)
}

// CutOneWay loses all packets from one node to another, not the answers.
func (n *Net) CutOneWay(from, to *Node) error { return n.Set(from, to, Fault{Loss: 1}) }

// Cut separates two nodes.
func (n *Net) Cut(a, b *Node) error {
	return errors.Join(n.CutOneWay(a, b), n.CutOneWay(b, a))
}

// Heal undoes Cut, CutOneWay and Set between two nodes.
func (n *Net) Heal(a, b *Node) error {
	return errors.Join(n.Set(a, b, Fault{}), n.Set(b, a, Fault{}))
}

// HealAll undoes all faults: of pairs, uplinks and links.
func (n *Net) HealAll() error {
	n.mu.Lock()
	faulty := map[*Node]bool{}
	for p := range n.faults {
		faulty[p.to] = true
	}
	clear(n.faults)
	var errs []error
	for node := range faulty {
		errs = append(errs, n.filter(node))
	}
	racks, nodes := slices.Clone(n.racks), n.sorted()
	n.mu.Unlock()
	for _, r := range racks {
		errs = append(errs, r.HealUplink())
	}
	for _, node := range nodes {
		errs = append(errs, node.Up(), node.Slow(0))
	}
	return errors.Join(errs...)
}

func (n *Net) sorted() []*Node {
	var nodes []*Node
	for _, node := range n.nodes {
		nodes = append(nodes, node)
	}
	slices.SortFunc(nodes, func(a, b *Node) int { return strings.Compare(a.Name, b.Name) })
	return nodes
}

// filter writes the faults of all packets to a node into the node's packet filter, in one step.
// The receiver filters: a sender that drops would tell its process (EPERM), which no cable does.
func (n *Net) filter(to *Node) error {
	rules := "*filter\n:INPUT ACCEPT [0:0]\n"
	for _, from := range n.sorted() {
		f, ok := n.faults[pair{from, to}]
		if !ok {
			continue
		}
		rules += "-A INPUT -s " + from.Addr.String()
		if f.Loss < 1 {
			rules += fmt.Sprintf(" -m statistic --mode random --probability %.4f", f.Loss)
		}
		rules += " -j DROP\n"
	}
	cmd := exec.Command("ip", "netns", "exec", to.ns, "iptables-restore", "-w")
	cmd.Stdin = strings.NewReader(rules + "COMMIT\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("netns: iptables-restore on %s: %w\n%s%s", to.Name, err, rules, out)
	}
	return nil
}

// Close removes the data centre and kills the processes on its nodes.
func (n *Net) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return remove(func(name string) bool { return strings.HasPrefix(name, n.prefix) })
}

// Sweep removes the data centres of processes that run no more.
func Sweep() error {
	return remove(func(name string) bool {
		rest, ours := strings.CutPrefix(name, family)
		if !ours {
			return false
		}
		f := strings.SplitN(rest, ".", 3)
		if len(f) < 3 {
			return false
		}
		pid, err := strconv.Atoi(f[0])
		start, serr := strconv.ParseUint(f[1], 10, 64)
		return err == nil && serr == nil && startOf(pid) != start
	})
}

// namespaces is where ip(8) keeps names.
const namespaces = "/run/netns"

// remove takes away the namespaces whose names match, and kills their processes.
func remove(match func(name string) bool) error {
	entries, err := os.ReadDir(namespaces)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var names []string
	inodes := map[uint64]bool{}
	for _, e := range entries {
		if !match(e.Name()) {
			continue
		}
		names = append(names, e.Name())
		var st syscall.Stat_t
		if syscall.Stat(filepath.Join(namespaces, e.Name()), &st) == nil {
			inodes[st.Ino] = true
		}
	}
	if len(names) == 0 {
		return nil
	}
	var errs []error
	errs = append(errs, killIn(inodes))
	for _, name := range names {
		if err := run("ip", "netns", "del", name); err != nil {
			if _, serr := os.Stat(filepath.Join(namespaces, name)); errors.Is(serr, os.ErrNotExist) {
				continue // another test swept the namespace meanwhile
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// killIn kills the processes in the given namespaces.
func killIn(inodes map[uint64]bool) error {
	pids, err := processesIn(inodes)
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL) // the process may have gone by itself
	}
	return err
}

// processesIn lists the processes, other than this process, in the given namespaces.
func processesIn(inodes map[uint64]bool) (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat(filepath.Join("/proc", e.Name(), "ns", "net"), &st) == nil && inodes[st.Ino] {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// startOf is a process' start in clock ticks since boot; 0 without such a process.
func startOf(pid int) uint64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// After the name in parentheses, which may hold anything: field 22 of all.
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 20 {
		return 0
	}
	n, err := strconv.ParseUint(string(f[19]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}

func run(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("netns: %s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}
