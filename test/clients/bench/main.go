// Command bench compares the streams of 'penstock up' with kfake, the Kafka server of franz-go, and with
// JetStream of nats-server, in one run, by turns. 'make bench-streams' runs the command; docs/performance.md
// has figures.
//
// Each server is a process of its own, with its data in a directory of its own below -dir. In a round, each
// server gets a fresh directory. One client publishes records of 1 KiB for -for, another client reads all
// of the records, and then, at a tenth of the speed of publishing, a consumer measures how old each record is
// that it gets. Every publisher waits for its acknowledgements, with many records under way.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

var (
	penstock = flag.String("penstock", "", "the program penstock")
	dir      = flag.String("dir", "", "directory for the servers' data; default: a temporary directory")
	length   = flag.Duration("for", 5*time.Second, "how long a phase lasts")
	rounds   = flag.Int("rounds", 3, "rounds, of which the table has the medians")
	counts   = flag.String("partitions", "1,4,100", "numbers of partitions")
	only     = flag.String("only", "", "servers, with commas between; empty: all")
	idle     = flag.Int("idle", 0, "measure the memory of so many idle streams instead")
	profiles = flag.String("profiles", "", "with -idle: directory for profiles of the heap")
	serve    = flag.String("serve", "", "be a server: kfake or nats")
	sync     = flag.Bool("sync", false, "with -serve: sync each batch or message")
	address  = flag.String("address", "", "with -serve: host and port")
)

// A system is a server with clients for it.
type system struct {
	name  string
	start func(dir, addr string) *exec.Cmd
	// connect returns clients of a stream with a number of partitions, which connect makes.
	connect func(ctx context.Context, addr string, partitions int) (client, error)
}

// A client publishes and consumes. Every record has valueSize bytes.
type client interface {
	// warm sends a record to each partition, and returns how many records the server has then: the first record
	// of a partition makes and opens files.
	warm(ctx context.Context) (records int, err error)
	// publish sends a record; done is called with the result.
	publish(ctx context.Context, value []byte, done func(error))
	// flush waits until all records are acknowledged.
	flush(ctx context.Context) error
	// consume calls got for records, from the beginning or from the end on, until ctx ends or got
	// returns false.
	consume(ctx context.Context, fromEnd bool, got func(value []byte) bool) error
	close()
}

const valueSize = 1 << 10

func self(args ...string) *exec.Cmd {
	path, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return exec.Command(path, args...)
}

func peer(kind string, sync bool) func(dir, addr string) *exec.Cmd {
	return func(dir, addr string) *exec.Cmd {
		return self("-serve", kind, "-dir", dir, "-address", addr, "-sync="+strconv.FormatBool(sync))
	}
}

var systems = []system{
	{"penstock", func(dir, addr string) *exec.Cmd {
		return exec.Command(*penstock, "up", "--dir", filepath.Join(dir, "d"), "--kafka", addr, "--ingest", "", "--admin", "none")
	}, connectKafka},
	{"kfake-sync", peer("kfake", true), connectKafka},
	{"kfake", peer("kfake", false), connectKafka},
	{"nats-sync", peer("nats", true), connectNATS},
	{"nats", peer("nats", false), connectNATS},
}

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	switch *serve {
	case "kfake":
		return serveKfake(ctx)
	case "nats":
		return serveNATS(ctx)
	}
	if *dir == "" {
		d, err := os.MkdirTemp("/var/tmp", "bench-streams-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(d)
		*dir = d
	}
	if *idle > 0 {
		return measureIdle(ctx, *idle)
	}
	fmt.Println("load before:", load())
	all := map[string][]result{}
	for range *rounds {
		for count := range strings.SplitSeq(*counts, ",") {
			n, err := strconv.Atoi(count)
			if err != nil {
				return err
			}
			for _, s := range systems {
				if *only != "" && !slices.Contains(strings.Split(*only, ","), s.name) {
					continue
				}
				r, err := measure(ctx, s, n)
				if err != nil {
					return fmt.Errorf("%s, %d partitions: %w", s.name, n, err)
				}
				key := fmt.Sprintf("%04d %s", n, s.name)
				all[key] = append(all[key], r)
				fmt.Printf("%4d %-10s %v load %s\n", n, s.name, r, load())
			}
		}
	}
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "\npartitions\tserver\tpublish MB/s\tconsume MB/s\tCPU s/GB\tp50 ms\tp99 ms")
	for _, key := range slices.Sorted(maps.Keys(all)) {
		n, name, _ := strings.Cut(key, " ")
		m := median(all[key])
		fmt.Fprintf(w, "%s\t%s\t%.1f\t%.1f\t%.2f\t%.2f\t%.2f\n", strings.TrimLeft(n, "0"), name, m.publish, m.consume, m.cpu, m.p50, m.p99)
	}
	return w.Flush()
}

