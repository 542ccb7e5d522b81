package penstock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Severity says how urgent a problem is.
type Severity string

const (
	// Warning: everything works, with less reserve than there should be.
	Warning Severity = "warning"
	// Critical: data can't be read, changes are refused, or one more failure loses data.
	Critical Severity = "critical"
)

// Problem is one fault of the cluster.
type Problem struct {
	Severity Severity `json:"severity" yaml:"severity"`
	// Part is the kind of the affected object: etcd, metadata, node, disk, space, chunks,
	// volume, quota, mirror, follower, certificate, client or clock.
	Part   string `json:"part" yaml:"part"`
	Object string `json:"object,omitempty" yaml:"object,omitempty"` // name of the affected object
	Text   string `json:"text" yaml:"text"`                         // the problem, for people
	Next   string `json:"next" yaml:"next"`                         // the next step, for people
	// BlocksUpgrade: an upgrade must not stop a server before this problem is solved, because
	// the other servers need the server, or may need the server.
	BlocksUpgrade bool `json:"blocks_upgrade" yaml:"blocks_upgrade"`
}

// Health is how a cluster is.
type Health struct {
	// Status is "ok", or the severity of the worst problem.
	Status string `json:"status" yaml:"status"`
	// Problems, the critical ones first.
	Problems []Problem `json:"problems" yaml:"problems"`
	// The counts below say what was examined.
	Cluster     string `json:"cluster" yaml:"cluster"`
	MetaServers int    `json:"metadata_servers" yaml:"metadata_servers"`
	Nodes       int    `json:"nodes" yaml:"nodes"`
	Chunks      uint64 `json:"chunks" yaml:"chunks"` // of open volumes
	// Total and Free are bytes on all connected chunk servers.
	Total uint64 `json:"total_bytes" yaml:"total_bytes"`
	Free  uint64 `json:"free_bytes" yaml:"free_bytes"`
}

// NewHealth sorts problems and determines their joint severity.
func NewHealth(problems ...Problem) Health {
	h := Health{Status: "ok", Problems: append([]Problem{}, problems...)}
	slices.SortStableFunc(h.Problems, func(a, b Problem) int { return cmp.Compare(a.Severity, b.Severity) }) // "critical" is before "warning"
	if len(h.Problems) > 0 {
		h.Status = string(h.Problems[0].Severity)
	}
	return h
}

// ForUpgrade returns the health with only the problems that block an upgrade; a nearly
// exhausted quota, or a client that was cut off, does not.
func (h Health) ForUpgrade() Health {
	left := NewHealth(slices.DeleteFunc(slices.Clone(h.Problems), func(p Problem) bool { return !p.BlocksUpgrade })...)
	h.Status, h.Problems = left.Status, left.Problems
	return h
}

// healthSession is what a session does about health: calls of the administrative API.
type healthSession interface {
	Cluster() string
	// Servers returns the metadata servers that live.
	Servers(ctx context.Context) []wire.MetaServer
	Health(ctx context.Context, addr string) (meta.ServerHealth, error)
	// Certificates returns the newest certificates of identities that the server at addr
	// knows.
	Certificates(ctx context.Context, addr string, identities []string) ([]meta.CertHealth, error)
	Mirrors(ctx context.Context) ([]meta.Mirror, error)
}

var _ healthSession = session{}

// healthWait bounds the wait for one metadata server.
const healthWait = 8 * time.Second

