package cluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"penstock.io/penstock/meta"
	etcdlog "penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/test/load"
)

// partitionPatience bounds every wait, on a machine of any speed.
const partitionPatience = 90 * time.Second

// parted is a cluster of which parts are cut off from others, with one client that makes names in
// a directory of a volume and another client that looks for the names.
type parted struct {
	*Cluster
	t      *testing.T
	owners *etcdlog.Owners
	vol    meta.VolumeID
	maker  *Mount
	looker *Mount
}

// TestPartitions: whichever parts are cut off from each other, a name acknowledged to one client
// is never missing for another client that asks later, and no answered change is lost or done
// twice. All parts go on when the cut is healed, or before where possible.
func TestPartitions(t *testing.T) {
	c := start(t, Config{Racks: 1, EtcdMembers: 1, Metas: 3, ChunkServers: 2, Mounts: 2})
	if _, err := c.Penstock(t.Context(), "volume", "create", "data", "--force", "--attach", "/data", "--replicas", "2"); err != nil {
		t.Fatal(err)
	}
	p := &parted{Cluster: c, t: t, maker: c.Mounts[1], looker: c.Mounts[0]}
	s, err := c.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range s.Volumes {
		if v.Name == "data" {
			p.vol = meta.VolumeID(v.ID)
		}
	}
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: strings.Split(c.etcdURLs(), ","),
		DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (conn net.Conn, err error) {
			err = c.admin.Do(func() (err error) {
				conn, err = (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(addr, "http://"))
				return err
			})
			return conn, err
		})},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer cli.Close()
	p.owners = etcdlog.NewOwners(cli, nil, etcdlog.OwnersConfig{Prefix: "/penstock/default"})
	for _, story := range []struct {
		name string
		tell func(*parted)
	}{
		{"a client from the metadata servers", (*parted).clientFromMetas},
		{"a metadata server from etcd", (*parted).metaFromEtcd},
		{"a metadata server from the clients", (*parted).metaFromClients},
		{"a client from the chunk servers", (*parted).clientFromChunks},
	} {
		t.Run(story.name, func(t *testing.T) {
			q := *p
			q.t = t
			defer c.Net.HealAll() // also in a story that ended early
			story.tell(&q)
		})
	}
	if err := c.Fsck(t.Context(), partitionPatience); err != nil {
		t.Error(err)
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
}

func (p *parted) check(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// until waits for a required event.
func (p *parted) until(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(partitionPatience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("not within %v: %s", partitionPatience, what)
		}
	}
}

// owner is the server that owns the volume by etcd's record; nil if none does.
func (p *parted) owner() *Member {
	ctx, cancel := context.WithTimeout(p.t.Context(), 5*time.Second)
	defer cancel()
	rec, held, err := p.owners.Last(ctx, p.vol)
	if err != nil || !held {
		return nil
	}
	i := slices.IndexFunc(p.Metas, func(m *Member) bool { return m.Name == rec.Server })
	return p.Metas[i]
}

func (p *parted) cut(from *Member, others ...*Member) {
	p.t.Helper()
	for _, m := range others {
		p.check(p.Net.Cut(from.Node, m.Node))
	}
}

func (p *parted) heal(from *Member, others ...*Member) {
	p.t.Helper()
	for _, m := range others {
		p.check(p.Net.Heal(from.Node, m.Node))
	}
}

// play makes names one after the other through one mount, and looks through the other mount for
// the newest name.
type play struct {
	p   *parted
	dir string

	mu     sync.Mutex
	made   []string
	maybe  map[string]bool // the call failed: the name exists or not
	seen   int             // names that the looker found
	newest int             // of made, the newest found name
	slow   time.Duration
	wrong  error

	stop func()
}

