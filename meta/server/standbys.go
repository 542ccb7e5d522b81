package server

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
)

// A server that may be a volume's next owner follows the volume's journal into a local store,
// so that taking the volume means reading the last few entries. A standby answers no caller:
// its store is only ever handed to an owner.
//
// A store's folder belongs to a standby, to an owner (between take and give), or to nobody.

const (
	// DefaultFollowers is how many servers besides the owner follow a volume.
	DefaultFollowers = 2
	// maxStandbys bounds the stores open only for following: each store costs about a quarter
	// of a megabyte and a watch.
	maxStandbys = 1024
	// maxLoads bounds the checkpoints being loaded at once.
	maxLoads = 2
	// standbyLook is how often the list of volumes to follow is read without a hint at a
	// change.
	standbyLook = 2 * time.Second
	// maxLoad bounds the loading of a checkpoint: the checkpoint's pin keeps the journal from
	// being trimmed.
	maxLoad = 10 * time.Minute
	// unwantedGrace is how long the server follows a volume after the volume left wanted. When
	// another server dies, the remaining server finds itself alone and wants nothing, but its
	// copies are needed then.
	unwantedGrace = 30 * time.Second
	// Pauses after an error.
	minStandbyPause = 50 * time.Millisecond
	maxStandbyPause = 5 * time.Second
)

// standbys are the volumes followed by this server.
type standbys struct {
	s     *Server
	log   *slog.Logger
	loads chan struct{} // capacity maxLoads

	applied, bytes, reloads, damaged atomic.Uint64

	mu     sync.Mutex
	m      map[meta.VolumeID]*standby
	taken  map[meta.VolumeID]struct{} // an owner has the folder
	closed bool
}

func newStandbys(s *Server) *standbys {
	return &standbys{
		s: s, log: s.log, loads: make(chan struct{}, maxLoads),
		m: map[meta.VolumeID]*standby{}, taken: map[meta.VolumeID]struct{}{},
	}
}

// standby follows one volume.
type standby struct {
	vol  meta.VolumeID
	hand context.CancelCauseFunc // ends the following; a running load goes on
	quit context.CancelCauseFunc // ends everything
	done chan struct{}           // closed when the goroutine has ended
	st   Store                   // owned by the goroutine, and after done by the waiter; nil: not open

	// Guarded by standbys.mu:
	gone     chan struct{} // made by drop, closed when the folder is free
	unwanted time.Time     // since when the volume is missing in wanted

	mu     sync.Mutex
	at     journal.Position
	caught time.Time // when at was last known to be the end of the journal
	why    error     // the error before the next try
}

// follow begins to follow a volume into st, or into the local copy if st is nil. follow
// returns false, and st stays the caller's, if the volume is already followed or owned here,
// if maxStandbys are followed, or after close.
func (b *standbys) follow(v meta.VolumeID, st Store) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.followLocked(v, st)
}

func (b *standbys) followLocked(v meta.VolumeID, st Store) bool {
	if _, taken := b.taken[v]; taken || b.m[v] != nil || b.closed || len(b.m) >= maxStandbys {
		return false
	}
	life, quit := context.WithCancelCause(b.s.ctx)
	following, hand := context.WithCancelCause(life)
	f := &standby{vol: v, hand: hand, quit: quit, done: make(chan struct{}), st: st}
	b.m[v] = f
	b.s.wg.Go(func() {
		defer close(f.done)
		defer quit(nil)
		b.run(life, following, f)
	})
	return true
}

var (
	errHanded  = errors.New("the volume's owner takes the store")
	errDropped = errors.New("the volume is not followed here any more")
)

// take ends the following of a volume and returns the open store; nil: no store is open, and
// the caller opens the folder. Until give, no standby touches the folder.
func (b *standbys) take(v meta.VolumeID) Store {
	b.mu.Lock()
	b.taken[v] = struct{}{}
	f := b.m[v]
	dropped := f != nil && f.gone != nil
	if f != nil && !dropped {
		delete(b.m, v)
	}
	b.mu.Unlock()
	switch {
	case f == nil:
		return nil
	case dropped:
		<-f.gone // until the folder is free
		return nil
	}
	f.hand(errHanded)
	<-f.done
	return f.st
}

// give takes the folder back from an owner that is finished with the folder. If this server is
// to follow the volume, a standby continues with an open store (the store holds journaled
// effects only: rule 1); otherwise give closes the store.
func (b *standbys) give(v meta.VolumeID, st Store) error {
	wanted := st != nil && slices.Contains(b.wanted(), v)
	if st != nil && !wanted {
		err := st.Close() // before the folder can be opened again
		st = nil
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.taken, v)
		return err
	}
	b.mu.Lock()
	delete(b.taken, v)
	followed := st == nil || b.followLocked(v, st)
	if !followed {
		b.taken[v] = struct{}{}
	}
	b.mu.Unlock()
	if followed {
		return nil
	}
	err := st.Close()
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.taken, v)
	return err
}

