package server

import (
	"context"
	"fmt"
	"net"
	"time"

	"penstock.io/penstock/meta"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// serveLink reads the reports of a chunk server, and the results of orders.
func (s *Server) serveLink(conn net.Conn, rd *wire.Reader, v uint8, name string, who peering.Identity) {
	l := &link{conn: conn, who: who, send: wire.NewSender(conn, v, nil), orders: map[uint64]chan meta.OrderResult{}, gone: make(chan struct{})}
	var id meta.ServerID
	var acked wire.Reported // the last event handled of its generation
	defer func() {
		close(l.gone)
		if s.chunkServers.strike(id, l) {
			s.serverMap.unseen(id)
			s.repairs.kickRepair()
		}
	}()
	for {
		t, req, body, err := rd.Next()
		if err == nil {
			err = maySend(who, t)
		}
		if err != nil {
			if s.ctx.Err() == nil && id != 0 {
				s.log.Warn("the connection to a chunk server is lost; the chunk server connects again", "server", id, "error", err)
			}
			return
		}
		switch t {
		case wire.TReport:
			var r wire.Report
			if err := wire.Decode(body, &r); err != nil {
				s.log.Warn("chunk server dropped", "error", err)
				return
			}
			if id == 0 {
				ctx, cancel := context.WithTimeout(s.ctx, bindWait)
				err = s.chunkServers.bind(ctx, who, r.Info.ID)
				cancel()
			} else if id != r.Info.ID {
				err = meta.E("report", meta.Protocol, who.String(), fmt.Errorf("on one stream it says to be server %d and server %d", id, r.Info.ID))
			}
			if err != nil {
				s.log.Warn("a chunk server was refused: its certificate has another name", "name", name, "server", r.Info.ID, "error", err)
				return
			}
			l.mu.Lock()
			changed := l.report.Info.Addr != r.Info.Addr
			l.report = r
			l.mu.Unlock()
			anew := s.serverMap.saw(name, &r)
			if id == 0 {
				id = r.Info.ID
				s.chunkServers.suspected.lift(id)
				// The clock goes before the keys, so that the chunk server judges every
				// capability by this server's clock.
				l.send.Enqueue(0, &wire.Reported{Now: meta.Time(time.Now().UnixNano()), Stamp: r.Stamp})
				s.chunkServers.enlist(id, l, true)
				// The chunk server's own list of metadata servers may name few of them, or
				// have a single name for all. Later changes go to every link.
				l.send.Send(0, s.peers.metaList())
				s.log.Info("a chunk server connected", "server", id, "address", r.Info.Addr, "free", r.Info.Free)
				for _, o := range s.hosted.owners() {
					o.tasks.collection.Wake()
				}
			} else {
				// A second stream of the same server may have replaced this stream, and ended.
				s.chunkServers.enlist(id, l, false)
			}
			if changed {
				s.tellServers()
			}
			if anew {
				s.repairs.relist(r.Info.ID)
			}
			if n := len(r.Events); n > 0 {
				for _, e := range r.Events {
					s.log.Warn("a chunk server reports an event", "server", id, "event", e.Kind, "chunk", e.Chunk, "disk", e.Disk, "detail", e.Detail)
				}
				s.repairs.events(id, r.Events)
				acked = wire.Reported{Generation: r.Generation, Seq: r.Events[n-1].Seq}
			} else if acked.Generation != r.Generation {
				acked = wire.Reported{Generation: r.Generation}
			}
			// Every report is answered, also without events: the answer carries the clock that
			// capabilities are judged by.
			re := acked
			re.Now, re.Stamp = meta.Time(time.Now().UnixNano()), r.Stamp
			l.send.Send(0, &re)
		case wire.TOrderRe:
			var r wire.OrderRe
			if err := wire.Decode(body, &r); err != nil {
				s.log.Warn("chunk server dropped", "server", id, "error", err)
				return
			}
			l.mu.Lock()
			ch := l.orders[req]
			delete(l.orders, req)
			l.mu.Unlock()
			if ch != nil {
				ch <- r.Result
			}
		default:
			s.log.Warn("chunk server dropped", "server", id, "type", t)
			return
		}
	}
}

// tellServers sends the list of chunk servers to every session.
func (s *Server) tellServers() {
	m := s.chunkServers.serverList()
	for _, sess := range s.clients.all() {
		sess.enqueue(0, m)
		sess.flush()
	}
}
