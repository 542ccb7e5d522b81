package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
)

// A policy holds when the request that sets it is answered: chunks that are begun after
// that are as it wants them, and those that are still being appended to and are not have
// ended where they were. Their writers go on in others, and what they have is repaired as of
// any sealed chunk. As while servers are away, a chunk may have fewer replicas than the
// policy wants where there is no room for more, but not fewer than its least number.
// What nothing in the cluster can meet is refused.

// meetWait is how long open chunks may take to be ended before a change of policy is
// answered without.
const meetWait = 10 * time.Second

// meetable refuses a policy that the chunk servers that are registered can't meet, be they
// there now or not: a node that is down is one that comes back, and what the registry knows
// counts also where this process has not seen it. As long as none is registered nothing is
// known, and nothing refused; while some are still arriving in a new cluster, a policy that
// needs them is refused until they are registered. Errors: ResourceExceeded.
func (s *Server) meetable(p *meta.Policy) error {
	if why := unmet(s.registered(), p); why != "" {
		return meta.E("set policy", meta.ResourceExceeded, "", fmt.Errorf("nothing in the cluster can meet the policy: %s; add chunk servers, wait until those that are starting are listed by 'penstock node list', ask for less, or force it (--force)", why))
	}
	return nil
}

// registered are the chunk servers that were not given up, there or not.
func (s *Server) registered() *placement.Map {
	nodes := s.cfg.Cluster.Nodes()
	var all []placement.Server
	for _, x := range s.servers().Servers() {
		if n := nodeIn(nodes, x.ID); n == nil || n.State != cluster.NodeRemoved {
			all = append(all, x)
		}
	}
	return placement.NewMap(all)
}

// unmet is why a policy can't be met by some chunk servers, all there; empty: it can be, or
// there are none, of which nothing follows.
func unmet(m *placement.Map, p *meta.Policy) string {
	if len(m.Servers()) == 0 {
		return ""
	}
	err := m.Meetable(p)
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*meta.Error](err); ok && e.Err != nil {
		err = e.Err
	}
	return err.Error()
}

// unmet is why some chunk servers, all there, can't meet the volume's policy.
func (o *owner) unmet(m *placement.Map) string {
	p, err := o.policy()
	if err != nil {
		return "" // told where the volume is read
	}
	return unmet(m, &p)
}

// placeWords are the words of a policy that say where chunks lie, and how many there are.
var placeWords = []string{"replicas", "min-replicas", "topology", "spread", "class", "encrypt"}

// saysPlace tells whether a request says where a volume's chunks lie: also if that is what
// its policy says already, since whoever owned the volume before may have journaled that,
// and ended nothing. Without words it says all of them.
func saysPlace(words []string) bool {
	return words == nil || slices.ContainsFunc(words, func(w string) bool { return slices.Contains(placeWords, w) })
}

// otherPlaces tells whether a policy says of replicas and their places what one before did not.
func otherPlaces(was, to *meta.Policy) bool {
	return was.Replicas != to.Replicas || was.Topology != to.Topology || was.Spread != to.Spread || was.Class != to.Class
}

// endUnmet ends the open chunks that are not as the policy wants them, after a request set
// it. plain: also those that are appended to without TLS. Errors: Unavailable (some can't
// be ended now: what is appended to them is not as the policy wants until the request is
// made again, or an inspection has ended them).
func (o *owner) endUnmet(ctx context.Context, to *meta.Policy, plain bool) error {
	if o.srv.cfg.Unsafe.NoMeet {
		return nil
	}
	defer o.tasks.inspection.Wake()
	m := o.srv.servers()
	var unmet []meta.ChunkID
	o.mu.Lock()
	err := namespace.AllOpenChunks(&view{o: o}, func(c meta.ChunkRecord, _ meta.Ino) bool {
		// What the owner fills itself it seals itself, in a moment.
		if !o.filling[c.ID] && !o.indexing.parts[c.ID] && (plain || !m.Meets(to, c.Servers) || m.Fuller(to, c.Servers, o.srv.suspected.of(c.Session))) {
			unmet = append(unmet, c.ID)
		}
		return true
	})
	o.mu.Unlock()
	if err != nil || len(unmet) == 0 {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, meetWait, errors.New("their chunk servers did not answer in time"))
	defer cancel()
	s := o.sealThese(ctx, unmet)
	err = s.gone()
	if err != nil {
		return meta.E("set policy", meta.Unavailable, o.subject(), fmt.Errorf("the policy is set, but chunks that are being appended to and don't meet it can't be ended yet; set it again, or use --wait: %w", err))
	}
	o.log.Info("chunks that did not meet the new policy were ended, their writers go on in others", "chunks", len(unmet))
	return nil
}

// gone waits for the seals. Errors: those of the chunks that are still there.
func (s *seals) gone() error {
	<-s.done
	var errs []error
	for _, err := range s.errs {
		if !errors.Is(err, meta.NoSuchChunk) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// fewer tells whether a chunk has fewer replicas than its policy lets chunks begin with:
// it was begun under another policy, and whoever owned the volume died before it was ended.
func fewer(p *meta.Policy, on []meta.ServerID) bool { return len(on) < int(p.Least()) }
