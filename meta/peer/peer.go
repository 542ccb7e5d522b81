// Package peer connects the parts of a cluster and identifies the peers of connections:
// addresses, listeners, dialling, certificates.
//
// An address is "unix:/path" or "host:port". Over a Unix socket the peer is the administrator
// of this machine: the kernel reports the user of the peer's process, and only root and this
// process's user are accepted. Over TCP both sides show certificates (mutual TLS, version
// 1.3), and the peer is the identity in its certificate. Insecure credentials work without
// certificates, on the loopback interface only.
package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// Role is the function of a part in its cluster.
type Role string

// The roles in certificates.
const (
	Meta        Role = "meta"        // a metadata server
	ChunkServer Role = "chunkserver" // a chunk server
	Client      Role = "client"      // a mount, a program with the client library
	Admin       Role = "admin"       // an administrator's commands
	Gateway     Role = "gateway"     // a server of streams for clients of other protocols
)

// Granted reports whether grants say what the bearers of certificates of the role may do on
// volumes.
func (r Role) Granted() bool { return r == Client || r == Gateway }

// Identity identifies the peer of a connection.
type Identity struct {
	Cluster string    // cluster id in the certificate; "" without a certificate
	Role    Role      // "" without a certificate: the peer may only join
	Name    string    // unique among the names of its role
	Begins  time.Time // of the certificate, clocks aside
	Expires time.Time
	// Admission counts how often the name was admitted again after an eviction, as the
	// certificate says. Certificates of earlier admissions are void.
	Admission uint32
	// Local: the connection is a Unix socket of this machine, and the peer runs as root or as
	// this process's user. The peer may act in any role.
	Local bool
	// Insecure: plain TCP over loopback, without any proof. The peer may act in any role, too:
	// with such servers, every user of the machine is trusted.
	Insecure bool
}

// Anyone reports whether the peer may speak as any role.
func (i Identity) Anyone() bool { return i.Local || i.Insecure }

// Same reports whether both are the same peer.
func (i Identity) Same(j Identity) bool {
	i.Begins, j.Begins = time.Time{}, time.Time{}
	i.Expires, j.Expires = time.Time{}, time.Time{}
	return i == j
}

// String returns the identity for people, and for binding capabilities: "role/name", or the
// origin of the connection.
func (i Identity) String() string {
	switch {
	case i.Local:
		return "local"
	case i.Insecure:
		return "insecure"
	case i.Role == "":
		return "stranger"
	}
	return string(i.Role) + "/" + i.Name
}

// handshakeWait bounds a handshake, of a stranger above all.
const handshakeWait = 10 * time.Second

// Listen listens on "unix:/path" with mode 0600, or on "host:port". Listen removes an
// unanswered socket, left by a crash. The caller must pass each accepted connection to Greet
// before reading from the connection. Errors: Busy, Invalid (the address, or TCP without
// credentials), NameTooLong, IO.
func Listen(addr string, creds *Credentials) (net.Listener, error) {
	return listen(addr, creds, listener{})
}

// ListenJoiners is Listen for metadata servers. Greet also accepts strangers, whose Identity
// has no role. A stranger may only show a join token.
func ListenJoiners(addr string, creds *Credentials) (net.Listener, error) {
	return listen(addr, creds, listener{joiners: true})
}

// ListenTicketed is Listen for chunk servers. Greet also accepts plain connections, whose
// Identity has no role. The peer of a plain connection may only show a ticket, which the
// server gave to the peer over TLS.
func ListenTicketed(addr string, creds *Credentials) (net.Listener, error) {
	return listen(addr, creds, listener{tickets: true})
}

func listen(addr string, creds *Credentials, as listener) (net.Listener, error) {
	const op = "listen"
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		return ListenUnix("unix", path)
	}
	if creds == nil {
		return nil, meta.E(op, meta.Invalid, addr, errors.New("TCP needs credentials; give --credentials, or --insecure for a loopback address"))
	}
	if creds.insecure {
		if err := loopbackOnly(addr); err != nil {
			return nil, meta.E(op, meta.Invalid, addr, err)
		}
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, meta.E(op, meta.Busy, addr, err)
	}
	as.Listener, as.creds = l, creds
	return &as, nil
}

