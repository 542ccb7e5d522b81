package client

import (
	"context"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// before is the oldest protocol that is still spoken.
const before = wire.MinVersion

// oldServer answers as a metadata server of the version before: it hangs up on
// any frame of another version.
func oldServer(t *testing.T) (addr string, newer *atomic.Uint32, reports chan wire.Report) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	newer, reports = new(atomic.Uint32), make(chan wire.Report, 100)
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer nc.Close()
				rd := wire.NewReader(nc)
				for {
					typ, id, body, err := rd.Next()
					if err != nil {
						return
					}
					if body.Version != before {
						newer.Add(1)
						return
					}
					var re wire.Message
					switch typ {
					case wire.THello:
						var h wire.Hello
						if wire.Decode(body, &h) != nil {
							return
						}
						re = &wire.Hello{Min: before, Max: before, Session: h.Session, Cluster: "c", TTL: 6000}
					case wire.TEnter:
						re = &wire.Entered{Known: true}
					case wire.TCall:
						re = &wire.Reply{Result: meta.Result{Attr: meta.Attr{Ino: 9}}}
					case wire.TReport:
						var r wire.Report
						if wire.Decode(body, &r) != nil {
							return
						}
						reports <- r
						continue
					case wire.TKeepAlive:
						var k wire.KeepAlive
						if wire.Decode(body, &k) != nil {
							return
						}
						re = &wire.KeepAlive{Count: k.Count, TTL: 6000}
					case wire.TBye:
						re = &wire.Bye{}
					default:
						continue
					}
					nc.Write(wire.Append(nil, before, id, re))
				}
			}()
		}
	}()
	return "unix:" + path, newer, reports
}

// A client and a chunk server of this version work with servers of the one before.
func TestServersOfTheVersionBefore(t *testing.T) {
	addr, newer, reports := oldServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	s, err := Dial(ctx, Config{Addrs: []string{addr}, Name: "new"})
	if err != nil {
		t.Fatal(err)
	}
	r, err := s.Do(ctx, meta.RootVolume, meta.OpID{}, &meta.GetAttr{Ino: 9}, meta.LeaseNone)
	if err != nil || r.Attr.Ino != 9 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := s.Close(ctx); err != nil {
		t.Error(err)
	}
	linked, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() {
		done <- RunLink(linked, LinkConfig{
			Addrs: []string{addr}, Name: "new", Interval: 10 * time.Millisecond,
			Report: func() wire.Report {
				return wire.Report{Info: meta.ServerInfo{ID: 1, Addr: "a", Local: "unix:/x"}, Generation: 1}
			},
			Order: func(context.Context, meta.Order) meta.OrderResult { return meta.OrderResult{} },
		})
	}()
	select {
	case r := <-reports:
		if r.Info.ID != 1 || r.Info.Local != "" {
			t.Errorf("%+v", r.Info)
		}
	case <-ctx.Done():
		t.Error("no report")
	}
	stop()
	<-done
	if n := newer.Load(); n != 0 {
		t.Errorf("%d connections began with words that the server does not know", n)
	}
}
