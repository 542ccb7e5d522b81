package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/meta"
)

// TestChanged: a request names the differences, and nothing else counts.
func TestChanged(t *testing.T) {
	was := policy.Terms{Policy: meta.Policy{Replicas: 2, QuotaBytes: 5}, TrashSeconds: 60, AdvisoryBytes: 3}
	for want, change := range map[string]func(*policy.Terms){
		`{"only":[]}`:                   func(*policy.Terms) {},
		`{"only":["noatime","quota"]}`:  func(t *policy.Terms) { t.Policy.QuotaBytes, t.Policy.NoAtime = 0, true },
		`{"trash_seconds":0,"only":[]}`: func(t *policy.Terms) { t.TrashSeconds = 0 },
		`{"compression":"s2","advisory_bytes":4,"advisory_inodes":1,"only":["replicas"]}`: func(t *policy.Terms) {
			t.Compression, t.AdvisoryBytes, t.AdvisoryInodes, t.Policy.Replicas = meta.CompressS2, 4, 1, 3
		},
	} {
		to := was
		change(&to)
		if b, err := json.Marshal(changed(was, to)); err != nil || string(b) != want {
			t.Errorf("%s, %v; want %s", b, err, want)
		}
	}
}

// TestNobodyQueues: a cluster that takes connections and never answers is dialled by a single
// call at a time. The others wait for the dialling call, each as long as the caller likes, and
// not for each other.
func TestNobodyQueues(t *testing.T) {
	dir, err := os.MkdirTemp("", "cl")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var taken atomic.Int32
	go func() { // ends with the listener
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			taken.Add(1)
			defer c.Close()
		}
	}()
	c := New(Config{Addrs: []string{"unix:" + socket}, Name: "test"})
	first := make(chan error, 1)
	go func() { first <- c.Ready(t.Context()) }()
	for deadline := time.Now().Add(60 * time.Second); taken.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("nobody dials")
		}
	}
	const many = 50
	said := make(chan error, many)
	for range many {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			_, err := c.Here(ctx)
			said <- err
		}()
	}
	for range many {
		select {
		case err := <-said:
			if !errors.Is(err, meta.Unavailable) || !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("who waited no longer is told %v", err)
			}
		case err := <-first:
			t.Fatalf("those who came later wait for the first one, which is told %v", err)
		}
	}
	if n := taken.Load(); n != 1 {
		t.Errorf("%d connections at a time", n)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-first; err == nil {
		t.Error("the first one has a session")
	}
	if err := c.Ready(t.Context()); !errors.Is(err, meta.Canceled) {
		t.Errorf("when it is closed: %v", err)
	}
}
