package server

import (
	"context"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// An unused volume is closed: a closed volume costs only a folder and some keys at etcd. But
// its chunks still need inspection. So the volume's home opens the volume regularly, and
// whenever the chunk servers got worse, lets the volume inspect its chunks, and closes it
// again.

const (
	visitEvery = 10 * time.Minute // at least between two visits of a closed volume: see between
	visitAgain = 10 * time.Second // after a failed visit
	visitPace  = 4                // volumes opened at each look
	visitLook  = 500 * time.Millisecond
)

// between is the time between two visits of a volume while the chunk servers stay the same. A
// round through all volumes takes at most a quarter of between.
func between(volumes int) time.Duration { return max(visitEvery, 4*visitRound(volumes)) }

// visitRound is how long the visits of so many volumes take.
func visitRound(volumes int) time.Duration { return time.Duration(volumes/visitPace) * visitLook }

// visits remember when closed volumes were looked after.
type visits struct {
	at map[meta.VolumeID]time.Time
	// not maps each volume that could not be opened to the time before which visit does not
	// try again.
	not map[meta.VolumeID]time.Time
	// finest is the shortest interval of each schedule, by the schedule's text; 0: none.
	finest map[string]time.Duration
	// seen is the state of the chunk servers at the last visit; see standing.
	seen []serverStanding
}

// due lists the closed volumes of this home to visit now. Volumes with a snapshot due come
// first, unless they could not be opened; then the volumes unvisited for the longest time.
func (v *visits) due(hs *hosted, view *cluster.View, now time.Time) (ids []meta.VolumeID) {
	every := between(len(view.Volumes))
	wants := map[meta.VolumeID]bool{}
	for i := range view.Volumes {
		x := &view.Volumes[i]
		if x.State != cluster.VolumeActive && x.State != cluster.VolumeTrash || now.Before(v.not[x.ID]) || hs.opened(x.ID) != nil {
			continue
		}
		snapshot := x.State == cluster.VolumeActive && v.wantsSnapshot(x, now)
		if !snapshot && now.Sub(v.at[x.ID]) < every {
			continue
		}
		if _, mine := hs.home(x.ID); mine {
			ids = append(ids, x.ID)
			wants[x.ID] = snapshot && v.not[x.ID].IsZero()
		}
	}
	slices.SortStableFunc(ids, func(a, b meta.VolumeID) int {
		if wants[a] != wants[b] {
			return map[bool]int{true: -1, false: 1}[wants[a]]
		}
		return v.tried(a).Compare(v.tried(b))
	})
	return ids
}

// tried is the later of a volume's last visit and its time in not, so that volumes that could
// not be opened come last.
func (v *visits) tried(id meta.VolumeID) time.Time {
	at, not := v.at[id], v.not[id]
	if at.After(not) {
		return at
	}
	return not
}

// wantsSnapshot reports whether an interval of the volume's schedule began since the last
// visit.
func (v *visits) wantsSnapshot(x *cluster.Volume, now time.Time) bool {
	if x.Keep == "" {
		return false
	}
	every, known := v.finest[x.Keep]
	if !known {
		if rules, err := parseKeep(x.Keep); err == nil && len(rules) > 0 {
			every = finest(rules)
		}
		if v.finest == nil || len(v.finest) > 1000 {
			v.finest = map[string]time.Duration{}
		}
		v.finest[x.Keep] = every
	}
	return every > 0 && bucket(v.at[x.ID], every) < bucket(now, every)
}

// visit opens up to visitPace of the volumes that are due.
func (v *visits) visit(hs *hosted, view *cluster.View, now time.Time) {
	standing := hs.serverMap.standing()
	if worse(v.seen, standing) {
		clear(v.at)
		clear(v.not)
	}
	v.seen = standing
	pace := visitPace
	for _, id := range v.due(hs, view, now) {
		if pace == 0 {
			break
		}
		h, err := hs.cfg.Cluster.Holder(hs.ctx, id)
		if err != nil {
			pace-- // tried again with the next look
			continue
		}
		if h.Held || h.Name == "" {
			v.at[id] = now // served elsewhere, or never used
			continue
		}
		pace--
		state := cluster.VolumeActive
		if x, ok := view.Volume(id); ok {
			state = x.State // a volume in the trash has chunks, too
		}
		if _, err := hs.openAs(hs.ctx, id, state, ""); err == nil {
			v.at[id] = now
			delete(v.not, id)
		} else if hs.ctx.Err() == nil {
			v.not[id] = time.Now().Add(visitAgain) // the attempt may have taken long
			hs.log.Info("a volume could not be visited", "volume", id, "error", err)
		}
	}
}

// visitLoop visits closed volumes, and closes idle volumes.
func (hs *hosted) visitLoop() {
	v := visits{at: map[meta.VolumeID]time.Time{}, not: map[meta.VolumeID]time.Time{}}
	idle := map[*owner]time.Time{} // since when
	t := time.NewTicker(visitLook)
	defer t.Stop()
	for {
		select {
		case <-hs.ctx.Done():
			return
		case <-t.C:
		}
		view := hs.cfg.Cluster.View()
		if view == nil {
			continue
		}
		now := time.Now()
		v.visit(hs, view, now)
		for _, o := range hs.owners() {
			if !o.unused() {
				delete(idle, o)
				continue
			}
			if idle[o].IsZero() {
				idle[o] = now
			}
			if now.Sub(idle[o]) < hs.cfg.IdleClose || !o.checkpoints.mayRest() {
				continue
			}
			delete(idle, o)
			if st, err := o.status(); err != nil || !st.Full() {
				continue // some chunks need work
			}
			v.at[o.vol] = now
			ctx, cancel := context.WithTimeout(hs.ctx, 10*time.Second)
			if err := o.handOver(ctx, ""); err != nil && hs.ctx.Err() == nil {
				o.log.Info("an idle volume could not be closed", "error", err)
			}
			cancel()
		}
		for o := range idle {
			if o.ctx.Err() != nil {
				delete(idle, o)
			}
		}
	}
}
