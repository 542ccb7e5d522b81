package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
)

// fakeReader reads zeros from all chunks, and remembers the reads of each chunk.
type fakeReader struct {
	mu    sync.Mutex
	reads map[meta.ChunkID]int
	// before is called at each read of a chunk, and its error ends the read; may be nil.
	before func(ctx context.Context, id meta.ChunkID, reads int) error
}

func (f *fakeReader) ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error {
	f.mu.Lock()
	if f.reads == nil {
		f.reads = map[meta.ChunkID]int{}
	}
	before, n := f.before, f.reads[pl.ID]
	f.mu.Unlock()
	if before != nil {
		if err := before(ctx, pl.ID, n); err != nil {
			return err
		}
	}
	f.mu.Lock()
	f.reads[pl.ID]++
	f.mu.Unlock()
	clear(p)
	return nil
}

func (f *fakeReader) tell(before func(ctx context.Context, id meta.ChunkID, reads int) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.before = before
}

func (f *fakeReader) of(id meta.ChunkID) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.reads[id]
}

// digesters is a site that computes digests, with a client and a chunk server.
type digesters struct {
	*site
	*peer
	r      fakeReader
	chunks *fakeChunks
}

// newDigesters makes a digesters with the configuration that adjust, which may be nil, has
// changed; without now, digests begin only at again.
func newDigesters(t *testing.T, now bool, adjust func(*Config)) *digesters {
	t.Helper()
	d := &digesters{site: newSiteTTL(t, 20*time.Second)}
	d.adjust = func(c *Config) {
		c.DigestDir = d.dir + "/digests"
		c.DigestRate, c.AwaitedDigestRate = 1<<40, 1<<40
		if now {
			c.Chunks = &d.r
		}
		if adjust != nil {
			adjust(c)
		}
	}
	d.again()
	d.chunks = d.chunkServer(1)
	d.peer = d.dial("a")
	now = true
	return d
}

// again is another server after a crash.
func (d *digesters) again() {
	d.crash()
	d.start()
}

// blocks makes a file of n blocks in a chunk of its own.
func (p *peer) blocks(t *testing.T, v meta.VolumeID, name string, blocks int) meta.ChunkID {
	t.Helper()
	n := uint64(blocks) * digest.BlockSize
	res, err := p.Do(t.Context(), v, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}, meta.LeaseExclusive)
	if err != nil {
		t.Fatal(err)
	}
	g, err := p.AllocChunks(t.Context(), v, 1, false)
	if err == nil {
		_, err = p.Do(t.Context(), v, meta.OpID{}, &meta.Write{Ino: res.Attr.Ino, Extents: []meta.Extent{{Len: n, Chunk: g[0].ID}}, Size: n, Synced: true}, meta.LeaseNone)
	}
	if err != nil {
		t.Fatal(err)
	}
	return g[0].ID
}

// volume makes a volume.
func (p *peer) volume(t *testing.T, name string) meta.VolumeID {
	t.Helper()
	return p.must(t, toCreate(name, meta.Policy{}))
}

func (p *peer) take(t *testing.T, v meta.VolumeID, name string) {
	t.Helper()
	if _, err := p.TakeSnapshot(t.Context(), v, name); err != nil {
		t.Fatal(err)
	}
}

// of tells of a snapshot.
func (p *peer) of(t *testing.T, v meta.VolumeID, name string) meta.SnapshotInfo {
	t.Helper()
	l, err := p.Snapshots(t.Context(), v)
	i := slices.IndexFunc(l.Snapshots, func(i meta.SnapshotInfo) bool { return i.Name == name })
	if err != nil || i < 0 {
		t.Fatalf("%s: %v", name, err)
	}
	return l.Snapshots[i]
}

func (p *peer) awaitDigest(t *testing.T, v meta.VolumeID, name string) meta.DigestInfo {
	t.Helper()
	var d *meta.DigestInfo
	eventually(t, "a digest of "+name, func() error { d = p.of(t, v, name).Digest; return unless(d != nil) })
	return *d
}

// waitedFor tells whether somebody waits for the digest of a snapshot.
func (o *owner) waitedFor(at meta.Generation) bool {
	awaited, _ := o.digesting.isAwaited(at)
	return awaited
}

// begun waits until a chunk is being read.
func (f *fakeReader) begun(t *testing.T, id meta.ChunkID) {
	t.Helper()
	eventually(t, "it is read", func() error { return unless(f.of(id) > 0) })
}