// result is what a server did in a round.
type result struct {
	publish, consume float64 // MB/s
	cpu              float64 // seconds of the server for a GB in and out
	p50, p99         float64 // ms from publish to consumer
}

func (r result) String() string {
	return fmt.Sprintf("publish %7.1f MB/s  consume %7.1f MB/s  CPU %5.2f s/GB  p50 %6.2f ms  p99 %7.2f ms", r.publish, r.consume, r.cpu, r.p50, r.p99)
}

func median(rs []result) (m result) {
	of := func(field func(*result) *float64) {
		var l []float64
		for i := range rs {
			l = append(l, *field(&rs[i]))
		}
		slices.Sort(l)
		*field(&m) = l[len(l)/2]
	}
	of(func(r *result) *float64 { return &r.publish })
	of(func(r *result) *float64 { return &r.consume })
	of(func(r *result) *float64 { return &r.cpu })
	of(func(r *result) *float64 { return &r.p50 })
	of(func(r *result) *float64 { return &r.p99 })
	return m
}

// load is the load of the machine: over a minute, and the running threads.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err.Error()
	}
	f := strings.Fields(string(b))
	return f[0] + ", running " + f[3]
}

// running is a started server.
type running struct {
	cmd  *exec.Cmd
	addr string
	dir  string
}

func begin(ctx context.Context, s system, port int) (*running, error) {
	d, err := os.MkdirTemp(*dir, s.name+"-")
	if err != nil {
		return nil, err
	}
	r := &running{addr: fmt.Sprintf("127.0.0.1:%d", port), dir: d}
	r.cmd = s.start(d, r.addr)
	log, err := os.Create(filepath.Join(d, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	r.cmd.Stdout, r.cmd.Stderr = log, log
	dieWithParent(r.cmd)
	return r, r.cmd.Start()
}

// dieWithParent lets the kernel kill a process when this process dies.
func dieWithParent(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// stop ends the process.
func (r *running) stop() {
	_ = r.cmd.Process.Signal(syscall.SIGTERM)
	timer := time.AfterFunc(30*time.Second, func() { _ = r.cmd.Process.Kill() })
	defer timer.Stop()
	_ = r.cmd.Wait() // the exit status of a peer says nothing
}

func (r *running) end() error {
	r.stop()
	return os.RemoveAll(r.dir)
}

// cpu returns the processor time of the server.
func (r *running) cpu() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	f := strings.Fields(rest)
	user, uerr := strconv.ParseInt(f[11], 10, 64)
	system, serr := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, errors.Join(uerr, serr)
}

// memory returns the private memory of the server, in KiB.
func (r *running) memory() (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.SplitSeq(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "RssAnon:" {
			return strconv.ParseInt(f[1], 10, 64)
		}
	}
	return 0, errors.New("the kernel tells no RssAnon")
}

// until tries for a minute.
func until(ctx context.Context, try func(ctx context.Context) error) error {
	for end := time.Now().Add(time.Minute); ; {
		one, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := try(one)
		cancel()
		if err == nil || time.Now().After(end) || ctx.Err() != nil {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
}
