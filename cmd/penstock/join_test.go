package main

import (
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// deaf returns an address that leads to a server and loses the server's last answer:
// after the client's second message, which ends TLS's handshake and has the request,
// nothing comes back.
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

// saying returns the address of a server of a cluster that answers every join with an
// error.
func saying(t *testing.T, creds *peer.Credentials, what error) string {
	t.Helper()
	l, err := peer.ListenJoiners("127.0.0.1:0", creds)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	answer := func(nc net.Conn) error {
		defer nc.Close()
		conn, _, err := peer.Greet(t.Context(), nc)
		if err != nil {
			return err
		}
		rd := wire.NewReader(conn)
		for _, m := range []wire.Message{&wire.Hello{Role: wire.RoleEnrol}, &wire.AdminRe{Status: wire.StatusOf(what)}} {
			_, id, _, err := rd.Next()
			if err != nil {
				return err
			}
			if _, err := conn.Write(wire.Append(nil, wire.Version, id, m)); err != nil {
				return err
			}
		}
		return nil
	}
	go func() {
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			if err := answer(nc); err != nil {
				t.Error(err)
			}
		}
	}()
	return l.Addr().String()
}

// TestJoinAnswerLost: a name whose bearer did not get the answer is not lost: the bearer
// asks again with the same key, at another server or in another process, whatever the
// answers in between were. No other process gets the name. Neither does the bearer with
// that key after its eviction, nor the owner of an old copy of the key after the first
// renewal.
func TestJoinAnswerLost(t *testing.T) {
	_, addr, at := ownMeta(t)
	lost := deaf(t, addr)
	w := where{cluster: []string{addr}}
	w.credentials.credentials = at("c/admin")
	ask := func(call func(admin.GrantsClient) error) {
		t.Helper()
		if err := w.api(t.Context(), func(c *admin.Client) error { return call(c.Grants) }); err != nil {
			t.Fatal(err)
		}
	}
	var token *admin.MakeJoinTokenResponse
	fresh := func() {
		t.Helper()
		ask(func(c admin.GrantsClient) (err error) {
			token, err = c.MakeJoinToken(t.Context(), &admin.MakeJoinTokenRequest{Role: admin.Role_ROLE_CLIENT, Life: durationpb.New(time.Hour)})
			return err
		})
	}
	fresh()
	asks := func(dir string) bool {
		_, err := os.Lstat(at(dir) + "/joining.key")
		return err == nil
	}
	join := func(name, dir string, addrs ...string) error {
		t.Helper()
		id, err := client.Join(t.Context(), addrs, token.Token, name, at(dir))
		switch meta.KindOf(err) {
		case meta.Unavailable:
			if !asks(dir) {
				t.Errorf("join of %s: %v; the key that it asked with is lost", name, err)
			}
		case meta.KindOK, meta.Exists:
			if asks(dir) {
				t.Errorf("join of %s: %v; the key that it asked with stays", name, err)
			}
		}
		if err == nil {
			if have, err := peer.Load(at(dir), nil); err != nil || have.Identity().Name != name || id.Name != name {
				t.Errorf("%s joined as %v, %v", name, id, err)
			}
		}
		return err
	}
	enrolled := func(name string) bool {
		var all *admin.ListMembersResponse
		ask(func(c admin.GrantsClient) (err error) {
			all, err = c.ListMembers(t.Context(), &admin.ListMembersRequest{})
			return err
		})
		return slices.ContainsFunc(all.Members, func(m *admin.Member) bool { return m.Role == admin.Role_ROLE_CLIENT && m.Name == name })
	}

	// In one call: the next server recognises the caller.
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
	ask(func(c admin.GrantsClient) error {
		_, err := c.EvictMember(t.Context(), &admin.EvictMemberRequest{Identity: "client/c"})
		return err
	})
	if err := join("c", "c", addr); meta.KindOf(err) != meta.Exists {
		t.Errorf("who was evicted joins: %v", err)
	}

	// Refused in between, by a server that does not know the first server's answer.
	own, err := peer.Load(at("c/meta"), nil)
	if err != nil {
		t.Fatal(err)
	}
	refusing := saying(t, own, meta.E("join", meta.AccessDenied, "", nil))
	if err := join("d", "d", lost, refusing); meta.KindOf(err) != meta.AccessDenied || !enrolled("d") || !asks("d") {
		t.Fatalf("joined: %t, asks: %t, %v", enrolled("d"), asks("d"), err)
	}
	// The token has ended before the next try.
	ask(func(c admin.GrantsClient) error {
		_, err := c.RevokeJoinToken(t.Context(), &admin.RevokeJoinTokenRequest{Id: token.Id})
		return err
	})
	if err := join("d", "d", addr); meta.KindOf(err) != meta.AccessDenied || !asks("d") {
		t.Fatalf("asks: %t, %v", asks("d"), err)
	}
	// A caller without an earlier request leaves no file.
	if err := join("e", "e", addr); meta.KindOf(err) != meta.AccessDenied {
		t.Error(err)
	}
	if _, err := os.Lstat(at("e")); err == nil {
		t.Error("who was refused at once keeps a directory")
	}
	fresh()
	if err := join("d", "d", addr); err != nil {
		t.Error(err)
	}
	// After a server that is ending, the client asks another server.
	if err := join("f", "f", saying(t, own, meta.E("enrol", meta.Canceled, "", nil)), addr); err != nil {
		t.Error(err)
	}

	// Renewed where a killed process left the key with which it had joined.
	old, err := os.ReadFile(at("a/identity.pem"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(at("copy"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"a", "copy"} {
		if err := os.WriteFile(at(dir)+"/joining.key", old, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	creds, err := peer.Load(at("a"), nil)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := admin.Renew(t.Context(), []string{addr}, creds); err != nil {
			t.Fatal(err)
		}
	}
	if asks("a") {
		t.Error("a renewed directory has the key that it was joined with")
	}
	if err := join("a", "copy", addr); meta.KindOf(err) != meta.Exists {
		t.Errorf("who has an old copy of a renewed key gets a certificate: %v", err)
	}
}