// Health asks every metadata server for problems and returns them in order of urgency, each
// with a next step. A fact that can't be determined is a problem, too, and not an error. The
// client's identity must be an administrator's. Errors: NotSupported (the client has no
// session), AccessDenied, Canceled.
func (c *Client) Health(ctx context.Context) (Health, error) {
	s, ok := c.sess.(healthSession)
	if !ok {
		return Health{}, meta.E("health", meta.NotSupported, "", nil)
	}
	f := healthFacts{now: time.Now()}
	first, cancel := context.WithTimeout(ctx, healthWait)
	f.mirrors, f.mirrorErr = s.Mirrors(first)
	servers := s.Servers(first)
	cancel()
	if errors.Is(f.mirrorErr, meta.AccessDenied) { // the servers refuse the rest, too
		return Health{}, f.mirrorErr
	}
	for _, m := range servers {
		f.servers = append(f.servers, serverFacts{MetaServer: m})
	}
	each := func(ask func(ctx context.Context, x *serverFacts)) {
		var asked sync.WaitGroup
		for i := range f.servers {
			asked.Go(func() {
				one, cancel := context.WithTimeout(ctx, healthWait)
				defer cancel()
				ask(one, &f.servers[i])
			})
		}
		asked.Wait()
	}
	each(func(ctx context.Context, x *serverFacts) {
		began := time.Now()
		x.health, x.err = s.Health(ctx, x.Addr)
		x.asked = began.Add(time.Since(began) / 2)
	})
	// A server with an expiring certificate may not know of the next certificate, signed by
	// another server.
	if bearers := f.bearers(); len(bearers) > 0 {
		each(func(ctx context.Context, x *serverFacts) {
			if x.err == nil {
				var more []meta.CertHealth
				more, x.certErr = s.Certificates(ctx, x.Addr, bearers)
				x.health.Certificates = append(x.health.Certificates, more...) // the newest of each counts
			}
		})
	}
	for _, x := range f.servers {
		for _, err := range []error{x.err, x.certErr} {
			if errors.Is(err, meta.AccessDenied) || errors.Is(err, meta.NotPermitted) {
				return Health{}, err
			}
		}
	}
	if err := ctx.Err(); err != nil {
		return Health{}, meta.E("health", meta.Canceled, "", context.Cause(ctx))
	}
	if id := c.cfg.Creds.Identity(); id.Role != "" {
		f.own = &meta.CertHealth{Identity: id.String(), Begins: id.Begins, Ends: id.Expires}
	}
	h := f.judge()
	h.Cluster = s.Cluster()
	return h, nil
}

// healthFacts are the facts from which judge derives problems.
type healthFacts struct {
	now       time.Time
	own       *meta.CertHealth // the caller's own certificate; nil without one
	servers   []serverFacts    // all metadata servers on the list
	mirrors   []meta.Mirror
	mirrorErr error
}

type serverFacts struct {
	wire.MetaServer
	health  meta.ServerHealth
	err     error     // why the server did not answer; health is empty then
	certErr error     // why the server did not answer the request for certificates
	asked   time.Time // by the asker's clock, in the middle of the first request
}

// bearers returns the identities with certificates that end soon.
func (f *healthFacts) bearers() (identities []string) {
	for _, s := range f.servers {
		for _, c := range s.health.Certificates {
			if !slices.Contains(identities, c.Identity) {
				identities = append(identities, c.Identity)
			}
		}
	}
	return identities
}

// judge derives the problems. It is a function of the facts alone.
func (f *healthFacts) judge() Health {
	var l problems
	heard := f.judgeServers(&l)
	f.judgeEtcd(&l, heard)
	f.judgeNodes(&l, heard)
	chunks := f.judgeChunks(&l, heard)
	f.judgeVolumes(&l, heard)
	f.judgeMirrors(&l)
	f.judgeCertificates(&l, heard)
	f.judgeClients(&l, heard)
	h := NewHealth(l...)
	h.MetaServers, h.Chunks = len(f.servers), chunks
	for _, s := range heard { // the server that sees most
		h.Nodes = max(h.Nodes, s.health.Nodes)
		if s.health.Total > h.Total {
			h.Total, h.Free = s.health.Total, s.health.Free
		}
	}
	return h
}

type problems []Problem

// standIns are the parts whose problems mean that a server is away, or may be unable to
// replace another server.
var standIns = []string{"etcd", "metadata", "node", "chunks", "volume", "follower"}

// add adds a problem. A critical problem, or a problem of standIns, blocks an upgrade.
func (l *problems) add(severity Severity, part, object, next, text string, args ...any) {
	*l = append(*l, Problem{Severity: severity, Part: part, Object: object, Next: next, Text: fmt.Sprintf(text, args...),
		BlocksUpgrade: severity == Critical || slices.Contains(standIns, part)})
}

// aside adds a warning that never blocks an upgrade.
func (l *problems) aside(part, object, next, text string, args ...any) {
	l.add(Warning, part, object, next, text, args...)
	(*l)[len(*l)-1].BlocksUpgrade = false
}

