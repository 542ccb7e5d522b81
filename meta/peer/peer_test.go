package peer

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"penstock.io/penstock/meta"
)

// pair connects to a listener and greets.
func pair(t *testing.T, addr string, server, client *Credentials) (net.Conn, Identity, error) {
	t.Helper()
	l, err := Listen(addr, server)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, ok := l.(*listener); ok {
		addr = l.Addr().String()
	}
	type greeted struct {
		nc  net.Conn
		id  Identity
		err error
	}
	ch := make(chan greeted, 1)
	go func() {
		nc, err := l.Accept()
		if err != nil {
			ch <- greeted{err: err}
			return
		}
		nc, id, err := Greet(context.Background(), nc)
		ch <- greeted{nc, id, err}
	}()
	nc, err := Dial(t.Context(), addr, client, Meta)
	if err != nil {
		return nil, Identity{}, err
	}
	t.Cleanup(func() { nc.Close() })
	g := <-ch
	if g.err != nil {
		return nil, g.id, g.err
	}
	t.Cleanup(func() { g.nc.Close() })
	return nc, g.id, nil
}

func TestUnixSocketIsTheLocalAdministrator(t *testing.T) {
	_, id, err := pair(t, "unix:"+filepath.Join(t.TempDir(), "s"), nil, nil)
	if err != nil || !id.Local || !id.Anyone() {
		t.Fatalf("%+v, %v", id, err)
	}
}

// --insecure is for a laptop: no other machine can be let in by mistake.
func TestInsecureIsLoopbackOnly(t *testing.T) {
	_, id, err := pair(t, "127.0.0.1:0", Insecure(), Insecure())
	if err != nil || !id.Insecure {
		t.Fatalf("%+v, %v", id, err)
	}
	for _, addr := range []string{":0", "0.0.0.0:0", "[::]:0", "10.1.2.3:0", "nonsense"} {
		if l, err := Listen(addr, Insecure()); meta.KindOf(err) != meta.Invalid {
			t.Errorf("listening on %s without certificates: %v, %v", addr, l, err)
		}
	}
	if _, err := Dial(t.Context(), "192.0.2.1:1", Insecure(), Meta); meta.KindOf(err) != meta.Invalid {
		t.Errorf("dialling another machine without certificates: %v", err)
	}
}

func TestTCPNeedsCredentials(t *testing.T) {
	if _, err := Listen("127.0.0.1:0", nil); meta.KindOf(err) != meta.Invalid {
		t.Error(err)
	}
	if _, err := Dial(t.Context(), "127.0.0.1:1", nil, Meta); meta.KindOf(err) != meta.Invalid {
		t.Error(err)
	}
}

// A connection from outside this package's listeners has no identity.
func TestOtherListenersAreRefused(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Greet(t.Context(), in); meta.KindOf(err) != meta.AccessDenied {
		t.Fatal(err)
	}
}
