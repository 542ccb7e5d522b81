package main

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/kube/kubetest"
	"penstock.io/penstock/meta"
)

// TestGuard: the driver may be removed when no pod on any node has a volume of the
// driver, and none is attached; other objects do not count.
func TestGuard(t *testing.T) {
	s := kubetest.New(t)
	volume := func(name, driver, claim string) string {
		ref := ""
		if namespace, name, found := strings.Cut(claim, "/"); found {
			ref = fmt.Sprintf(`,"claimRef":{"namespace":%q,"name":%q}`, namespace, name)
		}
		return fmt.Sprintf(`{"metadata":{"name":%q},"spec":{"csi":{"driver":%q,"volumeHandle":"h"}%s}}`, name, driver, ref)
	}
	pod := func(name, node, phase, volumes string) string {
		return fmt.Sprintf(`{"metadata":{"namespace":"ns","name":%q,"deletionTimestamp":"2026-11-01T00:00:00Z"},"spec":{"nodeName":%q,"volumes":[{"name":"kube-api","projected":{}},%s]},"status":{"phase":%q}}`, name, node, volumes, phase)
	}
	claim := func(name string) string {
		return fmt.Sprintf(`{"name":"v","persistentVolumeClaim":{"claimName":%q}}`, name)
	}
	attachment := func(driver, node, volume string) string {
		return fmt.Sprintf(`{"metadata":{"name":"csi-1"},"spec":{"attacher":%q,"nodeName":%q,"source":{"persistentVolumeName":%q}}}`, driver, node, volume)
	}
	const ours, other = "csi.penstock.io", "csi.example.com"
	s.List(kubetest.VolumesPath, volume("pv-1", ours, "ns/data"), volume("pv-2", other, "ns/logs"), volume("pv-3", ours, ""), volume("pv-4", ours, "ns/eph-scratch"), `{"metadata":{"name":"pv-5"},"spec":{"nfs":{}}}`)
	for _, c := range []struct {
		what        string
		pods        []string
		attachments []string
		want        []string // of the error; none: nobody uses any
	}{
		{"nothing", nil, nil, nil},
		{"another driver's", []string{pod("p", "n1", "Running", claim("logs"))}, []string{attachment(other, "n1", "pv-2")}, nil},
		{"on no node yet", []string{pod("p", "", "Pending", claim("data"))}, nil, nil},
		{"ended", []string{pod("p", "n1", "Succeeded", claim("data")), pod("q", "n1", "Failed", claim("data"))}, nil, nil},
		{"a claim of the same name elsewhere", []string{strings.Replace(pod("p", "n1", "Running", claim("data")), `"ns"`, `"elsewhere"`, 1)}, nil, nil},
		{"running, and terminating", []string{pod("p", "n1", "Running", claim("data")), pod("q", "n2", "Running", claim("logs")+","+claim("data"))}, []string{attachment(ours, "n1", "pv-1")},
			[]string{"\n  pod ns/p on node n1 has claim data (pv-1)\n  pod ns/q on node n2 has claim data (pv-1)\n", "--no-hooks"}},
		{"starting", []string{pod("p", "n1", "Pending", claim("data"))}, nil, []string{"pod ns/p on node n1"}},
		{"claimed for the pod", []string{pod("eph", "n1", "Running", `{"name":"scratch","ephemeral":{"volumeClaimTemplate":{}}}`)}, nil, []string{"pod ns/eph on node n1 has claim eph-scratch (pv-4)"}},
		{"brought along", []string{pod("p", "n1", "Running", `{"name":"mine","csi":{"driver":"csi.penstock.io"}}`)}, nil, []string{"has its own volume mine"}},
		{"brought along, another driver's", []string{pod("p", "n1", "Running", `{"name":"mine","csi":{"driver":"csi.example.com"}}`)}, nil, nil},
		{"not detached yet", nil, []string{attachment(ours, "n3", "pv-3")}, []string{"node n3 has volume pv-3 attached (csi-1)"}},
	} {
		s.List(kubetest.PodsPath, c.pods...)
		s.List(kubetest.AttachmentsPath, c.attachments...)
		err := new(guardFlags).guard(t.Context(), s.API(t))
		if (err == nil) != (len(c.want) == 0) || err != nil && meta.KindOf(err) != meta.Busy {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: the error says nothing of %q: %v", c.what, w, err)
			}
		}
	}

	// More than a page, and more than is told.
	var many []string
	for i := range 250 {
		many = append(many, pod(fmt.Sprintf("p%03d", i), "n1", "Running", claim(map[bool]string{true: "data", false: "logs"}[i%2 == 0])))
	}
	s.List(kubetest.PodsPath, many...)
	s.List(kubetest.AttachmentsPath)
	if err := new(guardFlags).guard(t.Context(), s.API(t)); err == nil || !strings.Contains(err.Error(), "and 105 more") || !strings.Contains(err.Error(), "ns/p038") || strings.Contains(err.Error(), "ns/p001") {
		t.Errorf("of 125 pods that use one: %v", err)
	}
	// A pod larger than an answer may be with others.
	large := strings.Replace(pod("large", "n1", "Running", claim("data")), `{"metadata":{`, `{"metadata":{"annotations":{"a":"`+strings.Repeat("x", 1<<20)+`"},`, 1)
	s.List(kubetest.PodsPath, large, large, large, large, large, large)
	if err := new(guardFlags).guard(t.Context(), s.API(t)); meta.KindOf(err) != meta.Busy || !strings.Contains(err.Error(), "ns/large") {
		t.Errorf("of large pods: %v", err)
	}

	// Without an answer of the API server the guard fails.
	s.List(kubetest.PodsPath)
	for _, path := range []string{kubetest.PodsPath, kubetest.VolumesPath, kubetest.AttachmentsPath} {
		for status, want := range map[int]meta.Kind{http.StatusForbidden: meta.AccessDenied, http.StatusInternalServerError: meta.Unavailable, http.StatusGone: meta.Unavailable} {
			s.Refuse(path, status)
			if err := new(guardFlags).guard(t.Context(), s.API(t)); meta.KindOf(err) != want {
				t.Errorf("%s answers %d: %v", path, status, err)
			}
		}
	}

	// The guard waits for pods that are ending, and for an API server that is away.
	s.Refuse(kubetest.PodsPath, http.StatusServiceUnavailable)
	s.List(kubetest.PodsPath, pod("p", "n1", "Running", claim("data")))
	go func() {
		time.Sleep(20 * time.Millisecond)
		s.Refuse("", 0)
		time.Sleep(20 * time.Millisecond)
		s.List(kubetest.PodsPath)
	}()
	g := guardFlags{wait: time.Minute, every: 5 * time.Millisecond}
	if err := g.guard(t.Context(), s.API(t)); err != nil {
		t.Errorf("after its pods ended: %v", err)
	}
}