// judgeServers returns the servers that answered.
func (f *healthFacts) judgeServers(l *problems) (heard []*serverFacts) {
	running := map[string]bool{}
	joined := map[string]bool{}
	for i := range f.servers {
		s := &f.servers[i]
		running[s.Name] = true
		switch {
		case s.err != nil:
			l.add(Critical, "metadata", s.Name, "look at its log, and at the network to "+s.Addr, "does not answer, and is on the list of those that run: %s", firstLine(s.err))
		default:
			heard = append(heard, s)
			for _, name := range s.health.MetaServers {
				joined[name] = true
			}
			if d := s.health.Now.Sub(s.asked); max(d, -d) > meta.ClockSkew {
				l.add(Warning, "clock", s.Name, "set the clocks of both machines: certificates are refused when clocks differ by more than "+meta.ClockSkew.String(), "has a clock that differs from this machine's by %v", d.Round(time.Second))
			}
			if s.certErr != nil {
				l.aside("metadata", s.Name, "ask again", "did not say which certificates it was shown, so that one of which is told here that it ends may have been renewed: %s", firstLine(s.certErr))
			}
			if s.health.Left > 0 {
				l.add(Warning, "metadata", s.Name, "mend what is listed, and ask again", "has %d more things to tell than are listed here", s.health.Left)
			}
		}
	}
	for _, name := range sorted(joined) {
		if !running[name] {
			l.add(Warning, "metadata", name, fmt.Sprintf("start it; if it is gone for good: penstock cluster evict meta/%s", name), "has joined the cluster and does not run")
		}
	}
	if len(heard) == 0 {
		l.add(Critical, "metadata", "", "look at the metadata servers' logs", "no metadata server says how it is: whatever else is wrong is not known")
	}
	return heard
}

const (
	etcdUsedHigh = 0.75 // part of etcd's quota that is in use
	etcdSizeHigh = 0.9  // size of etcd's file as part of the quota; the file does not shrink by itself
	etcdSpace    = "see that etcd compacts (--auto-compaction-retention=10m), defragment its members one by one (etcdctl defrag), or start them with a larger --quota-backend-bytes"
)

func (f *healthFacts) judgeEtcd(l *problems, heard []*serverFacts) {
	type told struct{ object, text string }
	seen := map[told]bool{}
	once := func(add func(object, next, text string, args ...any), object, next, text string, args ...any) {
		if k := (told{object, text}); !seen[k] {
			seen[k] = true
			add(object, next, text, args...)
		}
	}
	critical := func(object, next, text string, args ...any) { l.add(Critical, "etcd", object, next, text, args...) }
	aside := func(object, next, text string, args ...any) { l.aside("etcd", object, next, text, args...) }
	type endpoint struct {
		asks int      // metadata servers configured for this member
		by   []string // metadata servers without an answer from this member
		err  string   // the error of the first of these servers
	}
	endpoints := map[string]*endpoint{}
	cant := map[string][]string{} // metadata servers that can't reach the member, by error
	for _, s := range heard {
		e := &s.health.Etcd
		if e.Error != "" {
			cant[e.Error] = append(cant[e.Error], s.Name)
		}
		for _, a := range e.Alarms {
			next := etcdSpace + "; then etcdctl alarm disarm"
			if a != "NOSPACE" {
				next = "replace the member that etcdctl alarm list names, as etcd's documentation says"
			}
			once(critical, a, next, "has raised the alarm %s", a)
		}
		for _, x := range e.Endpoints {
			p := endpoints[x.Address]
			if p == nil {
				p = &endpoint{}
				endpoints[x.Address] = p
			}
			p.asks++
			switch {
			case x.Error != "":
				p.by, p.err = append(p.by, s.Name), cmp.Or(p.err, x.Error)
			case x.NoLeader:
				once(critical, x.Address, "see that a majority of etcd's members runs and that they reach each other", "knows no leader: nothing can be written")
			case x.Quota > 0 && float64(x.Used) > etcdUsedHigh*float64(x.Quota), x.Quota > 0 && float64(x.Bytes) > etcdSizeHigh*float64(x.Quota):
				once(aside, x.Address, etcdSpace, "has %s in use and a file of %s, its quota is %s: beyond that all changes are refused", sizeText(x.Used), sizeText(x.Bytes), sizeText(x.Quota))
			}
		}
		if d := s.health.MetaDisk; d != nil && d.Refusing {
			l.add(Critical, "metadata", s.Name, "free space on the disk of "+d.Path+", or on another metadata server's: volumes move there by themselves", "refuses changes with ENOSPC: the disk of %s has %s left, it needs %s, and no other metadata server takes its volumes", d.Path, sizeText(d.Free), sizeText(d.Wanted))
		} else if d != nil {
			l.add(Warning, "metadata", s.Name, "free space on the disk of "+d.Path, "has %s left on the disk of %s and needs %s: its volumes are given to other metadata servers", sizeText(d.Free), d.Path, sizeText(d.Wanted))
		}
		if s.health.JournalFull {
			l.add(Critical, "metadata", s.Name, etcdSpace, "has volumes that take no changes, since etcd refuses writes for want of space")
		}
	}
	for _, err := range sorted(cant) {
		by := strings.Join(cant[err], ", ")
		l.add(Critical, "etcd", "", "see that a majority of etcd's members runs, that "+by+" can reach them, and may ask them", "can't be asked by metadata servers %s: %s", by, err)
	}
	for _, address := range sorted(endpoints) {
		p := endpoints[address]
		by := strings.Join(p.by, ", ")
		switch {
		case len(p.by) == 0:
		case len(p.by) < p.asks:
			l.add(Warning, "etcd", address, "look at the network between them, and at the certificates of "+by, "does not answer metadata servers %s, and answers others: %s", by, p.err)
		default:
			l.add(Warning, "etcd", address, "start it again, or replace it as etcd's documentation says: one more may be one too many", "does not answer metadata servers %s: %s", by, p.err)
		}
	}
}

