package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// Administrative requests about volumes.

// catalogue has the rows of all volumes of the cluster: it makes, finds, describes and sets them.
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
		o.tellPolicy(ctx) // after the write of the row, because clients read the row, too
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
