// Package port finds TCP ports for processes that are still to be started.
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
	// From lowest on it gives ports.
	lowest = 20_000
	// fewest are left on one side of the kernel's own, or those are given.
	fewest = 1000
)

// held are sockets with the numbers of the ports that this process was given.
var (
	mu   sync.Mutex
	held []net.Listener
)

// Find gives an address of loopback, with a port that nobody listens on and that no
// test's process was given that still runs.
//
// It is none of those that who connects, or listens on port 0, has from the kernel: one of
// those may be somebody else's before the process that it is meant for has begun, or
// while that is down. Only where the kernel leaves too few others it is one of them.
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

// outside gives the larger stretch of ports below first or above last: n ports, none
// if they are too few.
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

// draw tries one of n ports, or one that the kernel gives out.
func draw(from, n int) (addr string, err error) {
	port := 0
	if n > 0 {
		// Its owner may be about to listen: held before it is tried.
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

// hold keeps a port from being given again as long as this process lives: one process
// in a network name space can have an abstract socket of a name.
func hold(port int) error {
	l, err := net.Listen("unix", fmt.Sprint("@penstock-test-port-", port))
	if err != nil {
		return err
	}
	mu.Lock()
	held = append(held, l) // else it is closed when it is collected
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
