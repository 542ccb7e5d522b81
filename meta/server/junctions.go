package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// Volumes are attached to each other by junctions. Two places record the attachment: the
// volume's row in the table, for questions about the volume, and an entry in the parent's
// directory, for walks of the tree. No transaction spans both places. So the row is written
// first, with the step under way (cluster.AttachStep), then the entry is journaled, then the
// row is written again, with the step done. The parent's owner does all three, for one volume
// at a time. If the owner dies in between, the parent's next home finds the step in the row
// and finishes the work. Both steps may be repeated.

// treeLook is how often the rows are checked. treeGrace is how long a step may stay unfinished
// before the parent's home finishes it.
const (
	treeLook  = time.Second
	treeGrace = 5 * time.Second
)

// junctionTree attaches volumes below directories of other volumes.
type junctionTree struct {
	*process
	hosted *hosted
	peers  *peers
	trash  *trash
	tree   turns // of attaching and detaching a volume
}

// attachVolume attaches a volume to a directory of another volume. An attachment already made
// stays, without an error. Errors: Exists (the name is taken, or the volume is attached
// elsewhere), NotFound and NotDir (the directory), Invalid (the volume would lie below
// itself), NoSuchVolume.
func (jt *junctionTree) attachVolume(ctx context.Context, v cluster.Volume, at cluster.Attach, token uint64) (cluster.Volume, error) {
	var none cluster.Volume
	if v.Did(token) && !(v.Attach != nil && v.Attach.Step == cluster.Attaching) {
		return v, nil
	}
	if v.ID == meta.RootVolume {
		return none, meta.E("attach", meta.Invalid, v.Name, errors.New("the root volume is the root"))
	}
	parent, err := jt.hosted.ownerFor(ctx, at.Parent)
	if err != nil {
		return none, err
	}
	unlock, err := jt.tree.begin(ctx, v.ID)
	if err != nil {
		return none, err
	}
	defer unlock()
	// The parent is not deleted meanwhile.
	parent.hanging.RLock()
	defer parent.hanging.RUnlock()
	if p, err := jt.cfg.Cluster.Volume(ctx, at.Parent); err != nil {
		return none, err
	} else if p.State != cluster.VolumeActive {
		return none, meta.E("attach", meta.NoSuchVolume, p.Name, fmt.Errorf("it is %s", p.State))
	}
	if err := jt.noCycle(ctx, v.ID, at.Parent); err != nil {
		return none, err
	}
	if parent.mirror.isMirror() {
		return none, meta.E("attach", meta.ReadOnly, parent.subject(), errors.New("it is a mirror's target"))
	}
	v, err = jt.cfg.Cluster.UpdateVolume(ctx, v.ID, func(v *cluster.Volume) error {
		switch {
		case v.State != cluster.VolumeActive:
			return meta.E("attach", meta.NoSuchVolume, v.Name, fmt.Errorf("it is %s", v.State))
		case v.Attach == nil:
			v.Attach = &at
		case !v.Attach.Same(at):
			return meta.E("attach", meta.Exists, v.Name, errors.New("the volume is attached elsewhere: detach it first"))
		case v.Attach.Step == cluster.Detaching:
			return meta.E("attach", meta.Busy, v.Name, errors.New("it is being detached: try again"))
		}
		v.Does(token)
		return nil
	})
	if err != nil {
		return none, err
	}
	return jt.settle(ctx, parent, v)
}

// noCycle refuses to attach a volume below itself.
func (jt *junctionTree) noCycle(ctx context.Context, v, parent meta.VolumeID) error {
	for range maxNested {
		if parent == v {
			return meta.E("attach", meta.Invalid, fmt.Sprint(v), errors.New("the volume would lie below itself"))
		}
		p, err := jt.cfg.Cluster.Volume(ctx, parent)
		if err != nil {
			return err
		}
		if p.Attach == nil {
			return nil
		}
		parent = p.Attach.Parent
	}
	return meta.E("attach", meta.Loop, fmt.Sprint(v), fmt.Errorf("more than %d volumes below each other", maxNested))
}

// maxNested bounds how many volumes hang below each other.
const maxNested = 64