func (f *healthFacts) judgeNodes(l *problems, heard []*serverFacts) {
	type node struct {
		meta.NodeHealth
		by []string // metadata servers that have no connection to the node
	}
	away := map[meta.ServerID]*node{}
	disks := map[string]meta.DiskHealth{}
	clocks := map[meta.ServerID]bool{}
	var total, free uint64
	nodes, live := 0, 0
	for _, s := range heard {
		h := &s.health
		nodes, live = max(nodes, h.Nodes), max(live, h.NodesLive)
		if h.Total > total {
			total, free = h.Total, h.Free
		}
		for _, n := range h.Away {
			if away[n.ID] == nil {
				away[n.ID] = &node{NodeHealth: n}
			}
			away[n.ID].Gone = cmp.Or(away[n.ID].Gone, n.Gone)
			away[n.ID].by = append(away[n.ID].by, s.Name)
		}
		for _, c := range h.Clocks {
			if clocks[c.ID] {
				continue // another metadata server told
			}
			clocks[c.ID] = true
			how := "ahead of"
			if c.Ahead < 0 {
				how = "behind"
			}
			l.add(Warning, "clock", fmt.Sprintf("%d (%s)", c.ID, c.Name), "set the chunk server's clock (NTP): certificates are refused when clocks differ by more than "+meta.ClockSkew.String(),
				"has a clock that is %v %s that of metadata server %s", max(c.Ahead, -c.Ahead).Round(time.Second), how, s.Name)
		}
		for _, d := range h.BadDisks {
			disks[fmt.Sprintf("%016x %s %s", d.Node, d.ID, d.Path)] = d
		}
	}
	for _, id := range sorted(away) {
		n := away[id]
		object := fmt.Sprintf("%d (%s)", n.ID, n.Name)
		switch {
		case len(n.by) < len(heard):
			l.add(Warning, "node", object, "look at the network between them", "does not reach metadata servers %s, and reaches others", strings.Join(n.by, ", "))
		case n.Gone != "":
			l.add(Warning, "node", object, fmt.Sprintf("start it; if it is gone for good: penstock node remove %d", n.ID), "is away since %s", n.Gone)
		default:
			l.add(Warning, "node", object, fmt.Sprintf("start it; if it is gone for good: penstock node remove %d", n.ID), "is away")
		}
	}
	switch {
	case len(heard) == 0:
	case nodes == 0:
		l.add(Critical, "node", "", "start some: see docs/operations.md, Install", "no chunk server has joined: nothing can be written")
	case live == 0:
		l.add(Critical, "node", "", "start them; look at their logs", "no chunk server is there: nothing can be read or written")
	}
	for _, k := range sorted(disks) {
		d := disks[k]
		object := fmt.Sprintf("%s of node %d", d.Path, d.Node)
		id := d.ID[:min(len(d.ID), 12)]
		detail := ""
		if d.Detail != "" {
			detail = ": " + d.Detail
		}
		switch d.State {
		case meta.DiskOK.String():
			l.add(Warning, "disk", object, "add disks or nodes, or delete; chunks move to emptier servers by themselves", "has %s of %s left", sizeText(d.Free), sizeText(d.Total))
		case meta.DiskFull.String():
			l.add(Warning, "disk", object, "add disks or nodes, or delete", "is full and takes nothing new%s", detail)
		case meta.DiskFailing.String():
			l.add(Warning, "disk", object, fmt.Sprintf("wait until penstock node list says that nothing is to move; then penstock disk replace %s", id), "is being emptied%s", detail)
		case meta.DiskRemoved.String():
			l.add(Warning, "disk", object, fmt.Sprintf("exchange it, mount an empty file system there, and say once more: penstock disk replace %s", id), "was given up%s", detail)
		default:
			next := fmt.Sprintf("penstock disk replace %s, exchange it, and say that once more; if it is only not mounted: mount it and restart the chunk server", id)
			if id == "" {
				next = "mount it, or take it out of the server's --disk, and restart the chunk server"
			}
			l.add(Warning, "disk", object, next, "is %s%s", d.State, detail)
		}
	}
	switch {
	case total == 0:
	case free == 0:
		l.add(Critical, "space", "", "add disks or nodes, or delete", "nothing is left of %s: writes are refused", sizeText(total))
	case float64(free) < meta.DiskLow*float64(total):
		l.add(Warning, "space", "", "add disks or nodes, or delete: a cluster without room can't repair", "%s of %s are left", sizeText(free), sizeText(total))
	}
}

