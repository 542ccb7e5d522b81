// Package kubetest is a stand-in for the API server of Kubernetes, for tests.
package kubetest

import (
	"encoding/json"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"penstock.io/penstock/cmd/penstock/kube"
)

// Fake is an API server for tests, with the Secrets of one namespace, and nodes.
type Fake struct {
	server *httptest.Server
	dir    string // of the account

	mu      sync.Mutex
	secrets map[string]*fakeSecret
	nodes   map[string]map[string]string
	lists   map[string][]any // by path
	refused map[string]int   // status of the refusal, by list
	// Patching is called before a Secret is changed: somebody else may be faster.
	Patching func()
}

type fakeSecret struct {
	revision int
	data     map[string]string
}

const fakeNamespace, fakeToken = "penstock-system", "the account's token"

// New starts a fake, which ends with the test.
func New(t *testing.T) *Fake {
	t.Helper()
	f := &Fake{dir: t.TempDir(), secrets: map[string]*fakeSecret{}, nodes: map[string]map[string]string{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/namespaces/"+fakeNamespace+"/secrets/{name}", f.get)
	mux.HandleFunc("PATCH /api/v1/namespaces/"+fakeNamespace+"/secrets/{name}", f.patch)
	mux.HandleFunc("GET /api/v1/nodes/{name}", f.node)
	for _, path := range []string{PodsPath, VolumesPath, AttachmentsPath} {
		mux.HandleFunc("GET "+path, f.list)
	}
	f.server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.Header.Get("Authorization") != "Bearer "+fakeToken {
			refuse(w, http.StatusForbidden, "this account may not")
			return
		}
		mux.ServeHTTP(w, q)
	}))
	t.Cleanup(f.server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: f.server.Certificate().Raw})
	for name, b := range map[string][]byte{"ca.crt": ca, "namespace": []byte(fakeNamespace + "\n")} {
		if err := os.WriteFile(filepath.Join(f.dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f.Account(t, fakeToken)
	return f
}

// Paths of the fake's lists.
const (
	PodsPath        = "/api/v1/pods"
	VolumesPath     = "/api/v1/persistentvolumes"
	AttachmentsPath = "/apis/storage.k8s.io/v1/volumeattachments"
)

// List replaces the objects (JSON) of a list.
func (f *Fake) List(path string, objects ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lists == nil {
		f.lists = map[string][]any{}
	}
	f.lists[path] = nil
	for _, o := range objects {
		f.lists[path] = append(f.lists[path], json.RawMessage(o))
	}
}

// Refuse makes requests for a list fail with a status; 0: requests succeed again.
func (f *Fake) Refuse(path string, status int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refused = map[string]int{path: status}
}

// list answers page by page, in pages of the size that the caller requests.
func (f *Fake) list(w http.ResponseWriter, q *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if status := f.refused[q.URL.Path]; status != 0 {
		refuse(w, status, "refused")
		return
	}
	all := f.lists[q.URL.Path]
	from, _ := strconv.Atoi(q.URL.Query().Get("continue"))
	limit, err := strconv.Atoi(q.URL.Query().Get("limit"))
	if err != nil || limit < 1 || from > len(all) {
		refuse(w, http.StatusBadRequest, "limit or continue")
		return
	}
	to, next := min(from+limit, len(all)), ""
	if to < len(all) {
		next = strconv.Itoa(to)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"metadata": map[string]any{"continue": next}, "items": append([]any{}, all[from:to]...)})
}

// Account changes the token that pods show.
func (f *Fake) Account(t *testing.T, token string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(f.dir, "token"), []byte(token+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// API returns the fake as a pod finds it.
func (f *Fake) API(t *testing.T) *kube.API {
	t.Helper()
	u, err := url.Parse(f.server.URL)
	if err != nil {
		t.Fatal(err)
	}
	host, port, err := net.SplitHostPort(u.Host)
	if err != nil {
		t.Fatal(err)
	}
	a, err := kube.InPod(f.dir, func(name string) string {
		return map[string]string{"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}[name]
	})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// Close ends the fake.
func (f *Fake) Close() { f.server.Close() }

// Put makes or replaces a Secret.
func (f *Fake) Put(name string, data map[string]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.secrets[name]
	if s == nil {
		s = &fakeSecret{}
		f.secrets[name] = s
	}
	s.revision++
	s.data = data
}

// Get returns the values of a Secret.
func (f *Fake) Get(name string) map[string]string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.secrets[name]; s != nil {
		return s.data
	}
	return nil
}

// Label makes a node with labels.
func (f *Fake) Label(node string, labels map[string]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.nodes[node] = labels
}

func refuse(w http.ResponseWriter, status int, why string) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "message": why, "code": status})
}

func (f *Fake) get(w http.ResponseWriter, q *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := q.PathValue("name")
	s := f.secrets[name]
	if s == nil {
		refuse(w, http.StatusNotFound, "secrets "+name+" not found")
		return
	}
	data := map[string][]byte{}
	for k, v := range s.data {
		data[k] = []byte(v)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"metadata": map[string]any{"name": name, "resourceVersion": strconv.Itoa(s.revision)}, "data": data})
}

func (f *Fake) patch(w http.ResponseWriter, q *http.Request) {
	if f.Patching != nil {
		f.Patching()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	name := q.PathValue("name")
	s := f.secrets[name]
	var p kube.Secret
	switch err := json.NewDecoder(q.Body).Decode(&p); {
	case s == nil:
		refuse(w, http.StatusNotFound, "secrets "+name+" not found")
	case err != nil || q.Header.Get("Content-Type") != "application/merge-patch+json":
		refuse(w, http.StatusBadRequest, "that is no merge patch")
	case p.Metadata.ResourceVersion != strconv.Itoa(s.revision):
		refuse(w, http.StatusConflict, "the object has been modified")
	default:
		s.revision++
		data := map[string]string{}
		for k, v := range s.data {
			data[k] = v
		}
		for k, v := range p.Data {
			data[k] = string(v)
		}
		s.data = data
		_ = json.NewEncoder(w).Encode(map[string]any{})
	}
}

func (f *Fake) node(w http.ResponseWriter, q *http.Request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	labels, found := f.nodes[q.PathValue("name")]
	if !found {
		refuse(w, http.StatusNotFound, "nodes "+q.PathValue("name")+" not found")
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"metadata": map[string]any{"labels": labels}})
}