// drop ends the following of a volume. With discard drop also deletes the local copy, unless
// an owner has the copy.
func (b *standbys) drop(v meta.VolumeID, discard bool) error {
	b.mu.Lock()
	f := b.m[v]
	if f != nil && f.gone != nil {
		b.mu.Unlock()
		<-f.gone
		return b.drop(v, discard)
	}
	if _, taken := b.taken[v]; f == nil && (!discard || taken) {
		b.mu.Unlock()
		return nil
	}
	if f == nil {
		f = &standby{vol: v, done: make(chan struct{}), quit: func(error) {}}
		close(f.done)
		b.m[v] = f
	}
	// The standby stays on the list until the folder is free.
	f.gone = make(chan struct{})
	b.mu.Unlock()
	f.quit(errDropped)
	<-f.done
	var err error
	if f.st != nil {
		err = f.st.Close()
	}
	if discard {
		err = errors.Join(err, b.s.cfg.Cluster.DropStore(v))
	}
	b.mu.Lock()
	delete(b.m, v)
	b.mu.Unlock()
	close(f.gone)
	return err
}

// close ends all standbys and closes their stores; the server's context is canceled.
func (b *standbys) close() error {
	b.mu.Lock()
	b.closed = true
	var all []*standby
	for v, f := range b.m {
		if f.gone == nil { // the other standbys have a waiting drop
			all = append(all, f)
			delete(b.m, v)
		}
	}
	b.mu.Unlock()
	var errs []error
	for _, f := range all {
		f.quit(errDropped)
	}
	for _, f := range all {
		<-f.done
		if f.st != nil {
			errs = append(errs, f.st.Close())
		}
	}
	return errors.Join(errs...)
}

