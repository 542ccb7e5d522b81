package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/blobdir"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/state"
	"penstock.io/penstock/test/operator"
)

// fakeCluster is a table of volumes whose journals are in memory and outlive servers; their
// stores are real, and so are the files of checkpoints.
type fakeCluster struct {
	MirrorTable                 // for the methods that fakeCluster leaves out
	*Backend                    // OpenStore and DropStore
	log         *journal.Memory // of the root volume

	mu      sync.Mutex
	rows    map[meta.VolumeID]cluster.Volume
	logs    map[meta.VolumeID]*journal.Memory
	lost    map[meta.VolumeID]chan struct{}
	next    meta.VolumeID
	nodes   map[meta.ServerID]cluster.Node
	bearers map[meta.ServerID]string
	deleted map[meta.VolumeID][]meta.ServerID
	mirrors map[meta.VolumeID]meta.Mirror
	groups  map[string]meta.Group
	groupAt int64 // the revision of the last group written
	records []cluster.Record
	// readGroup, if set, is called before a record of a group is read, and its error is the
	// answer; putGroup is called in place of writing a record.
	readGroup func(name string) error
	putGroup  func(g meta.Group, put func(meta.Group) (meta.Group, error)) (meta.Group, error)
	// left, if set, is how long the right to a volume stands.
	left atomic.Pointer[time.Duration]
	// read is called after each read of a row by number; may be nil.
	read func(meta.VolumeID)
	// noRow gives the error of reading a row by number; may be nil.
	noRow func(meta.VolumeID) error
	// noOwner is the error of taking a volume.
	noOwner error
	// noDeleted is the error of asking for deleted.
	noDeleted error
	capKeys   []meta.CapKey // of a server that starts; empty: a single key
	// keyLife lists the greatest ages of the capability keys that servers asked for.
	keyLife []time.Duration
	// dies is called at each step that changes or removes a row; an error ends the request there,
	// as SIGKILL would.
	dies func(step string) error
	// noLabels is the error of reading labels, badLabels the error of reading the labels of a
	// volume; labelled counts the reads.
	noLabels  error
	noChange  error // the error of changing labels
	badLabels map[meta.VolumeID]error
	labelled  atomic.Int64
	// unregister, if set, takes a stopping server off the list.
	unregister func(context.Context) error
	// beforeUpdate, if set, is called with mu held before a row is changed.
	beforeUpdate func()
	// reads, if set, counts the reads from stores of opened clones.
	reads *atomic.Int64
	// released are the volumes whose owner let the volume go in order.
	released map[meta.VolumeID]bool
	taken    map[meta.VolumeID]int // how often
}

func newFakeCluster(t *testing.T, dir string) *fakeCluster {
	blobs, err := blobdir.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { blobs.Close() })
	f := &fakeCluster{
		Backend: &Backend{Shared: state.NewShared(8<<20, 100, nil), Dir: filepath.Join(dir, "stores"), Blob: blobs, Logger: slog.New(slog.DiscardHandler)},
		rows:    map[meta.VolumeID]cluster.Volume{}, logs: map[meta.VolumeID]*journal.Memory{}, lost: map[meta.VolumeID]chan struct{}{}, next: 1,
		nodes: map[meta.ServerID]cluster.Node{}, released: map[meta.VolumeID]bool{}, taken: map[meta.VolumeID]int{},
	}
	if err := os.Mkdir(f.Dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := f.CreateVolume(t.Context(), "root", meta.Policy{Replicas: 1}, 0); err != nil {
		t.Fatal(err)
	}
	f.log = f.logs[1]
	return f
}

func (f *fakeCluster) ID() string { return "test" }

func (f *fakeCluster) Unregister(ctx context.Context) error {
	f.mu.Lock()
	leave := f.unregister
	f.mu.Unlock()
	if leave != nil {
		return leave(ctx)
	}
	return f.Backend.Unregister(ctx)
}

func (f *fakeCluster) BaseStore(ctx context.Context, v meta.VolumeID, from Store, cp journal.Checkpoint, replay func(Store) error) (Store, error) {
	st, err := f.Backend.BaseStore(ctx, v, from, cp, replay)
	if err == nil && f.reads != nil {
		st = countedStore{st, f.reads}
	}
	return st, err
}