// TestDigestTurns: volumes whose digests take long do not keep other volumes from their digests,
// and no block is read twice.
func TestDigestTurns(t *testing.T) {
	t.Parallel()
	const blocks = 200
	d := newDigesters(t, true, func(c *Config) { c.digestTurn = time.Millisecond })
	var mu sync.Mutex
	large := map[meta.ChunkID]bool{}
	over := make(chan struct{})
	d.r.tell(func(ctx context.Context, id meta.ChunkID, _ int) error {
		mu.Lock()
		slow := large[id]
		mu.Unlock()
		if !slow {
			return nil
		}
		select {
		case <-over:
		case <-time.After(100 * time.Millisecond): // the whole digest takes 20 s
		case <-ctx.Done():
		}
		return ctx.Err()
	})
	var volumes []meta.VolumeID
	var chunks []meta.ChunkID
	for i := range 2 {
		v := d.volume(t, fmt.Sprint("v", i))
		id := d.blocks(t, v, "large", blocks)
		mu.Lock()
		large[id] = true
		mu.Unlock()
		d.take(t, v, "s")
		d.r.begun(t, id) // the second although the first is not finished
		volumes, chunks = append(volumes, v), append(chunks, id)
	}
	small := d.volume(t, "small")
	d.blocks(t, small, "f", 1)
	d.take(t, small, "s")
	d.awaitDigest(t, small, "s")
	for i, v := range volumes {
		if d.of(t, v, "s").Digest != nil {
			t.Errorf("a volume with %d blocks was finished first, after %d reads", blocks, d.r.of(chunks[i]))
		}
	}
	close(over)
	for i, v := range volumes {
		if sum := d.awaitDigest(t, v, "s"); d.r.of(chunks[i]) != blocks || sum.Read != blocks*digest.BlockSize {
			t.Errorf("%d reads for %+v", d.r.of(chunks[i]), sum)
		}
	}
}

// TestDigestGrows: while the table of known blocks grows, which takes long for a large table,
// other volumes have their turn.
func TestDigestGrows(t *testing.T) {
	t.Parallel()
	const blocks = 1200 // the table grows several times
	d := newDigesters(t, false, func(c *Config) { c.digestTurn = time.Hour })
	large := d.blocks(t, 1, "large", blocks)
	d.take(t, 1, "s")
	small := d.volume(t, "small")
	d.blocks(t, small, "f", 1)
	reading, queued, passed := make(chan struct{}), make(chan struct{}), make(chan struct{})
	d.r.tell(func(ctx context.Context, id meta.ChunkID, reads int) error {
		if id != large {
			return nil
		}
		switch reads {
		case 0:
			close(reading)
			<-queued
		case blocks - 1:
			select {
			case <-passed:
			case <-ctx.Done():
			}
		}
		if reads%10 == 0 { // so that the request waits when a table grows
			time.Sleep(time.Millisecond)
		}
		return nil
	})
	d.again()
	<-reading
	d.take(t, small, "s")
	eventually(t, "the other volume waits", func() error {
		o := d.srv.hosted.opened(small)
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(o.digesting.busy)
	})
	close(queued)
	d.awaitDigest(t, small, "s")
	close(passed)
	d.awaitDigest(t, 1, "s")
}

// TestAwaitedDigest: a digest with a waiting caller is computed before another digest of its
// volume that was begun, beside the digests of other volumes, and without the pace of digests
// without a caller; the interrupted digest goes on from where its reads ended.
func TestAwaitedDigest(t *testing.T) {
	t.Parallel()
	const blocks = 500
	d := newDigesters(t, false, func(c *Config) { c.DigestRate, c.digestTurn = 4*MinDigestRate, time.Hour })
	both := d.blocks(t, 1, "a", 2)
	d.take(t, 1, "first")
	large := d.blocks(t, 1, "b", blocks) // 125 s
	d.take(t, 1, "second")
	v := d.volume(t, "v")
	d.blocks(t, v, "f", 8)
	d.again()
	d.r.begun(t, large) // of the newest
	d.take(t, v, "s")
	await := func(v meta.VolumeID, name string) {
		t.Helper()
		eventually(t, "a digest of "+name, func() error {
			i, err := d.AwaitDigest(t.Context(), v, name, false)
			return errors.Join(err, unless(i.Digest != nil))
		})
	}
	await(v, "s")
	await(1, "first")
	if i := d.of(t, 1, "second"); i.Digest != nil || d.r.of(large) >= blocks {
		t.Errorf("%+v, %d reads", i, d.r.of(large))
	}
	await(1, "second")
	if n, m := d.r.of(both), d.r.of(large); n != 2 || m != blocks {
		t.Errorf("%d and %d blocks were read, there are 2 and %d", n, m, blocks)
	}
	if _, err := d.AwaitDigest(t.Context(), 1, "third", false); meta.KindOf(err) != meta.NoSuchSnapshot {
		t.Error(err)
	}
}

