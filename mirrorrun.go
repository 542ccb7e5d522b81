package penstock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
)

// MirrorConfig says for which cluster mirrors are run.
type MirrorConfig struct {
	// Client is connected to the targets' cluster, with the right to administer the targets.
	// Only RunMirrors uses it.
	Client *Client
	// Dial connects to the cluster of a source with addresses, with the right to administer
	// the source.
	Dial   func(ctx context.Context, at meta.MirrorSource) (*Client, error)
	Logger *slog.Logger // nil: slog.Default()
	// Poll is how often the records are looked at; 0: 2 s.
	Poll time.Duration
	// Unsafe switches mechanisms off: positive controls of the tests.
	Unsafe MirrorUnsafe
}

// MirrorUnsafe switches steps of RunMirrors off (positive controls).
type MirrorUnsafe struct {
	NoDigest bool // show a copied snapshot without comparing digests
}

const (
	mirrorPin   = 30 * 24 * time.Hour // how long a source keeps the last snapshot for a mirror without contact
	mirrorRetry = time.Minute         // the longest between tries
	mirrorLook  = 30 * time.Second    // interval of the estimate of missing bytes
	mirrorTell  = time.Second         // interval of a round's progress reports
	// mirrorDigest is the interval at which a copying round asks for the source's digest.
	// After each request, the owner computes the digest for five minutes.
	mirrorDigest = time.Minute
)

// RunMirrors runs the mirrors of a cluster until ctx ends, except paused mirrors and mirrors
// that another process runs. Any number of processes may call RunMirrors; one process runs
// each mirror. RunMirrors returns when all work has stopped. Errors: AccessDenied (the client may
// not list mirrors, which administrators and metadata servers may).
func RunMirrors(ctx context.Context, cfg MirrorConfig) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Poll <= 0 {
		cfg.Poll = 2 * time.Second
	}
	m, err := cfg.Client.Mirrors()
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	defer wg.Wait()
	running := map[meta.VolumeID]bool{}
	listed := false
	for {
		all, err := m.All(ctx)
		listed = listed || err == nil
		if !listed && errors.Is(err, meta.AccessDenied) {
			return fmt.Errorf("mirrors can't be run with these credentials; use the certificate of an administrator: %w", err)
		}
		if err != nil && ctx.Err() == nil {
			cfg.Logger.Warn("the mirrors could not be listed; the worker tries again", "error", err)
		}
		for _, r := range all {
			if r.State != meta.MirrorRunning || r.Version > meta.MirrorVersion {
				continue
			}
			mu.Lock()
			begun := running[r.Target]
			running[r.Target] = true
			mu.Unlock()
			if begun {
				continue
			}
			wg.Go(func() {
				w := &mirrorWorker{MirrorConfig: cfg, m: m, target: r.Target, log: cfg.Logger.With("mirror", r.Target)}
				if err := w.run(ctx); err != nil && ctx.Err() == nil {
					w.log.Warn("a mirror can't be run here now; the worker tries again", "error", err)
				}
				mu.Lock()
				delete(running, r.Target)
				mu.Unlock()
			})
		}
		select {
		case <-time.After(cfg.Poll):
		case <-ctx.Done():
			return nil
		}
	}
}

// mirrorWorker runs one mirror.
type mirrorWorker struct {
	MirrorConfig
	m      Mirrors
	target meta.VolumeID
	log    *slog.Logger
	dst    *Volume
	src    *Volume
}

