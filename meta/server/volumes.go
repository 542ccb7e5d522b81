package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// Administrative requests about volumes.

// catalogue makes, finds, describes and changes the rows of the cluster's volumes.
type catalogue struct {
	*process
	api       *api
	hosted    *hosted
	junctions *junctionTree
	peers     *peers
	serverMap *serverMap
	setting   turns // of changing a volume's policy and the settings in its row
}

// described describes a changed volume. An error in reading labels does not undo the change; the
// description then says that the labels are unread.
func (ca *catalogue) described(ctx context.Context, v cluster.Volume) meta.VolumeInfo {
	all := []cluster.Volume{v}
	infos, err := ca.describeIn(ctx, newPaths(ca.junctions, all), all)
	if err != nil {
		ca.log.Warn("a volume was changed, and its labels are missing in the answer", "volume", v.Name, "error", err)
	}
	return infos[0]
}

// describeIn describes volumes, ascending by number. A volume with damaged labels, or with
// labels of a newer server, is described with LabelsUnread. Errors: Unavailable (the labels;
// the rest is described).
func (ca *catalogue) describeIn(ctx context.Context, in *paths, all []cluster.Volume) ([]meta.VolumeInfo, error) {
	infos := make([]meta.VolumeInfo, 0, len(all))
	labels, lerr := ca.labelsOf(ctx, all)
	for _, v := range all {
		i := ca.volumeInfo(v)
		switch {
		case v.ID == meta.RootVolume:
			i.Path = "/"
		case v.Attach != nil:
			i.Path = in.of(ctx, v, 0)
		}
		i.Labels = labels[v.ID].Set
		if lerr != nil {
			i.LabelsUnread = lerr.Error()
		} else if err := labels[v.ID].Err; err != nil {
			i.LabelsUnread = err.Error()
			ca.log.Warn("a volume's labels can't be read", "volume", v.Name, "error", err)
		}
		infos = append(infos, i)
	}
	return infos, lerr
}

// labelsOf reads the labels of volumes, ascending by number.
func (ca *catalogue) labelsOf(ctx context.Context, all []cluster.Volume) (map[meta.VolumeID]cluster.Labels, error) {
	if len(all) == 0 {
		return nil, nil
	}
	return ca.cfg.Cluster.Labels(ctx, all[0].ID, all[len(all)-1].ID)
}

// goTime converts a record's time; zero becomes the zero time.
func goTime(t meta.Time) time.Time {
	if t == 0 {
		return time.Time{}
	}
	return time.Unix(0, int64(t))
}

// volumeInfo describes a volume without its path and its labels.
func (ca *catalogue) volumeInfo(v cluster.Volume) meta.VolumeInfo {
	i := meta.VolumeInfo{ID: v.ID, Name: v.Name, State: stateOf(&v), Policy: v.Policy, Created: goTime(v.Created),
		TrashSeconds: v.TrashSeconds, Deleted: goTime(v.Deleted), Until: goTime(v.Until), Compression: cmp.Or(v.Compression, meta.CompressNone.String())}
	if o := ca.hosted.opened(v.ID); o != nil {
		i.Open = true
		o.mu.Lock()
		if r, err := namespace.Query(o.view(), o.context(0), &meta.StatFSOp{}); err == nil {
			i.UsedBytes, i.UsedInodes = r.StatFS.UsedBytes, r.StatFS.UsedInodes
		}
		if p, err := namespace.Policy(o.view()); err == nil {
			i.Policy = p // the journal's policy; the table has a copy
		}
		o.mu.Unlock()
	}
	if a := v.Advisory; a != nil {
		i.AdvisoryBytes, i.AdvisoryInodes = a.Bytes, a.Inodes
		i.BytesOver, i.InodesOver = goTime(a.BytesOver), goTime(a.InodesOver)
	}
	if x := v.Origin; x != nil {
		i.Origin = &meta.VolumeOrigin{Volume: x.Volume, Snapshot: x.Snapshot, Implied: x.Implied}
	}
	return i
}

// stateOf returns the state of a volume as administrators see it.
func stateOf(v *cluster.Volume) meta.VolumeState {
	switch {
	case v.State == cluster.VolumeTrash:
		return meta.VolumeInTrash
	case v.State == cluster.VolumeDeleting:
		return meta.VolumeDeleting
	case v.State == cluster.VolumeCreating:
		return meta.VolumeCreating
	case v.Attach != nil && v.Attach.Step == cluster.Attaching:
		return meta.VolumeAttaching
	case v.Attach != nil && v.Attach.Step == cluster.Detaching:
		return meta.VolumeDetaching
	}
	return meta.VolumeReady
}

