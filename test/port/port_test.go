package port

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// many is so large that random draws without a record of earlier draws would give two
// equal ports.
const many = 1000

// printEnv, an environment variable, makes this program print many addresses.
const printEnv = "PENSTOCK_TEST_PORTS"

func TestMain(m *testing.M) {
	if os.Getenv(printEnv) == "" {
		os.Exit(m.Run())
	}
	for range many {
		addr, err := Find()
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(addr)
	}
}

// TestFree: a port is given once, also to two processes, and is not of the kernel's
// range.
func TestFree(t *testing.T) {
	first, last, err := kernels()
	if err != nil {
		t.Fatal(err)
	}
	_, others := outside(first, last)
	seen := map[string]bool{}
	give := func(addr, to string) {
		if seen[addr] {
			t.Errorf("%s is given again, to %s", addr, to)
		}
		seen[addr] = true
		a, err := netip.ParseAddrPort(addr)
		if err != nil || !a.Addr().IsLoopback() {
			t.Fatalf("%s: %v", addr, err)
		}
		if n := int(a.Port()); others > 0 && first <= n && n <= last {
			t.Errorf("%s is one of the kernel's own, %d to %d", addr, first, last)
		}
	}
	for range many {
		give(Free(t), "this process")
	}
	another := exec.Command(os.Args[0])
	another.Env = append(os.Environ(), printEnv+"=1")
	out, err := another.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for addr := range strings.FieldsSeq(string(out)) {
		give(addr, "another")
	}
	if len(seen) != 2*many {
		t.Errorf("%d ports, want %d", len(seen), 2*many)
	}
}

// TestOutside: if the kernel's range begins low, ports above it are given, or ports of
// the range.
func TestOutside(t *testing.T) {
	for _, c := range []struct{ first, last, from, n int }{
		{32768, 60999, 20000, 12768},
		{10000, 40000, 40001, 25535},
		{2000, 3000, 20000, 45536},
		{10000, 65535, 0, 0},
		{1024, 65535, 0, 0},
		{20500, 65000, 0, 0},
	} {
		if from, n := outside(c.first, c.last); from != c.from || n != c.n {
			t.Errorf("%d to %d: %d from %d on, want %d from %d on", c.first, c.last, n, from, c.n, c.from)
		}
	}
	seen := map[string]bool{}
	for range many {
		for {
			addr, err := draw(0, 0) // which may have been given before
			if err == nil {
				if seen[addr] {
					t.Fatalf("%s twice", addr)
				}
				seen[addr] = true
				break
			}
		}
	}
}