// run does rounds until the mirror is paused, or another process runs it.
func (w *mirrorWorker) run(ctx context.Context) (err error) {
	if w.dst, err = w.Client.VolumeByID(ctx, w.target); err != nil {
		return err
	}
	owner := rand.Uint64()
	if err := fill(ctx, w.dst, owner, false); err != nil {
		if meta.KindOf(err) == meta.WouldBlock {
			return nil // another process runs it
		}
		return err
	}
	defer func() {
		end := func(do func(ctx context.Context) error) error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			return do(ctx)
		}
		// The bytes of a stopped round are committed while the session may still write.
		if err := end(w.dst.SyncAll); err != nil {
			w.log.Info("the last writes of a round are written again", "error", err)
		}
		w.dst.owner.only.Store(0)
		// If the release is not delivered, the right ends with the session.
		_ = end(func(ctx context.Context) error { return unfill(ctx, w.dst, owner) })
	}()
	var looked time.Time
	var again time.Time // earliest time of the next attempt
	var asked uint64
	for tries := 0; ; {
		// The right ends with the session: then another process may have it, or the volume is
		// no longer a target. So operations are sent only in the session's epoch of the time
		// before the right was taken.
		w.dst.owner.only.Store(w.dst.owner.epoch.Load())
		if err := fill(ctx, w.dst, owner, false); err != nil {
			return err
		}
		// Read under the right: meanwhile Promote changes only the state.
		r, err := w.m.find(ctx, w.target)
		if err != nil {
			return err
		}
		if r.State != meta.MirrorRunning {
			return nil
		}
		switch due := w.due(&r); {
		case due && r.Asked == asked && time.Now().Before(again):
		case due:
			s := &mirrorRound{w: w, r: r}
			err := w.watched(ctx, s.tell, s.run)
			if err == nil {
				tries, looked = 0, time.Time{}
				continue
			}
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, errStopped) {
				continue
			}
			w.log.Warn("a round of a mirror failed; the next round goes on from there", "error", err)
			w.note(ctx, err)
			again, asked = time.Now().Add(min(time.Second<<min(tries, 10), mirrorRetry)), r.Asked
			tries++
		case time.Since(looked) > mirrorLook:
			began := time.Now()
			if err := w.watched(ctx, w.wanted, func(ctx context.Context) error { return w.look(ctx, &r) }); err != nil && ctx.Err() == nil {
				w.log.Info("the bytes that a mirror is behind could not be counted; the worker tries again", "error", err)
			}
			// The estimate never takes more than a tenth of the time.
			looked = time.Now().Add(min(10*time.Since(began), time.Hour))
		}
		select {
		case <-time.After(w.Poll):
		case <-ctx.Done():
			return nil
		}
	}
}

// errStopped ends a round of a paused mirror, or of a mirror that another process runs.
var errStopped = errors.New("the mirror was paused, or another process runs it")

// wanted tells whether the mirror is to be run. Errors: errStopped.
func (w *mirrorWorker) wanted(ctx context.Context) error {
	r, err := w.m.find(ctx, w.target)
	if err == nil && r.State != meta.MirrorRunning {
		err = errStopped
	}
	return err
}

// watched runs fn to its end and calls tell regularly. When tell returns errStopped, watched
// cancels fn's context, whatever fn waits for: a source that does not answer can't keep a
// mirror from being paused or promoted. Errors: fn's; errStopped.
func (w *mirrorWorker) watched(ctx context.Context, tell, fn func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	telling, over := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-time.After(mirrorTell):
			case <-telling.Done():
				return
			}
			if err := tell(telling); errors.Is(err, errStopped) {
				cancel(errStopped)
				return
			}
		}
	})
	err := fn(ctx)
	over()
	wg.Wait()
	if err != nil && errors.Is(context.Cause(ctx), errStopped) {
		err = errors.Join(errStopped, err)
	}
	return err
}

// due tells whether a round is to be done now.
func (w *mirrorWorker) due(r *Mirror) bool {
	return r.Round != nil || r.Last == nil || r.Asked != r.Heard || r.Every > 0 && time.Since(r.Last.Taken) >= r.Every
}

// note records why a try failed.
func (w *mirrorWorker) note(ctx context.Context, why error) {
	_, err := w.m.change(ctx, w.target, func(r *Mirror) error {
		if r.Error == "" {
			r.Since = time.Now().UTC()
		}
		r.Error = why.Error()
		return nil
	})
	if err != nil {
		w.log.Warn("the progress of a mirror could not be recorded", "error", err)
	}
}

// open finds the source.
func (w *mirrorWorker) open(ctx context.Context, r *Mirror) (done func(), err error) {
	c, done := w.Client, func() {}
	if len(r.Source.Meta) > 0 {
		if c, err = w.Dial(ctx, r.Source); err != nil {
			return nil, fmt.Errorf("the source's cluster: %w", err)
		}
		done = func() {
			end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
			defer cancel()
			if err := c.Close(end); err != nil {
				w.log.Info("the connection to a mirror's source did not end well", "error", err)
			}
		}
	}
	if w.src, err = c.VolumeByID(ctx, r.Source.ID); err != nil {
		done()
		return nil, fmt.Errorf("the source: %w", err)
	}
	return done, nil
}