// TestUnpacedDigest: a digest that an unpaced mirror waits for has no pace, and two such digests
// are computed side by side; a digest already begun loses its pace, too. A caller with only the
// right to read a volume speeds the digest up no more than any other caller.
func TestUnpacedDigest(t *testing.T) {
	const blocks = 300
	// 75 s at either rate.
	d := newDigesters(t, true, func(c *Config) {
		c.DigestRate, c.AwaitedDigestRate, c.digestTurn = 4*MinDigestRate, 4*MinDigestRate, time.Hour
	})
	var volumes []meta.VolumeID
	var chunks []meta.ChunkID
	for i := range 2 {
		v := d.volume(t, fmt.Sprint("v", i))
		volumes, chunks = append(volumes, v), append(chunks, d.blocks(t, v, "f", blocks))
	}
	d.take(t, volumes[0], "s")
	d.r.begun(t, chunks[0])
	d.take(t, volumes[1], "s")
	other := map[meta.ChunkID]meta.ChunkID{chunks[0]: chunks[1], chunks[1]: chunks[0]}
	d.r.tell(func(ctx context.Context, id meta.ChunkID, reads int) error {
		for reads == 8 && d.r.of(other[id]) < 8 && ctx.Err() == nil { // neither ends without the other
			time.Sleep(time.Millisecond)
		}
		return ctx.Err()
	})
	for i := range 2 * len(volumes) {
		v := volumes[i%len(volumes)]
		eventually(t, "a digest", func() error {
			info, err := d.AwaitDigest(t.Context(), v, "s", true)
			return errors.Join(err, unless(i < len(volumes) || info.Digest != nil))
		})
	}
	for i, id := range chunks {
		if n := d.r.of(id); n != blocks {
			t.Errorf("%d of %d blocks of volume %d were read", n, blocks, i)
		}
	}
	o := d.srv.hosted.opened(volumes[0])
	for _, unpaced := range []bool{false, true} {
		o.digesting.awaitDigest(1000, unpaced)
		if awaited, now := o.digesting.isAwaited(1000); !awaited || now != unpaced {
			t.Error(awaited, now)
		}
	}
}

// TestAwaitedOfTheName: of two snapshots with the same name, the caller waits for the living
// snapshot, not for the snapshot being deleted.
func TestAwaitedOfTheName(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	a := s.dial("a")
	for _, name := range []string{"x", "y", "z"} {
		a.create(t, name)
	}
	before := a.snapshot(t, "s").At
	for _, name := range []string{"x", "y", "z"} {
		a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: name}, meta.LeaseNone)
	}
	o := s.srv.hosted.opened(1)
	eventually(t, "the schedule was looked at", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(!o.schedule.read.IsZero() && !o.tasks.snapshots.Status().Woken)
	})
	o.mu.Lock() // no owner is told to go on with the deletion
	_, err := o.run(&meta.DropSnapshot{At: before, Max: 1}, 0)
	o.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	now := a.snapshot(t, "s").At
	if l := a.names(t); !slices.Equal(l, []string{"s deleting", "s ready"}) {
		t.Fatal(l)
	}
	if i, err := a.AwaitDigest(t.Context(), 1, "s", false); err != nil || i.At != now {
		t.Errorf("%+v, %v", i, err)
	}
	if o.waitedFor(before) || !o.waitedFor(now) {
		t.Error("the one that is being deleted is waited for")
	}
}

