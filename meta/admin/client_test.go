package admin

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
)

// TestSentOnce: a call that a server may have executed is not sent again, although the client
// failed to connect to a server meanwhile. Other calls are.
func TestSentOnce(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{Addrs: []string{"unix:" + l.Addr().String()}, UnsafeResend: os.Getenv("PENSTOCK_CONTROL") == "admin-resend"})
	if err != nil {
		t.Fatal(err)
	}
	var sent atomic.Int32
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
		sent.Add(1)
		c.last.note("elsewhere", meta.E("connect", meta.Unavailable, "elsewhere", errors.New("refused")))
		if sent.Load() > 1 {
			return status.Error(codes.Unimplemented, "the second answer arrives")
		}
		return status.Error(codes.Unavailable, "the first answer is lost")
	}))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := errors.Join(c.Close(), <-served); err != nil {
			t.Error(err)
		}
	})

	_, err = c.Grants.MakeJoinToken(t.Context(), &MakeJoinTokenRequest{})
	if !IsUnanswered(err) || sent.Load() != 1 {
		t.Errorf("MakeJoinToken was sent %d times and returned %v", sent.Load(), err)
	}
	sent.Store(0)
	_, err = c.Grants.ListGrants(t.Context(), &ListGrantsRequest{})
	if !errors.Is(err, meta.NotSupported) || sent.Load() != 2 {
		t.Errorf("ListGrants was sent %d times and returned %v", sent.Load(), err)
	}
}

// TestNotBegunIsAskedAgain: a call that a server refused before beginning is sent to another
// server, also a call that must not be executed twice.
func TestNotBegunIsAskedAgain(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{Addrs: []string{"unix:" + l.Addr().String()}})
	if err != nil {
		t.Fatal(err)
	}
	var sent atomic.Int32
	server := grpc.NewServer(grpc.UnknownServiceHandler(func(any, grpc.ServerStream) error {
		if sent.Add(1) < 3 {
			return StatusOf(NotBegun("m1", errors.New("the server is stopping")))
		}
		return StatusOf(meta.E("call", meta.Busy, "m2", nil))
	}))
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Stop()
		if err := errors.Join(c.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	if _, err := c.Grants.MakeJoinToken(t.Context(), &MakeJoinTokenRequest{}); !errors.Is(err, meta.Busy) || sent.Load() != 3 {
		t.Errorf("MakeJoinToken was sent %d times and returned %v", sent.Load(), err)
	}
}
