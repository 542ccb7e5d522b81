package sim

import (
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
)

// proposal is a journal entry under way, with its changes for the checks of truth.go.
type proposal struct {
	entry   journal.Entry
	changes []change
}

// verdict is the log's answer to a proposal: its fate, and the present owner of the
// volume.
type verdict struct {
	in    bool // the log has the entry, with the same bytes
	other bool // the log has another entry in the same place
	owned bool
}

// volumeLog is the log of a volume, as etcd stores it: an entry is put only if the
// proposer owns the volume, the previous entry exists and the new entry does not.
type volumeLog struct {
	w      *world
	vol    meta.VolumeID
	owner  *server
	life   int   // of the owner's process
	token  int64 // create revision of the owner's key
	until  int64 // end of the owner's lease, on the store's clock
	term   meta.Term
	first  meta.Seq // of records[0]
	recs   []proposal
	all    []proposal // never trimmed: for the checks
	cp     *checkpoint
	tokens int64
}

// checkpoint is a copy of the state and its position in the log.
type checkpoint struct {
	state *store
}

func newVolumeLog(w *world, v meta.VolumeID) *volumeLog {
	effects := namespace.Format(v, 0, 0o755, 0, 0, meta.Policy{Replicas: 1})
	format := proposal{entry: journal.Next(v, journal.Position{}, 0, namespace.AppendEffects(nil, effects))}
	return &volumeLog{w: w, vol: v, first: 1, recs: []proposal{format}, all: []proposal{format}}
}

func (l *volumeLog) end() journal.Position {
	if len(l.all) == 0 {
		return journal.Position{}
	}
	return l.all[len(l.all)-1].entry.Position()
}

// taken is the answer to a server that takes a volume.
type taken struct {
	token int64
	term  meta.Term
	cp    *checkpoint
	recs  []proposal
}

// take gives the volume to s if no other lease is valid. In the same step it reads the
// log, so the read is linearizable.
func (l *volumeLog) take(s *server, life int) (taken, bool) {
	if l.owner != nil && l.until > l.w.Now && !(l.owner == s && l.life == life) {
		return taken{}, false
	}
	l.tokens++
	l.owner, l.life, l.token, l.until = s, life, l.tokens, l.w.Now+ownerTTL
	l.term++
	l.w.res.Takeovers++
	l.w.trace("volume %d: %s owns it, term %d, log at %d", l.vol, s.name, l.term, l.end().Seq)
	return taken{l.token, l.term, l.cp, append([]proposal(nil), l.recs...)}, true
}

// renew extends an owner's lease.
func (l *volumeLog) renew(token int64) bool {
	if l.token != token || l.until <= l.w.Now {
		return false
	}
	l.until = l.w.Now + ownerTTL
	return true
}

// propose is the transaction.
func (l *volumeLog) propose(token int64, p proposal) verdict {
	// An expired lease deletes the owner's key.
	owned := l.token == token && l.until > l.w.Now || l.w.cfg.Off.Fence
	seq := p.entry.Seq
	if i := int(seq) - 1; i < len(l.all) {
		same := l.all[i].entry.Hash == p.entry.Hash
		return verdict{in: same, other: !same, owned: owned}
	}
	if !owned || int(seq) != len(l.all)+1 {
		return verdict{owned: owned}
	}
	l.all = append(l.all, p)
	l.recs = append(l.recs, p)
	l.w.res.Commits++
	l.w.trace("volume %d: entry %d of term %d, %x", l.vol, seq, p.entry.Term, p.entry.Hash[:4])
	l.w.truth.committed(l, p)
	return verdict{in: true, owned: owned}
}

// trim records a checkpoint and drops the entries before the checkpoint, but never the
// last entry.
func (l *volumeLog) trim(token int64, cp *checkpoint) {
	if l.token != token || l.until <= l.w.Now {
		return
	}
	l.cp = cp
	l.w.res.Checkpoints++
	for len(l.recs) > 1 && l.first < cp.state.pos.Seq {
		l.recs = l.recs[1:]
		l.first++
	}
}
