package deploy

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

// seen is Prometheus's view for a while: series, and the values of each series at one step after
// the other, as promtool reads series.
type seen map[string]string

// alertCase lists series on which an alert fires, and series on which the alert must not fire.
type alertCase struct {
	fires seen
	as    map[string]string // the alert's labels, besides the severity
	quiet []seen
	step  string // between two values, and looks; "": 1m
	at    string // when is looked; "": 50m
}

const in = `{job="penstock"}`

// alertCases are of every alert.
var alertCases = map[string]alertCase{
	"PenstockDiskUnhealthy": {
		fires: seen{`penstock_chunkserver_disk_unhealthy{disk="/mnt/a"}`: "1x60"}, as: map[string]string{"disk": "/mnt/a"},
		quiet: []seen{{`penstock_chunkserver_disk_unhealthy{disk="/mnt/a"}`: "0x60"}},
	},
	"PenstockDiskAlmostFull": {
		fires: seen{`penstock_chunkserver_disk_free_bytes{disk="/a"}`: "9x60", `penstock_chunkserver_disk_bytes{disk="/a"}`: "100x60"}, as: map[string]string{"disk": "/a"},
		quiet: []seen{
			{`penstock_chunkserver_disk_free_bytes{disk="/a"}`: "11x60", `penstock_chunkserver_disk_bytes{disk="/a"}`: "100x60"},
			{`penstock_chunkserver_disk_free_bytes{disk="/a"}`: "50x39 9x20", `penstock_chunkserver_disk_bytes{disk="/a"}`: "100x60"}, // for a moment
		},
	},
	"PenstockCorruption": {
		fires: seen{`penstock_chunkserver_corrupt_total{disk="/a"}`: "0x30 1x30"}, as: map[string]string{"disk": "/a"},
		quiet: []seen{{`penstock_chunkserver_corrupt_total{disk="/a"}`: "7x60"}},
	},
	"PenstockScrubberBehind": {
		fires: seen{`penstock_chunkserver_scrub_end_timestamp_seconds{disk="/a"}`: "3600x1000"}, as: map[string]string{"disk": "/a"},
		quiet: []seen{
			{`penstock_chunkserver_scrub_end_timestamp_seconds{disk="/a"}`: "0x1000"}, // a new disk
			{`penstock_chunkserver_scrub_end_timestamp_seconds{disk="/a"}`: "1209600x1000"},
		},
		step: "1h", at: "40d",
	},
	"PenstockRepairFails": {
		fires: seen{"penstock_chunkserver_pull_errors_total": "0+1x60"},
		quiet: []seen{{"penstock_chunkserver_pull_errors_total": "0+1x10 10x50"}, {"penstock_chunkserver_pull_errors_total": "9x60"}},
	},
	"PenstockJournalFull":     {fires: seen{"penstock_meta_journal_full": "1x60"}, quiet: []seen{{"penstock_meta_journal_full": "0x60"}}},
	"PenstockFollowersBehind": {fires: seen{"penstock_meta_followed_behind_volumes": "2x60"}, quiet: []seen{{"penstock_meta_followed_behind_volumes": "0x60"}, {"penstock_meta_followed_behind_volumes": "0x45 1x15"}}},
	"PenstockNoChunkServers":  {fires: seen{"penstock_meta_chunkservers": "0x60"}, quiet: []seen{{"penstock_meta_chunkservers": "1x60"}}},
	"PenstockBytesLost": {
		fires: seen{"penstock_client_lost_bytes_total": "0x45 4096x15"}, quiet: []seen{{"penstock_client_lost_bytes_total": "4096x60"}},
	},
	"PenstockDriverNotRegistered": {fires: seen{"penstock_csi_registered": "0x60"}, quiet: []seen{{"penstock_csi_registered": "1x60"}}},
	"PenstockDriverFails": {
		fires: seen{`penstock_csi_calls_total{instance="a",method="NodeStageVolume",code="Internal"}`: "0+1x60"},
		as:    map[string]string{"instance": "a", "method": "NodeStageVolume"},
		quiet: []seen{
			{`penstock_csi_calls_total{instance="a",method="NodeStageVolume",code="OK"}`: "0+1x60"},
			{`penstock_csi_calls_total{instance="a",method="NodeStageVolume",code="NotFound"}`: "0+1x60"},
		},
	},
	"PenstockProgramsWaitForData": {
		fires: seen{`penstock_mount_read_waiting_seconds_total{volume="v"}`: "0+58x60"}, as: map[string]string{"volume": "v"},
		quiet: []seen{{`penstock_mount_read_waiting_seconds_total{volume="v"}`: "0+30x60"}},
	},
	"PenstockChunksLost": {
		// Of two metadata servers one has bad chunks, and of several states one counts.
		fires: seen{`penstock_meta_bad_chunks{job="penstock",instance="a",state="lost"}`: "2x60", `penstock_meta_bad_chunks{job="penstock",instance="b",state="lost"}`: "0x60"},
		as:    map[string]string{"job": "penstock"},
		quiet: []seen{{`penstock_meta_bad_chunks{job="penstock",state="lost"}`: "0x60", `penstock_meta_bad_chunks{job="penstock",state="surplus"}`: "5x60"}},
	},
	"PenstockChunksEndangered": {
		fires: seen{`penstock_meta_bad_chunks{job="penstock",state="endangered"}`: "2x60"}, as: map[string]string{"job": "penstock"},
		quiet: []seen{{`penstock_meta_bad_chunks{job="penstock",state="endangered"}`: "0x46 2x15"}, {`penstock_meta_bad_chunks{job="penstock",state="draining"}`: "5x60"}},
	},
	"PenstockUnderReplicated": {
		fires: seen{`penstock_meta_bad_chunks{job="penstock",state="under_replicated"}`: "2x60"}, as: map[string]string{"job": "penstock"},
		quiet: []seen{{`penstock_meta_bad_chunks{job="penstock",state="under_replicated"}`: "2x30 0x30"}, {`penstock_meta_bad_chunks{job="penstock",state="misplaced"}`: "5x60"}},
	},
	"PenstockRepairBlocked": {
		fires: seen{`penstock_meta_bad_chunks{job="penstock",state="blocked"}`: "2x60"}, as: map[string]string{"job": "penstock"},
		quiet: []seen{{`penstock_meta_bad_chunks{job="penstock",state="blocked"}`: "0x60", `penstock_meta_bad_chunks{job="penstock",state="misplaced"}`: "2x60"}},
	},
	"PenstockChunkServerAway": {
		fires: seen{`penstock_meta_chunkservers_away{job="penstock",instance="a"}`: "1x60", `penstock_meta_chunkservers_away{job="penstock",instance="b"}`: "1x60"},
		as:    map[string]string{"job": "penstock"},
		quiet: []seen{{"penstock_meta_chunkservers_away" + in: "0x60"}, {"penstock_meta_chunkservers_away" + in: "0x46 1x14"}},
	},
	"PenstockSpaceLow": {
		fires: seen{"penstock_meta_cluster_free_bytes" + in: "9x60", "penstock_meta_cluster_bytes" + in: "100x60"}, as: map[string]string{"job": "penstock"},
		quiet: []seen{
			{"penstock_meta_cluster_free_bytes" + in: "11x60", "penstock_meta_cluster_bytes" + in: "100x60"},
			{"penstock_meta_cluster_free_bytes" + in: "0x60", "penstock_meta_cluster_bytes" + in: "0x60"}, // no chunk server: another alert's
		},
	},
	"PenstockVolumeFailed":   {fires: seen{"penstock_meta_volumes_failed": "1x60"}, quiet: []seen{{"penstock_meta_volumes_failed": "0x60"}}},
	"PenstockEtcdAway":       {fires: seen{"penstock_meta_etcd_reached": "0x60"}, quiet: []seen{{"penstock_meta_etcd_reached": "1x60"}}},
	"PenstockEtcdMemberAway": {fires: seen{`penstock_meta_etcd_endpoint_up{endpoint="e"}`: "0x60"}, as: map[string]string{"endpoint": "e"}, quiet: []seen{{`penstock_meta_etcd_endpoint_up{endpoint="e"}`: "1x60"}}},
	"PenstockEtcdAlarm":      {fires: seen{"penstock_meta_etcd_alarms": "1x60"}, quiet: []seen{{"penstock_meta_etcd_alarms": "0x60"}}},
	"PenstockEtcdNearQuota": {
		fires: seen{`penstock_meta_etcd_used_bytes{endpoint="e"}`: "76x60", `penstock_meta_etcd_bytes{endpoint="e"}`: "80x60", `penstock_meta_etcd_quota_bytes{endpoint="e"}`: "100x60"},
		as:    map[string]string{"endpoint": "e"},
		quiet: []seen{{`penstock_meta_etcd_used_bytes{endpoint="e"}`: "50x60", `penstock_meta_etcd_bytes{endpoint="e"}`: "80x60", `penstock_meta_etcd_quota_bytes{endpoint="e"}`: "100x60"}},
	},
	"PenstockCertificateEnds": { // the clock begins at 0
		fires: seen{"penstock_certificate_begin_timestamp_seconds": "-600000x60", "penstock_certificate_end_timestamp_seconds": "4800x60"},
		quiet: []seen{
			{"penstock_certificate_begin_timestamp_seconds": "-302400x60", "penstock_certificate_end_timestamp_seconds": "302400x60"}, // is about to be renewed
			{"penstock_certificate_begin_timestamp_seconds": "0x60", "penstock_certificate_end_timestamp_seconds": "604800x60"},
		},
	},
	"PenstockBearerOfCertificateThatEnds": {
		fires: seen{`penstock_meta_certificates_ending{job="penstock",instance="a"}`: "1x60"}, as: map[string]string{"job": "penstock"},
		quiet: []seen{{"penstock_meta_certificates_ending" + in: "0x60"}, {"penstock_meta_certificates_ending" + in: "1x30 0x30"}},
	},
	"PenstockTokenEnds": {
		fires: seen{`penstock_csi_token_end_timestamp_seconds{secret="s"}`: "500000x60"}, as: map[string]string{"secret": "s"},
		quiet: []seen{{`penstock_csi_token_end_timestamp_seconds{secret="s"}`: "1296000x60"}},
	},
	"PenstockTokenNotKept": {
		fires: seen{`penstock_csi_token_kept{secret="s"}`: "0x120"}, as: map[string]string{"secret": "s"},
		quiet: []seen{{`penstock_csi_token_kept{secret="s"}`: "1x120"}, {`penstock_csi_token_kept{secret="s"}`: "1x60 0x30 1x30"}},
		step:  "1m", at: "100m",
	},
	"PenstockNodeAgentEndsOften": {
		fires: seen{`penstock_csi_agents_ended_total{instance="a"}`: "0x20 1x5 2x5 4x5 5x60"}, as: map[string]string{"instance": "a"},
		quiet: []seen{{`penstock_csi_agents_ended_total{instance="a"}`: "9x60"}, {`penstock_csi_agents_ended_total{instance="a"}`: "0x20 1x40"}},
	},
	"PenstockMountNotHeld": {fires: seen{`penstock_mount_held{volume="v"}`: "0x60"}, as: map[string]string{"volume": "v"}, quiet: []seen{{`penstock_mount_held{volume="v"}`: "1x60"}}},
	"PenstockStreamAppendsSlow": {
		fires: seen{`penstock_stream_append_seconds_bucket{le="1"}`: "0+1x60", `penstock_stream_append_seconds_bucket{le="5"}`: "0+100x60", `penstock_stream_append_seconds_bucket{le="+Inf"}`: "0+100x60"},
		quiet: []seen{
			{`penstock_stream_append_seconds_bucket{le="1"}`: "0+100x60", `penstock_stream_append_seconds_bucket{le="5"}`: "0+100x60", `penstock_stream_append_seconds_bucket{le="+Inf"}`: "0+100x60"},
			{`penstock_stream_append_seconds_bucket{le="1"}`: "0x60", `penstock_stream_append_seconds_bucket{le="+Inf"}`: "0x60"}, // nobody appends
		},
	},
	"PenstockStreamTableBehind": {
		fires: seen{`penstock_stream_unpublished_records{instance="a"}`: "2000000x60"}, as: map[string]string{"instance": "a"},
		quiet: []seen{{`penstock_stream_unpublished_records{instance="a"}`: "5000x60"}, {`penstock_stream_unpublished_records{instance="a"}`: "2000000x40 0 2000000x20"}},
	},
	"PenstockTargetGone": {
		fires: seen{`up{job="penstock-system/penstock-cluster"}`: "0x60"}, as: map[string]string{"job": "penstock-system/penstock-cluster"},
		quiet: []seen{{`up{job="penstock"}`: "1x60"}, {`up{job="other"}`: "0x60"}, {`up{job="penstock"}`: "1x46 0x14"}},
	},
}

