package failover

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/port"
)

// store is a chunk server, a process of its own.
type store struct {
	s           *site
	name, place string
	addr        string
	p           *spawn.Process
	log         *os.File
}

func (c *store) dir() string { return filepath.Join(c.s.dir, c.name) }

func (c *store) start() error {
	cmd := exec.Command(c.s.binary, "chunkserver", "--data", c.dir(), "--name", c.name, "--topology", c.place,
		"--cluster", strings.Join(c.s.addrs(), ","), "--listen", c.addr, "--insecure", "--local-clients=false", "--log-level", "info")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	var err error
	c.p, err = spawn.Begin(cmd, c.name, c.log, (*exec.Cmd).Start)
	return err
}

func (c *store) end() {
	if c.p != nil {
		c.p.Resume()
		c.p.Kill()
		c.p = nil
	}
}

// replaced starts another chunk server in its place, with an empty disk.
func (c *store) replaced(name string) error {
	c.end()
	if err := os.RemoveAll(c.dir()); err != nil {
		return err
	}
	c.name = name
	return c.start()
}

// kept is a file of a writer; each of its words tells its file and place.
type kept struct {
	ino          meta.Ino
	seed         uint64
	size, synced uint64
}

func (f *kept) bytes(off uint64, n int) []byte {
	p := make([]byte, 0, n)
	for ; n > 0; n -= 8 {
		p = binary.LittleEndian.AppendUint64(p, f.seed<<40^off)
		off += 8
	}
	return p
}

// keeper writes files of one kind, and notes the results of fsync.
type keeper struct {
	name  string
	v     *penstock.Volume
	part  int           // bytes of a write
	parts int           // of a file
	rest  time.Duration // after each write: the bytes are in a chunk, and not committed
	sync  int           // fsync after so many writes

	mu    sync.Mutex
	files []*kept
	syncs int
	since time.Time // the beginning of the call under way
	err   error
}

func (k *keeper) run(ctx context.Context) {
	for n := uint64(1); ctx.Err() == nil; n++ {
		if err := k.file(ctx, n<<8|uint64(k.name[0])); err != nil {
			k.mu.Lock()
			k.err = fmt.Errorf("%s: after %v: %w", k.name, time.Since(k.since).Round(time.Millisecond), err)
			k.mu.Unlock()
			return
		}
	}
}

func (k *keeper) file(ctx context.Context, seed uint64) error {
	all := context.WithoutCancel(ctx)
	began := func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.since = time.Now()
	}
	began()
	i, err := k.v.CreateOpen(all, nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint(k.name, seed), Mode: meta.TypeRegular | 0o644}, uint32(os.O_RDWR))
	if err != nil {
		return fmt.Errorf("create: %w", err)
	}
	defer k.v.Release(all, i.Entry.Attr.Ino, uint32(os.O_RDWR))
	f := &kept{ino: i.Entry.Attr.Ino, seed: seed}
	k.mu.Lock()
	k.files = append(k.files, f)
	k.mu.Unlock()
	for n := 1; n <= k.parts && ctx.Err() == nil; n++ {
		began()
		if _, err := k.v.Write(all, nil, f.ino, f.bytes(f.size, k.part), int64(f.size), false, false); err != nil {
			return fmt.Errorf("write: %w", err)
		}
		f.size += uint64(k.part)
		select {
		case <-time.After(k.rest):
		case <-ctx.Done():
		}
		if n%k.sync != 0 && n < k.parts {
			continue
		}
		began()
		if err := k.v.Fsync(all, f.ino, false); err != nil {
			return fmt.Errorf("fsync: %w", err)
		}
		f.synced = f.size
		k.mu.Lock()
		k.syncs++
		k.mu.Unlock()
	}
	if err := k.v.Flush(all, &penstock.Call{}, f.ino, 0); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

func (k *keeper) now() (syncs int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.syncs, k.err
}

func (k *keeper) verify(t *testing.T, v *penstock.Volume) {
	t.Helper()
	total := uint64(0)
	for _, f := range k.files {
		e, err := v.GetAttr(t.Context(), f.ino)
		if err != nil {
			t.Errorf("DATA: %s: file %x: %v", k.name, f.seed, err)
			continue
		}
		if e.Attr.Size < f.synced || e.Attr.Size > f.size {
			t.Errorf("DATA: %s: file %x has %d bytes; %d were synced, %d written", k.name, f.seed, e.Attr.Size, f.synced, f.size)
		}
		got := make([]byte, 1<<20)
		for off := uint64(0); off < e.Attr.Size; off += uint64(len(got)) {
			n, err := v.Read(t.Context(), f.ino, got, int64(off))
			if want := f.bytes(off, int(min(e.Attr.Size-off, uint64(len(got))))); err != nil || !bytes.Equal(got[:n], want) {
				t.Errorf("DATA: %s: file %x at %d: %d bytes are wrong: %v", k.name, f.seed, off, n, err)
				break
			}
			total += uint64(n)
		}
	}
	t.Logf("%s: %d files, %d bytes, %d syncs", k.name, len(k.files), total, k.syncs)
}

