package admin

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"penstock.io/penstock/meta"
)

func get(t *testing.T, path, url string) (int, string) {
	t.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}}}
	r, err := c.Get("http://admin" + url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

func TestEndpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	registry := prometheus.NewRegistry()
	counter := prometheus.NewCounter(prometheus.CounterOpts{Name: "penstock_test_total", Help: "for the test"})
	registry.MustRegister(counter)
	counter.Add(3)
	notReady := errors.New("still replaying the journal")
	s, err := Listen(Config{Addr: "unix:" + path, Gatherer: registry, Ready: func() error { return notReady }})
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", st.Mode(), err)
	}
	for _, c := range []struct {
		url    string
		status int
		body   string
	}{
		{"/metrics", 200, "penstock_test_total 3"},
		{"/healthz", 200, "ok"},
		{"/readyz", 503, "still replaying"},
		{"/debug/pprof/goroutine?debug=1", 200, "goroutine profile"},
		{"/nonsense", 404, ""},
	} {
		if status, body := get(t, path, c.url); status != c.status || !strings.Contains(body, c.body) {
			t.Errorf("%s: status %d, want %d with %q:\n%s", c.url, status, c.status, c.body, body)
		}
	}
	notReady = nil
	if status, _ := get(t, path, "/readyz"); status != 200 {
		t.Errorf("ready: status %d", status)
	}
	if _, err := Listen(Config{Addr: "unix:" + path}); meta.KindOf(err) != meta.Busy {
		t.Errorf("second server on the socket: %v", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestSocketOfTheDead: the socket of a killed process is replaced, any other file is not.
func TestSocketOfTheDead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	s, err := Listen(Config{Addr: "unix:" + path})
	if err != nil {
		t.Fatalf("a dead process' socket: %v", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(Config{Addr: "unix:" + path}); meta.KindOf(err) != meta.Exists {
		t.Errorf("a file in the socket's place: %v", err)
	}
}

// TestReplaced: a successor takes the place of a process that still listens, and keeps
// the place when that process ends.
func TestReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "admin.sock")
	begin := func(text string, replace bool) *Server {
		t.Helper()
		s, err := Listen(Config{Addr: "unix:" + path, Gatherer: prometheus.NewRegistry(), Ready: func() error { return errors.New(text) }, Replace: replace})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	end := func(s *Server) {
		t.Helper()
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	answers := func(text string) {
		t.Helper()
		if _, body := get(t, path, "/readyz"); !strings.Contains(body, text) {
			t.Errorf("%q answers, not %q", body, text)
		}
	}
	first := begin("the first", false)
	second := begin("the second", true)
	answers("the second")
	end(first)
	answers("the second")
	end(second)
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestAddresses(t *testing.T) {
	for addr, want := range map[string]meta.Kind{"0.0.0.0:0": meta.NotPermitted, ":0": meta.NotPermitted, "example.org:80": meta.NotPermitted, "nonsense": meta.Invalid} {
		if _, err := Listen(Config{Addr: addr}); meta.KindOf(err) != want {
			t.Errorf("%s: %v, want %v", addr, err, want)
		}
	}
	s, err := Listen(Config{Addr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(Config{Addr: s.Addr()}); meta.KindOf(err) != meta.Busy {
		t.Errorf("a port in use: %v", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestManyStrangers: on an open endpoint, a bounded number of connections is served at a
// time, connections without a request are closed in favour of connections with one, and a
// bounded number of requests gathers metrics at once.
func TestManyStrangers(t *testing.T) {
	gathers, goOn := make(chan struct{}, 2*openConns), make(chan struct{})
	gatherer := prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		gathers <- struct{}{}
		<-goOn
		return nil, nil
	})
	s, err := Listen(Config{Addr: "127.0.0.1:0", MetricsOnly: true, Gatherer: gatherer})
	if err != nil {
		t.Fatal(err)
	}
	if o := &s.http; o.IdleTimeout == 0 || o.ReadTimeout == 0 || o.WriteTimeout == 0 || o.ReadHeaderTimeout == 0 {
		t.Error("who does nothing keeps his connection")
	}
	statuses := make(chan int, openConns)
	for range openConns {
		go func() { // ends with its answer
			r, err := http.Get("http://" + s.Addr() + "/metrics")
			if err != nil {
				statuses <- 0
				return
			}
			r.Body.Close()
			statuses <- r.StatusCode
		}()
	}
	next := func(of chan int) int {
		t.Helper()
		select {
		case got := <-of:
			return got
		case <-time.After(60 * time.Second):
			t.Fatal("nobody is told anything more")
			return 0
		}
	}
	for range openConns - openAtOnce {
		if got := next(statuses); got != http.StatusServiceUnavailable {
			t.Errorf("one too many is told %d", got)
		}
	}
	close(goOn)
	for range openAtOnce {
		if got := next(statuses); got != http.StatusOK {
			t.Errorf("one of the first is told %d", got)
		}
	}
	if n := len(gathers); n != openAtOnce {
		t.Errorf("metrics were gathered %d times", n)
	}
	http.DefaultClient.CloseIdleConnections()

	// A connection without a request takes one of a bounded number of places.
	var idle []net.Conn
	for range openConns {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		idle = append(idle, c)
	}
	late := make(chan int, 1)
	go func() { // ends with its answer, which Close of the others brings
		status := 0
		if r, err := http.Get("http://" + s.Addr() + "/metrics"); err == nil {
			r.Body.Close()
			status = r.StatusCode
		}
		late <- status
	}()
	select {
	case got := <-late:
		t.Fatalf("of %d connections the last is served at once: %d", openConns+1, got)
	case <-time.After(200 * time.Millisecond):
	}
	for _, c := range idle {
		c.Close()
	}
	if got := next(late); got != http.StatusOK {
		t.Errorf("when the others are gone it is told %d", got)
	}
	http.DefaultClient.CloseIdleConnections()
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestNoProfilesOverTCP: a port of loopback, which any process of the machine reaches,
// tells metrics and health and no profile.
func TestNoProfilesOverTCP(t *testing.T) {
	s, err := Listen(Config{Addr: "127.0.0.1:0", Gatherer: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{"/metrics": 200, "/healthz": 200, "/readyz": 200, "/debug/pprof/": 404, "/debug/pprof/heap": 404, "/debug/pprof/cmdline": 404, "/debug/pprof/profile?seconds=1": 404} {
		r, err := http.Get("http://" + s.Addr() + path)
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != want {
			t.Errorf("%s: status %d, want %d", path, r.StatusCode, want)
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestMetricsOnly: an open endpoint serves metrics and nothing else: no profile, no
// command line.
func TestMetricsOnly(t *testing.T) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "penstock_test", Help: "for the test"}))
	s, err := Listen(Config{Addr: "0.0.0.0:0", MetricsOnly: true, Gatherer: registry, Ready: func() error { return errors.New("not ready") }})
	if err != nil {
		t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{
		"/metrics": 200, "/": 404, "/healthz": 404, "/readyz": 404, "/debug/pprof/": 404, "/debug/pprof/heap": 404, "/debug/pprof/cmdline": 404, "/debug/pprof/profile?seconds=1": 404,
	} {
		r, err := http.Get("http://127.0.0.1:" + port + path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r.Body)
		if err := errors.Join(err, r.Body.Close()); err != nil {
			t.Fatal(err)
		}
		if r.StatusCode != want || strings.Contains(string(b), "penstock_test 0") != (want == 200) {
			t.Errorf("%s: status %d, want %d:\n%s", path, r.StatusCode, want, b)
		}
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