func (f *healthFacts) judgeChunks(l *problems, heard []*serverFacts) (chunks uint64) {
	var sum meta.ChunkHealth
	for _, s := range heard {
		c := &s.health.Chunks
		sum.Unscanned += c.Unscanned
		sum.Copying += c.Copying
		for _, p := range [][2]*uint64{{&sum.Chunks, &c.Chunks}, {&sum.Unreachable, &c.Unreachable}, {&sum.LastReachable, &c.LastReachable}, {&sum.ShortBytes, &c.ShortBytes}, {&sum.Lost, &c.Lost}, {&sum.Endangered, &c.Endangered}, {&sum.UnderReplicated, &c.UnderReplicated}, {&sum.Corrupt, &c.Corrupt},
			{&sum.Misplaced, &c.Misplaced}, {&sum.Draining, &c.Draining}, {&sum.Surplus, &c.Surplus}, {&sum.Blocked, &c.Blocked}, {&sum.CopyBytes, &c.CopyBytes}} {
			*p[0] += *p[1]
		}
	}
	in := func(n func(v *meta.VolumeHealth) uint64) string { return volumesWith(heard, n) }
	repair := fmt.Sprintf("repair is at it: %s to copy, %d copies under way; see penstock cluster status", sizeText(sum.CopyBytes), sum.Copying)
	const aside Severity = "" // a warning, although the chunks have all wanted replicas
	for _, x := range []struct {
		n        uint64
		severity Severity
		text     string
		next     string
	}{
		{sum.Lost, Critical, "have no good replica that can be reached: reads of them wait or fail" + in(func(v *meta.VolumeHealth) uint64 { return v.Lost }), "bring back the nodes and disks that are away; which files: penstock chunk lost"},
		{sum.Unreachable, Critical, "can't be read now, since the nodes that have them are away" + in(func(v *meta.VolumeHealth) uint64 { return v.Unreachable }), "bring back the nodes that are away; which files: penstock chunk lost"},
		{sum.Endangered, Critical, "have one replica left" + in(func(v *meta.VolumeHealth) uint64 { return v.Endangered }), repair},
		{sum.LastReachable, Critical, "have one replica left that can be reached, since nodes are away" + in(func(v *meta.VolumeHealth) uint64 { return v.LastReachable }), "bring back the nodes that are away; what stays away for long is copied from the replica that is left"},
		{sum.UnderReplicated, Warning, "have too few replicas", repair},
		{sum.Corrupt, Warning, "have a corrupt replica", repair + "; look at the disks that penstock disk list shows"},
		{sum.Draining, aside, "are on a node or disk that is being emptied", repair},
		{sum.Misplaced, aside, "lie where their policy doesn't want them", repair},
		{sum.Surplus, aside, "have too many replicas", "they are deleted by themselves"},
		{sum.Blocked, aside, "of these can't be helped now: too few servers or too little room", "add nodes in the failure domains that the volumes' policies ask for, or room on them: penstock volume list, penstock node list"},
	} {
		switch {
		case x.n == 0:
		case x.severity == aside:
			l.aside("chunks", "", x.next, "%d chunks %s", x.n, x.text)
		default:
			l.add(x.severity, "chunks", "", x.next, "%d chunks %s", x.n, x.text)
		}
	}
	if sum.Unscanned > 0 {
		l.add(Warning, "chunks", "", "ask again in a minute; if it stays so, look at the metadata servers' logs", "the chunks of %d volumes were not looked through yet", sum.Unscanned)
	}
	return sum.Chunks
}

