package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/wire"
)

// Which server serves which volume. Each volume has a home among the live servers, by
// rendezvous hashing (cluster.Rank). The home opens the volume when a client asks, or at once
// if the owner before did not release the volume. If another server owns the volume, the home
// asks that server for it once the home's own copy is warm. No other server opens the volume.
// So a server asked for a volume is its owner, or becomes its owner, or names the server to
// ask. The views of servers differ for a moment after a server comes or goes: only the
// transaction at etcd decides.

// opening is a volume that is open, being opened or being left.
type opening struct {
	state cluster.VolumeState // the state that the volume's row must have
	done  chan struct{}       // closed when o and err are set
	o     *owner
	err   error
	gone  chan struct{} // closed when the volume is off the list
}

// hosted has the volumes that this server serves, and decides which volumes the server takes and
// gives away.
type hosted struct {
	*process
	opener    *opener
	peers     *peers
	room      *diskRoom
	serverMap *serverMap
	standbys  *standbys
	trash     *trash
	homeWake  chan struct{} // capacity 1: to homeLoop
	leavers   leavers
	unable    unable

	mu      sync.Mutex
	volumes map[meta.VolumeID]*opening
	// atRest are closed volumes with this server as home, closed in order by their last
	// owners. While the list of metadata servers is unchanged, no other server takes such a
	// volume, so homeLoop does not ask etcd for each volume at every change.
	atRest map[meta.VolumeID]bool
}

// opened returns the owner of a volume served here, without waiting; nil: none.
func (hs *hosted) opened(v meta.VolumeID) *owner {
	hs.mu.Lock()
	op := hs.volumes[v]
	hs.mu.Unlock()
	if op == nil {
		return nil
	}
	select {
	case <-op.done:
		return op.o
	default:
		return nil
	}
}

// owners lists the owners of the volumes open here, by volume id.
func (hs *hosted) owners() (all []*owner) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	for _, op := range hs.volumes {
		select {
		case <-op.done:
			if op.o != nil {
				all = append(all, op.o)
			}
		default:
		}
	}
	slices.SortFunc(all, func(a, b *owner) int { return int(a.vol) - int(b.vol) })
	return all
}

// count counts the volumes on the list, those being opened included.
func (hs *hosted) count() int {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	return len(hs.volumes)
}

// open takes a volume, or waits for an open already under way. Errors: NoSuchVolume (also if
// the volume is being deleted), NotOwner (the subject is the owner's address), Unavailable.
func (hs *hosted) open(ctx context.Context, v meta.VolumeID) (*owner, error) {
	return hs.openAs(ctx, v, cluster.VolumeActive, "")
}

// openAs takes a volume; the volume's row must have the given state. If from is not empty,
// openAs takes the volume from its owner at that address (see takeOver).
func (hs *hosted) openAs(ctx context.Context, v meta.VolumeID, state cluster.VolumeState, from string) (*owner, error) {
	for {
		if err := hs.unable.now(v); err != nil {
			return nil, err
		}
		hs.mu.Lock()
		if hs.stops() {
			hs.mu.Unlock()
			return nil, stopping("open volume", v)
		}
		op := hs.volumes[v]
		if op == nil {
			op = &opening{state: state, done: make(chan struct{}), gone: make(chan struct{})}
			hs.volumes[v] = op
			delete(hs.atRest, v)
			hs.wg.Go(func() {
				op.o, op.err = hs.opener.openOwner(v, state, from)
				if hs.unable.note(v, op.err) {
					op.err = hs.handOn(v, op.err)
				}
				hs.unable.tell(v, op.err)
				if op.err != nil {
					hs.mu.Lock()
					delete(hs.volumes, v)
					hs.mu.Unlock()
					close(op.gone)
				}
				close(op.done)
			})
		}
		hs.mu.Unlock()
		select {
		case <-op.done:
		case <-ctx.Done():
			return nil, meta.E("open volume", meta.Interrupted, fmt.Sprint(v), context.Cause(ctx))
		}
		// An open for another state may have failed where this call's state would not.
		if op.err != nil && op.state == state || op.err == nil && op.o.ctx.Err() == nil {
			return op.o, op.err
		}
		select {
		case <-op.gone: // the volume was lost: take it again
		case <-hs.ctx.Done():
			return nil, stopping("open volume", v)
		case <-ctx.Done():
			return nil, meta.E("open volume", meta.Interrupted, fmt.Sprint(v), context.Cause(ctx))
		}
	}
}

// errStopping is the cause of what a stopping server refuses.
var errStopping = errors.New("the server is stopping")

