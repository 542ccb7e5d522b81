package stories

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// attachments takes the times at which VolumeAttachments come, are attached and go.
type attachments struct {
	mu   sync.Mutex
	came map[string]time.Time
	took map[string]time.Duration // from then on until attached
	gone map[string]bool
}

// watchAttachments watches until the test ends.
func (s *story) watchAttachments() *attachments {
	s.Helper()
	a := &attachments{came: map[string]time.Time{}, took: map[string]time.Duration{}, gone: map[string]bool{}}
	ctx, cancel := context.WithCancel(s.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- the.Watch(ctx, a.event, "get", "volumeattachments", "--watch", "--output-watch-events",
			`--output=jsonpath={.type} {.object.metadata.name} {.object.status.attached}{"\n"}`)
	}()
	s.Cleanup(func() {
		early := ctx.Err() == nil && len(ended) > 0
		cancel()
		if err := <-ended; early {
			s.Errorf("the watch ended: %v", err)
		}
	})
	return a
}

// event reads a line: ADDED, MODIFIED or DELETED, a name, and true if the volume is
// attached.
func (a *attachments) event(line string) {
	f := strings.Fields(line)
	if len(f) < 3 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	name := f[1]
	if _, known := a.came[name]; !known {
		a.came[name] = time.Now()
	}
	if _, known := a.took[name]; !known && f[2] == "true" {
		a.took[name] = time.Since(a.came[name])
	}
	a.gone[name] = f[0] == "DELETED"
}

// known returns the number of attachments seen so far.
func (a *attachments) known() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.came)
}

// attached waits until all named attachments are attached, and returns the duration of
// each.
func (s *story) attached(a *attachments, names []string) (l []time.Duration) {
	s.Helper()
	s.until(patience, "all is attached", func(context.Context) error {
		a.mu.Lock()
		defer a.mu.Unlock()
		l = nil
		for _, n := range names {
			d, ok := a.took[n]
			if !ok {
				return fmt.Errorf("%d of %d are attached, not %s", len(a.took), len(names), n)
			}
			l = append(l, d)
		}
		return nil
	})
	slices.Sort(l)
	return l
}

// detached deletes the named attachments and waits until they are gone, in Kubernetes and
// as grants.
func (s *story) detached(a *attachments, names []string) time.Duration {
	s.Helper()
	begin := time.Now()
	s.kubectl(append([]string{"delete", "volumeattachments", "--wait=false"}, names...)...)
	s.until(patience, "all is detached", func(ctx context.Context) error {
		a.mu.Lock()
		for _, n := range names {
			if !a.gone[n] {
				a.mu.Unlock()
				return fmt.Errorf("%s is there", n)
			}
		}
		a.mu.Unlock()
		return nil
	})
	took := time.Since(begin)
	if got, err := the.Published(s.Context()); err != nil || len(got) > 0 {
		s.Errorf("detached, and granted all the same: %q %v", got, err)
	}
	return took
}

// TestAttach: volumes are attached to nodes, one by one and forty at once, as when many
// nodes join at the same moment. Then the nodes have exactly the grants of their attached
// volumes, and none after all volumes are detached. The test prints the durations.
func TestAttach(t *testing.T) {
	const volumes, alone = 20, 10
	s := begin(t)
	class := s.ns + "-at-once"
	s.class(atOnce)
	var claims []string
	for i := range volumes {
		claims = append(claims, claim(fmt.Sprint("c", i), class, "ReadWriteMany", "64Mi"))
	}
	begin := time.Now()
	s.apply(claims...)
	s.kubectl("wait", "--for=jsonpath={.status.phase}=Bound", "pvc", "--all", fmt.Sprintf("--timeout=%v", patience))
	t.Logf("%d claims at once are bound after %v", volumes, time.Since(begin).Round(time.Millisecond))
	pvs := strings.Fields(s.kubectl("get", "pvc", "-o", "jsonpath={.items[*].spec.volumeName}"))
	if len(pvs) != volumes {
		t.Fatalf("volumes are %q", pvs)
	}

	a := s.watchAttachments()
	attach := func(pvs, nodes []string) (names []string) {
		t.Helper()
		var l []string
		for _, pv := range pvs {
			for _, node := range nodes {
				name := fmt.Sprintf("%s-%d-%s", s.ns, a.known()+len(names), node)
				names = append(names, name)
				l = append(l, fmt.Sprintf(`apiVersion: storage.k8s.io/v1
kind: VolumeAttachment
metadata: {name: %s}
spec: {attacher: csi.penstock.io, nodeName: %s, source: {persistentVolumeName: %s}}`, name, node, pv))
			}
		}
		s.apply(l...)
		return names
	}
	t.Cleanup(func() { s.kubectl("delete", "volumeattachments", "--all", "--wait=false") })

	var one []string
	for _, pv := range pvs[:alone] {
		names := attach([]string{pv}, nodes[:1])
		s.attached(a, names)
		one = append(one, names...)
	}
	l := s.attached(a, one)
	t.Logf("%d one by one: each attached after p50 %v, max %v", alone, l[len(l)/2], l[len(l)-1])
	took := s.detached(a, one)
	t.Logf("and detached %v after they were deleted at once", took.Round(time.Millisecond))

	many := attach(pvs, nodes)
	l = s.attached(a, many)
	t.Logf("%d at once: each attached after p50 %v, max %v", len(many), l[len(l)/2], l[len(l)-1])
	if got, err := the.Published(t.Context()); err != nil || len(got) != len(many) {
		t.Errorf("%d are attached; granted: %d, %q, %v", len(many), len(got), got, err)
	}
	took = s.detached(a, many)
	t.Logf("and detached %v after they were deleted at once", took.Round(time.Millisecond))
}