// namedVolumes is how many volumes a problem names at most.
const namedVolumes = 8

// volumesWith returns the names of volumes with chunks of a kind, after a semicolon, or "" if
// none is known.
func volumesWith(heard []*serverFacts, n func(*meta.VolumeHealth) uint64) string {
	names := map[string]bool{}
	for _, s := range heard {
		for i := range s.health.Volumes {
			if v := &s.health.Volumes[i]; n(v) > 0 {
				names[v.Name] = true
			}
		}
	}
	all := sorted(names)
	switch more := len(all) - namedVolumes; {
	case len(all) == 0:
		return ""
	case more > 0:
		return fmt.Sprintf("; volumes %s and %d more", strings.Join(all[:namedVolumes], ", "), more)
	case len(all) == 1:
		return "; volume " + all[0]
	}
	return "; volumes " + strings.Join(all, ", ")
}

func (f *healthFacts) judgeVolumes(l *problems, heard []*serverFacts) {
	for _, s := range heard {
		for _, v := range s.health.Volumes {
			quota := func(of string, used, limit uint64, text func(uint64) string) {
				if limit > 0 {
					l.add(Warning, "quota", v.Name, "delete, or raise it: penstock volume set "+v.Name+" --quota"+map[bool]string{true: "-inodes"}[of == "inodes"]+" ...", "has used %s of %s (%d %% of its quota of %s)", text(used), text(limit), used*100/limit, of)
				}
			}
			switch {
			case v.Failed != "":
				l.add(Critical, "volume", v.Name, "look at the log of "+s.Name, "can't be served by metadata server %s: %s", s.Name, v.Failed)
			case v.Recovering:
				l.add(Warning, "volume", v.Name, "ask again in a minute; it may wait for chunk servers, or for sessions of a server before to end", "is being taken over by metadata server %s", s.Name)
			}
			if v.Unplaceable != "" {
				l.add(Critical, "volume", v.Name, "add nodes where its policy wants them, or ask for less: penstock volume set "+v.Name+" --replicas, --spread, --topology, --class or --min-replicas", "can't be written to: %s", v.Unplaceable)
			} else if v.Unmet != "" {
				l.add(Warning, "volume", v.Name, "add nodes where its policy wants them, or ask for less: penstock volume set "+v.Name+" --replicas, --spread, --topology or --class", "has a policy that nothing in the cluster can meet: %s; what is written has fewer replicas until then", v.Unmet)
			}
			quota("bytes", v.UsedBytes, v.QuotaBytes, sizeText)
			quota("inodes", v.UsedInodes, v.QuotaInodes, func(n uint64) string { return fmt.Sprint(n) })
			if v.Undone != "" {
				l.aside("volume", v.Name, "it is tried again by itself; see penstock volume show "+v.Name, "has no snapshot by its schedule: since %s none could be taken: %s", v.UndoneSince.UTC().Format(time.DateTime+" UTC"), v.Undone)
			}
			if v.GivenUpFiles > 0 {
				l.aside("volume", v.Name, "write those files again; 'penstock client abandon' listed them when they were given up. This is told for a day", "has files as they were synced last: an operator gave up %s of %d files that were not durable, the last %v ago by the client %s", sizeText(v.GivenUpBytes), v.GivenUpFiles, f.now.Sub(v.GivenUpAt).Round(time.Second), v.GivenUpBy)
			}
			if v.Advisory {
				l.add(Warning, "quota", v.Name, "see penstock volume show "+v.Name, "is above its advisory quota")
			}
		}
		for _, x := range s.health.Standbys {
			why := ""
			if x.Error != "" {
				why = ": " + x.Error
			}
			l.add(Warning, "follower", fmt.Sprintf("volume %d at %s", x.Volume, s.Name), "ask again in a minute; if it stays so, look at the log of "+s.Name+": a fail-over of the volume to it would take long", "was last up to date %s ago%s", x.Behind, why)
		}
	}
}