// stopping is the error for a volume that a stopping server does not open: the client looks
// for the volume's next owner.
func stopping(op string, v meta.VolumeID) error {
	return meta.E(op, meta.NotOwner, "", fmt.Errorf("volume %d: %w", v, errStopping))
}

// coming returns the opening of a volume being opened here, nil if none is.
func (hs *hosted) coming(v meta.VolumeID) *opening {
	hs.mu.Lock()
	op := hs.volumes[v]
	hs.mu.Unlock()
	if op == nil {
		return nil
	}
	select {
	case <-op.done:
		return nil
	default:
		return op
	}
}

// home returns the server that should serve a volume, and whether that is this server.
func (hs *hosted) home(v meta.VolumeID) (at cluster.MetaServer, mine bool) {
	view := hs.cfg.Cluster.View()
	if view != nil {
		for _, m := range cluster.Rank(v, view.MetaServers) {
			if !hs.leavers.has(m.Name) {
				return m, m.Name == hs.cfg.Name
			}
		}
	}
	return cluster.MetaServer{Name: hs.cfg.Name, Addr: hs.cfg.Addr}, true
}

// elsewhere is the error for a call about a volume that another server serves, or that is not
// served yet.
func (hs *hosted) elsewhere(v meta.VolumeID) error {
	at, mine := hs.home(v)
	if mine {
		at.Addr = ""
	}
	return meta.E("find owner", meta.NotOwner, at.Addr, fmt.Errorf("volume %d is not served by %s", v, hs.cfg.Name))
}

// ownerFor returns the owner of a volume here, opening the volume if its home is here. Errors:
// those of open; NotOwner names the server to ask.
func (hs *hosted) ownerFor(ctx context.Context, v meta.VolumeID) (*owner, error) {
	return hs.ownerAs(ctx, v, cluster.VolumeActive)
}

// ownerAs is ownerFor for a volume whose row must have the given state.
func (hs *hosted) ownerAs(ctx context.Context, v meta.VolumeID, state cluster.VolumeState) (*owner, error) {
	if o := hs.opened(v); o != nil && o.ctx.Err() == nil {
		return o.serving(state)
	}
	if op := hs.coming(v); op != nil && op.state == state {
		// A client sent here by the owner before waits here.
		select {
		case <-op.done:
			if op.err == nil {
				return op.o.serving(state)
			}
			return op.o, op.err
		case <-ctx.Done():
			return nil, meta.E("open volume", meta.Interrupted, fmt.Sprint(v), context.Cause(ctx))
		}
	}
	if _, mine := hs.home(v); mine {
		o, err := hs.openAs(ctx, v, state, "")
		if err != nil {
			return nil, err
		}
		return o.serving(state)
	}
	h, err := hs.cfg.Cluster.Holder(ctx, v)
	if err != nil {
		return nil, err
	}
	if h.Held && h.Name != hs.cfg.Name {
		return nil, meta.E("find owner", meta.NotOwner, h.Addr, fmt.Errorf("volume %d is owned by %s", v, h.Name))
	}
	return nil, hs.elsewhere(v)
}

// grant is how long a lease granted to a client now may last: no client's lease outlives this
// server's own lease at etcd by more than Grace. Zero: no lease may be granted.
func (hs *hosted) grant() time.Duration {
	if hs.cfg.Unsafe.NoLease {
		return hs.cfg.SessionTTL
	}
	left := hs.cfg.Cluster.Standing()
	if left <= 0 {
		return 0
	}
	return min(hs.cfg.SessionTTL, left+hs.cfg.Grace)
}

// LeaseLost gives up every volume owned under a lease that is over. The caller must not take
// volumes under a new lease before LeaseLost returns.
func (hs *hosted) LeaseLost() {
	for _, o := range hs.owners() {
		if o.outsideLease() {
			o.lose(errLeaseLost)
		}
	}
}

var errLeaseLost = errors.New("the lease that the right to serve hangs on was lost")

// forget takes an owner that no longer serves off the list.
func (hs *hosted) forget(o *owner) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if op := hs.volumes[o.vol]; op != nil && op.o == o {
		delete(hs.volumes, o.vol)
		close(op.gone)
	}
}

// retire ends an owner after its sessions were sent to another server.
func (hs *hosted) retire(o *owner) {
	if err := o.closeStore(); err != nil {
		o.log.Warn("the store of a volume was closed with an error", "error", err)
	}
	hs.forget(o)
	hs.goHome()
}