// mirrorRound is one attempt of a round.
type mirrorRound struct {
	w *mirrorWorker
	r Mirror // at the beginning of the attempt

	mu     sync.Mutex
	n      MirrorRound
	copier *mirrorCopy // nil: nothing is copied yet
	sent   uint64      // by earlier attempts
}

// is reports whether the record still has this round. Errors: errStopped.
func (s *mirrorRound) is(r *Mirror) error {
	if r.Round == nil || r.Round.Snapshot != s.n.Snapshot {
		return errStopped
	}
	return nil
}

// now returns the round with its progress.
func (s *mirrorRound) now() *MirrorRound {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.n
	if c := s.copier; c != nil {
		n.Planned, n.Sent, n.Inodes = s.sent+c.planned.Load(), s.sent+c.sent.Load(), c.inodes.Load()
	}
	return &n
}

func (s *mirrorRound) set(fn func(n *MirrorRound)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fn(&s.n)
}

// tell records the progress, and applies the rate that is wanted now. Errors: errStopped.
func (s *mirrorRound) tell(ctx context.Context) error {
	s.mu.Lock()
	copier := s.copier
	s.mu.Unlock()
	if copier == nil {
		return s.w.wanted(ctx)
	}
	r, err := s.w.m.change(ctx, s.w.target, func(r *Mirror) error {
		if r.State != meta.MirrorRunning {
			return errStopped
		}
		if err := s.is(r); err != nil {
			return err
		}
		r.Round = s.now()
		return nil
	})
	if err == nil {
		copier.pace.set(r.Rate)
	}
	return err
}

// begin records the snapshot to copy, unless the record has one. Errors: errStopped (the
// mirror was paused, or its record changed).
func (s *mirrorRound) begin(ctx context.Context) error {
	if s.r.Round == nil {
		now := time.Now().UTC()
		n := MirrorRound{Snapshot: fmt.Sprintf("%s-%s", s.r.Name, now.Format("20060102T150405.000Z")), Began: now}
		if s.r.Last != nil {
			n.Base = s.r.Last.Snapshot
		}
		last := shown(&s.r)
		r, err := s.w.m.change(ctx, s.w.target, func(r *Mirror) error {
			if r.State != meta.MirrorRunning || r.Round != nil || shown(r) != last {
				return errStopped
			}
			r.Round, r.Heard = &n, r.Asked
			return nil
		})
		if err != nil {
			return err
		}
		s.r = r
	}
	s.set(func(n *MirrorRound) { *n = *s.r.Round })
	return nil
}

// run copies a snapshot, or the rest of a snapshot, checks and shows it. Each step is recorded
// before, or visible in the target, so the process may end at any point.
func (s *mirrorRound) run(ctx context.Context) error {
	w := s.w
	if now, err := w.dst.snapshots.shown(ctx); err != nil {
		return err
	} else if now == nil {
		return meta.E("mirror", meta.Invalid, w.dst.name, errors.New("the volume is no mirror's target: 'penstock mirror promote' and then 'resync' make it one"))
	}
	done, err := w.open(ctx, &s.r)
	if err != nil {
		return err
	}
	defer done()
	if err := s.begin(ctx); err != nil {
		return err
	}
	taken, err := w.snapshots(ctx, &s.r)
	if err != nil {
		return err
	}
	copier := &mirrorCopy{dst: w.dst, pace: newPace(s.r.Rate)}
	s.set(func(n *MirrorRound) { n.Taken, s.copier, s.sent = taken, copier, n.Sent })
	digested := w.digestSource(ctx, &s.r)
	err = w.fillTarget(ctx, copier, s.r.Round)
	digested()
	if err != nil {
		return err
	}
	s.set(func(n *MirrorRound) { n.Copied = time.Now().UTC() })
	if err := s.tell(ctx); err != nil {
		return err
	}
	name := s.r.Round.Snapshot
	sum, err := w.verify(ctx, name, s.r.Rate == 0)
	if err != nil {
		if meta.KindOf(err) == meta.Corrupt {
			// Copy from the beginning: right and wrong contents can't be told apart.
			err = errors.Join(err, w.dst.snapshots.delete(ctx, name), w.m.s.RollBackTarget(ctx, w.target, shown(&s.r)))
		}
		return err
	}
	if err := w.m.s.ShowSnapshot(ctx, w.target, name); err != nil {
		return err
	}
	s.set(func(n *MirrorRound) { n.Digest, n.Ended = sum, time.Now().UTC() })
	r, err := w.m.change(ctx, w.target, func(r *Mirror) error {
		// Also if the mirror was paused meanwhile: the snapshot is complete.
		if err := s.is(r); err != nil {
			return err
		}
		r.Last, r.Round, r.Error, r.Since, r.Behind, r.Looked = s.now(), nil, "", time.Time{}, 0, time.Time{}
		r.Rounds++
		return nil
	})
	if err != nil {
		return err
	}
	n := r.Last
	w.log.Info("a round of a mirror is complete", "snapshot", name, "bytes", n.Sent, "inodes", n.Inodes, "took", n.Ended.Sub(n.Began).Round(time.Millisecond))
	if err := errors.Join(dropMirrored(ctx, w.src, &r, 1), dropMirrored(ctx, w.dst, &r, r.Keep)); err != nil {
		w.log.Warn("old snapshots of a mirror could not be deleted; the worker tries again after the next round", "error", err)
	}
	return nil
}