// mirrorSlack is the tolerated lateness of a mirror beyond two of the mirror's rounds.
const mirrorSlack = time.Minute

func (f *healthFacts) judgeMirrors(l *problems) {
	if f.mirrorErr != nil {
		l.add(Warning, "mirror", "", "ask again", "mirrors can't be listed: %s", firstLine(f.mirrorErr))
	}
	for _, m := range f.mirrors {
		if m.State != meta.MirrorRunning {
			continue
		}
		object := fmt.Sprintf("of %s, volume %d", m.Source.Volume, m.Target)
		next := "see that penstock mirror run (or penstock up) runs and reaches both clusters; penstock mirror list"
		if m.Error != "" {
			l.add(Warning, "mirror", object, next, "fails since %s: %s", m.Since.UTC().Format(time.RFC3339), m.Error)
		}
		if m.Last == nil || m.Every <= 0 {
			continue // the first copy may take any time
		}
		if lag := f.now.Sub(m.Last.Taken); lag > 2*m.Every+mirrorSlack {
			l.add(Warning, "mirror", object, next, "is %v behind, and is to copy every %v", lag.Round(time.Second), m.Every)
		}
	}
}

func (f *healthFacts) judgeCertificates(l *problems, heard []*serverFacts) {
	seen := map[string]meta.CertHealth{}
	note := func(c *meta.CertHealth) {
		// Of several certificates of an identity, the newest counts.
		if c != nil && (seen[c.Identity].Ends.Before(c.Ends)) {
			seen[c.Identity] = *c
		}
	}
	note(f.own)
	for _, s := range heard {
		note(s.health.Certificate)
		for _, c := range s.health.Certificates {
			note(&c)
		}
	}
	for _, id := range sorted(seen) {
		c := seen[id]
		next := fmt.Sprintf("its bearer could not renew it: look at its log. After its end it needs a token for its name: penstock cluster join-token --role %s", strings.Replace(id, "/", " --name ", 1))
		switch {
		case !f.now.Before(c.Ends):
			l.add(Critical, "certificate", id, next, "ended at %s", c.Ends.UTC().Format(time.RFC3339))
		case c.Soon(f.now):
			l.add(Warning, "certificate", id, next, "ends in %v", c.Ends.Sub(f.now).Round(time.Second))
		}
	}
}

func (f *healthFacts) judgeClients(l *problems, heard []*serverFacts) {
	for _, s := range heard {
		for _, c := range s.health.CutOff {
			if c.Kept {
				l.add(Warning, "client", c.Name, "look at its machine's load and at the network between it and "+s.Name+"; it has lost nothing if it comes back", "was last heard of %v ago: %s", f.now.Sub(c.At).Round(time.Second), c.Why)
				continue
			}
			l.add(Warning, "client", c.Name, "look at its log and at the network between it and "+s.Name+"; what it had not synced is lost. Mounted anew it is no more on this list, nor is it after a quarter of an hour",
				"went without a good-bye %v ago: %s", f.now.Sub(c.At).Round(time.Second), c.Why)
		}
	}
}

func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// sizeText renders a size for people, in binary units.
func sizeText(n uint64) string {
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	f, unit := float64(n)/1024, 0
	for ; f >= 1024 && unit < 5; unit++ {
		f /= 1024
	}
	return fmt.Sprintf("%.1f %ciB", f, "KMGTPE"[unit])
}
