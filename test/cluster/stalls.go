package cluster

import (
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/test/load"
)

// stalls tells the kinds of faults that the load's calls met. A call that ran at any moment of a
// fault, or within the time of recovery from the fault, counts for its kind; and, if the call met
// faults of no other kind, also as a call that met this kind alone, so that no kind is blamed for
// others.
type stalls struct {
	mu      sync.Mutex
	windows []*window
	with    map[string]*load.Meter // by kind; "" is the calls without a fault
	alone   map[string]*load.Meter
}

// window is the time of one fault.
type window struct {
	kind     string
	from, to time.Time // to is zero while the fault lasts
}

// aftermath is the time after a fault's end in which the fault explains a stall.
const aftermath = 4 * time.Second

func newStalls() *stalls {
	return &stalls{with: map[string]*load.Meter{}, alone: map[string]*load.Meter{}}
}

// begin begins a fault; the caller ends the returned window.
func (s *stalls) begin(kind string) *window {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &window{kind: kind, from: time.Now()}
	s.windows = append(s.windows, w)
	return w
}

func (s *stalls) end(w *window) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.to = time.Now().Add(aftermath)
}

// observe hears of each call of the load.
func (s *stalls) observe(k load.Kind, bytes int, took time.Duration, err error) {
	now := time.Now()
	began := now.Add(-took)
	s.mu.Lock()
	var met []string
	for _, w := range s.windows {
		if w.from.Before(now) && (w.to.IsZero() || w.to.After(began)) && !slices.Contains(met, w.kind) {
			met = append(met, w.kind)
		}
	}
	var meters []*load.Meter
	for _, kind := range met {
		meters = append(meters, of(s.with, kind))
	}
	if len(met) == 0 {
		meters = append(meters, of(s.alone, ""))
	} else if len(met) == 1 {
		meters = append(meters, of(s.alone, met[0]))
	}
	s.mu.Unlock()
	for _, m := range meters {
		m.Count(k, bytes, took, err)
	}
}

func of(m map[string]*load.Meter, kind string) *load.Meter {
	if m[kind] == nil {
		m[kind] = &load.Meter{}
	}
	return m[kind]
}

// table prints p99 and worst of each kind of call for each kind of fault.
func (s *stalls) table(w io.Writer, kinds []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	cell := func(m *load.Meter, k load.Kind) string {
		if m == nil {
			return "-"
		}
		f := m.Figures(k)
		if f.Calls == f.Failed {
			return "-"
		}
		return fmt.Sprintf("%s %s", seconds(f.P99), seconds(f.Worst))
	}
	row := func(name string, m *load.Meter) {
		fmt.Fprintf(w, "%s", name)
		for _, k := range load.Kinds() {
			fmt.Fprintf(w, "\t%s", cell(m, k))
		}
		fmt.Fprintln(w)
	}
	head := func(title string) {
		fmt.Fprintf(w, "\n%s", title)
		for _, k := range load.Kinds() {
			fmt.Fprintf(w, "\t%v", k)
		}
		fmt.Fprintln(w)
	}
	head("SECONDS, P99 AND WORST, WHILE IT LASTED")
	for _, kind := range kinds {
		row(kind, s.with[kind])
	}
	head("AND WHILE NO OTHER KIND DID")
	row("none at all", s.alone[""])
	for _, kind := range kinds {
		if s.alone[kind] != nil {
			row(kind, s.alone[kind])
		}
	}
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f", d.Seconds()) }
