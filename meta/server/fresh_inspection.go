package server

import (
	"context"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// afreshWait bounds how long lookAfresh waits for servers that do not list their chunks.
const afreshWait = 15 * time.Second

// lookAfresh makes every chunk server list its replicas again, as after a change of disks, and
// waits at most afreshWait until an inspection with the new lists is over. Then the owner
// knows of replicas that vanished without the server's notice.
func (in *inspection) lookAfresh(ctx context.Context) {
	mark := time.Now()
	in.mu.Lock()
	clear(in.listed)
	in.again = mark
	in.mu.Unlock()
	in.k.tasks.inspection.Wake()
	for time.Since(mark) < afreshWait && ctx.Err() == nil && in.k.ctx.Err() == nil {
		in.mu.Lock()
		done := in.whole.After(mark)
		in.mu.Unlock()
		if done {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// shortOpen returns the open chunks with an id behind from of which no server has all the
// bytes that the journal refers to, as after disks were set back to an old image. A chunk with
// a server that does not answer is left out.
func (in *inspection) shortOpen(ctx context.Context, from meta.ChunkID) (map[meta.ChunkID]bool, error) {
	k := in.k
	open := map[meta.ChunkID][]meta.ServerID{}
	k.mu.Lock()
	err := namespace.AllOpenChunks(k.view(), func(c meta.ChunkRecord, file meta.Ino) bool {
		if c.ID.Compare(from) > 0 && c.Live > 0 {
			open[c.ID] = c.Servers
		}
		return true
	})
	k.mu.Unlock()
	if err != nil || len(open) == 0 {
		return nil, err
	}
	if err := k.settled(ctx); err != nil {
		return nil, err
	}
	frozen, release, err := k.freezeState(ctx, &checking{})
	if err != nil {
		return nil, err
	}
	ends := map[meta.ChunkID]uint64{}
	err = namespace.AllExtents(frozen, func(_ meta.Ino, e meta.Extent) bool {
		if _, ok := open[e.Chunk]; ok {
			ends[e.Chunk] = max(ends[e.Chunk], e.ChunkOff+e.Len)
		}
		return true
	})
	frozen.Close()
	release()
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	short := map[meta.ChunkID]bool{}
	var wg sync.WaitGroup
	slots := make(chan struct{}, sealsAtOnce)
	for id, end := range ends {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			for _, server := range open[id] {
				ask, cancel := context.WithTimeout(ctx, orderPatience)
				said, err := k.order(ask, server, meta.Order{Kind: meta.OrderStat, Chunk: id})
				cancel()
				if err == nil && said.Length >= end || err != nil && !provesBad(meta.KindOf(err)) {
					return
				}
			}
			mu.Lock()
			defer mu.Unlock()
			short[id] = true
		})
	}
	wg.Wait()
	return short, nil
}
