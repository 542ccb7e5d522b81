package snapshots

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
	"penstock.io/penstock/test/operator"
)

var (
	turns   = flag.Int("turns", 1, "how often volumes with and without snapshots take turns at being changed")
	held    = flag.String("snapshots", "3", "numbers of snapshots at which changes are timed, ascending")
	digests = flag.Uint64("digest-rate", 0, "as of penstock: bytes a second that digests of snapshots read beside; 0: as many as by default, 1: as few as may be")
	writers = flag.String("writers", "10", "numbers of files being written at which the barrier of snapshots is timed, ascending")
)

// rated is a volume with a number of snapshots, and the durations of each kind of work
// there.
type rated struct {
	v         *penstock.Volume
	o         *operator.Operator
	snapshots int
	taken     int
	inos      []meta.Ino
	took, cpu map[string][]float64 // seconds, by turn
}

func (r *rated) create(t *testing.T, n int) {
	for range n {
		e, err := r.v.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("f", len(r.inos)), Mode: meta.TypeRegular | 0o644, Excl: true})
		if err != nil {
			t.Fatal(err)
		}
		r.inos = append(r.inos, e.Attr.Ino)
	}
}

// write overwrites the first blocks of the first files.
func (r *rated) write(t *testing.T, n int) {
	b := make([]byte, 8<<10)
	for _, ino := range r.inos[:n] {
		if _, err := r.v.Write(t.Context(), nil, ino, b, 0, false, false); err != nil {
			t.Fatal(err)
		}
	}
}

func (r *rated) snap(t *testing.T) {
	r.taken++
	if _, err := r.o.TakeSnapshot(t.Context(), r.v.ID(), fmt.Sprint("s", r.taken)); err != nil {
		t.Fatal(err)
	}
}

// TestRates times the creation of files and writes to files, with client, server and
// journal together, in volumes with snapshots and in a volume without, by turns. In the
// "steady" case each volume was changed since its last snapshot; in the other case the
// snapshot was taken a moment ago. Each ratio is the median of the quotients of the
// turns.
func TestRates(t *testing.T) {
	s := upAs(t, local.Config{Logger: slog.New(slog.DiscardHandler), DigestRate: *digests})
	c := dial(t, s, "rates")
	o := operator.New(t, s.Meta.Addr, nil)
	const files = 500
	var all []*rated
	for _, n := range append([]int{0}, numbers(t, *held)...) {
		name := fmt.Sprint("with", n)
		if _, err := o.CreateVolume(t.Context(), name, meta.Policy{Replicas: 1}, meta.VolumeWords{}); err != nil {
			t.Fatal(err)
		}
		v, err := c.Volume(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		r := &rated{v: v, o: o, snapshots: n, took: map[string][]float64{}, cpu: map[string][]float64{}}
		r.create(t, 2*files)
		for range n {
			r.write(t, 20)
			r.snap(t)
		}
		all = append(all, r)
	}
	for turn := range *turns {
		for _, fresh := range []bool{false, true} {
			for _, what := range []string{"create", "write"} {
				for _, r := range all {
					if fresh && r.snapshots > 0 {
						r.snap(t)
					}
				}
				name := what + ", steady"
				if fresh {
					name = what + ", after a snapshot"
				}
				for i := range all {
					r := all[(i+turn)%len(all)]
					began, used := time.Now(), processorTime(t)
					if what == "create" {
						r.create(t, files)
					} else {
						r.write(t, files)
					}
					if err := r.v.SyncAll(t.Context()); err != nil {
						t.Fatal(err)
					}
					r.took[name] = append(r.took[name], time.Since(began).Seconds())
					r.cpu[name] = append(r.cpu[name], processorTime(t)-used)
				}
			}
		}
	}
	for _, name := range []string{"create, steady", "create, after a snapshot", "write, steady", "write, after a snapshot"} {
		for _, r := range all {
			ratio := func(of func(*rated) []float64) float64 {
				var q []float64
				for i, x := range of(r) {
					q = append(q, of(all[0])[i]/x)
				}
				return median(q)
			}
			took := func(r *rated) []float64 { return r.took[name] }
			cpu := func(r *rated) []float64 { return r.cpu[name] }
			t.Logf("%-24s %3d snapshots: %6.0f/s, %4.0f us of CPU; of the rate without: %.2f, by CPU %.2f",
				name, r.snapshots, files/median(took(r)), median(cpu(r))/files*1e6, ratio(took), ratio(cpu))
		}
	}
}

// TestWritersGoOn: after a snapshot, the writers of many files get their leases back with
// few requests, and the next snapshot has the bytes written under these leases.
func TestWritersGoOn(t *testing.T) {
	s := up(t)
	c := dial(t, s, "writer")
	v, err := c.VolumeByID(t.Context(), meta.RootVolume)
	if err != nil {
		t.Fatal(err)
	}
	r := &rated{v: v, o: operator.New(t, s.Meta.Addr, nil)}
	const files = 600
	r.create(t, files)
	r.write(t, files)
	r.snap(t)
	before := c.Stats().RPCs
	r.write(t, files)
	if n := c.Stats().RPCs - before; n > files/20 {
		t.Errorf("%d requests for the leases of %d files", n, files)
	} else {
		t.Logf("%d requests for the leases of %d files", n, files)
	}
	for i, ino := range r.inos { // all of it stays in the buffer
		if _, err := v.Write(t.Context(), nil, ino, []byte{byte(i), byte(i >> 8)}, 9000, false, false); err != nil {
			t.Fatal(err)
		}
	}
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.Meta.Addr}, Role: wire.RoleClient, Name: "reader", Handler: quiet{}})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(context.Background())
	two, err := operator.New(t, s.Meta.Addr, nil).TakeSnapshot(t.Context(), meta.RootVolume, "two")
	if err != nil {
		t.Fatal(err)
	}
	short := 0
	for _, ino := range r.inos {
		a, err := sess.DoAt(t.Context(), meta.RootVolume, two.At, &meta.GetAttr{Ino: ino})
		if err != nil {
			t.Fatal(err)
		}
		if a.Attr.Size != 9002 {
			short++
		}
	}
	if uint64(short) > two.Unanswered { // on a slow machine some are late
		t.Errorf("%d of %d files are in the snapshot without what was written before it, of %d it says so", short, files, two.Unanswered)
	}
}

