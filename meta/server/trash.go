package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// Deleting a volume. The volume's row decides, and goes through
//
//	active -> trash -> deleting -> gone
//
// Each step is one transaction; the trash is skipped if the volume has no trash time. No
// session can enter a volume in the trash, the volume's name is free, and its home looks after
// its chunks as after the chunks of any closed volume. Any server may continue a deletion; the
// volume's home does so after every change of the cluster.

// deletion is a request to delete a volume.
type deletion struct {
	token uint64 // identifies the request; 0: the servers' own
	now   bool   // past the trash
	name  string // that the volume must have at the moment of its deletion; "": any
}

// trash deletes volumes, restores volumes from the trash, and removes the chunks
// and files that deleted volumes left.
type trash struct {
	*process
	catalogue    *catalogue
	chunkServers *chunkServers
	hosted       *hosted
	peers        *peers
	serverMap    *serverMap
	standbys     *standbys
	deleting     turns
	purging      purges
}

// deleteVolume deletes a volume that is not attached and has no volume attached inside, or
// continues the deletion. Errors: Busy (the volume is attached, or has another name than
// as.name), NotEmpty (a volume is attached inside), NotPermitted (the root).
//
// Only one caller at a time deletes a volume: the volume's home continues deletions, and could
// otherwise take the volume anew between another caller's release of the volume and the
// removal of the row. The home would then own a volume that no longer exists.
func (tr *trash) deleteVolume(ctx context.Context, v cluster.Volume, as deletion) error {
	end, err := tr.deleting.begin(ctx, v.ID)
	if err != nil {
		return err
	}
	defer end()
	if as.token != 0 { // an earlier try may have finished meanwhile
		if v, err = tr.cfg.Cluster.Volume(ctx, v.ID); err != nil {
			return err
		}
	}
	err = tr.deleteAlone(ctx, v, as)
	if o := tr.hosted.opened(v.ID); o != nil && errors.Is(err, meta.NoSuchVolume) {
		if _, gone := tr.cfg.Cluster.Volume(ctx, v.ID); errors.Is(gone, meta.NoSuchVolume) {
			o.lose(gone) // another server deleted the volume
		}
	}
	return err
}

// turns admits one caller at a time per volume.
type turns struct {
	mu sync.Mutex
	m  map[meta.VolumeID]chan struct{}
}

// begin waits for the caller's turn; end ends the turn. Errors: Interrupted.
func (t *turns) begin(ctx context.Context, v meta.VolumeID) (end func(), err error) {
	mine := make(chan struct{})
	for {
		t.mu.Lock()
		other := t.m[v]
		if other == nil {
			if t.m == nil {
				t.m = map[meta.VolumeID]chan struct{}{}
			}
			t.m[v] = mine
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				delete(t.m, v)
				t.mu.Unlock()
				close(mine)
			}, nil
		}
		t.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, meta.E("wait for volume", meta.Interrupted, fmt.Sprint(v), context.Cause(ctx))
		}
	}
}

func (tr *trash) deleteAlone(ctx context.Context, v cluster.Volume, as deletion) error {
	if v.ID == meta.RootVolume {
		return meta.E("delete volume", meta.NotPermitted, v.Name, errors.New("the root volume can't be deleted"))
	}
	if deletedBy(&v, as) {
		return nil
	}
	if v.State == cluster.VolumeCreating {
		return meta.E("delete volume", meta.Busy, v.Name, errors.New("it is being created"))
	}
	o, err := tr.hosted.ownerAs(ctx, v.ID, v.State)
	if err != nil {
		return err
	}
	if v, err = tr.condemn(ctx, o, v, as); errors.Is(err, errDeletedBefore) {
		return nil
	} else if err != nil {
		return err
	}
	if v.State == cluster.VolumeTrash {
		return o.handOver(ctx, "")
	}
	if err := o.deleteAllChunks(ctx); err != nil {
		return err
	}
	if err := o.handOver(ctx, ""); err != nil {
		return err
	}
	if err := tr.standbys.drop(v.ID, true); err != nil {
		return err
	}
	tr.forgetDigests(v.ID)
	if err := tr.cfg.Cluster.DeleteVolume(ctx, v.ID, tr.serverMap.knownServers()...); err != nil {
		return err
	}
	tr.peers.settleOrigin(ctx, v.Origin)
	return nil
}

