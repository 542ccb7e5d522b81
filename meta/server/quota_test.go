package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/test/operator"
)

// A mount that is away keeps no session from its promised bytes, nor a quota from coming.
func TestPromiseOfWhoIsAway(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	other := s.dial("other")
	o := s.srv.hosted.opened(1)
	idler := s.lingering("mount without a promise", func(p *peer) { p.create(t, "x") })
	s.goAway(idler)
	began := time.Now()
	other.mustSet(t, meta.Policy{Replicas: 1, QuotaBytes: 1 << 20})
	if took := time.Since(began); took >= settleWait {
		t.Errorf("a quota came after %v", took)
	}
	hoard := func(name string) *session {
		return s.lingering(name, func(p *peer) {
			if _, err := p.Reserve(t.Context(), 1, client.AnyEpoch, 0, 900<<10, 0, client.Place{}); err != nil {
				t.Fatal(err)
			}
		})
	}
	sess := hoard("a")
	s.goAway(sess)
	if got, err := other.Reserve(t.Context(), 1, client.AnyEpoch, 0, 500<<10, 0, client.Place{}); err != nil || got.Granted < 500<<10 {
		t.Errorf("%+v, %v", got, err)
	}
	if !sess.ended.Load() || idler.ended.Load() {
		t.Errorf("who had it has ended: %v; who had none: %v", sess.ended.Load(), idler.ended.Load())
	}
	if _, err := other.Reserve(t.Context(), 1, client.AnyEpoch, 1<<20, 0, 0, client.Place{}); err != nil {
		t.Fatal(err)
	}

	// No session is refused before the fate of a silent session is known.
	sess = hoard("b")
	refusal := meta.E("quota", meta.QuotaExceeded, "", nil)
	final := func(k roomSearch) bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.quota.findRoom(&k, refusal) == nil
	}
	asked := roomSearch{rounds: 2, waits: roomTries, synced: true}
	sess.renewed.Store(int64(time.Since(s.srv.epoch) - s.ttl*3/4))
	if final(asked) {
		t.Error("refused, though who has it may be dead")
	}
	sess.touch()
	eventually(t, "refused, though it lives", func() error {
		sess.touch()
		return unless(final(asked))
	})
	o.mu.Lock()
	entry := o.entered[sess]
	delete(o.entered, sess) // as while the session's open files are sealed
	o.mu.Unlock()
	asked.waits = 0
	if final(asked) {
		t.Error("refused, though who has it is being ended")
	}
	o.mu.Lock()
	o.entered[sess] = entry
	o.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if got, err := other.Reserve(ctx, 1, client.AnyEpoch, 0, 100<<10, 0, client.Place{}); err != nil || got.Granted < 100<<10 {
		t.Errorf("what is free is not given: %+v, %v", got, err)
	}
}

// policies gives a volume's quota by the row, the journal and memory.
func (s *site) policies(v meta.VolumeID) (row, journal meta.Policy, memory uint64, err error) {
	s.t.Helper()
	x, err := s.cluster.Volume(s.t.Context(), v)
	if err != nil {
		return row, journal, 0, err
	}
	o, err := s.srv.hosted.ownerFor(s.t.Context(), v)
	if err != nil {
		return row, journal, 0, err
	}
	journal, err = o.policy()
	o.mu.Lock()
	defer o.mu.Unlock()
	return x.Policy, journal, o.quota.Limit(), err
}

// samePolicies fails unless the three say the same.
func (s *site) samePolicies(v meta.VolumeID) (p meta.Policy) {
	s.t.Helper()
	row, journal, memory, err := s.policies(v)
	if err != nil || row != journal || memory != journal.QuotaBytes {
		s.t.Fatalf("the row says %+v, the journal %+v, memory %d, %v", row, journal, memory, err)
	}
	return journal
}

