package kafka

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"
)

// arrivalShare is the part of Limits.Memory that the arriving requests of one user take, as a divisor.
const arrivalShare = 4

// arrivals bounds the memory of requests that have begun to arrive and are not whole, for each user:
// otherwise a user who sends half requests keeps the memory of all requests from the other users until
// the deadline of the transfer.
type arrivals struct {
	most int64 // bytes of a user

	mu sync.Mutex
	of map[string]*arrival // by user
}

// arrival has the arriving requests of a user.
type arrival struct {
	memory *semaphore.Weighted
	uses   int // requests that have memory or wait for memory
}

// take waits until a user may have so many bytes of arriving requests. The caller calls done when the
// request is whole, or was given up. A request that is larger than the bound takes the bound. Errors:
// that of ctx.
func (a *arrivals) take(ctx context.Context, user string, bytes int64) (done func(), err error) {
	bytes = min(bytes, a.most)
	a.mu.Lock()
	u := a.of[user]
	if u == nil {
		u = &arrival{memory: semaphore.NewWeighted(a.most)}
		a.of[user] = u
	}
	u.uses++
	a.mu.Unlock()
	leave := func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if u.uses--; u.uses == 0 {
			delete(a.of, user)
		}
	}
	if err := u.memory.Acquire(ctx, bytes); err != nil {
		leave()
		return nil, err
	}
	return func() {
		u.memory.Release(bytes)
		leave()
	}, nil
}
