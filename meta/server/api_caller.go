package server

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	grpcpeer "google.golang.org/grpc/peer"
	peering "penstock.io/penstock/meta/peer"
)

// calling is a connection on which a caller uses the API.
type calling struct {
	net.Conn
	rest   io.Reader // the bytes already read of Conn, then Conn
	caller caller

	once   sync.Once
	closed chan struct{}
}

// Read reads the bytes already read of Conn, then Conn.
func (c *calling) Read(b []byte) (int, error) { return c.rest.Read(b) }

// Close ends serve.
func (c *calling) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// caller is the AuthInfo of gRPC: the identity at the other end of a connection. sess is not a
// client's session; the server uses sess to look up rights and to pace calls.
type caller struct {
	credentials.CommonAuthInfo
	sess *session
}

// AuthType names this kind of AuthInfo in logs.
func (caller) AuthType() string { return "penstock" }

// knownCaller are transport credentials for connections after their handshake.
type knownCaller struct{}

func (knownCaller) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, ok := conn.(*calling)
	if !ok {
		return nil, nil, errors.New("the connection was not greeted")
	}
	return c, c.caller, nil
}

func (knownCaller) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("these credentials are a server's")
}

func (knownCaller) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "penstock"}
}

func (k knownCaller) Clone() credentials.TransportCredentials { return k }

func (knownCaller) OverrideServerName(string) error { return nil }

// callerOf returns the session of a call's connection.
func callerOf(ctx context.Context) *session {
	p, ok := grpcpeer.FromContext(ctx)
	if ok {
		if c, ok := p.AuthInfo.(caller); ok {
			return c.sess
		}
	}
	panic("server: a call came over a connection that knownCaller did not see")
}

// passedOn is the metadata key under which a metadata server that passes a call on names the
// caller.
const passedOn = "penstock-for"

// passer returns the caller on whose behalf another metadata server passed a call on, or "" if
// the call was not passed on. Only metadata servers may name a caller, and processes on the
// server's own socket, which may act as metadata servers.
func passer(ctx context.Context, by peering.Identity) string {
	if by.Role != peering.Meta && !by.Anyone() {
		return ""
	}
	md, _ := metadata.FromIncomingContext(ctx)
	if v := md.Get(passedOn); len(v) > 0 {
		return v[0]
	}
	return ""
}