// deletedBy reports whether a request has done all of its work on a volume whose row still
// exists: since the request, the volume was moved to the trash, or another request took the
// volume out of the trash again.
func deletedBy(v *cluster.Volume, as deletion) bool {
	return v.Did(as.token) && v.State != cluster.VolumeDeleting
}

var errDeletedBefore = errors.New("the request came before")

// condemn changes a volume's row to trash or deleting, after the volume's writers have
// committed. Errors: the errors of deleteVolume, errDeletedBefore.
func (tr *trash) condemn(ctx context.Context, o *owner, v cluster.Volume, as deletion) (cluster.Volume, error) {
	const op = "delete volume"
	if v.Attach != nil {
		return v, attached(v)
	}
	if err := isNamed(v, as.name); err != nil {
		return v, err
	}
	// No volume is attached inside meanwhile.
	o.hanging.Lock()
	defer o.hanging.Unlock()
	all, err := tr.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return v, err
	}
	for _, x := range all {
		if x.Attach != nil && x.Attach.Parent == v.ID {
			return v, meta.E(op, meta.NotEmpty, v.Name, fmt.Errorf("volume %s is attached inside it", x.Name))
		}
	}
	if err := dependent(op, v, all); err != nil {
		return v, err
	}
	if v.State == cluster.VolumeActive {
		if err := tr.catalogue.unmirrored(ctx, v); err != nil {
			return v, err
		}
		if err := o.pinned.mayGo(ctx); err != nil {
			return v, err
		}
		// Mounts first give up their caches; buffered data is committed, and is deleted with
		// the volume.
		if err := o.leases.recallAll(ctx, func() error { return nil }); err != nil {
			return v, err
		}
		if err := o.flush(ctx); err != nil {
			return v, err
		}
	}
	was := v.State
	condemned := func() error {
		v, err = tr.writeCondemned(ctx, v, as)
		if err == nil && was == cluster.VolumeActive {
			v, err = tr.catalogue.uncloned(ctx, v, as.token)
		}
		if err == nil {
			o.setState(v.State)
		}
		return err
	}
	if was != cluster.VolumeActive {
		err = condemned()
		return v, err
	}
	// A group with a barrier at the volume can't have its snapshot any more: the group's
	// client gets an error at the next step, and the deletion does not wait for the barrier's
	// timeout.
	o.mu.Lock()
	if o.groups.held != nil {
		o.groups.endHold(o.groups.held)
	}
	o.mu.Unlock()
	// The owner recalls once more the leases of writers that went on since then, and nobody
	// writes after that: the volume goes into the trash with all acknowledged writes.
	err = o.openEnds.endWriting(ctx, writingEnd{op: op, force: true}, condemned)
	return v, err
}

// writeCondemned changes the volume's row to trash or deleting.
func (tr *trash) writeCondemned(ctx context.Context, v cluster.Volume, as deletion) (cluster.Volume, error) {
	const op = "delete volume"
	at := time.Now()
	return tr.cfg.Cluster.UpdateVolume(ctx, v.ID, func(x *cluster.Volume) error {
		if deletedBy(x, as) {
			return errDeletedBefore
		}
		if x.Attach != nil {
			return attached(*x)
		}
		if err := isNamed(*x, as.name); err != nil {
			return err
		}
		// The caller's row may be out of date. If the volume was taken out of the trash and
		// moved there anew meanwhile, its full trash time lies ahead.
		if x.State != v.State || x.Until != v.Until {
			return meta.E(op, meta.Busy, x.Name, fmt.Errorf("it is %s now: try again", x.State))
		}
		x.Does(as.token)
		if x.State == cluster.VolumeActive && x.TrashSeconds > 0 && !as.now {
			x.State = cluster.VolumeTrash
			x.Deleted, x.Until = meta.Time(at.UnixNano()), meta.Time(at.Add(seconds(x.TrashSeconds)).UnixNano())
			return nil
		}
		x.State = cluster.VolumeDeleting
		return nil
	})
}

