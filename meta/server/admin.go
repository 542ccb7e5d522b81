package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// adminFrames answers the administrative requests that come as frames: those of clients' sessions
// and of other metadata servers. Every other administrative request is a call of the API.
type adminFrames struct {
	*process
	catalogue *catalogue
	hosted    *hosted
	room      *diskRoom
}

// admin answers an administrative request.
func (af *adminFrames) admin(ctx context.Context, sess *session, m *wire.Admin) *wire.AdminRe {
	re := &wire.AdminRe{}
	re.Status = wire.StatusOf(af.adminOp(ctx, sess, m, re))
	return re
}

func (af *adminFrames) adminOp(ctx context.Context, sess *session, m *wire.Admin, re *wire.AdminRe) error {
	if sess.role == wire.RoleEnrol {
		return meta.E("admin", meta.NotPermitted, sess.name, nil)
	}
	if err := af.mayAdmin(ctx, sess, m); err != nil {
		af.stats.refused.Add(1)
		return err
	}
	switch m.Op {
	case wire.AdminPathOf:
		o, err := af.hosted.ownerFor(ctx, m.Volume)
		if err != nil {
			return err
		}
		o.mu.Lock()
		names, err := namespace.PathOf(o.view(), m.Ino)
		o.mu.Unlock()
		if err != nil {
			return err
		}
		return reportJSON(re, names)
	case wire.AdminVolumeByName:
		v, err := af.catalogue.find(ctx, m)
		if err != nil {
			return err
		}
		// A request by name often comes before the use of the volume: the owner answers.
		if m.Volume == 0 && v.State == cluster.VolumeActive {
			if _, err := af.hosted.ownerFor(ctx, v.ID); err != nil {
				return err
			}
		}
		re.Volumes = []wire.VolumeInfo{{ID: v.ID, Name: v.Name, Policy: af.catalogue.volumeInfo(v).Policy, Deleting: v.State != cluster.VolumeActive}}
		return nil
	case wire.AdminHandOver:
		// The requester takes the volume next, and is ready to.
		o := af.hosted.opened(m.Volume)
		if o == nil {
			return af.hosted.elsewhere(m.Volume)
		}
		ctx, cancel := context.WithTimeoutCause(ctx, handOverWait, errors.New("the journal did not take all answered operations in time"))
		defer cancel()
		return o.handOver(ctx, m.Entry)
	case wire.AdminTake:
		// With Name, the requester is stopping. With its address in Entry, it has no room for
		// the volume. With neither, it could not open the volume.
		if m.Name != "" {
			af.hosted.leavers.add(m.Name)
		}
		if err := af.room.mayTake(m); err != nil {
			return err
		}
		_, err := af.hosted.openAs(ctx, m.Volume, cluster.VolumeActive, m.Entry)
		return err
	case wire.AdminViews:
		return af.listViews(ctx, m, re)
	case wire.AdminTakeTarget, wire.AdminRollBackTarget, wire.AdminShowTarget:
		return af.targetOp(ctx, sess, m)
	case wire.AdminCloneSettle, wire.AdminChunkPlaces:
		return af.cloneOp(ctx, m, re)
	}
	return meta.E("admin", meta.NotSupported, fmt.Sprintf("request %d", m.Op), nil)
}

// mayAdmin refuses a request that the session has no right to make. A client needs rights on
// the volume that the request names and, to attach, on the parent volume.
func (af *adminFrames) mayAdmin(ctx context.Context, sess *session, m *wire.Admin) error {
	err := sess.mayAdmin(m.Op)
	if err == nil || int(m.Op) >= len(adminRules) || adminRules[m.Op].right == cluster.NoRights || !sess.who.Role.Granted() {
		return err
	}
	volumes, ferr := af.catalogue.adminOf(ctx, m)
	if ferr != nil {
		return err // don't reveal whether the volume exists
	}
	if err = sess.mayAdmin(m.Op, volumes...); err == nil {
		return nil
	}
	// The grant may have been made a moment ago, through another server.
	look, cancel := context.WithTimeout(ctx, currentWait)
	defer cancel()
	if _, lerr := af.cfg.Cluster.Current(look); lerr != nil {
		return err
	}
	return sess.mayAdmin(m.Op, volumes...)
}

// adminOf returns the volumes that a request concerns.
func (ca *catalogue) adminOf(ctx context.Context, m *wire.Admin) ([]meta.VolumeID, error) {
	v, err := ca.find(ctx, m)
	if err != nil {
		return nil, err
	}
	return []meta.VolumeID{v.ID}, nil
}

