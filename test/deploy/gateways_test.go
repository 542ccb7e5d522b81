package deploy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// withGateways has the chart make gateways.
func withGateways(v map[string]any) { v["gateway"].(map[string]any)["replicas"] = 2 }

// TestClusterGateways: gateways join with a token of their own, clients learn names that stay
// with a gateway and lead to its pod, and streams need TLS and a login.
func TestClusterGateways(t *testing.T) {
	before, all := clusterChart.objects(t, asIs), clusterChart.objects(t, withGateways)
	var more []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if before[name] == nil {
			more = append(more, name)
		}
	}
	if got := fmt.Sprint(more); got != "[NetworkPolicy/penstock-gateway PodDisruptionBudget/penstock-gateway Service/penstock-gateway Service/penstock-streams StatefulSet/penstock-gateway]" {
		t.Fatalf("gateways are %s", got)
	}
	objectsFit(t, all)
	o := all["StatefulSet/penstock-gateway"]
	pod := o.pod()
	names, first := all["Service/penstock-gateway"], all["Service/penstock-streams"]
	if o.at("spec", "replicas") != 2 || o.text("spec", "serviceName") != "penstock-gateway" || names.text("spec", "clusterIP") != "None" || names.at("spec", "publishNotReadyAddresses") != true {
		t.Errorf("the pods have no names: %v", names)
	}
	for _, s := range []object{names, first} {
		if !selects(s, pod, "spec", "selector") {
			t.Errorf("%s leads to no gateway", s)
		}
	}
	if first.at("spec", "clusterIP") != nil || first.at("spec", "publishNotReadyAddresses") != nil {
		t.Error("a client may connect first to a gateway that is not ready")
	}
	if b := all["PodDisruptionBudget/penstock-gateway"]; b.at("spec", "maxUnavailable") != 1 || !selects(b, pod, "spec", "selector", "matchLabels") {
		t.Errorf("the gateways may be taken away at once: %v", b)
	}
	policy := all["NetworkPolicy/penstock-gateway"]
	if !selects(policy, pod, "spec", "podSelector", "matchLabels") {
		t.Error("no policy says which ports are open")
	}
	for flag, port := range map[string]int{"kafka": 9092, "ingest": 9094} {
		if at := o.flag("penstock", "--"+flag); at != fmt.Sprint("0.0.0.0:", port) {
			t.Errorf("--%s=%s", flag, at)
		}
		if told := o.flag("penstock", "--advertise-"+flag); told != fmt.Sprintf("$(POD_NAME).penstock-gateway.%s.svc:%d", namespace, port) {
			t.Errorf("clients are told %q", told)
		}
		open := false
		for _, in := range policy.list("spec", "ingress") {
			for _, p := range in.list("ports") {
				open = open || p.at("port") == port
			}
		}
		if !open {
			t.Errorf("the policy closes port %d", port)
		}
		for _, s := range []object{names, first} {
			if !slices.ContainsFunc(s.list("spec", "ports"), func(p object) bool { return p.at("port") == port }) {
				t.Errorf("%s has no port %d", s, port)
			}
		}
	}
	if own := o.flags("penstock", "--name"); own != nil {
		t.Errorf("a gateway has the name %v, not that of its certificate", own)
	}
	mounted := map[string]string{} // secret by directory
	for _, m := range pod.list("spec", "containers")[0].list("volumeMounts") {
		for _, v := range pod.list("spec", "volumes") {
			if v.text("name") == m.text("name") {
				mounted[m.text("mountPath")] = v.text("secret", "secretName")
			}
		}
	}
	for flag, want := range map[string]string{"--tls-cert": "penstock-gateway-tls/tls.crt", "--tls-key": "penstock-gateway-tls/tls.key", "--stream-users": "penstock-gateway-users/users.json"} {
		file := o.flag("penstock", flag)
		i := strings.LastIndexByte(file, '/')
		if i < 0 || mounted[file[:i]]+file[i:] != want {
			t.Errorf("%s=%s is not %s", flag, file, want)
		}
	}
	args, _ := pod.list("spec", "initContainers")[0].at("args").([]any)
	if fmt.Sprint(args[:3]) != "[cluster join --once]" || o.flag("credentials", "--credentials") != o.flag("penstock", "--credentials") || o.flag("credentials", "--name") != "$(POD_NAME)" {
		t.Errorf("a gateway joins by %v, and uses %s", args, o.flag("penstock", "--credentials"))
	}
	command, _ := pod.list("spec", "containers")[0].at("readinessProbe", "exec", "command").([]any)
	if len(command) == 0 || fmt.Sprint(command[len(command)-1]) != "--process="+o.flag("penstock", "--admin") {
		t.Errorf("the probe asks %v, the gateway answers at %s", command, o.flag("penstock", "--admin"))
	}
	apart := pod.list("spec", "affinity", "podAntiAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
	if len(apart) != 1 || !selects(apart[0], pod, "labelSelector", "matchLabels") {
		t.Errorf("two gateways may be on one node: %v", apart)
	}
	if o.text("spec", "persistentVolumeClaimRetentionPolicy", "whenDeleted") != "Retain" || o.text("spec", "updateStrategy", "type") != "RollingUpdate" {
		t.Errorf("claims and updates: %v", o)
	}
}