// isNamed refuses to condemn a volume with another name than the request's; "": any name. A
// volume already being deleted passes under any name. Errors: Busy.
func isNamed(v cluster.Volume, name string) error {
	if name == "" || v.Name == name || v.State == cluster.VolumeDeleting {
		return nil
	}
	return meta.E("delete volume", meta.Busy, name, fmt.Errorf("volume %d is called %q by now", v.ID, v.Name))
}

func attached(v cluster.Volume) error {
	return meta.E("delete volume", meta.Busy, v.Name, errors.New("the volume is attached: detach it first"))
}

func seconds(n uint64) time.Duration { return time.Duration(n) * time.Second }

// purges are the volumes being purged.
type purges struct {
	mu   sync.Mutex
	m    map[meta.VolumeID]bool
	last meta.VolumeID // the last volume begun
}

// maxPurges bounds the concurrent purges.
const maxPurges = 4

// startPurges purges volumes in the background, ascending by number. startPurges skips running
// purges and stops at maxPurges; the next look at the trash calls startPurges again. Each call
// continues after the last volume begun, because otherwise a few volumes that can't be deleted
// yet would keep all later volumes in the trash.
func (tr *trash) startPurges(due []cluster.Volume) {
	p := &tr.purging
	p.mu.Lock()
	defer p.mu.Unlock()
	next := 0
	for next < len(due) && due[next].ID <= p.last {
		next++
	}
	for i := range due {
		v := due[(next+i)%len(due)]
		if len(p.m) >= maxPurges {
			return
		}
		if !p.m[v.ID] {
			tr.startPurge(v)
		}
	}
}

// startPurge purges one volume. The caller holds purging.mu.
func (tr *trash) startPurge(v cluster.Volume) {
	p := &tr.purging
	if p.m == nil {
		p.m = map[meta.VolumeID]bool{}
	}
	p.m[v.ID] = true
	p.last = v.ID
	tr.wg.Go(func() {
		tr.purge(v)
		p.mu.Lock()
		delete(p.m, v.ID)
		p.mu.Unlock()
	})
}

// purge deletes a volume whose trash time is over.
func (tr *trash) purge(v cluster.Volume) {
	if err := tr.deleteVolume(tr.ctx, v, deletion{now: true}); err != nil && tr.ctx.Err() == nil && !errors.Is(err, meta.NoSuchVolume) {
		tr.log.Info("a volume does not leave the trash yet", "volume", v.Name, "error", err)
	}
}

// undeleteVolume takes a volume out of the trash; the volume is not attached then. Errors:
// NoSuchVolume (no such volume is in the trash), VolumeExists (another volume has the name
// now).
func (tr *trash) undeleteVolume(ctx context.Context, id meta.VolumeID, name, as string, token uint64) (cluster.Volume, error) {
	const op = "undelete volume"
	if v, err := tr.undeleted(ctx, id, cmp.Or(as, name)); err == nil && v.State == cluster.VolumeActive && v.Did(token) {
		return v, nil
	}
	v, err := tr.findInTrash(ctx, id, name)
	if err != nil {
		return v, err
	}
	o, err := tr.hosted.ownerAs(ctx, v.ID, cluster.VolumeTrash)
	if err != nil {
		return v, err
	}
	now, err := tr.cfg.Cluster.UpdateVolume(ctx, v.ID, func(x *cluster.Volume) error {
		if x.State == cluster.VolumeActive && x.Did(token) {
			return nil
		}
		if x.State != cluster.VolumeTrash {
			return meta.E(op, meta.NoSuchVolume, x.Name, fmt.Errorf("it is %s", x.State))
		}
		x.State, x.Deleted, x.Until = cluster.VolumeActive, 0, 0
		x.Does(token)
		if as != "" {
			x.Name = as
		}
		return nil
	})
	if errors.Is(err, meta.VolumeExists) {
		return v, meta.E(op, meta.VolumeExists, cmp.Or(as, v.Name), errors.New("another volume has this name by now: give the undeleted volume a new one"))
	}
	if err != nil {
		return v, err
	}
	o.setState(now.State)
	return now, nil
}

