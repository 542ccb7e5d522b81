package cluster

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver/client"
	"penstock.io/penstock/meta"
	api "penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/capability"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
)

// Intruder is a client with bad manners: the intruder shows chunk servers forged or foreign
// capabilities, and goes on writing to chunks that are being taken away. The intruder runs as a
// process of its own, on a node of the cluster, beside the load.
type Intruder struct {
	Meta   []string
	Creds  *peer.Credentials
	Volume string
}

// Run tries again and again until ctx ends. An error says that a server let the intruder in, or
// acknowledged bytes that were then lost.
func (i Intruder) Run(ctx context.Context) error {
	var renewing sync.WaitGroup
	defer renewing.Wait()
	renew, stop := context.WithCancel(ctx)
	defer stop()
	renewing.Go(func() {
		peer.KeepRenewed(renew, i.Creds, func(err error) { fmt.Fprintln(os.Stderr, "renewing:", err) },
			func(ctx context.Context) error { return api.Renew(ctx, i.Meta, i.Creds) })
	})
	for ctx.Err() == nil {
		if err := i.session(ctx); err != nil {
			return err
		}
		sleep(ctx, 500*time.Millisecond)
	}
	return nil
}

// session tries with one session, until a call fails for another reason.
func (i Intruder) session(ctx context.Context) error {
	log := slog.New(slog.DiscardHandler)
	s, err := metaclient.Dial(ctx, metaclient.Config{Addrs: i.Meta, Name: "intruder", Handler: polite{}, Logger: log, Creds: i.Creds})
	if err != nil {
		return nil // the cluster is broken just now
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = s.Close(end) // otherwise the session expires
	}()
	found, err := s.LookUpVolume(ctx, 0, i.Volume)
	if err != nil {
		return nil
	}
	v := found.ID
	honest := client.New(client.Config{Resolve: s.Resolve, ReadCap: s.ReadCap, Name: "intruder", Logger: log, Creds: i.Creds})
	defer honest.Close()
	key := meta.CapKey{ID: 1, Secret: make([]byte, 32)}
	rand.Read(key.Secret)
	for ctx.Err() == nil {
		one, cancel := context.WithTimeout(ctx, 20*time.Second)
		err := errors.Join(i.late(one, s, honest, v), i.forge(one, s, v, key, log))
		cancel()
		if let := (*letIn)(nil); errors.As(err, &let) {
			return err
		}
		if err != nil {
			return nil // with a new session, then
		}
		sleep(ctx, 300*time.Millisecond)
	}
	return nil
}

// letIn is the forbidden success.
type letIn struct{ text string }

func (l *letIn) Error() string { return "INTRUDER: " + l.text }

// late writes on, byte after byte made durable, while its chunk is sealed. All bytes acknowledged
// before the seal must be in the chunk: an append after the raising of the fence is refused.
func (i Intruder) late(ctx context.Context, s *metaclient.Session, c *client.Client, v meta.VolumeID) error {
	gs, err := s.AllocChunks(ctx, v, 1, true)
	if err != nil {
		return err
	}
	w := c.NewWriter(gs[0])
	defer w.Close()
	var acked uint64
	var wg sync.WaitGroup
	write := func() error {
		off, err := w.Append(ctx, make([]byte, 512))
		if err == nil {
			err = w.Sync(ctx)
		}
		if err == nil {
			acked = off + 512
		}
		return err
	}
	if err := write(); err != nil {
		return err
	}
	wg.Go(func() {
		for write() == nil {
		}
	})
	time.Sleep(20 * time.Millisecond)
	rec, err := s.SealChunk(ctx, v, gs[0].ID)
	if err != nil {
		w.Close()
		wg.Wait()
		return err
	}
	wg.Wait()
	if rec.Length < acked {
		return &letIn{fmt.Sprintf("chunk %v was sealed at %d, and %d bytes were acknowledged as durable to its old writer", gs[0].ID, rec.Length, acked)}
	}
	return nil
}

// forge reads and appends with capabilities that the intruder should not have.
func (i Intruder) forge(ctx context.Context, s *metaclient.Session, v meta.VolumeID, key meta.CapKey, log *slog.Logger) error {
	gs, err := s.AllocChunks(ctx, v, 2, true)
	if err != nil {
		return err
	}
	defer func() {
		for _, g := range gs {
			_, _ = s.SealChunk(ctx, v, g.ID) // otherwise the chunk is with the session
		}
	}()
	g := gs[0]
	forged := func(r capability.Rights) []byte {
		return capability.Sign(key, capability.Claims{Volume: v, Rights: r, Fence: g.Fence, Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
	}
	for _, t := range []struct {
		name string
		cap  []byte
	}{{"without a capability", nil}, {"with a forged one", forged(capability.Append)}, {"with one of another chunk", gs[min(1, len(gs)-1)].Cap}, {"with one to read", s.ReadCap(v)}} {
		if t.name == "with one of another chunk" && len(gs) < 2 {
			continue
		}
		bad := g
		bad.Cap = t.cap
		// A client of its own: a connection remembers the rights of its client.
		c := client.New(client.Config{Resolve: s.Resolve, ReadCap: func(meta.VolumeID) []byte { return forged(capability.Read) }, Name: "intruder", Logger: log, Creds: i.Creds})
		w := c.NewWriter(bad)
		_, err := w.Append(ctx, []byte("let me in"))
		if err == nil {
			err = w.Wait(ctx)
		}
		w.Close()
		read := c.ReadAt(ctx, meta.ChunkPlace{ID: g.ID, Servers: g.Servers}, make([]byte, 1), 0)
		_ = c.Close()
		if err == nil {
			return &letIn{"appended " + t.name}
		}
		if kind := meta.KindOf(read); kind == 0 || kind == meta.NoSuchChunk || kind == meta.WrongOffset {
			return &letIn{fmt.Sprintf("a read with a forged capability was answered: %v", read)}
		}
	}
	return nil
}

// polite answers recalls at once.
type polite struct{}

func (polite) Granted(meta.VolumeID, meta.Grant) {}
func (polite) Recall(_ meta.Recall, done func()) { done() }
func (polite) Expired([]meta.VolumeID, error)    {}

// intruderEnv makes a process the intruder: meta servers, and the directory of the intruder's
// credentials.
const intruderEnv = "CLUSTER_TEST_INTRUDER"

// IntruderFrom is the intruder that the environment asks for.
func IntruderFrom(env string) (Intruder, error) {
	addrs, dir, _ := strings.Cut(env, ";")
	i := Intruder{Meta: strings.Split(addrs, ","), Volume: soakVolumes[1].name}
	var err error
	if dir == "" {
		i.Creds = peer.Insecure()
	} else {
		i.Creds, err = peer.Load(dir, nil)
	}
	return i, err
}

// intrude starts the intruder on a node of its own; self is the path of a program that becomes an
// intruder if the environment asks for an intruder.
func (s *Soak) intrude(ctx context.Context) error {
	c := s.Cluster
	const name = "intruder"
	if err := errors.Join(c.join(ctx, peer.Client, name), c.grant(ctx, name)); err != nil {
		return err
	}
	m, err := c.newMember(name, c.Racks[len(c.Racks)-1], 0)
	c.others = append(c.others, m)
	if err != nil {
		return err
	}
	m.path = s.Self
	m.env = append(m.env, intruderEnv+"="+c.metaAddrs()+";"+c.creds.dir(name))
	m.ready = func(context.Context) error { return nil }
	return m.Start()
}
