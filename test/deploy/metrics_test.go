package deploy

import (
	"encoding/json"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

var metricName = regexp.MustCompile(`\bpenstock_[a-z_]+[a-z]\b`)

// metrics are the names that the sources give to metrics.
func metrics(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	quoted := regexp.MustCompile(`"(penstock_[a-z_]+)"`)
	for _, dir := range []string{"cmd", "csi"} {
		err := filepath.WalkDir(filepath.Join("../..", dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			for _, m := range quoted.FindAllSubmatch(read(t, path), -1) {
				names[string(m[1])] = true
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return names
}

// checkQuery demands that a query's metrics are served, and that counters are made rates.
// promtool judges the query's syntax.
func checkQuery(t *testing.T, known map[string]bool, where, query string) {
	t.Helper()
	found := metricName.FindAllString(query, -1)
	if len(found) == 0 && !strings.HasPrefix(query, `up{job=~".*penstock.*"}`) {
		t.Errorf("%s looks at nothing of ours: %s", where, query)
	}
	for _, name := range found {
		if !known[name] && !known[strings.TrimSuffix(name, "_bucket")] {
			t.Errorf("%s: nobody serves %s", where, name)
		}
		// A counter is of use as a rate alone.
		if strings.HasSuffix(name, "_total") && !regexp.MustCompile(`(rate|increase)\(`+name).MatchString(query) {
			t.Errorf("%s: %s is a counter", where, name)
		}
	}
}

const alertsFile = "../../deploy/prometheus/alerts.yaml"

// rule is an alert.
type rule struct {
	Alert, Expr, For    string
	Labels, Annotations map[string]string
}

// alerts are all rules.
func alerts(t *testing.T) (all []rule) {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string
			Rules []rule
		}
	}
	dec := yaml.NewDecoder(strings.NewReader(string(read(t, alertsFile))))
	dec.KnownFields(true)
	if err := dec.Decode(&file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// TestAlerts: rules have the fields that Prometheus knows, and read metrics that are served.
func TestAlerts(t *testing.T) {
	known, seen := metrics(t), map[string]bool{}
	for _, r := range alerts(t) {
		if seen[r.Alert] || !regexp.MustCompile(`^Penstock[A-Za-z]+$`).MatchString(r.Alert) {
			t.Errorf("alert %q: twice, or no name", r.Alert)
		}
		seen[r.Alert] = true
		if s := r.Labels["severity"]; s != "warning" && s != "critical" {
			t.Errorf("%s: severity %q", r.Alert, s)
		}
		if r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s says not what is wrong and what to do", r.Alert)
		}
		checkQuery(t, known, r.Alert, r.Expr)
	}
	// Every alert in docs/operations.md has a rule.
	doc := string(read(t, "../../docs/operations.md"))
	_, doc, found := strings.Cut(doc, "What to alert on:")
	doc, _, end := strings.Cut(doc, "\n## ")
	all := string(read(t, "../../deploy/prometheus/alerts.yaml"))
	names := metricName.FindAllString(doc, -1)
	if !found || !end || len(names) == 0 {
		t.Fatal("docs/operations.md does not say what to alert on")
	}
	for _, name := range names {
		if !strings.Contains(all, name) {
			t.Errorf("docs/operations.md says to alert on %s, and no rule does", name)
		}
	}
}

// TestDashboard: panels read metrics that are served, and no panel covers another panel.
func TestDashboard(t *testing.T) {
	type panel struct {
		ID          int
		Type, Title string
		GridPos     struct{ H, W, X, Y int }
		Targets     []struct{ Expr string }
	}
	var board struct {
		Title, UID    string
		SchemaVersion int
		Panels        []panel
	}
	if err := json.Unmarshal(read(t, "../../deploy/grafana/penstock.json"), &board); err != nil {
		t.Fatal(err)
	}
	if board.Title == "" || board.UID == "" || board.SchemaVersion == 0 || len(board.Panels) == 0 {
		t.Errorf("no dashboard: %+v", board)
	}
	known, ids := metrics(t), map[int]bool{}
	for i, p := range board.Panels {
		if ids[p.ID] || p.Title == "" {
			t.Errorf("panel %d %q: number twice, or no title", p.ID, p.Title)
		}
		ids[p.ID] = true
		if (p.Type == "row") != (len(p.Targets) == 0) {
			t.Errorf("panel %q of type %s has %d queries", p.Title, p.Type, len(p.Targets))
		}
		for _, q := range p.Targets {
			checkQuery(t, known, p.Title, q.Expr)
		}
		a := p.GridPos
		if a.X < 0 || a.X+a.W > 24 || a.H < 1 || a.W < 1 {
			t.Errorf("panel %q lies outside: %+v", p.Title, a)
		}
		for _, other := range board.Panels[:i] {
			b := other.GridPos
			if a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels %q and %q lie on each other", p.Title, other.Title)
			}
		}
	}
}