// TestDigestOrder: pinned snapshots come first, then by turns the newest and the oldest, so that
// each snapshot gets its digest although snapshots are taken faster than digests can be computed.
func TestDigestOrder(t *testing.T) {
	t.Parallel()
	d := newDigesters(t, false, nil)
	var order []string
	for i := range 6 {
		name := fmt.Sprint("s", i)
		d.blocks(t, 1, name, 1)
		d.take(t, 1, name)
		order = append(order, name)
	}
	if _, err := d.PinSnapshot(t.Context(), 1, "s3", "run", time.Hour); err != nil {
		t.Fatal(err)
	}
	d.again()
	made := map[string]time.Time{}
	for _, name := range order {
		made[name] = d.awaitDigest(t, 1, name).Made
	}
	slices.SortFunc(order, func(a, b string) int { return made[a].Compare(made[b]) })
	if want := []string{"s3", "s0", "s5", "s1", "s4", "s2"}; !slices.Equal(order, want) {
		t.Errorf("%v, want %v", order, want)
	}
}

// TestDigestFails: a snapshot with unreadable bytes keeps no other snapshot from its digest, and
// tells the reason for the missing digest; the digest is tried again when the retry is due.
func TestDigestFails(t *testing.T) {
	t.Parallel()
	d := newDigesters(t, false, nil)
	d.blocks(t, 1, "a", 1)
	d.take(t, 1, "whole")
	bad := d.blocks(t, 1, "b", 3)
	d.take(t, 1, "torn")
	lost := errors.New("lost for ever " + strings.Repeat("é", digestErrorMost))
	d.r.tell(func(_ context.Context, id meta.ChunkID, reads int) error {
		if id == bad && reads == 1 {
			return meta.E("read chunk", meta.Corrupt, "", lost)
		}
		return nil
	})
	d.again()
	d.awaitDigest(t, 1, "whole")
	var torn meta.SnapshotInfo
	eventually(t, "the other one fails", func() error {
		torn = d.of(t, 1, "torn")
		return unless(torn.DigestError != "")
	})
	if torn.Digest != nil || !strings.Contains(torn.DigestError, "lost for ever") || len(torn.DigestError) > digestErrorMost || strings.ContainsRune(torn.DigestError, '\uFFFD') {
		t.Errorf("%+v", torn)
	}
	if d.of(t, 1, "whole").DigestError != "" {
		t.Error("the whole one, too?")
	}
	// A caller's question speeds nothing up.
	o := d.srv.hosted.opened(1)
	if _, err := d.AwaitDigest(t.Context(), 1, "torn", false); err != nil {
		t.Fatal(err)
	}
	if sn, ok, next, err := o.digesting.undigested(); ok || time.Until(next) > digestRetry+time.Minute || err != nil {
		t.Errorf("%q is to be computed at %v, %v", sn.Name, next, err)
	}
	if torn.DigestTrying {
		t.Error("it is told to be tried, and is not due")
	}
	// During the retry, the caller gets the error of the previous try.
	reading, goOn := make(chan struct{}, 10), make(chan error)
	d.r.tell(func(ctx context.Context, id meta.ChunkID, reads int) error {
		reading <- struct{}{}
		select {
		case err := <-goOn:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	again := func(ends error) {
		t.Helper()
		o.digesting.mu.Lock()
		o.digesting.tried[torn.At].due = time.Now()
		o.digesting.mu.Unlock()
		o.tasks.digests.Wake()
		<-reading
		if i := d.of(t, 1, "torn"); i.DigestError == "" || !i.DigestTrying {
			t.Errorf("while it is tried again: %+v", i)
		}
		goOn <- ends
	}
	again(meta.E("read chunk", meta.Unavailable, "", errors.New("the server is away")))
	eventually(t, "it fails again", func() error {
		i := d.of(t, 1, "torn")
		return unless(strings.Contains(i.DigestError, "is away") && !i.DigestTrying)
	})
	again(nil)
	<-reading // the last of the file's blocks
	goOn <- nil
	d.r.tell(nil)
	d.awaitDigest(t, 1, "torn")
	if torn = d.of(t, 1, "torn"); torn.DigestError != "" || torn.DigestTrying || d.r.of(bad) != 3 {
		t.Errorf("%+v after %d reads of 3 blocks", torn, d.r.of(bad))
	}
	// A snapshot that is gone is not tried.
	if _, err := d.DeleteSnapshot(t.Context(), 1, "torn"); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	x := retry{}
	for range 10 {
		x.failed(lost, now)
	}
	if x.due.Sub(now) != digestRetryMost {
		t.Error(x.due.Sub(now))
	}
}

// TestArrivals: bytes written to a mirror's target are summed on arrival, and not read for the
// digest again; the digest believes a sum only when a server has verified the whole chunk of the
// bytes, and believes the sums of an earlier digest. Bytes in an open chunk are read, too.
func TestArrivals(t *testing.T) {
	d := newDigesters(t, true, nil)
	d.take(t, 1, "one")
	d.fill(t, meta.LockWrite)
	if err := d.ShowSnapshot(t.Context(), 1, "one"); err != nil {
		t.Fatal(err)
	}
	arrive := func(name string, blocks int) (id meta.ChunkID) {
		t.Helper()
		id = d.blocks(t, 1, name, blocks)
		eventually(t, "it is summed", func() error { return unless(d.r.of(id) == blocks) })
		return id
	}
	verified := func(id meta.ChunkID) int { return len(d.chunks.ordered(id, meta.OrderVerify)) }
	// seal has a chunk sealed, of which the server has n blocks then.
	seal := func(id meta.ChunkID, blocks, n uint64) {
		t.Helper()
		d.chunks.has(id, blocks*digest.BlockSize, blocks*digest.BlockSize)
		if _, err := d.SealChunk(t.Context(), 1, id); err != nil {
			t.Fatal(err)
		}
		d.chunks.cut(id, n*digest.BlockSize)
	}
	f := arrive("f", 9)
	seal(f, 9, 8)
	arrive("gone", 1)
	d.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "gone"}, meta.LeaseNone)
	if err := d.TakeTarget(t.Context(), 1, "two"); err != nil {
		t.Fatal(err)
	}
	await := func(name string) (i meta.SnapshotInfo) {
		t.Helper()
		eventually(t, "a digest of "+name+", or why there is none", func() (err error) {
			i, err = d.AwaitDigest(t.Context(), 1, name, true)
			return errors.Join(err, unless(i.Digest != nil || i.DigestError != ""))
		})
		return i
	}
	// The server does not have all of the chunk.
	if i := await("two"); i.Digest != nil || !strings.Contains(i.DigestError, f.String()) || verified(f) == 0 {
		t.Fatalf("%+v, %d orders", i, verified(f))
	}
	d.chunks.cut(f, 9*digest.BlockSize)
	o := d.srv.hosted.opened(1)
	again := func() {
		o.digesting.mu.Lock()
		for _, r := range o.digesting.tried {
			r.due = time.Now()
		}
		o.digesting.mu.Unlock()
		o.tasks.digests.Wake()
	}
	again()
	if i := d.awaitDigest(t, 1, "two"); i.Read != 0 || d.r.of(f) != 9 {
		t.Errorf("%+v after %d reads of 9 blocks", i, d.r.of(f))
	}
	before := verified(f)
	if rate := d.chunks.ordered(f, meta.OrderVerify)[before-1].Rate; rate != 0 {
		t.Errorf("verified at %d bytes a second, the mirror is held to none", rate)
	}
	g := arrive("g", 2)
	seal(g, 2, 2)
	open := arrive("open", 3)
	d.chunks.has(open, 3*digest.BlockSize, 3*digest.BlockSize)
	if err := d.TakeTarget(t.Context(), 1, "three"); err != nil {
		t.Fatal(err)
	}
	if i := d.awaitDigest(t, 1, "three"); i.Read != 3*digest.BlockSize || verified(g) != 1 || verified(f) != before || verified(open) != 1 {
		t.Errorf("%+v, verified %d, %d and %d times", i, verified(g), verified(f)-before, verified(open))
	}
	if rate := d.chunks.ordered(g, meta.OrderVerify)[0].Rate; rate != 1<<40/vouchers {
		t.Errorf("verified at %d bytes a second", rate)
	}

	// A digest of another snapshot, finished between the arrival and the digest, proves nothing.
	take := func(name string) {
		t.Helper()
		if err := d.TakeTarget(t.Context(), 1, name); err != nil {
			t.Fatal(err)
		}
	}
	h := arrive("h", 1)
	seal(h, 1, 0)
	last := arrive("z", 1) // the snapshot is read again, which lasts until the read is known to be useless
	d.chunks.has(last, digest.BlockSize, digest.BlockSize)
	d.r.tell(func(ctx context.Context, id meta.ChunkID, _ int) error {
		if id == last {
			<-ctx.Done()
		}
		return ctx.Err()
	})
	take("four")
	if i := await("four"); i.Digest != nil || !strings.Contains(i.DigestError, h.String()) {
		t.Fatalf("%+v", i)
	}
	d.r.tell(nil)
	k := arrive("k", 1)
	seal(k, 1, 0)
	d.chunks.cut(h, digest.BlockSize)
	again()
	d.awaitDigest(t, 1, "four")
	take("five")
	if i := await("five"); i.Digest != nil || !strings.Contains(i.DigestError, k.String()) || verified(k) == 0 {
		t.Errorf("it was believed: %+v, %d orders", i, verified(k))
	}
	// A digest finished between two tries proves nothing either.
	d.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "k"}, meta.LeaseNone)
	take("six")
	if i := await("six"); i.Digest == nil {
		t.Errorf("%+v", i)
	}
	before = verified(k)
	again()
	eventually(t, "it is tried again", func() error { return unless(verified(k) > before || d.of(t, 1, "five").Digest != nil) })
	if i := d.of(t, 1, "five"); i.Digest != nil {
		t.Errorf("it was believed: %+v", i)
	}

	// However much arrives.
	var many meta.Write
	for i := range uint64(maxArrived + 1000) {
		many.Extents = append(many.Extents, meta.Extent{Off: 2 * i, Len: 1})
	}
	o.mu.Lock() // none is summed
	defer o.mu.Unlock()
	o.mirror.arrived(&many)
	o.mirror.arrived(&meta.Write{Ino: 7, Extents: []meta.Extent{{Len: 1}, {Off: 1, Len: 1}}})
	o.digesting.mu.Lock()
	defer o.digesting.mu.Unlock()
	if n := len(o.digesting.arrivals); n > maxArrived || n < maxArrived-1 {
		t.Errorf("%d wait, there is room for %d", n, maxArrived)
	}
	o.digesting.arrivals = nil
}

