package kube_test

import (
	"testing"

	"penstock.io/penstock/cmd/penstock/kube"
	"penstock.io/penstock/cmd/penstock/kube/kubetest"
	"penstock.io/penstock/meta"
)

// TestSecrets: a Secret is read, and one value is replaced unless the Secret has changed
// since; refusals of the API server have the right kind.
func TestSecrets(t *testing.T) {
	s := kubetest.New(t)
	s.Put("tokens", map[string]string{"token": "old", "other": "stays"})
	api := s.API(t)
	got, err := api.Secret(t.Context(), "tokens")
	if err != nil || string(got.Data["token"]) != "old" {
		t.Fatalf("%+v, %v", got, err)
	}
	if err := api.SetSecret(t.Context(), got, "token", []byte("new")); err != nil {
		t.Fatal(err)
	}
	if now := s.Get("tokens"); now["token"] != "new" || now["other"] != "stays" {
		t.Errorf("it has %v", now)
	}
	if err := api.SetSecret(t.Context(), got, "token", []byte("late")); meta.KindOf(err) != meta.Busy || s.Get("tokens")["token"] != "new" {
		t.Errorf("one that was changed meanwhile: %v, %v", err, s.Get("tokens"))
	}
	if _, err := api.Secret(t.Context(), "none"); meta.KindOf(err) != meta.NotFound {
		t.Errorf("one that is not there: %v", err)
	}
	s.Account(t, "somebody else")
	if _, err := api.Secret(t.Context(), "tokens"); meta.KindOf(err) != meta.AccessDenied {
		t.Errorf("an account that may not: %v", err)
	}
	s.Close()
	if _, err := api.Secret(t.Context(), "tokens"); meta.KindOf(err) != meta.Unavailable {
		t.Errorf("nobody answers: %v", err)
	}
}

// TestNodeLabels: labels are read, also of a node without labels.
func TestNodeLabels(t *testing.T) {
	s := kubetest.New(t)
	s.Label("worker-1", map[string]string{"zone": "a"})
	s.Label("bare", nil)
	api := s.API(t)
	if l, err := api.NodeLabels(t.Context(), "worker-1"); err != nil || len(l) != 1 || l["zone"] != "a" {
		t.Errorf("%v, %v", l, err)
	}
	if l, err := api.NodeLabels(t.Context(), "bare"); err != nil || len(l) != 0 {
		t.Errorf("%v, %v", l, err)
	}
	if _, err := api.NodeLabels(t.Context(), "none"); meta.KindOf(err) != meta.NotFound {
		t.Errorf("%v", err)
	}
}

// TestNoPod: outside of a pod there is no API server, and a malformed certificate is no
// authority.
func TestNoPod(t *testing.T) {
	if _, err := kube.InPod(t.TempDir(), func(string) string { return "" }); meta.KindOf(err) != meta.NotFound {
		t.Errorf("no environment: %v", err)
	}
	if _, err := kube.InPod(t.TempDir(), func(string) string { return "1" }); meta.KindOf(err) != meta.NotFound {
		t.Errorf("no account: %v", err)
	}
}