// snapshots takes the round's snapshot of the source, if missing, and pins the snapshot and
// the base. It returns the time of the snapshot.
func (w *mirrorWorker) snapshots(ctx context.Context, r *Mirror) (time.Time, error) {
	n := r.Round
	if n.Base != "" {
		if err := w.src.snapshots.pin(ctx, n.Base, 0, r.Name, mirrorPin); err != nil {
			return time.Time{}, fmt.Errorf("the snapshot that source and target have in common: %w", err)
		}
	}
	err := w.src.snapshots.pin(ctx, n.Snapshot, 0, r.Name, mirrorPin)
	if meta.KindOf(err) == meta.NoSuchSnapshot {
		if err = w.src.snapshots.take(ctx, n.Snapshot); err == nil {
			err = w.src.snapshots.pin(ctx, n.Snapshot, 0, r.Name, mirrorPin)
		}
	}
	if err != nil {
		return time.Time{}, err
	}
	v, err := w.src.Snapshot(ctx, n.Snapshot)
	if err != nil {
		return time.Time{}, err
	}
	_, s, _ := v.View()
	return time.Unix(0, int64(s.Created)).UTC(), nil
}

// fillTarget makes the target's live tree equal to the round's snapshot, and takes a snapshot
// of the target.
func (w *mirrorWorker) fillTarget(ctx context.Context, c *mirrorCopy, n *MirrorRound) (err error) {
	if _, err := w.dst.Snapshot(ctx, n.Snapshot); meta.KindOf(err) != meta.NoSuchSnapshot {
		return err // the snapshot was complete before
	}
	if c.to, err = w.src.Snapshot(ctx, n.Snapshot); err != nil {
		return err
	}
	var changes []meta.Change
	if n.Base != "" {
		if c.from, err = w.src.Snapshot(ctx, n.Base); err != nil {
			return err
		}
		if c.base, err = w.dst.Snapshot(ctx, n.Base); err != nil {
			return err
		}
		if changes, err = w.changes(ctx, n); err != nil {
			return err
		}
	}
	if err := c.run(ctx, changes); err != nil {
		return err
	}
	defer w.dst.snapshots.changed()
	return w.m.s.TakeTarget(ctx, w.target, n.Snapshot)
}

// changes returns the differences between a round's base and snapshot. If another server has
// become the source's owner meanwhile, the comparison begins again.
func (w *mirrorWorker) changes(ctx context.Context, n *MirrorRound) (all []meta.Change, err error) {
	for range 3 {
		all = all[:0]
		err = w.src.snapshots.diff(ctx, n.Base, n.Snapshot, true, func(c meta.Change) error { all = append(all, c); return nil })
		if meta.KindOf(err) != meta.Stale {
			break
		}
	}
	return all, err
}