// ListenUnix listens on a free path, for processes of this user and root. network is "unix" or
// "unixpacket". Errors: Busy (another process answers at path), NameTooLong, IO.
func ListenUnix(network, path string) (*net.UnixListener, error) {
	const op = "listen"
	if len(path) > 107 {
		return nil, meta.E(op, meta.NameTooLong, path, fmt.Errorf("a socket's path has at most 107 bytes, this one has %d: choose a shorter one", len(path)))
	}
	addr := &net.UnixAddr{Name: path, Net: network}
	if c, err := net.DialUnix(network, nil, addr); err == nil {
		c.Close()
		return nil, meta.E(op, meta.Busy, path, errors.New("another process answers on this socket"))
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, meta.E(op, meta.IO, path, err)
	}
	l, err := net.ListenUnix(network, addr)
	if err != nil {
		return nil, meta.E(op, meta.IO, path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, meta.E(op, meta.IO, path, err)
	}
	return l, nil
}

// loopbackOnly refuses an address reachable from another machine.
func loopbackOnly(addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	ips := []net.IP{net.ParseIP(host)}
	if ips[0] == nil {
		if host == "" {
			return errors.New("without certificates only a loopback address may be used, not all of the machine's")
		}
		if ips, err = net.LookupIP(host); err != nil {
			return err
		}
	}
	for _, ip := range ips {
		if !ip.IsLoopback() {
			return fmt.Errorf("without certificates only loopback addresses may be used, and %s is none", ip)
		}
	}
	return nil
}

// listener attaches the server's credentials to accepted connections, for Greet.
type listener struct {
	net.Listener
	creds   *Credentials
	joiners bool
	tickets bool
}

func (l *listener) Accept() (net.Conn, error) {
	nc, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &accepted{Conn: nc, l: l}, nil
}

// accepted is a TCP connection before Greet.
type accepted struct {
	net.Conn
	l       *listener
	greeted atomic.Bool
}

// Greet identifies the peer of an accepted connection. The server calls Greet before any other
// use of the connection, in a separate goroutine, because a stranger may delay Greet for
// seconds. The server then uses the returned connection: a *net.UnixConn, a *net.TCPConn or a
// *tls.Conn. After an error the connection is closed. Errors: AccessDenied.
func Greet(ctx context.Context, nc net.Conn) (net.Conn, Identity, error) {
	got, id, err := greet(ctx, nc)
	if err != nil {
		nc.Close()
		return nil, Identity{}, meta.E("greet peer", meta.AccessDenied, nc.RemoteAddr().String(), err)
	}
	return got, id, nil
}

func greet(ctx context.Context, nc net.Conn) (net.Conn, Identity, error) {
	switch c := nc.(type) {
	case *net.UnixConn:
		uid, err := peerUID(c)
		if err != nil {
			return nil, Identity{}, err
		}
		if uid != 0 && int(uid) != os.Geteuid() {
			return nil, Identity{}, fmt.Errorf("user %d of this machine", uid)
		}
		return c, Identity{Local: true}, nil
	case *accepted:
		if c.greeted.Swap(true) {
			return nil, Identity{}, errors.New("greeted twice")
		}
		return c.l.greet(ctx, c.Conn)
	}
	return nil, Identity{}, errors.New("it came through no listener of ours")
}

// tlsRecord is the first byte of a TLS connection.
const tlsRecord = 0x16

func (l *listener) greet(ctx context.Context, nc net.Conn) (net.Conn, Identity, error) {
	if !l.creds.insecure {
		early, cancel := context.WithTimeout(ctx, firstByteWait)
		first, err := peek(early, nc)
		cancel()
		if err != nil {
			return nil, Identity{}, err
		}
		if l.tickets && first != tlsRecord {
			return nc, Identity{}, nil
		}
	}
	return l.creds.server(ctx, nc, l.joiners)
}

// peek waits for the first byte of a connection, and returns the byte without consuming it.
func peek(ctx context.Context, nc net.Conn) (byte, error) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return 0, errors.New("not a socket")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, err
	}
	defer context.AfterFunc(ctx, func() { nc.SetReadDeadline(time.Unix(1, 0)) })()
	var b [1]byte
	var n int
	var serr error
	err = raw.Read(func(fd uintptr) bool {
		n, _, serr = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK)
		return serr != unix.EAGAIN && serr != unix.EINTR
	})
	switch err = errors.Join(err, serr); {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return b[0], nil
}

// peerUID is the user id of the process at the other end of a Unix socket.
func peerUID(c *net.UnixConn) (uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var serr error
	err = raw.Control(func(fd uintptr) { cred, serr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(err, serr); err != nil {
		return 0, err
	}
	return cred.Uid, nil
}

// Dial connects to a part of the cluster. Over TLS the peer's certificate must have the given
// role. The connection is a *net.UnixConn, a *net.TCPConn or a *tls.Conn. Errors: Unavailable,
// Invalid (TCP without credentials), AccessDenied (the peer has another identity, or refuses
// the own certificate).
func Dial(ctx context.Context, addr string, creds *Credentials, role Role) (net.Conn, error) {
	const op = "dial"
	var d net.Dialer
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		nc, err := d.DialContext(ctx, "unix", path)
		if err != nil {
			return nil, meta.E(op, meta.Unavailable, addr, err)
		}
		return nc, nil
	}
	if creds == nil {
		return nil, meta.E(op, meta.Invalid, addr, errors.New("TCP needs credentials; give --credentials, or --insecure for a loopback address"))
	}
	if creds.insecure {
		if err := loopbackOnly(addr); err != nil {
			return nil, meta.E(op, meta.Invalid, addr, err)
		}
	}
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, meta.E(op, meta.Unavailable, addr, err)
	}
	if creds.insecure {
		return nc, nil
	}
	t, err := creds.client(ctx, nc, role)
	if err != nil {
		nc.Close()
		return nil, meta.E(op, handshakeKind(err), addr, err)
	}
	return t, nil
}

// DialPlain connects for a ticketed connection.
func DialPlain(ctx context.Context, addr string) (net.Conn, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, meta.E("dial", meta.Unavailable, addr, err)
	}
	return nc, nil
}

// handshakeKind returns Unavailable if the connection was lost, and AccessDenied if either
// side refused the other.
func handshakeKind(err error) meta.Kind {
	var lost net.Error
	switch {
	case Refused(err):
		return meta.AccessDenied
	case errors.As(err, &lost), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return meta.Unavailable
	}
	return meta.AccessDenied
}

// Refused reports whether a connection's error says that the peer refused the own certificate.
// The error may come only with the first read: the own side of the handshake ends before the
// peer has checked the certificate.
func Refused(err error) bool {
	// crypto/tls does not export the type of alerts; an alert is a net.OpError with this Op.
	var alert *net.OpError
	return errors.As(err, &alert) && alert.Op == "remote error"
}