// goHome wakes homeLoop.
func (hs *hosted) goHome() {
	select {
	case hs.homeWake <- struct{}{}:
	default:
	}
}

const (
	// homeLook is how often homeLoop tries again to bring volumes home.
	homeLook = 250 * time.Millisecond
	// homeWorkers bounds the volumes being taken at once.
	homeWorkers = 4
)

// homeLoop opens the volumes with their home here that the owner before did not release, and
// asks other owners for theirs.
func (hs *hosted) homeLoop() {
	var servers []cluster.MetaServer
	changed := time.Now()
	var again bool
	for {
		next := hs.cfg.Cluster.Changed()
		view := hs.cfg.Cluster.View()
		if view != nil {
			if !slices.Equal(servers, view.MetaServers) {
				servers, changed = view.MetaServers, time.Now()
				hs.mu.Lock()
				clear(hs.atRest)
				hs.mu.Unlock()
				hs.leavers.forget(servers)
				hs.peers.tellMetas()
			}
			again = hs.bringHome(view, time.Since(changed) >= hs.cfg.HomeAfter)
		}
		var poll <-chan time.Time
		if again || time.Since(changed) < hs.cfg.HomeAfter {
			poll = time.After(homeLook)
		}
		select {
		case <-hs.ctx.Done():
			return
		case <-poll:
		case <-next:
		case <-hs.homeWake:
		}
	}
}

// bringHome tries to open the volumes with their home here. again: some volumes need another
// try soon.
func (hs *hosted) bringHome(view *cluster.View, calm bool) (again bool) {
	if !slices.ContainsFunc(view.MetaServers, func(m cluster.MetaServer) bool { return m.Name == hs.cfg.Name }) {
		return false // this server has not joined yet, or is stopping
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	slots := make(chan struct{}, homeWorkers)
	for _, v := range view.Volumes {
		if v.State == cluster.VolumeTrash || hs.rests(v) || cluster.Rank(v.ID, view.MetaServers)[0].Name != hs.cfg.Name {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			bring := hs.bringOneHome
			if v.State == cluster.VolumeDeleting {
				bring = hs.finishDeletion
			}
			later, rests := bring(v, calm)
			if rests {
				hs.letRest(v.ID)
			}
			mu.Lock()
			again = again || later
			mu.Unlock()
		})
	}
	wg.Wait()
	return again
}

// rests reports whether homeLoop need not try to open a volume: the volume is open or at rest.
func (hs *hosted) rests(v cluster.Volume) bool {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if op := hs.volumes[v.ID]; op != nil {
		select {
		case <-op.done:
			return op.o != nil
		default:
		}
	}
	return hs.atRest[v.ID] && v.State != cluster.VolumeDeleting
}

// letRest notes that a volume is closed, so that homeLoop leaves it alone.
func (hs *hosted) letRest(v meta.VolumeID) {
	hs.mu.Lock()
	defer hs.mu.Unlock()
	if hs.volumes[v] == nil {
		hs.atRest[v] = true
	}
}

// finishDeletion continues a deletion that a server left unfinished when it went away.
func (hs *hosted) finishDeletion(v cluster.Volume, calm bool) (again, rests bool) {
	if !calm {
		return true, false
	}
	err := hs.trash.deleteVolume(hs.ctx, v, deletion{now: true})
	if err != nil && hs.ctx.Err() == nil && !errors.Is(err, meta.NoSuchVolume) {
		hs.log.Info("a volume's deletion is not finished yet", "volume", v.ID, "error", err)
		return true, false
	}
	return false, false
}

func (hs *hosted) bringOneHome(row cluster.Volume, calm bool) (again, rests bool) {
	v := row.ID
	if hs.coming(v) != nil || hs.unable.now(v) != nil {
		return true, false
	}
	ctx, cancel := context.WithTimeout(hs.ctx, 5*time.Second)
	defer cancel()
	h, err := hs.cfg.Cluster.Holder(ctx, v)
	switch {
	case err != nil:
		return hs.ctx.Err() == nil, false
	case h.Held && h.Name == hs.cfg.Name:
		// The holder is an earlier process with our name: open waits until its lease ends or
		// the process is known dead.
		_, err := hs.open(ctx, v)
		return err != nil, false
	case h.Held:
		if !calm {
			return true, false
		}
		if hs.room.roomless.rests(roomlessRest) {
			return false, false // roomlessLoop wakes homeLoop
		}
		if _, warm := hs.standbys.position(v); !warm && hs.cfg.Followers > 0 {
			return true, false
		}
		if _, err := hs.openAs(ctx, v, cluster.VolumeActive, h.Addr); err != nil {
			hs.log.Info("a volume does not come home yet", "volume", v, "owner", h.Name, "error", err)
			return true, false
		}
		return false, false
	case h.Released && v != meta.RootVolume:
		// A released volume is opened when a client asks for it. If the owner stopped with
		// entries in no checkpoint, this server makes the checkpoint now, and closes the
		// volume again.
		if row.State != cluster.VolumeActive {
			return false, true
		}
		if behind, err := hs.behindJournal(ctx, v); err != nil || !behind {
			return err != nil && hs.ctx.Err() == nil, err == nil
		}
	}
	if _, err := hs.open(ctx, v); err != nil {
		if hs.ctx.Err() == nil {
			hs.log.Warn("a volume with its home here could not be opened", "volume", v, "error", err)
		}
		return !errors.Is(err, meta.NoSuchVolume), false
	}
	return false, false
}

