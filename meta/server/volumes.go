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

// What is told of volumes.

// listVolumes answers AdminVolumes.
func (s *Server) listVolumes(ctx context.Context, m *wire.Admin, re *wire.AdminRe) error {
	all, err := s.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	if len(all) <= maxListed {
		// What is closed tells no usage.
		if _, err := s.openHome(ctx); err != nil {
			s.log.Info("not every volume could be opened to be listed", "error", err)
		}
	}
	var page []cluster.Volume
	for _, v := range all {
		if v.ID <= m.Parent || v.State == cluster.VolumeCreating || m.Entry == ownedHere && s.opened(v.ID) == nil {
			continue
		}
		if page = append(page, v); m.Ino != 0 && len(page) == int(m.Ino) {
			break
		}
	}
	peer := m.Entry == ownedHere // which asks for what is used, and the policy
	if err := s.describeIn(ctx, re, s.newPaths(all), page, peer); err != nil {
		return err
	}
	if !peer {
		s.usageElsewhere(ctx, re.Volumes)
	}
	return nil
}

// describe fills in an answer about volumes that were changed: what was done is not
// undone if labels can't be read, and the answer says so.
func (s *Server) describe(ctx context.Context, re *wire.AdminRe, all ...cluster.Volume) {
	if err := s.describeIn(ctx, re, s.newPaths(all), all, false); err != nil {
		s.log.Warn("volumes were changed, and who asked is told nothing of their labels", "error", err)
	}
}

// describeIn fills in an answer about volumes, ascending by number; plain, without
// their labels. Errors: Unavailable (their labels; the rest is filled in). A volume
// whose labels are damaged, or a newer server's, is told of with a word of that.
func (s *Server) describeIn(ctx context.Context, re *wire.AdminRe, in *paths, all []cluster.Volume, plain bool) error {
	details := make([]wire.VolumeDetail, 0, len(all))
	var labels map[meta.VolumeID]cluster.Labels
	var lerr error
	if !plain {
		labels, lerr = s.labelsOf(ctx, all)
	}
	for _, v := range all {
		re.Volumes = append(re.Volumes, s.volumeInfo(ctx, in, v))
		d := wire.VolumeDetail{ID: v.ID, State: wire.VolumeReady, Created: goTime(v.Created), TrashSeconds: v.TrashSeconds,
			Deleted: goTime(v.Deleted), Until: goTime(v.Until), Open: s.opened(v.ID) != nil,
			Compression: cmp.Or(v.Compression, meta.CompressNone.String()), Labels: labels[v.ID].Set}
		if lerr != nil {
			d.LabelsUnread = lerr.Error()
		} else if err := labels[v.ID].Err; err != nil {
			d.LabelsUnread = err.Error()
			s.log.Warn("a volume's labels can't be read", "volume", v.Name, "error", err)
		}
		advisoryOf(&v, &d)
		if x := v.Origin; x != nil {
			d.Origin = &wire.VolumeOrigin{Volume: x.Volume, Snapshot: x.Snapshot, Implied: x.Implied}
		}
		switch {
		case v.State == cluster.VolumeTrash:
			d.State = wire.VolumeInTrash
		case v.State == cluster.VolumeDeleting:
			d.State = wire.VolumeDeleting
		case v.Attach != nil && v.Attach.Step == cluster.Attaching:
			d.State = wire.VolumeAttaching
		case v.Attach != nil && v.Attach.Step == cluster.Detaching:
			d.State = wire.VolumeDetaching
		}
		details = append(details, d)
	}
	b, err := json.Marshal(details)
	if err != nil {
		panic("server: details are plain data: " + err.Error())
	}
	re.Report = b
	return lerr
}

// labelsOf reads the labels of volumes, ascending by number.
func (s *Server) labelsOf(ctx context.Context, all []cluster.Volume) (map[meta.VolumeID]cluster.Labels, error) {
	if len(all) == 0 {
		return nil, nil
	}
	return s.cfg.Cluster.Labels(ctx, all[0].ID, all[len(all)-1].ID)
}

// goTime is a time of a record; a record without one has none.
func goTime(t meta.Time) time.Time {
	if t == 0 {
		return time.Time{}
	}
	return time.Unix(0, int64(t))
}

