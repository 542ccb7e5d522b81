package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// Permissions. Three tables, each with a row for every frame, request or operation. The
// program does not build if the newest frame or request has no row, and a test finds older
// missing rows. Only this file reads the tables. A process of this machine's administrator (a
// Unix socket), and any caller on loopback with --insecure, may speak as any role.

// frameRule says which roles may send a frame.
type frameRule struct {
	roles []peering.Role
	// right is the right needed on the volume named by the frame; TCall and TBatch need the
	// rights of their operations. NoRights: the frame names no volume, or only gives something
	// back.
	right cluster.Rights
}

var (
	users    = []peering.Role{peering.Client, peering.Gateway, peering.Admin}
	admins   = []peering.Role{peering.Admin, peering.Meta} // meta servers pass requests on
	members  = []peering.Role{peering.Client, peering.Gateway, peering.Admin, peering.ChunkServer, peering.Meta}
	storage  = []peering.Role{peering.ChunkServer}
	nobody   = []peering.Role{} // only servers send the frame: from a client, a protocol error
	everyone = members
)

var frameRules = [...]frameRule{
	wire.THello:       {roles: everyone}, // once, as the first frame: see connection
	wire.TCall:        {roles: users},
	wire.TReply:       {roles: nobody},
	wire.TBatch:       {roles: users},
	wire.TBatchRe:     {roles: nobody},
	wire.TSync:        {roles: users, right: cluster.ReadRights},
	wire.TDurable:     {roles: nobody},
	wire.TRecall:      {roles: nobody},
	wire.TRecalled:    {roles: users},
	wire.TDrop:        {roles: users},
	wire.TKeepAlive:   {roles: members},
	wire.TAlloc:       {roles: users, right: cluster.WriteRights},
	wire.TGrants:      {roles: nobody},
	wire.TSeal:        {roles: users, right: cluster.WriteRights},
	wire.TLock:        {roles: users, right: cluster.ReadRights}, // a write lock: WriteRights
	wire.TLockRe:      {roles: nobody},
	wire.TCancel:      {roles: users},
	wire.TAdmin:       {roles: members}, // see adminRules
	wire.TAdminRe:     {roles: nobody},
	wire.TReport:      {roles: storage},
	wire.TOrder:       {roles: nobody},
	wire.TOrderRe:     {roles: storage},
	wire.TClaim:       {roles: users, right: cluster.ReadRights},
	wire.TBye:         {roles: members},
	wire.TCaps:        {roles: users, right: cluster.ReadRights},
	wire.TCapsRe:      {roles: nobody},
	wire.TServers:     {roles: nobody},
	wire.TReported:    {roles: nobody},
	wire.TTrouble:     {roles: users, right: cluster.ReadRights},
	wire.TGaveUp:      {roles: users, right: cluster.ReadRights},
	wire.TEnter:       {roles: users, right: cluster.ReadRights},
	wire.TEntered:     {roles: nobody},
	wire.TBack:        {roles: users},
	wire.TMoved:       {roles: nobody},
	wire.TMetas:       {roles: nobody},
	wire.TReserve:     {roles: users, right: cluster.WriteRights},
	wire.TReserved:    {roles: nobody},
	wire.TQuota:       {roles: nobody},
	wire.TPolicy:      {roles: nobody},
	wire.TPolicyTaken: {roles: users},
	wire.TGrowth:      {roles: nobody},
	wire.TGrowthRe:    {roles: users},
}

var _ [wire.Types]struct{} = [len(frameRules)]struct{}{}

// adminRule says which callers may make an administrative request: holders of certificates of
// roles, and, if right is set, clients with that right on each volume named.
type adminRule struct {
	roles []peering.Role
	right cluster.Rights
}

var adminRules = [...]adminRule{
	wire.AdminVolumeByName: {roles: admins, right: cluster.ReadRights},
	wire.AdminHandOver:     {roles: admins},
	wire.AdminJoin:         {roles: nobody}, // strangers only: see stranger
	wire.AdminPathOf:       {roles: []peering.Role{peering.Meta}},
	wire.AdminTake:         {roles: []peering.Role{peering.Meta}},

	wire.AdminViews:          {roles: admins, right: cluster.ReadRights},
	wire.AdminTakeTarget:     {roles: admins, right: cluster.AdminRights},
	wire.AdminRollBackTarget: {roles: admins, right: cluster.AdminRights},
	wire.AdminShowTarget:     {roles: admins, right: cluster.AdminRights},

	wire.AdminCloneSettle: {roles: []peering.Role{peering.Meta}},
	wire.AdminChunkPlaces: {roles: []peering.Role{peering.Meta}},
}