// Many callers change a volume's quota at once: the row, the journal and the owner's memory agree
// afterwards, and the next owner gets the same quota from the journal.
func TestQuotasAtOnce(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	var peers []*peer
	for i := range 4 {
		peers = append(peers, s.dial(fmt.Sprint("p", i)))
	}
	for round := range 10 {
		var wg sync.WaitGroup
		for i, p := range peers {
			for k := range 4 {
				wg.Go(func() {
					quota := uint64(1+round*16+i*4+k) << 20
					if i == k {
						quota = 0 // a quota comes now and then
					}
					if _, err := p.SetVolume(t.Context(), 1, meta.Policy{Replicas: 1, QuotaBytes: quota}, meta.VolumeWords{}); err != nil {
						t.Error(err)
					}
				})
			}
		}
		wg.Wait()
		s.samePolicies(1)
	}
	last := s.samePolicies(1)
	s.crash()
	s.start()
	if p := s.samePolicies(1); p != last {
		t.Errorf("%+v was journaled, %+v was answered", p, last)
	}
}

// A caller that changes a word of a policy reverts no word that another caller changes at the
// same time, and neither does a change of labels or of the trash time.
func TestWordsAtOnce(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a, b := s.dial("a"), s.dial("b")
	read := meta.Policy{Replicas: 1, LocalFirst: true} // both callers have read the same policy before
	full := meta.Policy{Replicas: 2, QuotaBytes: 1 << 30, QuotaInodes: 1000, MaxChunk: 8 << 20, SealOnClose: true, SyncOnClose: true, NoAtime: true,
		Topology: "/dc", Spread: meta.SpreadRack, Class: "ssd", MinReplicas: 1, Encrypt: true, Immutable: true}
	day := uint64(86400)
	for range 20 {
		if _, err := a.SetVolume(t.Context(), 1, read, meta.VolumeWords{}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i, word := range meta.PolicyWords() {
			p := read
			if err := p.Change(&full, word); err != nil {
				t.Fatal(err)
			}
			for _, who := range []*peer{a, b} {
				wg.Go(func() {
					words := meta.VolumeWords{Only: []string{word}, Labels: map[string]*string{fmt.Sprint("by-", i): new(string)}}
					if _, err := who.SetVolume(t.Context(), 1, p, words); err != nil {
						t.Errorf("%s: %v", word, err)
					}
				})
			}
		}
		wg.Go(func() {
			if _, err := a.SetVolume(t.Context(), 1, read, meta.VolumeWords{TrashSeconds: &day, Only: []string{}}); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		if p := s.samePolicies(1); p != full {
			t.Fatalf("%+v, not %+v", p, full)
		}
	}
	v, err := a.FindVolume(t.Context(), "root")
	if err != nil || len(v.Labels) != len(meta.PolicyWords()) || v.TrashSeconds != day {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := a.SetVolume(t.Context(), 1, read, meta.VolumeWords{Only: []string{"colour"}}); !errors.Is(err, meta.NotSupported) {
		t.Errorf("a word that nobody knows: %v", err)
	}
	if _, err := a.SetVolume(t.Context(), 1, meta.Policy{Replicas: 99}, meta.VolumeWords{Only: []string{"replicas"}}); !errors.Is(err, meta.Invalid) {
		t.Errorf("a word that can't be: %v", err)
	}
	// A request that names no word sets the whole policy.
	if _, err := a.SetVolume(t.Context(), 1, read, meta.VolumeWords{}); err != nil {
		t.Fatal(err)
	}
	if p := s.samePolicies(1); p != read {
		t.Errorf("%+v, not %+v", p, read)
	}
}

// The server dies after journaling a policy and before writing the row: the next owner writes the
// row.
func TestRowGetsItsPolicy(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"row", "row written"} {
		s := newSite(t)
		a := s.dial("a")
		s.cluster.mu.Lock()
		s.cluster.dies = func(at string) error {
			if at == step {
				return errKilled
			}
			return nil
		}
		s.cluster.mu.Unlock()
		want := meta.Policy{Replicas: 1, QuotaBytes: 1 << 30}
		if _, err := a.SetVolume(t.Context(), 1, want, meta.VolumeWords{}); err == nil {
			t.Fatal("the server lives")
		}
		s.crash()
		s.cluster.mu.Lock()
		s.cluster.dies = nil
		s.cluster.mu.Unlock()
		s.start()
		eventually(t, "the row says what the journal does", func() error {
			row, journal, memory, err := s.policies(1)
			if err == nil && (row != want || journal != want || memory != want.QuotaBytes) {
				err = fmt.Errorf("the row says %+v, the journal %+v, memory %d", row, journal, memory)
			}
			return err
		})
	}
}

// saver is a client that writes under a quota, and counts its idle promises.
type saver struct {
	*peer
	mu         sync.Mutex
	idle, most uint64
	files      []uint64 // promises for buffered bytes
}

func (c *saver) Metered(meta.VolumeID, bool, bool, func()) {}

func (c *saver) Reclaim(v meta.VolumeID, round uint64) {
	go func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if _, err := c.Reserve(context.Background(), v, client.AnyEpoch, c.idle, 0, round, client.Place{}); err == nil {
			c.idle, c.most = 0, 0
		}
	}()
}

// write reserves bytes as the client library does: idle promises first, and all of the rest is
// given back with a request for more.
func (c *saver) write(ctx context.Context, n uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.idle < n {
		give := c.idle
		c.idle = 0
		p, err := c.Reserve(ctx, 1, client.AnyEpoch, give, n, 0, client.Place{})
		if err != nil {
			return err
		}
		c.idle, c.most = p.Granted, p.Idle
	}
	c.idle -= n
	c.files = append(c.files, n)
	return nil
}

// drop gives up the promises for a file.
func (c *saver) drop(ctx context.Context) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.files) == 0 {
		return nil
	}
	n := c.files[0]
	c.files = c.files[1:]
	if c.idle+n <= c.most {
		c.idle += n
		return nil
	}
	p, err := c.Reserve(ctx, 1, client.AnyEpoch, c.idle+n, 0, 0, client.Place{})
	if c.idle = 0; err == nil {
		c.most = p.Idle
	}
	return err
}

