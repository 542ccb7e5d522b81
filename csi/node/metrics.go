package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"path/filepath"
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

// What mounts count. Each is a process of its own, which tells its numbers at a
// socket in a directory that nobody outside of the driver's container sees. So the
// driver asks them, whenever somebody asks it, and marks what they say with the
// volume.
//
// A volume is mounted once on a node, for all its pods there: which of them a READ
// of the kernel was for is not told to a file system's process. So a number of a
// mount is one of each of its pods: exact where a node has one pod of a claim, and
// where it has more, what all of them did together.

const (
	tellWithin  = 2 * time.Second // a mount's process may take
	tellAtOnce  = 8
	volumeLabel = "volume"
	// Several claims of one snapshot are served by it, each by a mount of its own:
	// the handle tells them apart. A sum of them would fall when one goes, which
	// looks as if all had begun anew.
	handleLabel = "handle"
)

// toldOf are the families of a mount's metrics that are passed on; those of its
// process are not.
var toldOf = []string{"penstock_mount_", "penstock_client_"}

// waitingName is the family of which each pod gets one of its own.
const waitingName = "penstock_mount_read_waiting_seconds_total"

// told is what mounts count, family by family.
type told map[string]*dto.MetricFamily

// add takes metrics in. Of those with the same labels, of a volume that is staged
// twice, it makes one: a family with two would have Prometheus told nothing at all.
// So would two kinds of a name, of mounts whose process is of another version: the
// first one counts.
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

// sum adds what one metric counts to another of the same kind.
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

// Gather asks all mounts on this node: what they count, with the labels volume (its
// name in the cluster) and handle (by which the orchestrator knows it), and for each
// pod that has one how long reads were waited for. Mounts that don't answer, and
// records that can't be read, are counted; what they would say is missing.
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
			continue // it is coming, or going
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

// maxTold bounds what a mount may say.
const maxTold = 1 << 20

// at reaches a process at its socket.
func at(socket string) *http.Transport {
	return &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
}

// ask reads what a process counts from its socket.
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

// pod is one that has a volume.
type pod struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

// note keeps which pod a volume is about to be published to, where the orchestrator
// says so (podInfoOnMount), and forgets those that have it no more.
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

// socket is where the process of a mount answers questions for its metrics. It lies beside
// the folders of the mounts, not in this one.
func (f folder) socket() string {
	state := filepath.Dir(filepath.Dir(string(f)))
	return filepath.Join(state, "sockets", filepath.Base(string(f)))
}
