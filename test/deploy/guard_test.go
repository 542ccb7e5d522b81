package deploy

import (
	"fmt"
	"testing"
)

// TestGuard: before a release of the driver is uninstalled, a Job runs the program's guard,
// once, with the rights that the guard needs and no more. The Job does not run when a release
// is installed. With the guard switched off, none of its objects are left.
func TestGuard(t *testing.T) {
	all := objects(t, asIs)
	job := all["Job/penstock-guard"]
	if job == nil {
		t.Fatal("there is no Job")
	}
	notes := job.at("metadata", "annotations").(map[string]any)
	if notes["helm.sh/hook"] != "pre-delete" || notes["helm.sh/hook-delete-policy"] != "before-hook-creation,hook-succeeded" {
		t.Errorf("it is run when %v", notes)
	}
	pod := job.pod()
	if job.at("spec", "backoffLimit") != 0 || pod.text("spec", "restartPolicy") != "Never" {
		t.Errorf("a guard that refused is asked again: %v", job)
	}
	container := pod.list("spec", "containers")[0]
	if args := fmt.Sprint(words(container.at("args"))); args != "[csi guard --wait=1m]" {
		t.Errorf("it runs %s", args)
	}
	if pod.at("spec", "automountServiceAccountToken") != true || pod.text("spec", "serviceAccountName") != "penstock-guard" {
		t.Errorf("it asks as %v", pod)
	}
	rights := map[string]string{}
	for _, r := range all["ClusterRole/penstock-guard"].list("rules") {
		rights[fmt.Sprint(words(r.at("apiGroups")), words(r.at("resources")))] = fmt.Sprint(words(r.at("verbs")))
	}
	if want := "map[[] [pods persistentvolumes]:[list] [storage.k8s.io] [volumeattachments]:[list]]"; fmt.Sprint(rights) != want {
		t.Errorf("it may %v", rights)
	}
	for name := range all {
		o := all[name]
		if o.at("metadata", "annotations", "helm.sh/hook") != nil && name != "Job/penstock-guard" {
			t.Errorf("%s is a hook, too: it is not there when the guard runs", name)
		}
	}
	for name, o := range objects(t, func(v map[string]any) { v["guard"].(map[string]any)["enabled"] = false }) {
		if o.text("metadata", "name") == "penstock-guard" {
			t.Errorf("%s is there", name)
		}
	}
}