var _ [wire.AdminOps]struct{} = [len(adminRules)]struct{}{}

// opRights are the rights that operations need on their volumes. Clients may not send
// operations without an entry.
var opRights = map[meta.OpCode]cluster.Rights{
	meta.OpLookup:    cluster.ReadRights,
	meta.OpGetAttr:   cluster.ReadRights,
	meta.OpReadDir:   cluster.ReadRights,
	meta.OpReadLink:  cluster.ReadRights,
	meta.OpGetXattr:  cluster.ReadRights,
	meta.OpListXattr: cluster.ReadRights,
	meta.OpOpen:      cluster.ReadRights,
	meta.OpStatFS:    cluster.ReadRights,
	meta.OpSeek:      cluster.ReadRights,
	meta.OpLeader:    cluster.ReadRights,
	// The session gives up descriptors of unlinked files; a session may hold descriptors with
	// read rights alone.
	meta.OpReleaseOrphans: cluster.ReadRights,
	meta.OpCreate:         cluster.WriteRights,
	meta.OpTmpfile:        cluster.WriteRights,
	meta.OpLink:           cluster.WriteRights,
	meta.OpUnlink:         cluster.WriteRights,
	meta.OpRename:         cluster.WriteRights,
	meta.OpSetAttr:        cluster.WriteRights,
	meta.OpWrite:          cluster.WriteRights,
	meta.OpFallocate:      cluster.WriteRights,
	meta.OpCopyRange:      cluster.WriteRights,
	meta.OpSetXattr:       cluster.WriteRights,
	meta.OpRemoveXattr:    cluster.WriteRights,
	meta.OpClosed:         cluster.WriteRights,
	meta.OpLead:           cluster.WriteRights,
	meta.OpEndLead:        cluster.WriteRights,
}

// roleOf says which certificates may speak as a role of the protocol.
var roleOf = map[wire.Role][]peering.Role{
	wire.RoleClient:      users,
	wire.RoleChunkServer: storage,
	wire.RoleAdmin:       admins,
	wire.RolePeer:        {peering.Meta},
	wire.RoleEnrol:       members, // of a session that may make no request
}

// maySpeak refuses a hello as a role not allowed by the peer's certificate.
func maySpeak(who peering.Identity, as wire.Role) error {
	roles, known := roleOf[as]
	if !known {
		return meta.E("hello", meta.Protocol, who.String(), fmt.Errorf("role %d", as))
	}
	if who.Anyone() || slices.Contains(roles, who.Role) {
		return nil
	}
	return meta.E("hello", meta.AccessDenied, who.String(), errors.New("its certificate is of another role"))
}

// maySend refuses a frame of a type that the peer's role may not send.
func maySend(who peering.Identity, t wire.Type) error {
	if int(t) >= len(frameRules) || frameRules[t].roles == nil || len(frameRules[t].roles) == 0 {
		return meta.E("read frame", meta.Protocol, who.String(), fmt.Errorf("frame type %d from a client", t))
	}
	if who.Anyone() || slices.Contains(frameRules[t].roles, who.Role) {
		return nil
	}
	return meta.E("authorize", meta.AccessDenied, who.String(), fmt.Errorf("it may not send frames of type %d", t))
}

// refusal is the error and the answer for an unauthorized frame.
type refusal struct {
	cause  error
	answer wire.Message // nil: the frame has no answer
}

func (r *refusal) Error() string { return r.cause.Error() }

// take decodes a frame's body, authorizes the frame and maps its user IDs. Only take checks a
// session's rights on volumes. Errors: *refusal, Protocol.
func (s *session) take(body wire.Body, m wire.Message) error {
	if err := wire.Decode(body, m); err != nil {
		return err
	}
	return s.allow(m)
}