// TestDigestOfAnew: a caller that waits for the digest of a snapshot means the readable snapshot,
// not a snapshot of the same name that is being deleted.
func TestDigestOfAnew(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	for n := range 20 {
		name := fmt.Sprint("s", n)
		a.snapshot(t, name)
		a.create(t, fmt.Sprint("f", n))
		old, o := a.of(t, 1, name), s.srv.hosted.opened(1)
		// A deletion begins, but no owner is told to continue the deletion.
		o.mu.Lock()
		_, err := o.run(&meta.DropSnapshot{At: old.At, Max: 1}, 0)
		o.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		a.snapshot(t, name)
		i, err := a.AwaitDigest(t.Context(), 1, name, false)
		if err != nil || i.At == old.At {
			t.Fatalf("%+v, %v", i, err)
		}
		if !o.waitedFor(i.At) || o.waitedFor(old.At) {
			t.Fatal("the digest of the other one is waited for")
		}
		if a.of(t, 1, name).At == old.At { // the first snapshot in the list
			return
		}
	}
	t.Fatal("there never were two")
}

// TestDigestRate: volumes share the rate.
func TestDigestRate(t *testing.T) {
	t.Parallel()
	const blocks, volumes, rate, burst = 3, 3, 4, 2
	d := newDigesters(t, false, func(c *Config) { c.DigestRate = rate * digest.BlockSize })
	var all []meta.VolumeID
	for i := range volumes {
		v := d.volume(t, fmt.Sprint("v", i))
		d.blocks(t, v, "f", blocks)
		d.take(t, v, "s")
		all = append(all, v)
	}
	began := time.Now()
	d.again()
	for _, v := range all {
		d.awaitDigest(t, v, "s")
	}
	if took, least := time.Since(began), time.Duration(blocks*volumes-burst)*time.Second/rate; took < least {
		t.Errorf("%d blocks at %d a second took %v, want %v", blocks*volumes, rate, took, least)
	}
}

// TestInterruptedDigest: bytes read before the owner died are not read again.
func TestInterruptedDigest(t *testing.T) {
	t.Parallel()
	const blocks = 20
	d := newDigesters(t, true, nil)
	d.r.tell(func(ctx context.Context, _ meta.ChunkID, reads int) error {
		if reads < blocks/2 {
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	})
	id := d.blocks(t, 1, "f", blocks)
	d.take(t, 1, "s")
	eventually(t, "half of it", func() error { return unless(d.r.of(id) == blocks/2) })
	d.crash()
	d.r.tell(nil)
	d.start()
	if sum := d.awaitDigest(t, 1, "s"); d.r.of(id) != blocks || sum.Read != blocks/2*digest.BlockSize {
		t.Errorf("%d blocks of %d were read, and then %d bytes", d.r.of(id), blocks, sum.Read)
	}
}