// position returns a standby's position, and whether the standby has reached the end of the
// journal since its last failure.
func (b *standbys) position(v meta.VolumeID) (at journal.Position, warm bool) {
	b.mu.Lock()
	f := b.m[v]
	b.mu.Unlock()
	if f == nil {
		return at, false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at, !f.caught.IsZero()
}

// wanted lists the volumes that this server should follow unless it owns the volume. A server
// alone follows nothing.
func (b *standbys) wanted() (all []meta.VolumeID) {
	view := b.s.cfg.Cluster.View()
	n := b.s.cfg.Followers
	if view == nil || n < 0 || len(view.MetaServers) < 2 || b.s.room.roomless.low.Load() {
		return nil
	}
	for _, v := range view.Volumes {
		if v.State != cluster.VolumeActive {
			continue
		}
		for i, m := range cluster.Rank(v.ID, view.MetaServers) {
			if i > n {
				break
			}
			if m.Name == b.s.cfg.Name {
				all = append(all, v.ID)
				break
			}
		}
	}
	return all
}

// loop keeps the followed volumes equal to wanted, until the server ends.
func (b *standbys) loop() {
	for {
		changed := b.s.cfg.Cluster.Changed()
		b.look()
		select {
		case <-b.s.ctx.Done():
			return
		case <-changed:
		case <-time.After(standbyLook):
		}
	}
}

func (b *standbys) look() {
	want := b.wanted()
	b.mu.Lock()
	var gone []meta.VolumeID
	for v, f := range b.m {
		switch {
		case slices.Contains(want, v):
			f.unwanted = time.Time{}
		case f.unwanted.IsZero():
			f.unwanted = time.Now()
		case time.Since(f.unwanted) > unwantedGrace && f.gone == nil:
			gone = append(gone, v)
		}
	}
	b.mu.Unlock()
	for _, v := range gone {
		// Only a successful read of the table proves that the volume no longer exists.
		_, err := b.s.cfg.Cluster.Volume(b.s.ctx, v)
		discard := errors.Is(err, meta.NoSuchVolume)
		if err := b.drop(v, discard); err != nil {
			b.log.Warn("a followed volume could not be let go", "volume", v, "error", err)
		}
	}
	for _, v := range want {
		b.follow(v, nil)
	}
}

// run follows a volume, with retries, until following ends.
func (b *standbys) run(life, following context.Context, f *standby) {
	pause := minStandbyPause
	for following.Err() == nil {
		began := time.Now()
		err := b.runOnce(life, following, f)
		if following.Err() != nil {
			return
		}
		f.mu.Lock()
		f.why, f.caught = err, time.Time{}
		f.mu.Unlock()
		if pause = min(2*pause, maxStandbyPause); time.Since(began) > maxStandbyPause {
			pause = minStandbyPause
		}
		level := slog.LevelInfo
		if !errors.Is(err, meta.Stale) && !errors.Is(err, meta.Unavailable) {
			level = slog.LevelError
		}
		b.log.Log(following, level, "following a volume stopped, it is tried again", "volume", f.vol, "error", err)
		select {
		case <-following.Done():
		case <-time.After(pause + rand.N(pause)):
		}
	}
}

// runOnce opens the store if necessary and follows the journal until an error. Except after
// the end of following and after Ahead, runOnce closes the store, so that the next try loads
// the checkpoint.
func (b *standbys) runOnce(life, following context.Context, f *standby) error {
	log, err := b.s.cfg.Cluster.Follow(life, f.vol)
	if err != nil {
		return err
	}
	if f.st == nil {
		if f.st, err = b.load(life, following, f.vol, log); err != nil {
			return err
		}
	}
	f.mu.Lock()
	f.at = f.st.Applied()
	f.mu.Unlock()
	err = log.Follow(following, f.st.Applied(), func(e journal.Entry) error {
		if err := replay(f.st, e); err != nil {
			return err
		}
		b.applied.Add(1)
		b.bytes.Add(uint64(len(e.Payload)))
		f.mu.Lock()
		f.at = e.Position()
		f.mu.Unlock()
		return nil
	}, func() {
		f.mu.Lock()
		f.caught, f.why = time.Now(), nil
		f.mu.Unlock()
	})
	if following.Err() != nil || errors.Is(err, meta.Ahead) {
		// Ahead: the journal was set back, and this copy is newer than the journal. The copy
		// is kept for the administrator's decision.
		return err
	}
	if err = errors.Join(err, f.st.Close()); errors.Is(err, meta.Corrupt) {
		b.damaged.Add(1)
		b.log.Error("the copy of a followed volume does not fit the journal: the server puts it aside and builds it again", "volume", f.vol, "error", err)
		err = errors.Join(err, b.s.cfg.Cluster.PutAsideStore(f.vol))
	}
	f.st = nil
	return err
}

// load opens the local copy, or makes the copy from the checkpoint. The checkpoint is pinned
// meanwhile: neither its files nor the later entries may be deleted.
func (b *standbys) load(life, following context.Context, v meta.VolumeID, log Journal) (Store, error) {
	select {
	case b.loads <- struct{}{}:
	case <-following.Done():
		return nil, context.Cause(following)
	}
	defer func() { <-b.loads }()
	cp, release, err := log.Pin(life)
	have := err == nil
	switch {
	case have:
		defer func() {
			// If release fails, the pin ends with its lease.
			if err := release(context.WithoutCancel(life)); err != nil {
				b.log.Warn("a checkpoint's pin could not be taken back", "volume", v, "error", err)
			}
		}()
	case !errors.Is(err, meta.NotFound):
		return nil, err
	}
	began := time.Now()
	call, cancel := context.WithTimeoutCause(life, maxLoad, errors.New("the checkpoint can't be loaded"))
	defer cancel()
	st, err := b.s.opener.openStore(call, v, cp, have)
	if err != nil {
		return nil, err
	}
	b.reloads.Add(1)
	b.log.Info("following volume", "volume", v, "from", st.Applied().Seq, "took", time.Since(began).Round(time.Millisecond))
	return st, nil
}

// StandbyStatus describes a volume followed by this server.
type StandbyStatus struct {
	Volume meta.VolumeID `json:"volume"`
	Seq    meta.Seq      `json:"seq"`
	// Behind is how long ago the copy was last known to be at the end of the journal.
	Behind string `json:"behind"`
	Error  string `json:"error,omitempty"`
}

const unknownLag = "unknown" // the copy never reached the end, or failed since

// status lists the followed volumes. lag is the longest time since a copy was last known to be
// at the end of its journal; copies of unknown lag don't count.
func (b *standbys) status() (all []StandbyStatus, lag time.Duration) {
	b.mu.Lock()
	var fs []*standby
	for _, f := range b.m {
		fs = append(fs, f)
	}
	b.mu.Unlock()
	slices.SortFunc(fs, func(x, y *standby) int { return int(x.vol) - int(y.vol) })
	for _, f := range fs {
		f.mu.Lock()
		s := StandbyStatus{Volume: f.vol, Seq: f.at.Seq, Behind: unknownLag}
		if !f.caught.IsZero() {
			behind := time.Since(f.caught)
			s.Behind = behind.Round(time.Millisecond).String()
			lag = max(lag, behind)
		}
		if f.why != nil {
			s.Error = f.why.Error()
		}
		f.mu.Unlock()
		all = append(all, s)
	}
	return all, lag
}

// lags reports whether the copy is unready for a fail-over.
func (s *StandbyStatus) lags() bool {
	behind, err := time.ParseDuration(s.Behind)
	return err != nil || behind > meta.StandbyLag || s.Error != ""
}