// allow authorizes a decoded frame, and maps user IDs. Errors: *refusal.
func (s *session) allow(m wire.Message) error {
	if s.who.Anyone() || s.who.Role == peering.Admin {
		return nil
	}
	right := func(t wire.Type) cluster.Rights { return frameRules[t].right }
	var err error
	var re wire.Message
	switch m := m.(type) {
	case *wire.Call:
		if err = s.authorizeCall(m); err != nil {
			re = &wire.Reply{Status: wire.StatusOf(err)}
		}
	case *wire.Batch:
		for i := range m.Calls {
			if err = s.authorizeCall(&m.Calls[i]); err != nil {
				re = &wire.Reply{Status: wire.StatusOf(err)}
				break
			}
		}
	case *wire.Sync:
		if err = s.authorize(m.Volume, right(wire.TSync)); err != nil {
			re = &wire.Reply{Status: wire.StatusOf(err)}
		}
	case *wire.Alloc:
		if err = s.authorize(m.Volume, right(wire.TAlloc)); err != nil {
			re = &wire.Grants{Status: wire.StatusOf(err)}
		}
	case *wire.Seal:
		if err = s.authorize(m.Chunk.Volume, right(wire.TSeal)); err != nil {
			re = &wire.Reply{Status: wire.StatusOf(err)}
		}
	case *wire.Lock:
		need := right(wire.TLock)
		if m.Lock.Type == meta.LockWrite && !m.Test && !m.DropOwner {
			need = cluster.WriteRights
		}
		if m.Lock.Ino == meta.MirrorLock {
			need = cluster.AdminRights
		}
		if err = s.authorize(m.Volume, need); err != nil {
			re = &wire.LockRe{Status: wire.StatusOf(err)}
		}
	case *wire.Caps:
		need := right(wire.TCaps)
		if !m.Chunk.IsZero() && m.Chunk.Volume == m.Volume {
			need = cluster.WriteRights
		}
		if err = s.authorize(m.Volume, need); err != nil {
			re = &wire.CapsRe{Status: wire.StatusOf(err)}
		}
	case *wire.Claim:
		if err = s.authorize(m.Volume, right(wire.TClaim)); err == nil && s.authorize(m.Volume, cluster.WriteRights) != nil {
			for i := range m.Leases {
				m.Leases[i].Mode = min(m.Leases[i].Mode, meta.LeaseShared)
			}
		}
		if err == nil && s.authorize(m.Volume, cluster.AdminRights) != nil {
			m.Locks = slices.DeleteFunc(m.Locks, func(l meta.Lock) bool { return l.Ino == meta.MirrorLock })
		}
	case *wire.Enter:
		// refusedStill checks a refusal by an old view again.
		if err = s.enough(s.access(m.Volume), m.Volume, right(wire.TEnter)); err != nil {
			re = &wire.Entered{Status: wire.StatusOf(err)}
		}
	case *wire.Reserve:
		if err = s.authorize(m.Volume, right(wire.TReserve)); err != nil {
			re = &wire.Reserved{Status: wire.StatusOf(err)}
			if m.Claim {
				re = nil
			}
		}
	case *wire.Trouble:
		err = s.authorize(m.Volume, right(wire.TTrouble))
	case *wire.GaveUp:
		err = s.authorize(m.Volume, right(wire.TGaveUp))
	}
	if err != nil {
		return &refusal{err, re}
	}
	return nil
}

// authorizeCall checks an operation and maps its user IDs.
func (s *session) authorizeCall(c *wire.Call) error {
	need, known := opRights[c.Op.Code()]
	if !known {
		return meta.E("authorize", meta.NotPermitted, s.who.String(), fmt.Errorf("operation %d is not a client's", c.Op.Code()))
	}
	a, err := s.accessFor(c.Volume, need)
	if err != nil {
		return err
	}
	if a.Rights < cluster.WriteRights {
		// A session without write rights must not keep other sessions from writing.
		c.Want = min(c.Want, meta.LeaseShared)
	}
	c.Op = a.MapOp(c.Op)
	return nil
}

// authorize refuses a frame if the session's identity lacks the right need on the volume.
// Errors: AccessDenied, ReadOnly.
func (s *session) authorize(v meta.VolumeID, need cluster.Rights) error {
	if need == cluster.NoRights || s.who.Anyone() || s.who.Role == peering.Admin {
		return nil
	}
	_, err := s.accessFor(v, need)
	return err
}

// accessFor returns the session's access to a volume if the access includes need. Before a
// refusal accessFor may read the view again, for a grant made a moment ago and unknown to this
// server. The read takes at most lookWait and happens at most once per lookEvery, because the
// session's next frames wait meanwhile, and any user of a read-only mount can provoke refused
// writes. Errors: AccessDenied, ReadOnly.
func (s *session) accessFor(v meta.VolumeID, need cluster.Rights) (cluster.Access, error) {
	a := s.access(v)
	err := s.enough(a, v, need)
	if err == nil || !s.who.Role.Granted() {
		return a, err
	}
	s.accMu.Lock()
	early := time.Now().Before(s.look)
	s.accMu.Unlock()
	if early {
		return a, err
	}
	ctx, cancel := context.WithTimeout(s.ctx, lookWait)
	_, lerr := s.srv.cfg.Cluster.Current(ctx)
	cancel()
	s.accMu.Lock()
	s.look = time.Now().Add(lookEvery)
	s.accMu.Unlock()
	if lerr != nil {
		return a, err
	}
	a = s.access(v)
	return a, s.enough(a, v, need)
}

const (
	lookWait  = 2 * time.Second
	lookEvery = 2 * time.Second
)

