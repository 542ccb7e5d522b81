package bulk

import (
	"context"
	"net"
	"sync"

	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta/peer"
)

// chain serves appends and syncs as a chain would: each frame is passed on to the next server
// before being stored here, and acknowledged when both have the frame. The chain exists for the
// measurement: the chunk server itself does not chain.
func (c role) chain(ln net.Listener, st *store.Store) {
	for {
		nc, err := ln.Accept()
		if err != nil {
			return
		}
		go func() {
			nc, _, err := peer.Greet(context.Background(), nc)
			if err != nil {
				return
			}
			defer nc.Close()
			_ = c.chainOne(nc, st)
		}()
	}
}

// hop is the next server of the chain, with its acknowledged frames.
type hop struct {
	*wire.Conn
	mu    sync.Mutex
	cond  sync.Cond
	acked uint64 // request ids come in order
	err   error
}

func (h *hop) read() {
	for {
		hd, _, err := h.Next()
		h.mu.Lock()
		if err == nil {
			h.acked = max(h.acked, hd.ID)
		}
		h.err = err
		h.cond.Broadcast()
		h.mu.Unlock()
		if err != nil {
			return
		}
	}
}

func (h *hop) wait(id uint64) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for h.acked < id && h.err == nil {
		h.cond.Wait()
	}
	return h.err
}

func (c role) chainOne(nc net.Conn, st *store.Store) error {
	up, err := wire.NewConn(nc, "")
	if err != nil {
		return err
	}
	var down *hop
	if len(c.Next) > 0 {
		dc, err := peer.Dial(context.Background(), c.Next[0], peer.Insecure(), peer.ChunkServer)
		if err != nil {
			return err
		}
		defer dc.Close()
		w, err := wire.NewConn(dc, "")
		if err != nil {
			return err
		}
		down = &hop{Conn: w}
		down.cond.L = &down.mu
		go down.read()
	}
	type done struct {
		id uint64
		t  wire.Type
		a  wire.Answer
	}
	acks := make(chan done, 256)
	defer close(acks)
	go func() {
		for d := range acks {
			if down != nil && d.t != wire.Hello {
				if down.wait(d.id) != nil {
					nc.Close()
					return
				}
			}
			_ = up.Send(d.a.AppendFrame(nil, d.t, 0, d.id, 0, 0), nil)
		}
	}()
	buf := make([]byte, wire.MaxData)
	var frame []byte
	for {
		h, body, err := up.Next()
		if err != nil {
			return err
		}
		q, err := wire.DecodeRequest(h.Type, h.Flags, body)
		if err != nil {
			return err
		}
		frame = q.AppendFrame(frame[:0], h.Type, h.Flags, h.ID, int(h.Data), h.DataCRC)
		p := buf[:h.Data]
		if err := up.Data(p); err != nil {
			return err
		}
		d := done{id: h.ID, t: h.Type}
		if down != nil && h.Type != wire.Hello {
			if err := down.Send(frame, p); err != nil {
				return err
			}
		}
		switch h.Type {
		case wire.Hello:
			d.a = wire.Answer{Speaks: 1, Server: c.ID}
			if down != nil {
				if err := down.Send(frame, nil); err != nil {
					return err
				}
			}
		case wire.Append:
			if prev := q.Chunk; q.Off == 0 {
				// The previous round's chunk goes: untouched memory costs more.
				prev.Counter--
				if err := st.Delete(context.Background(), prev, q.Fence); err != nil {
					return err
				}
			}
			if err := st.Append(context.Background(), q.Chunk, q.Fence, q.Off, p, h.DataCRC); err != nil {
				return err
			}
		case wire.Sync:
			if d.a.Synced, err = st.Sync(context.Background(), q.Chunk, q.Off); err != nil {
				return err
			}
		}
		acks <- d
	}
}
