package volumes

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

var many = flag.Int("volumes", 200, "volumes that TestManyVolumes makes")

// The growth that a metadata server may have with unused volumes, with its etcd, in bytes: about
// twice the measured growth with 10,000 volumes.
const (
	memoryFixed = 32 << 20
	memoryEach  = 12 << 10
)

// resident is the memory of a process in bytes.
func resident(t *testing.T, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return n << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// stored sums the keys and values of the cluster in etcd.
func (r *rig) stored() (bytes, keys int64) {
	r.T.Helper()
	cli, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + filepath.Join(r.Dir, "m", "etcd", "c")}, DialTimeout: 30 * time.Second})
	if err != nil {
		r.T.Fatal(err)
	}
	defer cli.Close()
	for from := "\x00"; ; {
		got, err := cli.Get(r.T.Context(), from, clientv3.WithFromKey(), clientv3.WithLimit(1000))
		if err != nil {
			r.T.Fatal(err)
		}
		for _, kv := range got.Kvs {
			bytes += int64(len(kv.Key) + len(kv.Value))
			keys++
			from = string(kv.Key) + "\x00"
		}
		if !got.More {
			return bytes, keys
		}
	}
}

// Many volumes in one cluster: each unused volume costs a row and a name in etcd and little
// memory, a list comes in pages, and a mount of the tree goes through any of the volumes. The
// printed figures are measured on a machine with other work, too.
func TestManyVolumes(t *testing.T) {
	r := newRig(t)
	n := *many
	r.Until("the chunk server is there", func() error {
		out, err := r.Ctl("node", "list")
		if err == nil && !strings.Contains(string(out), "/dc/r/n") {
			err = errors.New("not yet")
		}
		return err
	})
	c, err := penstock.Dial(t.Context(), penstock.Config{Meta: []string{r.Addr}, Name: "many"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(t.Context())
	volumes, err := c.Volumes()
	if err != nil {
		t.Fatal(err)
	}
	memory := resident(t, r.meta.PID())
	bytes, _ := r.stored()

	each := func(what string, do func(i int) error) {
		t.Helper()
		began := time.Now()
		var wg sync.WaitGroup
		next, errs := make(chan int), make(chan error, 16)
		for range 16 {
			wg.Go(func() {
				for i := range next {
					if err := do(i); err != nil {
						select {
						case errs <- err:
						default:
						}
					}
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		wg.Wait()
		select {
		case err := <-errs:
			t.Fatalf("%s: %v", what, err)
		default:
		}
		took := time.Since(began)
		t.Logf("%s: %d in %.1f s, %.0f/s", what, n, took.Seconds(), float64(n)/took.Seconds())
	}
	ids := make([]meta.VolumeID, n)
	each("created, 16 at once", func(i int) error {
		v, err := volumes.Create(t.Context(), fmt.Sprintf("volume-%05d", i), meta.Policy{Replicas: 1, LocalFirst: true}, penstock.VolumeWords{})
		ids[i] = v.ID
		return err
	})
	now, _ := r.stored()
	t.Logf("at etcd for each: %d bytes; memory for each: %d bytes", (now-bytes)/int64(n), (resident(t, r.meta.PID())-memory)/int64(n))
	each("attached, 16 at once", func(i int) error {
		_, err := volumes.Attach(t.Context(), ids[i], fmt.Sprintf("/many/%02d/volume-%05d", i%100, i), true)
		return err
	})
	now, _ = r.stored()
	if per := (now - bytes) / int64(n); per > 2048 {
		t.Errorf("an unused volume has %d bytes at etcd", per)
	} else {
		grown := resident(t, r.meta.PID()) - memory
		t.Logf("at etcd for each, attached: %d bytes; memory for each: %d bytes", per, grown/int64(n))
		// Fixed costs (garbage, etcd's pages, buffers of sixteen requests) hide the cost of few
		// volumes; thousands show the cost.
		if most := int64(memoryFixed + n*memoryEach); grown > most {
			t.Errorf("the metadata server has grown by %d bytes with %d volumes that nobody uses, more than %d", grown, n, most)
		}
	}

	began := time.Now()
	seen := map[string]string{}
	for v, err := range volumes.All(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		seen[v.Name] = v.Path
	}
	t.Logf("listed with their paths in %.2f s", time.Since(began).Seconds())
	for i := range n {
		name := fmt.Sprintf("volume-%05d", i)
		if want := fmt.Sprintf("/many/%02d/%s", i%100, name); seen[name] != want {
			t.Fatalf("%s is said to be at %q", name, seen[name])
		}
	}

	// A mount of the tree goes into some volumes: the server opens those volumes, and no others.
	root := r.mount("/", "root")
	for i := 0; i < n; i += max(n/20, 1) {
		dir := filepath.Join(root, fmt.Sprintf("many/%02d/volume-%05d", i%100, i))
		r.write(filepath.Join(dir, "f"), dir)
		r.reads(filepath.Join(dir, "f"), dir)
	}
	out := r.Must("fsck", "--volume", "root")
	if !strings.Contains(string(out), "clean") {
		t.Errorf("DATA: fsck: %s", out)
	}
	t.Logf("memory of the metadata server at the end: %d MiB", resident(t, r.meta.PID())>>20)
}
