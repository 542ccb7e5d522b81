package client

import (
	"context"
	"net"
	"testing"
	"time"

	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// TestGreetGivenUpWhileItFails: a handshake may be given up at the moment of its own failure.
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

// TestQuiet: a server's silence counts only while this process ran: a standstill of this
// process says nothing about the server.
func TestQuiet(t *testing.T) {
	t.Parallel()
	const every, silent = 750 * time.Millisecond, 3 * time.Second // of a lease of 6 s
	var q quiet
	heard := int64(1)
	for range 10 {
		if q.passed(every, every, heard) > every {
			t.Fatal("it answers")
		}
		heard++
	}
	for _, stood := range []time.Duration{silent, 5 * time.Second, time.Hour} {
		if n := q.passed(stood, every, heard-1); n >= silent {
			t.Errorf("after a standstill of %v it counts as silent for %v", stood, n)
		}
		heard++ // a message was read meanwhile
		if n := q.passed(every, every, heard-1); n != 0 {
			t.Errorf("it was heard, and counts as silent for %v", n)
		}
	}
	turns := 1
	for q.passed(every, every, heard-1) < silent {
		turns++
	}
	if turns != 4 {
		t.Errorf("silent after %d turns of %v, want %v", turns, every, silent)
	}
}