// Writers of volumes with two replicas, on three chunk servers of two machines, go on while
// servers of both kinds are killed, stand still and are replaced, one after the other and at
// once: the writers see pauses, and no error. No chunk with a record is collected, however soon
// chunks without a record are, and every byte is readable in the end.
func TestWritersSeePauses(t *testing.T) {
	s := start(t, 2)
	// Unneeded chunks are looked for all the time, and go at once.
	hasty := []string{"--repair-grace", "500ms", "--repair-delay", "4s", "--repair-interval", "500ms", "--list-interval", "1s"}
	for _, m := range s.metas {
		m.p.Kill()
		m.more = hasty
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
	}
	var stores []*store
	for i, place := range []string{"/dc/r1/n1", "/dc/r2/n2", "/dc/r1/n1"} {
		c := &store{s: s, name: fmt.Sprint("c", i), place: place, addr: port.Free(t)}
		var err error
		if c.log, err = os.Create(filepath.Join(s.dir, c.name+".log")); err != nil {
			t.Fatal(err)
		}
		if err := c.start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.end)
		stores = append(stores, c)
	}
	for _, m := range s.metas {
		if err := m.await(90 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	log, err := os.Create(filepath.Join(s.dir, "clients.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	logger := slog.New(slog.NewTextHandler(log, nil))
	admin, err := s.dial(t.Context(), "admin", nil, logger)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close(context.Background())
	until(t, "the chunk servers are known", func() bool { return len(admin.Servers()) == len(stores) })
	dial := func(name string, every time.Duration) *penstock.Client {
		c, err := penstock.Dial(t.Context(), penstock.Config{Meta: s.addrs(), Name: name, Creds: peer.Insecure(), Logger: logger.With("client", name), FlushEvery: every})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	open := func(c *penstock.Client, volume string) *penstock.Volume {
		v, err := c.Volume(t.Context(), volume)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	// Each client is alone in its volume, and has longer to come back on a busy machine.
	clients := map[string]*penstock.Client{}
	ks := map[string][]*keeper{}
	var all []*keeper
	var ids []meta.VolumeID
	api, err := s.api()
	if err != nil {
		t.Fatal(err)
	}
	defer api.Close()
	for name, every := range map[string]time.Duration{"often": 0, "rarely": time.Hour} {
		made, err := api.CreateVolume(t.Context(), name, meta.Policy{Replicas: 2, Spread: meta.SpreadHost}, meta.VolumeWords{Force: true})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, made.ID)
		clients[name] = dial(name, every)
		v := open(clients[name], name)
		ks[name] = []*keeper{
			{name: "append " + name, v: v, part: 4 << 10, parts: 200, sync: 1, rest: 20 * time.Millisecond}, // an open end
			{name: "packed " + name, v: v, part: 24 << 10, parts: 1, sync: 1, rest: 10 * time.Millisecond},
			{name: "stream " + name, v: v, part: 2 << 20, parts: 6, sync: 3, rest: time.Second}, // committed late
		}
		all = append(all, ks[name]...)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, k := range all {
		wg.Go(func() { k.run(ctx) })
	}
	stop := sync.OnceFunc(func() { cancel(); wg.Wait() })
	defer func() { // before the servers go
		for _, c := range stores {
			if c.p == nil {
				_ = c.start()
			}
			c.p.Resume()
		}
		stop()
	}()
	goOn := func(after string) {
		t.Helper()
		was := map[*keeper]int{}
		for _, k := range all {
			was[k], _ = k.now()
		}
		begun := time.Now()
		until(t, "all go on after "+after, func() bool {
			on := true
			for _, k := range all {
				n, err := k.now()
				if err != nil {
					b, _ := os.ReadFile(log.Name())
					t.Fatalf("%s was seen: %v\n%s", after, err, tail(b, 6000))
				}
				on = on && n >= was[k]+2
			}
			return on
		})
		t.Logf("%s: all have synced again after %v", after, time.Since(begun).Round(time.Millisecond))
	}
	up := func(f func() error) {
		t.Helper()
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	turn := 0
	owner := func() (m *server) { // of one volume, then of the other
		turn++
		until(t, "the volume has an owner", func() bool { m = s.owner(ids[turn%2]); return m != nil })
		return m
	}
	replaced := 0
	happens := []struct {
		name string
		does func()
	}{
		{"the only chunk server of a machine was away for long", func() {
			stores[1].end()
			time.Sleep(20 * time.Second) // a flush's round takes 15
			up(stores[1].start)
		}},
		{"owners were killed one after the other", func() {
			for range 4 {
				m := owner()
				m.p.Kill()
				time.Sleep(time.Second)
				up(m.start)
			}
		}},
		{"a chunk server stood still while owners were killed", func() {
			stores[0].p.Pause()
			m := owner()
			m.p.Kill()
			time.Sleep(8 * time.Second)
			stores[0].p.Resume()
			up(m.start)
		}},
		{"a chunk server was replaced while its owner was killed", func() {
			replaced++
			up(func() error { return stores[2].replaced(fmt.Sprint("r", replaced)) })
			m := owner()
			m.p.Kill()
			time.Sleep(2 * time.Second)
			up(m.start)
		}},
		{"owners stood still beside each other", func() {
			for _, m := range s.metas {
				m.p.Pause()
				time.Sleep(5 * time.Second)
			}
			for _, m := range s.metas {
				m.p.Resume()
			}
		}},
		{"all chunk servers were killed at once", func() {
			for _, c := range stores {
				c.end()
			}
			m := owner()
			m.p.Kill()
			time.Sleep(16 * time.Second)
			up(m.start)
			for _, c := range stores {
				up(c.start)
			}
		}},
	}
	goOn("nothing")
	for range *rounds {
		for _, h := range happens {
			h.does()
			goOn(h.name)
		}
	}
	stop()
	for _, c := range clients {
		cctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		if err := c.Close(cctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
	reader := dial("reader", 0)
	defer reader.Close(context.Background())
	for name, ks := range ks {
		v := open(reader, name)
		for _, k := range ks {
			k.verify(t, v)
		}
	}
	for _, m := range s.metas {
		b, err := os.ReadFile(m.dir + ".log")
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %d orphans were deleted", m.name, bytes.Count(b, []byte(`"orphan":true`)))
		for line := range strings.Lines(string(b)) {
			if strings.Contains(line, "a replica is not where the journal says") {
				t.Errorf("DATA: %s", line)
			}
		}
	}
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }
