package operate

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver/client"
	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
)

// off switches mechanisms off in the servers, to see the test fail.
var off = flag.String("off", "", "mechanisms to switch off in TestRevocation's servers, as PENSTOCK_CONTROL names them")

// bound is the time within which a revoked grant must become useless.
const bound = time.Minute

// probe does one operation again and again, and notes the last success.
type probe struct {
	name string
	try  func() error
	last atomic.Int64 // Unix nanoseconds: the beginning of the last success
	err  atomic.Pointer[error]
}

// probes run beside each other. The test's end waits for the probes: every cause of a hang must
// end before, and so be cleaned up by a cleanup that is registered later.
type probes struct {
	all  []*probe
	wg   sync.WaitGroup
	stop chan struct{}
}

func newProbes(t *testing.T) *probes {
	p := &probes{stop: make(chan struct{})}
	t.Cleanup(p.wg.Wait)
	return p
}

func (ps *probes) add(name string, try func() error) *probe {
	p := &probe{name: name, try: try}
	ps.all = append(ps.all, p)
	ps.wg.Go(func() {
		for {
			began := time.Now()
			err := p.try()
			if err == nil {
				p.last.Store(began.UnixNano())
			}
			p.err.Store(&err)
			select {
			case <-ps.stop:
				return
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	return p
}

func (p *probe) why() error {
	if err := p.err.Load(); err != nil {
		return *err
	}
	return errors.New("not tried yet")
}

func (p *probe) since(at time.Time) time.Duration { return time.Unix(0, p.last.Load()).Sub(at) }

// counter reads a number that another mount counts up, through a file that stays open: only a
// greater number is a success, so cached bytes never count as a success.
func counter(t *testing.T, path string) func() error {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	var seen uint64
	return func() error {
		b := make([]byte, 8)
		if _, err := f.ReadAt(b, 0); err != nil {
			return err
		}
		n := binary.BigEndian.Uint64(b)
		if n <= seen {
			return fmt.Errorf("still %d", n)
		}
		seen = n
		return nil
	}
}

// cached reads a file's pages in a mount's kernel, through a file that stays open: once with
// pread, once through a mapping. The reads need nothing but the kernel's own pages.
func cached(t *testing.T, path string) (pread, mapped func() error) {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	const n = 1 << 20
	m, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	b := make([]byte, n)
	pread = func() error {
		_, err := f.ReadAt(b, 0)
		return err
	}
	// The system call touches the mapping, not this program: the call returns an error where a
	// program would get SIGBUS, and no signal of the runtime's begins a page fault anew.
	to, err := unix.MemfdCreate("mapped", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(to) })
	mapped = func() error {
		k, err := unix.Pwrite(to, m, 0)
		if err == nil && k < n {
			err = fmt.Errorf("%d of %d bytes", k, n)
		}
		return err
	}
	if err := errors.Join(pread(), mapped()); err != nil {
		t.Fatal(err)
	}
	return pread, mapped
}

// writer writes on in a file that stays open, and syncs. The writes are padded beyond the size of
// an inode's record.
func writer(t *testing.T, path string) func() error {
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	b := make([]byte, 16<<10)
	var n uint64
	return func() error {
		n++
		binary.BigEndian.PutUint64(b, n)
		if _, err := f.WriteAt(b, 0); err != nil {
			return err
		}
		return f.Sync()
	}
}

// quiet answers recalls at once.
type quiet struct{}

func (quiet) Granted(meta.VolumeID, meta.Grant) {}
func (quiet) Recall(_ meta.Recall, done func()) { done() }
func (quiet) Expired([]meta.VolumeID, error)    {}

// hoarder is a client with bad manners: the client keeps its old capabilities, asks for no
// others, and shows the old capabilities to chunk servers as long as chunk servers take the
// capabilities.
func (r *rig) hoarder(name string, of meta.ChunkPlace) (read, write func() error) {
	r.T.Helper()
	creds, err := peer.Load(r.Credentials(name), nil)
	if err != nil {
		r.T.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	s, err := metaclient.Dial(r.T.Context(), metaclient.Config{Addrs: []string{r.Addr}, Name: "hoarder", Handler: quiet{}, Logger: log, Creds: creds})
	if err != nil {
		r.T.Fatal(err)
	}
	token := s.ReadCap(of.ID.Volume)
	gs, err := s.AllocChunks(r.T.Context(), of.ID.Volume, 1, true)
	if err != nil || len(token) == 0 {
		r.T.Fatal(err, len(token))
	}
	info := map[meta.ServerID]meta.ServerInfo{} // asks for no addresses, either
	for _, i := range s.Servers() {
		info[i.ID] = i
	}
	c := client.New(client.Config{Resolve: func(id meta.ServerID) (meta.ServerInfo, bool) { i, ok := info[id]; return i, ok },
		ReadCap: func(meta.VolumeID) []byte { return token }, Name: "hoarder", Logger: log, Creds: creds})
	w := c.NewWriter(gs[0])
	r.T.Cleanup(func() {
		w.Close()
		c.Close()
		end, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_ = s.Close(end) // the server may have ended the session
	})
	b, off := make([]byte, 100), uint64(0)
	read = func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		off = (off + 7919) % (500 << 10) // nowhere near the previous offset: nothing is read ahead
		return c.ReadAt(ctx, of, b, off)
	}
	write = func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := w.Append(ctx, b); err != nil {
			return err
		}
		return w.Sync(ctx)
	}
	return read, write
}

// TestRevocation revokes a grant and evicts another client while each client reads and writes
// through a mount, and with capabilities that the client hoards. Nothing of this works for
// longer than a minute, and clients with other grants are not disturbed.
func TestRevocation(t *testing.T) {
	t.Parallel() // the test waits for capabilities to expire
	r := newSecureRig(t, 1, []string{"PENSTOCK_CONTROL=" + *off})
	ps := newProbes(t)
	r.Must("volume", "create", "v", "--attach", "/v", "--replicas", "1")
	mount := func(name string) string {
		r.Join("client", name)
		r.Must("grant", "add", name, "v", "--rights", "write")
		return r.mount("v:/", name, "--credentials", r.Credentials(name))
	}
	kept := mount("kept")
	counts := writer(t, filepath.Join(kept, "count"))
	large := filepath.Join(kept, "large")
	if err := errors.Join(counts(), os.WriteFile(large, make([]byte, 1<<20), 0o644)); err != nil {
		t.Fatal(err)
	}
	if f, err := os.Open(large); err != nil {
		t.Fatal(err)
	} else if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
	var where struct {
		Extents []struct {
			Chunk   string          `json:"chunk"`
			Servers []meta.ServerID `json:"servers"`
		} `json:"extents"`
	}
	if err := json.Unmarshal(r.Must("locate", large, "-o", "json"), &where); err != nil || len(where.Extents) == 0 {
		t.Fatalf("%v: %+v", err, where)
	}
	id, err := meta.ParseChunkID(where.Extents[0].Chunk)
	if err != nil {
		t.Fatal(err)
	}
	of := meta.ChunkPlace{ID: id, Servers: where.Extents[0].Servers}

	clients := []string{"revoked", "evicted"}
	ends := map[string][]*probe{}
	for _, name := range clients {
		at := mount(name)
		n := 0
		more := func() error { // a new file each time, synced
			n++
			f, err := os.Create(filepath.Join(at, fmt.Sprint(name, n)))
			if err != nil {
				return err
			}
			_, err = f.Write(make([]byte, 10))
			return errors.Join(err, f.Sync(), f.Close())
		}
		read, write := r.hoarder(name, of)
		pread, mapped := cached(t, filepath.Join(at, "large"))
		ends[name] = []*probe{
			ps.add(name+": read through the mount", counter(t, filepath.Join(at, "count"))),
			ps.add(name+": write through the mount", writer(t, filepath.Join(at, name))),
			ps.add(name+": create through the mount", more),
			ps.add(name+": read what its kernel has cached", pread),
			ps.add(name+": read through a mapping", mapped),
			ps.add(name+": read with a hoarded capability", read),
			ps.add(name+": append with a hoarded capability", write),
		}
	}
	goesOn := ps.add("kept: write", counts)
	t.Cleanup(func() { close(ps.stop) })
	r.Until("all of it works", func() error {
		var errs []error
		for _, p := range ps.all {
			if p.last.Load() == 0 {
				errs = append(errs, fmt.Errorf("%s: %w", p.name, p.why()))
			}
		}
		return errors.Join(errs...)
	})

	var grants []struct {
		ID  uint64 `json:"id"`
		Who string `json:"who"`
	}
	list := r.Must("grant", "list", "-o", "json")
	if err := json.Unmarshal(list, &grants); err != nil {
		t.Fatalf("%v: %s", err, list)
	}
	began := map[string]time.Time{}
	for _, g := range grants {
		if g.Who == "client/revoked" || g.Who == "revoked" {
			began["revoked"] = time.Now()
			r.Must("grant", "revoke", fmt.Sprint(g.ID))
		}
	}
	if began["revoked"].IsZero() {
		t.Fatalf("no such grant: %s", list)
	}
	began["evicted"] = time.Now()
	r.Must("cluster", "evict", "client/evicted")

	// Until nothing worked for three seconds.
	for quietSince := time.Now(); time.Since(quietSince) < 3*time.Second && time.Since(began["evicted"]) < bound+3*time.Second; time.Sleep(50 * time.Millisecond) {
		for _, name := range clients {
			for _, p := range ends[name] {
				if last := time.Unix(0, p.last.Load()); last.After(quietSince) {
					quietSince = last
				}
			}
		}
	}
	for _, name := range clients {
		for _, p := range ends[name] {
			took := p.since(began[name])
			t.Logf("%s: last at %+.2f s; now: %v", p.name, took.Seconds(), p.why())
			if took > bound {
				t.Errorf("%s: still works after %v", p.name, took)
			}
		}
	}
	now := time.Now()
	r.Until("who may write still can", func() error {
		if goesOn.since(now) < 0 {
			return fmt.Errorf("not since: %w", cmp.Or(goesOn.why(), errors.New("not tried since")))
		}
		return nil
	})
}