// detachVolume takes a volume out of the tree. Errors: NotAttached, NoSuchVolume.
func (jt *junctionTree) detachVolume(ctx context.Context, v cluster.Volume, token uint64) (cluster.Volume, error) {
	var none cluster.Volume
	if detachedBy(&v, token) {
		return v, nil
	}
	if v.Attach == nil {
		return none, meta.E("detach", meta.NotAttached, v.Name, nil)
	}
	parent, err := jt.hosted.ownerFor(ctx, v.Attach.Parent)
	if err != nil && !errors.Is(err, meta.NoSuchVolume) {
		return none, err
	}
	unlock, err := jt.tree.begin(ctx, v.ID)
	if err != nil {
		return none, err
	}
	defer unlock()
	was := *v.Attach
	if token != 0 {
		if v, err = jt.cfg.Cluster.Volume(ctx, v.ID); err != nil {
			return none, err
		}
		if detachedBy(&v, token) { // meanwhile
			return v, nil
		}
	}
	v, err = jt.cfg.Cluster.UpdateVolume(ctx, v.ID, func(v *cluster.Volume) error {
		if v.Attach == nil || !v.Attach.Same(was) {
			return meta.E("detach", meta.Busy, v.Name, errors.New("it is being attached elsewhere: try again"))
		}
		v.Attach.Step = cluster.Detaching
		v.Does(token)
		return nil
	})
	if err != nil {
		return none, err
	}
	return jt.settle(ctx, parent, v)
}

// detachedBy reports whether the request with this token detached the volume, even if the
// volume was attached again since.
func detachedBy(v *cluster.Volume, token uint64) bool {
	return v.Did(token) && (v.Attach == nil || v.Attach.Step != cluster.Detaching)
}

// settle does the step recorded in a row as under way: first the parent's entry, then the row.
// parent is nil if the parent volume does not exist any more. The caller holds the volume's
// lock, and this server owns the parent.
func (jt *junctionTree) settle(ctx context.Context, parent *owner, v cluster.Volume) (cluster.Volume, error) {
	if v.Attach == nil || v.Attach.Step == cluster.Attached && parent != nil && parent.leadsTo(*v.Attach) == v.ID {
		return v, nil
	}
	if parent != nil {
		if !parent.rollbacks.exclude.TryRLock() {
			return v, meta.E("attach", meta.Busy, parent.subject(), errors.New("it is being rolled back: try again"))
		}
		defer parent.rollbacks.exclude.RUnlock()
	}
	at := *v.Attach
	var refused error
	after := &cluster.Attach{Parent: at.Parent, Ino: at.Ino, Name: at.Name}
	switch {
	case parent == nil:
		after = nil
		if at.Step != cluster.Detaching {
			refused = meta.E("attach", meta.NoSuchVolume, fmt.Sprint(at.Parent), nil)
		}
	case at.Step == cluster.Detaching:
		err := parent.leases.durably(ctx, &meta.Junction{Parent: at.Ino, Name: at.Name, Volume: v.ID, Detach: true})
		switch meta.KindOf(err) {
		case meta.KindOK, meta.NotAttached, meta.NotFound, meta.NotDir, meta.Stale:
		default:
			return v, err
		}
		after = nil
	default:
		// If two volumes are being attached below each other at the same time, the check sees
		// both rows now. For a junction already made, the check ran before.
		var err error
		if parent.leadsTo(at) != v.ID {
			if err = jt.noCycle(ctx, v.ID, at.Parent); err != nil && !errors.Is(err, meta.Invalid) && !errors.Is(err, meta.Loop) {
				return v, err // the row keeps the step, and noCycle runs again
			}
		}
		if err == nil {
			err = parent.leases.durably(ctx, &meta.Junction{Parent: at.Ino, Name: at.Name, Volume: v.ID})
		}
		switch meta.KindOf(err) {
		case meta.KindOK:
		case meta.Exists:
			if parent.leadsTo(at) != v.ID {
				after, refused = nil, err
			}
		case meta.NotFound, meta.NotDir, meta.Stale, meta.Invalid, meta.NameTooLong, meta.TooManyLinks, meta.ReadOnly, meta.NotPermitted, meta.Loop:
			after, refused = nil, err
		default:
			return v, err // the outcome is unknown: the row keeps the step
		}
	}
	w, err := jt.cfg.Cluster.UpdateVolume(context.WithoutCancel(ctx), v.ID, func(v *cluster.Volume) error {
		if v.Attach == nil || *v.Attach != at {
			return meta.E("attach", meta.Busy, v.Name, errors.New("it is being changed: try again"))
		}
		v.Attach = after
		if refused != nil {
			v.Done = nil // so the same request, repeated, is refused too
		}
		return nil
	})
	if refused != nil {
		return v, refused // first of all; a row not written is settled later
	}
	return w, err
}

