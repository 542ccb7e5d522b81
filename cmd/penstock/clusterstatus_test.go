package main

import (
	"bytes"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"penstock.io/penstock/meta"
)

// TestClusterStatusWithoutServer: where no metadata server answers, 'penstock cluster status' ends
// with the error of one connection, and does not wait for a second one that asks for the health.
func TestClusterStatusWithoutServer(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var said bytes.Buffer // all that callers send to the server, which never answers
	var served sync.WaitGroup
	served.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			served.Go(func() {
				defer nc.Close()
				for b := make([]byte, 4096); ; {
					n, err := nc.Read(b)
					mu.Lock()
					said.Write(b[:n])
					mu.Unlock()
					if err != nil {
						return
					}
				}
			})
		}
	})
	cmd := newClusterStatus()
	cmd.SetArgs([]string{"--cluster", ln.Addr().String(), "--insecure"})
	cmd.SetOut(io.Discard)
	cmd.SetErr(io.Discard)
	cmd.SilenceUsage = true
	err = cmd.ExecuteContext(t.Context())
	ln.Close()
	served.Wait()
	if meta.KindOf(err) != meta.Unavailable || !strings.Contains(err.Error(), "no answer from") {
		t.Errorf("cluster status: %v", err)
	}
	if said.Len() == 0 {
		t.Error("no caller came")
	}
	if strings.Contains(said.String(), "penstock health") {
		t.Error("the command asked for the health although no server had answered")
	}
}
