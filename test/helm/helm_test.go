// Package helm renders the chart with helm itself. It is a module of its own:
// helm's engine takes 220 modules' packages and over a minute of processor time to
// build, so that `make chart` runs it and `make test` does not.
package helm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

// TestManifestsAreHelms: the plain manifests are what helm makes of the charts.
func TestManifestsAreHelms(t *testing.T) {
	for path, plain := range map[string]string{
		"../../deploy/helm/penstock":         "../../deploy/kubernetes",
		"../../deploy/helm/penstock-cluster": "../../deploy/kubernetes/cluster",
	} {
		manifestsAreHelms(t, path, plain)
	}
}

func manifestsAreHelms(t *testing.T, path, plain string) {
	chart, err := loader.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := chart.Validate(); err != nil {
		t.Fatal(err)
	}
	values, err := chartutil.ToRenderValues(chart, nil, chartutil.ReleaseOptions{Name: "penstock", Namespace: "penstock-system"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	out, err := engine.Engine{Strict: true}.Render(chart, values)
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	for name, got := range out {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		files++
		b, err := os.ReadFile(filepath.Join(plain, filepath.Base(name)))
		if err != nil {
			t.Fatal(err)
		}
		header, want, _ := strings.Cut(string(b), "\n")
		if !strings.HasPrefix(header, "# Made from") || got != want {
			t.Errorf("%s: helm gives\n%s\nthe manifest is\n%s", name, got, want)
		}
	}
	if files == 0 {
		t.Errorf("%s gives nothing", path)
	}
}
