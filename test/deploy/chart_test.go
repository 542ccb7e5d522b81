package deploy

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/template"

	"gopkg.in/yaml.v3"

	"penstock.io/penstock/cmd/penstock/kube"
	driver "penstock.io/penstock/csi"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/test/program"
)

var update = flag.Bool("update", false, "write deploy/kubernetes anew")

// chart is a chart of deploy/helm, with the place of the plain manifests made from the chart.
type chart struct {
	path, plain string
	there       map[string]map[string]any // objects that exist in Kubernetes, by name
}

var (
	driverChart  = chart{path: "../../deploy/helm/penstock", plain: "../../deploy/kubernetes"}
	clusterChart = chart{path: "../../deploy/helm/penstock-cluster", plain: "../../deploy/kubernetes/cluster"}
	charts       = []chart{driverChart, clusterChart}
)

const (
	namespace = "penstock-system"
	// example stands where the chart must be told where the cluster is.
	example = "meta1.example.com:7400"
)

func read(t *testing.T, parts ...string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(parts...))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// render renders a chart as helm does, as far as the chart needs: text/template with these
// functions. test/helm compares the result with helm itself, which is too heavy to be built for
// every test run.
func (c chart) render(t *testing.T, change func(values map[string]any)) map[string]string {
	t.Helper()
	out, err := c.try(t, change)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// try is render of values that the chart may refuse.
func (c chart) try(t *testing.T, change func(values map[string]any)) (map[string]string, error) {
	t.Helper()
	var about, values map[string]any
	for name, into := range map[string]*map[string]any{"Chart.yaml": &about, "values.yaml": &values} {
		if err := yaml.Unmarshal(read(t, c.path, name), into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	if c.path == driverChart.path {
		values["cluster"] = []any{example}
	}
	change(values)
	scope := map[string]any{
		"Values":  values,
		"Chart":   map[string]any{"AppVersion": about["appVersion"]},
		"Release": map[string]any{"Namespace": namespace},
	}
	all := template.New("").Option("missingkey=error")
	all.Funcs(template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var b strings.Builder
			err := all.ExecuteTemplate(&b, name, data)
			return b.String(), err
		},
		"nindent": func(n int, s string) string {
			pad := strings.Repeat(" ", n)
			return "\n" + pad + strings.ReplaceAll(s, "\n", "\n"+pad)
		},
		"toYaml": func(v any) (string, error) {
			var b bytes.Buffer
			enc := yaml.NewEncoder(&b)
			enc.SetIndent(2)
			err := enc.Encode(v)
			return strings.TrimSuffix(b.String(), "\n"), err
		},
		"lookup": func(_, _, _, name string) map[string]any {
			if there, is := c.there[name]; is {
				return there
			}
			return map[string]any{}
		},
		"printf":   fmt.Sprintf,
		"toString": func(v any) string { return fmt.Sprint(v) },
		"fail":     func(why string) (string, error) { return "", errors.New(why) },
		"quote":    strconv.Quote,
		"int":      func(n int) int { return n },
		"until": func(n int) (all []int) {
			for i := range n {
				all = append(all, i)
			}
			return all
		},
		"dict": func(pairs ...any) map[string]any {
			m := map[string]any{}
			for i := 0; i+1 < len(pairs); i += 2 {
				m[pairs[i].(string)] = pairs[i+1]
			}
			return m
		},
		"join": func(by string, list []any) string {
			var s []string
			for _, v := range list {
				s = append(s, fmt.Sprint(v))
			}
			return strings.Join(s, by)
		},
	})
	files, err := filepath.Glob(filepath.Join(c.path, "templates", "*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no templates: %v", err)
	}
	for _, f := range files {
		if _, err := all.New(filepath.Base(f)).Parse(string(read(t, f))); err != nil {
			t.Fatal(err)
		}
	}
	out := map[string]string{}
	for _, f := range files {
		if name := filepath.Base(f); filepath.Ext(name) == ".yaml" {
			var b strings.Builder
			if err := all.ExecuteTemplate(&b, name, scope); err != nil {
				return nil, err
			}
			out[name] = b.String()
		}
	}
	return out, nil
}

func asIs(map[string]any) {}

// header is the beginning of plain manifests.
func (c chart) header() string {
	return "# Made from deploy/helm/" + filepath.Base(c.path) + " by `go generate ./test/deploy`; edit that.\n"
}

// TestPlainManifests: the plain manifests equal the output of the chart with the chart's own
// values.
func TestPlainManifests(t *testing.T) {
	for _, c := range charts {
		plainManifests(t, c)
	}
}

// helmsOwn are files of hooks: without helm no program runs the hooks.
var helmsOwn = map[string]bool{"guard.yaml": true}

func plainManifests(t *testing.T, c chart) {
	for name, want := range c.render(t, asIs) {
		if helmsOwn[name] || strings.TrimSpace(want) == "" { // empty: the template is empty with the chart's own values
			continue
		}
		want = c.header() + want
		path := filepath.Join(c.plain, name)
		if *update {
			if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if got := string(read(t, path)); got != want {
			t.Errorf("%s is not what the chart gives: go generate ./test/deploy", path)
		}
	}
	var k struct{ Resources []string }
	if err := yaml.Unmarshal(read(t, c.plain, "kustomization.yaml"), &k); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(c.plain, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	listed := map[string]bool{"kustomization.yaml": true}
	for _, r := range k.Resources {
		listed[r] = true
	}
	for _, f := range files {
		if !listed[filepath.Base(f)] {
			t.Errorf("%s: kustomization.yaml does not list %s", c.plain, f)
		}
	}
	if len(listed) != len(files) {
		t.Errorf("%s: kustomization.yaml lists %d files, %d are there", c.plain, len(listed), len(files))
	}
}

// object is a manifest.
type object map[string]any

func (o object) at(path ...string) any {
	var v any = map[string]any(o)
	for _, p := range path {
		switch x := v.(type) {
		case map[string]any:
			v = x[p]
		case object:
			v = x[p]
		default:
			return nil
		}
	}
	return v
}

func (o object) text(path ...string) string { s, _ := o.at(path...).(string); return s }

func (o object) list(path ...string) (all []object) {
	l, _ := o.at(path...).([]any)
	for _, v := range l {
		if m, is := v.(map[string]any); is {
			all = append(all, m)
		}
	}
	return all
}

func (o object) String() string { return o.text("kind") + "/" + o.text("metadata", "name") }

// parse reads manifests; a repeated key is an error.
func parse(t *testing.T, name, text string) (all []object) {
	t.Helper()
	dec := yaml.NewDecoder(strings.NewReader(text))
	for {
		var o map[string]any
		err := dec.Decode(&o)
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if o != nil {
			all = append(all, o)
		}
	}
}

// objects are the driver's chart's.
func objects(t *testing.T, change func(map[string]any)) map[string]object {
	t.Helper()
	return driverChart.objects(t, change)
}

func (c chart) objects(t *testing.T, change func(map[string]any)) map[string]object {
	t.Helper()
	all := map[string]object{}
	for name, text := range c.render(t, change) {
		for _, o := range parse(t, name, text) {
			if all[o.String()] != nil || o.text("apiVersion") == "" || o.text("metadata", "name") == "" {
				t.Errorf("%s: %s has no name or version, or stands twice", name, o)
			}
			all[o.String()] = o
		}
	}
	return all
}

// clusterWide are kinds without a namespace.
var clusterWide = map[string]bool{"CSIDriver": true, "StorageClass": true, "ClusterRole": true, "ClusterRoleBinding": true, "VolumeSnapshotClass": true, "VolumeGroupSnapshotClass": true}

// TestObjectsFit: each reference in an object leads to an existing object.
func TestObjectsFit(t *testing.T) {
	for _, c := range charts {
		objectsFit(t, c.objects(t, asIs))
	}
}

func objectsFit(t *testing.T, all map[string]object) {
	for _, o := range all {
		if got := o.text("metadata", "namespace"); clusterWide[o.text("kind")] != (got == "") || got != "" && got != namespace {
			t.Errorf("%s: namespace %q", o, got)
		}
		if role := o.text("roleRef", "name"); role != "" {
			if all[o.text("roleRef", "kind")+"/"+role] == nil {
				t.Errorf("%s: no role %s", o, role)
			}
			for _, s := range o.list("subjects") {
				if all["ServiceAccount/"+s.text("name")] == nil || s.text("namespace") != namespace {
					t.Errorf("%s: nobody is %v", o, s)
				}
			}
		}
		pod, _ := o.at("spec", "template").(map[string]any)
		if pod != nil {
			fits(t, o, pod, all)
		}
		if kind := o.text("kind"); kind == "PodDisruptionBudget" || kind == "NetworkPolicy" {
			key := map[string]string{"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}[kind]
			selected := 0
			for _, of := range all {
				if pod, _ := of.at("spec", "template").(map[string]any); pod != nil && selects(o, pod, "spec", key, "matchLabels") {
					selected++
				}
			}
			if selected == 0 {
				t.Errorf("%s selects no pods", o)
			}
		}
	}
}

// selects reports whether the labels that o asks for are the pod's.
func selects(o, pod object, path ...string) bool {
	want, _ := o.at(path...).(map[string]any)
	for k, v := range want {
		if pod.text("metadata", "labels", k) != v {
			return false
		}
	}
	return len(want) > 0
}

// commandFlags are the flags of a command of penstock, by the command's help.
func commandFlags(t *testing.T, command ...string) map[string]bool {
	t.Helper()
	name := strings.Join(command, " ")
	if flags := helped[name]; flags != nil {
		return flags
	}
	out, err := exec.CommandContext(t.Context(), program.Path, append(command, "--help")...).Output()
	if err != nil || !strings.Contains(string(out), "\nUsage:\n  penstock "+name+" ") {
		t.Fatalf("there is no command %q: %v\n%s", name, err, out)
	}
	flags := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^ +(?:-[a-zA-Z], )?--([a-z-]+)`).FindAllSubmatch(out, -1) {
		flags[string(m[1])] = true
	}
	helped[name] = flags
	return flags
}

// helped keeps the results of commandFlags.
var helped = map[string]map[string]bool{}

// takes demands that a command of penstock has the given flags.
func takes(t *testing.T, who string, args []string) {
	t.Helper()
	n := slices.IndexFunc(args, func(a string) bool { return strings.HasPrefix(a, "-") })
	if n < 0 {
		n = len(args)
	}
	flags := commandFlags(t, args[:n]...)
	for _, a := range args[n:] {
		if f, is := strings.CutPrefix(a, "--"); is {
			if f, _, _ = strings.Cut(f, "="); !flags[f] {
				t.Errorf("%s: penstock %s knows no --%s", who, strings.Join(args[:n], " "), f)
			}
		}
	}
}

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// fits looks at the pods of a Deployment, DaemonSet or StatefulSet.
func fits(t *testing.T, o, pod object, all map[string]object) {
	t.Helper()
	if o.text("kind") != "Job" && !selects(o, pod, "spec", "selector", "matchLabels") {
		t.Errorf("%s does not select its own pods", o)
	}
	if all["ServiceAccount/"+pod.text("spec", "serviceAccountName")] == nil {
		t.Errorf("%s: nobody is %s", o, pod.text("spec", "serviceAccountName"))
	}
	if pod.text("spec", "securityContext", "seccompProfile", "type") != "RuntimeDefault" || pod.text("spec", "priorityClassName") == "" {
		t.Errorf("%s has no seccomp profile or no priority", o)
	}
	volumes, used := map[string]bool{}, map[string]bool{}
	for _, v := range pod.list("spec", "volumes") {
		volumes[v.text("name")] = true
	}
	for _, v := range o.list("spec", "volumeClaimTemplates") {
		volumes[v.text("metadata", "name")] = true
	}
	for _, c := range append(pod.list("spec", "initContainers"), pod.list("spec", "containers")...) {
		name := fmt.Sprintf("%s, container %s", o, c.text("name"))
		if c.at("securityContext", "readOnlyRootFilesystem") != true {
			t.Errorf("%s may write to its image", name)
		}
		privileged := c.at("securityContext", "privileged") == true
		if privileged != (o.text("kind") == "DaemonSet" && c.text("name") == "penstock") {
			t.Errorf("%s: privileged %t", name, privileged)
		}
		if !privileged && (c.at("securityContext", "allowPrivilegeEscalation") != false || fmt.Sprint(c.at("securityContext", "capabilities", "drop")) != "[ALL]") {
			t.Errorf("%s may do more than it must", name)
		}
		if c.at("resources", "requests", "memory") == nil || c.at("resources", "limits", "memory") == nil || c.at("resources", "requests", "cpu") == nil {
			t.Errorf("%s says not what it needs", name)
		}
		known := map[string]bool{}
		for _, e := range c.list("env") {
			known[e.text("name")] = true
			if ref := e.text("valueFrom", "configMapKeyRef", "name"); ref != "" && all["ConfigMap/"+ref].text("data", e.text("valueFrom", "configMapKeyRef", "key")) == "" {
				t.Errorf("%s: nothing is in the ConfigMap for %s", name, e.text("name"))
			}
		}
		for _, m := range c.list("volumeMounts") {
			used[m.text("name")] = true
			if !volumes[m.text("name")] {
				t.Errorf("%s: no volume %s", name, m.text("name"))
			}
		}
		ours := strings.HasPrefix(c.text("image"), "penstock:")
		args := words(c.at("args"))
		if ours {
			takes(t, name, args)
		}
		for _, probe := range []string{"startupProbe", "readinessProbe", "livenessProbe"} {
			if command := words(c.at(probe, "exec", "command")); len(command) > 0 {
				if command[0] != "/penstock" {
					t.Errorf("%s: %s runs %v, and the image has /penstock alone", name, probe, command)
				}
				takes(t, name, command[1:])
				args = append(args, command...)
			}
		}
		for _, arg := range args {
			for _, m := range regexp.MustCompile(`\$\((\w+)\)`).FindAllStringSubmatch(arg, -1) {
				if !known[m[1]] {
					t.Errorf("%s: nothing is in the environment for %s", name, arg)
				}
			}
		}
	}
	for v := range volumes {
		if !used[v] {
			t.Errorf("%s: nobody mounts volume %s", o, v)
		}
	}
}

// words are the words of a command line.
func words(v any) (l []string) {
	all, _ := v.([]any)
	for _, w := range all {
		l = append(l, fmt.Sprint(w))
	}
	return l
}

// TestDriverObject: the CSIDriver object tells Kubernetes what the driver can do.
func TestDriverObject(t *testing.T) {
	all := objects(t, asIs)
	d := all["CSIDriver/"+driver.Name]
	for field, want := range map[string]string{
		"attachRequired": "true", "podInfoOnMount": "true", "fsGroupPolicy": "File", "storageCapacity": "true",
		"volumeLifecycleModes": "[Persistent]", "requiresRepublish": "false", "seLinuxMount": "false",
	} {
		if got := fmt.Sprint(d.at("spec", field)); got != want {
			t.Errorf("%s is %s, not %s", field, got, want)
		}
	}
	classes := 0
	for _, o := range all {
		switch o.text("kind") {
		case "StorageClass":
			classes++
			if o.text("provisioner") != driver.Name || o.text("volumeBindingMode") != "WaitForFirstConsumer" || o.at("allowVolumeExpansion") != true {
				t.Errorf("%s: %v", o, o)
			}
			if _, err := policy.ReadClass(texts(t, o, "parameters"), nil, "pvc-1"); err != nil {
				t.Errorf("%s: the driver would refuse it: %v", o, err)
			}
			if got := o.text("parameters", "syncOnClose"); got != "true" {
				t.Errorf("DATA: %s: a file that was closed is not durable: syncOnClose is %q", o, got)
			}
		case "VolumeSnapshotClass", "VolumeGroupSnapshotClass":
			if o.text("driver") != driver.Name {
				t.Errorf("%s: %v", o, o)
			}
		}
	}
	if classes == 0 {
		t.Error("there is no storage class")
	}
}

// texts is a map of strings; Kubernetes would refuse any other value.
func texts(t *testing.T, o object, path ...string) map[string]string {
	t.Helper()
	m, all := o.at(path...), map[string]string{}
	if m == nil {
		return all
	}
	for k, v := range m.(map[string]any) {
		s, is := v.(string)
		if !is {
			t.Errorf("%s: %s is no string: %v", o, k, v)
		}
		all[k] = s
	}
	return all
}

// TestValues: a part that is switched off is gone, and no object refers to the part.
func TestValues(t *testing.T) {
	off := func(part string) func(map[string]any) {
		return func(v map[string]any) { v[part].(map[string]any)["enabled"] = false }
	}
	for _, c := range []struct {
		change func(map[string]any)
		gone   []string
	}{
		{off("node"), []string{"DaemonSet/penstock-node", "ServiceAccount/penstock-node", "DaemonSet/penstock-hold", "ServiceAccount/penstock-hold", "NetworkPolicy/penstock-hold"}},
		{off("hold"), []string{"DaemonSet/penstock-hold", "ServiceAccount/penstock-hold", "NetworkPolicy/penstock-hold"}},
		{off("snapshots"), []string{"VolumeSnapshotClass/penstock"}},
		{off("networkPolicy"), []string{"NetworkPolicy/penstock-controller", "NetworkPolicy/penstock-hold", "NetworkPolicy/penstock-guard"}},
		{off("guard"), []string{"Job/penstock-guard", "ServiceAccount/penstock-guard", "ClusterRole/penstock-guard", "ClusterRoleBinding/penstock-guard", "NetworkPolicy/penstock-guard"}},
		{func(v map[string]any) { v["keepTokens"] = false }, []string{"Role/penstock-controller-tokens", "RoleBinding/penstock-controller-tokens"}},
	} {
		before, after := objects(t, asIs), objects(t, c.change)
		for _, g := range c.gone {
			if before[g] == nil || after[g] != nil {
				t.Errorf("%s: there by default %t, when switched off %t", g, before[g] != nil, after[g] != nil)
			}
		}
		if len(after) != len(before)-len(c.gone) {
			t.Errorf("without %v there are %d objects, with %d", c.gone, len(after), len(before))
		}
	}
	all := objects(t, func(v map[string]any) {
		v["cluster"] = []any{"10.0.0.4:7400", "10.0.0.5:7400"}
		v["node"].(map[string]any)["topology"] = "/dc1/rack1/$(NODE_NAME)"
		v["imagePullSecrets"] = []any{map[string]any{"name": "registry"}}
		v["storageClasses"].([]any)[0].(map[string]any)["default"] = true
	})
	if got := all["ConfigMap/penstock"].text("data", "cluster"); got != "10.0.0.4:7400,10.0.0.5:7400" {
		t.Errorf("cluster is %q", got)
	}
	if got := fmt.Sprint(all["DaemonSet/penstock-node"].at("spec", "template", "spec")); !strings.Contains(got, "--topology=/dc1/rack1/$(NODE_NAME)") || !strings.Contains(got, "imagePullSecrets:[map[name:registry]]") {
		t.Errorf("values did not arrive: %s", got)
	}
	for says, want := range map[string]any{"false": map[string]any{"syncOnClose": "false"}, "true": nil} {
		classes := objects(t, func(v map[string]any) { v["storageClasses"].([]any)[0].(map[string]any)["parameters"] = want })
		if got := classes["StorageClass/penstock"].text("parameters", "syncOnClose"); got != says {
			t.Errorf("a class with the parameters %v has syncOnClose %q", want, got)
		}
	}
	if got := all["StorageClass/penstock"].text("metadata", "annotations", "storageclass.kubernetes.io/is-default-class"); got != "true" {
		t.Errorf("the default class is marked %q", got)
	}
}

// TestTopologyLabels: where nodes are placed by their labels, only an init container has the
// account, which may get nodes and nothing else. The driver reads the file that the init
// container wrote, and the component of the plain manifests does the same.
func TestTopologyLabels(t *testing.T) {
	const labels = "topology.kubernetes.io/zone,example.com/rack"
	all := objects(t, func(v map[string]any) {
		v["node"].(map[string]any)["topologyLabels"] = []any{"topology.kubernetes.io/zone", "example.com/rack"}
	})
	objectsFit(t, all)
	node := all["DaemonSet/penstock-node"]
	if got := node.flag("place", "--labels"); got != labels {
		t.Errorf("the labels are %q", got)
	}
	if wrote, read := node.flag("place", "--file"), node.flag("penstock", "--topology-file"); wrote == "" || wrote != read {
		t.Errorf("the place is written to %q, and read from %q", wrote, read)
	}
	pod := node.pod()
	var place, account object
	for _, c := range append(pod.list("spec", "initContainers"), pod.list("spec", "containers")...) {
		for _, m := range c.list("volumeMounts") {
			if m.text("mountPath") == kube.AccountDir {
				if place != nil || m.text("name") != "account" {
					t.Errorf("container %s has the account of volume %s", c.text("name"), m.text("name"))
				}
				place = c
			}
		}
	}
	for _, v := range pod.list("spec", "volumes") {
		if v.text("name") == "account" {
			account = v
		}
	}
	if place.text("name") != "place" || pod.at("spec", "automountServiceAccountToken") != false || account == nil {
		t.Errorf("container %q has the account, volume %v", place.text("name"), account)
	}
	// The component is applied to manifests of which the place is none.
	var component struct {
		Patches []struct{ Patch string }
	}
	path := filepath.Join(driverChart.plain, "node-labels")
	if err := yaml.Unmarshal(read(t, path, "kustomization.yaml"), &component); err != nil || len(component.Patches) != 1 {
		t.Fatal(component, err)
	}
	var steps []struct {
		Op, Path string
		Value    any
	}
	if err := yaml.Unmarshal([]byte(component.Patches[0].Patch), &steps); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"/spec/template/spec/containers/0/args/-": "--topology-file=" + node.flag("penstock", "--topology-file"),
		"/spec/template/spec/initContainers/-":    map[string]any(place),
		"/spec/template/spec/volumes/-":           map[string]any(account),
	}
	for _, s := range steps {
		if s.Op != "add" || !reflect.DeepEqual(s.Value, want[s.Path]) {
			t.Errorf("the component adds at %s\n%v\nthe chart has\n%v", s.Path, s.Value, want[s.Path])
		}
		delete(want, s.Path)
	}
	if len(want) > 0 {
		t.Errorf("the component does not add %v", want)
	}
	for _, o := range parse(t, "rbac.yaml", string(read(t, path, "rbac.yaml"))) {
		if !reflect.DeepEqual(o, all[o.String()]) {
			t.Errorf("%s of the component is\n%v\nthe chart has\n%v", o, o, all[o.String()])
		}
		delete(all, o.String())
	}
	before := objects(t, asIs)
	for name := range all {
		if before[name] == nil {
			t.Errorf("the component has no %s", name)
		}
	}
	if strings.Contains(fmt.Sprint(before["DaemonSet/penstock-node"]), "serviceAccountToken") || before["ClusterRole/penstock-node"] != nil {
		t.Error("by default the node part may ask Kubernetes")
	}
	if _, err := driverChart.try(t, func(v map[string]any) {
		n := v["node"].(map[string]any)
		n["topology"], n["topologyLabels"] = "/dc1/rack1/$(NODE_NAME)", []any{"zone"}
	}); err == nil || !strings.Contains(err.Error(), "give one of them") {
		t.Errorf("both at once: %v", err)
	}
}

// groups switches snapshots of groups on.
func groups(v map[string]any) { v["snapshots"].(map[string]any)["groups"] = true }

// TestGroupSnapshots: with snapshots of groups switched on, the sidecar has the flag and the
// rights for groups, and a class of group snapshots exists; the component of the plain manifests
// does the same. By default no object names groups, because the cluster may not know their kinds.
func TestGroupSnapshots(t *testing.T) {
	const controller, role, gate = "Deployment/penstock-controller", "ClusterRole/penstock-controller", "CSIVolumeGroupSnapshot=true"
	before, after := objects(t, asIs), objects(t, groups)
	objectsFit(t, after)
	if got := after[controller].flag("snapshotter", "--feature-gates"); got != gate {
		t.Errorf("the sidecar's gates are %q", got)
	}
	class := after["VolumeGroupSnapshotClass/penstock"]
	if class.text("driver") != driver.Name || class.text("deletionPolicy") != "Delete" || len(after) != len(before)+1 {
		t.Errorf("class %v, %d objects in place of %d", class, len(after), len(before))
	}
	for name, o := range before {
		if strings.Contains(strings.ToLower(fmt.Sprint(map[string]any(o))), "groupsnapshot") {
			t.Errorf("by default %s speaks of groups: %v", name, map[string]any(o))
		}
	}
	if _, err := driverChart.try(t, func(v map[string]any) {
		groups(v)
		v["snapshots"].(map[string]any)["enabled"] = false
	}); err == nil || !strings.Contains(err.Error(), "needs snapshots.enabled") {
		t.Errorf("groups without snapshots: %v", err)
	}

	// The component's steps turn the plain manifests into the chart's objects.
	path := filepath.Join(driverChart.plain, "group-snapshots")
	var component struct {
		Resources []string
		Patches   []struct {
			Target struct{ Kind, Name string }
			Patch  string
		}
	}
	if err := yaml.Unmarshal(read(t, path, "kustomization.yaml"), &component); err != nil {
		t.Fatal(err)
	}
	for _, p := range component.Patches {
		o := before[p.Target.Kind+"/"+p.Target.Name]
		if o == nil {
			t.Fatalf("nothing is %v", p.Target)
		}
		var steps []struct {
			Op, Path string
			Value    any
		}
		if err := yaml.Unmarshal([]byte(p.Patch), &steps); err != nil {
			t.Fatal(err)
		}
		for _, s := range steps {
			step(t, o, s.Op, s.Path, s.Value)
		}
	}
	for _, name := range []string{controller, role} {
		if !reflect.DeepEqual(before[name], after[name]) {
			t.Errorf("the component makes of %s\n%v\nthe chart has\n%v", name, before[name], after[name])
		}
	}
	if fmt.Sprint(component.Resources) != "[class.yaml]" {
		t.Errorf("the component has %v", component.Resources)
	}
	if got := parse(t, "class.yaml", string(read(t, path, "class.yaml"))); len(got) != 1 || !reflect.DeepEqual(got[0], class) {
		t.Errorf("the component's class is\n%v\nthe chart's\n%v", got, class)
	}
}

// step does a step of a JSON patch, of the kinds that components use: "test" of a value, and
// "add" at the end of a list.
func step(t *testing.T, o object, op, path string, value any) {
	t.Helper()
	at := strings.Split(path, "/")[1:]
	put := func(any) {} // in place of the present value
	var v any = map[string]any(o)
	for _, p := range at {
		switch x := v.(type) {
		case map[string]any:
			v, put = x[p], func(n any) { x[p] = n }
		case []any:
			if p == "-" {
				if op != "add" {
					t.Fatalf("%s at %s", op, path)
				}
				put(append(x, value))
				return
			}
			n, err := strconv.Atoi(p)
			if err != nil || n >= len(x) {
				t.Fatalf("%s: %s has no %s", o, path, p)
			}
			v, put = x[n], func(y any) { x[n] = y }
		default:
			t.Fatalf("%s: nothing is at %s", o, path)
		}
	}
	if op != "test" || !reflect.DeepEqual(v, value) {
		t.Errorf("%s: %s at %s wants %v, there is %v", o, op, path, value, v)
	}
}

// TestTokensAreKept: the controller may read and change the Secrets with which pods join, and
// no other Secrets, and is told the purpose of each Secret.
func TestTokensAreKept(t *testing.T) {
	for inline, role := range map[bool]string{false: "client", true: "admin"} {
		all := objects(t, func(v map[string]any) { v["node"].(map[string]any)["inline"] = inline })
		c := all["Deployment/penstock-controller"]
		kept := map[string]string{}
		for _, f := range c.flags("penstock", "--keep-token") {
			secret, as, _ := strings.Cut(f, "=")
			kept[secret] = as
		}
		uses := func(o object, as string) {
			t.Helper()
			for _, v := range o.pod().list("spec", "volumes") {
				if s := v.text("secret", "secretName"); s != "" && kept[s] != as {
					t.Errorf("inline %t: %s joins by Secret %s, in which are tokens of %q, not of %q", inline, o, s, kept[s], as)
				}
			}
		}
		uses(c, "admin:"+c.flag("join", "--name"))
		uses(all["DaemonSet/penstock-node"], role)
		rules := all["Role/penstock-controller-tokens"].list("rules")
		if len(rules) != 1 || fmt.Sprint(rules[0].at("verbs")) != "[get patch]" || fmt.Sprint(rules[0].at("resources")) != "[secrets]" {
			t.Fatalf("rules %v", rules)
		}
		names, _ := rules[0].at("resourceNames").([]any)
		for _, n := range names {
			if kept[n.(string)] == "" {
				t.Errorf("the controller may read Secret %s for nothing", n)
			}
		}
		if len(names) != len(kept) || len(kept) != 2 {
			t.Errorf("it is to keep %v and may change %v", kept, names)
		}
		for _, o := range all {
			if k := o.text("kind"); k != "Role" && k != "ClusterRole" || o.text("metadata", "name") == "penstock-controller-tokens" {
				continue
			}
			for _, r := range o.list("rules") {
				if strings.Contains(fmt.Sprint(r.at("resources")), "secrets") {
					t.Errorf("%s may use Secrets: %v", o, r)
				}
			}
		}
	}
}

// TestNetworkPolicies: the holder may neither connect nor be reached. The controller may
// connect to DNS, to metadata servers, and to the ports that the values name as those of the
// API server.
func TestNetworkPolicies(t *testing.T) {
	all := objects(t, func(v map[string]any) { v["networkPolicy"].(map[string]any)["apiPorts"] = []any{16443} })
	hold := all["NetworkPolicy/penstock-hold"]
	if fmt.Sprint(hold.at("spec", "policyTypes")) != "[Ingress Egress]" || len(hold.list("spec", "ingress")) > 0 || len(hold.list("spec", "egress")) > 0 ||
		!selects(hold, all["DaemonSet/penstock-hold"].pod(), "spec", "podSelector", "matchLabels") {
		t.Errorf("the holder may talk: %v", hold)
	}
	ports := func(o object, way string) (l []any) {
		for _, rule := range o.list("spec", way) {
			for _, p := range rule.list("ports") {
				l = append(l, p.at("port"))
			}
		}
		return l
	}
	if got := fmt.Sprint(ports(all["NetworkPolicy/penstock-controller"], "egress")); got != "[53 53 16443 7400]" {
		t.Errorf("the controller may call %s", got)
	}
}

// TestMetrics: each pod that has metrics serves the metrics at a port, the policy admits the
// readers in the values, and the monitor names the port. By default no reader is admitted.
func TestMetrics(t *testing.T) {
	for _, c := range charts {
		all := c.objects(t, func(v map[string]any) {
			m := v["metrics"].(map[string]any)
			m["enabled"], m["podMonitor"], m["podMonitorLabels"] = true, true, map[string]any{"release": "prometheus"}
			v["networkPolicy"].(map[string]any)["metricsFrom"] = []any{map[string]any{"namespaceSelector": map[string]any{"matchLabels": map[string]any{"name": "monitoring"}}}}
		})
		objectsFit(t, all)
		var monitor object
		for _, o := range all {
			if o.text("kind") == "PodMonitor" {
				monitor = o
			}
		}
		if monitor.text("metadata", "labels", "release") != "prometheus" {
			t.Errorf("%s: the Prometheus that looks for a label does not find %v", c.path, monitor)
		}
		asked := map[string]bool{}
		for _, e := range monitor.list("spec", "podMetricsEndpoints") {
			asked[e.text("port")] = true
		}
		served := 0
		for _, o := range all {
			pod := o.pod()
			if pod == nil || !selects(monitor, pod, "spec", "selector", "matchLabels") {
				continue
			}
			served++
			var port any
			for _, k := range pod.list("spec", "containers") {
				for _, p := range k.list("ports") {
					if asked[p.text("name")] {
						port = p.at("containerPort")
					}
				}
			}
			if at := o.flag("penstock", "--metrics"); at != "" && at != fmt.Sprintf("0.0.0.0:%v", port) || at == "" && o.text("metadata", "name") != "penstock-etcd" {
				t.Errorf("%s: metrics are served at %q, and asked for at port %v", o, at, port)
			}
			let := false
			for _, p := range all {
				if p.text("kind") != "NetworkPolicy" || !selects(p, pod, "spec", "podSelector", "matchLabels") {
					continue
				}
				for _, rule := range p.list("spec", "ingress") {
					for _, x := range rule.list("ports") {
						let = let || x.at("port") == port && fmt.Sprint(rule.at("from")) == "[map[namespaceSelector:map[matchLabels:map[name:monitoring]]]]"
					}
				}
			}
			if !let {
				t.Errorf("%s: the monitoring may not come to port %v", o, port)
			}
		}
		if served == 0 {
			t.Errorf("%s: nobody serves metrics", c.path)
		}
		for _, o := range c.objects(t, asIs) {
			if o.text("kind") == "PodMonitor" || o.flag("penstock", "--metrics") != "" {
				t.Errorf("%s: by default %s is there, or serves", c.path, o)
			}
		}
	}
}

// TestCriticalPods: where the values ask for a quota, the priority classes of the pods have a
// quota.
func TestCriticalPods(t *testing.T) {
	for _, c := range charts {
		all := c.objects(t, func(v map[string]any) { v["criticalPods"] = "1000" })
		var quota object
		for _, o := range all {
			if o.text("kind") == "ResourceQuota" {
				quota = o
			}
		}
		if quota.text("spec", "hard", "pods") != "1000" {
			t.Fatalf("%s: the quota is %v", c.path, quota)
		}
		classes := fmt.Sprint(quota.list("spec", "scopeSelector", "matchExpressions")[0].at("values"))
		for _, o := range all {
			if pod := o.pod(); pod != nil && !strings.Contains(classes, pod.text("spec", "priorityClassName")) {
				t.Errorf("%s is of class %s, and the quota is for %s", o, pod.text("spec", "priorityClassName"), classes)
			}
		}
		for _, o := range c.objects(t, asIs) {
			if o.text("kind") == "ResourceQuota" {
				t.Errorf("%s: %s is there by default", c.path, o)
			}
		}
	}
}

// TestClusterMustBeNamed: without the one value that has no default, the address of the
// cluster, the chart renders nothing.
func TestClusterMustBeNamed(t *testing.T) {
	if _, err := driverChart.try(t, func(v map[string]any) { v["cluster"] = []any{} }); err == nil || !strings.Contains(err.Error(), "where metadata servers are") {
		t.Errorf("%v", err)
	}
}

// TestHold: the driver leaves its mounts to a holder that outlives the driver's pod; where the
// holder is switched off, the driver leaves the mounts to nothing.
func TestHold(t *testing.T) {
	flag := func(o object, name string) (value string) {
		for _, c := range o.list("spec", "template", "spec", "containers") {
			args, _ := c.at("args").([]any)
			for _, a := range args {
				if v, is := strings.CutPrefix(a.(string), name+"="); is {
					value = v
				}
			}
		}
		return value
	}
	// where a path of a container is on the machine
	host := func(o object, path string) string {
		for _, c := range o.list("spec", "template", "spec", "containers") {
			for _, m := range c.list("volumeMounts") {
				rest, is := strings.CutPrefix(path, m.text("mountPath")+"/")
				for _, v := range o.list("spec", "template", "spec", "volumes") {
					if is && v.text("name") == m.text("name") && v.text("hostPath", "path") != "" {
						return v.text("hostPath", "path") + "/" + rest
					}
				}
			}
		}
		return ""
	}
	all := objects(t, func(v map[string]any) { v["hold"].(map[string]any)["runDir"] = "/run/elsewhere" })
	node, hold := all["DaemonSet/penstock-node"], all["DaemonSet/penstock-hold"]
	at := host(hold, flag(hold, "--socket"))
	if at != "/run/elsewhere/hold.sock" || host(node, flag(node, "--hold")) != at {
		t.Errorf("the holder listens at %q, the driver asks at %q", at, host(node, flag(node, "--hold")))
	}
	// The holder is ready when the holder can take mounts, not when its process has begun: the
	// replacement of the driver's pods waits for the holder.
	probe := words(hold.pod().list("spec", "containers")[0].at("readinessProbe", "exec", "command"))
	if want := []string{"/penstock", "hold", "--socket=" + flag(hold, "--socket"), "--list"}; !slices.Equal(probe, want) {
		t.Errorf("the holder is ready when %q succeeds, not %q", probe, want)
	}
	// So the controller: its upgrade goes on when the new controller reaches the cluster.
	controller := all["Deployment/penstock-controller"]
	probe = words(controller.pod().list("spec", "containers")[0].at("readinessProbe", "exec", "command"))
	if want := []string{"/penstock", "health", "--process=" + flag(controller, "--admin")}; !slices.Equal(probe, want) {
		t.Errorf("the controller is ready when %q succeeds, not %q", probe, want)
	}
	// On a kernel before Linux 6.9 no holder exists: a person who replaces the pod must look.
	if hold.text("spec", "updateStrategy", "type") != "OnDelete" || node.text("spec", "updateStrategy", "type") != "OnDelete" {
		t.Errorf("updates: of the holder %q, of the driver %q", hold.text("spec", "updateStrategy", "type"), node.text("spec", "updateStrategy", "type"))
	}
	asked := objects(t, func(v map[string]any) { v["node"].(map[string]any)["updateStrategy"] = "RollingUpdate" })
	if got := asked["DaemonSet/penstock-node"]; got.text("spec", "updateStrategy", "type") != "RollingUpdate" || got.at("spec", "updateStrategy", "rollingUpdate", "maxUnavailable") != 1 {
		t.Errorf("asked to roll, the driver's pods are replaced by %v", got.at("spec", "updateStrategy"))
	}
	if _, err := driverChart.try(t, func(v map[string]any) {
		v["hold"].(map[string]any)["enabled"], v["node"].(map[string]any)["updateStrategy"] = false, "RollingUpdate"
	}); err == nil || !strings.Contains(err.Error(), "needs hold.enabled") {
		t.Errorf("without a holder pods are replaced one after the other: %v", err)
	}
	if hold.at("spec", "template", "spec", "hostPID") != true || hold.text("spec", "template", "spec", "priorityClassName") != node.text("spec", "template", "spec", "priorityClassName") {
		t.Error("the holder does not see who serves, or goes before the driver")
	}
	if node.at("spec", "template", "spec", "hostPID") != nil {
		t.Error("the driver's pod would leave its processes behind")
	}
	for _, k := range []string{"nodeSelector", "tolerations"} { // wherever the driver is
		if got, want := fmt.Sprint(hold.at("spec", "template", "spec", k)), fmt.Sprint(node.at("spec", "template", "spec", k)); got != want {
			t.Errorf("%s of the holder: %s, of the driver: %s", k, got, want)
		}
	}
	all = objects(t, func(v map[string]any) { v["hold"].(map[string]any)["enabled"] = false })
	if node = all["DaemonSet/penstock-node"]; flag(node, "--hold") != "" || node.text("spec", "updateStrategy", "type") != "OnDelete" {
		t.Error("without a holder the driver asks for one, or its pods are replaced while mounts depend on them")
	}
}

// TestInline: pods may bring volumes along where the chart says so; by default pods may not.
func TestInline(t *testing.T) {
	for _, on := range []bool{false, true} {
		all := objects(t, func(v map[string]any) { v["node"].(map[string]any)["inline"] = on })
		modes := fmt.Sprint(all["CSIDriver/"+driver.Name].at("spec", "volumeLifecycleModes"))
		args := fmt.Sprint(all["DaemonSet/penstock-node"].list("spec", "template", "spec", "containers")[0].at("args"))
		if strings.Contains(modes, "Ephemeral") != on || strings.Contains(args, "--inline") != on {
			t.Errorf("inline %t: modes %s, arguments %s", on, modes, args)
		}
	}
}

// TestGrantNodes: where nodes get grants for published volumes, Kubernetes attaches volumes, and
// the attacher runs; elsewhere neither happens. An upgrade that would have to change the
// immutable field of the CSIDriver is refused before anything is changed.
func TestGrantNodes(t *testing.T) {
	for _, x := range []struct{ grants, inline, attach bool }{{true, false, true}, {false, false, false}, {true, true, false}} {
		set := func(v map[string]any) {
			v["grantNodes"], v["node"].(map[string]any)["inline"] = x.grants, x.inline
		}
		all := objects(t, set)
		attacher := false
		for _, c := range all["Deployment/penstock-controller"].list("spec", "template", "spec", "containers") {
			attacher = attacher || c.text("name") == "attacher"
		}
		if got := all["CSIDriver/"+driver.Name].at("spec", "attachRequired"); got != x.attach || attacher != x.attach {
			t.Errorf("%+v: attachRequired %v, an attacher: %t", x, got, attacher)
		}
		if may := strings.Contains(fmt.Sprint(all["ClusterRole/penstock-controller"].at("rules")), "volumeattachments/status"); may != x.attach {
			t.Errorf("%+v: it may write attachments: %t", x, may)
		}
		// With the settings from the message, the chart asks for the existing object.
		for there, leave := range map[bool]string{true: "--set grantNodes=true,node.inline=false,", false: "--set grantNodes=false,"} {
			c := driverChart
			c.there = map[string]map[string]any{driver.Name: {"spec": map[string]any{"attachRequired": there}}}
			_, err := c.try(t, set)
			if there == x.attach && err != nil {
				t.Errorf("%+v: as it is already: %v", x, err)
			}
			if there != x.attach && (err == nil || !strings.Contains(err.Error(), leave) || !strings.Contains(err.Error(), fmt.Sprintf("(grantNodes=%t, node.inline=%t)", x.grants, x.inline)) || !strings.Contains(err.Error(), "docs/kubernetes.md")) {
				t.Errorf("%+v over attachRequired %t: %v", x, there, err)
			}
		}
	}
}

// TestVolumesOfANode: the driver gets the bound on the volumes of a node if the values have
// one.
func TestVolumesOfANode(t *testing.T) {
	args := func(change map[string]any) string {
		all := objects(t, func(v map[string]any) { maps.Copy(v["node"].(map[string]any), change) })
		return strings.Join(words(all["DaemonSet/penstock-node"].list("spec", "template", "spec", "containers")[0].at("args")), " ") + " "
	}
	if got := args(nil); strings.Contains(got, "--max-volumes") || strings.Contains(got, "--inline-max") {
		t.Errorf("arguments %s", got)
	}
	got := args(map[string]any{"maxVolumes": 30, "inline": true, "inlineMax": "5G"})
	for _, want := range []string{" --max-volumes=30 ", " --inline-max=5G "} {
		if !strings.Contains(got, want) {
			t.Errorf("arguments %s lack %s", got, want)
		}
	}
}

// TestExamples: the examples parse, and the driver takes their parameters.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(driverChart.plain, "examples", "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no examples: %v", err)
	}
	known := objects(t, groups)
	for _, f := range files {
		for _, o := range parse(t, f, string(read(t, f))) {
			if o.text("apiVersion") == "" || o.text("metadata", "name") == "" {
				t.Errorf("%s: %v is no object", f, o)
			}
			if o.text("kind") == "VolumeAttributesClass" {
				if o.text("driverName") != driver.Name {
					t.Errorf("%s: %s is of driver %q", f, o, o.text("driverName"))
				}
				if _, err := policy.ReadClass(nil, texts(t, o, "parameters"), "pvc-1"); err != nil {
					t.Errorf("%s: the driver would refuse it: %v", f, err)
				}
			}
			if class := o.text("spec", "storageClassName"); class != "" && known["StorageClass/"+class] == nil {
				t.Errorf("%s: %s wants class %s, which is not there", f, o, class)
			}
			if class := o.text("spec", "volumeSnapshotClassName"); class != "" && known["VolumeSnapshotClass/"+class] == nil {
				t.Errorf("%s: %s wants class %s, which is not there", f, o, class)
			}
			if class := o.text("spec", "volumeGroupSnapshotClassName"); class != "" && known["VolumeGroupSnapshotClass/"+class] == nil {
				t.Errorf("%s: %s wants class %s, which is not there", f, o, class)
			}
		}
	}
}
