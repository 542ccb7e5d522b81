package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Which server serves which volume. Every volume has a home among the servers
// that live, by rendezvous hashing (cluster.Rank). Its home opens it when a
// client asks for it, or at once if the owner before did not release it; a
// volume that is owned elsewhere its home asks for, once its own copy is warm.
// Nobody else opens it, so a server that is asked for a volume either is its
// owner, or becomes it, or names who to ask. Views differ for a moment when
// servers come and go; only the transaction at etcd decides.

// opening is a volume that is open, being opened or being left.
type opening struct {
	state cluster.VolumeState // that its row must have
	done  chan struct{}       // o and err are set
	o     *owner
	err   error
	gone  chan struct{} // it is off the list
}

// opened returns the owner of a volume that is served here, without waiting.
func (s *Server) opened(v meta.VolumeID) *owner {
	s.mu.Lock()
	op := s.volumes[v]
	s.mu.Unlock()
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

// owners lists the volumes that are open here.
func (s *Server) owners() (all []*owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, op := range s.volumes {
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

// open takes a volume, or waits for who does. Errors: NoSuchVolume (or it is
// being deleted), NotOwner (the subject is the owner's address), Unavailable.
func (s *Server) open(ctx context.Context, v meta.VolumeID) (*owner, error) {
	return s.openAs(ctx, v, cluster.VolumeActive, "")
}

// openAs takes a volume whose row must have this state; if from is not empty,
// from its owner there (see takeOver).
func (s *Server) openAs(ctx context.Context, v meta.VolumeID, state cluster.VolumeState, from string) (*owner, error) {
	for {
		if err := s.unable.now(v); err != nil {
			return nil, err
		}
		s.mu.Lock()
		if s.closing {
			s.mu.Unlock()
			return nil, stopping("open volume", v)
		}
		op := s.volumes[v]
		if op == nil {
			op = &opening{state: state, done: make(chan struct{}), gone: make(chan struct{})}
			s.volumes[v] = op
			delete(s.atRest, v)
			s.wg.Go(func() {
				op.o, op.err = s.openOwner(v, state, from)
				if s.unable.note(v, op.err) {
					op.err = s.handOn(v, op.err)
				}
				s.unable.tell(v, op.err)
				if op.err != nil {
					s.mu.Lock()
					delete(s.volumes, v)
					s.mu.Unlock()
					close(op.gone)
				}
				close(op.done)
			})
		}
		s.mu.Unlock()
		select {
		case <-op.done:
		case <-ctx.Done():
			return nil, meta.E("open volume", meta.Interrupted, fmt.Sprint(v), context.Cause(ctx))
		}
		// Who wanted it in another state may have been refused where this is not.
		if op.err != nil && op.state == state || op.err == nil && op.o.ctx.Err() == nil {
			return op.o, op.err
		}
		select {
		case <-op.gone: // it was lost: take it again
		case <-s.ctx.Done():
			return nil, stopping("open volume", v)
		case <-ctx.Done():
			return nil, meta.E("open volume", meta.Interrupted, fmt.Sprint(v), context.Cause(ctx))
		}
	}
}

func stopping(op string, v meta.VolumeID) error {
	return meta.E(op, meta.Unavailable, fmt.Sprint(v), errors.New("the server is stopping"))
}

// coming returns a volume that is being opened here, nil if none is.
func (s *Server) coming(v meta.VolumeID) *opening {
	s.mu.Lock()
	op := s.volumes[v]
	s.mu.Unlock()
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

// home tells where a volume should be served.
func (s *Server) home(v meta.VolumeID) (at cluster.MetaServer, mine bool) {
	view := s.cfg.Cluster.View()
	if view != nil {
		for _, m := range cluster.Rank(v, view.MetaServers) {
			if !s.leavers.has(m.Name) {
				return m, m.Name == s.cfg.Name
			}
		}
	}
	return cluster.MetaServer{Name: s.cfg.Name, Addr: s.cfg.Addr}, true
}

// elsewhere is the error for who asks here for a volume that is served at
// another place, or not yet.
func (s *Server) elsewhere(v meta.VolumeID) error {
	at, mine := s.home(v)
	if mine {
		at.Addr = ""
	}
	return meta.E("find owner", meta.NotOwner, at.Addr, fmt.Errorf("volume %d is not served by %s", v, s.cfg.Name))
}

// ownerFor finds or makes the owner of a volume here. Errors: those of open;
// NotOwner names who to ask.
func (s *Server) ownerFor(ctx context.Context, v meta.VolumeID) (*owner, error) {
	return s.ownerAs(ctx, v, cluster.VolumeActive)
}

// ownerAs is ownerFor of a volume whose row must have this state.
func (s *Server) ownerAs(ctx context.Context, v meta.VolumeID, state cluster.VolumeState) (*owner, error) {
	if o := s.opened(v); o != nil && o.ctx.Err() == nil {
		return o.serving(state)
	}
	if op := s.coming(v); op != nil && op.state == state {
		// Who was sent here by the owner before waits here.
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
	if _, mine := s.home(v); mine {
		o, err := s.openAs(ctx, v, state, "")
		if err != nil {
			return nil, err
		}
		return o.serving(state)
	}
	h, err := s.cfg.Cluster.Holder(ctx, v)
	if err != nil {
		return nil, err
	}
	if h.Held && h.Name != s.cfg.Name {
		return nil, meta.E("find owner", meta.NotOwner, h.Addr, fmt.Errorf("volume %d is owned by %s", v, h.Name))
	}
	return nil, s.elsewhere(v)
}

// grant is the lease that a client may get now: none may outlive this server's
// own lease at etcd by more than Grace.
func (s *Server) grant() time.Duration {
	if s.cfg.Unsafe.NoLease {
		return s.cfg.SessionTTL
	}
	left := s.cfg.Cluster.Standing()
	if left <= 0 {
		return 0
	}
	return min(s.cfg.SessionTTL, left+s.cfg.Grace)
}

// LeaseLost gives up every volume that hangs on a lease which is over. Nothing
// may hang on a new one before.
func (s *Server) LeaseLost() {
	for _, o := range s.owners() {
		if o.outsideLease() {
			o.lose(errLeaseLost)
		}
	}
}

var errLeaseLost = errors.New("the lease that the right to serve hangs on was lost")

// forget takes an owner that serves no more off the list.
func (s *Server) forget(o *owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if op := s.volumes[o.vol]; op != nil && op.o == o {
		delete(s.volumes, o.vol)
		close(op.gone)
	}
}

// retire ends an owner that told its sessions to go elsewhere.
func (s *Server) retire(o *owner) {
	if err := o.closeStore(); err != nil {
		o.log.Warn("closing the store", "error", err)
	}
	s.forget(o)
	s.goHome()
}

// goHome wakes homeLoop.
func (s *Server) goHome() {
	select {
	case s.homeWake <- struct{}{}:
	default:
	}
}

const (
	// homeLook is how often volumes that are not at home yet are looked at again.
	homeLook = 250 * time.Millisecond
	// homeWorkers bound the volumes being taken at once.
	homeWorkers = 4
)

// homeLoop opens the volumes whose home this is and which the owner before did
// not release, and asks for those that are owned elsewhere.
func (s *Server) homeLoop() {
	var servers []cluster.MetaServer
	changed := time.Now()
	var again bool
	for {
		next := s.cfg.Cluster.Changed()
		view := s.cfg.Cluster.View()
		if view != nil {
			if !slices.Equal(servers, view.MetaServers) {
				servers, changed = view.MetaServers, time.Now()
				s.mu.Lock()
				clear(s.atRest)
				s.mu.Unlock()
				s.leavers.forget(servers)
				s.tellMetas()
			}
			again = s.bringHome(view, time.Since(changed) >= s.cfg.HomeAfter)
		}
		var poll <-chan time.Time
		if again || time.Since(changed) < s.cfg.HomeAfter {
			poll = time.After(homeLook)
		}
		select {
		case <-s.ctx.Done():
			return
		case <-poll:
		case <-next:
		case <-s.homeWake:
		}
	}
}

// takeKeys takes the cluster's capability keys when they were rotated, and gives
// them to the chunk servers before anything is signed with the new one; with
// them goes who was evicted, whose connections the chunk servers end.
func (s *Server) takeKeys(view *cluster.View) {
	keys, evicted := view.CapKeys, view.AllEvicted()
	if len(keys) == 0 {
		return
	}
	s.mu.Lock()
	rotated := !slices.EqualFunc(s.keys, keys, func(a, b meta.CapKey) bool { return a.ID == b.ID })
	same := !rotated && slices.Equal(s.evicted, evicted)
	s.evicted = evicted
	if !same {
		for _, l := range s.links {
			l.send.Enqueue(0, &wire.Order{Order: meta.Order{Kind: meta.OrderKeys, Keys: keys, Evicted: evicted}})
			go l.send.Flush()
		}
	}
	if rotated {
		// The newest signs in a while (signKey): until then even a chunk server that is
		// slow to take them knows what it is shown.
		s.keys, s.keysAt = slices.Clone(keys), time.Now()
	}
	s.mu.Unlock()
	if rotated {
		s.log.Info("capability keys were rotated", "newest", keys[len(keys)-1].ID)
	}
}

// bringHome looks at the volumes whose home this is. again: some are to be
// looked at soon.
func (s *Server) bringHome(view *cluster.View, calm bool) (again bool) {
	if !slices.ContainsFunc(view.MetaServers, func(m cluster.MetaServer) bool { return m.Name == s.cfg.Name }) {
		return false // not here yet, or stopping
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	slots := make(chan struct{}, homeWorkers)
	for _, v := range view.Volumes {
		if v.State == cluster.VolumeTrash || s.rests(v) || cluster.Rank(v.ID, view.MetaServers)[0].Name != s.cfg.Name {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			bring := s.bringOneHome
			if v.State == cluster.VolumeDeleting {
				bring = s.finishDeletion
			}
			later, rests := bring(v, calm)
			if rests {
				s.letRest(v.ID)
			}
			mu.Lock()
			again = again || later
			mu.Unlock()
		})
	}
	wg.Wait()
	return again
}

// rests: homeLoop need not look at the volume.
func (s *Server) rests(v cluster.Volume) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if op := s.volumes[v.ID]; op != nil {
		select {
		case <-op.done:
			return op.o != nil
		default:
		}
	}
	return s.atRest[v.ID] && v.State != cluster.VolumeDeleting
}

// letRest notes that a volume is closed.
func (s *Server) letRest(v meta.VolumeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.volumes[v] == nil {
		s.atRest[v] = true
	}
}

// finishDeletion goes on where a server that is gone left off.
func (s *Server) finishDeletion(v cluster.Volume, calm bool) (again, rests bool) {
	if !calm {
		return true, false
	}
	err := s.deleteVolume(s.ctx, v, wire.VolumeDeletion{Now: true})
	if err != nil && s.ctx.Err() == nil && !errors.Is(err, meta.NoSuchVolume) {
		s.log.Info("a volume's deletion is not finished yet", "volume", v.ID, "error", err)
		return true, false
	}
	return false, false
}

func (s *Server) bringOneHome(row cluster.Volume, calm bool) (again, rests bool) {
	v := row.ID
	if s.coming(v) != nil || s.unable.now(v) != nil {
		return true, false
	}
	ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
	defer cancel()
	h, err := s.cfg.Cluster.Holder(ctx, v)
	switch {
	case err != nil:
		return s.ctx.Err() == nil, false
	case h.Held && h.Name == s.cfg.Name:
		// By what ran under our name before: its lease ends, or it is known dead.
		_, err := s.open(ctx, v)
		return err != nil, false
	case h.Held:
		if !calm {
			return true, false
		}
		if s.roomless.rests(roomlessRest) {
			return false, false // roomlessLoop wakes homeLoop
		}
		if _, warm := s.standbys.position(v); !warm && s.cfg.Followers > 0 {
			return true, false
		}
		if _, err := s.openAs(ctx, v, cluster.VolumeActive, h.Addr); err != nil {
			s.log.Info("a volume does not come home yet", "volume", v, "owner", h.Name, "error", err)
			return true, false
		}
		return false, false
	case h.Released && v != meta.RootVolume:
		// Until somebody wants it, unless its owner stopped with entries in no checkpoint:
		// the next one makes that, and closes the volume again.
		if row.State != cluster.VolumeActive {
			return false, true
		}
		if behind, err := s.behindJournal(ctx, v); err != nil || !behind {
			return err != nil && s.ctx.Err() == nil, err == nil
		}
	}
	if _, err := s.open(ctx, v); err != nil {
		if s.ctx.Err() == nil {
			s.log.Warn("a volume whose home this is could not be opened", "volume", v, "error", err)
		}
		return !errors.Is(err, meta.NoSuchVolume), false
	}
	return false, false
}

// metaList is what sessions and chunk servers are told of meta servers.
func (s *Server) metaList() *wire.Metas {
	m := &wire.Metas{}
	if view := s.cfg.Cluster.View(); view != nil {
		for _, x := range view.MetaServers {
			m.Servers = append(m.Servers, wire.MetaServer{Name: x.Name, Addr: x.Addr})
		}
	}
	return m
}

// tellMetas sends the list to everybody who is connected.
func (s *Server) tellMetas() {
	m := s.metaList()
	s.mu.Lock()
	var sessions []*session
	for _, sess := range s.sessions {
		sessions = append(sessions, sess)
	}
	var senders []*wire.Sender
	for _, l := range s.links {
		senders = append(senders, l.send)
	}
	s.mu.Unlock()
	for _, sess := range sessions {
		sess.enqueue(0, m)
		go sess.flush()
	}
	for _, snd := range senders {
		snd.Enqueue(0, m)
		go snd.Flush()
	}
}

// servePeer answers another meta server's requests, one after the other.
func (s *Server) servePeer(conn net.Conn, rd *wire.Reader, v uint8, who *session) {
	for {
		t, id, body, err := rd.Next()
		if err != nil || t != wire.TAdmin || maySend(who.who, t) != nil {
			return
		}
		m := new(wire.Admin)
		if wire.Decode(body, m) != nil {
			return
		}
		frame, err := wire.Encode(nil, v, id, s.admin(s.ctx, who, m))
		if err != nil {
			frame = wire.Append(nil, v, id, &wire.AdminRe{Status: wire.StatusOf(err)})
		}
		if _, err := conn.Write(frame); err != nil {
			return
		}
	}
}

// askPeer asks another meta server. Errors: Unavailable, AccessDenied.
func (s *Server) askPeer(ctx context.Context, addr string, m *wire.Admin) (*wire.AdminRe, error) {
	conn, err := peering.Dial(ctx, addr, s.cfg.Creds, peering.Meta)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	hello := wire.Hello{Min: wire.Version, Max: wire.Version, Role: wire.RolePeer, Name: s.cfg.Name, Cluster: s.cfg.Cluster.ID()}
	rd := wire.NewReader(conn)
	ask := wire.Append(nil, wire.Version, 0, &hello)
	var ans wire.Hello
	var re wire.AdminRe
	for i, into := range []wire.Message{&ans, &re} {
		if _, err := conn.Write(ask); err != nil {
			return nil, meta.E("ask server", meta.Unavailable, addr, err)
		}
		t, _, body, err := rd.Next()
		if err != nil {
			return nil, meta.E("ask server", meta.Unavailable, addr, err)
		}
		if want := []wire.Type{wire.THello, wire.TAdminRe}[i]; t != want {
			return nil, meta.E("ask server", meta.Protocol, addr, fmt.Errorf("frame type %d", t))
		}
		if err := wire.Decode(body, into); err != nil {
			return nil, err
		}
		if ans.Err != meta.KindOK {
			return nil, meta.E("ask server", ans.Err, addr, errors.New(ans.Detail))
		}
		if i == 0 {
			v, ok := wire.Negotiate(&ans)
			if !ok {
				return nil, meta.E("ask server", meta.Version, addr, fmt.Errorf("the server speaks protocol versions %d to %d, this server speaks version %d", ans.Min, ans.Max, wire.Version))
			}
			rd.Trust()
			if ask, err = wire.Encode(nil, v, 1, m); err != nil {
				return nil, err
			}
		}
	}
	return &re, nil
}