// treeLoop finishes the steps of servers that died, and empties the trash.
func (jt *junctionTree) treeLoop() {
	type step struct {
		at       cluster.Attach
		revision int64
		since    time.Time
	}
	seen := map[meta.VolumeID]step{}
	t := time.NewTicker(cmp.Or(jt.cfg.treeLook, treeLook))
	defer t.Stop()
	for {
		select {
		case <-jt.ctx.Done():
			return
		case <-t.C:
		}
		view := jt.cfg.Cluster.View()
		if view == nil {
			continue
		}
		now := time.Now()
		under := map[meta.VolumeID]bool{}
		var purge []cluster.Volume
		for i := range view.Volumes {
			v := &view.Volumes[i]
			if v.State == cluster.VolumeTrash && now.After(goTime(v.Until)) {
				if _, mine := jt.hosted.home(v.ID); mine {
					purge = append(purge, *v)
				}
			}
			if v.Attach == nil || v.Attach.Step == cluster.Attached {
				continue
			}
			under[v.ID] = true
			if was, ok := seen[v.ID]; !ok || was.at != *v.Attach || was.revision != v.Revision {
				seen[v.ID] = step{*v.Attach, v.Revision, now}
			} else if _, mine := jt.hosted.home(v.Attach.Parent); mine && now.Sub(was.since) >= cmp.Or(jt.cfg.treeGrace, treeGrace) {
				if err := jt.settleLeft(v.ID); err != nil && jt.ctx.Err() == nil {
					jt.log.Info("where a volume hangs is not settled yet", "volume", v.Name, "error", err)
				}
			}
		}
		jt.trash.startPurges(purge)
		for id := range seen {
			if !under[id] {
				delete(seen, id)
			}
		}
	}
}

// settleLeft finishes a volume's step for a server that died.
func (jt *junctionTree) settleLeft(id meta.VolumeID) error {
	ctx, cancel := context.WithTimeout(jt.ctx, 10*time.Second)
	defer cancel()
	v, err := jt.cfg.Cluster.Volume(ctx, id)
	if err != nil || v.Attach == nil || v.Attach.Step == cluster.Attached {
		return err
	}
	at := *v.Attach
	parent, err := jt.hosted.ownerFor(ctx, at.Parent)
	if err != nil && !errors.Is(err, meta.NoSuchVolume) {
		return err
	}
	unlock, err := jt.tree.begin(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if v, err = jt.cfg.Cluster.Volume(ctx, id); err != nil || v.Attach == nil || *v.Attach != at {
		return err
	}
	_, err = jt.settle(ctx, parent, v)
	jt.log.Info("this server finished a volume's step that a dead server had begun", "volume", v.Name, "step", at.Step, "error", err)
	return err
}

// paths finds the paths of volumes. Each volume and directory is looked up once, so that a
// list of thousands of volumes takes few requests.
type paths struct {
	tree *junctionTree
	rows map[meta.VolumeID]cluster.Volume
	dirs map[cluster.Attach]string // by Parent and Ino: the way from the volume's root
}

func newPaths(tree *junctionTree, rows []cluster.Volume) *paths {
	p := &paths{tree, map[meta.VolumeID]cluster.Volume{}, map[cluster.Attach]string{}}
	for _, v := range rows {
		p.rows[v.ID] = v
	}
	return p
}

// of returns a volume's path, from the directory of its attachment upward. If a directory has
// no known name, the path begins with "?".
func (p *paths) of(ctx context.Context, v cluster.Volume, depth int) string {
	if v.ID == meta.RootVolume {
		return ""
	}
	if v.Attach == nil || depth > maxNested {
		return v.Name + ":"
	}
	parent, ok := p.rows[v.Attach.Parent]
	if !ok {
		var err error
		if parent, err = p.tree.cfg.Cluster.Volume(ctx, v.Attach.Parent); err != nil {
			return "?/" + v.Attach.Name
		}
		p.rows[parent.ID] = parent
	}
	at := cluster.Attach{Parent: v.Attach.Parent, Ino: v.Attach.Ino}
	dir, ok := p.dirs[at]
	if !ok {
		names, err := p.tree.namesOf(ctx, at)
		dir = strings.Join(append([]string{p.of(ctx, parent, depth+1)}, names...), "/")
		if err != nil || len(dir) >= meta.MaxPath {
			dir = "?"
		}
		p.dirs[at] = dir
	}
	return dir + "/" + v.Attach.Name
}

// namesOf asks a volume's owner for the way to a directory.
func (jt *junctionTree) namesOf(ctx context.Context, at cluster.Attach) (names []string, err error) {
	o, err := jt.hosted.ownerFor(ctx, at.Parent)
	var e *meta.Error
	switch {
	case err == nil:
		o.mu.Lock()
		names, err = namespace.PathOf(o.view(), at.Ino)
		o.mu.Unlock()
	case errors.As(err, &e) && e.Kind == meta.NotOwner && e.Subject != "":
		names, err = jt.peers.pathElsewhere(ctx, e.Subject, at.Parent, at.Ino)
	}
	return names, err
}