// countedStore counts the records that are read of a store.
type countedStore struct {
	Store
	n *atomic.Int64
}

func (c countedStore) Get(key []byte) ([]byte, bool, error) {
	c.n.Add(1)
	return c.Store.Get(key)
}

func (c countedStore) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	return c.Store.Scan(lo, hi, func(k, v []byte) bool {
		c.n.Add(1)
		return fn(k, v)
	})
}
func (f *fakeCluster) Mirrors(context.Context) ([]meta.Mirror, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Collect(maps.Values(f.mirrors)), nil
}
func (f *fakeCluster) Mirror(_ context.Context, target meta.VolumeID) (meta.Mirror, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.mirrors[target]
	if !ok {
		return m, meta.E("read mirror", meta.NotFound, fmt.Sprint(target), nil)
	}
	return m, nil
}
func (f *fakeCluster) DropMirror(_ context.Context, target meta.VolumeID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.mirrors, target)
	return nil
}
func (f *fakeCluster) Groups(context.Context) (all []meta.Group, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(f.groups)) {
		all = append(all, f.groups[name])
	}
	return all, nil
}
func (f *fakeCluster) Group(_ context.Context, name string) (meta.Group, error) {
	f.mu.Lock()
	read := f.readGroup
	f.mu.Unlock()
	if read != nil {
		if err := read(name); err != nil {
			return meta.Group{}, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	g, ok := f.groups[name]
	if !ok {
		return g, meta.E("read group", meta.NotFound, name, nil)
	}
	return g, nil
}
func (f *fakeCluster) PutGroup(_ context.Context, g meta.Group) (meta.Group, error) {
	f.mu.Lock()
	put := f.putGroup
	f.mu.Unlock()
	if put != nil {
		return put(g, f.writeGroup)
	}
	return f.writeGroup(g)
}
func (f *fakeCluster) writeGroup(g meta.Group) (meta.Group, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.groups[g.Name].Revision != g.Revision {
		return g, meta.E("write group", meta.Again, g.Name, nil)
	}
	if f.groups == nil {
		f.groups = map[string]meta.Group{}
	}
	f.groupAt++
	g.Revision = f.groupAt
	g.Members = slices.Clone(g.Members)
	f.groups[g.Name] = g
	return g, nil
}
func (f *fakeCluster) DropGroup(_ context.Context, g meta.Group) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.groups[g.Name].Revision != g.Revision {
		return meta.E("delete group", meta.Again, g.Name, nil)
	}
	delete(f.groups, g.Name)
	return nil
}
func (f *fakeCluster) Etcd(context.Context) (none meta.EtcdHealth) { return none }
func (f *fakeCluster) Volumes(context.Context) (all []cluster.Volume, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(f.rows)) {
		all = append(all, f.rows[id])
	}
	return all, nil
}
func (f *fakeCluster) Volume(_ context.Context, id meta.VolumeID) (cluster.Volume, error) {
	f.mu.Lock()
	v, ok := f.rows[id]
	read, noRow := f.read, f.noRow
	f.mu.Unlock()
	if noRow != nil {
		if err := noRow(id); err != nil {
			return v, err
		}
	}
	if read != nil {
		read(id)
	}
	if !ok {
		return v, meta.E("volume", meta.NoSuchVolume, fmt.Sprint(id), nil)
	}
	return v, nil
}
func (f *fakeCluster) VolumeByName(_ context.Context, name string) (cluster.Volume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, v := range f.rows {
		if v.Name == name && (v.State == cluster.VolumeActive || v.State == cluster.VolumeCreating) {
			return v, nil
		}
	}
	return cluster.Volume{}, meta.E("volume", meta.NoSuchVolume, name, nil)
}
func (f *fakeCluster) CreateVolume(_ context.Context, name string, p meta.Policy, _ meta.Time, words ...func(*cluster.Volume)) (cluster.Volume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, v := range f.rows {
		if v.Name == name && (v.State == cluster.VolumeActive || v.State == cluster.VolumeCreating) {
			return v, meta.E("create volume", meta.VolumeExists, name, nil)
		}
	}
	v := cluster.Volume{ID: f.next, Name: name, State: cluster.VolumeActive, Policy: p}
	for _, say := range words {
		say(&v)
	}
	f.next++
	f.rows[v.ID], f.logs[v.ID] = v, journal.NewMemory(v.ID)
	return v, nil
}
func (f *fakeCluster) CreateClone(ctx context.Context, name string, p meta.Policy, now meta.Time, from cluster.Origin) (cluster.Volume, error) {
	f.mu.Lock()
	err := f.crash("clone")
	origin := f.rows[from.Volume]
	f.mu.Unlock()
	if err != nil {
		return cluster.Volume{}, err
	}
	v, err := f.CreateVolume(ctx, name, p, now, func(v *cluster.Volume) {
		id := v.ID
		*v = cluster.CloneRow(name, p, now, from, &origin, origin.Labels)
		v.ID = id
	})
	if err != nil {
		return v, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return v, f.crash("clone written")
}
func (f *fakeCluster) UpdateVolume(_ context.Context, id meta.VolumeID, change func(*cluster.Volume) error) (cluster.Volume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.beforeUpdate != nil {
		f.beforeUpdate()
	}
	v, ok := f.rows[id]
	if !ok {
		return v, meta.E("volume", meta.NoSuchVolume, fmt.Sprint(id), nil)
	}
	if v.Attach != nil {
		at := *v.Attach
		v.Attach = &at
	}
	if v.Origin != nil { // earlier readers keep the row unchanged
		origin := *v.Origin
		v.Origin = &origin
	}
	if err := change(&v); err != nil {
		return v, err
	}
	for _, w := range f.rows {
		if w.ID != id && w.Name == v.Name && w.State == cluster.VolumeActive && v.State == cluster.VolumeActive {
			return v, meta.E("change volume", meta.VolumeExists, v.Name, nil)
		}
	}
	if err := f.crash("row"); err != nil {
		return v, err
	}
	f.rows[id] = v
	return v, f.crash("row written")
}
func (f *fakeCluster) Labels(_ context.Context, first, last meta.VolumeID) (map[meta.VolumeID]cluster.Labels, error) {
	f.labelled.Add(1)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noLabels != nil {
		return nil, f.noLabels
	}
	all := map[meta.VolumeID]cluster.Labels{}
	for id, v := range f.rows {
		if id >= first && id <= last && v.Labels != nil {
			all[id] = cluster.Labels{Set: v.Labels}
		}
		if err := f.badLabels[id]; err != nil {
			all[id] = cluster.Labels{Err: err}
		}
	}
	return all, nil
}
func (f *fakeCluster) ChangeLabels(_ context.Context, id meta.VolumeID, change map[string]*string) (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noChange != nil {
		return f.noChange
	}
	v := f.rows[id]
	if v.Labels, err = meta.ChangeLabels(v.Labels, change); err == nil {
		f.rows[id] = v
	}
	return err
}
func (f *fakeCluster) crash(step string) error {
	if f.dies == nil {
		return nil
	}
	return f.dies(step)
}
func (f *fakeCluster) Nodes() []cluster.Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []cluster.Node
	for _, id := range slices.Sorted(maps.Keys(f.nodes)) {
		all = append(all, f.nodes[id])
	}
	return all
}
func (f *fakeCluster) BindServer(_ context.Context, id meta.ServerID, who string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if have := f.bearers[id]; have != "" && have != who {
		return meta.E("bind chunk server", meta.AccessDenied, who, nil)
	}
	if f.bearers == nil {
		f.bearers = map[meta.ServerID]string{}
	}
	f.bearers[id] = who
	return nil
}

