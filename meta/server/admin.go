package server

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// adminFrames answers the administrative requests that clients' sessions and other metadata
// servers send as frames. Every other administrative request is a call of the API.
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

// listViews lists the mountable snapshots of a volume.
func (af *adminFrames) listViews(ctx context.Context, m *wire.Admin, re *wire.AdminRe) error {
	o, err := af.catalogue.ownerOf(ctx, m)
	if err != nil {
		return err
	}
	all, err := o.snapshots.list()
	if err != nil {
		return err
	}
	return reportJSON(re, wire.ViewsAnswer{Snapshots: all})
}

// targetOp takes a snapshot of a mirror's target, rolls the target back, or shows a snapshot to
// the target's readers, for the session that fills the target. Errors: the errors of
// snapshots.take, rollBack and show; ReadOnly.
func (af *adminFrames) targetOp(ctx context.Context, sess *session, m *wire.Admin) error {
	o, err := af.catalogue.ownerOf(ctx, m)
	if err != nil {
		return err
	}
	if m.Op == wire.AdminShowTarget {
		return o.mirror.show(ctx, sess, m.Entry)
	}
	var q wire.Once
	if err := readBody(m, &q); err != nil {
		return err
	}
	if m.Op == wire.AdminRollBackTarget {
		return o.rollbacks.rollBack(ctx, sess, m.Entry, rollHow{token: q.Token, force: true, filler: true})
	}
	if err := o.mirror.mayFill(ctx, sess, "take snapshot"); err != nil {
		return err
	}
	if err := checkSnapshotName(m.Entry); err != nil {
		return err
	}
	_, _, err = o.snapshots.take(ctx, &meta.TakeSnapshot{Name: m.Entry, Token: q.Token}, takeHow{filler: sess})
	return err
}

// cloneOp answers a request of another server about clones.
func (af *adminFrames) cloneOp(ctx context.Context, m *wire.Admin, re *wire.AdminRe) error {
	v, err := af.catalogue.find(ctx, m)
	if err != nil {
		return err
	}
	o, err := af.hosted.ownerFor(ctx, v.ID)
	if err != nil {
		return err
	}
	if m.Op == wire.AdminCloneSettle {
		return o.clones.cloneGone(ctx)
	}
	var names []string
	if err := json.Unmarshal(m.Body, &names); err != nil {
		return meta.E("place chunks", meta.Protocol, v.Name, err)
	}
	var ids []meta.ChunkID
	for _, n := range names {
		b, err := hex.DecodeString(n)
		if err != nil || len(b) != 16 {
			return meta.E("place chunks", meta.Protocol, n, err)
		}
		ids = append(ids, meta.ChunkIDFromBytes(b))
	}
	places, err := o.foreign.placesOf(ctx, ids, m.Entry == sealFirst)
	if err != nil {
		return err
	}
	out := make([]wire.ChunkWhere, len(places))
	for i, p := range places {
		out[i] = wire.ChunkWhere{Chunk: names[i], Servers: p.Servers, Sealed: p.Sealed, Length: p.Length}
	}
	return reportJSON(re, out)
}

func reportJSON(re *wire.AdminRe, v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("server: a report is plain data: " + err.Error())
	}
	re.Report = slices.Clip(b.Bytes())
	return nil
}

// readBody decodes the body of a request into to; an empty body is no error. Errors: Protocol.
func readBody(m *wire.Admin, to any) error {
	if len(m.Body) == 0 {
		return nil
	}
	if err := json.Unmarshal(m.Body, to); err != nil {
		return meta.E("admin", meta.Protocol, fmt.Sprintf("request %d", m.Op), err)
	}
	return nil
}
