// Package port finds TCP ports for processes that will be started later.
package port

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"testing"
)

const (
	// lowest is the lowest port that Find returns.
	lowest = 20_000
	// fewest is the least number of ports on one side of the kernel's own range; with
	// fewer, Find returns ports of the kernel's range.
	fewest = 1000
)

// held are the sockets that reserve the ports given to this process.
var (
	mu   sync.Mutex
	held []net.Listener
)

// Find returns an address of loopback with a port on which no process listens, and which
// was given to no running test process.
//
// The port is outside the range from which the kernel gives ports to clients and to
// listeners on port 0: such a port may be taken by another process before the test's
// process listens, or while that process is down. Only if the kernel leaves too few other
// ports, the port is of the kernel's range.
func Find() (addr string, err error) {
	first, last, err := kernels()
	if err != nil {
		return "", err
	}
	from, n := outside(first, last)
	for range 1000 {
		if addr, err = draw(from, n); err == nil {
			return addr, nil
		}
	}
	return "", fmt.Errorf("no port is free: %w", err)
}

// kernels tells the first and the last of the kernel's own ports.
func kernels() (first, last int, err error) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(b), &first, &last)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("the kernel's own ports: %w", err)
	}
	return first, last, nil
}

// outside returns the larger range of ports below first or above last: n ports from from
// on, or none if both ranges are too small.
func outside(first, last int) (from, n int) {
	above := max(last+1, lowest)
	from, n = lowest, first-lowest
	if 1<<16-above > n {
		from, n = above, 1<<16-above
	}
	if n < fewest {
		return 0, 0
	}
	return from, n
}

// draw tries one of n ports, or a port of the kernel.
func draw(from, n int) (addr string, err error) {
	port := 0
	if n > 0 {
		// The port's owner may be about to listen, so the port is held before it is
		// tried.
		port = from + rand.IntN(n)
		if err := hold(port); err != nil {
			return "", err
		}
	}
	l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
	if err != nil {
		return "", err
	}
	addr = l.Addr().String()
	if n == 0 {
		err = hold(l.Addr().(*net.TCPAddr).Port)
	}
	l.Close()
	return addr, err
}

// hold reserves a port as long as this process lives: only one process in a network name
// space can have an abstract socket of a name.
func hold(port int) error {
	l, err := net.Listen("unix", fmt.Sprint("@penstock-test-port-", port))
	if err != nil {
		return err
	}
	mu.Lock()
	held = append(held, l) // otherwise the garbage collector would close the socket
	mu.Unlock()
	return nil
}

// Free is Find in a test.
func Free(t testing.TB) string {
	t.Helper()
	addr, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}
