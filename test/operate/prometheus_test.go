package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"penstock.io/penstock/test/port"
)

// prom is a Prometheus that scrapes each second.
type prom struct{ addr string }

// newProm starts a Prometheus with the rules of deploy/prometheus; the test's end ends the
// Prometheus.
func newProm(t *testing.T, dir string, targets ...string) *prom {
	t.Helper()
	rules, err := filepath.Abs("../../deploy/prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "prometheus.yaml")
	text := fmt.Sprintf("global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: [%q]\nscrape_configs:\n  - {job_name: penstock, static_configs: [{targets: [%s]}]}\n",
		rules, strings.Join(targets, ", "))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &prom{port.Free(t)}
	log, err := os.Create(filepath.Join(dir, "prometheus.log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("prometheus", "--config.file", config, "--storage.tsdb.path", filepath.Join(dir, "prometheus"), "--web.listen-address", p.addr, "--log.level", "warn")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		log.Close()
		if b, err := os.ReadFile(log.Name()); t.Failed() && err == nil {
			t.Logf("%s", b)
		}
	})
	return p
}

// get sends a query to the Prometheus, and decodes the answer into data.
func (p *prom) get(path string, query url.Values, data any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, (&url.URL{Scheme: "http", Host: p.addr, Path: "/api/v1/" + path, RawQuery: query.Encode()}).String(), nil)
	if err != nil {
		return err
	}
	re, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer re.Body.Close()
	answer := struct {
		Error string
		Data  any
	}{Data: data}
	if err := json.NewDecoder(re.Body).Decode(&answer); err != nil {
		return fmt.Errorf("%s: %s: %w", path, re.Status, err)
	}
	if re.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", path, re.Status, answer.Error)
	}
	return nil
}

// alerts are the rules' states. A rule that Prometheus could not compute is an error.
func (p *prom) alerts() (map[string]string, error) {
	var data struct {
		Groups []struct {
			Rules []struct{ Name, State, Health, LastError string }
		}
	}
	if err := p.get("rules", nil, &data); err != nil {
		return nil, err
	}
	states := map[string]string{}
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			if r.Health != "ok" {
				return nil, fmt.Errorf("%s is %s: %s", r.Name, r.Health, r.LastError)
			}
			states[r.Name] = r.State
		}
	}
	return states, nil
}

// readers use a stream through a gateway: a producer, and the only member of a group.
type readers struct{ producer, member *kgo.Client }

func newReaders(t *testing.T, gateway, topic string) readers {
	t.Helper()
	client := func(opts ...kgo.Opt) *kgo.Client {
		c, err := kgo.NewClient(append(opts, kgo.SeedBrokers(gateway))...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c
	}
	return readers{
		client(kgo.DefaultProduceTopic(topic)),
		client(kgo.ConsumerGroup("g"), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit()),
	}
}

// use appends a record, and reads and commits all records.
func (s readers) use(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := s.producer.ProduceSync(ctx, kgo.StringRecord("a")).FirstErr(); err != nil {
		return err
	}
	if err := s.member.PollFetches(ctx).Err(); err != nil {
		return err
	}
	return s.member.CommitUncommittedOffsets(ctx)
}

// TestPrometheus: a Prometheus that scrapes servers, a gateway and a mount has an answer to each
// query of the dashboard, except the queries about the CSI driver, which does not run here; no
// rule of ours alerts while all is well, and a rule alerts when the chunk server is gone.
func TestPrometheus(t *testing.T) {
	t.Parallel()
	targets := []string{port.Free(t), port.Free(t), port.Free(t), port.Free(t)}
	r := newRig(t, 0, "--metrics", targets[0])
	chunks := r.Run("chunkserver", "--data", filepath.Join(r.Dir, "c"), "--cluster", r.Addr, "--metrics", targets[1], "--local-clients=false")
	r.Until("a volume", func() error { _, err := r.Ctl("volume", "create", "v", "--replicas", "1"); return err })
	at := r.mount("v:/", "w", "--admin", targets[2])
	kafka := port.Free(t)
	r.Run("gateway", "--cluster", r.Addr, "--kafka", kafka, "--admin", targets[3])
	r.Until("a stream", func() error { _, err := r.Ctl("stream", "create", "/s"); return err })
	streams := newReaders(t, kafka, "s")
	p := newProm(t, r.Dir, targets...)

	r.Until("all are scraped", func() error {
		var data struct {
			ActiveTargets []struct{ ScrapeURL, Health, LastError string }
		}
		if err := p.get("targets", nil, &data); err != nil {
			return err
		}
		if len(data.ActiveTargets) != len(targets) {
			return fmt.Errorf("%d of %d", len(data.ActiveTargets), len(targets))
		}
		for _, a := range data.ActiveTargets {
			if a.Health != "up" {
				return fmt.Errorf("%s is %s: %s", a.ScrapeURL, a.Health, a.LastError)
			}
		}
		return nil
	})

	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	b, err := os.ReadFile("../../deploy/grafana/penstock.json")
	if err == nil {
		err = json.Unmarshal(b, &board)
	}
	if err != nil {
		t.Fatal(err)
	}
	f, asked := filepath.Join(at, "f"), 0
	interval := regexp.MustCompile(`\$__\w+`)
	for _, panel := range board.Panels {
		for _, q := range panel.Targets {
			if strings.Contains(q.Expr, "penstock_csi_") {
				continue
			}
			asked++
			r.Until(panel.Title, func() error {
				if err := os.WriteFile(f, []byte("bytes"), 0o600); err != nil {
					t.Fatal(err)
				}
				if strings.Contains(q.Expr, "penstock_stream_") {
					if err := streams.use(t.Context()); err != nil {
						return err
					}
				}
				var data struct {
					Result []struct{ Value [2]any }
				}
				if err := p.get("query", url.Values{"query": {interval.ReplaceAllString(q.Expr, "10s")}}, &data); err != nil {
					return err
				}
				if len(data.Result) == 0 || slices.ContainsFunc(data.Result, func(s struct{ Value [2]any }) bool { return s.Value[1] == "NaN" }) {
					return fmt.Errorf("%s: %v", q.Expr, data.Result)
				}
				return nil
			})
		}
	}
	if asked < 20 {
		t.Errorf("only %d queries of the dashboard were asked", asked)
	}

	var states map[string]string
	r.Until("the rules are computed", func() (err error) { states, err = p.alerts(); return err })
	for name, state := range states {
		// The fill of the disk under the tests is no matter of the cluster.
		if state == "firing" && name != "PenstockDiskAlmostFull" {
			t.Errorf("all is well, and %s is %s", name, state)
		}
	}
	if s := states["PenstockNoChunkServers"]; s != "inactive" {
		t.Errorf("there is a chunk server, and PenstockNoChunkServers is %q", s)
	}
	chunks.Kill()
	r.Until("an alert that there is no chunk server", func() error {
		states, err := p.alerts()
		if err == nil && states["PenstockNoChunkServers"] == "inactive" {
			err = errors.New("nothing")
		}
		return err
	})
}