func (f *fakeCluster) ObserveNode(_ context.Context, n cluster.Node, now meta.Time) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if was, ok := f.nodes[n.ID]; ok {
		n.State, n.FirstSeen = was.State, was.FirstSeen
	}
	f.nodes[n.ID] = n
	return nil
}
func (f *fakeCluster) SetNodeState(_ context.Context, id meta.ServerID, state cluster.NodeState, now meta.Time) (cluster.Node, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, ok := f.nodes[id]
	if !ok {
		return n, meta.E("record node", meta.NotFound, fmt.Sprint(id), nil)
	}
	n.State, n.Since = state, now
	f.nodes[id] = n
	return n, nil
}
func (f *fakeCluster) NewServerID(context.Context) (meta.ServerID, error) { return 1, nil }
func (f *fakeCluster) DeletedVolumes(context.Context) (all []cluster.Deleted, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for v, on := range f.deleted {
		all = append(all, cluster.Deleted{Volume: v, On: slices.Clone(on)})
	}
	return all, f.noDeleted
}
func (f *fakeCluster) SweptVolume(_ context.Context, v meta.VolumeID, server meta.ServerID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.deleted[v] = slices.DeleteFunc(f.deleted[v], func(id meta.ServerID) bool { return id == server })
	if len(f.deleted[v]) == 0 {
		delete(f.deleted, v)
	}
	return nil
}
func (f *fakeCluster) DeleteVolume(_ context.Context, id meta.VolumeID, on ...meta.ServerID) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.crash("row gone"); err != nil {
		return err
	}
	if len(on) > 0 {
		if f.deleted == nil {
			f.deleted = map[meta.VolumeID][]meta.ServerID{}
		}
		f.deleted[id] = on
	}
	delete(f.rows, id)
	delete(f.logs, id)
	return f.crash("row and journal gone")
}
func (f *fakeCluster) Follow(_ context.Context, v meta.VolumeID) (Journal, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return journal.New(v, f.logs[v].Reader(), nil), nil
}
func (f *fakeCluster) Records(context.Context) ([]cluster.Record, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.records, nil
}
func (f *fakeCluster) Restored(context.Context, meta.VolumeID) (cluster.Restoration, bool, error) {
	return cluster.Restoration{}, false, nil
}
func (f *fakeCluster) SettleRestored(context.Context, meta.VolumeID) error { return nil }
func (f *fakeCluster) View() *cluster.View                                 { return nil }
func (f *fakeCluster) Current(context.Context) (*cluster.View, error)      { return nil, nil }
func (f *fakeCluster) Changed() <-chan struct{}                            { return nil }
func (f *fakeCluster) Holder(_ context.Context, v meta.VolumeID) (Holder, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return Holder{Name: "m", Released: f.released[v]}, nil
}
func (f *fakeCluster) FreshCapKeys(_ context.Context, every time.Duration) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.keyLife = append(f.keyLife, every)
	return true, nil
}