// openHome opens the volumes in one of the states with their home here until ctx ends. closed
// is the number of volumes that could not be opened, without volumes that another server owns.
func (hs *hosted) openHome(ctx context.Context, states ...cluster.VolumeState) (closed int, err error) {
	all, err := hs.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return 0, err
	}
	var wg sync.WaitGroup
	var not atomic.Int64
	slots := make(chan struct{}, homeWorkers)
	for _, v := range all {
		if _, mine := hs.home(v.ID); !mine || !slices.Contains(states, v.State) || hs.opened(v.ID) != nil {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if ctx.Err() != nil {
				not.Add(1)
				return
			}
			_, err := hs.openAs(ctx, v.ID, v.State, "")
			if errors.Is(err, meta.NoSuchVolume) {
				// The volume was deleted meanwhile, or moved into the trash or out of it: then its
				// chunks still count.
				if x, rerr := hs.cfg.Cluster.Volume(ctx, v.ID); errors.Is(rerr, meta.NoSuchVolume) || rerr == nil && !slices.Contains(states, x.State) {
					return
				}
			}
			if err != nil && !errors.Is(err, meta.NotOwner) {
				not.Add(1)
				hs.log.Info("how a volume's chunks stand is not known yet", "volume", v.Name, "error", err)
			}
		})
	}
	wg.Wait()
	return int(not.Load()), nil
}

// handOn asks other servers to take a volume that could not be opened here. It returns the
// error for the requester: NotOwner with the new owner's address, or why if no server takes
// the volume.
func (hs *hosted) handOn(v meta.VolumeID, why error) error {
	view := hs.cfg.Cluster.View()
	if view == nil || hs.ctx.Err() != nil {
		return why
	}
	for _, m := range cluster.Rank(v, view.MetaServers) {
		if m.Name == hs.cfg.Name || hs.leavers.has(m.Name) {
			continue
		}
		ask, cancel := context.WithTimeoutCause(hs.ctx, handOverWait+time.Second, errors.New("the server did not take the volume in time"))
		re, err := hs.peers.askPeer(ask, m.Addr, &wire.Admin{Op: wire.AdminTake, Volume: v})
		cancel()
		if err == nil {
			err = re.Status.Error()
		}
		if err == nil {
			hs.log.Warn("a volume can't be opened here, and is served elsewhere", "volume", v, "server", m.Name, "error", why)
			return meta.E("open volume", meta.NotOwner, m.Addr, why)
		}
		hs.log.Info("a server did not take a volume that can't be opened here", "volume", v, "server", m.Name, "error", err)
	}
	hs.log.Error("a volume can't be opened here, and no other server takes it: no server serves the volume", "volume", v, "error", why)
	return why
}

// ownerOfMember is ownerFor, but also accepts a volume in the trash, since such a volume may
// be restored with its snapshots. Errors: those of ownerFor; NoSuchVolume only if the volume
// is deleted for good; Busy if the volume keeps changing its state.
func (hs *hosted) ownerOfMember(ctx context.Context, v meta.VolumeID) (*owner, error) {
	for range 4 {
		row, err := hs.cfg.Cluster.Volume(ctx, v)
		if err != nil {
			return nil, err
		}
		if row.State == cluster.VolumeDeleting {
			return nil, meta.E("delete group", meta.NoSuchVolume, row.Name, fmt.Errorf("it is %s", row.State))
		}
		o, err := hs.ownerAs(ctx, v, row.State)
		if !errors.Is(err, meta.NoSuchVolume) {
			return o, err
		}
	}
	return nil, meta.E("delete group", meta.Busy, fmt.Sprint(v), errors.New("the volume goes to the trash and comes back: try again"))
}