// undeleted finds the volume of a repeated request that has already taken the volume out of
// the trash, by number or, if id is 0, by the name that the request gave the volume.
func (tr *trash) undeleted(ctx context.Context, id meta.VolumeID, name string) (cluster.Volume, error) {
	if id != 0 {
		return tr.cfg.Cluster.Volume(ctx, id)
	}
	return tr.cfg.Cluster.VolumeByName(ctx, name)
}

// findInTrash finds a volume in the trash by number or, if id is 0, the latest deleted volume of
// a name.
func (tr *trash) findInTrash(ctx context.Context, id meta.VolumeID, name string) (found cluster.Volume, err error) {
	all, err := tr.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return found, err
	}
	for _, v := range all {
		if v.State != cluster.VolumeTrash || id != 0 && v.ID != id || id == 0 && v.Name != name {
			continue
		}
		if found.ID == 0 || v.Deleted > found.Deleted {
			found = v
		}
	}
	if found.ID == 0 {
		if id != 0 {
			name = fmt.Sprint(id)
		}
		return found, meta.E("undelete volume", meta.NoSuchVolume, name, errors.New("it is not in the trash"))
	}
	return found, nil
}

// setState notes the state in the volume's row.
func (o *owner) setState(to cluster.VolumeState) {
	o.mu.Lock()
	o.state = to
	o.mu.Unlock()
}

// deleteWidth bounds the concurrent delete orders per chunk server.
const deleteWidth = 8

// deleteAllChunks orders the deletion of every chunk of a volume being deleted, on all
// reachable servers. A server that leaves an order unanswered gets no further orders;
// sweepDeleted later finds the remaining chunks.
func (o *owner) deleteAllChunks(ctx context.Context) error {
	chunks := map[meta.ServerID][]meta.ChunkID{}
	o.mu.Lock()
	err := namespace.Chunks(o.view(), func(c meta.ChunkRecord) bool {
		for _, srv := range c.Servers {
			chunks[srv] = append(chunks[srv], c.ID)
		}
		return true
	})
	o.mu.Unlock()
	if err != nil {
		return err
	}
	var wg sync.WaitGroup
	for srv, ids := range chunks {
		wg.Go(func() { o.deleteAt(ctx, srv, ids) })
	}
	wg.Wait()
	if ctx.Err() != nil {
		return meta.E("delete volume", meta.Interrupted, o.subject(), context.Cause(ctx))
	}
	return nil
}

// deleteAt orders the deletion of chunks of a volume being deleted, on one server.
func (o *owner) deleteAt(ctx context.Context, srv meta.ServerID, ids []meta.ChunkID) {
	fence := meta.Fence{Term: o.own.Term(), Seals: 1<<32 - 1}
	ctx, giveUp := context.WithCancel(ctx)
	defer giveUp()
	var wg sync.WaitGroup
	defer wg.Wait()
	next := make(chan meta.ChunkID)
	defer close(next)
	for range min(deleteWidth, len(ids)) {
		wg.Go(func() {
			for id := range next {
				call, cancel := context.WithTimeout(ctx, cmp.Or(o.srv.cfg.deletePatience, orderPatience))
				_, err := o.order(call, srv, meta.Order{Kind: meta.OrderDelete, Chunk: id, Fence: fence})
				if err != nil && call.Err() != nil && ctx.Err() == nil {
					o.log.Warn("a chunk server does not answer orders: its chunks of a deleted volume are swept later", "server", srv, "chunks", len(ids))
					giveUp()
				}
				cancel()
			}
		})
	}
	for _, id := range ids {
		select {
		case next <- id:
		case <-ctx.Done():
			return
		}
	}
}