// checkWords checks a request's settings of a volume beside the policy. Errors: Invalid.
func checkWords(name string, w *meta.VolumeWords) error {
	if w.TrashSeconds != nil && *w.TrashSeconds > uint64(meta.MaxTrash/time.Second) {
		return meta.E("change volume", meta.Invalid, name, fmt.Errorf("a trash time is at most %d days", meta.MaxTrash/(24*time.Hour)))
	}
	if err := meta.CheckLabels(w.Labels); err != nil {
		return err
	}
	return checkCompression(w.Compression)
}

// createVolume makes a row; the volume's home makes the volume at the first use. token
// identifies the request. Errors: the errors of cluster.CreateVolume and checkWords.
func (ca *catalogue) createVolume(ctx context.Context, name string, p meta.Policy, w *meta.VolumeWords, token uint64) (cluster.Volume, error) {
	if p.Replicas == 0 {
		p.Replicas = 1
	}
	if err := p.Check(); err != nil {
		return cluster.Volume{}, err
	}
	if err := checkWords(name, w); err != nil {
		return cluster.Volume{}, err
	}
	if !w.Force {
		if err := ca.serverMap.meetable(&p); err != nil {
			return cluster.Volume{}, err
		}
	}
	labels, err := meta.ChangeLabels(nil, w.Labels)
	if err != nil {
		return cluster.Volume{}, err
	}
	v, err := ca.cfg.Cluster.CreateVolume(ctx, name, p, meta.Time(time.Now().UnixNano()), func(v *cluster.Volume) {
		say(v, w)
		v.Labels = labels
		v.Does(token)
	})
	if errors.Is(err, meta.VolumeExists) {
		// An earlier try of this request may have created the volume.
		if have, herr := ca.cfg.Cluster.VolumeByName(ctx, name); herr == nil && have.Did(token) {
			v, err = have, nil
		}
	}
	return v, err
}

// say changes a volume's row as requested by w.
func say(v *cluster.Volume, w *meta.VolumeWords) {
	if w.TrashSeconds != nil {
		v.TrashSeconds = *w.TrashSeconds
	}
	if w.Compression != nil {
		if v.Compression = *w.Compression; v.Compression == meta.CompressNone.String() {
			v.Compression = ""
		}
	}
	sayAdvisory(v, w)
}

// setVolume changes a volume's policy, or only the named parts of the policy, and other
// settings in its row. One request at a time is served, so journal, memory and row get
// concurrent policies in the same order. The change goes on if the caller leaves.
func (ca *catalogue) setVolume(ctx context.Context, v cluster.Volume, p meta.Policy, w *meta.VolumeWords) (meta.VolumeInfo, error) {
	var none meta.VolumeInfo
	if err := checkWords(v.Name, w); err != nil {
		return none, err
	}
	o, err := ca.hosted.ownerFor(ctx, v.ID)
	if err != nil {
		return none, err
	}
	end, err := ca.setting.begin(ctx, v.ID)
	if err != nil {
		return none, err
	}
	type outcome struct {
		info meta.VolumeInfo // described before the next change
		err  error
	}
	done := make(chan outcome, 1)
	if !o.goes(func() {
		v, err := o.change(o.ctx, p, w)
		x := outcome{err: err}
		if err == nil {
			x.info = ca.described(o.ctx, v)
		}
		end() // before the answer
		done <- x
	}) {
		end()
		return none, o.gone()
	}
	select {
	case x := <-done:
		return x.info, x.err
	case <-ctx.Done():
		return none, meta.E("change volume", meta.Interrupted, v.Name, context.Cause(ctx))
	}
}

