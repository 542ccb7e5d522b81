// Package kube queries the API server of the Kubernetes in which this process is a pod,
// as the pod's service account. It has the few requests that the driver makes, so the
// program needs no library of Kubernetes.
package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"penstock.io/penstock/meta"
)

// AccountDir is the directory in which a pod finds the credentials of its service
// account: the files token, ca.crt and namespace.
const AccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

const (
	askWithin = 10 * time.Second
	maxAnswer = 4 << 20 // bytes; a Secret or a Node is below 1.5 MiB
)

// API is an API server, and the account for the requests.
type API struct {
	Namespace string // of this pod

	base   string
	dir    string
	client *http.Client
}

// InPod finds the API server by the environment of a pod, and the account in a directory.
// Errors: NotFound (this process is in no pod, or the pod has no account), Invalid.
func InPod(dir string, env func(string) string) (*API, error) {
	const op = "find the API server"
	host, port := env("KUBERNETES_SERVICE_HOST"), env("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, meta.E(op, meta.NotFound, "KUBERNETES_SERVICE_HOST", errors.New("this is no pod of Kubernetes"))
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, meta.E(op, meta.NotFound, dir, err)
	}
	namespace, err := os.ReadFile(filepath.Join(dir, "namespace"))
	if err != nil {
		return nil, meta.E(op, meta.NotFound, dir, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, meta.E(op, meta.Invalid, filepath.Join(dir, "ca.crt"), errors.New("there is no certificate in it"))
	}
	return &API{
		Namespace: strings.TrimSpace(string(namespace)),
		base:      "https://" + net.JoinHostPort(host, port),
		dir:       dir,
		client:    &http.Client{Timeout: askWithin, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}},
	}, nil
}

// Secret is a Secret of the pod's namespace.
type Secret struct {
	Metadata struct {
		Name            string `json:"name"`
		ResourceVersion string `json:"resourceVersion"`
	} `json:"metadata"`
	Data map[string][]byte `json:"data"`
}

// Secret reads a Secret. Errors: NotFound, AccessDenied, Unavailable, Protocol.
func (a *API) Secret(ctx context.Context, name string) (s Secret, err error) {
	err = a.ask(ctx, http.MethodGet, a.secretPath(name), nil, &s)
	return s, err
}

// SetSecret replaces one value of a Secret, if the Secret is unchanged since it was read.
// Errors: Busy (the Secret has changed), NotFound, AccessDenied, Invalid (the Secret is
// immutable), Unavailable.
func (a *API) SetSecret(ctx context.Context, s Secret, key string, value []byte) error {
	patch := map[string]any{
		"metadata": map[string]any{"resourceVersion": s.Metadata.ResourceVersion},
		"data":     map[string][]byte{key: value},
	}
	return a.ask(ctx, http.MethodPatch, a.secretPath(s.Metadata.Name), patch, nil)
}

func (a *API) secretPath(name string) string {
	return "/api/v1/namespaces/" + url.PathEscape(a.Namespace) + "/secrets/" + url.PathEscape(name)
}

// NodeLabels reads the labels of a node. Errors: NotFound, AccessDenied, Unavailable,
// Protocol.
func (a *API) NodeLabels(ctx context.Context, name string) (map[string]string, error) {
	var n struct {
		Metadata struct {
			Labels map[string]string `json:"labels"`
		} `json:"metadata"`
	}
	err := a.ask(ctx, http.MethodGet, "/api/v1/nodes/"+url.PathEscape(name), nil, &n)
	return n.Metadata.Labels, err
}

// ask makes a request; body is a merge patch.
func (a *API) ask(ctx context.Context, method, path string, body, into any) error {
	const op = "ask the API server"
	// The kubelet replaces the token before the token ends.
	token, err := os.ReadFile(filepath.Join(a.dir, "token"))
	if err != nil {
		return meta.E(op, meta.NotFound, a.dir, err)
	}
	var sent io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			panic("kube: a patch is plain data: " + err.Error())
		}
		sent = bytes.NewReader(b)
	}
	q, err := http.NewRequestWithContext(ctx, method, a.base+path, sent)
	if err != nil {
		return meta.E(op, meta.Invalid, path, err)
	}
	q.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	q.Header.Set("Accept", "application/json")
	if body != nil {
		q.Header.Set("Content-Type", "application/merge-patch+json")
	}
	r, err := a.client.Do(q)
	if err != nil {
		return meta.E(op, meta.Unavailable, path, err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(io.LimitReader(r.Body, maxAnswer))
	if err != nil {
		return meta.E(op, meta.Unavailable, path, err)
	}
	if r.StatusCode != http.StatusOK {
		var status struct{ Message string }
		if json.Unmarshal(b, &status) != nil || status.Message == "" {
			status.Message = r.Status
		}
		return meta.E(op, kindOf(r.StatusCode), path, fmt.Errorf("%d: %s", r.StatusCode, status.Message))
	}
	if into == nil {
		return nil
	}
	if err := json.Unmarshal(b, into); err != nil {
		return meta.E(op, meta.Protocol, path, err)
	}
	return nil
}

func kindOf(status int) meta.Kind {
	switch status {
	case http.StatusNotFound:
		return meta.NotFound
	case http.StatusConflict:
		return meta.Busy
	case http.StatusUnauthorized, http.StatusForbidden:
		return meta.AccessDenied
	case http.StatusBadRequest, http.StatusUnprocessableEntity:
		return meta.Invalid
	}
	return meta.Unavailable
}