// refusedStill asks etcd whether a refused enter is allowed by now; nil if so. refusedStill
// may wait, so the goroutine that reads the session's frames must not call refusedStill.
// Without an answer from etcd the error is Unavailable, because a client denied access gives
// up its uncommitted changes. Errors: AccessDenied, Unavailable.
func (s *session) refusedStill(m *wire.Enter, cause error) error {
	if !s.who.Role.Granted() {
		return cause
	}
	ctx, cancel := context.WithTimeout(s.ctx, currentWait)
	defer cancel()
	if _, err := s.srv.cfg.Cluster.Current(ctx); err != nil {
		s.srv.log.Info("etcd did not confirm a refusal: the refusal stands", "identity", s.who.String(), "error", err)
		return meta.E("authorize", meta.Unavailable, s.who.String(), errors.Join(cause, err))
	}
	return s.enough(s.access(m.Volume), m.Volume, frameRules[wire.TEnter].right)
}

// currentWait bounds how long a refusal waits for etcd.
const currentWait = 5 * time.Second

func (s *session) enough(a cluster.Access, v meta.VolumeID, need cluster.Rights) error {
	switch {
	case a.Rights >= need:
		return nil
	case a.Rights >= cluster.ReadRights && need == cluster.WriteRights:
		return meta.E("authorize", meta.ReadOnly, s.who.String(), fmt.Errorf("it was granted no more than to read volume %d", v))
	}
	return meta.E("authorize", meta.AccessDenied, s.who.String(), fmt.Errorf("it was granted %s on volume %d, this needs %s", a.Rights, v, need))
}

// access returns the session's granted access to a volume, by this server's newest view of the
// cluster.
func (s *session) access(v meta.VolumeID) cluster.Access {
	view := s.srv.cfg.Cluster.View()
	if view == nil || !s.who.Role.Granted() {
		return cluster.Access{}
	}
	s.accMu.Lock()
	defer s.accMu.Unlock()
	if a, ok := s.acc[v]; ok && (a.view == view || s.srv.cfg.Unsafe.NoRevoke) {
		return a.Access
	}
	if s.acc == nil || len(s.acc) >= maxAccess {
		s.acc = map[meta.VolumeID]accessAt{}
	}
	a := accessAt{view: view}
	if !view.Evicted(s.who) {
		a.Access = view.Access(s.who.String(), v)
	}
	s.acc[v] = a
	return a.Access
}

// squash returns the restrictions of a client with squashed root on a volume.
func (s *session) squash(v meta.VolumeID) namespace.Squash {
	if s.srv.cfg.Unsafe.NoSquash {
		return namespace.Squash{}
	}
	a := s.access(v)
	return namespace.Squash{
		On:  a.Users == cluster.UsersNoRoot || a.Users == cluster.UsersAllTo,
		One: a.Users == cluster.UsersAllTo, UID: a.UID, GID: a.GID,
	}
}

// maxAccess bounds the volumes in a session's access cache.
const maxAccess = 4096

// accessAt is the access according to one view.
type accessAt struct {
	cluster.Access
	view *cluster.View
}

// lostVolumes lists the volumes used by the session to which view grants fewer rights than
// before, and updates the access cache to view.
func (s *session) lostVolumes(view *cluster.View) (lost []meta.VolumeID) {
	s.accMu.Lock()
	defer s.accMu.Unlock()
	for v, was := range s.acc {
		if was.view == view {
			continue
		}
		now := accessAt{view.Access(s.who.String(), v), view}
		if now.Rights < was.Rights && was.Rights >= cluster.ReadRights {
			lost = append(lost, v)
		}
		s.acc[v] = now
	}
	slices.Sort(lost)
	return lost
}

// mayAdmin refuses an administrative request that the session may not make. A client's grants
// decide for the volumes named by the request; without volumes a client is refused. Errors:
// AccessDenied, NotSupported.
func (s *session) mayAdmin(op wire.AdminOp, volumes ...meta.VolumeID) error {
	if int(op) >= len(adminRules) || adminRules[op].roles == nil {
		return meta.E("admin", meta.NotSupported, fmt.Sprintf("request %d", op), nil)
	}
	r := adminRules[op]
	if s.who.Anyone() || slices.Contains(r.roles, s.who.Role) {
		return nil
	}
	if r.right == cluster.NoRights || !s.who.Role.Granted() || len(volumes) == 0 {
		return meta.E("admin", meta.AccessDenied, s.who.String(), fmt.Errorf("request %d is not for its role", op))
	}
	for _, v := range volumes {
		if err := s.enough(s.access(v), v, r.right); err != nil { // see Server.mayAdmin
			return err
		}
	}
	return nil
}