func (s *site) saver(name string) *saver {
	s.t.Helper()
	c := &saver{peer: &peer{leases: map[meta.Ino]meta.LeaseMode{}}}
	c.Session, c.Operator = s.session(name, c), operator.New(s.t, "unix:"+s.addr, nil)
	return c
}

// All sessions together hold idle promises of at most 64 MiB or a hundredth of the quota, however
// sessions come and go, and soon after the quota is lowered, at most a hundredth of the new
// quota.
func TestIdleIsBounded(t *testing.T) {
	t.Parallel()
	for _, limit := range []uint64{40 << 20, 400 << 20, 40 << 30} {
		t.Run(fmt.Sprint(limit>>20), func(t *testing.T) {
			s := newSiteTTL(t, time.Minute)
			admin := s.dial("admin")
			admin.mustSet(t, meta.Policy{Replicas: 1, QuotaBytes: limit})
			o := s.srv.hosted.opened(1)
			var all []*saver
			sum := func() (idle, buffered uint64) {
				for _, c := range all {
					c.mu.Lock()
				}
				for _, c := range all {
					idle += c.idle
					for _, n := range c.files {
						buffered += n
					}
					c.mu.Unlock()
				}
				return idle, buffered
			}
			check := func(limit uint64) error {
				most := min(64<<20, limit/100)
				idle, buffered := sum()
				o.mu.Lock()
				defer o.mu.Unlock()
				q := &o.quota
				switch {
				case idle > most || q.Idle() > most:
					return fmt.Errorf("%d bytes lie idle, %d may; at most %d", idle, q.Idle(), most)
				case q.Promised() < buffered:
					return fmt.Errorf("%d bytes are promised, %d are buffered", q.Promised(), buffered)
				}
				return q.Check()
			}
			r := rand.New(rand.NewPCG(uint64(limit), 1))
			most, seen := min(64<<20, limit/100), uint64(0)
			for step := range 1500 {
				if step%150 == 0 {
					all = append(all, s.saver(fmt.Sprint("c", step)))
				}
				c := all[r.IntN(len(all))]
				var err error
				if len(c.files) > 20 || r.IntN(3) == 0 {
					err = c.drop(t.Context())
				} else {
					err = c.write(t.Context(), 1+r.Uint64N(limit/1000))
				}
				if err != nil && !errors.Is(err, meta.QuotaExceeded) {
					t.Fatal(err)
				}
				if err := check(limit); err != nil {
					t.Fatalf("step %d: %v", step, err)
				}
				idle, _ := sum()
				seen = max(seen, idle)
			}
			// The idle promises do come near the bound.
			if seen < most/2 {
				t.Errorf("at most %d bytes lay idle of %d that may", seen, most)
			}
			admin.mustSet(t, meta.Policy{Replicas: 1, QuotaBytes: limit / 4})
			eventually(t, "what lies idle follows the quota", func() error { return check(limit / 4) })
		})
	}
}