// digestSource makes the source's owner compute the digest of the round's snapshot during the
// copy, which reads the same bytes. If the copy has a rate, the digest waits until after the
// copy. done ends the requests.
func (w *mirrorWorker) digestSource(ctx context.Context, r *Mirror) (done func()) {
	if r.Rate > 0 {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			// verify reports errors.
			if s, err := w.src.snapshots.awaitDigest(ctx, r.Round.Snapshot, true); err == nil && s.Digest != nil {
				return
			}
			select {
			case <-time.After(mirrorDigest):
			case <-ctx.Done():
				return
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// verify compares the digests that the owners of both volumes computed from every name and
// byte. Errors: Corrupt; Unavailable (an owner can't compute the digest now, and is not trying
// to).
func (w *mirrorWorker) verify(ctx context.Context, snapshot string, unpaced bool) (string, error) {
	var sums [2]string
	for began := time.Now(); ; {
		// Both owners are asked, even after an error of one: the request hastens the digest.
		var failed []error
		for i, v := range []*Volume{w.src, w.dst} {
			if sums[i] != "" {
				continue
			}
			s, err := v.snapshots.awaitDigest(ctx, snapshot, unpaced)
			switch {
			case err != nil:
				failed = append(failed, err)
			case s.Digest != nil:
				sums[i] = s.Digest.Digest
			case s.DigestError != "" && !s.DigestTrying:
				failed = append(failed, meta.E("mirror", meta.Unavailable, v.name+"@"+snapshot, fmt.Errorf("its digest can't be computed, which is tried again: %s", s.DigestError)))
			}
		}
		if len(failed) > 0 {
			return "", errors.Join(failed...)
		}
		if sums[0] != "" && sums[1] != "" {
			break
		}
		select {
		case <-time.After(min(max(time.Since(began)/8, 10*time.Millisecond), time.Second)):
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
	if sums[0] != sums[1] && !w.Unsafe.NoDigest {
		return "", meta.E("mirror", meta.Corrupt, snapshot, fmt.Errorf("the source's digest is %s, the target's %s: it is copied again from the last complete snapshot", sums[0], sums[1]))
	}
	return sums[0], nil
}

// look records how far the mirror is behind.
func (w *mirrorWorker) look(ctx context.Context, r *Mirror) error {
	behind, err := w.behind(ctx, r)
	if err != nil {
		return err
	}
	_, err = w.m.change(ctx, w.target, func(r *Mirror) error { r.Behind, r.Looked = behind, time.Now().UTC(); return nil })
	return err
}

// behindFiles is the number of changed files from which the missing bytes are estimated.
const behindFiles = 2000

// behind estimates the bytes that a round would send now, from a sample of the changed files.
func (w *mirrorWorker) behind(ctx context.Context, r *Mirror) (uint64, error) {
	done, err := w.open(ctx, r)
	if err != nil {
		return 0, err
	}
	defer done()
	was, err := w.src.Snapshot(ctx, r.Last.Snapshot)
	if err != nil {
		return 0, err
	}
	// Told first, looked at then: an owner does not keep a comparison for long.
	var some []meta.Change
	files := 0
	pick := rand.New(rand.NewPCG(uint64(r.Target), uint64(r.Rounds)))
	if err := w.src.snapshots.diff(ctx, r.Last.Snapshot, "", false, func(c meta.Change) error {
		if c.Type != meta.TypeRegular || c.Kind != meta.PathAdded && !(c.Kind == meta.PathChanged && c.Content) {
			return nil
		}
		files++
		if len(some) < behindFiles {
			some = append(some, c)
		} else if i := pick.IntN(files); i < behindFiles { // each with the same chance
			some[i] = c
		}
		return nil
	}); err != nil {
		return 0, err
	}
	var bytes, looked atomic.Uint64
	err = each(ctx, some, func(ctx context.Context, _ int, c meta.Change) error {
		now, err := placesOf(ctx, w.src, c.Ino)
		var before []meta.Extent
		if err == nil && c.Kind == meta.PathChanged {
			before, err = placesOf(ctx, was, c.Ino)
		}
		if err != nil {
			if kind := meta.KindOf(err); kind == meta.Stale || kind == meta.NotFound {
				err = nil // gone meanwhile
			}
			return err
		}
		looked.Add(1)
		if len(now) > 0 {
			for _, s := range within(otherPlaces(before, now, now[len(now)-1].End()), now) {
				bytes.Add(s.hi - s.lo)
			}
		}
		return nil
	})
	n := bytes.Load()
	if of := looked.Load(); of > 0 && files > len(some) {
		n = uint64(float64(n) / float64(of) * float64(files))
	}
	return n, err
}
