package client

import (
	"context"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// QuotaHandler is a Handler reserving quota before it writes.
type QuotaHandler interface {
	// Metered: on reports that the volume has a quota of bytes; with overwrites the handler
	// must reserve overwritten bytes as well. If settle is not nil, the handler must first
	// commit the bytes that it wrote unmetered, and then call settle. Metered must not block
	// and must not call the session: the session calls Metered in the order of the owner's
	// messages, before it delivers later answers.
	Metered(v meta.VolumeID, on, overwrites bool, settle func())
	// Reclaim asks the handler to give back the idle part of its promises with a Reserve of
	// the same round. Reclaim must not block.
	Reclaim(v meta.VolumeID, round uint64)
}

// Promise is the answer to Reserve.
type Promise struct {
	Granted uint64 // bytes; with a place possibly fewer than asked, yet enough for the write
	Idle    uint64 // the session may leave up to Idle bytes unused
	Metered bool   // false: the volume has no quota any more
}

// Reserve gives back give bytes of the session's promise of a volume's quota and asks for want
// more bytes. round is the round of the Reclaim that this call answers, or zero. Only one call
// per volume may be in progress. The caller should not cancel ctx: bytes granted after a
// cancel are lost until the session ends.
//
// With a place, the owner may grant fewer bytes if the quota has no room for want: bytes that
// are stored at the place and in no snapshot need no promise.
//
// The session sends the request in one epoch only (see DoBatch): the caller would not count a
// promise made to the session's next epoch. Errors: QuotaExceeded, SessionExpired.
func (s *Session) Reserve(ctx context.Context, v meta.VolumeID, epoch, give, want, round uint64, at Place) (Promise, error) {
	return s.reserve(ctx, epoch, &wire.Reserve{Volume: v, Give: give, Want: want, Round: round, Ino: at.Ino, Off: at.Off, Len: at.Len})
}

// Place is the range of a coming write, under an exclusive lease. A zero Len means no place.
type Place struct {
	Ino      meta.Ino
	Off, Len uint64
}

// Inherit takes over the unused part of the promise that a predecessor (Config.Session) got of
// a volume's quota. Granted belongs to this process from then on. Call Inherit before any
// other request of the volume.
func (s *Session) Inherit(ctx context.Context, v meta.VolumeID) (Promise, error) {
	return s.reserve(ctx, AnyEpoch, &wire.Reserve{Volume: v, Inherit: true})
}

func (s *Session) reserve(ctx context.Context, epoch uint64, m *wire.Reserve) (Promise, error) {
	re, err := s.roundTripAfter(ctx, m.Volume, m, left, func(vs *volumeState) error {
		if epoch != AnyEpoch && epoch != vs.epoch {
			return meta.E("reserve", meta.SessionExpired, s.cfg.Name, fmt.Errorf("in volume %d, since this was begun", m.Volume))
		}
		vs.serial++ // larger than every Serial of a predecessor, by Generation
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

// spent subtracts the promise that a successful operation used up. The promise of a failed
// operation is kept. The caller holds mu.
func (vs *volumeState) spent(c *wire.Call, a *wire.Reply) {
	if !c.Draw && !c.Replay && a.Status.Err == meta.KindOK {
		vs.held -= min(vs.held, c.Reserved)
	}
}

// quota passes an owner's message about a quota to the handler.
func (s *Session) quota(c *conn, m *wire.Quota) {
	s.mu.Lock()
	vs := s.volumes[m.Volume]
	here := vs != nil && vs.conn == c
	if here && !m.Metered {
		vs.held = 0
	}
	s.mu.Unlock()
	if !here {
		return // c leads to a former owner; the present owner sends its own message
	}
	settled := func() {
		s.wg.Go(func() {
			if _, err := s.Reserve(s.ctx, m.Volume, AnyEpoch, 0, 0, m.Round, Place{}); err != nil {
				s.log.Warn("the owner waits for an answer about the quota", "volume", m.Volume, "error", err)
			}
		})
	}
	h, ok := s.cfg.Handler.(QuotaHandler)
	switch {
	case !ok && m.Round != 0:
		settled()
	case !ok:
	case m.Settle:
		h.Metered(m.Volume, true, m.Overwrites, settled)
	case m.Round != 0:
		h.Reclaim(m.Volume, m.Round)
	default:
		h.Metered(m.Volume, m.Metered, m.Overwrites, nil)
	}
}
