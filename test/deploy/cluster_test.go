package deploy

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"
)

// sets are the StatefulSets of the cluster's chart.
func sets(all map[string]object) (l []object) {
	for _, o := range all {
		if o.text("kind") == "StatefulSet" {
			l = append(l, o)
		}
	}
	slices.SortFunc(l, func(a, b object) int { return strings.Compare(a.String(), b.String()) })
	return l
}

// pod is the template of an object's pods.
func (o object) pod() object { m, _ := o.at("spec", "template").(map[string]any); return m }

// flag is the value of a flag of a container; all of the values, if the flag is repeated.
func (o object) flags(container, name string) (values []string) {
	for _, c := range append(o.pod().list("spec", "initContainers"), o.pod().list("spec", "containers")...) {
		args, _ := c.at("args").([]any)
		for _, a := range args {
			if v, is := strings.CutPrefix(fmt.Sprint(a), name+"="); is && c.text("name") == container {
				values = append(values, v)
			}
		}
	}
	return values
}

func (o object) flag(container, name string) string {
	return strings.Join(o.flags(container, name), " ")
}

// TestClusterStands: one server of each kind may be taken away at a time. No two servers of a
// kind are on the same node, each has a lasting address, and each tells when it can serve.
func TestClusterStands(t *testing.T) {
	all := clusterChart.objects(t, asIs)
	if got := fmt.Sprint(sets(all)); got != "[StatefulSet/penstock-chunkserver-a StatefulSet/penstock-etcd StatefulSet/penstock-meta StatefulSet/penstock-meta-first]" {
		t.Errorf("servers: %s", got)
	}
	for _, o := range sets(all) {
		pod := o.pod()
		component := pod.text("metadata", "labels", "app.kubernetes.io/component")
		service, budget, policy := all["Service/"+o.text("spec", "serviceName")], all["PodDisruptionBudget/penstock-"+component], all["NetworkPolicy/penstock-"+component]
		if service.text("spec", "clusterIP") != "None" || !selects(service, pod, "spec", "selector") || service.at("spec", "publishNotReadyAddresses") != true {
			t.Errorf("%s: its service gives its pods no names: %v", o, service)
		}
		if budget.at("spec", "maxUnavailable") != 1 || !selects(budget, pod, "spec", "selector", "matchLabels") {
			t.Errorf("%s: its pods may be taken away at once: %v", o, budget)
		}
		if !selects(policy, pod, "spec", "podSelector", "matchLabels") {
			t.Errorf("%s: no policy says who may come", o)
		}
		apart := pod.list("spec", "affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
		if len(apart) != 1 || apart[0].text("topologyKey") != "kubernetes.io/hostname" || !selects(apart[0], pod, "labelSelector", "matchLabels") {
			t.Errorf("%s: two of its pods may be on one node: %v", o, apart)
		}
		// Kubernetes replaces one pod of each set at a time: with several sets of a kind, several
		// servers.
		if one := o.at("spec", "updateStrategy", "type"); (component == "etcd") != (one == nil) || one != nil && one != "OnDelete" {
			t.Errorf("%s: its pods are replaced by Kubernetes, whatever runs of the other sets: %v", o, one)
		}
		for _, c := range pod.list("spec", "containers") {
			if c.at("readinessProbe") == nil || c.at("startupProbe") == nil {
				t.Errorf("%s: nobody asks %s whether it can serve", o, c.text("name"))
			}
			// The probe asks the served address.
			if command, _ := c.at("readinessProbe", "exec", "command").([]any); len(command) > 0 && fmt.Sprint(command[len(command)-1]) != "--process="+o.flag("penstock", "--admin") {
				t.Errorf("%s: the probe asks %v, the server answers at %s", o, command, o.flag("penstock", "--admin"))
			}
		}
		if own := o.flag("penstock", "--advertise"); component != "etcd" && !strings.HasPrefix(own, "$(POD_NAME)."+service.text("metadata", "name")+"."+namespace+".svc:") {
			t.Errorf("%s: others are told %q", o, own)
		}
		if s := pod.at("spec", "securityContext"); pod.text("spec", "securityContext", "fsGroupChangePolicy") != "OnRootMismatch" || pod.at("spec", "securityContext", "runAsNonRoot") != true {
			t.Errorf("%s: keys are opened to a group, which servers refuse, or it runs as root: %v", o, s)
		}
	}
	relaxed := clusterChart.objects(t, func(v map[string]any) { v["antiAffinity"] = "preferred" })
	for _, o := range sets(relaxed) {
		if o.pod().list("spec", "affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution") != nil || len(o.pod().list("spec", "affinity", "podAntiAffinity", "preferredDuringSchedulingIgnoredDuringExecution")) != 1 {
			t.Errorf("%s: antiAffinity is of no use", o)
		}
	}
}

// TestClusterTry: the values for a trial are values of the chart, and the servers of a trial
// fit onto one small node.
func TestClusterTry(t *testing.T) {
	milli := 0
	for _, o := range sets(clusterChart.objects(t, clusterChart.tried(t))) {
		if o.pod().list("spec", "affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution") != nil {
			t.Errorf("%s wants a node for each of its pods", o)
		}
		var one int
		cpu := o.pod().list("spec", "containers")[0].text("resources", "requests", "cpu")
		if _, err := fmt.Sscanf(cpu, "%dm", &one); err != nil {
			t.Errorf("%s asks for %q of a processor", o, cpu)
		}
		milli += one * o.at("spec", "replicas").(int)
	}
	if milli == 0 || milli > 1000 {
		t.Errorf("all servers ask for %d thousandths of a processor", milli)
	}
}

// tried sets the values for a trial of a chart.
func (c chart) tried(t *testing.T) func(values map[string]any) {
	t.Helper()
	var try map[string]any
	if err := yaml.Unmarshal(read(t, c.path, "try.yaml"), &try); err != nil {
		t.Fatal(err)
	}
	var merge func(at string, values, by map[string]any)
	merge = func(at string, values, by map[string]any) {
		for k, v := range by {
			if _, known := values[k]; !known {
				t.Errorf("the chart has no value %s%s", at, k)
			}
			was, deep := values[k].(map[string]any)
			if m, is := v.(map[string]any); is && deep {
				merge(at+k+".", was, m)
				continue
			}
			values[k] = v
		}
	}
	return func(values map[string]any) { merge("", values, try) }
}

// TestDriverTry: with the values for a trial the driver uses the cluster of the trial, and its
// volumes fit onto one node.
func TestDriverTry(t *testing.T) {
	servers := clusterChart.objects(t, clusterChart.tried(t))
	all := objects(t, driverChart.tried(t))
	at := all["ConfigMap/penstock"].text("data", "cluster")
	service, _, _ := strings.Cut(at, ".")
	if servers["Service/"+service] == nil || at != service+"."+namespace+".svc:7400" {
		t.Errorf("the driver looks for metadata servers at %q", at)
	}
	classes := 0
	for name, o := range all {
		if strings.HasPrefix(name, "StorageClass/") {
			classes++
			if o.text("parameters", "replicas") != "1" {
				t.Errorf("%s wants %q hosts", name, o.text("parameters", "replicas"))
			}
		}
	}
	if classes == 0 {
		t.Error("there is no class")
	}
}

// TestClusterWithoutFirst: the objects that made the cluster can be left out when the cluster
// exists, and all other objects stay as they are.
func TestClusterWithoutFirst(t *testing.T) {
	all := clusterChart.objects(t, asIs)
	without := clusterChart.objects(t, func(v map[string]any) { v["meta"].(map[string]any)["first"] = false })
	const first = "StatefulSet/penstock-meta-first"
	if all[first] == nil || without[first] != nil || len(without) != len(all)-1 {
		t.Errorf("with it %d objects, without %d", len(all), len(without))
	}
	for name, o := range without {
		if !reflect.DeepEqual(o, all[name]) {
			t.Errorf("%s is another", name)
		}
	}
}

// TestClusterCommands: in the pod of a metadata server, commands find the cluster and a
// certificate that is always valid.
func TestClusterCommands(t *testing.T) {
	for _, o := range sets(clusterChart.objects(t, asIs)) {
		if o.pod().text("metadata", "labels", "app.kubernetes.io/component") != "meta" {
			continue
		}
		env := map[string]string{}
		for _, e := range o.pod().list("spec", "containers")[0].list("env") {
			env[e.text("name")] = e.text("value")
		}
		if env["PENSTOCK_CREDENTIALS"] != o.flag("penstock", "--credentials") || env["PENSTOCK_CLUSTER"] != "penstock-meta."+namespace+".svc:7400" {
			t.Errorf("%s: commands in it use %v", o, env)
		}
	}
}

// TestClusterMakesItself: one server makes the cluster, and the other servers join this cluster.
func TestClusterMakesItself(t *testing.T) {
	all := clusterChart.objects(t, asIs)
	first, more, chunks := all["StatefulSet/penstock-meta-first"], all["StatefulSet/penstock-meta"], all["StatefulSet/penstock-chunkserver-a"]
	command := func(o object) string {
		args, _ := o.pod().list("spec", "initContainers")[0].at("args").([]any)
		return fmt.Sprint(args[:3])
	}
	if first.at("spec", "replicas") != 1 || command(first) != "[cluster init --once]" || command(more) != "[cluster join --once]" || command(chunks) != "[cluster join --once]" {
		t.Errorf("the first: %d, %s; more: %s; chunk servers: %s", first.at("spec", "replicas"), command(first), command(more), command(chunks))
	}
	if made, used := first.flag("credentials", "--credentials")+"/meta", first.flag("penstock", "--credentials"); made != used {
		t.Errorf("credentials are made at %s and looked for at %s", made, used)
	}
	for _, o := range []object{more, chunks} {
		if made, used := o.flag("credentials", "--credentials"), o.flag("penstock", "--credentials"); made != used || made == "" {
			t.Errorf("%s: credentials are made at %q and looked for at %q", o, made, used)
		}
		if got := o.flag("credentials", "--cluster"); got != "penstock-meta."+namespace+".svc:7400" {
			t.Errorf("%s joins %s", o, got)
		}
		// Credentials and data lie on volumes that outlive the pod.
		if o.flag("credentials", "--name") != "$(POD_NAME)" {
			t.Errorf("%s: joins as %s", o, o.flag("credentials", "--name"))
		}
	}
	if got := first.flag("penstock", "--etcd"); got != first.flag("credentials", "--etcd") || got != more.flag("penstock", "--etcd") || strings.Count(got, "https://") != 3 {
		t.Errorf("etcd is looked for at %s", got)
	}
	five := clusterChart.objects(t, func(v map[string]any) { v["etcd"].(map[string]any)["replicas"] = 5 })
	etcd := five["StatefulSet/penstock-etcd"]
	members := strings.Split(etcd.flag("etcd", "--initial-cluster"), ",")
	endpoints := strings.Split(five["StatefulSet/penstock-meta"].flag("penstock", "--etcd"), ",")
	if len(members) != 5 || len(endpoints) != 5 || etcd.at("spec", "replicas") != 5 {
		t.Errorf("members %v, endpoints %v", members, endpoints)
	}
	for i := range members {
		host := fmt.Sprintf("https://penstock-etcd-%d.penstock-etcd.%s.svc", i, namespace)
		if members[i] != fmt.Sprintf("penstock-etcd-%d=%s:2380", i, host) || endpoints[i] != host+":2379" {
			t.Errorf("member %s, endpoint %s", members[i], endpoints[i])
		}
	}
	if etcd.flag("etcd", "--initial-advertise-peer-urls") != "https://$(POD_NAME).penstock-etcd."+namespace+".svc:2380" {
		t.Error("a member is not where the others look for it")
	}
	elsewhere := clusterChart.objects(t, func(v map[string]any) {
		v["etcd"].(map[string]any)["enabled"], v["etcd"].(map[string]any)["endpoints"] = false, []any{"https://e1:2379", "https://e2:2379"}
	})
	for name, o := range elsewhere {
		if strings.Contains(name, "etcd") {
			t.Errorf("%s is there although etcd is elsewhere", name)
		}
		if o.text("metadata", "name") == "penstock-meta" && o.text("kind") == "StatefulSet" && o.flag("penstock", "--etcd") != "https://e1:2379,https://e2:2379" {
			t.Errorf("etcd is looked for at %s", o.flag("penstock", "--etcd"))
		}
	}
}

// TestClusterGroups: each group stands in its rack, with a claim for each disk.
func TestClusterGroups(t *testing.T) {
	all := clusterChart.objects(t, func(v map[string]any) {
		c := v["chunkserver"].(map[string]any)
		disk := func(name, class string) any {
			return map[string]any{"name": name, "class": class, "storageClassName": "local-" + class, "storage": "4Ti"}
		}
		group := func(name, topology string, disks ...any) any {
			return map[string]any{"name": name, "topology": topology, "replicas": 4, "nodeSelector": map[string]any{"rack": name}, "tolerations": []any{}, "disks": disks}
		}
		c["groups"] = []any{group("east", "/dc1/east", disk("d0", "nvme"), disk("d1", "hdd")), group("west", "/dc1/west", disk("d0", "nvme"))}
	})
	for name, disks := range map[string]int{"east": 2, "west": 1} {
		o := all["StatefulSet/penstock-chunkserver-"+name]
		if o.at("spec", "replicas") != 4 || o.flag("penstock", "--topology") != "/dc1/"+name+"/$(NODE_NAME)" || o.pod().text("spec", "nodeSelector", "rack") != name {
			t.Errorf("%s stands at %s", o, o.flag("penstock", "--topology"))
		}
		claims := o.list("spec", "volumeClaimTemplates")
		if got := o.flags("penstock", "--disk"); len(got) != disks || len(claims) != disks+1 || got[0] != "nvme=/disks/d0/chunks" {
			t.Errorf("%s has disks %v and %d claims", o, got, len(claims))
		}
		for _, c := range claims[1:] {
			if !strings.HasPrefix(c.text("spec", "storageClassName"), "local-") || c.text("spec", "resources", "requests", "storage") != "4Ti" {
				t.Errorf("%s: claim %v", o, c)
			}
		}
	}
}

// TestUninstallKeepsData: the objects that helm deletes with a release, and the objects that go
// with them, have no bytes, keys or mounts of users.
func TestUninstallKeepsData(t *testing.T) {
	for _, c := range charts {
		for _, o := range c.objects(t, asIs) {
			switch o.text("kind") {
			case "PersistentVolumeClaim", "PersistentVolume", "Secret", "Namespace", "CustomResourceDefinition":
				t.Errorf("%s: %s would be deleted", c.path, o)
			case "StatefulSet":
				p := "persistentVolumeClaimRetentionPolicy"
				if o.text("spec", p, "whenDeleted") != "Retain" || o.text("spec", p, "whenScaled") != "Retain" {
					t.Errorf("%s: %s takes its claims with it", c.path, o)
				}
				// Everything that outlives a restart is on a claim, except secrets and memory.
				for _, v := range o.pod().list("spec", "volumes") {
					if v.at("secret") == nil && v.at("emptyDir") == nil {
						t.Errorf("%s: %s keeps something on %v", c.path, o, v)
					}
				}
			}
		}
	}
}
