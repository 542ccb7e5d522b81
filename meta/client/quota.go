package client

import (
	"context"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// QuotaHandler is a Handler that reserves what it writes in volumes with a
// quota.
type QuotaHandler interface {
	// Metered: the volume has a quota of bytes, or none; with overwrites what is
	// overwritten is to be reserved as well. When that comes with settle not nil, what was written unmetered is to be committed first, and
	// settle called. It must not block, and not call into the session: it is
	// called in the owner's order, before anything that was answered later.
	Metered(v meta.VolumeID, on, overwrites bool, settle func())
	// Reclaim asks for what lies idle of the promises: it is given back with a
	// Reserve of that round. It must not block.
	Reclaim(v meta.VolumeID, round uint64)
}

// Promise is the answer to Reserve.
type Promise struct {
	Granted uint64 // with a place it may be less than was asked for, and is all that it takes
	Idle    uint64 // at most so much may lie unused
	Metered bool   // false: the volume has no quota any more
}

// Reserve gives back give bytes of what the session was promised of a volume's
// quota and asks for want more. round is that of the Reclaim that it answers,
// or zero. Only one call for a volume may be under way. It should not be
// canceled: what is granted then is lost until the session ends.
// With a place, where there is no room for want it may do with less: what is stored
// there and in no snapshot takes none.
// It is sent in one epoch only, as DoBatch says: what another session is promised, the
// caller would not believe in.
// Errors: QuotaExceeded, SessionExpired.
func (s *Session) Reserve(ctx context.Context, v meta.VolumeID, epoch, give, want, round uint64, at Place) (Promise, error) {
	return s.reserve(ctx, epoch, &wire.Reserve{Volume: v, Give: give, Want: want, Round: round, Ino: at.Ino, Off: at.Off, Len: at.Len})
}

// Place is where bytes will be written, under an exclusive lease; without a length it
// is not said.
type Place struct {
	Ino      meta.Ino
	Off, Len uint64
}

// Inherit gives what a predecessor (Config.Session) was promised of a volume's quota
// and had not used; Granted is this process's from then on. It comes before
// anything else about the volume.
func (s *Session) Inherit(ctx context.Context, v meta.VolumeID) (Promise, error) {
	return s.reserve(ctx, AnyEpoch, &wire.Reserve{Volume: v, Inherit: true})
}

func (s *Session) reserve(ctx context.Context, epoch uint64, m *wire.Reserve) (Promise, error) {
	re, err := s.roundTripAfter(ctx, m.Volume, m, left, func(vs *volumeState) error {
		if epoch != AnyEpoch && epoch != vs.epoch {
			return meta.E("reserve", meta.SessionExpired, s.cfg.Name, fmt.Errorf("in volume %d, since this was begun", m.Volume))
		}
		vs.serial++ // as with frames, a predecessor's numbers are behind us
		m.Serial = vs.serial
		m.Give = min(m.Give, vs.held)
		vs.held -= m.Give
		return nil
	})
	if err != nil {
		return Promise{}, err
	}
	r, ok := re.(*wire.Reserved)
	if !ok {
		return Promise{}, re.(*wire.Reply).Status.Error()
	}
	return Promise{r.Granted, r.Idle, r.Metered}, r.Status.Error()
}

// spent ends what was promised for operations that succeeded; more, for one that
// fails, is kept. Caller holds mu.
func (vs *volumeState) spent(c *wire.Call, a *wire.Reply) {
	if !c.Draw && !c.Replay && a.Status.Err == meta.KindOK {
		vs.held -= min(vs.held, c.Reserved)
	}
}

// quota passes on what an owner says of a quota.
func (s *Session) quota(c *conn, m *wire.Quota) {
	s.mu.Lock()
	vs := s.volumes[m.Volume]
	here := vs != nil && vs.conn == c
	if here && !m.Metered {
		vs.held = 0
	}
	s.mu.Unlock()
	if !here {
		return // who owns the volume now says so itself
	}
	answer := func() {
		s.wg.Go(func() {
			if _, err := s.Reserve(s.ctx, m.Volume, AnyEpoch, 0, 0, m.Round, Place{}); err != nil {
				s.log.Warn("the owner waits for an answer about the quota", "volume", m.Volume, "error", err)
			}
		})
	}
	h, ok := s.cfg.Handler.(QuotaHandler)
	switch {
	case !ok && m.Round != 0:
		answer()
	case !ok:
	case m.Settle:
		h.Metered(m.Volume, true, m.Overwrites, answer)
	case m.Round != 0:
		h.Reclaim(m.Volume, m.Round)
	default:
		h.Metered(m.Volume, m.Metered, m.Overwrites, nil)
	}
}