// find returns the volume that a request names by id or by name.
func (ca *catalogue) find(ctx context.Context, m *wire.Admin) (cluster.Volume, error) {
	if m.Volume != 0 {
		return ca.cfg.Cluster.Volume(ctx, m.Volume)
	}
	return ca.cfg.Cluster.VolumeByName(ctx, m.Name)
}

// ownerOf returns the owner of the volume that a request names.
func (ca *catalogue) ownerOf(ctx context.Context, m *wire.Admin) (*owner, error) {
	v, err := ca.find(ctx, m)
	if err != nil {
		return nil, err
	}
	return ca.hosted.ownerFor(ctx, v.ID)
}

// pageBytes bounds a page of a longer answer, in bytes of JSON: far below wire.MaxFrame.
const pageBytes = 4 << 20

// pageOf returns the first items of a list that fit into pageBytes, at least the first.
func pageOf[T any](all []T, size func(*T) int) []T {
	n := 0
	for i := range all {
		if n += size(&all[i]); n > pageBytes && i > 0 {
			return all[:i]
		}
	}
	return all
}

// jsonSize returns the bytes that an item takes in an answer, at most.
func jsonSize[T any](item *T) int {
	b, err := json.Marshal(item)
	if err != nil {
		panic("server: a report is plain data: " + err.Error())
	}
	return len(b) + 1
}

// checkpointNow writes the volume's state to chunk servers, with every operation answered
// before the call.
func (o *owner) checkpointNow(ctx context.Context) error {
	if err := o.flush(ctx); err != nil {
		return err
	}
	// A journaled entry is applied to the store a moment later.
	o.mu.Lock()
	seq := o.durable
	o.mu.Unlock()
	if err := o.checkpoints.awaitApplied(ctx, seq); err != nil {
		return err
	}
	return o.checkpoints.checkpoint(ctx)
}

// Status is a server's status for an administrator.
type Status struct {
	Name         string         `json:"name"`
	Cluster      string         `json:"cluster"`
	Uptime       string         `json:"uptime"`
	PID          int            `json:"pid"`
	Sessions     []SessionInfo  `json:"sessions"`
	Volumes      []VolumeStatus `json:"volumes"`
	Calls        uint64         `json:"calls"`
	Entries      uint64         `json:"journal_entries"`
	JournalBytes uint64         `json:"journal_bytes"`
	Checkpoints  uint64         `json:"checkpoints"`
	Expired      uint64         `json:"sessions_expired"`
	Sealed       uint64         `json:"chunks_sealed"`
	Deleted      uint64         `json:"chunks_deleted"`
	// Checks are the running checks.
	Checks []CheckStatus `json:"checks,omitempty"`
	// Standbys are the volumes followed here and owned by other servers.
	Standbys []StandbyStatus `json:"standbys,omitempty"`
}

// SessionInfo is the status of a session.
type SessionInfo struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	PID  uint32 `json:"pid"`
	Idle string `json:"idle"`
}

// VolumeStatus is the status of a volume open here.
type VolumeStatus struct {
	ID      meta.VolumeID `json:"id"`
	Term    meta.Term     `json:"term"`
	Seq     meta.Seq      `json:"seq"`
	Leases  int           `json:"leases"`
	Overlay int           `json:"overlay"`
	Ready   bool          `json:"ready"`
	Failed  string        `json:"failed,omitempty"`
}

// Status describes the server.
func (s *Server) Status() Status {
	st := Status{
		Name: s.cfg.Name, Cluster: s.cfg.Cluster.ID(), Uptime: time.Since(s.epoch).Round(time.Second).String(), PID: os.Getpid(),
		Calls: s.stats.calls.Load(), Entries: s.stats.entries.Load(), JournalBytes: s.stats.journalBytes.Load(),
		Checkpoints: s.stats.checkpoints.Load(), Expired: s.stats.expired.Load(), Sealed: s.stats.sealed.Load(), Deleted: s.stats.deleted.Load(),
	}
	for _, sess := range s.clients.all() {
		st.Sessions = append(st.Sessions, SessionInfo{ID: fmt.Sprintf("%016x", uint64(sess.id)), Name: sess.name, PID: sess.pid, Idle: sess.idle().Round(time.Millisecond).String()})
	}
	for _, o := range s.hosted.owners() {
		o.mu.Lock()
		v := VolumeStatus{ID: o.vol, Term: o.own.Term(), Seq: o.durable, Leases: o.leases.Len(), Overlay: len(o.ov.m)}
		if o.failed != nil {
			v.Failed = o.failed.Error()
		}
		select {
		case <-o.recovered:
			v.Ready = true
		default:
		}
		o.mu.Unlock()
		st.Volumes = append(st.Volumes, v)
	}
	st.Standbys, _ = s.standbys.status()
	st.Checks = s.checker.checks()
	return st
}
