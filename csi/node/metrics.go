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
)

// toldOf are the families of a mount's metrics that are passed on; those of its
// process are not.
var toldOf = []string{"penstock_mount_", "penstock_client_"}

// waitingName is the family of which each pod gets one of its own.
const waitingName = "penstock_mount_read_waiting_seconds_total"

// Gather asks all mounts on this node: what they count, with the label volume (its
// name in the cluster), and for each pod that has one how long reads were waited
// for. Mounts that don't answer are counted; what they would say is missing.
func (s *Server) Gather() ([]*dto.MetricFamily, error) {
	staged := s.folders()
	var (
		asking   sync.WaitGroup
		room     = make(chan struct{}, tellAtOnce)
		mu       sync.Mutex
		families = map[string]*dto.MetricFamily{}
		silent   int
	)
	add := func(name, help string, kind dto.MetricType, m ...*dto.Metric) { // caller holds mu
		f := families[name]
		if f == nil {
			f = &dto.MetricFamily{Name: &name, Help: &help, Type: &kind}
			families[name] = f
		}
		f.Metric = append(f.Metric, m...)
	}
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
					m.Label = append(m.Label, label(volumeLabel, volume))
				}
				add(name, family.GetHelp(), family.GetType(), family.Metric...)
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
					add("penstock_csi_pod_read_waiting_seconds_total",
						"Time in which a READ of a volume was asked for on this node and not answered, for each pod that has it: its share of the time bounds how long the pod stood still for that volume's data. Pods of a node that share a volume share the number.",
						dto.MetricType_COUNTER, &dto.Metric{
							Label:   []*dto.LabelPair{label("namespace", p.Namespace), label("pod", p.Name), label(volumeLabel, volume)},
							Counter: family.Metric[0].Counter,
						})
				}
			}
		})
	}
	asking.Wait()
	n := float64(silent)
	add("penstock_csi_mounts_silent", "Mounts of this node whose process did not say what it counts.", dto.MetricType_GAUGE, &dto.Metric{Gauge: &dto.Gauge{Value: &n}})
	return slices.Collect(maps.Values(families)), nil
}

var _ prometheus.Gatherer = (*Server)(nil)

func label(name, value string) *dto.LabelPair { return &dto.LabelPair{Name: &name, Value: &value} }

// maxTold bounds what a mount may say.
const maxTold = 1 << 20

// ask reads what a process counts from its socket.
func ask(socket string) (map[string]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(context.Background(), tellWithin)
	defer cancel()
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
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

// socket is where the process of a mount tells what it counts. It is not in the
// folder: an earlier version of the driver would not remove it.
func (f folder) socket() string {
	state := filepath.Dir(filepath.Dir(string(f)))
	return filepath.Join(state, "sockets", filepath.Base(string(f)))
}
