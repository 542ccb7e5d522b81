// Package helm renders the charts with helm itself, has helm judge the charts, and kustomize the
// plain manifests. The package is a module of its own: helm's engine takes 220 modules' packages
// and over a minute of processor time to build.
package helm

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const (
	driver  = "../../deploy/helm/penstock"
	servers = "../../deploy/helm/penstock-cluster"
	plain   = "../../deploy/kubernetes"
)

// given are the required values of each chart.
var given = map[string]string{driver: "cluster: [meta1.example.com:7400]", servers: ""}

func values(t *testing.T, texts ...string) map[string]any {
	t.Helper()
	all := map[string]any{}
	for _, text := range texts {
		v, err := chartutil.ReadValues([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		all = chartutil.MergeTables(v, all) // the later values count
	}
	return all
}

// render returns the files that helm installs, by the path of their template.
func render(t *testing.T, path string, v map[string]any) (map[string]string, error) {
	t.Helper()
	chart, err := loader.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := chart.Validate(); err != nil {
		t.Fatal(err)
	}
	scope, err := chartutil.ToRenderValues(chart, v, chartutil.ReleaseOptions{Name: "penstock", Namespace: "penstock-system"}, nil)
	if err != nil {
		return nil, err
	}
	return engine.Engine{Strict: true}.Render(chart, scope)
}

// objects are the objects in files, by kind and name.
func objects(t *testing.T, files map[string]string) map[string]string {
	t.Helper()
	all := map[string]string{}
	for name, text := range files {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		for _, one := range strings.Split("\n"+text, "\n---\n") {
			var o struct {
				Kind, APIVersion string
				Metadata         struct{ Name string }
			}
			if err := yaml.UnmarshalStrict([]byte(one), new(map[string]any)); err != nil {
				t.Errorf("%s: %v\n%s", name, err, one)
			}
			if err := yaml.Unmarshal([]byte(one), &o); err != nil || o == (struct {
				Kind, APIVersion string
				Metadata         struct{ Name string }
			}{}) {
				continue // comments
			}
			key := o.Kind + "/" + o.Metadata.Name
			if o.Kind == "" || o.APIVersion == "" || o.Metadata.Name == "" || all[key] != "" {
				t.Errorf("%s: %q is no object, or is there twice", name, key)
			}
			all[key] = one
		}
	}
	return all
}

// TestManifestsAreHelms: the plain manifests equal helm's output for the charts.
func TestManifestsAreHelms(t *testing.T) {
	for path, plain := range map[string]string{driver: plain, servers: plain + "/cluster"} {
		out, err := render(t, path, values(t, given[path]))
		if err != nil {
			t.Fatal(err)
		}
		files := 0
		for name, got := range out {
			if filepath.Ext(name) != ".yaml" || strings.Contains(got, "helm.sh/hook") || strings.TrimSpace(got) == "" { // without helm nobody calls hooks
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
}

// TestLint: helm has nothing against the charts.
func TestLint(t *testing.T) {
	for path, v := range given {
		l := lint.AllWithKubeVersionAndSchemaValidation(path, values(t, v), "penstock-system", nil, false)
		for _, m := range l.Messages {
			if m.Severity >= support.WarningSev {
				t.Errorf("%s: %v", path, m)
			}
		}
	}
}

// try are the values to try things out with.
func try(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(servers, "try.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestValues: with given values helm writes objects, with the objects switched on and without the
// objects switched off, and the values are in the objects.
func TestValues(t *testing.T) {
	for name, c := range map[string]struct {
		chart, values string
		there, gone   []string
		says          map[string]string // texts of objects
	}{
		"nothing":             {chart: driver, there: []string{"DaemonSet/penstock-node", "DaemonSet/penstock-hold", "NetworkPolicy/penstock-hold", "VolumeSnapshotClass/penstock"}, gone: []string{"PodMonitor/penstock-controller", "ResourceQuota/penstock-critical-pods"}},
		"no holder":           {chart: driver, values: "hold: {enabled: false}", gone: []string{"DaemonSet/penstock-hold", "ServiceAccount/penstock-hold", "NetworkPolicy/penstock-hold"}},
		"no nodes":            {chart: driver, values: "node: {enabled: false}", gone: []string{"DaemonSet/penstock-node", "DaemonSet/penstock-hold"}, says: map[string]string{"Role/penstock-controller-tokens": "resourceNames: [penstock-controller-token]"}},
		"grants by hand":      {chart: driver, values: "grantNodes: false", says: map[string]string{"CSIDriver/csi.penstock.io": "attachRequired: false"}},
		"inline":              {chart: driver, values: "node: {inline: true}", says: map[string]string{"CSIDriver/csi.penstock.io": "[Persistent, Ephemeral]", "DaemonSet/penstock-node": "- --inline", "Deployment/penstock-controller": "penstock-node-token=admin"}},
		"no snapshots":        {chart: driver, values: "snapshots: {enabled: false}", gone: []string{"VolumeSnapshotClass/penstock"}},
		"groups":              {chart: driver, values: "snapshots: {groups: true, className: mine}", there: []string{"VolumeGroupSnapshotClass/mine", "VolumeSnapshotClass/mine"}, says: map[string]string{"Deployment/penstock-controller": "--feature-gates=CSIVolumeGroupSnapshot=true", "ClusterRole/penstock-controller": "volumegroupsnapshotcontents/status"}},
		"rolling":             {chart: driver, values: "node: {updateStrategy: RollingUpdate}", says: map[string]string{"DaemonSet/penstock-node": "type: RollingUpdate"}},
		"no tokens":           {chart: driver, values: "keepTokens: false", gone: []string{"Role/penstock-controller-tokens"}},
		"no policies":         {chart: driver, values: "networkPolicy: {enabled: false}", gone: []string{"NetworkPolicy/penstock-controller", "NetworkPolicy/penstock-hold"}},
		"metrics":             {chart: driver, values: "metrics: {enabled: true, podMonitor: true, podMonitorLabels: {release: p}}\nnetworkPolicy: {metricsFrom: [{podSelector: {}}]}", there: []string{"PodMonitor/penstock-controller"}, says: map[string]string{"Deployment/penstock-controller": "--metrics=0.0.0.0:9818", "NetworkPolicy/penstock-controller": "podSelector: {}"}},
		"a guard":             {chart: driver, there: []string{"Job/penstock-guard", "ServiceAccount/penstock-guard", "NetworkPolicy/penstock-guard"}, says: map[string]string{"Job/penstock-guard": "helm.sh/hook: pre-delete", "ClusterRole/penstock-guard": "verbs: [list]"}},
		"no guard":            {chart: driver, values: "guard: {enabled: false}", gone: []string{"Job/penstock-guard", "ServiceAccount/penstock-guard", "ClusterRole/penstock-guard", "ClusterRoleBinding/penstock-guard", "NetworkPolicy/penstock-guard"}},
		"a patient guard":     {chart: driver, values: "guard: {wait: 3m}\nimagePullSecrets: [{name: registry}]\ncontroller: {tolerations: [{operator: Exists}]}", says: map[string]string{"Job/penstock-guard": "--wait=3m"}},
		"a quota":             {chart: driver, values: "criticalPods: 1000", says: map[string]string{"ResourceQuota/penstock-critical-pods": `pods: "1000"`}},
		"secrets of registry": {chart: driver, values: "imagePullSecrets: [{name: registry}]\ncontroller: {tolerations: [{operator: Exists}]}\nnode: {nodeSelector: {gpu: \"true\"}, topology: /dc1/rack1/$(NODE_NAME)}", says: map[string]string{"DaemonSet/penstock-node": "--topology=/dc1/rack1/$(NODE_NAME)"}},
		"nodes' labels":       {chart: driver, values: "node: {topologyLabels: [topology.kubernetes.io/zone, example.com/rack]}", there: []string{"ClusterRole/penstock-node", "ClusterRoleBinding/penstock-node"}, says: map[string]string{"DaemonSet/penstock-node": "--labels=topology.kubernetes.io/zone,example.com/rack"}},
		"a class":             {chart: driver, values: "storageClasses: [{name: mine, default: true, reclaimPolicy: Retain, parameters: {replicas: \"2\"}}]", there: []string{"StorageClass/mine"}, gone: []string{"StorageClass/penstock"}},

		"servers":           {chart: servers, there: []string{"StatefulSet/penstock-meta-first", "StatefulSet/penstock-etcd", "StatefulSet/penstock-chunkserver-a"}},
		"to try":            {chart: servers, values: try(t), says: map[string]string{"StatefulSet/penstock-etcd": "preferredDuringScheduling"}},
		"two groups":        {chart: servers, values: "chunkserver: {groups: [{name: east, topology: /dc1/east, replicas: 4, nodeSelector: {rack: east}, tolerations: [], disks: [{name: d0, class: hdd, storage: 4Ti, storageClassName: local}]}, {name: west, topology: /dc1/west, replicas: 2, nodeSelector: {rack: west}, tolerations: [{operator: Exists}], disks: [{name: d0, class: nvme, storage: 1Ti, storageClassName: local}]}]}", there: []string{"StatefulSet/penstock-chunkserver-east", "StatefulSet/penstock-chunkserver-west"}, gone: []string{"StatefulSet/penstock-chunkserver-a"}},
		"etcd elsewhere":    {chart: servers, values: "etcd: {enabled: false, endpoints: [\"https://e1:2379\"]}", gone: []string{"StatefulSet/penstock-etcd"}, says: map[string]string{"StatefulSet/penstock-meta": "--etcd=https://e1:2379"}},
		"without the first": {chart: servers, values: "meta: {first: false}", gone: []string{"StatefulSet/penstock-meta-first"}},
		"gateways":          {chart: servers, values: "gateway: {replicas: 2, kafka: 9192}", there: []string{"Service/penstock-gateway", "Service/penstock-streams", "NetworkPolicy/penstock-gateway"}, says: map[string]string{"StatefulSet/penstock-gateway": "--advertise-kafka=$(POD_NAME).penstock-gateway."}},
		"servers' metrics":  {chart: servers, values: "metrics: {enabled: true, podMonitor: true}\ncriticalPods: \"50\"", there: []string{"PodMonitor/penstock-cluster", "ResourceQuota/penstock-cluster-critical-pods"}, says: map[string]string{"StatefulSet/penstock-chunkserver-a": "--metrics=0.0.0.0:9819", "NetworkPolicy/penstock-etcd": "port: 2381"}},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := render(t, c.chart, values(t, given[c.chart], c.values))
			if err != nil {
				t.Fatal(err)
			}
			all := objects(t, out)
			for _, o := range c.there {
				if all[o] == "" {
					t.Errorf("%s is not there: %v", o, slices.Sorted(maps.Keys(all)))
				}
			}
			for _, o := range c.gone {
				if all[o] != "" {
					t.Errorf("%s is there", o)
				}
			}
			for o, text := range c.says {
				if !strings.Contains(all[o], text) {
					t.Errorf("%s says nothing of %q:\n%s", o, text, all[o])
				}
			}
		})
	}
}

// TestRefused: unknown values, and values that can't work, are refused before anything is
// installed, with the value's name or the remedy.
func TestRefused(t *testing.T) {
	for _, c := range []struct{ chart, values, why string }{
		{driver, "cluster: []", "where metadata servers are"},
		{driver, "cluster: [meta1]", "cluster"},
		{driver, "hold: {enabeld: false}", "enabeld"},
		{driver, "nodes: {}", "nodes"},
		{driver, "node: {updateStrategy: Rolling}", "updateStrategy"},
		{driver, "node: {updateStrategy: RollingUpdate}\nhold: {enabled: false}", "needs hold.enabled"},
		{driver, "node: {topologyLabels: [a, b], topology: /dc1}", "give one of them"},
		{driver, "node: {topologyLabels: [\"a,b\"]}", "topologyLabels"},
		{driver, "networkPolicy: {apiPorts: []}", "apiPorts"},
		{driver, "snapshots: {groups: true, enabled: false}", "needs snapshots.enabled"},
		{driver, "metaPort: 70000", "metaPort"},
		{driver, "guard: {wait: 3 minutes}", "wait"},
		{driver, "hold: {patience: forever}", "patience"},
		{driver, "storageClasses: [{name: a, reclaimPolicy: Delete, parameters: {replicas: 3}}]", "replicas"},
		{servers, "metas: 3", "metas"},
		{servers, "chunkserver: {groups: [{name: a, topologie: /dc1/r1, replicas: 1, nodeSelector: {}, disks: []}]}", "topolog"},
		{servers, "chunkserver: {groups: [{name: a, topology: r1, replicas: 1, nodeSelector: {}, disks: [{name: d, class: ssd, storage: 1Ti}]}]}", "topology"},
		{servers, "chunkserver: {groups: [{name: a, topology: /dc1/r1, replicas: 1, nodeSelector: {}, disks: [{name: d, class: tape, storage: 1Ti}]}]}", "class"},
		{servers, "antiAffinity: soft", "antiAffinity"},
	} {
		if _, err := render(t, c.chart, values(t, given[c.chart], c.values)); err == nil || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v", c.values, err)
		}
	}
}

// kustomize returns the objects that `kubectl apply -k` applies.
func kustomize(t *testing.T, dir string) map[string]string {
	t.Helper()
	o := krusty.MakeDefaultOptions()
	m, err := krusty.MakeKustomizer(o).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	b, err := m.AsYaml()
	if err != nil {
		t.Fatal(err)
	}
	return objects(t, map[string]string{"all.yaml": string(b)})
}

// TestKustomize: the plain manifests are applied unchanged, with the component that leaves
// snapshots out where the snapshot CRDs are missing, with the component for group snapshots, and
// with the component for nodes' labels.
func TestKustomize(t *testing.T) {
	all := kustomize(t, plain)
	if all["DaemonSet/penstock-node"] == "" || all["VolumeSnapshotClass/penstock"] == "" || !strings.Contains(all["Deployment/penstock-controller"], "name: snapshotter") {
		t.Errorf("as they stand: %v", slices.Sorted(maps.Keys(all)))
	}
	if len(kustomize(t, filepath.Join(plain, "cluster"))) == 0 {
		t.Error("the cluster is nothing")
	}
	without := with(t, "without-snapshots")
	if len(without) != len(all)-1 || without["VolumeSnapshotClass/penstock"] != "" {
		t.Errorf("without snapshots: %v", slices.Sorted(maps.Keys(without)))
	}
	if c := without["Deployment/penstock-controller"]; strings.Contains(c, "snapshotter") || !strings.Contains(c, "name: resizer") || !strings.Contains(c, "name: provisioner") {
		t.Errorf("the controller without snapshots:\n%s", c)
	}
	groups := with(t, "group-snapshots")
	if len(groups) != len(all)+1 || groups["VolumeGroupSnapshotClass/penstock"] == "" || !strings.Contains(groups["ClusterRole/penstock-controller"], "volumegroupsnapshotcontents/status") {
		t.Errorf("with groups of snapshots: %v\n%s", slices.Sorted(maps.Keys(groups)), groups["ClusterRole/penstock-controller"])
	}
	if c := groups["Deployment/penstock-controller"]; strings.Count(c, "--feature-gates") != 1 || !strings.Contains(c, "--feature-gates=CSIVolumeGroupSnapshot=true") {
		t.Errorf("the controller with groups of snapshots:\n%s", c)
	}
	labels := with(t, "node-labels")
	if len(labels) != len(all)+2 || labels["ClusterRoleBinding/penstock-node"] == "" {
		t.Errorf("with labels of nodes: %v", slices.Sorted(maps.Keys(labels)))
	}
	if d := labels["DaemonSet/penstock-node"]; !strings.Contains(d, "--topology-file=") || !strings.Contains(d, "name: place") || !strings.Contains(d, "serviceAccountToken") || !strings.Contains(d, "name: join") {
		t.Errorf("the nodes with labels:\n%s", d)
	}
}

// with are the plain manifests with a component.
func with(t *testing.T, component string) map[string]string {
	t.Helper()
	dir := t.TempDir()
	abs, err := filepath.Abs(plain)
	if err != nil {
		t.Fatal(err)
	}
	to, err := filepath.Rel(dir, abs)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("resources: [%q]\ncomponents: [%q]\n", to, to+"/"+component)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return kustomize(t, dir)
}