func (s *Server) volumeInfo(ctx context.Context, in *paths, v cluster.Volume) wire.VolumeInfo {
	i := wire.VolumeInfo{ID: v.ID, Name: v.Name, Policy: v.Policy, Deleting: v.State != cluster.VolumeActive}
	if o := s.opened(v.ID); o != nil {
		o.mu.Lock()
		if r, err := namespace.Query(&view{o: o}, o.context(0), &meta.StatFSOp{}); err == nil {
			i.Usage = r.StatFS
		}
		if p, err := namespace.Policy(&view{o: o}); err == nil {
			i.Policy = p // the journal's word, not the table's copy
		}
		o.mu.Unlock()
	}
	switch {
	case v.ID == meta.RootVolume:
		i.Path = "/"
	case v.Attach != nil:
		i.Path = in.of(ctx, v, 0)
	}
	return i
}

// readBody reads what a request says beside its fields; nothing is fine.
// Errors: Protocol.
func readBody(m *wire.Admin, to any) error {
	if len(m.Body) == 0 {
		return nil
	}
	if err := json.Unmarshal(m.Body, to); err != nil {
		return meta.E("admin", meta.Protocol, fmt.Sprintf("request %d", m.Op), err)
	}
	return nil
}

// wordsOf reads what a request says of a volume beside its policy. Errors:
// Protocol, Invalid, NotSupported.
func wordsOf(m *wire.Admin) (w wire.VolumeWords, err error) {
	if err := readBody(m, &w); err != nil {
		return w, err
	}
	if w.TrashSeconds != nil && *w.TrashSeconds > uint64(meta.MaxTrash/time.Second) {
		return w, meta.E("change volume", meta.Invalid, m.Name, fmt.Errorf("a trash time is at most %d days", meta.MaxTrash/(24*time.Hour)))
	}
	if err := meta.CheckLabels(w.Labels); err != nil {
		return w, err
	}
	return w, checkCompression(w.Compression)
}

// tokenOf is what names a request that is to be done once; zero: it is of a program of
// before. Errors: Protocol.
func tokenOf(m *wire.Admin) (uint64, error) {
	var q wire.Once
	err := readBody(m, &q)
	return q.Token, err
}

// createVolume makes a row; the volume's home makes the volume when somebody wants it.
// Errors: those of cluster.CreateVolume, and of wordsOf.
func (s *Server) createVolume(ctx context.Context, m *wire.Admin, re *wire.AdminRe) error {
	w, err := wordsOf(m)
	if err != nil {
		return err
	}
	if !w.Force {
		if err := s.meetable(&m.Policy); err != nil {
			return err
		}
	}
	token, err := tokenOf(m)
	if err != nil {
		return err
	}
	labels, err := meta.ChangeLabels(nil, w.Labels)
	if err != nil {
		return err
	}
	v, err := s.cfg.Cluster.CreateVolume(ctx, m.Name, m.Policy, meta.Time(time.Now().UnixNano()), func(v *cluster.Volume) {
		say(v, &w)
		v.Labels = labels
		v.Does(token)
	})
	if errors.Is(err, meta.VolumeExists) {
		// By the same request, perhaps, whose answer was lost.
		if have, herr := s.cfg.Cluster.VolumeByName(ctx, m.Name); herr == nil && have.Did(token) {
			v, err = have, nil
		}
	}
	if err != nil {
		return err
	}
	s.describe(ctx, re, v)
	return nil
}

// say changes a volume's row as words say.
func say(v *cluster.Volume, w *wire.VolumeWords) {
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

// setVolume changes a volume's policy, or the words of it that the request names,
// and what else its row says. The journal, memory and the row get the policies of
// requests that come at once in the same order, since one at a time is served; and
// all three get it even if who asked has gone.
func (s *Server) setVolume(ctx context.Context, m *wire.Admin, re *wire.AdminRe) error {
	w, err := wordsOf(m)
	if err != nil {
		return err
	}
	v, err := s.find(ctx, m)
	if err != nil {
		return err
	}
	o, err := s.ownerFor(ctx, v.ID)
	if err != nil {
		return err
	}
	end, err := s.setting.begin(ctx, v.ID)
	if err != nil {
		return err
	}
	type outcome struct {
		re  wire.AdminRe // as it was before the next could change it
		err error
	}
	done := make(chan outcome, 1)
	if !o.goes(func() {
		defer end()
		v, err := o.change(o.ctx, m.Policy, &w)
		x := outcome{err: err}
		if err == nil {
			s.describe(o.ctx, &x.re, v)
		}
		done <- x
	}) {
		end()
		return o.gone()
	}
	select {
	case x := <-done:
		if x.err == nil {
			*re = x.re
		}
		return x.err
	case <-ctx.Done():
		return meta.E("change volume", meta.Interrupted, v.Name, context.Cause(ctx))
	}
}

// goes runs f, which the owner waits for before it closes its store. false: it
// serves no more.
func (o *owner) goes(f func()) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ctx.Err() != nil || o.stClosed {
		return false
	}
	o.wg.Go(f)
	return true
}

