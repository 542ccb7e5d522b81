package server

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/wire"
)

// CapLife is the life of capabilities to read chunks and to append to chunks; clients renew
// capabilities at half of CapLife. CapLife, and the few seconds that a server's view of the
// cluster may be old, are less than the minute within which a revoked grant must be useless.
const CapLife = 45 * time.Second

const (
	// keyHold is how long chunk servers know a new key before the key signs.
	keyHold = 10 * time.Second
	// DefaultKeyLook is the mean interval of the checks of the newest key's age.
	DefaultKeyLook = time.Minute
)

// sign signs a capability valid from now for life, at most capability.MaxLife: the signing key
// is not valid for longer.
func (cs *chunkServers) sign(life time.Duration, c capability.Claims) []byte {
	c.Expiry = meta.Time(time.Now().Add(min(life, capability.MaxLife)).UnixNano())
	return capability.Sign(cs.signKey(), c)
}

func (cs *chunkServers) signKey() meta.CapKey {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	k := slices.Clone(cs.keys)
	slices.SortFunc(k, func(a, b meta.CapKey) int { return cmp.Compare(a.ID, b.ID) })
	if len(k) > 1 && time.Since(cs.keysAt) < keyHold {
		return k[len(k)-2]
	}
	return k[len(k)-1]
}

// takeKeys takes the cluster's capability keys after a rotation, and sends the keys to the
// chunk servers before this server signs with the new key. The same order lists the evicted
// clients: chunk servers end the connections of evicted clients.
func (cs *chunkServers) takeKeys(view *cluster.View) {
	keys, evicted := view.CapKeys, view.AllEvicted()
	if len(keys) == 0 {
		return
	}
	cs.mu.Lock()
	rotated := !slices.EqualFunc(cs.keys, keys, func(a, b meta.CapKey) bool { return a.ID == b.ID })
	same := !rotated && slices.Equal(cs.evicted, evicted)
	cs.evicted = evicted
	if !same {
		for _, l := range cs.links {
			l.send.Enqueue(0, &wire.Order{Order: meta.Order{Kind: meta.OrderKeys, Keys: keys, Evicted: evicted}})
			go l.send.Flush()
		}
	}
	if rotated {
		// The newest key signs after a delay (signKey). By then a chunk server that is slow to
		// take keys knows the key, too.
		cs.keys, cs.keysAt = slices.Clone(keys), time.Now()
	}
	cs.mu.Unlock()
	if rotated {
		cs.log.Info("capability keys were rotated", "newest", keys[len(keys)-1].ID)
	}
}

// keyLoop rotates the capability keys at the interval of the cluster's settings. All metadata
// servers run keyLoop; the first to find the newest key too old rotates.
func (cs *chunkServers) keyLoop() {
	for {
		// Spread the checks of the servers over time.
		wait := cs.cfg.KeyLook/2 + rand.N(cs.cfg.KeyLook)
		select {
		case <-time.After(wait):
		case <-cs.ctx.Done():
			return
		}
		every := cluster.DefaultKeyLife
		if v := cs.cfg.Cluster.View(); v != nil && v.Settings.KeyLife != 0 {
			every = max(v.Settings.KeyLife, cluster.MinKeyLife)
		}
		ctx, cancel := context.WithTimeout(cs.ctx, DefaultKeyLook)
		rotated, err := cs.cfg.Cluster.FreshCapKeys(ctx, every)
		cancel()
		switch {
		case err != nil && cs.ctx.Err() == nil:
			cs.log.Warn("the capability keys can't be read from etcd; the server tries again", "error", err)
		case rotated:
			cs.log.Info("this server rotated the capability keys", "after", every)
		}
	}
}

// bulkRights returns Plain if a volume's bytes may go over plain connections, else 0.
func (cs *chunkServers) bulkRights(v meta.VolumeID) capability.Rights {
	view := cs.cfg.Cluster.View()
	if view == nil || !view.Settings.PlainBulk {
		return 0
	}
	if row, ok := view.Volume(v); !ok || row.Policy.Encrypt {
		return 0
	}
	return capability.Plain
}

// readCap signs a capability to read a volume's chunks.
func (cs *chunkServers) readCap(v meta.VolumeID, sess *session) ([]byte, time.Duration, error) {
	t := cs.sign(CapLife, capability.Claims{
		Volume: v, Rights: capability.Read | cs.bulkRights(v), Client: sess.holder(),
	})
	return t, CapLife, nil
}

// SystemReadCap returns a capability to read the chunks of a volume.
func (cs *chunkServers) SystemReadCap(v meta.VolumeID) []byte {
	return cs.sign(CapLife, capability.Claims{
		Volume: v, Rights: capability.Read,
	})
}