func median(l []float64) float64 { return slices.Sorted(slices.Values(l))[len(l)/2] }

// processorTime returns the CPU seconds of this process: client, servers and etcd.
func processorTime(t *testing.T) float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// barriers collects the log lines of a metadata server about snapshots.
type barriers struct {
	mu  sync.Mutex
	all []taken
}

type taken struct {
	Msg        string        `json:"msg"`
	Written    int           `json:"written"`
	Unanswered int           `json:"unanswered"`
	Held       time.Duration `json:"held"`
	Took       time.Duration `json:"took"`
}

func (b *barriers) Write(line []byte) (int, error) {
	if bytes.Contains(line, []byte(`"snapshot taken"`)) {
		var s taken
		if err := json.Unmarshal(line, &s); err != nil {
			return 0, err
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.all = append(b.all, s)
	}
	return len(line), nil
}

// TestBarrier times the barrier of snapshots with a growing number of files under way,
// from four clients. The time must be linear in the number of files, and a second at
// most.
func TestBarrier(t *testing.T) {
	var log barriers
	s := upWith(t, slog.New(slog.NewJSONHandler(&log, nil)))
	o := operator.New(t, s.Meta.Addr, nil)
	vols := make([]*penstock.Volume, 4)
	for i := range vols {
		vols[i] = connect(t, s, fmt.Sprint("w", i))
	}
	const times = 5
	for _, n := range numbers(t, *writers) {
		var inos []meta.Ino
		for i := range n {
			e, err := vols[i%4].Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("of", n, "-", i), Mode: meta.TypeRegular | 0o644})
			if err != nil {
				t.Fatal(err)
			}
			inos = append(inos, e.Attr.Ino)
		}
		log.mu.Lock()
		log.all = nil
		log.mu.Unlock()
		for i := range times {
			for j, ino := range inos { // each has something to commit, under an exclusive lease
				if _, err := vols[j%4].Write(t.Context(), nil, ino, make([]byte, 6000), 0, true, false); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := o.TakeSnapshot(t.Context(), vols[0].ID(), fmt.Sprint("of", n, "-", i)); err != nil {
				t.Fatal(err)
			}
		}
		var held, took []float64
		unanswered := 0
		for _, s := range log.all {
			held, took = append(held, s.Held.Seconds()*1e3), append(took, s.Took.Seconds()*1e3)
			unanswered += s.Unanswered
			if s.Written < n {
				t.Errorf("%d files were being written, and the barrier knew of %d", n, s.Written)
			}
		}
		if len(held) != times {
			t.Fatalf("%d snapshots were logged, not %d", len(held), times)
		}
		t.Logf("%5d files being written: held %.0f ms (at most %.0f), %.3f a file; took %.0f ms (at most %.0f); %d files late",
			n, median(held), slices.Max(held), median(held)/float64(n), median(took), slices.Max(took), unanswered)
	}
}