// change is setVolume for who has the turn. What can be refused is looked at before
// anything is changed; labels are changed by who has the turn alone.
func (o *owner) change(ctx context.Context, to meta.Policy, w *wire.VolumeWords) (v cluster.Volume, err error) {
	if err := o.labelsFit(ctx, w.Labels); err != nil {
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
			if err := o.srv.meetable(&to); err != nil {
				return v, err
			}
		}
		set := func() error { return o.setPolicy(ctx, to) }
		switch {
		case to.Immutable && !now.Immutable:
			err = o.endWriting(ctx, writingEnd{op: "make immutable", force: w.Force}, set)
		case to.SealOnClose && !now.SealOnClose:
			// Who has a file open when the policy changes may close it either way.
			err = o.endWriting(ctx, writingEnd{op: "seal on close", goesOn: true}, set)
		default:
			err = set()
		}
		if err != nil {
			return v, err
		}
		if saysPlace(w.Only) {
			if to.Class != now.Class {
				o.listAnew() // lists tell on which disks of a server its replicas lie
			}
			plain := to.Encrypt && (!now.Encrypt || slices.Contains(w.Only, "encrypt"))
			unmet = o.endUnmet(ctx, &to, plain)
		}
	}
	v, err = o.settlePolicy(ctx, func(v *cluster.Volume) { say(v, w) })
	if w.Only == nil || len(w.Only) > 0 {
		o.tellPolicy(ctx) // after the row says so: clients read the row as well
	}
	if err != nil {
		return v, err
	}
	o.setWords(&v)
	if len(w.Labels) > 0 {
		err = o.srv.cfg.Cluster.ChangeLabels(ctx, v.ID, w.Labels)
	}
	return v, errors.Join(err, unmet)
}

// labelsFit refuses a change of labels that the volume has no room for, or that
// can't be read. Errors: ResourceExceeded, Corrupt, Version, Unavailable.
func (o *owner) labelsFit(ctx context.Context, change map[string]*string) error {
	if len(change) == 0 {
		return nil
	}
	all, err := o.srv.cfg.Cluster.Labels(ctx, o.vol, o.vol)
	if err == nil {
		err = all[o.vol].Err
	}
	if err == nil {
		_, err = meta.ChangeLabels(all[o.vol].Set, change)
	}
	return err
}

// settlePolicy has the row say of the policy what the journal does. Caller has the
// turn.
func (o *owner) settlePolicy(ctx context.Context, more func(*cluster.Volume)) (cluster.Volume, error) {
	p, err := o.policy()
	if err != nil {
		return cluster.Volume{}, err
	}
	return o.srv.cfg.Cluster.UpdateVolume(ctx, o.vol, func(v *cluster.Volume) error {
		// An owner after this one may have journaled another.
		if err := o.ctx.Err(); err != nil || o.outsideLease() {
			return meta.E("change volume", meta.Unavailable, v.Name, errors.New("whether it is served here is not certain now"))
		}
		v.Policy = p
		more(v)
		return nil
	})
}

// comparePolicy settles the policy of a row that says another than the journal: its
// owner before died in between.
func (o *owner) comparePolicy(v *cluster.Volume) {
	if p, err := o.policy(); err != nil || p == v.Policy {
		return
	}
	o.goes(func() {
		end, err := o.srv.setting.begin(o.ctx, o.vol)
		if err != nil {
			return
		}
		defer end()
		if err = o.await(o.ctx, o.recovered); err == nil {
			_, err = o.settlePolicy(o.ctx, func(*cluster.Volume) {})
		}
		switch {
		case err == nil:
			o.log.Info("the volume's row has its policy again: a server that is gone had only journaled it")
		case o.ctx.Err() == nil:
			o.log.Warn("the volume's row has another policy than its journal, it is looked at again", "error", err)
		}
	})
}