// promtool runs promtool.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), "promtool", args...).CombinedOutput(); err != nil {
		t.Errorf("promtool %v: %v\n%s", args, err, out)
	}
}

// TestAlertsTell: Prometheus reads the rules. Each rule fires on the series for firing, and does
// not fire on the other series.
func TestAlertsTell(t *testing.T) {
	promtool(t, "check", "rules", alertsFile)
	dir := t.TempDir()
	files := []string{"test", "rules"}
	for _, r := range alerts(t) {
		c, is := alertCases[r.Alert]
		if !is || len(c.fires) == 0 || len(c.quiet) == 0 {
			t.Errorf("%s: nobody tries when it tells, and when not", r.Alert)
			continue
		}
		if c.step == "" {
			c.step, c.at = "1m", "50m"
		}
		labels := map[string]string{"severity": r.Labels["severity"]}
		for k, v := range c.as {
			labels[k] = v
		}
		var tests []any
		for i, s := range append([]seen{c.fires}, c.quiet...) {
			var series []any
			for name, values := range s {
				series = append(series, map[string]any{"series": name, "values": values})
			}
			want := []any{}
			if i == 0 {
				want = append(want, map[string]any{"exp_labels": labels, "exp_annotations": r.Annotations})
			}
			tests = append(tests, map[string]any{
				"name": fmt.Sprintf("%s %d", r.Alert, i), "interval": c.step, "input_series": series,
				"alert_rule_test": []any{map[string]any{"eval_time": c.at, "alertname": r.Alert, "exp_alerts": want}},
			})
		}
		write := func(name string, what any) string {
			b, err := yaml.Marshal(what)
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(dir, name)
			if err := os.WriteFile(file, b, 0o644); err != nil {
				t.Fatal(err)
			}
			return file
		}
		// The rule alone: promtool looks at all given rules at each step.
		alone := map[string]any{"alert": r.Alert, "expr": r.Expr, "labels": r.Labels, "annotations": r.Annotations}
		if r.For != "" {
			alone["for"] = r.For
		}
		rules := write(r.Alert+"-rule.yaml", map[string]any{"groups": []any{map[string]any{"name": "one", "rules": []any{alone}}}})
		file := write(r.Alert+".yaml", map[string]any{"rule_files": []string{rules}, "evaluation_interval": c.step, "tests": tests})
		files = append(files, file)
	}
	if n := len(alerts(t)); len(alertCases) != n {
		t.Errorf("%d alerts are tried, there are %d", len(alertCases), n)
	}
	slices.Sort(files[2:])
	promtool(t, files...)
}

