package penstock

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// settings are a volume's policy, as far as the client knows it.
type settings struct {
	v *Volume

	policy atomic.Pointer[meta.Policy]
	at     atomic.Int64  // when the policy was asked for, in nanoseconds of the clock
	news   atomic.Uint64 // how often the owner said which policy was set
	mu     sync.Mutex    // held while the policy is replaced
}

// policyAge is how old the known policy may be when a file is opened.
const policyAge = 2 * time.Second

var _ metaclient.PolicyHandler = (*Client)(nil) // else the session would tell nobody

// Policy returns the volume's policy. The owner reports changes to the client; a client
// without a connection to the owner learns of changes after the reconnection.
func (v *Volume) Policy() meta.Policy {
	v.settings.refresh(v.c.ctx)
	return *v.settings.policy.Load()
}

func (st *settings) set(p meta.Policy) {
	st.policy.Store(&p)
	st.at.Store(time.Now().UnixNano())
}

// PolicySet tells which policy a volume has by the word of its owner.
func (c *Client) PolicySet(id meta.VolumeID, p meta.Policy) {
	c.mu.Lock()
	c.policies++
	v := c.volumes[id]
	c.mu.Unlock()
	if v == nil {
		return
	}
	v.settings.mu.Lock()
	defer v.settings.mu.Unlock()
	v.settings.news.Add(1)
	v.settings.set(p)
}

// refresh asks for the policy if the cached one is old. If nobody answers, the cached
// policy stays in force.
func (st *settings) refresh(ctx context.Context) {
	v := st.v
	if v.frozen() {
		return
	}
	at := st.at.Load()
	now := time.Now().UnixNano()
	if now-at < int64(policyAge) || !st.at.CompareAndSwap(at, now) {
		return
	}
	v.c.stats.rpcs.Add(1)
	news := st.news.Load()
	i, err := v.c.sess.Volume(ctx, v.id, "")
	if err != nil {
		return
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.news.Load() == news { // else the answer may be older than what the owner said
		st.set(i.Policy)
	}
}

func (st *settings) maxChunk() uint64 {
	if n := st.policy.Load().MaxChunk; n != 0 {
		return n
	}
	return meta.DefaultChunk
}