// slowSaver gives back idle promises when the test allows.
type slowSaver struct {
	*saver
	let chan struct{}
}

func (c *slowSaver) Reclaim(v meta.VolumeID, round uint64) {
	go func() {
		<-c.let
		c.saver.Reclaim(v, round)
	}()
}

// A quota is lowered while the owner recalls all idle promises: a session that has already
// answered, and has idle promises again, is asked once more.
func TestQuotaLoweredWhileAllAreAsked(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	admin := s.dial("admin")
	set := func(limit uint64) {
		t.Helper()
		admin.mustSet(t, meta.Policy{Replicas: 1, QuotaBytes: limit})
	}
	set(400 << 20)
	o := s.srv.hosted.opened(1)
	a := s.saver("a")
	b := &slowSaver{saver: &saver{peer: &peer{leases: map[meta.Ino]meta.LeaseMode{}}}, let: make(chan struct{})}
	b.Session = s.session("b", b)
	for _, c := range []*saver{a, b.saver} { // the other session has the owner ask the first session for its part
		if err := c.write(t.Context(), 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "that is over", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.quota.Round() != nil {
			return errors.New("a round is under way")
		}
		return nil
	})
	o.mu.Lock()
	o.quota.reclaim()
	round := o.quota.Round()
	o.mu.Unlock()
	eventually(t, "the one answers", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		if n := round.Pending(); n != 1 {
			return fmt.Errorf("%d have not answered", n)
		}
		return nil
	})
	eventually(t, "it has heard that", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.idle > 0 {
			return fmt.Errorf("%d bytes are idle", a.idle)
		}
		return nil
	})
	if err := a.write(t.Context(), 1<<20); err != nil {
		t.Fatal(err)
	}
	set(40 << 20)
	a.mu.Lock()
	idle := a.idle
	a.mu.Unlock()
	if most := uint64(40<<20) / 100; idle <= most {
		t.Fatalf("%d bytes lie idle, which is no more than may", idle)
	}
	close(b.let)
	eventually(t, "what lies idle follows the quota", func() error {
		a.mu.Lock()
		b.mu.Lock()
		idle := a.idle + b.idle
		b.mu.Unlock()
		a.mu.Unlock()
		o.mu.Lock()
		defer o.mu.Unlock()
		if most := o.quota.MostIdle(); idle > most || o.quota.Idle() > most {
			return fmt.Errorf("%d bytes lie idle, %d may; at most %d", idle, o.quota.Idle(), most)
		}
		return nil
	})
}

// In a batch with an operation that finds no room, the operations with room are done and the
// others refused, and no caller waits for an answer in vain.
func TestBatchWithoutRoom(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	admin, a := s.dial("admin"), s.dial("a")
	admin.mustSet(t, meta.Policy{Replicas: 1, QuotaBytes: 1 << 20})
	ino := a.create(t, "f").Attr.Ino
	batch := []client.BatchOp{
		{Op: &meta.Fallocate{Ino: ino, Off: 0, Len: 512 << 10}},
		{Op: &meta.Fallocate{Ino: ino, Off: 1 << 30, Len: 2 << 20}},
		{Op: &meta.Fallocate{Ino: ino, Off: 512 << 10, Len: 256 << 10}},
		{Op: &meta.Fallocate{Ino: ino, Off: 2 << 30, Len: 2 << 20}},
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, errs, err := a.DoBatch(ctx, 1, client.AnyEpoch, batch)
	if err != nil || len(errs) != len(batch) {
		t.Fatal(errs, err)
	}
	for i, err := range errs {
		if full := i%2 == 1; errors.Is(err, meta.QuotaExceeded) != full || !full && err != nil {
			t.Errorf("operation %d: %v", i, err)
		}
	}
}
