package server

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
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
	s.describeIn(ctx, re, s.newPaths(all), page)
	if m.Entry != ownedHere {
		s.usageElsewhere(ctx, re.Volumes)
	}
	return nil
}

// describe fills in an answer about volumes.
func (s *Server) describe(ctx context.Context, re *wire.AdminRe, all ...cluster.Volume) {
	s.describeIn(ctx, re, s.newPaths(all), all)
}

func (s *Server) describeIn(ctx context.Context, re *wire.AdminRe, in *paths, all []cluster.Volume) {
	details := make([]wire.VolumeDetail, 0, len(all))
	for _, v := range all {
		re.Volumes = append(re.Volumes, s.volumeInfo(ctx, in, v))
		d := wire.VolumeDetail{ID: v.ID, State: wire.VolumeReady, Created: goTime(v.Created), TrashSeconds: v.TrashSeconds,
			Deleted: goTime(v.Deleted), Until: goTime(v.Until), Open: s.opened(v.ID) != nil,
			Compression: cmp.Or(v.Compression, meta.CompressNone.String())}
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

// wordsOf reads what a request says of a volume's row. Errors: Protocol, Invalid.
func wordsOf(m *wire.Admin) (func(*cluster.Volume), error) {
	var w wire.VolumeWords
	if err := readBody(m, &w); err != nil {
		return nil, err
	}
	if w.TrashSeconds != nil && *w.TrashSeconds > uint64(MaxTrash/time.Second) {
		return nil, meta.E("change volume", meta.Invalid, m.Name, fmt.Errorf("a trash time is at most %d days", MaxTrash/(24*time.Hour)))
	}
	if err := checkCompression(w.Compression); err != nil {
		return nil, err
	}
	return func(v *cluster.Volume) {
		if w.TrashSeconds != nil {
			v.TrashSeconds = *w.TrashSeconds
		}
		if w.Compression != nil {
			if v.Compression = *w.Compression; v.Compression == meta.CompressNone.String() {
				v.Compression = ""
			}
		}
		sayAdvisory(v, &w)
	}, nil
}