// grafana are the variables that Grafana replaces before Prometheus reads a query.
var grafana = regexp.MustCompile(`\$__rate_interval|\$__interval|\$__range`)

// TestDashboardQueries: Prometheus reads each query of the dashboard.
func TestDashboardQueries(t *testing.T) {
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(read(t, "../../deploy/grafana/penstock.json"), &board); err != nil {
		t.Fatal(err)
	}
	var rules []any
	for _, p := range board.Panels {
		for _, q := range p.Targets {
			if expr := grafana.ReplaceAllString(q.Expr, "5m"); strings.Contains(expr, "$") {
				t.Errorf("%s: what is $ in %s?", p.Title, expr)
			} else {
				rules = append(rules, map[string]any{"record": fmt.Sprintf("panel:query:%d", len(rules)), "expr": expr})
			}
		}
	}
	if len(rules) < 10 {
		t.Fatalf("the dashboard has %d queries", len(rules))
	}
	check := func(rules ...any) error {
		b, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": rules}}})
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "rules.yaml")
		if err := os.WriteFile(file, b, 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), "promtool", "check", "rules", file).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	if err := check(rules...); err != nil {
		t.Error(err)
	}
	if check(map[string]any{"record": "a:b:c", "expr": "rate(penstock_meta_calls_total)"}) == nil {
		t.Error("promtool takes a rate of nothing")
	}
}
