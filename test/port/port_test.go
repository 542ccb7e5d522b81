package port

import (
	"net"
	"testing"
)

// What is given out is free, given out once, and not what the kernel gives out.
func TestFree(t *testing.T) {
	seen := map[string]bool{}
	for range 50 {
		addr := Free(t)
		if seen[addr] {
			t.Fatalf("%s twice", addr)
		}
		seen[addr] = true
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	for range 1000 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().String()
		l.Close()
		if seen[addr] {
			t.Fatalf("the kernel gives %s out", addr)
		}
	}
}