func (f *fakeCluster) CapKeys(context.Context) ([]meta.CapKey, error) {
	if len(f.capKeys) > 0 {
		return f.capKeys, nil
	}
	return []meta.CapKey{{ID: 1, Secret: make([]byte, 32)}}, nil
}

type fakeOwn struct {
	term    meta.Term
	lost    chan struct{}
	release func()
	left    *atomic.Pointer[time.Duration]
}

func (o fakeOwn) Term() meta.Term       { return o.term }
func (o fakeOwn) Lost() <-chan struct{} { return o.lost }
func (o fakeOwn) Left() time.Duration {
	if left := o.left.Load(); left != nil {
		return *left
	}
	return time.Hour
}
func (o fakeOwn) PredecessorDone() bool         { return true }
func (o fakeOwn) Release(context.Context) error { o.release(); return nil }
func (o fakeOwn) Yield(context.Context) error   { return nil }

func (o fakeOwn) Head() (journal.Position, bool) { return journal.Position{}, false }

func (f *fakeCluster) Expect(context.Context, meta.VolumeID) error { return nil }

func (f *fakeCluster) Own(_ context.Context, v meta.VolumeID) (Ownership, Journal, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.noOwner != nil {
		return nil, nil, f.noOwner
	}
	st, term := f.logs[v].Take()
	lost := make(chan struct{})
	f.lost[v] = lost
	f.released[v] = false
	f.taken[v]++
	release := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.released[v] = true
	}
	return fakeOwn{term, lost, release, &f.left}, journal.New(v, st, lost), nil
}

// lose takes a volume from its owner, as the end of the owner's lease does.
func (f *fakeCluster) lose(v meta.VolumeID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.lost[v])
}