// change does setVolume's work for the caller with the turn. change checks for refusals before
// any change; only the caller with the turn changes labels.
func (o *owner) change(ctx context.Context, to meta.Policy, w *meta.VolumeWords) (v cluster.Volume, err error) {
	if err := o.words.labelsFit(ctx, w.Labels); err != nil {
		return v, err
	}
	var unmet error
	if w.Only == nil || len(w.Only) > 0 {
		now, err := o.policy()
		if err != nil {
			return v, err
		}
		if w.Only != nil {
			p := now
			if err := p.Change(&to, w.Only...); err != nil {
				return v, err
			}
			to = p
		}
		if err := to.Check(); err != nil {
			return v, err
		}
		if otherPlaces(&now, &to) && !w.Force {
			if err := o.srv.serverMap.meetable(&to); err != nil {
				return v, err
			}
		}
		set := func() error { return o.setPolicy(ctx, to) }
		switch {
		case to.Immutable && !now.Immutable:
			err = o.openEnds.endWriting(ctx, writingEnd{op: "make immutable", force: w.Force}, set)
		case to.SealOnClose && !now.SealOnClose:
			// A client with an open file during the change may close the file either way.
			err = o.openEnds.endWriting(ctx, writingEnd{op: "seal on close", goesOn: true}, set)
		default:
			err = set()
		}
		if err != nil {
			return v, err
		}
		if saysPlace(w.Only) {
			if to.Class != now.Class {
				o.inspection.listAnew() // lists show the disks of a server's replicas
			}
			plain := to.Encrypt && (!now.Encrypt || slices.Contains(w.Only, "encrypt"))
			unmet = o.endUnmet(ctx, &to, plain)
		}
	}
	v, err = o.words.settlePolicy(ctx, func(v *cluster.Volume) { say(v, w) })
	if w.Only == nil || len(w.Only) > 0 {
		o.told.tellPolicy(ctx) // after the write of the row, because clients read the row, too
	}
	if err != nil {
		return v, err
	}
	o.words.set(&v)
	if len(w.Labels) > 0 {
		err = o.srv.cfg.Cluster.ChangeLabels(ctx, v.ID, w.Labels)
	}
	return v, errors.Join(err, unmet)
}

// find returns the volume that a request names by id or by name.
func (ca *catalogue) find(ctx context.Context, m *wire.Admin) (cluster.Volume, error) {
	if m.Volume != 0 {
		return ca.cfg.Cluster.Volume(ctx, m.Volume)
	}
	return ca.cfg.Cluster.VolumeByName(ctx, m.Name)
}

// adminOf returns the volumes that a request concerns.
func (ca *catalogue) adminOf(ctx context.Context, m *wire.Admin) ([]meta.VolumeID, error) {
	v, err := ca.find(ctx, m)
	if err != nil {
		return nil, err
	}
	return []meta.VolumeID{v.ID}, nil
}

// ownerOf returns the owner of the volume that a request names.
func (ca *catalogue) ownerOf(ctx context.Context, m *wire.Admin) (*owner, error) {
	v, err := ca.find(ctx, m)
	if err != nil {
		return nil, err
	}
	return ca.hosted.ownerFor(ctx, v.ID)
}

// named returns the volume that a request names. Errors: NoSuchVolume, Invalid.
func (ca *catalogue) named(ctx context.Context, ref *admin.VolumeRef) (cluster.Volume, error) {
	switch v := ref.GetVolume().(type) {
	case *admin.VolumeRef_Id:
		return ca.cfg.Cluster.Volume(ctx, meta.VolumeID(v.Id))
	case *admin.VolumeRef_Name:
		return ca.cfg.Cluster.VolumeByName(ctx, v.Name)
	}
	return cluster.Volume{}, meta.E("find volume", meta.Invalid, "", errors.New("the request names no volume"))
}

// numbersOf returns the numbers of volumes that a request names. A volume named by its number may
// be gone. Errors: NoSuchVolume, Invalid.
func (ca *catalogue) numbersOf(ctx context.Context, refs []*admin.VolumeRef) (volumes []meta.VolumeID, err error) {
	for _, ref := range refs {
		id := meta.VolumeID(ref.GetId())
		if id == 0 {
			v, err := ca.named(ctx, ref)
			if err != nil {
				return nil, err
			}
			id = v.ID
		}
		volumes = append(volumes, id)
	}
	return volumes, nil
}

// owned returns the volume that a request names, and the volume's owner, which is this server.
// Errors: NoSuchVolume, Invalid, NotOwner.
func (ca *catalogue) owned(ctx context.Context, ref *admin.VolumeRef) (*owner, cluster.Volume, error) {
	v, err := ca.named(ctx, ref)
	if err != nil {
		return nil, v, err
	}
	o, err := ca.hosted.ownerFor(ctx, v.ID)
	return o, v, err
}

