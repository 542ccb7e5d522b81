package cluster

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
)

// View is the cluster at one revision. It is never changed: all who hold one
// share it.
type View struct {
	Revision     int64
	Volumes      []Volume // by id
	ChunkServers map[meta.ServerID]meta.ServerInfo
	MetaServers  []MetaServer // by name
	CapKeys      []meta.CapKey
}

// Volume finds a volume by id.
func (v *View) Volume(id meta.VolumeID) (Volume, bool) {
	i, ok := slices.BinarySearchFunc(v.Volumes, id, func(a Volume, id meta.VolumeID) int { return int(int64(a.ID) - int64(id)) })
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

// View is the newest view this process has: at most a few seconds old while
// etcd answers.
func (c *Cluster) View() *View { return c.view.Load() }

// Changed gives a channel that is closed when the next view is there.
func (c *Cluster) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.changed
}

// Refresh reads a new view now, linearizably, and gives it.
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

// keepView refreshes the view when the watch hints at a change, and sometimes
// anyway: a watch may lose events.
func (c *Cluster) keepView(ctx context.Context) {
	every := time.NewTicker(refresh)
	defer every.Stop()
	// The volumes' journals are under the prefix too: only the parts that a
	// view shows are watched.
	hint := make(chan struct{}, 1)
	for _, part := range viewParts {
		w := c.cli.Watch(ctx, c.prefix+part, clientv3.WithPrefix(), clientv3.WithKeysOnly())
		c.joined.Go(func() {
			for range w {
				select {
				case hint <- struct{}{}:
				default:
				}
			}
		})
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-hint:
		case <-every.C:
		}
		call, cancel := context.WithTimeout(ctx, refresh)
		if _, err := c.Refresh(call); err != nil && ctx.Err() == nil {
			c.log.Warn("the cluster's state could not be read", "err", err)
		}
		cancel()
	}
}

var viewParts = []string{"/table/", "/chunkservers/", "/metaservers/", "/capkeys"}

// read reads every part at one revision.
func (c *Cluster) read(ctx context.Context) (*View, error) {
	for try := 0; ; try++ {
		v, err := c.readOnce(ctx)
		// A journal that is trimmed meanwhile compacts the revision away.
		if !errors.Is(err, rpctypes.ErrCompacted) || try == readTries {
			return v, err
		}
	}
}

const readTries = 20

func (c *Cluster) readOnce(ctx context.Context) (*View, error) {
	v := &View{ChunkServers: map[meta.ServerID]meta.ServerInfo{}}
	at := int64(0)
	for _, part := range viewParts {
		prefix := c.prefix + part
		end := clientv3.GetPrefixRangeEnd(prefix)
		for from, more := prefix, true; more; {
			opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(page)}
			if at != 0 {
				opts = append(opts, clientv3.WithRev(at))
			}
			r, err := c.cli.Get(ctx, from, opts...)
			if err != nil {
				return nil, wrap("read cluster", prefix, err)
			}
			if at == 0 {
				at = r.Header.Revision
			}
			for _, kv := range r.Kvs {
				if err := v.add(strings.TrimPrefix(string(kv.Key), c.prefix), kv.Key, kv.Value, kv.ModRevision); err != nil {
					// One record that a newer program wrote must not blind this one.
					c.log.Warn("a cluster record is left out", "key", string(kv.Key), "err", err)
				}
				from = string(kv.Key) + "\x00"
			}
			more = len(r.Kvs) == page
		}
	}
	v.Revision = at
	return v, nil
}

// add puts one record into the view.
func (v *View) add(name string, key, value []byte, rev int64) error {
	switch {
	case strings.HasPrefix(name, "/table/"):
		row, err := decode[Volume](key, value)
		row.Revision = rev
		if err == nil {
			v.Volumes = append(v.Volumes, row)
		}
		return err
	case strings.HasPrefix(name, "/chunkservers/"):
		s, err := decode[ChunkServer](key, value)
		if err == nil {
			v.ChunkServers[s.Info.ID] = s.Info
		}
		return err
	case strings.HasPrefix(name, "/metaservers/"):
		s, err := decode[MetaServer](key, value)
		if err == nil {
			v.MetaServers = append(v.MetaServers, s)
		}
		return err
	case name == "/capkeys":
		k, err := decode[capKeys](key, value)
		if err == nil {
			v.CapKeys = k.Keys
		}
		return err
	}
	return nil
}