// site is a server that can be stopped and started on the same cluster.
type site struct {
	t       *testing.T
	cluster *fakeCluster
	addr    string
	dir     string
	srv     *Server
	done    chan error
	ttl     time.Duration
	adjust  func(*Config) // nil, or a test's changes to the configuration
}

// newSite makes a site whose sessions outlive a client that gets no processor for a while.
func newSite(t *testing.T) *site { return newSiteTTL(t, 10*time.Second) }

func newSiteTTL(t *testing.T, ttl time.Duration) *site {
	t.Helper()
	return newSiteWith(t, ttl, nil)
}

func newSiteWith(t *testing.T, ttl time.Duration, adjust func(*Config)) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{t: t, dir: dir, ttl: ttl, addr: filepath.Join(dir, "m.sock"), adjust: adjust}
	s.cluster = newFakeCluster(t, dir)
	s.start()
	t.Cleanup(func() {
		if s.srv != nil {
			s.checkOwners()
			s.srv.Close(context.Background())
			<-s.done
		}
		s.cluster.Shared.Close()
	})
	return s
}

// checkOwners checks the invariants of the owners' state in memory.
func (s *site) checkOwners() {
	s.t.Helper()
	for _, o := range s.srv.hosted.owners() {
		o.mu.Lock()
		err := errors.Join(o.leases.Check(), o.quota.Check())
		o.mu.Unlock()
		if err != nil {
			s.t.Errorf("leases or quota of volume %d: %v", o.vol, err)
		}
	}
}