// uncloned checks again that a volume whose row now says deleted has no clones. A clone made
// before the row changed is found here; a later attempt to clone reads the changed row and
// fails. If the volume has clones, uncloned undoes the deletion.
func (ca *catalogue) uncloned(ctx context.Context, v cluster.Volume, token uint64) (cluster.Volume, error) {
	all, err := ca.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return v, err
	}
	if err := dependent("delete volume", v, all); err != nil {
		_, uerr := ca.cfg.Cluster.UpdateVolume(context.WithoutCancel(ctx), v.ID, func(x *cluster.Volume) error {
			x.State, x.Deleted, x.Until = cluster.VolumeActive, 0, 0
			x.Undoes(token)
			return nil
		})
		return v, errors.Join(err, uerr)
	}
	return v, nil
}

// unmirrored refuses to delete a volume named as a target in a mirror's record. After a
// promotion of the target, too: only the record names the snapshots of the source that the
// mirror made. Errors: Busy.
func (ca *catalogue) unmirrored(ctx context.Context, v cluster.Volume) error {
	m, err := ca.cfg.Cluster.Mirror(ctx, v.ID)
	if meta.KindOf(err) == meta.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	return meta.E("delete volume", meta.Busy, v.Name, fmt.Errorf("it is, or was, the target of a mirror of %s: 'penstock mirror delete %s' comes first, with --leave-source if the source is gone", m.Source.Volume, v.Name))
}

// mirrors lists the records of mirrors. A record without a target volume is dropped: the
// deletion of a volume once left the record behind.
func (ca *catalogue) mirrors(ctx context.Context) ([]meta.Mirror, error) {
	c := ca.cfg.Cluster
	l, err := c.Mirrors(ctx)
	if err != nil {
		return nil, err
	}
	known := map[meta.VolumeID]bool{}
	if v := c.View(); v != nil {
		for _, x := range v.Volumes {
			known[x.ID] = true
		}
	}
	all := []meta.Mirror{}
	for _, m := range l {
		if !known[m.Target] { // the view may be older than the volume
			if _, err := c.Volume(ctx, m.Target); meta.KindOf(err) == meta.NoSuchVolume {
				ca.log.Info("the record of a mirror is deleted: the target volume is gone", "target", m.Target, "source", m.Source.Volume)
				if err := c.DropMirror(ctx, m.Target); err != nil {
					return nil, err
				}
				continue
			} else if err != nil {
				return nil, err
			}
		}
		all = append(all, m)
	}
	return all, nil
}

// renameVolume gives a volume another name. Errors: VolumeExists, Invalid,
// NotPermitted (the root volume).
func (ca *catalogue) renameVolume(ctx context.Context, v cluster.Volume, name string, token uint64) (cluster.Volume, error) {
	if v.ID == meta.RootVolume {
		return v, meta.E("rename volume", meta.NotPermitted, v.Name, errors.New("the root volume keeps its name"))
	}
	v, err := ca.cfg.Cluster.UpdateVolume(ctx, v.ID, func(v *cluster.Volume) error {
		if v.Did(token) {
			return nil
		}
		if v.State != cluster.VolumeActive {
			return meta.E("rename volume", meta.NoSuchVolume, v.Name, fmt.Errorf("it is %s", v.State))
		}
		v.Name = name
		v.Does(token)
		return nil
	})
	if err != nil {
		return v, err
	}
	if o := ca.hosted.opened(v.ID); o != nil {
		o.words.rename(v.Name)
	}
	return v, nil
}

// usageElsewhere fills in the usage and policy of volumes owned by other servers.
func (ca *catalogue) usageElsewhere(ctx context.Context, all []meta.VolumeInfo) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	for _, m := range ca.peers.others() {
		c, err := ca.api.peers.client(m.Addr, false)
		if err != nil {
			ca.log.Info("a metadata server does not answer about its volumes", "server", m.Name, "error", err)
			continue
		}
		for theirs, err := range c.EachVolume(ctx, &admin.ListVolumesRequest{Server: m.Name}) {
			if err != nil {
				ca.log.Info("a metadata server does not answer about its volumes", "server", m.Name, "error", err)
				break
			}
			at, found := slices.BinarySearchFunc(all, theirs.ID, func(v meta.VolumeInfo, id meta.VolumeID) int { return cmp.Compare(v.ID, id) })
			if found {
				all[at].UsedBytes, all[at].UsedInodes, all[at].Policy, all[at].Open = theirs.UsedBytes, theirs.UsedInodes, theirs.Policy, true
			}
		}
	}
}
