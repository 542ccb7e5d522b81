package peer

import (
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"
)

// from is a connection of an address.
type from struct {
	net.Conn
	addr   net.Addr
	closed int
}

func (f *from) RemoteAddr() net.Addr { return f.addr }
func (f *from) Close() error         { f.closed++; return nil }

func at(ip string) *from { return &from{addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1}} }

// TestGate: of too many strangers, the stranger that has waited longest goes, from the address
// with the most strangers; a new connection, and a known connection, stays.
func TestGate(t *testing.T) {
	g := Gate{perIP: 3, all: 6}
	var mob []*from
	known := at("10.0.0.1")
	g.Enter(known)
	g.Leave(known)
	for i := range 5 {
		mob = append(mob, at("10.0.0.1"))
		g.Enter(mob[i])
	}
	for i, c := range mob {
		if want := max(0, 2-i); (c.closed > 0) != (want > 0) {
			t.Errorf("stranger %d of one address was closed %d times", i, c.closed)
		}
	}
	if known.closed > 0 {
		t.Error("who is known was closed")
	}
	// Many networks, each with few: the largest crowd pays.
	var few []*from
	for i := range 4 {
		few = append(few, at(fmt.Sprintf("2001:db8:0:%d::1", i)))
		g.Enter(few[i])
	}
	if mob[2].closed != 1 || mob[3].closed != 0 {
		t.Errorf("closed were %d and %d of the crowd", mob[2].closed, mob[3].closed)
	}
	for i, c := range few {
		if c.closed > 0 {
			t.Errorf("who is alone in network %d was closed", i)
		}
	}
	local := &from{addr: &net.UnixAddr{Name: "x", Net: "unix"}}
	for range 100 {
		g.Enter(local)
	}
	for _, c := range append(mob, few...) {
		g.Leave(c)
		g.Leave(c)
	}
	if len(g.in) > 0 || len(g.by) > 0 || local.closed > 0 {
		t.Errorf("%d connections of %d addresses are left", len(g.in), len(g.by))
	}
}

// TestRefusals: however many connections are refused, the log has some lines, and the number of
// further refusals.
func TestRefusals(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	var r Refusals
	for range 30_000 {
		r.Warn(log, "refused")
	}
	if n := strings.Count(out.String(), "\n"); n != refusalLines {
		t.Errorf("%d lines", n)
	}
	r.since = r.since.Add(-refusalEvery)
	out.Reset()
	r.Warn(log, "refused")
	if want := fmt.Sprint(30_000 - refusalLines); !strings.Contains(out.String(), want) {
		t.Errorf("the next line does not tell of %s more: %s", want, out.String())
	}
}