func (s *site) start() {
	s.t.Helper()
	level := slog.LevelError
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	cfg := Config{
		Name: "m", Cluster: s.cluster, Blob: s.cluster.Blob, ScratchDir: s.dir, SessionTTL: s.ttl, CommitDelay: 5 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
		Dead:   func(string, uint32, uint64) bool { return false },
	}
	for c := range strings.SplitSeq(os.Getenv("PENSTOCK_CONTROL"), ",") {
		switch c {
		case "meta-norecall":
			cfg.Unsafe.NoRecall = true
		case "meta-noputin":
			cfg.Unsafe.NoPutIn = true
		case "meta-nosquash":
			cfg.Unsafe.NoSquash = true
		case "meta-nopace":
			cfg.Unsafe.NoPace = true
		case "meta-nowait":
			cfg.Unsafe.NoWait = true
		case "meta-nofreeze":
			cfg.Unsafe.NoFreeze = true
		case "meta-nocheckpointage":
			cfg.Unsafe.NoCheckpointAge = true
		case "meta-noend":
			cfg.Unsafe.NoEnd = true
		case "meta-noleast":
			cfg.Unsafe.NoLeast = true
		case "meta-noleadership":
			cfg.Unsafe.NoLeadership = true
		case "meta-nocourtesy":
			cfg.Unsafe.NoCourtesy = true
		case "meta-nomeet":
			cfg.Unsafe.NoMeet = true
		case "meta-noreplaycheck":
			cfg.Unsafe.NoReplayCheck = true
		case "meta-notellpolicy":
			cfg.Unsafe.NoTellPolicy = true
		case "meta-nolosswait":
			cfg.Unsafe.NoLossWait = true
		case "meta-norules":
			cfg.Unsafe.NoRules = true
		}
	}
	if s.adjust != nil {
		s.adjust(&cfg)
	}
	srv, err := New(context.Background(), cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	os.Remove(s.addr)
	l, err := net.Listen("unix", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.srv, s.done = srv, make(chan error, 1)
	go func() { s.done <- srv.Serve(l) }()
	if err := srv.hosted.OpenAll(context.Background()); err != nil {
		s.t.Fatal(err)
	}
}

// crash stops the server as SIGKILL would: nothing is flushed or released.
func (s *site) crash() {
	s.srv.Abandon()
	<-s.done
	s.srv = nil
}

// peer is a client that obeys recalls at once unless told to hold the leases.
type peer struct {
	*client.Session
	*operator.Operator // by the same name
	mu                 sync.Mutex
	leases             map[meta.Ino]meta.LeaseMode
	hold               bool
	held               []func()
	holdsOn            bool // the peer can commit nothing now, and keeps recalled leases a while
	recalls            int
	expired            int
	orphans            []meta.Ino
	lost               []meta.Ino
	locks              []meta.Lock // to be claimed

	policy meta.Policy // of the volume, as the owner announced last
	// policySet, unless nil, is called before a policy counts as taken in.
	policySet func(meta.Policy)
	comeBack  <-chan struct{} // not nil: the peer claims nothing before the channel is closed, and replays nothing
}

func (p *peer) Granted(_ meta.VolumeID, g meta.Grant) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.leases[g.Ino] = g.Mode
}

func (p *peer) PolicySet(_ meta.VolumeID, policy meta.Policy) {
	p.mu.Lock()
	set := p.policySet
	p.mu.Unlock()
	if set != nil {
		set(policy)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.policy = policy
}

func (p *peer) Recall(r meta.Recall, done func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recalls++
	drop := func() {
		p.mu.Lock()
		p.leases[r.Ino] = min(p.leases[r.Ino], r.Keep)
		p.mu.Unlock()
		done()
	}
	if p.hold {
		p.held = append(p.held, drop)
		return
	}
	go drop()
}

func (p *peer) RecallWithin(r meta.Recall, done func(held bool)) {
	p.mu.Lock()
	on := p.holdsOn
	if on && p.hold {
		p.held = append(p.held, func() { done(true) })
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	if on {
		go done(true)
		return
	}
	p.Recall(r, func() { done(false) })
}

func (p *peer) Expired([]meta.VolumeID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expired++
	p.leases = map[meta.Ino]meta.LeaseMode{}
}

func (p *peer) Lost(_ meta.VolumeID, inos []meta.Ino, _ error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lost = append(p.lost, inos...)
}

func (p *peer) Orphaned(_ meta.VolumeID, ino meta.Ino) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.orphans = append(p.orphans, ino)
}

func (p *peer) Claims(meta.VolumeID) (g []meta.Grant, locks []meta.Lock) {
	p.mu.Lock()
	back := p.comeBack
	p.mu.Unlock()
	if back != nil {
		<-back
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for ino, m := range p.leases {
		if m > meta.LeaseNone {
			g = append(g, meta.Grant{Ino: ino, Mode: m})
		}
	}
	return g, p.locks
}

func (p *peer) mode(ino meta.Ino) meta.LeaseMode {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.leases[ino]
}

func (s *site) dial(name string) *peer {
	s.t.Helper()
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{}, Operator: operator.New(s.t, "unix:"+s.addr, nil)}
	p.Session = s.session(name, p)
	return p
}

// session begins a session, until the test ends.
func (s *site) session(name string, h client.Handler) *client.Session {
	s.t.Helper()
	sess, err := client.Dial(s.t.Context(), client.Config{Addrs: []string{"unix:" + s.addr}, Name: name, Handler: h})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		sess.Close(ctx)
	})
	return sess
}

// api is a client of the administrative API, over the server's socket.
func (s *site) api() *admin.Client { return newAPIClient(s.t, "unix:"+s.addr, nil) }

// checkpoint has the root volume's state written.
func (s *site) checkpoint() {
	s.t.Helper()
	if _, err := s.api().Volumes.CheckpointVolume(s.t.Context(), &admin.CheckpointVolumeRequest{Volume: admin.Numbered(1)}); err != nil {
		s.t.Fatal(err)
	}
}

func newAPIClient(t *testing.T, addr string, creds *peering.Credentials) *admin.Client {
	t.Helper()
	c, err := admin.New(admin.Config{Addrs: []string{addr}, Creds: creds, UnsafeResend: os.Getenv("PENSTOCK_CONTROL") == "admin-resend"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// second is the error of a call that returns a value, too.
func second[T any](_ T, err error) error { return err }

func (p *peer) do(t *testing.T, op meta.Op, want meta.LeaseMode) *meta.Result {
	t.Helper()
	r, err := p.Do(t.Context(), 1, meta.OpID{}, op, want)
	if err != nil {
		t.Fatalf("%T: %v", op, err)
	}
	return r
}

func (p *peer) create(t *testing.T, name string) *meta.Result {
	t.Helper()
	return p.do(t, &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}, meta.LeaseExclusive)
}