func (p *parted) play() *play {
	y := &play{p: p, dir: filepath.Join("data", strings.ReplaceAll(p.t.Name(), "/", "-")), maybe: map[string]bool{}, newest: -1}
	p.check(os.Mkdir(filepath.Join(p.maker.Path, y.dir), 0o755))
	// The looker knows the whole directory, and holds a lease on the directory.
	if l, err := os.ReadDir(filepath.Join(p.looker.Path, y.dir)); err != nil || len(l) != 0 {
		p.t.Fatal(l, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { y.make(ctx) })
	wg.Go(func() { y.look(ctx) })
	y.stop = sync.OnceFunc(func() { cancel(); wg.Wait() })
	p.t.Cleanup(func() {
		p.Net.HealAll() // calls under way must be able to end
		y.stop()
	})
	return y
}

func (y *play) make(ctx context.Context) {
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprint("name", i)
		began := time.Now()
		f, err := os.OpenFile(filepath.Join(y.p.maker.Path, y.dir, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		y.mu.Lock()
		y.slow = max(y.slow, time.Since(began))
		if err == nil {
			y.made = append(y.made, name)
		} else {
			y.maybe[name] = true
		}
		y.mu.Unlock()
		if err == nil {
			f.Close() // nothing was written
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (y *play) look(ctx context.Context) {
	for ctx.Err() == nil {
		y.mu.Lock()
		n := len(y.made) - 1
		y.mu.Unlock()
		if n >= 0 {
			_, err := os.Lstat(filepath.Join(y.p.looker.Path, y.dir, y.made[n]))
			y.mu.Lock()
			switch {
			case err == nil:
				y.seen++
				y.newest = n
			case errors.Is(err, fs.ErrNotExist) && y.wrong == nil:
				y.wrong = fmt.Errorf("%s does not see %s, which %s had been told is made", y.p.looker.Name, y.made[n], y.p.maker.Name)
			}
			y.mu.Unlock()
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// count returns the number of made names, and the last made name that the looker saw.
func (y *play) count() (made, newest int) {
	y.mu.Lock()
	defer y.mu.Unlock()
	return len(y.made), y.newest
}

// goOn waits until more names were made and seen.
func (y *play) goOn(what string) {
	y.p.t.Helper()
	made, _ := y.count()
	y.p.until(what+", names are made and seen", func() bool {
		y.mu.Lock()
		wrong := y.wrong
		y.mu.Unlock()
		y.p.check(wrong)
		n, newest := y.count()
		return n > made+10 && newest > made
	})
}

// verify ends the play and compares the answered names with the directory.
func (y *play) verify() {
	t := y.p.t
	t.Helper()
	y.stop()
	if y.wrong != nil {
		t.Error(y.wrong)
	}
	for _, m := range []*Mount{y.p.maker, y.p.looker} {
		entries, err := os.ReadDir(filepath.Join(m.Path, y.dir))
		y.p.check(err)
		there := map[string]bool{}
		for _, e := range entries {
			if there[e.Name()] {
				t.Errorf("%s lists %s twice", m.Name, e.Name())
			}
			there[e.Name()] = true
		}
		for _, name := range y.made {
			if !there[name] {
				t.Errorf("%s, which was made, is not there for %s", name, m.Name)
			}
			delete(there, name)
		}
		for name := range there {
			if !y.maybe[name] {
				t.Errorf("%s is there for %s, but was never made", name, m.Name)
			}
		}
	}
	t.Logf("%d names made, %d looks; the longest call took %v, %d failed", len(y.made), y.seen, y.slow.Round(time.Millisecond), len(y.maybe))
}

// An unreachable client has cached the directory in which another client goes on: the other
// client waits until the cache is void, no longer, and the unreachable client never shows that
// the new names are missing.
func (p *parted) clientFromMetas() {
	y := p.play()
	y.goOn("at first")
	p.cut(p.looker.Member, p.Metas...)
	made, _ := y.count()
	began := time.Now()
	p.until("the other client goes on", func() bool { n, _ := y.count(); return n > made+10 })
	p.t.Logf("the other client went on %v after the cut", time.Since(began).Round(time.Millisecond))
	p.heal(p.looker.Member, p.Metas...)
	y.goOn("after the cut")
	y.verify()
}

// The owner is cut off from etcd, and from one of two clients: the owner stops before another
// server may own the volume, so that the client that still reaches the owner gets no outdated
// answer.
func (p *parted) metaFromEtcd() {
	y := p.play()
	y.goOn("at first")
	var o *Member
	p.until("the volume has an owner", func() bool { o = p.owner(); return o != nil })
	p.cut(o, append(slices.Clone(p.Etcd), p.maker.Member)...)
	began := time.Now()
	p.until("the volume goes on elsewhere", func() bool { n := p.owner(); return n != nil && n != o })
	p.t.Logf("another owned the volume %v after the cut", time.Since(began).Round(time.Millisecond))
	y.goOn("elsewhere")
	p.heal(o, append(slices.Clone(p.Etcd), p.maker.Member)...)
	y.goOn("after the cut")
	p.until("the volume comes home", func() bool { return p.owner() == o })
	y.goOn("at home")
	y.verify()
}

// The owner reaches etcd, but no client reaches the owner: no call can be answered, and all calls
// go on afterwards.
func (p *parted) metaFromClients() {
	y := p.play()
	y.goOn("at first")
	var o *Member
	p.until("the volume has an owner", func() bool { o = p.owner(); return o != nil })
	p.cut(o, p.maker.Member, p.looker.Member)
	time.Sleep(4 * time.Second)
	p.heal(o, p.maker.Member, p.looker.Member)
	y.goOn("after the cut")
	y.verify()
}

// A client reaches no chunk server: names go on, bytes wait or fail, and bytes acknowledged by
// fsync reach other clients.
func (p *parted) clientFromChunks() {
	y := p.play()
	y.goOn("at first")
	b := make([]byte, 300<<10)
	load.Pattern(b, 7, 0)
	write := func(name string) error {
		f, err := os.Create(filepath.Join(p.maker.Path, y.dir, name))
		if err != nil {
			return err
		}
		_, err = f.Write(b)
		return errors.Join(err, f.Sync(), f.Close())
	}
	read := func(name string) {
		p.t.Helper()
		got, err := os.ReadFile(filepath.Join(p.looker.Path, y.dir, name))
		p.check(err)
		if !bytes.Equal(got, b) {
			p.t.Errorf("DATA: %s has other bytes than were synced, %d of them", name, len(got))
		}
	}
	y.stop() // other files come into the directory
	p.check(write("before"))
	p.cut(p.maker.Member, p.Chunks...)
	result := make(chan error, 1)
	go func() { result <- write("meanwhile") }()
	time.Sleep(3 * time.Second)
	p.check(os.Mkdir(filepath.Join(p.maker.Path, y.dir, "folder"), 0o755))
	read("before")
	p.heal(p.maker.Member, p.Chunks...)
	select {
	case err := <-result:
		if err == nil {
			read("meanwhile")
		}
		p.t.Logf("writing during the cut: %v", err)
	case <-time.After(partitionPatience):
		p.t.Fatalf("a write still hangs %v after the cut", partitionPatience)
	}
	p.until("writing goes on", func() bool { return write("after") == nil })
	read("after")
}
