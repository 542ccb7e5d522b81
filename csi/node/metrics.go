package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// Metrics of mounts. Each mount has its own process, with its metrics on a socket in a
// directory hidden from everything outside the driver's container. So the driver collects the
// metrics of the mounts whenever Prometheus scrapes the driver, and labels the metrics with
// the volume.
//
// A node mounts a volume once for all its pods, and the kernel does not tell a file system's
// process for which pod a READ is. So each pod has the number of the mount: exact if one pod
// of the node has the claim, and otherwise the total of all pods having the claim.

const (
	tellWithin  = 2 * time.Second // a mount's process may take
	tellAtOnce  = 8
	volumeLabel = "volume"
	// Several claims of one snapshot mount the same volume, each with its own mount: the
	// handle tells their metrics apart. A sum over the mounts would fall when a mount ends,
	// which would look like a reset of all counters.
	handleLabel = "handle"
)

// toldOf are the prefixes of the metric families that the driver passes on from a mount. The
// driver drops the families of a mount's Go process.
var toldOf = []string{"penstock_mount_", "penstock_client_"}

// waitingName is the family from which Gather derives a family by pod.
const waitingName = "penstock_mount_read_waiting_seconds_total"

// told maps a family's name to the metrics of all mounts.
type told map[string]*dto.MetricFamily

// add adds metrics to a family. Metrics with equal labels, from a volume staged twice, are
// summed, because one duplicate would make the whole scrape fail. A family of another type
// than before, from a mount process of another version, would do so, too, and is dropped: the
// first type stays.
func (t told) add(name, help string, kind dto.MetricType, metrics ...*dto.Metric) {
	f := t[name]
	if f == nil {
		f = &dto.MetricFamily{Name: &name, Help: &help, Type: &kind}
		t[name] = f
	}
	if f.GetType() != kind {
		return
	}
	for _, m := range metrics {
		slices.SortFunc(m.Label, func(a, b *dto.LabelPair) int { return strings.Compare(a.GetName(), b.GetName()) })
		i := slices.IndexFunc(f.Metric, func(x *dto.Metric) bool {
			return slices.EqualFunc(x.Label, m.Label, func(a, b *dto.LabelPair) bool {
				return a.GetName() == b.GetName() && a.GetValue() == b.GetValue()
			})
		})
		if i < 0 {
			f.Metric = append(f.Metric, m)
		} else {
			sum(f.Metric[i], m)
		}
	}
}

// sum adds m to the metric to. Metrics of different types stay unchanged.
func sum(to, m *dto.Metric) {
	plus := func(to, m *float64) *float64 { n := *to + *m; return &n }
	switch {
	case to.Counter != nil && m.Counter != nil:
		to.Counter = &dto.Counter{Value: plus(to.Counter.Value, m.Counter.Value)}
	case to.Gauge != nil && m.Gauge != nil:
		to.Gauge = &dto.Gauge{Value: plus(to.Gauge.Value, m.Gauge.Value)}
	case to.Histogram != nil && m.Histogram != nil && len(to.Histogram.Bucket) == len(m.Histogram.Bucket):
		count := to.Histogram.GetSampleCount() + m.Histogram.GetSampleCount()
		h := &dto.Histogram{SampleCount: &count, SampleSum: plus(to.Histogram.SampleSum, m.Histogram.SampleSum)}
		for i, b := range to.Histogram.Bucket {
			n := b.GetCumulativeCount() + m.Histogram.Bucket[i].GetCumulativeCount()
			h.Bucket = append(h.Bucket, &dto.Bucket{CumulativeCount: &n, UpperBound: b.UpperBound})
		}
		to.Histogram = h
	}
}

