package cluster

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// View is the cluster's state at one revision. It is immutable and shared.
type View struct {
	Revision     int64
	Volumes      []Volume // by id
	ChunkServers map[meta.ServerID]meta.ServerInfo
	MetaServers  []MetaServer // by name
	Nodes        []Node       // by id
	CapKeys      []meta.CapKey
	Grants       []Grant  // by key
	Members      []Member // by role and name
	Settings     Settings // Version 0: never set
	// Bearers says which identity each chunk server's number belongs to.
	Bearers map[meta.ServerID]Bearer

	// left has the keys of damaged records and of records of a newer program, which the fields
	// above lack, by part of the keys. A part without such records is absent.
	left map[string]map[string]bool

	sorted sync.Once // makes:
	named  map[string][]Grant
	many   []Grant // grants for patterns of names
}

// Access returns an identity's access to a volume. With a grant for each volume of each node
// there are many grants, of which few belong to one identity.
func (v *View) Access(who string, volume meta.VolumeID) Access {
	v.sorted.Do(func() {
		v.named = map[string][]Grant{}
		for _, g := range v.Grants {
			if strings.ContainsAny(g.Who, `*?[\`) {
				v.many = append(v.many, g)
			} else {
				v.named[g.Who] = append(v.named[g.Who], g)
			}
		}
	})
	return AccessOf(slices.Concat(v.named[who], v.many), who, volume)
}

// Volume finds a volume by id.
func (v *View) Volume(id meta.VolumeID) (Volume, bool) {
	i, ok := slices.BinarySearchFunc(v.Volumes, id, volumeByID)
	if !ok {
		return Volume{}, false
	}
	return v.Volumes[i], true
}

// Servers gives the chunk servers by id.
func (v *View) Servers() []meta.ServerInfo {
	var all []meta.ServerInfo
	for _, id := range slices.Sorted(maps.Keys(v.ChunkServers)) {
		all = append(all, v.ChunkServers[id])
	}
	return all
}

// View returns the newest view of this process: at most a few seconds old while etcd answers.
func (c *Cluster) View() *View { return c.view.Load() }

// Changed returns a channel that is closed at the next view.
func (c *Cluster) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Refresh reads a new view now, linearizably.
func (c *Cluster) Refresh(ctx context.Context) (*View, error) {
	v, err := c.read(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.view.Load(); old != nil && old.Revision >= v.Revision {
		return old, nil
	}
	c.view.Store(v)
	close(c.changed)
	c.changed = make(chan struct{})
	return v, nil
}

// lookup is one read of the view for all its waiting callers.
type lookup struct {
	done chan struct{}
	view *View
	err  error
}

// Current returns a view not older than the call, for callers about to refuse a request that
// another process may have allowed a moment ago. However many callers wait, one read at a time
// goes to etcd, at most one in minPause, and reads for these callers take at most a quarter of
// the time. Current may take maxPause longer than etcd does. Errors: Unavailable, Canceled.
func (c *Cluster) Current(ctx context.Context) (*View, error) {
	c.mu.Lock()
	l := c.next
	if l == nil {
		if err := c.run.Err(); err != nil {
			c.mu.Unlock()
			return nil, wrap("read cluster", c.prefix, err)
		}
		l = &lookup{done: make(chan struct{})}
		c.next = l
		before := c.last
		c.last = l
		c.joined.Go(func() { c.look(l, before) })
	}
	c.mu.Unlock()
	select {
	case <-l.done:
		return l.view, l.err
	case <-ctx.Done():
		return nil, wrap("read cluster", c.prefix, context.Cause(ctx))
	}
}

// look reads for all callers that wait for l, after the previous read.
func (c *Cluster) look(l, before *lookup) {
	defer close(l.done)
	if before != nil {
		<-before.done
	}
	c.mu.Lock()
	calm := time.Until(c.calm)
	c.mu.Unlock()
	if calm > 0 {
		select {
		case <-time.After(calm):
		case <-c.run.Done():
		}
	}
	// Callers from here on wait for the next read.
	c.mu.Lock()
	c.next = nil
	c.mu.Unlock()
	began := time.Now()
	call, cancel := context.WithTimeout(c.run, refresh)
	defer cancel()
	l.view, l.err = c.Refresh(call)
	c.mu.Lock()
	c.calm = time.Now().Add(min(max(3*time.Since(began), minPause), maxPause))
	c.mu.Unlock()
}

// keepView refreshes the view when the watch hints at a change, and sometimes
// anyway: a watch may lose events.
func (c *Cluster) keepView(ctx context.Context) {
	every := time.NewTicker(refresh)
	defer every.Stop()
	// The volumes' journals have the same prefix: only the parts shown by a view are watched.
	hint := make(chan struct{}, 1)
	for _, part := range viewParts {
		c.joined.Go(func() { c.watch(ctx, c.prefix+part, hint) })
	}
	var pause <-chan time.Time
	for {
		// A view costs etcd a read of every record. During many consecutive changes, such as
		// the creation of thousands of volumes, views take at most a quarter of the time.
		if pause != nil {
			select {
			case <-ctx.Done():
				return
			case <-pause:
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-hint:
		case <-every.C:
		}
		began := time.Now()
		call, cancel := context.WithTimeout(ctx, refresh)
		if _, err := c.Refresh(call); err != nil && ctx.Err() == nil {
			c.log.Warn("the cluster's state could not be read from etcd; the server tries again", "err", err)
		}
		cancel()
		pause = time.After(min(3*time.Since(began), maxPause))
	}
}

// watch sends hints of changes below a prefix until ctx ends. etcd ends a watch whose revision
// was compacted, for example after a disconnection; then watch begins another and sends a
// hint, because it may have missed a change.
func (c *Cluster) watch(ctx context.Context, prefix string, hint chan<- struct{}) {
	for w := c.watchBelow(ctx, prefix); ; {
		// Don't wait until etcd's client closes the channel: it waits for the server's answer
		// to the end, and with an etcd in this process the two can wait for each other when
		// many watches end at once.
		select {
		case <-ctx.Done():
			return
		case r, ok := <-w:
			if c.noteGone(r.Events); !ok {
				select {
				case <-ctx.Done():
					return
				case <-time.After(watchPause):
				}
				w = c.watchBelow(ctx, prefix)
			}
		}
		select {
		case hint <- struct{}{}:
		default:
		}
	}
}

func (c *Cluster) watchBelow(ctx context.Context, prefix string) clientv3.WatchChan {
	return c.cli.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithKeysOnly())
}

// watchPause is the pause between the end of a watch and the next one.
const watchPause = 100 * time.Millisecond

// maxPause bounds how much later than the change the next view may begin.
const maxPause = 250 * time.Millisecond

// minPause is the least time between two requested views.
const minPause = 50 * time.Millisecond

var viewParts = []string{"/table/", "/chunkservers/", "/metaservers/", "/nodes/", "/capkeys", "/grants/", "/members/", "/settings", "/bearers/"}

// read reads every part at one revision.
func (c *Cluster) read(ctx context.Context) (*View, error) {
	for try := 0; ; try++ {
		v, err := c.readOnce(ctx)
		// A journal trimmed meanwhile may compact the revision away.
		if !errors.Is(err, rpctypes.ErrCompacted) || try == readTries {
			return v, err
		}
	}
}

const readTries = 20

func (c *Cluster) readOnce(ctx context.Context) (*View, error) {
	if old := c.view.Load(); old != nil {
		return c.readChanged(ctx, old)
	}
	v := &View{ChunkServers: map[meta.ServerID]meta.ServerInfo{}, Bearers: map[meta.ServerID]Bearer{}}
	for _, part := range viewParts {
		if err := c.readPart(ctx, v, part); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// readPart reads a whole part at the view's revision or, if the view has none yet, at the
// newest, which becomes the view's.
func (c *Cluster) readPart(ctx context.Context, v *View, part string) error {
	v.clear(part)
	prefix := c.prefix + part
	end := clientv3.GetPrefixRangeEnd(prefix)
	for from, more := prefix, true; more; {
		opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(page)}
		if v.Revision != 0 {
			opts = append(opts, clientv3.WithRev(v.Revision))
		}
		r, err := c.cli.Get(ctx, from, opts...)
		if err != nil {
			return wrap("read cluster", prefix, err)
		}
		if v.Revision == 0 {
			v.Revision = r.Header.Revision
		}
		for _, kv := range r.Kvs {
			c.addTo(v, part, kv)
			from = string(kv.Key) + "\x00"
		}
		more = len(r.Kvs) == page
	}
	return nil
}

// readChanged makes the next view from an old one, the records changed since, and the deleted
// keys, reported by the watches: so the table of a big cluster is not read again for every new
// server. The result has every existing record, and perhaps deleted records not yet reported.
// So a part with as many records as etcd counts is right. readChanged reads a part completely
// if the count still differs after a moment, or if too much changed.
func (c *Cluster) readChanged(ctx context.Context, old *View) (*View, error) {
	var ops []clientv3.Op
	for _, part := range viewParts {
		ops = append(ops, clientv3.OpGet(c.prefix+part, clientv3.WithPrefix(), clientv3.WithMinModRev(old.Revision+1), clientv3.WithLimit(page)))
	}
	r, err := c.cli.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		return nil, wrap("read cluster", c.prefix, err)
	}
	v := &View{
		Revision:     r.Header.Revision,
		Volumes:      slices.Clone(old.Volumes),
		ChunkServers: maps.Clone(old.ChunkServers),
		MetaServers:  slices.Clone(old.MetaServers),
		Nodes:        slices.Clone(old.Nodes),
		CapKeys:      old.CapKeys,
		Grants:       slices.Clone(old.Grants),
		Members:      slices.Clone(old.Members),
		Settings:     old.Settings,
		Bearers:      maps.Clone(old.Bearers),
		left:         map[string]map[string]bool{},
	}
	for part, keys := range old.left {
		v.left[part] = maps.Clone(keys)
	}
	changed := map[string]bool{}
	anew := map[string]bool{}
	for i, part := range viewParts {
		got := r.Responses[i].GetResponseRange()
		for _, kv := range got.Kvs {
			changed[string(kv.Key)] = true
			c.addTo(v, part, kv)
		}
		anew[part] = got.More
	}
	late := time.NewTimer(goneWait)
	defer late.Stop()
	for waits := true; ; {
		gone, more := c.goneIn(old.Revision, v.Revision)
		for _, key := range gone {
			if !changed[key] { // else the key was made again
				v.remove(strings.TrimPrefix(key, c.prefix))
			}
		}
		lacks := ""
		for i, part := range viewParts {
			if !anew[part] && int64(v.count(part)) != r.Responses[i].GetResponseRange().Count {
				lacks = part
			}
		}
		if lacks == "" {
			break
		}
		if !waits {
			anew[lacks] = true
			continue
		}
		select {
		case <-more:
		case <-late.C:
			waits = false
		case <-ctx.Done():
			return nil, wrap("read cluster", c.prefix, context.Cause(ctx))
		}
	}
	for _, part := range viewParts {
		if anew[part] {
			if err := c.readPart(ctx, v, part); err != nil {
				return nil, err
			}
		}
	}
	return v, nil
}

// goneWait bounds the wait of a view for a watch's report of deletions.
const goneWait = 50 * time.Millisecond

// maxGone bounds the remembered deletions.
const maxGone = 4096

// deletion is a deleted key that a watch reported.
type deletion struct {
	key string
	rev int64
}

// noteGone remembers deletions that a watch reported.
func (c *Cluster) noteGone(l []*clientv3.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := len(c.gone)
	for _, e := range l {
		if e.Type == mvccpb.DELETE {
			c.gone = append(c.gone, deletion{string(e.Kv.Key), e.Kv.ModRevision})
		}
	}
	if len(c.gone) == before {
		return
	}
	if n := len(c.gone) - maxGone; n > 0 {
		c.gone = slices.Delete(c.gone, 0, n+maxGone/2)
	}
	if c.goneMore != nil {
		close(c.goneMore)
		c.goneMore = nil
	}
}

// goneIn lists the keys known to have been deleted after one revision and not after another;
// more is closed when more are known.
func (c *Cluster) goneIn(after, upTo int64) (keys []string, more <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range c.gone {
		if d.rev > after && d.rev <= upTo {
			keys = append(keys, d.key)
		}
	}
	if c.goneMore == nil {
		c.goneMore = make(chan struct{})
	}
	return keys, c.goneMore
}

// addTo adds a record to a part, or replaces the record's older form. A record of a newer
// program is left out: otherwise the whole view would be unreadable.
func (c *Cluster) addTo(v *View, part string, kv *mvccpb.KeyValue) {
	name := strings.TrimPrefix(string(kv.Key), c.prefix)
	err := v.add(name, kv)
	if err == nil {
		v.leave(part, name, false)
		return
	}
	c.log.Warn("a record of the cluster can't be decoded, and is left out", "key", string(kv.Key), "err", err)
	v.remove(name)
	v.leave(part, name, true)
}

// leave says whether a record of a part is left out.
func (v *View) leave(part, name string, out bool) {
	switch {
	case !out:
		if delete(v.left[part], name); len(v.left[part]) == 0 {
			delete(v.left, part)
		}
		return
	case v.left == nil:
		v.left = map[string]map[string]bool{}
	}
	if v.left[part] == nil {
		v.left[part] = map[string]bool{}
	}
	v.left[part][name] = true
}

// count is how many records of a part the view knows of.
func (v *View) count(part string) int {
	return len(v.left[part]) + map[string]int{"/table/": len(v.Volumes), "/chunkservers/": len(v.ChunkServers), "/metaservers/": len(v.MetaServers), "/nodes/": len(v.Nodes), "/capkeys": min(1, len(v.CapKeys)),
		"/grants/": len(v.Grants), "/members/": len(v.Members), "/settings": min(1, v.Settings.Version), "/bearers/": len(v.Bearers)}[part]
}

// clear forgets a part.
func (v *View) clear(part string) {
	delete(v.left, part)
	switch part {
	case "/table/":
		v.Volumes = nil
	case "/chunkservers/":
		v.ChunkServers = map[meta.ServerID]meta.ServerInfo{}
	case "/metaservers/":
		v.MetaServers = nil
	case "/nodes/":
		v.Nodes = nil
	case "/capkeys":
		v.CapKeys = nil
	case "/grants/":
		v.Grants = nil
	case "/members/":
		v.Members = nil
	case "/settings":
		v.Settings = Settings{}
	case "/bearers/":
		v.Bearers = map[meta.ServerID]Bearer{}
	}
}

// remove removes a record by its key without the cluster's prefix. A missing record is not an
// error.
func (v *View) remove(name string) {
	part := viewParts[max(0, slices.IndexFunc(viewParts, func(p string) bool { return strings.HasPrefix(name, p) }))]
	v.leave(part, name, false)
	key := strings.TrimPrefix(name, part)
	number, _ := strconv.ParseUint(key, 16, 64)
	switch part {
	case "/table/":
		i, ok := slices.BinarySearchFunc(v.Volumes, meta.VolumeID(number), volumeByID)
		v.Volumes = without(v.Volumes, i, ok)
	case "/chunkservers/":
		delete(v.ChunkServers, meta.ServerID(number))
	case "/metaservers/":
		i, ok := slices.BinarySearchFunc(v.MetaServers, key, metaServerByName)
		v.MetaServers = without(v.MetaServers, i, ok)
	case "/nodes/":
		i, ok := slices.BinarySearchFunc(v.Nodes, meta.ServerID(number), nodeByID)
		v.Nodes = without(v.Nodes, i, ok)
	case "/grants/":
		i, ok := slices.BinarySearchFunc(v.Grants, name, grantByKey)
		v.Grants = without(v.Grants, i, ok)
	case "/members/":
		i, ok := slices.BinarySearchFunc(v.Members, key, memberByName)
		v.Members = without(v.Members, i, ok)
	case "/bearers/":
		delete(v.Bearers, meta.ServerID(number))
	default: // a part with a single record
		v.clear(part)
	}
}

// without removes element i, if there is true.
func without[T any](all []T, i int, there bool) []T {
	if !there {
		return all
	}
	return slices.Delete(all, i, i+1)
}

func (v *View) add(name string, kv *mvccpb.KeyValue) error {
	switch {
	case strings.HasPrefix(name, "/table/"):
		row, err := decode[Volume](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		row.Revision = kv.ModRevision
		i, ok := slices.BinarySearchFunc(v.Volumes, row.ID, volumeByID)
		v.Volumes = place(v.Volumes, i, ok, row)
	case strings.HasPrefix(name, "/chunkservers/"):
		s, err := decode[ChunkServer](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		v.ChunkServers[s.Info.ID] = s.Info
	case strings.HasPrefix(name, "/metaservers/"):
		s, err := decode[MetaServer](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		i, ok := slices.BinarySearchFunc(v.MetaServers, s.Name, metaServerByName)
		v.MetaServers = place(v.MetaServers, i, ok, s)
	case strings.HasPrefix(name, "/nodes/"):
		n, err := decode[Node](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		n.Revision = kv.ModRevision
		i, ok := slices.BinarySearchFunc(v.Nodes, n.ID, nodeByID)
		v.Nodes = place(v.Nodes, i, ok, n)
	case name == "/capkeys":
		k, err := decode[capKeys](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		v.CapKeys = k.Keys
	case strings.HasPrefix(name, "/grants/"):
		g, err := decode[Grant](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		g.Revision, g.key = kv.ModRevision, name
		i, ok := slices.BinarySearchFunc(v.Grants, name, grantByKey)
		v.Grants = place(v.Grants, i, ok, g)
	case strings.HasPrefix(name, "/members/"):
		m, err := decode[Member](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		m.Revision = kv.ModRevision
		i, ok := slices.BinarySearchFunc(v.Members, m.String(), memberByName)
		v.Members = place(v.Members, i, ok, m)
	case strings.HasPrefix(name, "/bearers/"):
		b, err := decode[Bearer](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		v.Bearers[b.Server] = b
	case name == "/settings":
		s, err := decode[Settings](kv.Key, kv.Value)
		if err != nil {
			return err
		}
		v.Settings = s
	}
	return nil
}

// place inserts x at i, or replaces element i.
func place[T any](all []T, i int, replace bool, x T) []T {
	if replace {
		all[i] = x
		return all
	}
	return slices.Insert(all, i, x)
}

func memberByName(a Member, name string) int { return strings.Compare(a.String(), name) }

func metaServerByName(a MetaServer, name string) int { return strings.Compare(a.Name, name) }

func nodeByID(a Node, id meta.ServerID) int { return cmp.Compare(a.ID, id) }

func grantByKey(a Grant, key string) int { return strings.Compare(a.key, key) }

// AllEvicted lists the identities with void certificates, in the form that peer.ParseWorthless
// parses, ascending.
func (v *View) AllEvicted() (all []string) {
	for _, m := range v.Members {
		switch {
		case m.Evicted:
			all = append(all, m.String())
		case m.Admission > 0:
			all = append(all, peer.WorthlessBelow(m.String(), m.Admission))
		}
	}
	return all
}

// Evicted tells whether an identity's certificate is worth nothing any more.
func (v *View) Evicted(who peer.Identity) bool {
	i, ok := slices.BinarySearchFunc(v.Members, who.String(), memberByName)
	return ok && (v.Members[i].Evicted || who.Admission < v.Members[i].Admission)
}

func volumeByID(a Volume, id meta.VolumeID) int { return cmp.Compare(a.ID, id) }
