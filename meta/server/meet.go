package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
)

// A policy holds from the moment when the request setting it is answered. Chunks begun later
// meet the policy. Chunks being appended to that do not meet the policy are ended: their
// writers go on in new chunks, and the ended chunks are repaired like any sealed chunk. As
// while servers are away, a chunk may have fewer replicas than the policy wants if there is no
// room for more, but no fewer than the policy's least number. A policy that the cluster cannot
// meet is refused.

// meetWait is how long open chunks may take to be ended before a change of policy is
// answered without.
const meetWait = 10 * time.Second

// unmet is why the chunk servers of m can't meet a policy, if all of them are live. Empty:
// they can, or m has no servers.
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

// unmet is why the chunk servers of m, if all of them are live, can't meet the volume's
// policy.
func (o *owner) unmet(m *placement.Map) string {
	p, err := o.policy()
	if err != nil {
		return "" // told where the volume is read
	}
	return unmet(m, &p)
}

// placeWords are the words of a policy about the places and the number of a chunk's replicas.
var placeWords = []string{"replicas", "min-replicas", "topology", "spread", "class", "encrypt"}

// saysPlace reports whether a request sets the places or the number of replicas; nil words set
// everything. The request counts even if the policy stays the same: the owner before may have
// journaled the policy and died before it ended the chunks.
func saysPlace(words []string) bool {
	return words == nil || slices.ContainsFunc(words, func(w string) bool { return slices.Contains(placeWords, w) })
}

// otherPlaces reports whether two policies differ about replicas and their places.
func otherPlaces(was, to *meta.Policy) bool {
	return was.Replicas != to.Replicas || was.Topology != to.Topology || was.Spread != to.Spread || was.Class != to.Class
}

// endUnmet ends the open chunks that do not meet the policy to, after a request set the
// policy. plain: also all other open chunks, since their clients may append without TLS.
// Errors: Unavailable (some chunks can't be ended now: data appended to such a chunk does not
// meet the policy until the request is repeated, or an inspection ends the chunk).
func (o *owner) endUnmet(ctx context.Context, to *meta.Policy, plain bool) error {
	if o.srv.cfg.Unsafe.NoMeet {
		return nil
	}
	defer o.tasks.inspection.Wake()
	m := o.srv.serverMap.servers()
	var unmet []meta.ChunkID
	err := o.read(func(v *view) error {
		return namespace.AllOpenChunks(v, func(c meta.ChunkRecord, _ meta.Ino) bool {
			// The owner itself soon seals the chunks that it fills.
			if !o.collection.filling[c.ID] && !o.indexing.parts[c.ID] && (plain || !m.Meets(to, c.Servers) || m.Fuller(to, c.Servers, o.srv.chunkServers.suspected.of(c.Session))) {
				unmet = append(unmet, c.ID)
			}
			return true
		})
	})
	if err != nil || len(unmet) == 0 {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, meetWait, errors.New("their chunk servers did not answer in time"))
	defer cancel()
	s := o.sealing.sealThese(ctx, unmet)
	err = s.gone()
	if err != nil {
		return meta.E("set policy", meta.Unavailable, o.subject(), fmt.Errorf("the policy is set, but chunks that are being appended to and don't meet it can't be ended yet; set it again, or use --wait: %w", err))
	}
	o.log.Info("open chunks that did not meet the new policy were ended; their writers go on in new chunks", "chunks", len(unmet))
	return nil
}

// gone waits for the seals. Errors: those of the chunks that still exist.
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

// fewer reports whether a chunk has fewer replicas than its policy permits for a new chunk:
// the chunk was begun under another policy, and the owner died before ending the chunk.
func fewer(p *meta.Policy, on []meta.ServerID) bool { return len(on) < int(p.Least()) }
