package main

import (
	"encoding/json"
	"io"
	"net"
	"path/filepath"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// deaf is an address at which a server is reached that gets what its client says and
// whose last answer is lost: after the second thing that the client says, which ends
// TLS's handshake and asks, nothing comes back.
func deaf(t *testing.T, server string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", server)
			if err != nil {
				in.Close()
				continue
			}
			asked := make(chan struct{})
			go func() {
				buf := make([]byte, 64<<10)
				for n := 0; ; n++ {
					k, err := in.Read(buf)
					if err != nil {
						out.Close()
						return
					}
					if n == 1 {
						close(asked)
					}
					out.Write(buf[:k])
				}
			}()
			go func() {
				buf := make([]byte, 64<<10)
				for {
					k, err := out.Read(buf)
					if err != nil {
						in.Close()
						return
					}
					select {
					case <-asked:
						io.Copy(io.Discard, out)
						in.Close()
						return
					default:
						in.Write(buf[:k])
					}
				}
			}()
		}
	}()
	return l.Addr().String()
}

// TestJoinAnswerLost: a name whose bearer did not hear that it has it is not lost: it
// asks again with the same key, at another server or in another life. Nobody else gets
// the name, nor does its bearer with that key after it was evicted.
func TestJoinAnswerLost(t *testing.T) {
	_, addr, at := ownMeta(t)
	lost := deaf(t, addr)
	w := where{cluster: []string{addr}}
	w.credentials.credentials = at("c/admin")
	admin := func(m wire.Admin, report any) {
		t.Helper()
		if err := w.with(t.Context(), func(s *client.Session) error {
			re, err := s.Admin(t.Context(), m)
			if err == nil && report != nil {
				err = json.Unmarshal(re.Report, report)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	var token wire.TokenAnswer
	admin(wire.Admin{Op: wire.AdminMakeToken, Body: []byte(`{"role":"client","seconds":3600}`)}, &token)
	join := func(name, dir string, addrs ...string) error {
		t.Helper()
		id, err := client.Join(t.Context(), addrs, token.Token, name, at(dir))
		left, e := filepath.Glob(at(dir) + "/joining.key")
		if e != nil {
			t.Fatal(e)
		}
		if asks := meta.KindOf(err) == meta.Unavailable; asks != (len(left) > 0) {
			t.Errorf("join of %s: %v; the key that it asked with: %q", name, err, left)
		}
		if err == nil {
			if have, err := peer.Load(at(dir), nil); err != nil || have.Identity().Name != name || id.Name != name {
				t.Errorf("%s joined as %v, %v", name, id, err)
			}
		}
		return err
	}
	enrolled := func(name string) bool {
		var all []cluster.Member
		admin(wire.Admin{Op: wire.AdminMembers}, &all)
		return slices.ContainsFunc(all, func(m cluster.Member) bool { return m.Role == peer.Client && m.Name == name })
	}

	// In one call: the next server knows who asks.
	if err := join("a", "a", lost, addr); err != nil {
		t.Error(err)
	}
	// In the next life.
	if err := join("b", "b", lost); meta.KindOf(err) != meta.Unavailable || !enrolled("b") {
		t.Fatalf("joined: %t, %v", enrolled("b"), err)
	}
	if err := join("b", "elsewhere", addr); meta.KindOf(err) != meta.Exists {
		t.Errorf("who has another key gets the name: %v", err)
	}
	if err := join("b", "b", addr); err != nil {
		t.Error(err)
	}
	if err := join("b", "b", addr); meta.KindOf(err) != meta.Exists {
		t.Errorf("credentials that are there are overwritten: %v", err)
	}
	// Evicted meanwhile.
	if err := join("c", "c", lost); meta.KindOf(err) != meta.Unavailable || !enrolled("c") {
		t.Fatalf("joined: %t, %v", enrolled("c"), err)
	}
	admin(wire.Admin{Op: wire.AdminEvict, Name: "client/c"}, nil)
	if err := join("c", "c", addr); meta.KindOf(err) != meta.Exists {
		t.Errorf("who was evicted joins: %v", err)
	}
}