// Gather collects the metrics of all mounts on this node, with the labels volume (the name in
// the cluster) and handle (the orchestrator's id), and for each pod with a volume the time
// spent waiting for reads. Gather counts mounts without an answer and unreadable records; the
// metrics of such mounts are missing.
func (s *Server) Gather() ([]*dto.MetricFamily, error) {
	staged, unread := s.folders()
	var (
		asking   sync.WaitGroup
		room     = make(chan struct{}, tellAtOnce)
		mu       sync.Mutex
		families = told{}
		silent   int
	)
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return !isOurs(m), false })
	if err != nil {
		return nil, err
	}
	mountedAt := map[string]bool{}
	for _, m := range mounts {
		mountedAt[m.Mountpoint] = true
	}
	for _, f := range staged {
		r, err := f.read()
		if err != nil || !mountedAt[r.Staging] {
			continue // the volume is being staged or unstaged
		}
		asking.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			said, err := ask(f.socket())
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				silent++
				s.Logger.Debug("a mount does not tell what it counts", "volume", r.Volume, "err", err)
				return
			}
			volume := strings.TrimSuffix(r.Source, ":/")
			for name, family := range said {
				if !slices.ContainsFunc(toldOf, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
					continue
				}
				for _, m := range family.Metric {
					m.Label = append(m.Label, label(volumeLabel, volume), label(handleLabel, r.Volume))
				}
				families.add(name, family.GetHelp(), family.GetType(), family.Metric...)
				if name != waitingName || len(family.Metric) != 1 {
					continue
				}
				pods := map[pod]bool{}
				for target, p := range r.Pods {
					if mountedAt[target] {
						pods[p] = true
					}
				}
				for p := range pods {
					families.add("penstock_csi_pod_read_waiting_seconds_total",
						"Time in which a READ of a volume was asked for on this node and not answered, for each pod that has it: its share of the time bounds how long the pod stood still for that volume's data. Pods of a node that share a volume share the number.",
						dto.MetricType_COUNTER, &dto.Metric{
							Label:   []*dto.LabelPair{label("namespace", p.Namespace), label("pod", p.Name), label(volumeLabel, volume), label(handleLabel, r.Volume)},
							Counter: family.Metric[0].Counter,
						})
				}
			}
		})
	}
	asking.Wait()
	for name, g := range map[string]struct {
		help string
		n    int
	}{
		"penstock_csi_mounts_silent":      {"Mounts of this node whose process did not say what it counts.", silent},
		"penstock_csi_records_unreadable": {"Folders of the state of which can't be told how their volume was staged; they are left alone.", unread},
	} {
		n := float64(g.n)
		families.add(name, g.help, dto.MetricType_GAUGE, &dto.Metric{Gauge: &dto.Gauge{Value: &n}})
	}
	return slices.Collect(maps.Values(families)), nil
}

var _ prometheus.Gatherer = (*Server)(nil)

func label(name, value string) *dto.LabelPair { return &dto.LabelPair{Name: &name, Value: &value} }

// maxTold bounds a mount process's answer, in bytes.
const maxTold = 1 << 20

// at returns a transport to the process on a socket.
func at(socket string) *http.Transport {
	return &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
}

// ask reads a process's metrics from its socket, within tellWithin.
func ask(socket string) (map[string]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(context.Background(), tellWithin)
	defer cancel()
	transport := at(socket)
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://mount/metrics", nil)
	if err != nil {
		return nil, err
	}
	a, err := transport.RoundTrip(q)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return nil, errors.New(a.Status)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	told, err := parser.TextToMetricFamilies(http.MaxBytesReader(nil, a.Body, maxTold))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", socket, err)
	}
	return told, nil
}

// pod names a pod with a volume.
type pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// note records the pod to which a volume is about to be published, if the orchestrator names
// the pod (podInfoOnMount), and removes pods from the record whose target is no longer
// mounted.
func (f folder) note(r record, target string, p pod) error {
	if p.Name == "" || r.Pods[target] == p {
		return nil
	}
	kept := map[string]pod{target: p}
	for at, other := range r.Pods {
		if at == target {
			continue
		}
		if m, err := mountsAt(at); err != nil || len(m) > 0 {
			kept[at] = other
		}
	}
	r.Pods = kept
	return f.write(r)
}
