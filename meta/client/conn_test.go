package client

import (
	"context"
	"net"
	"testing"
	"time"

	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// A handshake may be given up at the moment at which it fails by itself.
func TestGreetGivenUpWhileItFails(t *testing.T) {
	ln, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				b := make([]byte, 64)
				_, _ = c.Read(b)
				c.Close() // no answer
			}()
		}
	}()
	cfg := &Config{Creds: peer.Insecure()}
	for i := range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*time.Microsecond)
		if nc, _, _, _, err := cfg.greet(ctx, "unix:"+ln.Addr().String(), wire.Hello{}); err == nil {
			t.Fatal("greeted", nc)
		}
		cancel()
	}
}
