package netns

import (
	"context"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Dial connects from the node to a TCP address, which is an IPv4 address with a port. Dial has
// net.Dialer's form, for clients that live in the test's process.
func (n *Node) Dial(ctx context.Context, _, addr string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, err
	}
	fd := -1
	if err := n.Do(func() (err error) {
		// The socket belongs to the node for ever; the connection can be made elsewhere.
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	}); err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), addr)
	defer f.Close() // net.FileConn has a copy
	if err := connect(ctx, fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}); err != nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: net.TCPAddrFromAddrPort(to), Err: err}
	}
	return net.FileConn(f)
}

// connect connects a non-blocking socket.
func connect(ctx context.Context, fd int, to unix.Sockaddr) error {
	if err := unix.Connect(fd, to); err != unix.EINPROGRESS {
		return err
	}
	for {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, err := unix.Poll(poll, 0); n > 0 {
			code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
			if err == nil && code != 0 {
				err = unix.Errno(code)
			}
			return err
		} else if err != nil && err != unix.EINTR {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(time.Millisecond):
		}
	}
}
