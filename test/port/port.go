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

// From lowest on it gives ports, below those that the kernel gives out by itself.
const lowest = 20_000

var (
	mu    sync.Mutex
	given = map[int]bool{}
)

// Find gives an address of loopback, with a port that nobody listens on and that this
// process was not given before.
//
// It is none of those that who connects, or listens on port 0, has from the kernel: one of
// those may be somebody else's before the process that it is meant for has begun, or
// while that is down.
func Find() (addr string, err error) {
	mu.Lock()
	defer mu.Unlock()
	below := 0
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(b), &below)
	}
	if err != nil {
		return "", fmt.Errorf("the kernel's own ports: %w", err)
	}
	if below < lowest+1000 {
		return "", fmt.Errorf("the kernel's own ports begin at %d, too few are left from %d on", below, lowest)
	}
	for range 1000 {
		n := lowest + rand.IntN(below-lowest)
		if given[n] {
			continue
		}
		addr := fmt.Sprint("127.0.0.1:", n)
		if l, err := net.Listen("tcp", addr); err == nil {
			l.Close()
			given[n] = true
			return addr, nil
		}
	}
	return "", fmt.Errorf("no port from %d to %d is free", lowest, below)
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
